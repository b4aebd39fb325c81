"""Devices and private names of torch: choice of a device, deterministic settings, generators, copies, transforms.

On the CPU nothing here changes a bit. Tests simulate other devices (`tests/utils/test_devices.py`); `make gpu-check`
tries a real one. No other file uses private names of torch.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..errors import UserError


def pick_device(name: str) -> torch.device:
    """Return the device of a name, which must exist; `auto` is cuda, else mps, else cpu."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        if torch.device(name).type == "cuda" and torch.cuda.is_available():
            # Set before the first CUDA call: cuBLAS is only deterministic with it.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        device = torch.zeros(1, device=name).device
        if device.type != "meta":  # tensors of `meta` hold no numbers
            return device
        reason = ""
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", name):
        raise UserError(f"device: expected auto, cpu, cuda, cuda:N or mps, found {name!r}")
    raise UserError(f"device {name!r} cannot be used here ({reason}); try --device cpu")


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Use deterministic algorithms on CUDA and no TF32, whatever the calling program has set.

    Convolutions use TF32 by default. An operation without a deterministic algorithm warns and is computed.
    """
    if device.type != "cuda":
        yield
        return
    strict, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filled, products = memory.fill_uninitialized_memory, torch.backends.cuda.matmul.allow_tf32
    torch.use_deterministic_algorithms(True, warn_only=not strict or warned)
    memory.fill_uninitialized_memory = False  # no code reads uninitialised memory
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with convolutions(tf32=False):
            yield
    finally:
        torch.use_deterministic_algorithms(strict, warn_only=warned)
        memory.fill_uninitialized_memory = filled
        torch.backends.cuda.matmul.allow_tf32 = products


@contextmanager
def convolutions(tf32: bool) -> Iterator[None]:
    """Make cuDNN deterministic within a block, with TF32 or without."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=tf32):
        yield


@contextmanager
def preserve_rng(device: torch.device) -> Iterator[None]:
    """Restore the caller's random generators afterwards, including the device's."""
    before = torch.mps.get_rng_state() if device.type == "mps" else None
    try:
        with torch.random.fork_rng(devices=[device.index or 0] if device.type == "cuda" else []):
            yield
    finally:
        if before is not None:
            torch.mps.set_rng_state(before)


def to_device(a: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy a small array to a device without waiting; to CUDA it is copied from pinned memory."""
    here = torch.from_numpy(np.ascontiguousarray(a))
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)


_active: Any = getattr(torch._C, "_are_functorch_transforms_active", None)
_disable: Any = getattr(torch._C, "_DisableFuncTorch", None)
_wrapped: Any = getattr(getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", None)
_modes: Any = getattr(torch._C, "_len_torch_dispatch_stack", None)
_no_modes: Any = getattr(getattr(torch.utils, "_python_dispatch", None), "_disable_current_modes", None)
_kinds = ("forward", "forward_pre", "backward", "backward_pre")
_hooks: list[Any] = [getattr(torch.nn.modules.module, f"_global_{kind}_hooks", None) for kind in _kinds]


def can_ask() -> bool:
    """Return whether this torch has the private names used below; without them layers are the stock ones."""
    return None not in (_active, _disable, _wrapped, _modes, _no_modes, *_hooks)


def watched() -> bool:
    """Return whether every operation or every layer is watched.

    A dispatch mode sees operations: it counts or traces them, or has tensors without memory (`FakeTensorMode`). Global
    hooks see layers. What is computed outside of torch is hidden from both.
    """
    return bool(_modes()) or any(_hooks)


def transforming() -> bool:
    """Return whether a transform of `torch.func` is active."""
    return bool(_active())


def transformed(x: torch.Tensor) -> bool:
    """Return whether a tensor belongs to a transform of `torch.func`."""
    return bool(_wrapped(x))


@contextmanager
def constants() -> Iterator[None]:
    """Make tensors that are cached: they must not belong to a mode, a transform or the device of the first call."""
    with torch.inference_mode(False), torch.no_grad(), _disable(), _no_modes(), torch.device("cpu"):
        yield


def version(a: torch.Tensor) -> int | str:
    """Return a value that differs after a tensor was changed in place: torch's counter, else a digest of its bytes."""
    found: int | None = getattr(a, "_version", None)
    if found is not None:
        return found
    plain = a.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(plain.numpy().data, digest_size=16).hexdigest()
