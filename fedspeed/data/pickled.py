"""Read the pickled CIFAR batches without unpickling: only byte arrays, whole numbers, text, lists, tuples and dicts.

A pickle is a program, and numpy lets one set up types and arrays whose numbers are addresses. So nothing here calls
pickle or numpy on behalf of the file: its opcodes are walked one by one, those of plain data make plain data, an array
of bytes is a shape and a string of bytes, and everything else is refused.
"""

from __future__ import annotations

import math
import pickletools
from typing import Any

import numpy as np

from ..errors import UserError

AXES = 4
"""The most dimensions an array may have."""


class Refused(Exception):
    """The file asks for something that is not plain data."""


class _Name:
    """A name of Python's that the file may ask for; never looked up."""

    def __init__(self, name: str) -> None:
        self.name = name


_RECONSTRUCT, _NDARRAY, _DTYPE, _ENCODE = (_Name(n) for n in ("array", "ndarray", "dtype", "encode"))
NAMES = {
    "numpy.core.multiarray _reconstruct": _RECONSTRUCT,
    "numpy._core.multiarray _reconstruct": _RECONSTRUCT,
    "numpy ndarray": _NDARRAY,
    "numpy dtype": _DTYPE,
    "_codecs encode": _ENCODE,
}


class _Bytes:
    """The type of an array of bytes, the only one there is; what the file says beyond that does not matter."""


class _Array:
    """An array of bytes, empty until its state comes."""

    def __init__(self) -> None:
        self.value = np.empty(0, np.uint8)


def _array(state: Any) -> np.ndarray:
    """The array that `(version, shape, type, Fortran order, bytes)` describes."""
    if not (isinstance(state, tuple) and len(state) == 5):
        raise Refused("an array with an unknown state")
    _, shape, kind, fortran, blob = state
    if not isinstance(kind, _Bytes) or not isinstance(blob, bytes):
        raise Refused("an array of something else than bytes")
    if not isinstance(shape, tuple) or len(shape) > AXES or not all(type(n) is int and n >= 0 for n in shape):
        raise Refused("an array with an odd shape")
    if math.prod(shape) != len(blob):
        raise Refused(f"an array of shape {shape} in {len(blob)} bytes")
    return np.frombuffer(blob, np.uint8).reshape(shape, order="F" if fortran else "C")


CONSTANTS: dict[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
NUMBERS = {"INT", "LONG", "BININT", "BININT1", "BININT2", "LONG1", "LONG4"}
TEXTS = {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
BYTES = {"BINBYTES", "SHORT_BINBYTES", "BINBYTES8"}
OLD_TEXTS = {"BINSTRING", "SHORT_BINSTRING"}  # Python 2's: bytes, which pickletools reads as Latin-1
PUTS, GETS = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}, {"GET", "BINGET", "LONG_BINGET"}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_MARK = object()


class _Reader:
    """A stack and a memo, as pickle has them; every opcode that is not here is refused."""

    def __init__(self, blob: bytes) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.left = 2 * len(blob)  # bytes that may be made of text: else a short file could ask for much

    def read(self, blob: bytes) -> Any:
        """What the pickle holds."""
        for opcode, argument, _ in pickletools.genops(blob):
            name = opcode.name
            if name == "STOP":
                return _plain(self._pop())
            if name not in ("PROTO", "FRAME"):
                self._step(name, argument)
        raise Refused("no end")

    def _step(self, name: str, argument: Any) -> None:
        push = self.stack.append
        if name in NUMBERS or name in TEXTS or name in BYTES:
            push(argument)
        elif name in OLD_TEXTS:
            push(argument.encode("latin-1"))
        elif name in CONSTANTS:
            push(CONSTANTS[name])
        elif name in PUTS:
            self.memo[len(self.memo) if argument is None else argument] = self.stack[-1]
        elif name in GETS:
            push(self.memo[argument])
        elif name == "MARK":
            push(_MARK)
        elif name in ("EMPTY_LIST", "EMPTY_DICT", "EMPTY_TUPLE"):
            push({"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}[name]())
        elif name in TUPLES:
            push(tuple([self._pop() for _ in range(TUPLES[name])][::-1]))
        elif name == "TUPLE":
            push(tuple(self._to_mark()))
        elif name in ("LIST", "DICT"):
            found = self._to_mark()
            push(found if name == "LIST" else _pairs(found))
        elif name in ("APPEND", "APPENDS"):
            more = [self._pop()] if name == "APPEND" else self._to_mark()
            self._top(list).extend(more)
        elif name in ("SETITEM", "SETITEMS"):
            more = [self._pop(), self._pop()][::-1] if name == "SETITEM" else self._to_mark()
            self._top(dict).update(_pairs(more))
        elif name == "GLOBAL":
            push(_named(argument))
        elif name == "STACK_GLOBAL":
            last, first = self._pop(), self._pop()
            push(_named(f"{first} {last}"))
        elif name == "REDUCE":
            given, called = self._pop(), self._pop()
            push(self._made(called, given))
        elif name == "BUILD":
            state = self._pop()
            if isinstance(self.stack[-1], _Array):
                self.stack[-1].value = _array(state)
            elif not isinstance(self.stack[-1], _Bytes):
                raise Refused("the state of something unknown")
        else:
            raise Refused(f"the opcode {name}")

    def _made(self, called: Any, given: Any) -> Any:
        """What a call that plain data needs would give."""
        if called is _RECONSTRUCT and isinstance(given, tuple) and given[:1] == (_NDARRAY,):
            return _Array()
        if called is _DTYPE and isinstance(given, tuple) and given[:1] in (("u1",), (b"u1",)):
            return _Bytes()
        if called is _ENCODE and isinstance(given, tuple) and len(given) == 2 and given[1] in ("latin1", b"latin1"):
            text = given[0]
            if isinstance(text, str) and len(text) <= self.left:
                self.left -= len(text)
                return text.encode("latin-1")
        said = repr(given[0][:20]) if isinstance(given, tuple) and given and type(given[0]) in (str, bytes) else "..."
        raise Refused(f"{called.name if isinstance(called, _Name) else 'a call'}({said})")

    def _pop(self) -> Any:
        if not self.stack or self.stack[-1] is _MARK:
            raise Refused("an empty stack")
        return self.stack.pop()

    def _top(self, kind: type) -> Any:
        if not self.stack or type(self.stack[-1]) is not kind:
            raise Refused(f"no {kind.__name__} to add to")
        return self.stack[-1]

    def _to_mark(self) -> list[Any]:
        at = len(self.stack) - 1
        while at >= 0 and self.stack[at] is not _MARK:
            at -= 1
        if at < 0:
            raise Refused("no mark")
        found = self.stack[at + 1 :]
        del self.stack[at:]
        return found


def _named(name: str) -> _Name:
    if name not in NAMES:
        raise Refused(name.replace(" ", "."))
    return NAMES[name]


def _pairs(flat: list[Any]) -> dict[Any, Any]:
    if len(flat) % 2 or not all(type(key) in (str, bytes) for key in flat[::2]):
        raise Refused("a dictionary whose keys are not text")
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _plain(value: Any) -> Any:
    """A value of the outermost dictionary as its reader expects it."""
    if isinstance(value, dict):
        if any(isinstance(entry, _Name | _Bytes) for entry in value.values()):
            raise Refused("a name in place of data")
        return {key: entry.value if isinstance(entry, _Array) else entry for key, entry in value.items()}
    return value


def read_pickle(blob: bytes, where: str) -> dict[bytes, Any]:
    """The dictionary in a pickled batch; keys are bytes. Refuses anything that is not plain data.

    Example:
        >>> import pickle
        >>> read_pickle(pickle.dumps({b"labels": [1, 2]}), "example")
        {b'labels': [1, 2]}
    """
    try:
        found = _Reader(blob).read(blob)
    except Exception as error:  # a damaged file can raise nearly anything
        told = f"it asks for {error}" if isinstance(error, Refused) else str(error)[:100] or type(error).__name__
        raise UserError(
            f"data: {where} is not a pickle of plain arrays ({told}); it was not executed. Get the published file "
            "again, or use the binary layout"
        ) from error
    if not isinstance(found, dict):
        raise UserError(f"data: {where}: expected a pickled dictionary, found {type(found).__name__}")
    return {k.encode("utf-8", "surrogatepass") if isinstance(k, str) else k: v for k, v in found.items()}
