"""Who may import whom, what stays free of torch, the public names, and docstrings whose examples run."""

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

MAY_IMPORT = {  # what a module, or the modules of a package, may import of fedspeed when it runs
    "errors": set(),
    "files": {"errors"},
    "usercode": {"errors", "files"},
    "processes": {"errors"},
    "registry": {"errors"},
    "metrics": {"errors", "methods"},
    "observe": {"errors", "record", "registry"},
    "environment": {""},
    "params": {"errors"},
    "plan": {"backends", "errors", "methods", "network", "params", "schedule", "stopping"},
    "pool": {"errors", "processes"},
    "methods": {"errors", "params", "registry", "sampling", "usercode"},
    "sampling": {"hashing"},
    "vec": {"compat", "devices", "errors", "norms"},
    "problems": {"errors"},
    "theory": {"errors", "files", "params", "problems", "report", "rundir", "schedule"},
    "data": {"devices", "errors", "problems", "sampling", "usercode"},
    "layers": {"compat"},
    "trim": {"errors", "layers"},
    "models": {"data", "errors", "layers", "recurrent", "sampling", "trim", "usercode"},
    "evaluate": {"data", "sampling", "vec"},
    "sharpness": {"data", "evaluate", "sampling", "vec"},
    "modelfile": {"", "errors", "files", "rundir"},
    "contract": {"compat", "errors", "fields", "methods", "metrics", "vec"},
    "client": {
        "carried",
        "clientscores",
        "contract",
        "data",
        "devices",
        "errors",
        "evaluate",
        "methods",
        "plan",
        "presets",
        "sampling",
        "symptoms",
        "teacher",
        "uploads",
        "vec",
    },
    "interrupts": set(),
    "record": set(),
    "hashing": set(),
    "scratch": set(),
    "statefile": {"errors", "files", "rundir", "vec"},
    "statelog": {"hashing", "rundir", "statefile"},
    "manifest": {"files", "hashing", "rundir", "statelog"},
    "states": {"rundir", "scratch", "statefile", "vec"},
    "checkpoint": {
        "errors",
        "files",
        "hashing",
        "manifest",
        "rundir",
        "statefile",
        "statelog",
        "states",
        "sums",
        "vec",
    },
    "engines": {
        "blame",
        "client",
        "contract",
        "data",
        "errors",
        "fields",
        "methods",
        "plan",
        "sampling",
        "teacher",
        "uploads",
        "vec",
    },
    "backends": {
        "",
        "client",
        "clientscores",
        "devices",
        "engines",
        "environment",
        "errors",
        "evaluate",
        "methods",
        "plan",
        "processes",
        "registry",
        "rundir",
        "scratch",
        "statefile",
        "usercode",
        "vec",
    },
    "given": {
        "data",
        "devices",
        "errors",
        "methods",
        "models",
        "norms",
        "plan",
        "presets",
        "sampling",
        "stopping",
        "vec",
    },
    "server": {
        "backends",
        "blame",
        "carried",
        "client",
        "clientmetrics",
        "collecting",
        "contract",
        "data",
        "errors",
        "given",
        "givenrun",
        "interrupts",
        "jobs",
        "losses",
        "metering",
        "methods",
        "metrics",
        "observe",
        "plan",
        "presets",
        "record",
        "report",
        "scoring",
        "settings",
        "states",
        "stopping",
        "stretches",
        "symptoms",
        "uploads",
        "vec",
    },
    "config": {
        "data",
        "errors",
        "files",
        "methods",
        "plan",
        "presets",
        "stopping",
        "stretches",
        "usercode",
    },
    "rundir": {"clientmetrics", "errors", "files", "hashing", "record", "report", "reported"},
    "runconfig": {
        "config",
        "environment",
        "errors",
        "files",
        "modelfile",
        "plan",
        "presets",
        "rundir",
        "stopping",
        "usercode",
    },
    "recording": {
        "backends",
        "config",
        "environment",
        "errors",
        "illness",
        "interrupts",
        "modelfile",
        "observe",
        "parent",
        "record",
        "rundir",
        "splitfile",
        "stopping",
        "uploads",
    },
    "givenrun": {
        "checkpoint",
        "config",
        "errors",
        "losses",
        "methods",
        "plan",
        "recording",
        "report",
        "run",
        "runconfig",
        "rundir",
        "stopping",
    },
    "sums": {"carried", "rundir", "statefile", "vec"},
    "results": {"files", "hashing", "modelfile", "recording", "reported", "rundir", "splitfile", "stopping"},
    "verify": {
        "checkpoint",
        "environment",
        "errors",
        "parent",
        "rerun",
        "results",
        "run",
        "runconfig",
        "rundir",
        "scratch",
        "statefile",
        "sums",
        "uploads",
        "vec",
    },
    "run": {
        "checkpoint",
        "config",
        "data",
        "errors",
        "methods",
        "models",
        "observe",
        "recording",
        "runconfig",
        "rundir",
        "server",
        "stopping",
    },
    "inspection": {
        "carried",
        "client",
        "config",
        "errors",
        "files",
        "methods",
        "modelfile",
        "presets",
        "run",
        "runconfig",
        "rundir",
        "sampling",
        "sharpness",
    },
    "report": {
        "",
        "cures",
        "damping",
        "errors",
        "files",
        "illness",
        "methods",
        "network",
        "observe",
        "record",
        "rundir",
        "settings",
        "splitfile",
        "stopping",
        "usercode",
    },
    "reproduce": {
        "batch",
        "config",
        "data",
        "errors",
        "evaluate",
        "files",
        "inspection",
        "methods",
        "modelfile",
        "observe",
        "pool",
        "record",
        "report",
        "run",
        "runconfig",
        "rundir",
        "schedule",
        "vec",
    },
    "compat": set(),
    "presets": {"errors", "methods"},
    "schedule": {"errors", "methods"},
    "cures": {"plan"},
    "damping": {"errors", "methods", "plan", "presets"},
    "illness": {"cures", "damping", "observe", "record"},
    "symptoms": {"carried", "devices", "errors", "evaluate", "fields", "losses", "sampling", "vec"},
    "losses": {"data", "errors", "sampling"},
    "settings": set(),
    "blame": {"client", "contract", "errors", "methods", "vec"},
    "metering": {"client", "errors", "given", "network", "record"},
    "network": {"errors", "hashing", "record"},
    "clientmetrics": set(),
    "clientscores": {"data", "evaluate", "sampling", "vec"},
    "scoring": {"clientmetrics", "evaluate"},
    "splitfile": {"data", "files"},
    "batch": {"config", "errors", "illness", "observe", "pool", "report", "run", "runconfig", "rundir", "stopping"},
    "sweeps": {"batch", "config", "environment", "errors", "observe", "points", "report", "runconfig"},
    "points": {"config", "data", "errors", "methods", "runconfig"},
    "slurm": {"config", "errors", "files", "runconfig", "slurmtext"},
    "slurmtext": set(),
    "recurrent": {"errors"},
    "carried": {"contract"},
    "norms": {"errors"},
    "stopping": {"errors", "record"},
    "devices": set(),
    "forking": {
        "checkpoint",
        "config",
        "errors",
        "fields",
        "files",
        "hashing",
        "methods",
        "metrics",
        "observe",
        "parent",
        "presets",
        "record",
        "report",
        "rerun",
        "run",
        "runconfig",
        "rundir",
        "stretches",
    },
    "jobs": {"client", "presets", "sampling"},
    "parent": {"errors", "files", "hashing", "record", "rundir"},
    "reported": set(),
    "stretches": {"errors", "methods", "plan", "stopping"},
    "collecting": {"client", "plan", "uploads", "vec"},
    "uploads": {"errors", "files", "rundir", "vec"},
    "replaying": {
        "checkpoint",
        "client",
        "data",
        "devices",
        "engines",
        "errors",
        "jobs",
        "record",
        "rerun",
        "run",
        "runconfig",
        "rundir",
        "sampling",
        "scratch",
        "server",
        "stretches",
        "trace",
        "uploads",
        "vec",
    },
    "rerun": {"checkpoint", "illness", "record", "rundir", "statefile", "states"},
    "trace": {"contract", "engines", "methods", "vec"},
    "tuning": {
        "batch",
        "config",
        "environment",
        "errors",
        "files",
        "methods",
        "plan",
        "points",
        "record",
        "report",
        "run",
        "rundir",
        "sampling",
        "schedule",
        "stopping",
        "teacher",
    },
    "teacher": {"errors", "vec"},
    "fields": set(),
    "auditing": {"errors", "methods", "params", "problems", "usercode", "vec"},
    "flower": {
        "backends",
        "client",
        "clientscores",
        "data",
        "environment",
        "errors",
        "evaluate",
        "files",
        "given",
        "givenrun",
        "hashing",
        "losses",
        "methods",
        "metrics",
        "plan",
        "record",
        "runconfig",
        "rundir",
        "server",
        "splitfile",
        "statefile",
        "states",
        "stopping",
        "uploads",
        "usercode",
        "vec",
    },
    "": set(),  # fedspeed/__init__.py finds its names when asked
}
NO_TORCH = {
    "batch",
    "points",
    "slurm",
    "slurmtext",
    "sweeps",
    "",
    "cures",
    "damping",
    "clientmetrics",
    "errors",
    "files",
    "illness",
    "params",
    "plan",
    "pool",
    "presets",
    "processes",
    "metrics",
    "network",
    "observe",
    "parent",
    "record",
    "registry",
    "reported",
    "rundir",
    "schedule",
    "splitfile",
    "stopping",
    "stretches",
    "usercode",
    "methods",
    "config",
    "report",
    "reproduce",
    "problems",
    "theory",
}
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
    "extend",
    "fork",
    "load_data",
    "load_runs",
    "param",
    "replay",
    "rng",
    "run_config",
    "simulate",
    "sweep",
    "tune",
]


class Import(NamedTuple):
    """One import: the full name of the module, and whether it waits for a function call."""

    name: str
    inside: bool
    line: int


def top(path: Path) -> str:
    """The module or package directly under fedspeed that a file belongs to; "" for fedspeed itself."""
    first = path.relative_to(ROOT).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


@cache
def imports(path: Path) -> tuple[Import, ...]:
    """What a file imports when it runs; what only a type checker reads is left out."""
    package = ["fedspeed", *path.relative_to(ROOT).parts[:-1]]

    def visit(node: ast.AST, inside: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for child in node.orelse:
                yield from visit(child, inside)
            return
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, inside, node.lineno)
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            parts = [*base, *([node.module] if node.module else [])]
            for alias in node.names if not node.module else [None]:
                yield Import(".".join([*parts, *([alias.name] if alias else [])]), inside, node.lineno)
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    return tuple(visit(ast.parse(path.read_text("utf-8")), False))


KNOWN = {top(path) for path in FILES}


def own(name: str) -> str | None:
    """The part of fedspeed that an import names, or None for somebody else's."""
    parts = name.split(".")
    if parts[0] != "fedspeed":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in KNOWN else ""


def place(path: Path) -> str:
    return str(path.relative_to(ROOT.parent))


def test_the_import_rule():
    """Nothing but `python -m fedspeed` imports the command line; the rest as the table says."""
    wrong = []
    for path in FILES:
        part = top(path)
        if part in ("cli", "__main__"):
            continue
        assert part in MAY_IMPORT, f"{place(path)}: say in MAY_IMPORT what {part} may import"
        for found in imports(path):
            target = own(found.name)
            if not (target is None or target == part or target in MAY_IMPORT[part]):
                wrong.append(f"{place(path)}:{found.line}: {part} may not import {found.name}")
    assert wrong == []


def test_no_torch_where_the_rule_says_so():
    wrong = [
        f"{place(path)}:{found.line} imports torch"
        for path in FILES
        if top(path) in NO_TORCH
        for found in imports(path)
        if found.name.split(".")[0] == "torch"
    ]
    assert wrong == []


def test_torch_comes_late_in_the_command_line():
    wrong = [
        f"{place(path)}:{found.line} imports {found.name} at once"
        for path in FILES
        if top(path) in ("cli", "run", "recording")
        for found in imports(path)
        if not found.inside and found.name.split(".")[0] in ("torch", "matplotlib", "numpy", "safetensors", "rich")
    ]
    assert wrong == []


def test_what_is_imported_is_declared():
    """Every package that is imported is a dependency, or an extra; none is there only because another needs it."""
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text("utf-8"))["project"]
    lists = (project["dependencies"], *project["optional-dependencies"].values())
    declared = {re.split(r"[<>=~\[ ]", line)[0].replace("-", "_") for lines in lists for line in lines}
    names = {found.name.split(".")[0] for path in FILES for found in imports(path)}
    foreign = names - set(sys.stdlib_module_names) - {"fedspeed"}
    assert {{"PIL": "pillow"}.get(name, name) for name in foreign} <= declared


def test_ray_and_flower_stay_inside_functions_of_back_ends():
    for path in FILES:
        for found in imports(path):
            if found.name.split(".")[0] in ("ray", "flwr"):
                assert top(path) in ("backends", "flower"), f"{place(path)}:{found.line}"
                assert found.inside, f"{place(path)}:{found.line}"


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


def test_the_table_holds_nothing_that_is_not_imported():
    for part, allowed in MAY_IMPORT.items():
        used = {own(found.name) for path in FILES if top(path) == part for found in imports(path)}
        assert allowed - used == set(), part


def test_nothing_but_the_command_line_imports_the_theory():
    assert [part for part, allowed in MAY_IMPORT.items() if "theory" in allowed] == []


def test_the_rule_sees_an_import(tmp_path):
    """The checks above are only as good as this reader: relative, absolute, late and typing-only imports."""
    source = (
        "from typing import TYPE_CHECKING\nfrom . import options\nfrom ..run import Config\nimport fedspeed.vec\n"
        "if TYPE_CHECKING:\n    import torch\nelse:\n    import numpy\ndef f():\n    from ..data.federated import X\n"
    )
    path = ROOT / "cli" / "none.py"

    class Fake(type(path)):
        def read_text(self, *_: object) -> str:
            return source

    found = {(entry.name, entry.inside) for entry in imports(Fake(path))}
    assert found == {
        ("typing", False),
        ("fedspeed.cli.options", False),
        ("fedspeed.run", False),
        ("fedspeed.vec", False),
        ("numpy", False),
        ("fedspeed.data.federated", True),
    }
    assert [own(name) for name in ("fedspeed.data.federated", "fedspeed", "torch")] == ["data", "", None]


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
