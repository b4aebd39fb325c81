"""Settings by name with parameters, perhaps from a user's file (`Spec`): cohorts, losses, parts that are set aside.

A setting of `SETTINGS` is text for a built-in value (`cohort = "bernoulli"`) and a table for a user's file
(`cohort = {name = "own.py:Sampler", d = 20}`), which is then a part of the run as the file of a model is: hashed,
copied into the run directory, and executed only if the user allows it. From Python it may also be an object.

A cohort says who takes part in a round, a value with a parameter as a split is. `server/cohort.py` draws them.

fixed               S clients, uniformly and without replacement
bernoulli           each client alone with probability S/N, drawn again while none is
cyclic              the next S clients of an order that is drawn once, from the seed: everyone equally often
cyclic:in-order     the same in the order of the ids
weighted:samples    S clients without replacement, each draw in proportion to their numbers of samples
availability:FILE   S of those whom a trace has in the round, uniformly; all of them if they are fewer
file.py:NAME        a sampler of the user's own

Losses are `mse`, `huber:delta=0.5`, `cross-entropy:smoothing=0.1`, `bce`; `client/losses.py` computes them.

`validation` and `client_test` are parts of the training data that are set aside before training. The first is one set,
to choose rounds and settings on; the second is a test part per client.

The settings in force are for people: one line per run, and what several runs share. Reports read them from files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import UserError, unknown
from ..utils.checked_fields import Params, param, parse_pairs
from ..utils.registry import call, file_of, load_code, named_file, read_code, require_part
from .lr_schedule import shown

GIVEN = "given"
"""The name of a model, of data and of settings that were passed to `simulate` as Python objects."""
OWN_CODE = "own_code"
"""The table of a config that has digests of the code of those objects, and the versions that they hold for."""
SETTINGS = ("cohort",)
"""The settings of a plan whose value may be a user's file or object."""
FROM_FILES = (*SETTINGS, "loss")
"""The settings of a config whose value may be a user's file; the loss is an argument of `simulate`, not of a plan."""


@dataclass(frozen=True)
class Spec:
    """A data set, a model or a setting by name with its own options, perhaps from a user's file.

    Args:
        name: a name, or `path/to/file.py:NAME`.
        code: the digest of that file; "" without one.
        origin: the user's path of the file, if `name` is a run directory's copy.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    code: str = ""
    origin: str = ""

    @classmethod
    def from_table(cls, kind: str, table: dict[str, Any]) -> Spec:
        """Read `{"name": ..., option: value}`; a file is read and hashed, not executed."""
        options = dict(table)
        name = options.pop("name")
        before, file, after = named_file(name)
        if not file:
            return cls(name, options)
        about = {key: options.pop(key, "") for key in ("code", "origin")}
        if not all(isinstance(value, str) for value in about.values()):
            raise UserError(f"{kind} {name}: expected text as code and origin, found {about!r}")
        path, _, code = read_code(kind, name, about["code"])
        return cls(f"{before}{path}{after}", options, code, about["origin"] or str(path))

    @property
    def label(self) -> str:
        """Return a short name for tables and folders: the file's alone where `name` holds a path."""
        return Path(self.origin).stem if self.code else self.name

    def to_dict(self) -> dict[str, Any]:
        """Return `{"name": ..., option: value}` for TOML, with the digest of its code if it has one."""
        code = {"code": self.code, "origin": self.origin} if self.code else {}
        return {"name": self.name, **code, **self.options}


Setting = str | Spec | Callable[..., Any]
"""A value of `SETTINGS`: built in, from a file, or an object of the caller."""


def as_table(value: Any, key: str) -> dict[str, Any]:
    """Return the table of `"mlp"` or `{name = "mlp"}`, which are the same."""
    table = {"name": value} if isinstance(value, str) else value
    if not isinstance(table, dict) or not isinstance(table.get("name"), str):
        raise UserError(
            f'config: {key} must be a name or a table with a name, such as {key} = {{name = "..."}}, got {value!r}'
        )
    return dict(table)


def as_setting(key: str, value: Any) -> Setting:
    """Return a setting as a plan holds it: text for a built-in value, a `Spec` for a file, an object as it is.

    Example:
        >>> as_setting("cohort", {"name": "bernoulli"})
        'bernoulli'
    """
    if isinstance(value, Spec):
        if value.code or value.name == GIVEN:
            return value
        value = value.to_dict()
    if not isinstance(value, str | dict):
        if not callable(value) or isinstance(value, type):
            raise UserError(
                f"{key}: expected a name, path/to/file.py:NAME, or from Python a function or an object that can be "
                f"called, found {value!r}"
            )
        return value  # type: ignore[no-any-return]
    table = as_table(value, key)
    name = table["name"] = table["name"].strip()
    if named_file(name)[1]:
        return Spec.from_table(key, table)
    require_part(key, name)
    if len(table) > 1:
        other = next(option for option in table if option != "name")
        raise UserError(f"{key} {name}: expected options only beside path/to/file.py:NAME, found {other}; leave it out")
    return str(name)


def loaded(key: str, value: Setting) -> Any:
    """Return the object that a setting stands for: the caller's own, or NAME of its file, which is executed.

    A class is called with the options of the setting's table; a function is given them in every call. Text stays text.
    """
    if not isinstance(value, Spec) or not file_of(value.name):
        return value
    found = load_code(key, value.name, value.code)
    if not callable(found):
        raise UserError(f"{key} {value.name}: expected a function or a class, found {found!r}")
    if isinstance(found, type):
        return call(key, value.name, found, value.options)
    return partial(found, **value.options) if value.options else found


def setting_text(value: Any) -> str:
    """Return a setting as people write it, from a plan or from a stored table; a file without its folder.

    Example:
        >>> setting_text({"name": "code/own-12345678.py:Sampler", "origin": "own.py", "d": 20})
        'own.py:Sampler(d=20)'
    """
    table = value.to_dict() if isinstance(value, Spec) else value
    if not isinstance(table, dict):
        return table if isinstance(table, str) else getattr(table, "__qualname__", type(table).__qualname__)
    before, file, after = named_file(table.get("name"))
    name = f"{before}{Path(str(table.get('origin') or file)).name}{after}" if file else str(table.get("name"))
    options = ", ".join(f"{k}={v!r}" for k, v in table.items() if k not in ("name", "code", "origin"))
    return f"{name}({options})" if options else name


def with_texts(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a plan, or the tables of a config, with every setting that may be a file as text."""
    return {**fields, **{key: setting_text(fields[key]) for key in SETTINGS if key in fields}}


PARAMETERS: dict[str, tuple[str, ...]] = {
    "fixed": ("",),
    "bernoulli": ("",),
    "cyclic": ("", "in-order"),
    "weighted": ("samples",),
    "availability": ("FILE",),
}
"""The names of cohorts, each with the parameters that it takes; "" for none."""
SIZED = ("fixed", "cyclic", "weighted")
"""Cohorts of exactly S clients."""
UNIFORM = ("fixed", "bernoulli", "cyclic")
"""Cohorts in which every client takes part equally often, in the mean."""
BIASED = "clients are not drawn uniformly"


def cohort_name(value: Any) -> str:
    """Return the name of a cohort without its parameter; "" for a user's sampler and for what is none.

    Example:
        >>> cohort_name("cyclic:in-order"), cohort_name({"name": "availability:trace.csv"}), cohort_name("own.py:f")
        ('cyclic', 'availability', '')
    """
    text = value.name if isinstance(value, Spec) else value.get("name") if isinstance(value, dict) else value
    name = text.partition(":")[0] if isinstance(text, str) else ""
    return name if name in PARAMETERS else ""


def is_biased(value: Any) -> bool:
    """Return whether some clients may take part more often than others, by the cohort in a plan or a stored config."""
    return cohort_name(value) not in UNIFORM


def require_cohort(value: Setting) -> None:
    """Raise for a cohort that does not exist, or whose parameter is wrong.

    Example:
        >>> require_cohort("weighted:losses")
        Traceback (most recent call last):
        fedspeed.errors.UserError: cohort weighted: expected weighted:samples, found 'weighted:losses'
    """
    if isinstance(value, Spec) and cohort_name(value) and value.options:
        raise UserError(f"cohort {value.name}: expected no options, found {next(iter(value.options))}; leave it out")
    if not isinstance(value, str):
        return
    name, colon, parameter = value.partition(":")
    if name not in PARAMETERS:
        raise unknown("cohort", name, [*PARAMETERS, "file.py:NAME"])
    if parameter not in PARAMETERS[name] or parameter == "FILE" or (colon and not parameter):
        ways = " or ".join(f"{name}:{each}" if each else name for each in PARAMETERS[name])
        raise UserError(f"cohort {name}: expected {ways}, found {value!r}")


@dataclass(frozen=True)
class NoParameters(Params):
    """The parameters of a loss that has none."""


@dataclass(frozen=True)
class Smoothing(Params):
    """The parameter of cross-entropy."""

    smoothing: float = param(0.0, "[0, 1)", "the share of a label that is spread over all classes")


@dataclass(frozen=True)
class Delta(Params):
    """The parameter of the Huber loss."""

    delta: float = param(1.0, "(0, inf)", "the error from which on the loss is linear")


LOSSES: dict[str, type[Params]] = {"cross-entropy": Smoothing, "mse": NoParameters, "huber": Delta, "bce": NoParameters}
"""Name -> its parameters."""


def parse_loss(given: Any) -> tuple[str, dict[str, float]]:
    """Return the name of a loss and its parameters that are not at their defaults.

    Example:
        >>> parse_loss("huber:delta=0.5"), parse_loss("Cross_Entropy : smoothing=0")
        (('huber', {'delta': 0.5}), ('cross-entropy', {}))
    """
    if not isinstance(given, str):
        raise UserError(f"loss: expected a name such as mse or huber:delta=0.5, got {given!r}")
    name, _, text = given.partition(":")
    name = name.strip().lower().replace("_", "-")
    if name not in LOSSES:
        raise unknown("loss", given, [*LOSSES, "file.py:NAME"])
    usual, pairs = LOSSES[name]().fields(), parse_pairs(text)
    if [key for key, _ in pairs if key not in usual] or len(pairs) > len(usual):
        wanted = " and ".join(f"{key}=NUMBER once" for key in usual) or "no parameters"
        raise UserError(f"loss {name}: expected {wanted}, got {given!r}")
    try:
        found = LOSSES[name](**{key: _number(value) for key, value in pairs}).fields()
    except UserError as error:
        raise UserError(f"loss {name}: {str(error).partition(': ')[2]}") from None
    return name, {key: value for key, value in found.items() if value != usual[key]}


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


def loss_text(given: Any) -> str:
    """Return a loss in its one spelling; "" stands for the one that the targets decide.

    Example:
        >>> loss_text("huber:delta=1.0"), loss_text("huber: delta=.5"), loss_text("")
        ('huber', 'huber:delta=0.5', '')
    """
    if isinstance(given, str) and not given.strip():
        return ""
    name, own = parse_loss(given)
    return name + "".join(f":{key}={value!r}" for key, value in own.items())


@dataclass(frozen=True)
class Validation:
    """A fraction of every client's rows, or (`of_clients`) a share or a number of clients that then do not train.

    Example:
        >>> parse_validation("0.1").count(25), parse_validation("clients:5").count(100)
        (3, 5)
    """

    amount: float | int
    of_clients: bool = False

    def count(self, n: int) -> int:
        """Return how many of n rows or clients: rounded, halves up; at least one always stays for training."""
        wanted = self.amount if isinstance(self.amount, int) else math.floor(self.amount * n + 0.5)
        if self.of_clients and not 0 < wanted < n:
            raise UserError(
                f"validation: expected 1 to {n - 1} of {n} clients, found clients:{self.amount}, which is {wanted}"
            )
        return min(wanted, n - 1)


def parse_validation(spec: str | float) -> Validation:
    """Read `0.1`, `"clients:0.1"` or `"clients:5"`; raise for anything else."""
    kind, colon, amount = str(spec).strip().rpartition(":")
    try:
        value: float | int = int(amount) if kind and amount.strip().isdecimal() else float(amount)
    except ValueError:  # `int` raises it for thousands of digits, too
        value = math.nan
    good = value >= 1 if isinstance(value, int) else 0 < value < 1
    if not good or kind not in ("", "clients") or bool(colon) != bool(kind) or isinstance(spec, bool):
        raise UserError(
            "validation: expected 0.1 (that fraction of every client's samples), clients:0.1 or clients:5 (that many "
            f"clients, who do not train), found {spec!r}"
        )
    return Validation(value, bool(kind))


OWN_TEST = "own"
"""The value of `client_test` for data that come with a test part per client."""


def parse_client_test(spec: str | float) -> Validation | None:
    """Read `0.2`, that share of every client's rows, or `"own"`, for which None is returned; raise for anything else.

    Example:
        >>> parse_client_test("0.2").count(25), parse_client_test(0.2).count(1), parse_client_test("own")
        (5, 0, None)
    """
    if str(spec).strip() == OWN_TEST:
        return None
    try:
        share = math.nan if isinstance(spec, bool) else float(spec)  # of NumPy's and torch's numbers as they are
    except (TypeError, ValueError):
        share = math.nan
    if not 0 < share < 1:
        raise UserError(
            "client_test: expected a share between 0 and 1 such as 0.2 (of every client's samples), or own (the test "
            f"part per client that the data come with), found {spec!r}"
        )
    return Validation(share)


def clients_that_train(spec: str, clients: int) -> int:
    """Return how many of the clients are left to train; 0 if their number is not known yet.

    Example:
        >>> clients_that_train("clients:0.1", 50), clients_that_train("0.1", 50), clients_that_train("clients:5", 0)
        (45, 50, 0)
    """
    chosen = parse_validation(spec)
    return clients - chosen.count(clients) if clients and chosen.of_clients else clients


ALWAYS = ("lr", "lr_decay", "weight_decay", "weighting", "augment", "loss", "local_epochs", "batch_size", "active",
          "cohort")  # fmt: skip
"""The settings that are always shown, in this order; `local_steps` replaces `local_epochs` where it is set."""
IF_SET = ("lr_schedule", "warmup", "follow_lr", "clip", "local_optimizer", "accuracy", "client_test", "validation")
UNSET = {"local_optimizer": "sgd"}
"""The values at which these are not set, where that is not none."""
BY_DATA = ("augment", "loss", "accuracy")
"""Settings that the data decide: only a summary holds them, since a config may ask for what its data do not have."""


def in_force(config: Mapping[str, Any], summary: Any = None) -> dict[str, str]:
    """Return the settings that a run trains with, by the names of its config.

    Args:
        config: its tables, or the fields of its plan and `clients`.
        summary: the table `settings` of its summary, with what data decide: loss, augmentation, what an accuracy is of.

    Example:
        >>> in_force({"lr": 0.1, "local_epochs": 5, "local_steps": 3, "active": 10, "clients": 100, "clip": 0.0})
        {'lr': '0.1', 'local_steps': '3', 'active': '10 of 100'}
    """
    by_data = {name: summary[name] for name in BY_DATA if name in summary} if isinstance(summary, Mapping) else {}
    values = {**{name: value for name, value in with_texts(config).items() if name not in BY_DATA}, **by_data}
    names = [*ALWAYS, *(name for name in IF_SET if values.get(name) not in (None, "", 0, UNSET.get(name)))]
    if values.get("local_steps"):
        names[names.index("local_epochs")] = "local_steps"
    if schedule := str(values.get("lr_schedule", "")):
        values["lr_schedule"] = shown(schedule)
        names.remove("lr_decay")
        names.insert(1, names.pop(names.index("lr_schedule")))
    found = {name: _text(values[name]) for name in names if values.get(name) not in (None, "")}
    if "cohort" in found and is_biased(config.get("cohort")):
        found["cohort"] += f" ({BIASED})"
    if "active" in found and values.get("clients"):
        found["active"] += f" of {_text(values['clients'])}"
    return found


def one_line(settings: Mapping[str, str]) -> str:
    """Return settings in one line, `lr 0.1, augment none`."""
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def compared(settings: Mapping[str, Mapping[str, str]]) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Return the settings that several methods share, and those that differ: by name, the value of each.

    Example:
        >>> compared({"fedavg": {"lr": "0.1", "clip": "1"}, "fedspeed": {"lr": "0.1"}})
        ({'lr': '0.1'}, {'clip': {'fedavg': '1', 'fedspeed': 'none'}})
    """
    known = dict.fromkeys(name for one in settings.values() for name in one)
    names = [name for name in known if name not in BY_DATA or all(name in one for one in settings.values())]
    values = {
        name: {label: one.get(name, UNSET.get(name, "none")) for label, one in settings.items()} for name in names
    }
    same = {name: next(iter(of.values())) for name, of in values.items() if len(set(of.values())) == 1}
    return same, {name: of for name, of in values.items() if name not in same}


def difference(settings: Mapping[str, Mapping[str, str]]) -> str:
    """Return the settings of several methods in a sentence: those they share and those that differ.

    Example:
        >>> difference({"fedavg": {"lr": "0.1", "clip": "1"}, "fedspeed": {"lr": "0.1"}})
        'settings of all: lr 0.1; they differ in clip: 1 (fedavg), none (fedspeed)'
    """
    same, others = compared(settings)
    if len(settings) < 2:
        return f"settings: {one_line(same)}" if same else ""
    parts = []
    for name, of in others.items():
        whose: dict[str, list[str]] = {}
        for label, value in of.items():
            whose.setdefault(value, []).append(label)
        each = ", ".join(f"{value} ({', '.join(labels)})" for value, labels in whose.items())
        parts.append(f"{name}: {each}")
    return f"settings of all: {one_line(same)}; they differ in {'; '.join(parts) or 'none of them'}"


def _text(value: Any) -> str:
    """Return a value as the command line takes it; at most a line of it, since it may come from an untrusted file."""
    return f"{value:g}" if isinstance(value, float) else str(value)[:200]
