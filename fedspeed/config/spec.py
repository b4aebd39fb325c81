"""`Spec`: a thing by name with its own options, perhaps from a user's file; and the settings that may be one.

A setting of `SETTINGS` is text for a built-in value (`cohort = "bernoulli"`) and a table for a user's file
(`cohort = {name = "own.py:Sampler", d = 20}`), which is then a part of the run as the file of a model is: hashed,
copied into the run directory, and executed only if the user allows it. From Python it may also be an object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..utils.registry import call, file_of, load_code, named_file, read_code, require_part

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
