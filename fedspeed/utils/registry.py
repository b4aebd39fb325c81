"""Names that stand for code: "module:Class" of this package, entry points, and `path/to/file.py:NAME` of the user.

Code is imported when it is asked for. A user's file is identified by the digest of its bytes and executed once.
"""

from __future__ import annotations

import hashlib
import sys
import traceback
from collections.abc import Iterator
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import UserError, one_line, unknown
from .files import read_bytes

BACKENDS = {
    "serial": "fedspeed.backends.serial:Serial",
    "process": "fedspeed.backends.process:Processes",
    "ray": "fedspeed.backends.ray.backend:Ray",
}
"""Name -> "module:Class"; imported when a run asks for it."""
BACKEND_GROUP = "fedspeed.backends"
LOADED: dict[str, tuple[str, str]] = {}
"""The modules made of users' files, by the name that pickles refer to: (file, digest)."""
TEXTS: dict[str, bytes] = {}
"""The contents of files that were read, by their digest."""
EXTRAS = {"peft": "lora", "timm": "timm", "transformers": "transformers"}
"""Packages that models of docs/guides/models.md need, and the extra that installs each."""
_WANTED = {"method": "Class", "model": "build", "data": "load", "adapter": "Class"}
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


def require_part(kind: str, name: str) -> None:
    """Raise for a file without a NAME."""
    if name.endswith(".py"):
        part = _WANTED[kind]
        raise UserError(f"{kind} {name}: expected path/to/file.py:{part}; which {_sort(kind)} of {name} is it?")


def _sort(kind: str) -> str:
    return "function" if _WANTED[kind].islower() else "class"


def code_digest(text: bytes) -> str:
    """Return the digest that identifies the code of a file."""
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def read_code(kind: str, name: str, code: str = "") -> tuple[Path, bytes, str]:
    """Return the file of a name, its bytes and their digest; nothing is executed.

    Args:
        kind: `method`, `model`, `data` or `adapter`, for messages.
        name: `path/to/file.py:NAME`.
        code: the digest the file must have, "" for any.
    """
    path = Path(file_of(name)).resolve()
    what = f"{kind} {path}:{name.rpartition(':')[2]}"
    if not path.is_file():
        raise UserError(f"{what}: there is no file {path}; expected path/to/file.py:{_WANTED[kind]}")
    try:
        text = read_bytes(path)
    except OSError as error:
        raise UserError(f"{what}: {path} cannot be read ({error.strerror})") from None
    found = code_digest(text)
    if code and found != code:
        raise UserError(
            f"{what}: {path} was changed (expected digest {code}, found {found}); put it back, or remove "
            f"the line `code` from the config to run it as it is now"
        )
    TEXTS[found] = text
    return path, text, found


def text_of(kind: str, name: str, code: str) -> bytes:
    """Return the code with this digest: as it was when it was read, else from its file."""
    return TEXTS[code] if code in TEXTS else read_code(kind, name, code)[1]


def load_code(kind: str, name: str, code: str = "") -> Any:
    """Return NAME of a file, which is executed once; arguments as in `read_code`."""
    text = text_of(kind, name, code)
    return load_text(Path(file_of(name)).resolve(), text, kind, name.rpartition(":")[2])


def load_text(path: Path, text: bytes, kind: str = "model", wanted: str = "") -> Any:
    """Return `wanted` of a file with this text, whatever the file holds by now; the module if `wanted` is ""."""
    code = code_digest(text)
    TEXTS[code] = text
    module = _module(kind, path, text, code)
    if wanted and not hasattr(module, wanted):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise unknown(f"{_sort(kind)} in {path}", wanted, own)
    return getattr(module, wanted) if wanted else module


def _module(kind: str, path: Path, text: bytes, code: str) -> ModuleType:
    """Return the module of a file: one per file and digest, so that pickle finds its classes."""
    name = f"fedspeed_user_{path.stem}_{code[:8]}"
    if LOADED.get(name) == (str(path), code) and name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = str(path)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        exec(compile(text, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
        raise UserError(f"{kind} {path}: cannot be imported: {raised(error, path)}{to_install(kind, error)}") from error
    LOADED[name] = (str(path), code)
    return module


def to_install(kind: str, error: BaseException) -> str:
    """Return what to install after a failed import, for a message; "" for other errors."""
    if not isinstance(error, ImportError):
        return ""
    extra = EXTRAS.get((error.name or "").partition(".")[0])
    return f"; pip install 'fedspeed[{extra}]'" if extra else f"; a {kind} is one file: install what else it needs"


def raised(error: BaseException, path: Path) -> str:
    """Return an error of a user's code in one line, with the last line of the file that led to it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    text = f"SyntaxError: {error.msg}" if isinstance(error, SyntaxError) else one_line(error)
    return text + (f" ({path}, line {line})" if line else "")


def call(kind: str, name: str, function: Any, options: dict[str, Any]) -> Any:
    """Call a function of a user's file by keywords; errors name file and line."""
    try:
        return function(**options)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        where = raised(error, Path(file_of(name)).resolve())
        raise UserError(f"{kind} {name}: failed with {options}: {where}") from error
