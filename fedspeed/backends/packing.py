"""Work and tensors as bytes for workers elsewhere: `pack` and `pack_tensors` here, `unpack` and `PackedTensors` there.

Work is a pickle of its parts; tensors are one array of bytes, each at an aligned offset.
"""

from __future__ import annotations

import itertools
import pickle
import pickletools
import sys
import types
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..client.flat_model import FlatModel
from ..client.trees import tree_map
from ..client.work import Work
from ..config.plan import Plan
from ..config.spec import SETTINGS, Spec
from ..errors import UserError
from ..methods import find_method, from_code
from ..methods.base import Method
from ..utils.own_code import Code
from ..utils.registry import CODES, file_of, loaded_in, run_code
from .shared_memory import ALIGN, Slot, lay_out

TENSORS = ("x", "y", "x_test", "y_test")
"""Large fields of `Federated`, which a back end shares between its workers instead of pickling them.

Inputs on disk are pickled: that is the names of their files, which every worker opens itself.
"""
SERVER_ONLY = ("cohort",)
"""Settings that only the server reads: a worker has their default, so that objects need not be sent."""


def sources(method: Method) -> list[tuple[str, Code | None]]:
    """Return the classes of a method that come from outside, with their code if it is a user's file; loaded first."""
    own = [(method.source, CODES.get(method.code))] if method.source else []
    return own + [pair for value in method.fields().values() if isinstance(value, Method) for pair in sources(value)]


def setting_files(plan: Plan) -> list[tuple[str, Code]]:
    """Return the user's files that settings of a plan name, and their code; a worker elsewhere may not have them."""
    specs = [value for value in (getattr(plan, key) for key in SETTINGS) if isinstance(value, Spec)]
    return [(file_of(spec.name), CODES[spec.code]) for spec in specs if file_of(spec.name)]


class Packed(NamedTuple):
    """Work ready to be sent.

    Args:
        work: everything but the data's tensors.
        data: the data's tensors, which a back end may share as it likes.
        main: a name that unpacking looks for in `__main__`, "" if there is none.
    """

    work: bytes
    data: dict[str, torch.Tensor]
    main: str


def pack(work: Work, backend: str = "process") -> Packed:
    """Pack everything that a worker needs; a UserError names the part that cannot be sent, and the back end."""
    tensors = {k: a for k in TENSORS if isinstance(a := getattr(work.data, k), torch.Tensor)}  # not those on disk
    empty: dict[str, Any] = {name: torch.empty(0) for name in tensors}
    with work.flat.detached():
        parts = {"method": work.method, "loss": work.loss, "model": work.flat.model}
        pickled = {name: check_picklable(name, value, backend) for name, value in parts.items()}
    fields = {name: getattr(work.plan, name) for name in Plan.__dataclass_fields__ if name not in SERVER_ONLY}
    plan = Plan(**fields)  # it may be a Config
    rest = {"data": replace(work.data, **empty), "shapes": work.shapes, "plan": plan}
    pickled |= {name: check_picklable(name, value, backend) for name, value in rest.items()}
    main = next(filter(None, map(in_main, pickled.values())), "")
    code = sources(work.method), [*setting_files(plan), *loaded_in(*pickled.values())]  # executed before the rest
    return Packed(pickle.dumps((*code, work.flat.no_decay, pickled)), tensors, main)


def unpack(packed: bytes, tensors: dict[str, torch.Tensor]) -> Work:
    """Return the work from its bytes and the data's tensors."""
    own, others, no_decay, pickled = pickle.loads(packed)
    for source, code in own:
        path, _, cls = source.rpartition(":")
        from_code(Path(path), cls, code) if code else find_method(source)
    for file, code in others:
        run_code(Path(file), code)
    parts = {name: pickle.loads(part) for name, part in pickled.items()}
    data = replace(parts["data"], **tensors)
    flat = FlatModel(parts["model"], no_decay, parts["plan"].keeps_statistics)
    work = Work(parts["method"], flat, parts["loss"], data, parts["plan"])
    work.__dict__["shapes"] = parts["shapes"]  # found by the driver, where hooks were called for it
    work.hooks.expect(work.shapes.up)
    return work


def can_be_sent(work: Work) -> bool:
    """Return whether work can be packed, and unpacked without importing the user's script again."""
    try:
        return not pack(work).main
    except UserError:
        return False


def in_main(pickled: bytes) -> str:
    """Return the first name that a pickle looks for in `__main__`, the script or notebook that runs, or ""."""
    if b"__main__" not in pickled:
        return ""
    words = [str(argument) for opcode, argument, _ in pickletools.genops(pickled) if "UNICODE" in opcode.name]
    return next((b for a, b in itertools.pairwise(words) if a == "__main__"), "")


@contextmanager
def without_main() -> Iterator[None]:
    """Hide the user's script from processes that start inside: they need nothing of it, and it needs no guard."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def check_picklable(name: str, value: Any, backend: str = "process") -> bytes:
    """Return a value pickled; raise a UserError if workers could not unpickle it."""
    try:
        pickled = pickle.dumps(value)
    except Exception as error:
        raise UserError(
            f"back end {backend}: the {name} cannot be sent to worker processes ({type(error).__name__}: {error}); "
            f"define it at the top level of a module, or use backend='serial'"
        ) from None
    found, main = in_main(pickled), sys.modules["__main__"]
    file = Path(getattr(main, "__file__", None) or "<none>")  # a program read from stdin is called "<stdin>"
    if found and not file.is_file() and getattr(main, "__spec__", None) is None:
        raise UserError(
            f"back end {backend}: {found} ({name}) is defined in this notebook or session, where worker processes "
            f"cannot find it; write it into a module (a .py file) and import it, or use backend='serial'"
        )
    return pickled


def pack_tensors(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    """Return the bytes of some tensors, one after the other, each in its slot of `lay_out`."""
    places, size = lay_out(list(tensors))
    raw = torch.empty(max(size, ALIGN), dtype=torch.uint8)
    for place, a in zip(places, tensors, strict=True):
        _at(raw, place).copy_(a.detach())
    whole: np.ndarray = raw.numpy()
    return whole


class PackedTensors:
    """Tensors in an array of bytes, which other processes may read too: they must not be written to.

    Args:
        raw: the array that `pack_tensors` made.
    """

    def __init__(self, raw: np.ndarray) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            whole = torch.from_numpy(raw)
        # Kernels sum in another order at unaligned addresses, which would change bits: such bytes are copied.
        self.raw = whole if whole.data_ptr() % ALIGN == 0 else whole.clone()

    def tensors(self, like: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Return views with the shapes and dtypes of `like`, which must be those of the packed tensors."""
        return [_at(self.raw, place) for place in lay_out(list(like))[0]]


def tree_of(like: Any, leaves: Iterable[torch.Tensor]) -> Any:
    """Return a tree like another, with these tensors as leaves."""
    remaining = iter(leaves)
    return tree_map(lambda _: next(remaining), like)


def _at(raw: torch.Tensor, place: Slot) -> torch.Tensor:
    if not place.size:
        return torch.empty(place.shape, dtype=place.dtype)
    return raw[place.offset : place.offset + place.size].view(place.dtype).view(place.shape)
