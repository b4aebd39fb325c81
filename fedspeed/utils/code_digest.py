"""Digests of the code of Python objects, so that an edited class or function is not taken for the one before.

The instructions count, and the numbers and texts they use: defaults, closures, globals, attributes of classes. Own
functions and classes that the code names are followed. Line numbers, files, comments and docstrings do not count, so a
cell may move in a notebook. What is installed counts by its name, and so does what has no code.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import sys
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
INSTALLED = {"site-packages", "dist-packages"}
KIND = 0x3FF
"""The bits of `co_flags` that say what kind of function it is; others say whether it has a docstring, for example."""
NOT_CODE = {"__annotate__", "__annotate_func__", "__annotations__", "__doc__", "__module__", "__qualname__"}


def code_digest(*things: Any) -> str:
    """Return the digest of the own code of functions, classes and instances; "" if all of it is installed.

    It is the same in every process of one minor version of Python.

    Example:
        >>> code_digest(len, dis.dis), code_digest(partial(max, 3))
        ('', '')
        >>> space = {"__name__": "__main__"}
        >>> exec("def f(x): return 2 * x", space)
        >>> before = code_digest(space["f"])
        >>> exec("def f(x):\\n    'Double.'\\n    return 2 * x", space)
        >>> code_digest(space["f"]) == before
        True
        >>> exec("def f(x): return 3 * x", space)
        >>> code_digest(space["f"]) == before
        False
    """
    walk = _Walk()
    try:
        found = [walk.value(thing, state=True) for thing in things]
        for own in walk.own:  # It grows as code names other code.
            found.append("\n".join(walk.class_parts(own) if isinstance(own, type) else walk.function_parts(own)))
    except Exception:  # An object that cannot be looked at counts by its name.
        return ""
    return hashlib.blake2b("\n\n".join(found).encode(), digest_size=16).hexdigest() if walk.own else ""


def is_own(module: Any) -> bool:
    """Return whether a module, by name, is the user's: a script, a notebook or a file of theirs.

    Example:
        >>> [is_own(name) for name in ("__main__", "json", "fedspeed.methods")]
        [True, False, False]
    """
    name = str(module or "builtins")
    if name == "__main__":
        return True
    if name.partition(".")[0] in {*sys.stdlib_module_names, __name__.partition(".")[0]}:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    path = Path(file) if isinstance(file, str) else None
    return path is None or not (INSTALLED & set(path.parts) or path.is_relative_to(sysconfig.get_path("stdlib")))


class _Walk:
    """Texts of code; own functions and classes are numbered as they are met, and each is described once."""

    def __init__(self) -> None:
        self.own: list[Any] = []
        self.numbers: dict[int, int] = {}

    def value(self, thing: Any, state: bool = False) -> str:
        """Return the text of a value.

        Args:
            state: count the plain attributes of an instance; not of one that code merely names, which may change.
        """
        if isinstance(thing, PLAIN):
            return f"{type(thing).__name__} {thing!r}"
        if isinstance(thing, tuple | frozenset):
            parts = [self.value(part) for part in thing]  # Sets have another order in every process.
            return f"{type(thing).__name__} {parts if isinstance(thing, tuple) else sorted(parts)}"
        if isinstance(thing, partial):
            return f"partial {[self.value(a) for a in (thing.func, thing.args, *sorted(thing.keywords.items()))]}"
        if isinstance(thing, MethodType):
            return f"method {self.value(thing.__func__)} of {self.value(type(thing.__self__))}"
        if isinstance(thing, staticmethod | classmethod):
            return f"{type(thing).__name__} {self.value(thing.__func__)}"
        if isinstance(thing, property):
            return f"property {[self.value(part) for part in (thing.fget, thing.fset, thing.fdel)]}"
        inner = inspect.getattr_static(thing, "__wrapped__", None)  # the user's function inside a decorator's
        if inner is not None and inner is not thing:
            return f"wrapped {self.value(inner)}" + (f" {self._named(thing)}" if _has_own_code(thing) else "")
        if isinstance(thing, type | FunctionType):
            return self._named(thing)
        if isinstance(thing, ModuleType) or hasattr(thing, "__qualname__"):
            return str(getattr(thing, "__qualname__", "module"))
        plain = sorted((k, v) for k, v in _attributes(thing) if not k.startswith("_") and k != "training")
        return f"a {self._named(type(thing))} {[(k, self.value(v)) for k, v in plain if state and _counts(v)]}"

    def _named(self, thing: Any) -> str:
        """Return the number of an own class or function, the name of another."""
        if not (is_own(thing.__module__) if isinstance(thing, type) else _has_own_code(thing)):
            return f"{thing.__module__}:{thing.__qualname__}"
        if id(thing) not in self.numbers:
            self.numbers[id(thing)] = len(self.own)
            self.own.append(thing)
        return f"own {self.numbers[id(thing)]}"

    def class_parts(self, cls: type) -> Iterator[str]:
        """Yield the texts of a class: what it inherits, its functions, and its plain attributes."""
        yield f"class {[self._named(base) for base in cls.__bases__]}"
        for name, part in sorted(vars(cls).items()):
            hidden = name in NOT_CODE or (name.startswith("__") and not callable(part))
            if not hidden and _counts(part):
                yield f"{name} = {self.value(part)}"

    def function_parts(self, function: FunctionType) -> Iterator[str]:
        """Yield the texts of a function: its code, defaults, and closure."""
        yield f"defaults {self.value(function.__defaults__)}"
        yield f"{[(key, self.value(value)) for key, value in sorted((function.__kwdefaults__ or {}).items())]}"
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            yield f"{name}: {self.value(_content(cell))}"
        yield from self.code(function.__code__, function.__globals__)

    def code(self, code: CodeType, names: dict[str, Any]) -> Iterator[str]:
        """Yield the instructions of code, without their lines; then what they use of its globals."""
        counts = (code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount, code.co_flags & KIND)
        yield f"{code.co_varnames} {counts}"
        used, inside = {}, []
        for step in dis.get_instructions(code):
            if isinstance(step.argval, CodeType):
                inside.append(step.argval)
            elif step.opcode in dis.hasconst:
                yield f"{step.opname} {self.value(step.argval)}"
            else:
                yield f"{step.opname} {step.arg if step.opcode not in dis.hasname else step.argval}"
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval in names:
                used[step.argval] = names[step.argval]
            if step.opname == "STORE_GLOBAL":  # It changes as the code runs.
                names = {key: value for key, value in names.items() if key != step.argval}
                used.pop(step.argval, None)
        yield getattr(code, "co_exceptiontable", b"").hex()
        for name, value in used.items():
            yield f"{name}: {self.value(value)}"
            if isinstance(value, ModuleType) and is_own(value.__name__):
                yield from (f"{k}: {self.value(vars(value)[k])}" for k in code.co_names if k in vars(value))
        for each in inside:
            yield from self.code(each, names)


def _has_own_code(thing: Any) -> bool:
    """Return whether a function was written by the user; a decorator's function has the name of the one inside it."""
    return isinstance(thing, FunctionType) and is_own(thing.__globals__.get("__name__"))


def _attributes(thing: Any) -> list[tuple[str, Any]]:
    return list(vars(thing).items()) if hasattr(thing, "__dict__") else []


def _counts(value: Any) -> bool:
    """Return whether an attribute is plain, or code."""
    if isinstance(value, tuple):
        return all(map(_counts, value))
    kinds = (*PLAIN, FunctionType, type, property, staticmethod, classmethod, partial)
    return isinstance(value, kinds) or hasattr(value, "__wrapped__")


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # It is empty.
        return None
