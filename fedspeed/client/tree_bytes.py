"""Trees of vectors as bytes: a header, which is one line of JSON, then the numbers. No pickle.

The header lists the leaves, each as [name, shape, dtype as stored, dtype]. A name is the path of fields to the leaf, so
that two fields of one shape cannot be confused; files of format 1 have no names.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from ..errors import UserError
from ..utils.files import atomic
from .trees import named, tree_leaves, tree_of

DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}


def encode(tree: tuple[Any, ...], dtype: torch.dtype | None = None) -> tuple[list[Any], list[memoryview]]:
    """Return the header of a tree and its numbers, converted to `dtype` if one is given."""
    stored = [a.detach().cpu().to(dtype or a.dtype).contiguous() for a in tree_leaves(tree)]
    leaves = zip(named("", tree), stored, strict=True)
    header = [[name, list(a.shape), _name(s.dtype), _name(a.dtype)] for (name, a), s in leaves]
    return header, [s.reshape(-1).view(torch.uint8).numpy().data for s in stored]


def decode(file: BinaryIO, header: Any, like: tuple[Any, ...]) -> Any:
    """Read the tree at the position of a file; raise unless its names, shapes and dtypes are those of `like`."""
    wanted = [[name, list(a.shape), _name(a.dtype)] for name, a in named("", like)]
    names = [name for name, _ in named("", like)]
    found = [[*about, dtype] for *about, stored, dtype in header if stored in DTYPES]
    fields = [about[0] for about in found if len(about) == 3]
    if fields and fields != names:
        raise ValueError(f"expected the fields {', '.join(names)}, found {', '.join(map(str, fields))}")
    if len(found) != len(header) or found not in (wanted, [about for _, *about in wanted]):  # format 1 has no names
        raise ValueError(f"expected {wanted}, found {header}")
    return tree_of(like, [_read(file, shape, stored, dtype) for *_, shape, stored, dtype in header])


def size(header: Any) -> int:
    """Return the bytes of the numbers that a header describes."""
    return sum(_numbers(shape) * DTYPES[stored].itemsize for *_, shape, stored, _ in header)


def state_name(client: int, t: int) -> str:
    """Return the name of the file with a client's state after round t."""
    return f"{client}@{t}"


def write_state(path: Path, tree: Any, dtype: torch.dtype | None = None) -> None:
    """Write a tree to a file: under a temporary name, then renamed, so that the file is whole or absent."""
    header, numbers = encode(tree, dtype)
    try:
        path.parent.mkdir(exist_ok=True)
        with atomic(path) as file:
            file.write(json.dumps(header).encode() + b"\n")
            for a in numbers:
                file.write(a)
    except OSError as error:
        raise no_room(path, error) from None


def read_state(path: Path, like: Any) -> Any:
    """Return the tree in a file, with names, shapes and dtypes of `like`; nothing in the file is executed."""
    try:
        with path.open("rb") as file:
            return decode(file, json.loads(file.readline()), like)
    except (OSError, ValueError, TypeError, RecursionError, RuntimeError) as error:
        raise foreign(path, error) from None


def foreign(path: Path, error: Exception) -> UserError:
    """Return the error about a file whose contents do not fit the config."""
    return UserError(
        f"{path} is not a state of this run ({type(error).__name__}: {str(error)[:200]}); it was changed, or the "
        f"run's config was: put it back"
    )


def no_room(path: Path, error: OSError) -> UserError:
    """Return the error about a file of a run that cannot be written."""
    return UserError(
        f"cannot write {path} ({error.strerror}); what was written before is kept. Free some space, then "
        f"`fedspeed resume` the run"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _numbers(shape: Any) -> int:
    """Return the number of elements of a shape from a file; raise unless it is a shape."""
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"expected a shape, found {shape!r}")
    return math.prod(shape)


def _read(file: BinaryIO, shape: list[int], stored: str, dtype: str) -> torch.Tensor:
    kind = DTYPES[stored]
    raw = np.empty(_numbers(shape) * kind.itemsize, np.uint8)
    if file.readinto(raw.data) != len(raw):  # type: ignore[attr-defined]
        raise ValueError(f"expected {len(raw)} bytes, found the end of the file")
    return torch.from_numpy(raw).view(kind).view(shape).to(DTYPES[dtype])
