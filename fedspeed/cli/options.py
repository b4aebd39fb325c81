"""Options that commands share: every field of `Config`, taken from the dataclass itself, and what a preset changes.

Methods are written as `fedspeed:rho=0.05+topk:0.01`. Whether a value lies in the range of its field is checked by
`utils/checked_fields.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from ..config.config import NAMED, TABLES, Config, apply_preset, read_tables, without_augment
from ..config.plan import Plan, fidelity
from ..config.presets import PRESETS, THEIR_DATA
from ..config.spec import FROM_FILES, Spec
from ..errors import UserError, nearest, unknown
from ..experiments.grid import parse_value
from ..methods import METHODS, WRAPPERS, build, class_of, find_method
from ..methods.base import Method
from ..utils.registry import file_of

if TYPE_CHECKING:
    from rich.console import Console


def split_pair(text: str, option: str, expected: str) -> tuple[str, str]:
    """Split `NAME=VALUE`; `parse_value` reads the value.

    Example:
        >>> split_pair("lr = 0.05", "--set", "KEY=VALUE")
        ('lr', ' 0.05')
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise UserError(f"{option}: expected {expected}, got {text!r}")
    return name.strip(), value


def split_pairs(texts: Iterable[str], option: str, expected: str) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of every `NAME=VALUE`; values are TOML, bare words are strings."""
    for text in texts:
        name, value = split_pair(text, option, expected)
        yield name, parse_value(value)


def toml_value(value: Any) -> str:
    """Return a value as `--set` takes it; words without quotes if they are read back as words."""
    text = tomli_w.dumps({"v": value}).strip().removeprefix("v = ")
    text = " ".join(part.strip() for part in text.splitlines())
    return value if isinstance(value, str) and parse_value(value) == value else text


def as_text(method: Method) -> str | None:
    """Return a method as `compare` takes it, `fedspeed:rho=0.05`; None if that is not possible.

    Example:
        >>> from fedspeed import FedAvg, FedSpeed
        >>> as_text(FedSpeed(rho=0.05)), as_text(FedAvg())
        ('fedspeed:rho=0.05', 'fedavg')
    """
    table, plain = method.to_dict(), type(method).from_fields({}).to_dict()
    fields = {key: value for key, value in table.items() if key != "name" and value != plain.get(key)}
    base = fields.get("base")
    if isinstance(base, dict):
        plainly = base == find_method(base["name"]).from_fields({}).to_dict()
        inner = None if plainly else as_text(method.base)  # type: ignore[attr-defined]
        if inner and table["name"] in WRAPPERS:
            return f"{inner}+{_written(table['name'], {k: v for k, v in fields.items() if k != 'base'})}"
        fields["base"] = base["name"] if plainly else base
    if any(isinstance(value, dict | list) for value in fields.values()):
        return None
    return _written(table["name"], fields)


def _written(name: str, fields: dict[str, Any]) -> str:
    return ":".join([name, *([",".join(f"{k}={toml_value(v)}" for k, v in fields.items())] if fields else [])])


def chain(text: str) -> list[str]:
    """Split `fedspeed:rho=0+topk:0.01+dp` into the method and the wrappers around it, inside first."""
    return re.split(rf"\+(?=(?:{'|'.join(WRAPPERS)})(?:[:+]|$))", text, flags=re.IGNORECASE)


def lowered(text: str) -> str:
    """Return a text with the package's methods in their one spelling, which labels and folders have.

    Example:
        >>> lowered("FedSpeed:rho=0+TopK:0.1"), lowered("own.py:Mine")
        ('fedspeed:rho=0+topk:0.1', 'own.py:Mine')
    """
    parts = (part.partition(":") for part in chain(text))
    known = METHODS | WRAPPERS
    return "+".join(f"{n.lower() if n.lower() in known else n}{colon}{rest}" for n, colon, rest in parts)


def parse_method(text: str) -> dict[str, Any]:
    """Parse `fedspeed:rho=0.05,lam=100` into a method's table; `file.py:Class:rho=0.05` is a user's method.

    Example:
        >>> parse_method("fedspeed:rho=0+topk:0.01")
        {'name': 'topk', 'fraction': 0.01, 'base': {'name': 'fedspeed', 'rho': 0}}
    """
    first, *around = [_method(part) for part in chain(text)]
    for wrapper in around:
        if "base" in wrapper:
            raise UserError(
                f"method {text!r}: expected wrappers without base after a +, found base in {wrapper['name']}"
            )
        first = {**wrapper, "base": first}
    return first


def _method(text: str) -> dict[str, Any]:
    name, _, given = text.partition(":")
    if name.endswith(".py"):
        cls, _, given = given.partition(":")
        name = f"{name}:{cls}" if cls else name
    elif "," in name:
        raise UserError(f"method {text!r}: expected one method, found a comma; separate methods by blanks")
    elif name.lower() in (METHODS | WRAPPERS):
        name = name.lower()
    fields: dict[str, Any] = {"name": name}
    for number, part in enumerate(given.split(",") if given else []):
        key, found, value = part.partition("=")
        if not found and not number and name in WRAPPERS:  # `topk:0.01`: its first own field
            key, value = dataclasses.fields(WRAPPERS[name])[1].name, part
        elif not found and ".py" not in name and name not in METHODS | WRAPPERS:
            raise unknown("method or wrapper", name.rpartition("+")[2], [*METHODS, *WRAPPERS])
        elif not found:
            raise UserError(f"method {text!r}: expected NAME:field=value,..., found {part!r}")
        if key.strip() in fields:
            raise UserError(f"method {text!r}: expected one value for {key.strip()}, found two; leave one out")
        fields[key.strip()] = parse_value(value)
    return fields


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
OPTIONS = [name for names in GROUPS.values() for name in names]
WORDS = {
    "targets": "A,B",
    "lr_schedule": "NAME:..",
    "warmup": "FIELD=N,..",
    "follow_lr": "FIELD,..",
    "stop_at": "SCORE=X",
    "max_time": "TIME",
}
"""Options without a default, and their placeholders in `--help`."""


def configure(parser: argparse.ArgumentParser, seeds: bool = False) -> None:
    """Add an option per field, in groups, with defaults shown; only given options override a TOML file."""
    fields = {f.name: f for f in dataclasses.fields(Config)}
    for title, names in GROUPS.items():
        group = parser.add_argument_group(title)
        for name in names:
            if name == "preset":
                about = (
                    "start from named settings: `paper` gives each method the paper's own learning-rate decay, "
                    "`released` does what the authors' code does (docs/explanation/authors-code.md)"
                )
                group.add_argument("--preset", metavar="|".join(PRESETS), help=about)
            elif name != "seed" or not seeds:
                add_field(group, name, fields[name])
    out = parser.add_argument_group("files and output")
    own = "a field of method, model, data or a file: rho=0.05 (or method.rho=0.05), model.hidden=[32,32], cohort.d=9"
    out.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", dest="sets", help=own)
    out.add_argument("--out", metavar="DIR", help="where to write (default: a new folder under runs/)")
    out.add_argument("--overwrite", action="store_true", help="replace a run that DIR already holds")
    output(out)


def output(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add --log, --quiet and --json, for commands that run rounds."""
    about = "send every round to csv (rounds.csv), tensorboard, wandb or mlflow; may be repeated"
    parser.add_argument("--log", action="append", default=[], metavar="NAME", help=about)
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")


def allow_code(parser: argparse.ArgumentParser, executes: bool = True) -> None:
    """Add --allow-code, for commands that read a run directory, which may come from another person.

    Args:
        executes: whether the command executes code; if not, the option is accepted and has no effect.
    """
    about = "accepted as by other commands; this one executes no code"
    if executes:
        about = "execute the Python files that the run's config names (file.py:Class); only if you trust them; "
        about += "a run that you made here needs no option"
    parser.add_argument("--allow-code", action="store_true", help=about)


def add_field(group: argparse._ArgumentGroup, name: str, field: dataclasses.Field[Any]) -> None:
    """Add the option of a field of `Config`, with its default and its allowed values."""
    flag, default = "--" + name.replace("_", "-"), field.default
    allowed, about = field.metadata["allowed"], field.metadata["about"]
    if name in TABLES or name in WORDS:
        kind, usual = accuracies if name == "targets" else str, default.name if name in TABLES else "none"
        group.add_argument(flag, type=kind, metavar=WORDS.get(name, "NAME"), help=f"{about}; default {usual}")
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
            note = "; it is a count, not a share" if kind is int and _fraction(text) else ""
            raise argparse.ArgumentTypeError(f"expected {wanted}, got {text!r}{note}") from None

    return convert


def _fraction(text: str) -> bool:
    """Return whether a text is a number between 0 and 1."""
    with suppress(ValueError):
        return 0 < float(text) < 1
    return False


def seed(text: str) -> int:
    """Parse a seed; its range is that of a run's."""
    value: int = _typed(int)(text)
    if not 0 <= value <= 10**18:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to 1e18, got {text!r}")
    return value


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
    for name in ("method", *OPTIONS):
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
            raise UserError(f"--{name.replace('_', '-')}: expected --backend ray beside it; add --backend ray")
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
    for name in (name for name in OPTIONS if name not in ("preset", "seed", "keep_every")):
        value = getattr(config, name)
        default = getattr(usual if name == "augment" else Config(), name)
        flag = "--" + name.replace("_", "-")
        if value == left_open[name]:  # for example 0 clients: as many as the data have
            continue
        if isinstance(value, Spec):
            found += [flag, value.name] if value.name != getattr(default, "name", "") else []
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
        near = nearest(word, METHODS)
        hint = f"did you mean {near}?" if near else "`fedspeed methods` lists the methods"
        raise UserError(f"run {word}: expected a config file (.toml) or a method, found neither; {hint}")
    if args.method:
        raise UserError(f"run: expected one method, found {word} and --method {args.method}; leave one out")
    args.file, args.method = None, word


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
    known = {name for name in OPTIONS if name not in TABLES}
    if path in known:
        return "", path, parse_value(value)
    table = method if isinstance(method, dict) else {"name": method}
    own = [field.name for field in dataclasses.fields(class_of(table)[0]) if field.init]
    if path not in own:
        raise unknown("field in --set", path, [*known, *own])
    return "method", path, parse_value(value)


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
