"""`Config`: a complete run as a value, to and from TOML. Nothing here imports torch."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli_w

from ..errors import UserError, unknown
from ..methods import FedSpeed, build
from ..methods.base import Method
from ..utils.files import read_toml as read_toml
from ..utils.files import refuse_depth
from ..utils.registry import file_of, read_code
from ..utils.tables import merged
from .plan import COMMAND_LINE_ONLY, Plan, course, federation, local_work
from .presets import PRESETS, as_released, paper_decay
from .stopping import RULES
from .until import Until, changed_lasting_field, class_chain, read_until
from .validation_set import clients_that_train

GIVEN = "given"
"""The name of a model and of data that were passed to `simulate` as Python objects."""
GIVEN_FROM_PYTHON = (
    "expected names of model and data, found objects that were given to fedspeed.simulate; continue such a run from "
    "Python, by the same call with out= and resume=True (`fedspeed diff` and `fedspeed compare` take it as it is)"
)

TABLES = {"method": "fedspeed", "model": "mlp", "data": "digits"}
"""The keys of a config that are tables, and their default names."""
CODED = tuple(TABLES)
"""The tables of a config that may name a Python file."""

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
    tables = {key: _table(given.get(key, name), key) for key, name in TABLES.items()}
    return as_released(given, tables, given.get("split", Config.split))


@dataclass(frozen=True)
class Spec:
    """A data set or a model by name with its own options, perhaps from a user's file.

    Args:
        name: a name, or `path/to/file.py:NAME`.
        options: keyword arguments.
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
        if not file_of(name):
            return cls(name, options)
        about = {key: options.pop(key, "") for key in ("code", "origin")}
        if not all(isinstance(value, str) for value in about.values()):
            raise UserError(f"{kind} {name}: expected text as code and origin, found {about!r}")
        path, _, code = read_code(kind, name, about["code"])
        return cls(f"{path}:{name.rpartition(':')[2]}", options, code, about["origin"] or str(path))

    @property
    def label(self) -> str:
        """Return a short name for tables and folders: the file's alone where `name` holds a path."""
        return Path(self.origin).stem if self.code else self.name

    def to_dict(self) -> dict[str, Any]:
        """Return `{"name": ..., option: value}` for TOML, with the digest of its code if it has one."""
        code = {"code": self.code, "origin": self.origin} if self.code else {}
        return {"name": self.name, **code, **self.options}


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
    data: Spec = federation(Spec("digits"), None, "data set (`fedspeed data list`), or file.py:load")  # noqa: RUF009
    split: str = federation("dirichlet:0.6", about="who owns what: iid, dirichlet:0.6, natural, ...")
    clients: int = federation(
        0, "[0, 1e8]", "the number of clients, m; 0 takes 100, or with split natural as many as the data have"
    )
    validation: str = course(
        "", about="the data set aside to choose rounds on: 0.1 of every client, clients:0.1 or clients:5 of them"
    )
    test_set: bool = course(
        True, about="whether rounds are scored on the test set; without, nothing reads it", later=True
    )
    augment: str = federation(
        "",
        about="the augmentation of pictures: paper, released, flip or none; default paper, for data of your own none",
    )
    data_dir: str = federation("", about="the folder or archive of a copy of the data you already have")
    targets: tuple[float, ...] = course((), None, "accuracies to time, for example 0.8,0.85")
    until: Until = field(default=(), metadata={"later": True})  # other settings of a fork's first rounds

    def __post_init__(self) -> None:
        share: Any = self.validation
        if isinstance(share, int | float):
            object.__setattr__(self, "validation", str(share))
        super().__post_init__()
        for key, kind in (("method", Method), ("model", Spec), ("data", Spec)):
            if not isinstance(getattr(self, key), kind):
                raise UserError(
                    f"Config: {key} must be a {kind.__name__}, got {getattr(self, key)!r}; "
                    f"Config.from_dict takes names and tables"
                )
        for key in ("model", "data"):
            spec: Spec = getattr(self, key)
            if file_of(spec.name) and not spec.code:
                object.__setattr__(self, key, Spec.from_table(key, spec.to_dict()))
        self.require_schedules(self.method, paper_decay(self.method))
        text = self.data_dir.encode("utf-8", "replace").decode("utf-8")
        if text != self.data_dir:
            raise UserError(f"Config: data_dir must be text that UTF-8 can hold, got {text!r}; rename the folder")
        if bad := [a for a in self.targets if not 0 < a < 1]:
            raise UserError(f"Config: targets must be accuracies in (0, 1), got {bad[0]}; 0.85 is 85%")
        self.require(self.method)
        if not self.augment and not self.data.code:  # data from a user's file choose their own
            object.__setattr__(self, "augment", usual_augment(self.data.name))
        self._settle_clients()
        object.__setattr__(self, "until", read_until(self.until, self.rounds))
        self.config_at(0)

    @cached_property
    def stretches(self) -> list[tuple[int, Config]]:
        """Return the configs of a fork's first rounds, each with its last round; an empty list for any other run."""
        tables = {key: value for key, value in self.to_dict().items() if key not in ("until", *RULES)}
        found = [(upto, Config.from_dict(merged(tables, over))) for upto, over in self.until]
        for upto, config in found:
            if class_chain(config.method) != class_chain(self.method):
                raise UserError(f"config: until.{upto}.method: expected numbers of {self.method.name}, found another")
            if name := changed_lasting_field(config.method, self.method):
                raise UserError(f"config: until.{upto}.method: expected the same {name} in all rounds, found another")
        return found

    def config_at(self, t: int) -> Config | None:
        """Return the config of round t = 0, 1, ... if it is one of a fork's first, else None."""
        return next((config for upto, config in self.stretches if t < upto), None) if self.until else None

    def _settle_clients(self) -> None:
        """Set clients and active where left open; a natural split and a user's file set them with the data."""
        if not self.clients and self.split.strip() != "natural" and not self.data.code:
            object.__setattr__(self, "clients", 100)
        train = self.clients
        if self.validation:
            train = clients_that_train(self.validation, self.clients)
        if not train:
            return
        object.__setattr__(self, "active", self.cohort_size(train))
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
        for key in ("model", "data"):
            if key in given and _table(given[key], key)["name"] == GIVEN:
                raise UserError(GIVEN_FROM_PYTHON)
        known = {f.name for f in fields(cls)}
        for key in given:
            if key not in known:
                raise unknown("config key", key, known)
        if "method" in given:
            given["method"] = build(_table(given["method"], "method"))
        for key in ("model", "data"):
            if key in given:
                given[key] = Spec.from_table(key, _table(given[key], key))
        if "targets" in given:
            if not isinstance(given["targets"], list | tuple):
                raise UserError(f"config: targets must be a list of accuracies, got {given['targets']!r}")
            given["targets"] = tuple(_number(a, "targets") for a in given["targets"])
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
    return rename_code(tables, lambda file, _: _beside(folder, file))


def _beside(folder: Path, name: str) -> str:
    """Return a path relative to a config's folder; warn if it is that of the current folder, as older configs meant."""
    path = folder / Path(name).expanduser()
    if not path.exists() and Path(name).exists():
        warnings.warn(f"there is no {path}: {os.path.abspath(name)} of the current folder is taken", stacklevel=4)
        return os.path.abspath(name)
    return str(path)


def rename_code(tables: dict[str, Any], name: Callable[[str, str], str]) -> dict[str, Any]:
    """Return a config's tables with other names for the files of code of its method, model and data.

    Args:
        name: a function of a file and its digest in the table ("" if none) that returns the file's other name.

    Example:
        >>> rename_code({"method": {"name": "fedinit", "base": "own.py:Mine"}}, lambda file, code: f"code/{file}")
        {'method': {'name': 'fedinit', 'base': {'name': 'code/own.py:Mine'}}}
    """
    return tables | {key: _renamed(tables[key], name) for key in CODED if key in tables}


def _renamed(method: Any, name: Callable[[str, str], str]) -> Any:
    """Return a table, and that of its base, with other names for files of code."""
    table = {"name": method} if isinstance(method, str) and ".py:" in method else method
    if not isinstance(table, dict):
        return method
    file, inner = file_of(table.get("name")), str(table.get("name")).rpartition(":")[2]
    renamed = {"name": f"{name(file, str(table.get('code', '')))}:{inner}"} if file else {}
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


def _table(value: Any, key: str) -> dict[str, Any]:
    """Return the table of `"mlp"` or `{name = "mlp"}`, which are the same."""
    table = {"name": value} if isinstance(value, str) else value
    if not isinstance(table, dict) or not isinstance(table.get("name"), str):
        raise UserError(
            f'config: {key} must be a name or a table with a name, such as {key} = {{name = "..."}}, got {value!r}'
        )
    return dict(table)


def _number(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
        raise UserError(f"config: {key} must be numbers, got {value!r}")
    return float(value)
