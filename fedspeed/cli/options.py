"""Options that commands share: every field of `Config`, taken from the dataclass itself, and what a preset changes."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.config import NAMED, TABLES, Config, apply_preset, read_tables, without_augment
from ..config.plan import Plan, fidelity
from ..config.presets import PRESETS, THEIR_DATA
from ..config.spec import FROM_FILES, Spec
from ..errors import UserError, nearest, unknown
from ..experiments.grid import parse_value
from ..methods import METHODS, WRAPPERS, build, class_of
from ..utils.registry import file_of
from .method_syntax import parse_method, split_pair, toml_value

if TYPE_CHECKING:
    from rich.console import Console


def _groups() -> dict[str, list[str]]:
    """Return the options of every group of `--help`; fields that only a config has come first."""
    found: dict[str, list[str]] = {}
    planned = {field.name for field in dataclasses.fields(Plan)}
    for field in sorted(dataclasses.fields(Config), key=lambda field: field.name in planned):
        if "group" in field.metadata:
            found.setdefault(field.metadata["group"], []).append(field.name)
    found[fidelity.keywords["group"]].append("preset")
    return found


GROUPS = _groups()
WORDS = {
    "lr_schedule": "NAME:..",
    "warmup": "FIELD=N,..",
    "follow_lr": "FIELD,..",
    "stop_at": "SCORE=X",
    "max_time": "TIME",
}
"""Options that take text, and their placeholders in `--help`."""


def configure(parser: argparse.ArgumentParser, seeds: bool = False) -> None:
    """Add an option per field, in groups, with defaults shown; only given options override a TOML file."""
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
            add_field(group, name, fields[name])
    out = parser.add_argument_group("files and output")
    own = "a field of method, model, data or a file: rho=0.05 (or method.rho=0.05), model.hidden=[32,32], cohort.d=9"
    out.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", dest="sets", help=own)
    out.add_argument("--out", metavar="DIR", help="where to write (default: a new folder under runs/)")
    out.add_argument("--overwrite", action="store_true", help="replace a run that DIR already holds")
    log(out)
    out.add_argument("--quiet", action="store_true", help="print nothing but errors")
    out.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")


def log(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add --log, for commands that run rounds."""
    about = "send every round to csv (rounds.csv), tensorboard, wandb or mlflow; may be repeated"
    parser.add_argument("--log", action="append", default=[], metavar="NAME", help=about)


def allow_code(parser: argparse.ArgumentParser, executes: bool = True) -> None:
    """Add --allow-code, for commands that read a run directory, which may come from another person.

    Args:
        executes: whether the command executes code at all; one that does not takes the option, and needs it never.
    """
    about = (
        "execute the Python files that the run's config names (file.py:Class); only if you trust them; a run that you "
        "made here needs no option"
    )
    help_text = about if executes else "taken as by other commands of a run; nothing is executed here"
    parser.add_argument("--allow-code", action="store_true", help=help_text)


def add_field(group: argparse._ArgumentGroup, name: str, field: dataclasses.Field[Any]) -> None:
    """Add the option of a field of `Config`, with its default and its allowed values."""
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
            note = "; it is a number, not a share" if kind is int and _fraction(text) else ""
            raise argparse.ArgumentTypeError(f"expected {wanted}, got {text!r}{note}") from None

    return convert


def _fraction(text: str) -> bool:
    """Return whether a text is a number between 0 and 1."""
    with suppress(ValueError):
        return 0 < float(text) < 1
    return False


def accuracies(text: str) -> list[float]:
    """Parse `0.5,0.8` into numbers in (0, 1)."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers such as 0.8,0.85, got {text!r}") from None
    for value in found:
        if not 0 < value < 1:
            raise argparse.ArgumentTypeError(f"targets must be accuracies in (0, 1), got {value}; 0.85 is 85%")
    return found


def tables(args: argparse.Namespace) -> dict[str, Any]:
    """Return the tables of the TOML file, if any, with the command line's options on top."""
    _accept_method(args)
    given: dict[str, Any] = read_tables(Path(args.file)) if getattr(args, "file", None) else {}
    for name in ("method", *(name for names in GROUPS.values() for name in names)):
        value = getattr(args, name, None)
        if value is None:
            continue
        named = parse_method(value) if name == "method" else {"name": value}
        if name == "data":
            given = without_augment(given, _name(given.get(name)), value)
        given[name] = {**_own(given, name, named["name"]), **named} if name in TABLES else value
    if args.local_epochs is not None:
        if args.local_steps:
            raise UserError("--local-epochs and --local-steps: expected one of them, got both; leave one out")
        given["local_steps"] = 0  # otherwise the file's local_steps would win
    for name in ("ray_address", "ray_cpus", "ray_gpus"):
        if getattr(args, name, None) and given.get("backend") != "ray":
            raise UserError(f"--{name.replace('_', '-')}: expected --backend ray, found another; add it")
    for text in args.sets:
        _set(given, text, args)
    for target, name in NAMED.items():
        if isinstance(given.get(target), dict):
            given[target].setdefault("name", name)
    return given


def _set(given: dict[str, Any], text: str, args: argparse.Namespace) -> None:
    """Write the value of one `--set` into the tables."""
    target, key, value = parse_set(text, given.get("method", TABLES["method"]))
    if not target:
        given[key] = value
        return
    table = given.get(target, {})
    if not isinstance(table, dict | str):
        raise UserError(f"config: {target} must be a name or a table, got {table!r}; correct it in {args.file}")
    given[target] = {**({"name": table} if isinstance(table, str) else table), key: value}


def as_given(config: Config) -> list[str]:
    """Return the options that make this config, without method and seed: all that differ from the defaults.

    Example:
        >>> from fedspeed.config.config import Spec
        >>> as_given(Config(clients=50, data=Spec("synthetic", {"alpha": 0.5})))
        ['--data', 'synthetic', '--clients', '50', '--set', 'data.alpha=0.5']
    """
    found: list[str] = []
    usual = Config(data=config.data)  # the data decide the default of augment
    left_open = {field.name: field.default for field in dataclasses.fields(Config)}
    for name in (name for names in GROUPS.values() for name in names if name not in ("preset", "seed", "keep_every")):
        value = getattr(config, name)
        default = getattr(usual if name == "augment" else Config(), name)
        flag = "--" + name.replace("_", "-")
        if value == left_open[name]:  # for example 0 clients: as many as the data have
            continue
        if name in TABLES:
            found += [flag, value.name] if value.name != default.name else []
        elif isinstance(value, Spec):
            found += [flag, value.name]
        elif value != default and isinstance(value, bool):
            found += [flag if value else flag.replace("--", "--no-", 1)]
        elif value != default:
            found += [flag, ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    for target in ("data", "model", *(key for key in FROM_FILES if isinstance(getattr(config, key), Spec))):
        found += [part for key, value in getattr(config, target).options.items()
                  for part in ("--set", f"{target}.{key}={toml_value(value)}")]  # fmt: skip
    return found


def _name(table: Any) -> str:
    """Return the name in a data table, or the default."""
    return str((table.get("name") if isinstance(table, dict) else table) or TABLES["data"])


def _own(given: dict[str, Any], key: str, name: str) -> dict[str, Any]:
    """Return the table's options; none if another name makes them options of something else."""
    table = given.get(key)
    return table if isinstance(table, dict) and table.get("name", name) == name else {}


def _accept_method(args: argparse.Namespace) -> None:
    """Take `fedspeed run fedavg` for `fedspeed run --method fedavg`: `compare` has its methods there, too."""
    word = getattr(args, "file", None)
    if not word or word.endswith(".toml") or Path(word).exists():
        return
    name = parse_method(word)["name"]
    if not file_of(name) and name not in (METHODS | WRAPPERS):
        raise UserError(f"run {word}: expected a config file (.toml) or a method, found neither; {_hint(word)}")
    if args.method:
        raise UserError(f"run: expected one method, found {word} and --method {args.method}; leave one out")
    args.file, args.method = None, word


def _hint(word: str) -> str:
    near = nearest(word, METHODS)
    return f"did you mean {near}?" if near else "`fedspeed methods` lists the methods"


def parse_set(text: str, method: Any = TABLES["method"]) -> tuple[str, str, Any]:
    """Parse `method.rho=0.05` into ("method", "rho", 0.05); values are TOML, bare words are strings.

    Args:
        method: the method whose fields need no `method.` before them.

    Example:
        >>> parse_set("rho=0.05"), parse_set("lr=0.5")
        (('method', 'rho', 0.05), ('', 'lr', 0.5))
    """
    path, value = split_pair(text, "--set", "FIELD=VALUE such as lr=0.5, rho=0.05 or model.hidden=32")
    target, dot, key = path.partition(".")
    if dot and target not in NAMED:
        raise unknown("--set target", target, NAMED)
    if dot:
        return target, key.strip(), parse_value(value)
    known = {name for names in GROUPS.values() for name in names if name not in TABLES}
    if path in known:
        return "", path, parse_value(value)
    own = [field.name for field in dataclasses.fields(class_of(_table(method))[0]) if field.init]
    if path not in own:
        raise unknown("field in --set", path, [*known, *own])
    return "method", path, parse_value(value)


def _table(method: Any) -> dict[str, Any]:
    return method if isinstance(method, dict) else {"name": method}


def preset_line(given: dict[str, Any]) -> str:
    """Return the line that says which values a preset changes in the tables of a run; "" without a preset.

    Example:
        >>> preset_line({"preset": "paper", "method": "fedavg"})
        'preset paper: lr_decay=0 (the decay that the paper gives the method)'
    """
    if (word := given.get("preset")) is None:
        return ""
    before, after = _whole(given), _whole(apply_preset(given))
    changed = ", ".join(f"{key}={value}" for key, value in _changes(before, after))
    data, note = before["data"]["name"], ""
    if word == "paper" and changed:
        note = " (the decay that the paper gives the method)"
    elif word == "released" and data not in THEIR_DATA:
        note = f"; {data} is not in the authors' code, its augmentation stays"
    return f"preset {word}: {changed or 'nothing to change'}{note}"


def print_presets(console: Console, methods: Iterable[tuple[str, dict[str, Any]]]) -> None:
    """Print what a preset changes in the tables of several methods: one line, and one per method with own values."""
    lines: dict[str, str] = {}
    for name, given in methods:
        lines.setdefault(preset_line(given), name)
    for line, name in lines.items():
        if line:
            console.print(f"{name}: {line}" if "method." in line else line)


def _whole(tables: dict[str, Any]) -> dict[str, Any]:
    """Return tables with the defaults of what they leave out, fields of the method included."""
    found: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Config)}
    found |= TABLES | tables
    named: dict[str, Any] = {key: {"name": found[key]} if isinstance(found[key], str) else found[key] for key in TABLES}
    return found | named | {"method": build(named["method"]).to_dict()}


def _changes(before: dict[str, Any], after: dict[str, Any], place: str = "") -> Iterator[tuple[str, str]]:
    """Yield the keys whose values differ, and the values as the command line takes them."""
    for key, value in after.items():
        if isinstance(value, dict):
            yield from _changes(before.get(key) or {}, value, f"{place}{key}.")
        elif before.get(key) != value:
            yield place + key, f"{value:g}" if isinstance(value, float) else toml_value(value)


def output_folder(args: argparse.Namespace, stem: str) -> Path:
    """Return `--out`, or make a new folder under runs/, at once, because two commands may start in one second."""
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
