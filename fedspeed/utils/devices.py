"""What depends on the device: generators, the settings that decide bits on CUDA, and copies to it.

On the CPU nothing here changes a bit. These paths are tested with a device that only pretends (`tests/test_device.py`);
`make gpu-check` tries them on a real one.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch

from ..errors import UserError


def configure_cublas(device: torch.device) -> None:
    """Before the first tensor is on it: cuBLAS reads once how it may work, and gives the same bits only so."""
    if device.type == "cuda" and torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pick_device(name: str) -> torch.device:
    """`auto` is cuda, else mps, else cpu; anything else must exist."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        configure_cublas(torch.device(name))
        device = torch.zeros(1, device=name).device
        if device.type != "meta":  # whose tensors hold no numbers
            return device
        reason = ""
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
    if not re.fullmatch(r"cpu|mps|cuda(:\d+)?", name):
        raise UserError(f"device: expected auto, cpu, cuda, cuda:N or mps, found {name!r}")
    raise UserError(f"device {name!r} cannot be used here ({reason}); try --device cpu")


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """On CUDA, algorithms that give the same bits each time, and no TF32, whatever the program around has set.

    Convolutions would take TF32 by default. An operation that has no such algorithm warns, and goes on.
    """
    if device.type != "cuda":
        yield
        return
    strict, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filled, products = memory.fill_uninitialized_memory, torch.backends.cuda.matmul.allow_tf32
    torch.use_deterministic_algorithms(True, warn_only=not strict or warned)
    memory.fill_uninitialized_memory = False  # nothing reads it
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
    """cuDNN's settings while a block lasts: the same bits each time, with TF32 or without."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=tf32):
        yield


@contextmanager
def preserve_rng(device: torch.device) -> Iterator[None]:
    """Leave the caller's random generators as they were, the device's too."""
    before = torch.mps.get_rng_state() if device.type == "mps" else None
    try:
        with torch.random.fork_rng(devices=[device.index or 0] if device.type == "cuda" else []):
            yield
    finally:
        if before is not None:
            torch.mps.set_rng_state(before)


def to_device(a: np.ndarray, device: torch.device) -> torch.Tensor:
    """A small array on a device, without waiting for it: to CUDA it goes from pinned memory."""
    here = torch.from_numpy(np.ascontiguousarray(a))
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)


_active: Any = getattr(torch._C, "_are_functorch_transforms_active", None)


_disable: Any = getattr(torch._C, "_DisableFuncTorch", None)


_wrapped: Any = getattr(getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", None)


def can_ask() -> bool:
    """Whether torch tells of `torch.func`, as the three functions below need; where not, layers are the stock ones."""
    return None not in (_active, _disable, _wrapped)


def transforming() -> bool:
    """Whether a transform of `torch.func` is active."""
    return bool(_active())


def transformed(x: torch.Tensor) -> bool:
    """Whether a tensor belongs to a transform of `torch.func`."""
    return bool(_wrapped(x))


def outside_transforms() -> AbstractContextManager[Any]:
    """For what is made inside a transform and outlives it."""
    made: AbstractContextManager[Any] = _disable()
    return made


def version(a: torch.Tensor) -> int | str:
    """Something that differs after a tensor was changed in place: torch's counter, else a digest of its bytes."""
    found: int | None = getattr(a, "_version", None)
    if found is not None:
        return found
    plain = a.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(plain.numpy().data, digest_size=16).hexdigest()
