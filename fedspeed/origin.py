"""Whose a method is, the package's or the user's, and where the user's own lines are."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from pathlib import Path

from .errors import one_line
from .method import Method, nested

PACKAGE = Path(__file__).parent
LIBRARIES = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]


def packaged(method: Method) -> bool:
    """Whether a method, what it wraps aside, is the package's own."""
    return type(method).__module__.startswith("fedspeed.methods.")


def built_in(method: Method) -> bool:
    """Whether a method, and what it wraps, is the package's own."""
    return all(packaged(each) for each in nested(method))


def not_block_safe(method: Method) -> Method | None:
    """The outermost of the user's whose class does not say itself that its hooks take a block of clients."""
    users = (each for each in nested(method) if not packaged(each))
    return next((each for each in users if vars(type(each)).get("block_safe") is not True), None)


def wrote(method: Method, hook: str) -> bool:
    """Whether the user wrote a hook of a method, or of one inside it, rather than to inherit the package's."""
    found = (getattr(getattr(type(each), hook), "__code__", None) for each in nested(method) if not packaged(each))
    return any(code is not None and not Path(code.co_filename).is_relative_to(PACKAGE) for code in found)


def defined(method: Method, hook: str = "") -> str:
    """Where a method's class, or one of its hooks, is written: `mine.py, line 12`; of wrappers and what they wrap, the
    innermost that is the user's and has the hook itself."""
    users = [type(each) for each in nested(method) if not packaged(each)]
    writers = [cls for cls in users if not hook or hasattr(getattr(cls, hook), "__code__")]
    cls = (writers or users or [type(method)])[-1]
    thing = inspect.unwrap(getattr(cls, hook)) if hook else cls
    try:
        code = getattr(thing, "__code__", None)
        file, number = (code.co_filename, code.co_firstlineno) if code else _class_place(cls)
    except (OSError, TypeError):
        return f"class {cls.__qualname__}"
    return f"{_short(file)}, line {number}"


def _class_place(cls: type) -> tuple[str, int]:
    return inspect.getsourcefile(cls) or "", inspect.getsourcelines(cls)[1]


def reason(error: BaseException) -> str:
    """An exception in one line, with the user's own line where there is one."""
    told = one_line(error)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _own(Path(f.filename))]
    return f"{told} ({_short(frames[-1].filename)}, line {frames[-1].lineno}, in {frames[-1].name})" if frames else told


def _own(file: Path) -> bool:
    """Whether a file is neither ours, nor Python's, nor an installed library's."""
    if str(file).startswith("<") and not str(file).startswith("<ipython"):
        return False
    return not any(file.is_relative_to(place) for place in (PACKAGE, *LIBRARIES))


def _short(file: str) -> str:
    """A path relative to the current folder where it lies below it."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
