"""Method cards: the algorithm box, the fields, the reference, and what the authors' code does otherwise."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from ..files import read_text
from ..methods import METHODS, WRAPPERS
from ..methods.base import Method
from ..rundir import RunDir
from ..usercode import file_of
from .markup import Html, element, folded, join, table
from .runs import Row, RunFiles

MOST = 1_000_000


def cards(rows: Sequence[Row]) -> Html:
    """One per method of the rows, those inside of wrappers too."""
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
    title = name if cls else f"{name.rpartition(':')[2]}, a method of its own"
    box, reference = _parts(text)
    first, _, rest = box.partition("\n")
    parts = [element("p", first or "It says nothing of itself.", class_="lead")]
    parts += [element("pre", rest.strip("\n"), class_="box", tabindex="0")] if rest.strip() else []
    parts += [element("p", f"Reference: {reference}")] if reference else []
    parts += [_fields(cls, used)] if cls else []
    if cls and cls.released:
        sets = ", ".join(f"{key} = {value}" for key, value in cls.released.items())
        parts.append(element("p", f"Paper versus code: the authors' code runs {sets} (--preset released)."))
    return element("article", folded(title, *parts), class_="card")


def _parts(text: str) -> tuple[str, str]:
    """A docstring without arguments and examples, and its reference."""
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
    return table(("field", "here", "default", "it is"), lines, "plain") if lines else Html("")


def _shown(value: Any) -> str:
    return str(value.get("name")) if isinstance(value, dict) else str(value)


def _own_docstring(run: RunFiles, name: str) -> str:
    """Of a class in a file of the run directory, which is read and not executed."""
    file, inner = file_of(name), name.rpartition(":")[2]
    if not file:
        return ""
    path = RunDir(run.path).code / file.replace("\\", "/").rpartition("/")[2]
    try:
        tree = ast.parse(read_text(path, MOST)) if not path.is_symlink() else ast.Module([], [])
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return ""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == inner]
    return (ast.get_docstring(classes[0]) or "") if classes else ""
