"""The source of a method: the code of the package or of the user, and the user's line that failed."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from pathlib import Path

from ..errors import one_line
from .base import Method, nested

PACKAGE = Path(__file__).parents[1]
LIBRARIES = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]


def packaged(method: Method) -> bool:
    """Return whether a method is the package's own, whatever it wraps."""
    return type(method).__module__.startswith("fedspeed.methods.")


def built_in(method: Method) -> bool:
    """Return whether a method and all methods inside it are the package's own."""
    return all(packaged(each) for each in nested(method))


def not_block_safe(method: Method) -> Method | None:
    """Return the outermost method of the user's whose own class does not say `block_safe = True`, or None."""
    users = (each for each in nested(method) if not packaged(each))
    return next((each for each in users if vars(type(each)).get("block_safe") is not True), None)


def wrote(method: Method, hook: str) -> bool:
    """Return whether the user wrote a hook of a method, or of one inside it, and did not inherit the package's."""
    found = (getattr(getattr(type(each), hook), "__code__", None) for each in nested(method) if not packaged(each))
    return any(code is not None and not Path(code.co_filename).is_relative_to(PACKAGE) for code in found)


def defined(method: Method, hook: str = "") -> str:
    """Return where a method's class, or one of its hooks, is written: `mine.py, line 12`. Of a wrapper and the methods
    inside it, that is the innermost that is the user's and has the hook itself."""
    users = [type(each) for each in nested(method) if not packaged(each)]
    writers = [cls for cls in users if not hook or hasattr(getattr(cls, hook), "__code__")]
    cls = (writers or users or [type(method)])[-1]
    thing = inspect.unwrap(getattr(cls, hook)) if hook else cls
    try:
        code = getattr(thing, "__code__", None)
        file = code.co_filename if code else inspect.getsourcefile(cls) or ""
        number = code.co_firstlineno if code else inspect.getsourcelines(cls)[1]
    except (OSError, TypeError):
        return f"class {cls.__qualname__}"
    return f"{_short(file)}, line {number}"


def reason(error: BaseException) -> str:
    """Return an exception in one line, with the user's own line where there is one."""
    text = one_line(error)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _own(Path(f.filename))]
    return f"{text} ({_short(frames[-1].filename)}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else text


def _own(file: Path) -> bool:
    """Return whether a file is the user's: neither the package's, nor Python's, nor an installed library's."""
    if str(file).startswith("<") and not str(file).startswith("<ipython"):
        return False
    return not any(file.is_relative_to(place) for place in (PACKAGE, *LIBRARIES))


def _short(file: str) -> str:
    """Return a path relative to the current folder if it lies below it."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
