"""Walks: the modules of the package whose functions are called by one round, `run`, `resume` and `report`.

    python -m benchmarks.walks             # a row per walk
    python -m benchmarks.walks --calls     # and its modules, in the order of their first call

A module that is only imported does not count. docs/explanation/design.md has the numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import fedspeed
from fedspeed.cli import main as command
from fedspeed.runs import launch

PACKAGE = str(Path(fedspeed.__file__).parent) + os.sep
SMALL = ["--quiet", "--backend", "serial", "--engine", "loop", "--clients", "10", "--active", "3"]


def called(act: Callable[[], object]) -> dict[str, str]:
    """Return the modules whose functions `act` calls, in order, and the first function of each."""
    found: dict[str, str] = {}

    def see(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not importing(frame):
            module = code.co_filename.removeprefix(PACKAGE).removesuffix(".py").replace(os.sep, ".")
            found.setdefault(module, code.co_name)

    sys.setprofile(see)
    try:
        act()
    finally:
        sys.setprofile(None)
    return found


def importing(frame: FrameType | None) -> bool:
    """Return whether a frame belongs to the import of a module of the package."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False


def walks() -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each walk and its modules; runs are made in the current folder."""
    data = fedspeed.load_data("digits", split="dirichlet:0.6", clients=10, seed=0)
    plan = fedspeed.Plan(rounds=2, active=3, engine="loop", backend="serial", batch_size=20, local_epochs=1)
    method, made = fedspeed.FedSpeed(), list[Any]()
    build = called(lambda: made.append(fedspeed.simulate(method, "mlp", data, plan)))
    rounds = iter(made[0])
    first = called(lambda: next(rounds))
    yield "simulate and its first round", build | first
    yield "one round", first
    yield "fedspeed run, one round", called(lambda: command(["run", *SMALL, "--rounds", "1", "--out", "a"]))
    prepare = launch.prepare

    def end(*given: Any, **named: Any) -> Any:
        sys.setprofile(None)
        return prepare(*given, **named)

    launch.prepare = end
    yield "fedspeed resume, before prepare", called(lambda: command(["resume", "a", "--quiet", "--rounds", "2"]))
    launch.prepare = prepare
    yield "fedspeed report", called(lambda: command(["report", "a", "--out", "page.html"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--calls", action="store_true", help="also print the modules, each with its first function")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fedspeed-walks-") as folder:
        os.chdir(folder)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            found = list(walks())
        os.chdir(os.sep)
    for name, modules in found:
        print(f"{len(modules):3d}  {name}")
        for module, function in modules.items() if asked.calls else ():
            print(f"       {module}.{function}")


if __name__ == "__main__":
    main()
