"""Names that stand for code: "module:Class" of this package, entry points, and `path/to/file.py:NAME` of the user.

Code is imported when it is asked for. A user's file, with the files beside it that it imports (`own_code.py`), is
identified by a digest and executed once.
"""

from __future__ import annotations

import ast
import sys
import traceback
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import UserError, one_line, unknown
from .own_code import Code, execute, find_code, is_installed, package_of, short_names

BACKENDS = {
    "serial": "fedspeed.backends.serial:Serial",
    "process": "fedspeed.backends.process:Processes",
    "ray": "fedspeed.backends.ray.backend:Ray",
}
"""Name -> "module:Class"; imported when a run asks for it."""
BACKEND_GROUP = "fedspeed.backends"
LOADED: dict[str, tuple[str, str]] = {}
"""The modules made of users' files, by the name that pickles refer to: (file, digest)."""
CODES: dict[str, Code] = {}
"""The code that was read, by its digest."""
EXTRAS = {"peft": "lora", "timm": "timm", "transformers": "transformers"}
"""Packages that models of docs/guides/models.md need, and the extra that installs each."""
DATA_FILES = ("availability",)
"""Values `NAME:FILE` of settings whose file holds data: it is a part of the run like a file of code, not executed."""
_WANTED = {"method": "Class", "model": "build", "data": "load", "adapter": "Class", "cohort": "sample",
           "lr_schedule": "f", "loss": "loss"}  # fmt: skip
"""The usual name of each kind of thing in a user's file."""


def foreign(group: str) -> dict[str, str]:
    """Return the entry points of installed packages in a group: name -> "module:Class"."""
    return {entry.name: entry.value for entry in entry_points(group=group)}


def load(kind: str, name: str, place: str, fix: str = "install it, or leave it out") -> Any:
    """Import and return "module:Class"; raise an error of one line if that fails.

    Example:
        >>> load("back end", "ray", "no_such_module:Ray")
        Traceback (most recent call last):
        fedspeed.errors.UserError: back end ray: no_such_module:Ray cannot be loaded (ModuleNotFoundError: No module
        named 'no_such_module'); install it, or leave it out
    """
    try:
        return EntryPoint(name, place, "").load()
    except (Exception, SystemExit) as error:
        raise UserError(f"{kind} {name}: {place} cannot be loaded ({one_line(error)}); {fix}") from error


def backend_names() -> Iterator[str]:
    """Yield the allowed values of `backend`; entry points, which take time to find, come last."""
    yield from ("auto", *BACKENDS)
    yield from (name for name in foreign(BACKEND_GROUP) if name not in BACKENDS)


def file_of(name: Any) -> str:
    """Return the file of `path/to/file.py:NAME`; "" for any other name.

    Example:
        >>> file_of("own.py:build"), file_of("mlp")
        ('own.py', '')
    """
    file = name.rpartition(":")[0] if isinstance(name, str) else ""
    return file if file.endswith(".py") else ""


def named_file(name: Any) -> tuple[str, str, str]:
    """Return what a name has before its file, the file, and what it has after it; the file is "" for any other name.

    Example:
        >>> named_file("own.py:build"), named_file("availability:trace.csv"), named_file("mlp")
        (('', 'own.py', ':build'), ('availability:', 'trace.csv', ''), ('mlp', '', ''))
    """
    if file := file_of(name):
        return "", file, name[len(file) :]
    kind, colon, file = str(name).partition(":")
    return (kind + colon, file, "") if kind in DATA_FILES and file else (str(name), "", "")


def require_part(kind: str, name: str) -> None:
    """Raise for a file without a NAME; the message lists what the file defines, which is read, not executed."""
    if name.endswith(".py"):
        part, found = _WANTED[kind], ", ".join(_defined(Path(name)))
        raise UserError(
            f"{kind} {name}: expected path/to/file.py:{part}; which {_sort(kind)} of {name} is it?"
            f"{f' It has {found}' if found else ''}"
        )


def _defined(path: Path) -> list[str]:
    """Return the names of the classes and functions that a file defines; none if it cannot be read."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found = [one.name for one in body if isinstance(one, ast.ClassDef | ast.FunctionDef)]
    return [name for name in found if not name.startswith("_")][:9]


def _sort(kind: str) -> str:
    return "function" if _WANTED[kind].islower() else "class"


def read_code(kind: str, name: str, code: str = "") -> tuple[Path, Code, str]:
    """Return the file of a name, its code with that of files beside it, and their digest; nothing is executed.

    Args:
        kind: `method`, `model`, `data`, `adapter` or a setting such as `cohort`, for messages.
        name: `path/to/file.py:NAME`, or the `NAME:FILE` of `DATA_FILES`.
        code: the digest the code must have, "" for any.
    """
    before, file, after = named_file(name)
    path = Path(file).expanduser().resolve() if before else Path(file).resolve()
    what = f"{kind} {before}{path}{after}"
    if not path.is_file():
        wanted = f"{before}path/to/file" if before else f"path/to/file.py:{_WANTED[kind]}"
        raise UserError(f"{what}: there is no file {path}; expected {wanted}")
    try:
        read = find_code(path)
    except OSError as error:
        raise UserError(f"{what}: {error.filename or path} cannot be read ({error.strerror})") from None
    found = read.digest
    if code and found != code:
        changed = f"{path} or a file beside it" if "+" in code + found else str(path)
        raise UserError(
            f"{what}: {changed} was changed (expected digest {code}, found {found}); put it back, or remove "
            f"the line `code` from the config to run it as it is now"
        )
    CODES[found] = read
    return path, read, found


def code_of(kind: str, name: str, code: str) -> Code:
    """Return the code with this digest: as it was when it was read, else from its file."""
    return CODES[code] if code in CODES else read_code(kind, name, code)[1]


def load_code(kind: str, name: str, code: str = "") -> Any:
    """Return NAME of a file, which is executed once; arguments as in `read_code`."""
    return run_code(Path(file_of(name)).resolve(), code_of(kind, name, code), kind, name.rpartition(":")[2])


def run_code(path: Path, code: Code, kind: str = "model", wanted: str = "") -> Any:
    """Return `wanted` of a file with this code, whatever the file holds by now; the module if `wanted` is ""."""
    CODES[code.digest] = code
    module = _module(kind, path, code)
    if wanted and not hasattr(module, wanted):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise unknown(f"{_sort(kind)} in {path}", wanted, own)
    return getattr(module, wanted) if wanted else module


def _module(kind: str, path: Path, code: Code) -> ModuleType:
    """Return the module of a file: one per file and digest, so that pickle finds its classes."""
    name = f"fedspeed_user_{path.stem}_{code.digest[:8]}"
    if LOADED.get(name) == (str(path), code.digest) and name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = str(path)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        execute(module, path, code)
    except (Exception, SystemExit) as error:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
        why = raised(error, path, code) + to_install(error, path)
        raise UserError(f"{kind} {path}: cannot be imported: {why}") from error
    LOADED[name] = (str(path), code.digest)
    return module


def loaded_in(*pickles: bytes) -> list[tuple[str, Code]]:
    """Return the users' files that were loaded and whose modules pickles name, each with its code."""
    names = {name: (name.encode(), package_of(name).encode()) for name in LOADED}
    found = [LOADED[name] for name in LOADED if any(each in pickle for each in names[name] for pickle in pickles)]
    return [(file, CODES[code]) for file, code in found]


def to_install(error: BaseException, path: Path) -> str:
    """Return what to do after a failed import by a user's file, for a message; "" for other errors."""
    if not isinstance(error, ImportError):
        return ""
    name = short_names(error.name or "")
    if not name:
        return f"; {path.name} may import what is installed, and files in its own folder and in folders below"
    top, inner = name.partition(".")[0], name.replace(".", "/")
    if top in EXTRAS:
        return f"; pip install 'fedspeed[{EXTRAS[top]}]'"
    beside = next((file for file in (path.parent / f"{inner}.py", path.parent / inner) if file.exists()), None)
    if beside and is_installed(top, path.parent):
        return f"; {beside} is not used, since an installed module has its name: rename it"
    if not isinstance(error, ModuleNotFoundError):  # The module is there, and the name in it is not.
        return ""
    if beside:
        return f"; {beside} is a part of the run if a statement imports it by its name: import {name}"
    return f"; install it, or put it beside {path.name} as {inner}.py"


def raised(error: BaseException, path: Path, code: Code | None = None) -> str:
    """Return an error of a user's code in one line, with the last line of its files that led to it.

    Args:
        path: the user's file.
        code: its code; None for the one that was executed.
    """
    codes = [code] if code else [CODES[digest] for file, digest in LOADED.values() if file == str(path)]
    files = {str(path), *(str(path.parent / name) for each in codes for name, _ in each.beside)}
    if isinstance(error, SyntaxError):
        where = f" ({error.filename or path}, line {error.lineno})" if error.lineno else ""
        return f"SyntaxError: {error.msg}{where}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return short_names(one_line(error)) + "".join(f" ({f.filename}, line {f.lineno})" for f in frames[-1:])


def call(kind: str, name: str, function: Any, options: dict[str, Any]) -> Any:
    """Call a function of a user's file by keywords; errors name file and line."""
    try:
        return function(**options)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        where = raised(error, Path(file_of(name)).resolve())
        raise UserError(f"{kind} {name}: failed with {options}: {where}") from error
