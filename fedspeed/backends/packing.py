"""Work and tensors as bytes for worker processes, on this machine or on others.

Work is a pickle of its parts; tensors are one array of bytes, each at an aligned offset.
"""

from __future__ import annotations

import itertools
import pickle
import pickletools
import sys
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..client.flat_model import FlatModel
from ..client.work import Work
from ..config.plan import Plan
from ..config.spec import SETTINGS, Spec
from ..errors import UserError
from ..methods import find_method, from_code
from ..methods.base import Method
from ..models.resnet import choose_layers, resolve_layers
from ..utils.own_code import Code
from ..utils.registry import CODES, file_of, loaded_in, run_code
from .shared_memory import ALIGN, lay_out

TENSORS = ("x", "y", "x_test", "y_test")
"""Large fields of `Federated`, which a back end shares between its workers instead of pickling them.

Inputs on disk are pickled: that is the names of their files, which every worker opens itself.
"""
SERVER_ONLY = ("cohort",)
"""Settings that only the server reads: workers get the default, so that a sampler object need not be pickled."""


def sources(method: Method) -> list[tuple[str, Code | None]]:
    """Return the classes of a method that are not built in, with their code if it is a user's file."""
    own = [(method.source, CODES.get(method.code))] if method.source else []
    return own + [pair for value in method.fields().values() if isinstance(value, Method) for pair in sources(value)]


class Packed(NamedTuple):
    """Work ready to be sent."""

    work: bytes  # everything but the data's tensors
    data: dict[str, torch.Tensor]  # the data's tensors, which a back end may share as it likes
    main: str  # a name of the user's script that unpickling needs, "" if there is none


def pack(work: Work, backend: str = "process", values: bool = True) -> Packed:
    """Pack everything that a worker needs; a UserError names the part that cannot be sent, and the back end.

    Args:
        values: send the values of the parameters, x^0; if not, zeros of the same shapes.
    """
    tensors = {k: a for k in TENSORS if isinstance(a := getattr(work.data, k), torch.Tensor)}  # not those on disk
    empty: dict[str, Any] = {name: torch.empty(0) for name in tensors}
    with work.flat.detached():
        for p in () if values else work.flat.parameters:
            p.data = p.new_zeros(()).expand(p.shape)  # one number in memory and in the pickle
        parts = {"method": work.method, "loss": work.loss, "model": work.flat.model}
        pickled = {name: check_picklable(name, value, backend) for name, value in parts.items()}
    fields = {name: getattr(work.plan, name) for name in Plan.__dataclass_fields__ if name not in SERVER_ONLY}
    plan = Plan(**fields)  # work.plan may be a Config, which has more fields
    rest = {"data": replace(work.data, **empty), "shapes": work.shapes, "plan": plan}
    pickled |= {name: check_picklable(name, value, backend) for name, value in rest.items()}
    main = next(filter(None, map(in_main, pickled.values())), "")
    specs = [value for value in (getattr(plan, key) for key in SETTINGS) if isinstance(value, Spec)]
    files = [(file_of(spec.name), CODES[spec.code]) for spec in specs if file_of(spec.name)]
    code = sources(work.method), [*files, *loaded_in(*pickled.values())]  # a worker runs them before it unpickles
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
    choose_layers(parts["model"], resolve_layers(parts["model"], parts["plan"].layers))
    flat = FlatModel(parts["model"], no_decay, parts["plan"].keeps_statistics)
    work = Work(parts["method"], flat, parts["loss"], data, parts["plan"])
    work.__dict__["shapes"] = parts["shapes"]  # the driver found them by calling the hooks
    work.hooks.expect(work.shapes.up)
    return work


def can_be_sent(work: Work) -> bool:
    """Return whether work can be packed, and unpacked without importing the user's script again."""
    try:
        return not pack(work, values=False).main
    except UserError:
        return False


def in_main(pickled: bytes) -> str:
    """Return the first name that a pickle looks for in `__main__`, the script or notebook that runs, or ""."""
    if b"__main__" not in pickled:
        return ""
    words = [str(argument) for opcode, argument, _ in pickletools.genops(pickled) if "UNICODE" in opcode.name]
    return next((b for a, b in itertools.pairwise(words) if a == "__main__"), "")


def check_picklable(name: str, value: Any, backend: str) -> bytes:
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


def pack_tensors(tensors: Iterable[torch.Tensor]) -> np.ndarray:
    """Return the bytes of some tensors, one after the other, each at its aligned place (`lay_out`)."""
    given = list(tensors)
    places, size = lay_out(given)
    raw = torch.empty(max(size, ALIGN), dtype=torch.uint8)
    for place, a in zip(places, given, strict=True):
        place.view(raw).copy_(a.detach())
    whole: np.ndarray = raw.numpy()
    return whole


def unpack_tensors(raw: np.ndarray, like: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors that were packed, as views that must not be written to: other processes may read them too.

    Args:
        raw: the array that `pack_tensors` made.
        like: tensors with the shapes and dtypes of the packed ones.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        whole = torch.from_numpy(raw)
    # Kernels sum in another order at unaligned addresses, which would change bits: such bytes are copied.
    aligned = whole if whole.data_ptr() % ALIGN == 0 else whole.clone()
    return [place.view(aligned) for place in lay_out(list(like))[0]]
