"""`Config`: a complete run as a value, to and from TOML; and the tables `until` of a fork. Nothing here imports torch.

`[until.300]` with `lr = 0.1` says that the rate was 0.1 in rounds 1 to 300, whatever the config says for later ones. So
the config is complete, and running it from round 0 gives the bits of the fork. Such tables are read here, and settings
that must be the same in all rounds are refused; `server/segments.py` runs the rounds.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli_w

from ..errors import UserError, unknown
from ..methods import FedSpeed, build
from ..methods.base import Method, nested
from ..utils.files import merged, refuse_depth
from ..utils.files import read_toml as read_toml
from ..utils.registry import file_of, named_file
from .lr_schedule import from_file, table_of
from .plan import COMMAND_LINE_ONLY, PLACEMENT, Plan, course, federation, later_course, later_work, local_work
from .presets import PRESETS, as_released, paper_decay
from .spec import (
    FROM_FILES,
    GIVEN,
    SETTINGS,
    Setting,
    Spec,
    as_setting,
    as_table,
    clients_that_train,
    loss_text,
    parse_client_test,
)
from .stopping import RULES

Until = tuple[tuple[int, dict[str, Any]], ...]
"""(300, {"lr": 0.1}), ...: the values that differ in the rounds up to the 300th; in order."""

DREW = "the rounds so far were drawn with it"
FIXED = {
    "model": "the vectors of the rounds so far are that model's",
    "data": "the rounds so far learned from these data",
    "split": "clients keep what they own",
    "clients": "clients keep what they own",
    "validation": "what was held out stays held out",
    "client_test": "what was held out stays held out",
    "augment": "the rounds so far learned from these data",
    "batch_norm": "the vectors of the rounds so far are that model's",
    "loss": "the scores so far are of it",
    "test_set": "the scores so far are on it, or there are none",
    "seed": "split, first model, cohorts and batches are drawn with it",
    "active": DREW,
    "cohort": DREW,
    "state_dtype": "clients' states are stored in it",
    "network": "virtual seconds so far are of it",
    "devices": "virtual seconds so far are of them",
    "client_metrics": "the scores so far are a table with its columns",
    "format": "it is the version of the layout",
    "until": "it says what the rounds so far had",
}
"""Fields that are the same in all rounds of a run, and why."""
ANY_ROUND = ("rounds", "targets", "data_dir", *RULES)
"""Fields without effect on finished rounds; `rounds` only where the last of them was the run's last."""


def read_until(given: Any, rounds: int) -> Until:
    """Return the segments of a config, in order, from its table; raise for anything else."""
    if isinstance(given, tuple):
        given = {str(upto): over for upto, over in given}
    if not isinstance(given, dict) or not all(
        re.fullmatch("[1-9][0-9]{0,17}", str(key)) and int(key) < rounds and isinstance(over, dict)
        for key, over in given.items()
    ):
        raise UserError(
            f"config: until must be tables of the run's {rounds} rounds such as [until.30] with lr = 0.1, got {given!r}"
        )
    for key, over in given.items():
        for name in over.keys() & FIXED.keys():
            raise UserError(f"config: until.{key}.{name}: {name} is the same in all rounds of a run: {FIXED[name]}")
        for name in over.keys() & set(PLACEMENT):  # nor may a run directory name a cluster here
            raise UserError(f"config: until.{key}.{name}: {name} says where rounds are computed, not what they had")
        schedule = over.get("lr_schedule")
        if file_of(schedule) or table_of(schedule) or isinstance(schedule, dict):
            raise UserError(f"config: until.{key}.lr_schedule: expected a schedule with its numbers, found a file")
        if "method" in over and not _fields_alone(over["method"]):  # a name could make it execute a file
            raise UserError(f"config: until.{key}.method: expected fields of the run's own method, found another")
    return tuple(sorted((int(key), over) for key, over in given.items()))


def _fields_alone(method: Any) -> bool:
    """Return whether a table holds only fields of a method and of those inside it, and names no method."""
    named = not isinstance(method, dict) or any(name in method for name in ("name", "code", "origin"))
    return not named and ("base" not in method or _fields_alone(method["base"]))


def class_chain(method: Method) -> list[tuple[str, str, str]]:
    """Return class name, file and its digest of a method and of those inside it."""
    return [(type(each).__name__, each.source, each.code) for each in nested(method)]


def changed_lasting_field(then: Method, now: Method) -> str:
    """Return the first field that differs in a method or one inside it although its class lists it as `lasting`."""
    pairs = zip(nested(then), nested(now), strict=True)
    return next((name for a, b in pairs for name in a.lasting if getattr(a, name) != getattr(b, name)), "")


GIVEN_FROM_PYTHON = (
    "expected names of model and data, found objects that were given to fedspeed.simulate; continue such a run from "
    "Python, by the same call with out= and resume=True (`fedspeed diff` and `fedspeed compare` take it as it is)"
)

TABLES = {"method": "fedspeed", "model": "mlp", "data": "digits"}
"""The keys of a config that are tables, and their default names."""
NAMED: dict[str, str] = TABLES | {key: getattr(Plan, key, "") for key in FROM_FILES}
"""The keys of a config that may name a Python file, with options of its own, and their default names."""
FILED = (*NAMED, "lr_schedule")
"""The keys of a config that may name a file; of a schedule's file only the numbers are kept, not the code."""

OWN_DATA = ("images", "arrays", "huggingface")
"""The names of `data` that stand for the user's own data."""

CONFIG_FORMAT = 1
"""Version of the run directory's layout, written as `format` in `config.toml`."""


def apply_preset(given: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a config with a preset's values where none was given, without the key `preset`."""
    given = dict(given)
    preset = given.pop("preset", None)
    if preset is None:
        return given
    if preset not in PRESETS:
        raise unknown("preset", str(preset), PRESETS)
    if preset == "paper":
        return {"lr_decay": 0.0, **given}
    tables = {key: as_table(given.get(key, name), key) for key, name in TABLES.items()}
    return as_released(given, tables, given.get("split", Config.split))


@dataclass(frozen=True)
class Config(Plan):
    """A complete run: a `Plan` with method, model, data and split. Equal configs give equal bits.

    Example:
        >>> config = Config.from_dict({"rounds": 3, "method": {"name": "fedspeed", "rho": 0.05}})
        >>> Config.from_dict(config.to_dict()) == config
        True
    """

    method: Method = field(default_factory=FedSpeed)
    model: Spec = local_work(Spec("mlp"), None, "model (`fedspeed models`), or file.py:build")  # noqa: RUF009
    loss: Setting = later_work(  # noqa: RUF009
        "",
        None,
        "the loss: cross-entropy, mse, huber, bce (labels of 0 and 1) or file.py:loss, with parameters as in "
        "cross-entropy:smoothing=0.1 or huber:delta=0.5; default by the targets: cross-entropy for classes, mse for "
        "floats",
    )
    data: Spec = federation(Spec("digits"), None, "data set (`fedspeed data list`), or file.py:load")  # noqa: RUF009
    split: str = federation("dirichlet:0.6", about="who owns what: iid, dirichlet:0.6, natural, ...")
    clients: int = federation(
        0, "[0, 1e8]", "the number of clients, m; 0 takes 100, or with split natural as many as the data have"
    )
    validation: str = course(
        "", about="the data set aside to choose rounds on: 0.1 of every client, clients:0.1 or clients:5 of them"
    )
    client_test: str = later_course(
        "",
        about="the test part per client, for client_metrics: 0.2 of every client's samples, never trained on, or own, "
        "the part that the data come with",
    )
    test_set: bool = later_course(True, about="whether rounds are scored on the test set; without, nothing reads it")
    augment: str = federation(
        "",
        about="the augmentation of pictures: paper, released, flip or none; default paper, for data of your own none",
    )
    data_dir: str = federation("", about="the folder or archive of a copy of the data you already have")
    targets: tuple[float, ...] = course((), None, "accuracies to time, for example 0.8,0.85")
    until: Until = field(default=(), metadata={"later": True})  # other settings of a fork's first rounds

    def __post_init__(self) -> None:
        for name in ("validation", "client_test"):
            if isinstance(share := getattr(self, name), int | float):
                self._set(**{name: str(share)})
        super().__post_init__()
        self._settle_loss()
        if self.client_test:
            parse_client_test(self.client_test)
        for key, kind in (("method", Method), ("model", Spec), ("data", Spec)):
            if not isinstance(getattr(self, key), kind):
                raise UserError(
                    f"Config: {key} must be a {kind.__name__}, got {getattr(self, key)!r}; "
                    f"Config.from_dict takes names and tables"
                )
        for key in FROM_FILES:
            if not isinstance(value := getattr(self, key), str | Spec):
                raise UserError(f"Config: {key} must be a name or path/to/file.py:NAME, got {value!r}; it is stored")
        for key in ("model", "data"):
            spec: Spec = getattr(self, key)
            if file_of(spec.name) and not spec.code:
                self._set(**{key: Spec.from_table(key, spec.to_dict())})
        self.require_schedules(self.method, paper_decay(self.method))
        text = self.data_dir.encode("utf-8", "replace").decode("utf-8")
        if text != self.data_dir:
            raise UserError(f"Config: data_dir must be text that UTF-8 can hold, got {text!r}; rename the folder")
        if bad := [a for a in self.targets if not 0 < a < 1]:
            raise UserError(f"Config: targets must be accuracies in (0, 1), got {bad[0]}; 0.85 is 85%")
        self.require(self.method)
        if not self.augment and not self.data.code:  # data from a user's file choose their own
            self._set(augment=usual_augment(self.data.name))
        self._settle_clients()
        self._set(until=read_until(self.until, self.rounds))
        self.config_at(0)

    @cached_property
    def stretches(self) -> list[tuple[int, Config]]:
        """Return the configs of a fork's first rounds, each with its last round; an empty list for any other run."""
        tables = {key: value for key, value in self.to_dict().items() if key not in ("until", *RULES)}
        whole = [(upto, over, {key: over[key] for key in SETTINGS if key in over}) for upto, over in self.until]
        found = [(upto, Config.from_dict(merged(tables, over) | named)) for upto, over, named in whole]
        for upto, config in found:
            if class_chain(config.method) != class_chain(self.method):
                raise UserError(f"config: until.{upto}.method: expected numbers of {self.method.name}, found another")
            if name := changed_lasting_field(config.method, self.method):
                raise UserError(f"config: until.{upto}.method: expected the same {name} in all rounds, found another")
        return found

    def config_at(self, t: int) -> Config | None:
        """Return the config of round t = 0, 1, ... if it is one of a fork's first, else None."""
        return next((config for upto, config in self.stretches if t < upto), None) if self.until else None

    def _settle_loss(self) -> None:
        """Write the loss in its one spelling; the file of a user's own is read, not executed."""
        loss = as_setting("loss", self.loss)
        self._set(loss=loss_text(loss) if isinstance(loss, str) else loss)

    def _settle_clients(self) -> None:
        """Set clients and active where left open; a natural split and a user's file set them with the data."""
        if not self.clients and self.split.strip() != "natural" and not self.data.code:
            self._set(clients=100)
        train = clients_that_train(self.validation, self.clients) if self.validation else self.clients
        if not train:
            return
        self._set(active=self.cohort_size(train))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # only errors count here: the simulation, which is made once, warns
            self.require_clients(self.method, train)

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> Config:
        """Read plain tables; unknown keys and wrong types are errors that name the nearest key."""
        refuse_depth(given)
        given = apply_preset(given)
        if (version := given.pop("format", CONFIG_FORMAT)) != CONFIG_FORMAT:
            raise UserError(
                f"config: expected format {CONFIG_FORMAT}, found {version!r}; use the fedspeed that wrote it"
            )
        for key in ("model", "data", *SETTINGS):
            if key in given and isinstance(given[key], str | dict) and as_table(given[key], key)["name"] == GIVEN:
                raise UserError(GIVEN_FROM_PYTHON)
        known = {f.name for f in fields(cls)}
        for key in given:
            if key not in known:
                raise unknown("config key", key, known)
        if "method" in given:
            given["method"] = build(as_table(given["method"], "method"))
        for key in ("model", "data"):
            if key in given:
                given[key] = Spec.from_table(key, as_table(given[key], key))
        if "lr_schedule" in given:
            given["lr_schedule"] = from_file(given["lr_schedule"])
        if "targets" in given:
            if not isinstance(given["targets"], list | tuple):
                raise UserError(f"config: targets must be a list of accuracies, got {given['targets']!r}")
            for a in given["targets"]:
                if isinstance(a, bool) or not isinstance(a, int | float) or abs(a) > 1e300:
                    raise UserError(f"config: targets must be numbers, got {a!r}")
            given["targets"] = tuple(map(float, given["targets"]))
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """Return plain tables with every value, except defaults of fields marked `later`: digests must not change."""
        later = {f.name for f in fields(self) if f.metadata.get("later") and getattr(self, f.name) == f.default}
        plain = {name: value for name, value in self.fields().items() if name not in later}
        plain["targets"] = list(self.targets)
        if self.until:
            plain["until"] = {str(upto): over for upto, over in self.until}
        for key in ("method", "model", "data"):
            plain[key] = plain.pop(key).to_dict()
        for key in FROM_FILES:
            if isinstance(plain.get(key), Spec):
                plain[key] = plain[key].to_dict()
        return {"format": CONFIG_FORMAT, **plain}

    @classmethod
    def from_toml(cls, path: Path) -> Config:
        """Read a TOML file."""
        return cls.from_dict(read_tables(path))

    def to_toml(self) -> str:
        """Return the text of a TOML file."""
        return tomli_w.dumps(self.to_dict())


def read_tables(path: Path) -> dict[str, Any]:
    """Return the tables of a config file; its relative paths start from its own folder."""
    tables = read_toml(path)
    for name in tables.keys() & set(COMMAND_LINE_ONLY):
        raise UserError(f"{path}: {name}: expected on the command line or in $RAY_ADDRESS, found in a file; remove it")
    return resolved(tables, path.parent)


def resolved(tables: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the tables of a config file in a folder, with absolute paths of files and folders."""
    folder = folder.resolve()
    if isinstance(tables.get("data_dir"), str) and tables["data_dir"]:
        tables["data_dir"] = _beside(folder, tables["data_dir"])
    if file := table_of(tables.get("lr_schedule")):
        tables["lr_schedule"] = f"piecewise:{_beside(folder, file)}"
    return rename_code(tables, lambda file, _: _beside(folder, file))


def _beside(folder: Path, name: str) -> str:
    """Return a path relative to a config's folder; warn if it is that of the current folder, as older configs meant."""
    path = folder / Path(name).expanduser()
    if not path.exists() and Path(name).exists():
        warnings.warn(f"there is no {path}: {os.path.abspath(name)} of the current folder is taken", stacklevel=4)
        return os.path.abspath(name)
    return str(path)


def rename_code(tables: dict[str, Any], name: Callable[[str, str], str], keys: Iterable[str] = FILED) -> dict[str, Any]:
    """Return a config's tables with other names for the files of its method, model, data and settings.

    Args:
        name: a function of a file and its digest in the table ("" if none) that returns the file's other name.
        keys: the tables to rename in; of the first rounds of a fork it is `SETTINGS`.

    Example:
        >>> rename_code({"method": {"name": "fedinit", "base": "own.py:Mine"}}, lambda file, code: f"code/{file}")
        {'method': {'name': 'fedinit', 'base': {'name': 'code/own.py:Mine'}}}
    """
    renamed = {key: _renamed(tables[key], name) for key in keys if key in tables}
    if isinstance(first := tables.get("until"), dict):  # the first rounds of a fork
        segments = ((t, over, isinstance(over, dict)) for t, over in first.items())
        renamed["until"] = {t: rename_code(over, name, SETTINGS) if fits else over for t, over, fits in segments}
    return tables | renamed


def _renamed(method: Any, name: Callable[[str, str], str]) -> Any:
    """Return a table, and that of its base, with other names for files of code."""
    table = {"name": method} if isinstance(method, str) and named_file(method)[1] else method
    if not isinstance(table, dict):
        return method
    before, file, after = named_file(table.get("name"))
    renamed = {"name": f"{before}{name(file, str(table.get('code', '')))}{after}"} if file else {}
    base = {"base": _renamed(table["base"], name)} if "base" in table else {}
    return {**table, **renamed, **base}


def usual_augment(name: str) -> str:
    """Return the default augmentation of a data set by name: the user's own data have none."""
    return "none" if name in OWN_DATA else "paper"


def without_augment(tables: dict[str, Any], before: str, after: str) -> dict[str, Any]:
    """Return a config's tables for other data: the user's own do not inherit the default augmentation of our sets.

    Example:
        >>> without_augment({"lr": 0.1, "augment": "paper"}, "cifar10", "arrays")
        {'lr': 0.1}
    """
    own = [name in OWN_DATA or bool(file_of(name)) for name in (before, after)]
    if own == [False, True] and tables.get("augment") == usual_augment(before):
        return {key: value for key, value in tables.items() if key != "augment"}
    return tables
