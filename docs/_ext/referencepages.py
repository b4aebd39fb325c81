"""Data sets, models, config keys, the files of a run: from the registries and dataclasses that the program uses."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import marks

from fedspeed import record
from fedspeed.cli.data import SPLITS_HELP
from fedspeed.cli.options import GROUPS
from fedspeed.config.config import TABLES, Config
from fedspeed.data import CARDS, DATASETS, Card, options
from fedspeed.models import MODELS
from fedspeed.runs.diagnosis import MEANING

RUN_DIRECTORY = Path(__file__).resolve().parents[1] / "reference" / "run-directory.md"
PARTS = (
    "methods/index",
    "data/index",
    "models/index",
    "api/index",
    "cli/index",
    "config",
    "reference/run-directory",
    "diagnoses",
    "recipes/index",
)
EXAMPLE = """\
rounds = 60
clients = 50
active = 5
split = "dirichlet:0.3"
batch_size = 10

[method]
name = "fedspeed"
rho = 0.05

[model]
name = "mlp"
hidden = [64]
"""
CONTENTS = """\
Made from the code at every build:

- [Methods](methods/index.md): one page each: pseudo-code, fields, what it keeps and costs, paper and code.
- [Data sets](data/index.md) and [models](models/index.md): one page each, with their options.
- [Python](api/index.md): every public name.
- [Command line](cli/index.md): every command and option.
- [Config keys](config.md): every key of a `config.toml`.
- [Diagnoses](diagnoses.md): what `fedspeed explain` can find, and what each finding means.
- [Recipes](recipes/index.md): the paper's tables and figures, and their results.

"""


def pages() -> Iterator[tuple[str, str]]:
    yield "data/index.md", data_index()
    for name, card in CARDS.items():
        yield f"data/{name}.md", data_page(name, card)
    yield "models/index.md", model_index()
    for name, builder in MODELS.items():
        yield f"models/{name}.md", model_page(name, builder)
    yield "config.md", config()
    yield "reference/run-directory.md", run_directory()
    yield "diagnoses.md", diagnoses()


def data_index() -> str:
    """Return the list, and the splits."""
    lines = [
        (
            f"[`{name}`]({name}.md)",
            card.size,
            marks.cell(card.shape),
            card.classes,
            marks.cell(card.source),
            card.licence,
        )
        for name, card in CARDS.items()
    ]
    header = ("name", "train + test", "input", "classes", "source", "licence")
    return "\n".join([
        "# Data sets\n",
        "By name, `--data NAME` or `fedspeed.load_data(NAME)`; "
        "[the guide](../guides/data.md) has caches, splits and yours.\n",
        marks.table(header, lines),
        "## Splits\n",
        marks.block(SPLITS_HELP.partition("\n")[2]),
        marks.toctree(CARDS, hidden=True),
    ])  # fmt: skip


def data_page(name: str, card: Card) -> str:
    """Return the page of one data set: its card, its loader's docstring, its options."""
    loader = DATASETS[name]
    said = marks.sections(loader.__doc__ or "")
    rows = [("train + test", card.size), ("input", card.shape), ("classes", card.classes), ("source", card.source)]
    rows += [("licence", card.licence)] * bool(card.licence)
    rows += [("here", "it comes with the package" if card.here else "it is fetched, or read from a copy of yours")]
    module = importlib.import_module(loader.__module__)
    sources = inspect.cleandoc(module.__doc__ or "")
    parts = [f"# {name}\n", marks.table(("", ""), [(what, marks.cell(text)) for what, text in rows])]
    parts += [marks.paragraphs(said[""])]
    parts += ["## Options\n", arguments(options(name), said.get("Args", ""), "data")]
    parts += ["## Use\n", marks.block(f"fedspeed data show {name}{data_hint(name, card)}", "sh")]
    parts += ["## Where it comes from\n", marks.paragraphs(sources)]
    parts += [marks.plain(said.get("Reference", "")) + "\n"] * ("Reference" in said)
    return "\n".join(parts)


def data_hint(name: str, card: Card) -> str:
    """Return what a command needs beside the name."""
    own = {
        "images": " --data-dir pets --set size=32",
        "arrays": " --data-dir mine.npz",
        "huggingface": " --set path=NAME",
    }
    natural = (
        " --split natural"
        if name in ("shakespeare", "synthetic", "quadratic", "logistic")
        else " --split dirichlet:0.6"
    )
    return own.get(name, "") + natural + (" --clients 30" if card.here else "")


def arguments(found: dict[str, inspect.Parameter], args: str, kind: str) -> str:
    """Return options of a data set or model: name, default, meaning."""
    texts = {name: text for names, text in marks.items(args) for name in names.split(", ")}
    lines = [
        (marks.code(name), marks.code(toml(one.default)), marks.cell(texts.get(name, "")))
        for name, one in found.items()
        if one.kind is not one.VAR_KEYWORD
    ]
    own = [f"`--set {kind}.OPTION=VALUE`, keywords in Python.\n", marks.table(("option", "default", "it is"), lines)]
    return "\n".join(own) if lines else "It has none of its own.\n"


def toml(value: Any) -> str:
    """Return a default as one writes it."""
    if value is inspect.Parameter.empty:
        return "needed"
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else '""' if value == "" else str(value)


def model_index() -> str:
    lines = [(f"[`{name}`]({name}.md)", marks.cell((f.__doc__ or "").splitlines()[0])) for name, f in MODELS.items()]
    return "\n".join([
        "# Models\n",
        "By name, `--model NAME` or `fedspeed.build_model(NAME, data)`; any `nn.Module` of yours works, too "
        "([how](../guides/models.md)).\n",
        marks.table(("name", "what it is"), lines),
        marks.toctree(MODELS, hidden=True),
    ])  # fmt: skip


def model_page(name: str, builder: Callable[..., Any]) -> str:
    said = marks.sections(builder.__doc__ or "")
    own = dict(list(inspect.signature(builder).parameters.items())[2:])
    return "\n".join([
        f"# {name}\n", marks.paragraphs(said[""]), "## Options\n", arguments(own, said.get("Args", ""), "model"),
    ])  # fmt: skip


def config() -> str:
    """Return every key of a config by group, with default, range and option."""
    found = {field.name: field for field in dataclasses.fields(Config)}
    parts = [
        "# Config keys\n",
        "A `config.toml` holds these keys; every one is also a keyword of [`Config`](api/Config.md) and, but for the "
        "tables, an option of [`fedspeed run`](cli/run.md). What is left out has its default; "
        "`fedspeed run config.toml` runs it.\n",
    ]
    for title, names in GROUPS.items():
        lines = [config_line(found[name]) for name in names if name in found]
        parts += [f"## {title.capitalize()}\n", marks.table(("key", "default", "allowed", "it is"), lines)]
    tables = [(f"`[{name}]`", f"`{default}`", f"`name`, then the options of [what is named]({TABLE_PAGES[name]})")
              for name, default in TABLES.items()]  # fmt: skip
    parts += ["## Tables\n", marks.table(("table", "default", "what it holds"), tables)]
    rest = [name for name in found if name not in TABLES and not any(name in names for names in GROUPS.values())]
    written = {"until": "of a fork only: what its first rounds had otherwise; `fedspeed fork` writes it"}
    parts += ["## Written by the program\n", marks.table(("key", "it is"), [
        ("`format`", "the version of the layout, 1"), *((f"`{name}`", written[name]) for name in rest)])]  # fmt: skip
    parts += ["## An example\n", marks.block(EXAMPLE, "toml")]
    return "\n".join(parts)


TABLE_PAGES = {"method": "methods/index.md", "model": "models/index.md", "data": "data/index.md"}


def config_line(field: dataclasses.Field[Any]) -> tuple[str, ...]:
    allowed, default = field.metadata.get("allowed"), field.default
    names = allowed() if callable(allowed) else allowed
    shown = (
        " | ".join(names)
        if names and not isinstance(names, str)
        else "true | false"
        if isinstance(default, bool)
        else names or ""
    )
    value = getattr(default, "name", default)
    return (
        marks.code(field.name),
        marks.code(toml(value)),
        marks.code(shown),
        marks.cell(field.metadata.get("about", "")),
    )


def run_directory() -> str:
    """Return docs/reference/run-directory.md with the fields of a record, from the class, at its end."""
    source = inspect.getsource(record.Record)
    lines = re.findall(r"^    (\w+): ([^=#\n]+?)(?: = [^#\n]+?)?(?:  # (.*))?$", source, re.M)
    return "\n".join([
        RUN_DIRECTORY.read_text("utf-8"),
        "## A line of rounds.jsonl\n",
        "The fields of [`Record`](../api/Record.md); a field without a value is left out. "
        "[`RunDir`](../api/RunDir.md) reads a run directory.\n",
        marks.table(("field", "type", "meaning"), [(marks.code(n), marks.code(t), marks.cell(c)) for n, t, c in lines]),
    ])  # fmt: skip


def diagnoses() -> str:
    """Return what each finding of `fedspeed explain` means."""
    parts = [
        "# Diagnoses\n",
        "The findings of `fedspeed explain`. When each is reported, and more: [Diagnose a run](guides/diagnose.md).\n",
    ]
    for name, means in MEANING.items():
        parts += [f"## {name.capitalize()}\n", f"{marks.plain(means)}\n"]
    return "\n".join(parts)
