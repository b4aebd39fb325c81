"""Names that stand for classes: ours as "module:Class", imported when one is asked for; of others as entry points."""

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


def foreign(group: str) -> dict[str, str]:
    """What installed packages offer in a group of entry points: name -> "module:Class"."""
    return {entry.name: entry.value for entry in entry_points(group=group)}


def load(kind: str, name: str, place: str, fix: str = "install it, or leave it out") -> Any:
    """What "module:Class" names; one that cannot be imported is an error in one line.

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
    """What `backend` may be; entry points, which take time to find, come last."""
    yield from ("auto", *BACKENDS)
    yield from (name for name in foreign(BACKEND_GROUP) if name not in BACKENDS)


LOADED: dict[str, tuple[str, str]] = {}


"""The modules that were made of users' files, by the name pickles know them by: (file, digest)."""


TEXTS: dict[str, bytes] = {}


"""Files that were read, by their digest."""


EXTRAS = {"peft": "lora", "timm": "timm", "transformers": "transformers"}


"""Packages that models of docs/guides/models.md need, and the extra that brings each."""


def file_of(name: Any) -> str:
    """The file that a name names; "" if it names none.

    Example:
        >>> file_of("own.py:build"), file_of("mlp")
        ('own.py', '')
    """
    file = name.rpartition(":")[0] if isinstance(name, str) else ""
    return file if file.endswith(".py") else ""


def require_part(kind: str, name: str) -> None:
    """Raise for a file without what is meant of it."""
    if name.endswith(".py"):
        part = _WANTED[kind]
        told = "function" if part.islower() else "class"
        raise UserError(f"{kind} {name}: expected path/to/file.py:{part}; which {told} of {name} is it?")


def code_digest(text: bytes) -> str:
    """What names the code of a file."""
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def read_code(kind: str, name: str, code: str = "") -> tuple[Path, bytes, str]:
    """The file of a name, its bytes and their digest; nothing is executed.

    Args:
        kind: `method`, `model`, `data` or `adapter`, for messages.
        name: `path/to/file.py:NAME`.
        code: the digest the file must have, "" for any.
    """
    path = Path(file_of(name)).resolve()
    told = f"{kind} {path}:{name.rpartition(':')[2]}"
    if not path.is_file():
        raise UserError(f"{told}: there is no file {path}; expected path/to/file.py:{_WANTED[kind]}")
    try:
        text = read_bytes(path)
    except OSError as error:
        raise UserError(f"{told}: {path} cannot be read ({error.strerror})") from None
    found = code_digest(text)
    if code and found != code:
        raise UserError(
            f"{told}: {path} was changed (expected digest {code}, found {found}); put it back, or remove "
            f"the line `code` from the config to run it as it is now"
        )
    TEXTS[found] = text
    return path, text, found


def text_of(kind: str, name: str, code: str) -> bytes:
    """The code of this digest: as it was when it was read, else from its file."""
    return TEXTS[code] if code in TEXTS else read_code(kind, name, code)[1]


def load_code(kind: str, name: str, code: str = "") -> Any:
    """What a name names, from a file that is executed once; arguments as in `read_code`."""
    text = text_of(kind, name, code)
    return load_text(Path(file_of(name)).resolve(), text, kind, name.rpartition(":")[2])


def load_text(path: Path, text: bytes, kind: str = "model", wanted: str = "") -> Any:
    """What a name names in a file with this text, whatever the file holds by now; the module if there is no name."""
    code = code_digest(text)
    TEXTS[code] = text
    module = _module(kind, path, text, code)
    if wanted and not hasattr(module, wanted):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise unknown(f"{'function' if _WANTED[kind].islower() else 'class'} in {path}", wanted, own)
    return getattr(module, wanted) if wanted else module


def _module(kind: str, path: Path, text: bytes, code: str) -> ModuleType:
    """The module of a file: one for all that comes from it, so that pickle finds its classes."""
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
    """What to install where an import failed; "" if that is not what failed."""
    if not isinstance(error, ImportError):
        return ""
    extra = EXTRAS.get((error.name or "").partition(".")[0])
    return f"; pip install 'fedspeed[{extra}]'" if extra else f"; a {kind} is one file: install what else it needs"


def raised(error: BaseException, path: Path) -> str:
    """An error of a user's code in one line, with the last line of the file that led to it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    told = f"SyntaxError: {error.msg}" if isinstance(error, SyntaxError) else one_line(error)
    return told + (f" ({path}, line {line})" if line else "")


def call(kind: str, name: str, function: Any, options: dict[str, Any]) -> Any:
    """Call a function of a user's file by keywords; what it raises names file and line."""
    try:
        return function(**options)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        told = raised(error, Path(file_of(name)).resolve())
        raise UserError(f"{kind} {name}: failed with {options}: {told}") from error


_WANTED = {"method": "Class", "model": "build", "data": "load", "adapter": "Class"}
