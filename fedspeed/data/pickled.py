"""Read the pickled CIFAR batches without executing anything: only arrays, numbers, bytes, lists and dicts."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np

from ..errors import UserError


def _array(kind: type, shape: Any, code: Any) -> np.ndarray:
    """Stands in for numpy's `_reconstruct`: an empty array, to be filled by its state."""
    if kind is not np.ndarray:
        raise pickle.UnpicklingError(f"an array of type {kind}")
    return np.ndarray((0,), np.uint8)


def _bytes(text: str, encoding: str) -> bytes:
    """Stands in for `_codecs.encode`, which older pickles use to store bytes."""
    if encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"text encoded as {encoding!r}")
    return text.encode("latin1")


ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _array,
    ("numpy._core.multiarray", "_reconstruct"): _array,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _bytes,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return ALLOWED[module, name]


def read_pickle(blob: bytes, where: str) -> dict[bytes, Any]:
    """The dictionary in a pickled batch; keys are bytes. Refuses anything that is not plain data.

    Example:
        >>> read_pickle(pickle.dumps({b"labels": [1, 2]}), "example")
        {b'labels': [1, 2]}
    """
    try:
        found = _Reader(io.BytesIO(blob), encoding="bytes").load()
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise UserError(
            f"data: {where} is not a pickle of plain arrays ({error}); it was not executed. Get the published file "
            "again, or use the binary layout"
        ) from error
    if not isinstance(found, dict):
        raise UserError(f"data: {where}: expected a pickled dictionary, found {type(found).__name__}")
    return {k.encode() if isinstance(k, str) else k: v for k, v in found.items()}
