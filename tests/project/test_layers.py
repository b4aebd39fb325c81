"""Which folder may import which, what stays free of torch, the public names, and docstrings whose examples run."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import fedspeed

ROOT = Path(fedspeed.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# From the top down: a module imports its own folder and lower lines only. Late and typing-only imports count, so no
# cycle is larger than a folder. Folders on one line do not import each other. The public names, which `__init__`
# finds when first used, are also typing-only imports there, for editors: they alone may lead upwards.
LAYERS = [
    ["__main__"],
    ["cli"],
    ["reproduce", "theory", "flower"],
    ["experiments"],
    ["report"],
    ["runs"],
    ["server"],
    ["backends"],
    ["client"],
    ["models"],
    ["data"],
    ["config"],
    ["methods"],
    ["utils"],
    ["record"],
    ["errors"],
    ["__init__"],
]
LEVEL = {name: -level for level, names in enumerate(LAYERS) for name in names}
NO_TORCH = ["methods", "config", "report", "reproduce", "theory"]
PUBLIC = [
    "AFedPD",
    "AFedPDSAM",
    "Config",
    "Diverged",
    "FedACG",
    "FedADMM",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedCM",
    "FedDyn",
    "FedExP",
    "FedGMT",
    "FedGamma",
    "FedGloSS",
    "FedInit",
    "Clip",
    "DP",
    "TopK",
    "Quantise",
    "FedLESAM",
    "FedNSAM",
    "FedLESAMD",
    "FedLESAMS",
    "FedMoSWA",
    "FedNova",
    "FedPD",
    "FedProx",
    "FedSAM",
    "FedSMOO",
    "FedSWA",
    "FedSpeed",
    "FedTOGA",
    "FedWMSAM",
    "FedYogi",
    "Federated",
    "FlatModel",
    "Local",
    "METHODS",
    "MODELS",
    "Method",
    "MoFedSAM",
    "Observer",
    "Plan",
    "Record",
    "Round",
    "RunDir",
    "Scaffold",
    "Simulation",
    "UserError",
    "Wrapper",
    "audit",
    "build_model",
    "compare",
    "diff",
    "extend",
    "fork",
    "load_data",
    "load_runs",
    "param",
    "replay",
    "report",
    "resume",
    "rng",
    "run_config",
    "simulate",
    "sweep",
    "tune",
    "verify",
]


class Import(NamedTuple):
    """One import: the full name of the module, whether a function makes it, and whether only typing reads it."""

    name: str
    late: bool
    typing: bool
    line: int


def top(path: Path) -> str:
    """The folder or file directly under fedspeed that a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(path: Path) -> tuple[Import, ...]:
    """Every import of a file, late and typing-only ones included."""
    return read_imports(("fedspeed", *path.relative_to(ROOT).parts[:-1]), path.read_text("utf-8"))


@cache
def read_imports(package: tuple[str, ...], source: str) -> tuple[Import, ...]:
    """Every import of a module of `package` with this source."""

    def visit(node: ast.AST, late: bool, typing: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for child in node.body:
                yield from visit(child, late, True)
            for child in node.orelse:
                yield from visit(child, late, typing)
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, late, typing, node.lineno)
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            parts = [*base, *([node.module] if node.module else [])]
            for alias in node.names if not node.module else [None]:
                yield Import(".".join([*parts, *([alias.name] if alias else [])]), late, typing, node.lineno)
        late = late or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, late, typing)

    return tuple(visit(ast.parse(source), False, False))


def own(name: str) -> str | None:
    """The folder or file of fedspeed that an import names, or None for another package."""
    parts = name.split(".")
    if parts[0] != "fedspeed":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in LEVEL else "__init__"


def place(path: Path) -> str:
    return str(path.relative_to(ROOT.parent))


def upward(path: Path) -> list[str]:
    """The imports of a file that the layers forbid."""
    here = top(path)
    return [
        f"{place(path)}:{found.line}: {here} may not import {found.name}"
        for found in imports(path)
        if (there := own(found.name)) is not None
        and there != here
        and LEVEL[there] >= LEVEL[here]
        and not (here == "__init__" and found.typing)
    ]


class Planted(type(ROOT)):
    """A file that is not there, with some source."""

    source = ""

    def read_text(self, *_: object) -> str:
        return self.source


def planted(where: str, source: str) -> Path:
    path = Planted(ROOT / where)
    path.source = source
    return path


def test_the_house_is_fifteen_folders_and_four_files():
    folders = {path.parent.name for path in ROOT.glob("*/*.py")}
    assert folders | {path.stem for path in ROOT.glob("*.py")} == set(LEVEL)
    assert len(folders) == 15


def test_no_module_imports_upwards():
    assert [line for path in FILES for line in upward(path)] == []


@pytest.mark.parametrize(
    ("where", "source", "named"),
    [
        ("client/none.py", "from ..server.simulation import Simulation\n", "fedspeed.server.simulation"),
        ("client/none.py", "def f():\n    from ..runs import verify\n", "fedspeed.runs"),
        ("config/none.py", "if TYPE_CHECKING:\n    from ..data import Federated\n", "fedspeed.data"),
        ("backends/ray/none.py", "from ...server import states\n", "fedspeed.server"),
        ("theory/none.py", "import fedspeed.reproduce.page\n", "fedspeed.reproduce.page"),
        ("errors.py", "from .record import Record\n", "fedspeed.record"),
    ],
)
def test_a_planted_upward_import_is_found(where, source, named):
    assert [line.split(" import ")[1] for line in upward(planted(where, source))] == [named]


def test_a_planted_downward_import_is_allowed():
    assert upward(planted("server/none.py", "from ..client.work import Work\nfrom .states import States\n")) == []


def test_no_torch_where_the_rule_says_so():
    wrong = [
        f"{place(path)}:{found.line} imports torch"
        for path in FILES
        if top(path) in NO_TORCH
        for found in imports(path)
        if found.name.split(".")[0] == "torch" and not found.typing
    ]
    assert wrong == []


def test_torch_comes_late_in_the_command_line():
    wrong = [
        f"{place(path)}:{found.line} imports {found.name} at once"
        for path in FILES
        if top(path) == "cli"
        for found in imports(path)
        if not (found.late or found.typing)
        and found.name.split(".")[0] in ("torch", "matplotlib", "numpy", "safetensors", "rich")
    ]
    assert wrong == []


def test_what_is_imported_is_declared():
    """Every package that is imported is a dependency, or an extra; none is there only because another needs it."""
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text("utf-8"))["project"]
    lists = (project["dependencies"], *project["optional-dependencies"].values())
    declared = {re.split(r"[<>=~\[ ]", line)[0].replace("-", "_") for lines in lists for line in lines}
    names = {found.name.split(".")[0] for path in FILES for found in imports(path) if not found.typing}
    foreign = names - set(sys.stdlib_module_names) - {"fedspeed"}
    assert {{"PIL": "pillow"}.get(name, name) for name in foreign} <= declared


def test_ray_and_flower_stay_inside_functions_of_back_ends():
    for path in FILES:
        for found in imports(path):
            if found.name.split(".")[0] in ("ray", "flwr") and not found.typing:
                assert top(path) in ("backends", "flower"), f"{place(path)}:{found.line}"
                assert found.late, f"{place(path)}:{found.line}"


def test_only_the_command_line_prints():
    wrong = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and (
                (isinstance(node.func, ast.Name) and node.func.id == "print")
                or (ast.unparse(node.func) in ("sys.stdout.write", "sys.stderr.write") and top(path) != "cli")
            ):
                wrong.append(f"{place(path)}:{node.lineno}")
    assert wrong == []


def test_importing_the_light_parts_does_not_bring_torch():
    """Also not by way of others."""
    names = [module_name(path) for path in FILES if top(path) in NO_TORCH]
    code = f"import {', '.join(names)}; import sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_reader_sees_every_import():
    """The checks above are only as good as this reader: relative, absolute, late and typing-only imports."""
    source = (
        "from typing import TYPE_CHECKING\nfrom . import options\n"
        "from ..runs.launch import resume\nimport fedspeed.record\n"
        "if TYPE_CHECKING:\n    import torch\nelse:\n    import numpy\ndef f():\n    from ..data.federated import X\n"
    )
    found = {(entry.name, entry.late, entry.typing) for entry in imports(planted("cli/none.py", source))}
    assert found == {
        ("typing", False, False),
        ("fedspeed.cli.options", False, False),
        ("fedspeed.runs.launch", False, False),
        ("fedspeed.record", False, False),
        ("torch", False, True),
        ("numpy", False, False),
        ("fedspeed.data.federated", True, False),
    }
    assert [own(name) for name in ("fedspeed.data.federated", "fedspeed", "torch")] == ["data", "__init__", None]


def test_the_public_names():
    assert sorted(fedspeed.__all__) == sorted(PUBLIC)
    assert set(dir(fedspeed)) - set(PUBLIC) == {"data", "methods", "terms", "theory"}
    for name in dir(fedspeed):
        assert getattr(fedspeed, name) is not None
    assert {cls.__name__ for cls in (fedspeed.methods.METHODS | fedspeed.methods.WRAPPERS).values()} <= set(PUBLIC)
    with pytest.raises(AttributeError, match="module 'fedspeed' has no attribute 'Simulate'; it has"):
        _ = fedspeed.Simulate


def test_methods_at_the_top_need_no_torch():
    code = (
        "import sys, fedspeed; from fedspeed import FedProx, FedInit, Scaffold, terms; fedspeed.theory;"
        "assert FedInit(FedProx()).base.mu == 0.1; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_star_import():
    names: dict[str, object] = {}
    exec("from fedspeed import *", names)
    assert set(PUBLIC) <= set(names)


def undocumented(path: Path) -> Iterator[str]:
    """Public functions and classes without a docstring; the messages of a method explain themselves by their fields."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            bases = [ast.unparse(base) for base in getattr(node, "bases", [])]
            if not (ast.get_docstring(node) or (top(path) == "methods" and bases == ["NamedTuple"])):
                yield node.name


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


def test_public_things_have_docstrings():
    for path in FILES:
        assert ast.get_docstring(ast.parse(path.read_text("utf-8"))), f"{place(path)} has no docstring"
        assert list(undocumented(path)) == [], place(path)


def test_public_classes_document_their_methods():
    """A method may inherit the docstring of the one it overrides."""
    for name in PUBLIC:
        thing = getattr(fedspeed, name)
        own_members = [member for member in vars(thing) if not member.startswith("_")] if inspect.isclass(thing) else []
        for member in own_members:
            value = getattr(thing, member)
            if callable(value) or isinstance(value, property):
                assert inspect.getdoc(value), f"{name}.{member}"


MODULES = [module_name(path) for path in FILES if top(path) != "cli"]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    with_examples = [
        name for name in MODULES if any(test.examples for test in finder.find(importlib.import_module(name)))
    ]
    assert len(with_examples) > 10
