"""Options that `run` and `compare` share: every field of `Config`, taken from the dataclass itself."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..config.config import TABLES, Config, read_tables, without_augment
from ..config.plan import Plan, fidelity
from ..config.presets import PRESETS
from ..config.stopping import RULES
from ..errors import UserError, unknown
from .method_syntax import chain, parse_method, parse_value, split_pair, toml_value


def _groups() -> dict[str, list[str]]:
    """The options of every group of `--help`: what a config adds to a plan comes before it."""
    found: dict[str, list[str]] = {}
    planned = {field.name for field in dataclasses.fields(Plan)}
    for field in sorted(dataclasses.fields(Config), key=lambda field: field.name in planned):
        if "group" in field.metadata:
            found.setdefault(field.metadata["group"], []).append(field.name)
    found[fidelity.keywords["group"]].append("preset")
    return found


GROUPS = _groups()
WORDS = {"warmup": "FIELD=N,..", "follow_lr": "FIELD,..", "stop_at": "SCORE=X", "max_time": "TIME"}
"""Texts, and what stands for them in `--help`."""


def configure(parser: argparse.ArgumentParser, seeds: bool = False) -> None:
    """Add the options, grouped, with defaults shown; only what is given overrides a TOML file."""
    fields = {f.name: f for f in dataclasses.fields(Config)}
    for title, names in GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names:
            if name == "seed" and seeds:
                continue
            if name == "preset":
                about = (
                    "start from named settings: `paper` gives each method the paper's own learning-rate decay, "
                    "`released` does what the authors' code does (docs/explanation/authors-code.md)"
                )
                group.add_argument("--preset", metavar="|".join(PRESETS), help=about)
                continue
            _add(group, name, fields[name])
    out = parser.add_argument_group("files and output")
    own = "a field of the method, model or data: method.rho=0.05, model.hidden=[32,32], data.alpha=1"
    out.add_argument("--set", action="append", default=[], metavar="WHAT.FIELD=VALUE", dest="sets", help=own)
    out.add_argument("--out", metavar="DIR", help="where to write (default: a new folder under runs/)")
    out.add_argument("--overwrite", action="store_true", help="replace a run that DIR already holds")
    log(out)
    out.add_argument("--quiet", action="store_true", help="print nothing but errors")
    out.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")


def log(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """The option of commands that run something."""
    about = "tell an observer of the run: csv (rounds.csv), tensorboard, wandb, mlflow; may be repeated"
    parser.add_argument("--log", action="append", default=[], metavar="NAME", help=about)


def rules(parser: argparse.ArgumentParser) -> None:
    """The options of commands that go on with a run: the rules it has from now on."""
    parser.add_argument("--stop-at", metavar="SCORE=X", help="stop at another score than before, accuracy=0.9; or none")
    parser.add_argument(
        "--patience", type=int, metavar="N", help="stop after N scored rounds without a better; 0: never"
    )
    parser.add_argument("--min-delta", type=float, metavar="X", help="how much better counts for patience")
    parser.add_argument("--max-time", metavar="TIME", help="wall-clock time in all, what is used included, 4h; or none")


def given_rules(args: argparse.Namespace) -> dict[str, Any]:
    """What was given of them; None for what stays."""
    return {name: getattr(args, name) for name in RULES}


PLACES = ("backend", "workers", "ray_address")


def places(parser: argparse.ArgumentParser) -> None:
    """The options of commands that go on with a run: where it is computed from now on."""
    fields = {f.name: f for f in dataclasses.fields(Config)}
    group = parser.add_argument_group("machine", "what is not given is as the run's config says")
    for name in PLACES:
        _add(group, name, fields[name])


def given_places(args: argparse.Namespace) -> dict[str, Any]:
    """What was given of them."""
    return {name: value for name in PLACES if (value := getattr(args, name)) is not None}


def allow_code(parser: argparse.ArgumentParser) -> None:
    """The option of commands that read a run directory, which may be somebody else's."""
    parser.add_argument(
        "--allow-code",
        action="store_true",
        help="also if its config names a Python file (file.py:Class), which is then executed; only if you trust it",
    )


def _add(group: argparse._ArgumentGroup, name: str, field: dataclasses.Field[Any]) -> None:
    flag, default = "--" + name.replace("_", "-"), field.default
    allowed, about = field.metadata["allowed"], field.metadata["about"]
    if name in TABLES:
        group.add_argument(flag, metavar="NAME", help=f"{about}; default {default.name}")
        return
    if name == "targets":
        group.add_argument(flag, metavar="A,B", type=accuracies, help=f"{about}; default none")
        return
    if name in WORDS:
        group.add_argument(flag, metavar=WORDS[name], help=f"{about}; default none")
        return
    allowed = tuple(allowed()) if callable(allowed) else allowed
    shown = (about if default == "" or default is False else f"{about}; default {default}").replace("%", "%%")
    if isinstance(default, bool):
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=shown)
    else:
        metavar = "|".join(allowed) if isinstance(allowed, tuple) else {int: "N", float: "X"}.get(type(default), "TEXT")
        group.add_argument(flag, type=_typed(type(default)), metavar=metavar, help=shown)


def _typed(kind: type) -> Any:
    def convert(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            wanted = {int: "a whole number", float: "a number"}[kind]
            raise argparse.ArgumentTypeError(f"expected {wanted}, got {text!r}") from None

    return convert


def accuracies(text: str) -> list[float]:
    """`0.5,0.8` as numbers."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers such as 0.8,0.85, got {text!r}") from None
    for value in found:
        if not 0 < value < 1:
            raise argparse.ArgumentTypeError(f"targets must be accuracies in (0, 1), got {value}; 0.85 is 85%")
    return found


def tables(args: argparse.Namespace) -> dict[str, Any]:
    """The TOML file, if any, with the command line's options on top."""
    given: dict[str, Any] = read_tables(Path(args.file)) if getattr(args, "file", None) else {}
    for name in ("method", *(name for names in GROUPS.values() for name in names)):
        value = getattr(args, name, None)
        if value is None:
            continue
        if name == "method" and len(chain(value)) > 1:
            given[name] = parse_method(value)
        else:
            if name == "data":
                given = without_augment(given, _name(given.get(name)), value)
            given[name] = {**_own(given, name, value), "name": value} if name in TABLES else value
    if args.local_epochs is not None:
        if args.local_steps:
            raise UserError("--local-epochs and --local-steps: expected one of them, got both; leave one out")
        given["local_steps"] = 0  # the file's would win
    for text in args.sets:
        target, key, value = parse_set(text)
        table = given.get(target, {})
        if not isinstance(table, dict | str):
            raise UserError(f"config: {target} must be a name or a table, got {table!r}; correct it in {args.file}")
        given[target] = {**({"name": table} if isinstance(table, str) else table), key: value}
    for target, name in TABLES.items():
        if isinstance(given.get(target), dict):
            given[target].setdefault("name", name)
    return given


def as_given(config: Config) -> list[str]:
    """The options that make this config, method and seed aside: all that differ from the defaults.

    Example:
        >>> from fedspeed.config.config import Spec
        >>> as_given(Config(clients=50, data=Spec("synthetic", {"alpha": 0.5})))
        ['--data', 'synthetic', '--clients', '50', '--set', 'data.alpha=0.5']
    """
    found: list[str] = []
    usual = Config(data=config.data)  # which decides what is usual for it
    left_open = {field.name: field.default for field in dataclasses.fields(Config)}
    for name in (name for names in GROUPS.values() for name in names if name not in ("preset", "seed")):
        value = getattr(config, name)
        default = getattr(usual if name == "augment" else Config(), name)
        flag = "--" + name.replace("_", "-")
        if value == left_open[name]:  # 0 clients: as many as the data have
            continue
        if name in TABLES:
            found += [flag, value.name] if value.name != default.name else []
        elif value != default and isinstance(value, bool):
            found += [flag if value else flag.replace("--", "--no-", 1)]
        elif value != default:
            found += [flag, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    for target in ("data", "model"):
        found += [part for key, value in getattr(config, target).options.items()
                  for part in ("--set", f"{target}.{key}={toml_value(value)}")]  # fmt: skip
    return found


def _name(table: Any) -> str:
    """The name in a table of a config, or the default."""
    return str((table.get("name") if isinstance(table, dict) else table) or TABLES["data"])


def _own(given: dict[str, Any], key: str, name: str) -> dict[str, Any]:
    """The table's options, unless another name makes them somebody else's."""
    table = given.get(key)
    return table if isinstance(table, dict) and table.get("name", name) == name else {}


def parse_set(text: str) -> tuple[str, str, Any]:
    """`method.rho=0.05` -> ("method", "rho", 0.05); values are TOML, bare words are strings."""
    expected = "WHAT.FIELD=VALUE such as method.rho=0.05"
    path, value = split_pair(text, "--set", expected)
    target, dot, key = path.partition(".")
    if not dot or not key:
        raise UserError(f"--set: expected {expected}, got {text!r}")
    if target not in TABLES:
        raise unknown("--set target", target, TABLES)
    return target, key.strip(), parse_value(value)


def output_folder(args: argparse.Namespace, stem: str) -> Path:
    """`--out`, or a new folder under runs/, made at once: two commands may start in one second."""
    if args.out:
        return Path(args.out)
    runs, name = Path("runs"), f"{time.strftime('%Y%m%d-%H%M%S')}-{stem}"
    try:
        runs.mkdir(exist_ok=True)
        for number in itertools.count(1):
            out = runs / (name if number == 1 else f"{name}-{number}")
            with suppress(FileExistsError):
                out.mkdir()
                break
    except OSError as error:
        raise UserError(f"cannot make the folder {runs}: {error.strerror}; choose another place with --out") from None
    args.made = (out, runs)
    return out
