"""A page per public name, by what it is for; Sphinx's autodoc writes signatures and docstrings into them."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import marks

import fedspeed
from fedspeed.methods import METHODS, WRAPPERS

GROUPS = {
    "Train": ("simulate", "Simulation", "Plan", "Config", "run_config", "Record", "Observer"),
    "Runs on disk": ("RunDir", "load_runs", "resume", "extend", "fork", "replay", "verify", "diff", "report"),
    "Compare and choose": ("compare", "sweep", "tune", "audit"),
    "Data and models": ("load_data", "Federated", "build_model", "MODELS", "FlatModel"),
    "Write a method": ("Method", "Wrapper", "Local", "Round", "param", "rng", "METHODS"),
    "Errors": ("UserError", "Diverged"),
}
"""The public names that are no method; one that is missing here gets a page under "More"."""
MODULES = ("data", "terms", "theory", "flower")
"""Public modules; one that is not there, or whose extra is not installed, has no page."""


def classes() -> dict[str, str]:
    """Return the public names that are methods or wrappers, and what they are called on the command line."""
    return {cls.__name__: name for name, cls in (METHODS | WRAPPERS).items()}


def names() -> dict[str, list[str]]:
    """Return every public name but the methods, by group."""
    known = {name for group in GROUPS.values() for name in group}
    left = [name for name in fedspeed.__all__ if name not in known and name not in classes()]
    return {title: list(group) for title, group in GROUPS.items()} | ({"More": left} if left else {})


def modules() -> dict[str, ModuleType]:
    """Return the public modules that can be imported here."""
    found = {}
    for name in MODULES:
        try:
            found[name] = getattr(fedspeed, name, None) or importlib.import_module(f"fedspeed.{name}")
        except (ImportError, fedspeed.UserError):
            continue
    return found


def members(module: ModuleType) -> list[str]:
    """Return the names of a public module: its `__all__`, or those defined there."""
    own = [name for name, thing in vars(module).items() if getattr(thing, "__module__", "") == module.__name__]
    return sorted(getattr(module, "__all__", [name for name in own if not name.startswith("_")]))


def pages() -> Iterator[tuple[str, str]]:
    yield "api/index.md", index()
    for group in names().values():
        for name in group:
            yield f"api/{name}.md", f"# {name}\n\n{documented(f'fedspeed.{name}', getattr(fedspeed, name))}"
    for name, module in modules().items():
        about = marks.paragraphs(inspect.cleandoc(module.__doc__ or ""))
        parts = [f"# fedspeed.{name}\n", about]
        for member in members(module):
            thing = getattr(module, member)
            known = next((own for own in fedspeed.__all__ if getattr(fedspeed, own) is thing), None)
            same = f"The same as [`fedspeed.{known}`]({known}.md).\n"
            parts += [f"## {marks.plain(member)}\n", same if known else documented(f"fedspeed.{name}.{member}", thing)]
        yield f"api/module-{name}.md", "\n".join(parts)


def documented(path: str, thing: Any) -> str:
    """Return the directive that fits."""
    if inspect.isclass(thing):
        return marks.block(f".. autoclass:: {path}\n   :members:\n   :member-order: bysource", "{eval-rst}")
    if callable(thing):
        return marks.block(f".. autofunction:: {path}", "{eval-rst}")
    return marks.block(f".. autodata:: {path}\n   :no-value:", "{eval-rst}")


def index() -> str:
    """Return every name with its first line."""
    parts = [
        "# Python\n",
        f"`import fedspeed` offers {len(fedspeed.__all__)} names; none imports torch before it is used.\n",
    ]
    for title, group in names().items():
        lines = [(f"[`{name}`]({name}.md)", summary(getattr(fedspeed, name))) for name in group]
        parts += [f"## {title}\n", marks.table(("name", "what it is"), lines)]
    found = [(f"[`{name}`](../methods/{called}.md)", f"`{called}`") for name, called in sorted(classes().items())]
    parts += ["## Methods and wrappers\n", marks.table(("class", "on the command line"), found)]
    own = [(f"[`fedspeed.{name}`](module-{name}.md)", first(module.__doc__)) for name, module in modules().items()]
    parts += ["## Modules\n", marks.table(("module", "what it has"), own)]
    entries = [name for group in names().values() for name in group]
    parts.append(marks.toctree([*entries, *(f"module-{name}" for name in modules())], hidden=True))
    return "\n".join(parts)


def summary(thing: Any) -> str:
    """Return the first line of a docstring; of a plain value, what it is."""
    return first(thing.__doc__) if callable(thing) else marks.cell(f"a {type(thing).__name__} of {len(thing)}, by name")


def first(docstring: str | None) -> str:
    return marks.cell(inspect.cleandoc(docstring or "").partition("\n\n")[0])
