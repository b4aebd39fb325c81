"""The report page: one HTML file without external resources, its text and tables, method cards included.

The page's script draws the rest from the data (`page_data`). Text is escaped; only `Html` is taken as it is.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import html
import inspect
import math
import re
import shlex
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import fields
from importlib import resources
from string import Template
from typing import Any

import tomli_w

from .. import __version__
from ..methods import METHODS, WRAPPERS
from ..methods.base import Method
from ..record import is_number
from ..runs.directory import CODE, RunDir
from ..utils.files import flat, read_json, read_text
from ..utils.registry import file_of
from .comparison import Comparison, Look
from .labels import besides_method
from .page_data import answer, embed, script
from .run_files import Row, RunFiles, inner, measured, seeds_of, setting, short, spread
from .statistics import METRICS, OTHER_DATA, YES, gaps


class Html(str):
    """Text that is already HTML."""

    __slots__ = ()


def element(name: str, *children: str, **attributes: str) -> Html:
    """Return an element with its children; `class_` is the attribute `class`, `data_x` is `data-x`.

    Example:
        >>> element("p", "a < b", element("b", "c"), class_="x")
        '<p class="x">a &lt; b<b>c</b></p>'
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(visible(value))}"' for key, value in attributes.items()
    )
    return Html(f"<{name}{given}>{join(children)}</{name}>")


def join(parts: Iterable[str]) -> Html:
    """Join parts, escaping those that are not HTML."""
    return Html("".join(part if isinstance(part, Html) else html.escape(visible(part), quote=False) for part in parts))


def visible(text: str) -> str:
    """Replace control characters and those that reverse the direction of text."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def table(
    header: Sequence[str],
    lines: Iterable[Sequence[str]],
    class_: str = "",
    label: str = "table",
    tall: bool = False,
    **attributes: str,
) -> Html:
    """Return a table in a scrolling box; the first cell of a line is its heading.

    Args:
        label: the name of the box for screen readers.
        tall: also limit the height of the box.
    """
    head = element("tr", *(element("th", title, scope="col") for title in header))
    body = [
        element("tr", element("th", first, scope="row"), *(element("td", cell) for cell in cells))
        for first, *cells in lines
    ]
    made = element("table", element("thead", head), element("tbody", *body), class_=class_, **attributes)
    box = "scroll tall" if tall else "scroll"
    return element("div", made, class_=box, tabindex="0", role="region", aria_label=label)


def folded(title: str, *children: str) -> Html:
    """Return a closed section that the reader can open."""
    return element("details", element("summary", title), *children)


SHARPNESS = {
    "loss": "training loss",
    "gradient_norm": "gradient norm",
    "eigenvalue": "largest eigenvalue",
    "sam_gap": "SAM gap",
    "dissimilarity": "dissimilarity",
    "divergence": "divergence",
}
FINGERPRINTS = {"data_fingerprint": "data sets", "parameters": "model sizes"}
PROBLEM = (
    *("data", "split", "clients", "active", "cohort", "weighting", "augment", "model", "dropout", "stragglers"),
    *("rounds", "local_epochs", "local_steps", "batch_size"),
)
"""Tables and keys of what is trained and for how long: what methods must share to be compared. Rates may be tuned."""
MOST = 1_000_000
"""The most characters that are read of a file with a method."""


# --- the verdict ---


def verdict(found: Comparison) -> Html:
    """Return a sentence and the table, with the best of every column in bold; before a run is finished, only the
    sentence."""
    lead = element("p", sentence(found), class_="lead")
    if not any(row.runs for row in found.rows):
        return lead
    scroll = _results(found, "results", id="verdict-table")
    tied = " Bold: the best of a column, and what the seeds do not distinguish from it."
    note = f"{found.note[0].upper()}{found.note[1:]}".replace("+-", "±")
    below = element("p", f"{note}.{tied if found.leaders else ''}", class_="note")
    settings = element("p", f"{found.settings[:1].upper()}{found.settings[1:]}.", class_="note", id="settings")
    whole = Comparison(found.rows, found.targets, found.baseline, Look("all"))
    rest = [folded("All columns", _results(whole, "all results"))] if len(whole.columns) > len(found.columns) else []
    return join([lead, scroll, below, *rest, settings])


def _results(found: Comparison, label: str, **attributes: Any) -> Html:
    """Return the table, the best of every column in bold."""
    header, lines = found.table
    shown = []
    for i, (name, *cells) in enumerate(lines):
        texts = [cell.replace("+-", "±") for cell in cells]
        bold = [element("b", text) if (i, j) in found.leaders else text for j, text in enumerate(texts)]
        shown.append((join([element("span", class_="swatch", data_row=str(i)), name]), *bold))
    return table(header, shown, "numbers", label=label, **attributes)


def sentence(found: Comparison) -> str:
    """Return which method is best, by how much, whether that is real, the runner-up and the price."""
    if any(row.at_goal for row in found.rows):
        return "Runs were stopped at a score: compare what they needed to reach it, not their last scores."
    key, lowest = METRICS[measured(found.rows)][0], measured(found.rows) == "test_loss"
    scores = {row.label: sum(v) / len(v) for row in found.rows if not row.diverged and (v := row.values(key))}
    if not scores:
        return "No run is finished yet: there is nothing to compare."
    best, *others = sorted(scores, key=lambda label: scores[label], reverse=not lowest)
    scale, digits, unit = (1.0, 4, "") if lowest else (100.0, 2, "%")
    what = "lowest test loss" if lowest else "highest accuracy (mean of the last five evaluations)"
    start = f"{best} has the {what}: {short(scale * scores[best], digits)}{unit}"
    second = next(iter(others), "")
    rival = second if best == found.baseline else found.baseline
    if rival not in scores:
        return f"{start}."
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
    after = "" if second == rival else f" The runner-up is {second} ({short(scale * scores[second], digits)}{unit})."
    return f"{start}, {by} {side} {rival}{bounds}. {real}{_confounded(found, best, rival)}{after}{_price(found, best)}"


def _confounded(found: Comparison, *compared: str) -> str:
    """Return a warning if two methods were run with other settings, too."""
    configs = [row.runs[0].config for label in compared for row in found.rows if row.label == label]
    others = {key: of for key, of in besides_method(configs).items() if key.partition(".")[0] in PROBLEM}
    if not others or configs[0]["method"] == configs[1]["method"]:
        return ""
    keys = ", ".join(f"{key} ({', '.join(values)})" for key, values in others.items())
    return f" These two also differ in {keys}, so this compares more than their methods."


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
        pairs = {(int(run.summary["seed"]), str(run.summary[key])) for run in runs if key in run.summary}
        if len(pairs) > len({seed for seed, _ in pairs}):
            found.append(f"These runs have different {name}: differences between them mean little.")
    for key in ("fedspeed", "torch", "cpu", "vendor"):
        versions = sorted({str(env[key]) for run in runs if key in (env := inner(run.summary, "environment"))})
        if len(versions) > 1:
            found.append(f"These runs were made with different {key}: {', '.join(versions)}.")
    if any(len(row.runs) == 1 for row in rows):
        found.append("Some methods have one seed only: there is no interval, so their differences may be chance.")
    not_done = [run for run in runs if run.summary["status"] != "finished"] if statuses else []
    found += [f"{run.path.name}: {run.summary['status']}" for run in not_done]
    return found + [f"Left out: {reason}" for reason in left_out]


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
    known = dict.fromkeys(key for kind in kinds for key in kind if key != "method.name")
    keys = [key for key in known if len({str(kind.get(key, "-")) for kind in kinds}) > 1]
    lines = [(row.label, *(str(kind.get(key, "-")) for key in keys)) for row, kind in zip(rows, kinds, strict=True)]
    same = element("p", "Nothing but method and seed.", class_="note")
    shown = table(("method", *keys), lines, "plain") if keys else same
    full = []
    for row in rows:
        seeds = f"seeds {', '.join(str(run.summary['seed']) for run in row.runs)}; the config is that of the first"
        note = [element("p", seeds, class_="note")] if row.runs[1:] else []
        full.append(folded(row.label, element("pre", tomli_w.dumps(row.runs[0].config), tabindex="0"), *note))
    return join([shown, folded("Full configs", *full)])


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
            *(str(inner(run.summary, "digests").get(key) or "-")[:16] for key in ("model", "rounds")),
            " ".join(str(run.summary[key]) for key in ("engine", "backend", "workers") if key in run.summary) or "-",
            repeat(run),
        )
        for label, run in runs
    ]
    header = ("run", "method", "seed", "status", "data", "split", "model", "rounds", "computed by", "repeat it")
    made_on = dict.fromkeys(
        ", ".join(f"{key} {value}" for key, value in inner(run.summary, "environment").items()) for _, run in runs
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
    if any(flat(run.config).get(f"{table}.name") == "given" for table in ("model", "data")):
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
    file, own = file_of(name), name.rpartition(":")[2]
    if not file:
        return ""
    folder = RunDir(run.path).code
    path = folder / file.replace("\\", "/").rpartition(f"{CODE}/")[2]
    try:
        inside = path.resolve().is_relative_to(folder.resolve()) and not path.is_symlink()
        tree = ast.parse(read_text(path, MOST)) if inside else ast.Module([], [])
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return ""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == own]
    return (ast.get_docstring(classes[0]) or "") if classes else ""


SCRIPTS = ("vendor/uPlot.iife.min.js", "page/base.js", "page/curves.js", "page/forest.js", "page/clients.js",
           "page/main.js")  # fmt: skip
LIVE = "page/live.js"
STYLES = ("vendor/uPlot.min.css", "page/page.css")


def page(rows: Sequence[Row], found: Comparison, left_out: Sequence[str] = (), live: str | None = None) -> str:
    """Return the page as text, the same for the same runs.

    Args:
        rows: all runs, also unfinished ones.
        found: the comparison of the finished ones.
        left_out: why other runs are not on the page.
        live: the states of the runs as HTML; a live page asks its server for `/data`, any other makes no request.
    """
    code = "\n".join(map(_part, SCRIPTS if live is None else (*SCRIPTS, LIVE)))
    return Template(_part("page/page.html")).substitute(
        parts(rows, found, left_out, live),
        policy=_policy(code, "'none'" if live is None else "'self'"),
        style="\n".join(map(_part, STYLES)),
        version=__version__,
        licence=join([_part("vendor/uPlot.LICENSE")]),
        data=script(embed(rows, found)),
        script=code,
    )


def parts(
    rows: Sequence[Row], found: Comparison, left_out: Sequence[str] = (), live: str | None = None
) -> dict[str, str]:
    """Return the sections of the page as HTML, by the names of their placeholders."""
    notes = warnings(rows, left_out, statuses=live is None)
    listed = (element("li", text) for text in notes)
    flat = sharpness(found.rows)
    about = "Sharpness and client divergence of the trained models, as `fedspeed inspect` found them."
    runs = sum(len(row.runs) for row in rows)
    return {
        "title": join([found.look.titled(setting(rows) or ("several settings" if rows else "No runs yet"))]),
        "sub": join([f"{_many(len(rows), 'method')}, {_many(runs, 'run')}, {seeds_of(rows)} each"] if rows else []),
        "warnings": element("div", element("ul", *listed), class_="warn") if notes else "",
        "live": _section("live", "Runs", live) if live is not None else "",
        "verdict": verdict(found),
        "sharpness": _section("sharpness", "Sharpness", element("p", about, class_="note"), flat) if flat else "",
        "configs": configs(rows),
        "cards": cards(rows),
        "provenance": provenance(rows),
    }


def _many(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _section(name: str, title: str, *children: str) -> Html:
    return element("section", element("h2", title), *children, id=name, data_nav=title)


def _policy(code: str, connect: str) -> str:
    """Return a content security policy: nothing is loaded, and only the page's own script runs."""
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def _part(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")
