"""The text and tables of a report page, method cards included; its script draws the rest from the data."""

from __future__ import annotations

import ast
import inspect
import math
import re
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import tomli_w

from ..methods import METHODS, WRAPPERS
from ..methods.base import Method
from ..record import is_number
from ..runs.directory import CODE, RunDir
from ..utils.files import read_json, read_text
from ..utils.registry import file_of
from ..utils.tables import flat
from .comparison import Comparison, Look
from .html import Html, element, folded, join, table
from .page_data import answer
from .run_files import Row, RunFiles, measured, short, spread
from .statistics import METRICS, OTHER_DATA, YES, gaps

SHARPNESS = {
    "loss": "training loss",
    "gradient_norm": "gradient norm",
    "eigenvalue": "largest eigenvalue",
    "sam_gap": "SAM gap",
    "dissimilarity": "dissimilarity",
    "divergence": "divergence",
}
FINGERPRINTS = {"data_fingerprint": "data sets", "parameters": "model sizes"}
MOST = 1_000_000
"""The most characters that are read of a file with a method."""


# --- the verdict ---


def verdict(found: Comparison) -> Html:
    """Return a sentence and the table, with the best of every column in bold; before a run is finished, only the
    sentence."""
    if not any(row.runs for row in found.rows):
        return element("p", sentence(found, "", {}), class_="lead")
    key, lowest = METRICS[measured(found.rows)][0], measured(found.rows) == "test_loss"
    ranked = [row for row in found.rows if not row.diverged and not any(other.at_goal for other in found.rows)]
    scores = {row.label: sum(v) / len(v) for row in ranked if (v := row.values(key))}
    best = (min if lowest else max)(scores, key=lambda label: scores[label]) if scores else ""
    scroll = _results(found, "results", id="verdict-table")
    tied = " Bold: the best of a column, and what the seeds do not distinguish from it."
    note = f"{found.note[0].upper()}{found.note[1:]}".replace("+-", "±")
    below = element("p", f"{note}.{tied if found.leaders else ''}", class_="note")
    settings = element("p", f"{found.settings[:1].upper()}{found.settings[1:]}.", class_="note", id="settings")
    whole = Comparison(found.rows, found.targets, found.baseline, Look("all"))
    rest = [folded("All columns", _results(whole, "all results"))] if len(whole.columns) > len(found.columns) else []
    return join([element("p", sentence(found, best, scores), class_="lead"), scroll, below, *rest, settings])


def _results(found: Comparison, label: str, **attributes: Any) -> Html:
    """Return the table, the best of every column in bold."""
    header, lines = found.table
    shown = []
    for i, (name, *cells) in enumerate(lines):
        texts = [cell.replace("+-", "±") for cell in cells]
        bold = [element("b", text) if (i, j) in found.leaders else text for j, text in enumerate(texts)]
        shown.append((join([element("span", class_="swatch", data_row=str(i)), name]), *bold))
    return table(header, shown, "numbers", label=label, **attributes)


def sentence(found: Comparison, best: str, scores: dict[str, float]) -> str:
    """Return which method is best, by how much, and whether that is real."""
    if any(row.at_goal for row in found.rows):
        return "Runs were stopped at a score: compare what they needed to reach it, not their last scores."
    if not best:
        return "No run is finished yet: there is nothing to compare."
    lowest = measured(found.rows) == "test_loss"
    scale, digits, unit = (1.0, 4, "") if lowest else (100.0, 2, "%")
    what = "lowest test loss" if lowest else "highest accuracy (mean of the last five evaluations)"
    start = f"{best} has the {what}: {short(scale * scores[best], digits)}{unit}"
    rival = found.baseline if best != found.baseline else ""
    if not rival:
        others = {label: score for label, score in scores.items() if label != best}
        rival = (min if lowest else max)(others, key=lambda label: others[label]) if others else ""
    if not rival or rival not in scores:
        return f"{start}."
    key = METRICS[measured(found.rows)][0]
    gap = next(gap for gap in gaps(found.rows, rival) if gap.method == best and gap.metric == key)
    if gap.mean is None:
        return f"{start}. It has no seed in common with {rival}."
    if gap.real == OTHER_DATA:
        return f"{start}. {rival} was run on other data: the difference does not compare the methods."
    by = f"{short(abs(scale * gap.mean), digits)}{'' if lowest else ' points'}"
    bounds = ""
    if math.isfinite(gap.low):
        bounds = f" (95% interval {short(scale * gap.low, digits)} to {short(scale * gap.high, digits)})"
    side = "better than" if (gap.mean < 0) == lowest and gap.mean else "from"
    real = "The difference is real." if gap.real == YES else f"Is that real? {answer(gap)[0].upper()}{answer(gap)[1:]}."
    return f"{start}, {by} {side} {rival}{bounds}. {real}{_second(found, best, rival, scores)}{_price(found, best)}"


def _second(found: Comparison, best: str, rival: str, scores: dict[str, float]) -> str:
    """Return the runner-up, where the sentence so far compares with another method."""
    lowest = measured(found.rows) == "test_loss"
    order = sorted((label for label in scores if label != best), key=lambda label: scores[label], reverse=not lowest)
    if not order or order[0] == rival:
        return ""
    shown = short(scores[order[0]]) if lowest else f"{short(100 * scores[order[0]], 2)}%"
    return f" The runner-up is {order[0]} ({shown})."


def _price(found: Comparison, best: str) -> str:
    """Return the cost of the best method relative to the baseline."""
    if best == found.baseline:
        return ""
    ours, theirs = (next(row for row in found.rows if row.label == label) for label in (best, found.baseline))
    parts = []
    for key, words in (("grad_evals", "gradients"), ("bytes", "MB")):
        mine, base = ours.values(key), theirs.values(key)
        if mine and base and sum(base):
            ratio = f"{statistics.fmean(mine) / statistics.fmean(base):.2g}"
            parts.append(f"the same {words}" if ratio == "1" else f"{ratio} times the {words}")
    return f" Its price: {' and '.join(parts)} of {found.baseline}." if parts else ""


# --- warnings ---


def warnings(rows: Sequence[Row], left_out: Sequence[str], statuses: bool = True) -> list[str]:
    """Return the reasons why runs cannot be compared, and (`statuses`) which did not finish."""
    runs = [run for row in rows for run in row.runs]
    found = []
    for key, name in FINGERPRINTS.items():
        seeds: dict[int, set[str]] = {}
        for run in runs:
            if key in run.summary:
                seeds.setdefault(int(run.summary["seed"]), set()).add(str(run.summary[key]))
        if any(len(values) > 1 for values in seeds.values()):
            found.append(f"These runs have different {name}: differences between them mean little.")
    for key in ("fedspeed", "torch", "cpu"):
        versions = sorted({str(env[key]) for run in runs if key in (env := _table(run, "environment"))})
        if len(versions) > 1:
            found.append(f"These runs were made with different {key}: {', '.join(versions)}.")
    if any(len(row.runs) == 1 for row in rows):
        found.append("Some methods have one seed only: there is no interval, so their differences may be chance.")
    not_done = [run for run in runs if run.summary["status"] != "finished"] if statuses else []
    found += [f"{run.path.name}: {run.summary['status']}" for run in not_done]
    return found + [f"Left out: {reason}" for reason in left_out]


def _table(run: RunFiles, key: str) -> dict[str, object]:
    """Return a table of the summary; empty if it is missing."""
    found = run.summary.get(key)
    return found if isinstance(found, dict) else {}


# --- sharpness, configs, provenance ---


def sharpness(rows: Sequence[Row]) -> Html:
    """Return the numbers of `fedspeed inspect`, mean and deviation over seeds; nothing if it was not run."""
    lines = []
    for row in rows:
        asked = [read_json(RunDir(run.path).inspection_file) for run in row.runs]
        values = {key: [float(one[key]) for one in asked if is_number(one.get(key))] for key in SHARPNESS}
        if any(values.values()):
            lines.append((row.label, *(spread(values[key], digits=4).replace("+-", "±") for key in SHARPNESS)))
    return table(("method", *SHARPNESS.values()), lines, "numbers") if lines else Html("")


def configs(rows: Sequence[Row]) -> Html:
    """Return the differences between the configs, and each config in full."""
    kinds = [flat({key: v for key, v in row.runs[0].config.items() if key not in ("format", "seed")}) for row in rows]
    keys = [key for key in dict.fromkeys(key for kind in kinds for key in kind) if len(_values(kinds, key)) > 1]
    keys = [key for key in keys if key != "method.name"]
    lines = [(row.label, *(str(kind.get(key, "-")) for key in keys)) for row, kind in zip(rows, kinds, strict=True)]
    same = element("p", "Nothing but method and seed.", class_="note")
    shown = table(("method", *keys), lines, "plain") if keys else same
    full = [
        folded(row.label, element("pre", tomli_w.dumps(row.runs[0].config), tabindex="0"), *_seeds(row)) for row in rows
    ]
    return join([shown, folded("Full configs", *full)])


def _values(kinds: list[dict[str, object]], key: str) -> set[str]:
    return {str(kind.get(key, "-")) for kind in kinds}


def _seeds(row: Row) -> list[Html]:
    seeds = ", ".join(str(run.summary["seed"]) for run in row.runs)
    return [element("p", f"seeds {seeds}; the config is that of the first", class_="note")] if row.runs[1:] else []


def provenance(rows: Sequence[Row]) -> Html:
    """Return the environment and fingerprints of every run, and the command that repeats it."""
    runs = [(row.label, run) for row in rows for run in row.runs]
    lines = [
        (
            run.path.name,
            label,
            str(run.summary["seed"]),
            str(run.summary["status"]).splitlines()[0],
            *(str(run.summary.get(key, "-")) for key in ("data_fingerprint", "split_fingerprint")),
            *(str(_table(run, "digests").get(key) or "-")[:16] for key in ("model", "rounds")),
            " ".join(str(run.summary[key]) for key in ("engine", "backend", "workers") if key in run.summary) or "-",
            repeat(run),
        )
        for label, run in runs
    ]
    header = ("run", "method", "seed", "status", "data", "split", "model", "rounds", "computed by", "repeat it")
    made_on = dict.fromkeys(
        ", ".join(f"{key} {value}" for key, value in _table(run, "environment").items()) for _, run in runs
    )
    places = [element("li", text) for text in made_on if text]
    about = "Fingerprints of data and split, digests of model and rounds; equal ones mean equal bits."
    check = "`fedspeed verify RUN` recomputes them, `fedspeed diff A B` says what differs."
    return join(
        [
            element("p", f"{about} {check}", class_="note"),
            element("ul", *places) if places else "",
            table(header, lines, "plain small"),
        ]
    )


def repeat(run: RunFiles) -> str:
    """Return the command that repeats a run, bit for bit."""
    given = any(flat(run.config).get(f"{table}.name") == "given" for table in ("model", "data"))
    if given:
        return "from Python: simulate(..., out=...) with the same objects"
    return shlex.join(["fedspeed", "run", str(RunDir(run.path).config_file), "--out", f"runs/{run.path.name}-again"])


# --- methods ---


def cards(rows: Sequence[Row]) -> Html:
    """Return one card per method of the rows, methods inside wrappers included."""
    found: dict[str, tuple[RunFiles, list[dict[str, Any]]]] = {}
    for row in rows:
        given: Any = row.runs[0].config["method"]
        while isinstance(given, dict) and isinstance(given.get("name"), str):
            found.setdefault(given["name"], (row.runs[0], []))[1].append(given)
            given = given.get("base")
            given = {"name": given} if isinstance(given, str) else given
    return join(_card(name, run, used) for name, (run, used) in found.items())


def _card(name: str, run: RunFiles, used: list[dict[str, Any]]) -> Html:
    cls = (METHODS | WRAPPERS).get(name)
    text = inspect.cleandoc(cls.__doc__ or "") if cls else _own_docstring(run, name)
    title = name if cls else f"{name.rpartition(':')[2]}, a custom method"
    box, reference = _parts(text)
    first, _, rest = box.partition("\n")
    parts = [element("p", first or "It has no docstring.", class_="lead")]
    parts += [element("pre", rest.strip("\n"), class_="box", tabindex="0")] if rest.strip() else []
    parts += [element("p", f"Reference: {reference}")] if reference else []
    parts += [_fields(cls, used)] if cls else []
    if cls and cls.released:
        sets = ", ".join(f"{key} = {value}" for key, value in cls.released.items())
        parts.append(element("p", f"Paper versus code: the authors' code runs {sets} (--preset released)."))
    return element("article", folded(title, *parts), class_="card")


def _parts(text: str) -> tuple[str, str]:
    """Return a docstring without arguments and examples, and its reference."""
    text, _, reference = text.partition("\nReference:")
    text = re.sub(r"(?ms)^(Args|Example):\n.*?(?=^\S|\Z)", "", text)
    return text.strip(), " ".join(reference.split())


def _fields(cls: type[Method], used: list[dict[str, Any]]) -> Html:
    default = cls.from_fields({}).to_dict()
    lines = []
    for field in fields(cls):
        values = dict.fromkeys(_shown(given.get(field.name, default.get(field.name))) for given in used)
        usual = _shown(default.get(field.name))
        lines.append((field.name, ", ".join(values), usual, str(field.metadata.get("about", ""))))
    return table(("field", "here", "default", "meaning"), lines, "plain") if lines else Html("")


def _shown(value: Any) -> str:
    return str(value.get("name")) if isinstance(value, dict) else str(value)


def _own_docstring(run: RunFiles, name: str) -> str:
    """Return the docstring of a class in the run's copy of a file, which is parsed and not executed."""
    file, inner = file_of(name), name.rpartition(":")[2]
    if not file:
        return ""
    folder = RunDir(run.path).code
    path = folder / file.replace("\\", "/").rpartition(f"{CODE}/")[2]
    try:
        inside = path.resolve().is_relative_to(folder.resolve()) and not path.is_symlink()
        tree = ast.parse(read_text(path, MOST)) if inside else ast.Module([], [])
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return ""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == inner]
    return (ast.get_docstring(classes[0]) or "") if classes else ""
