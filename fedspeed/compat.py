"""What we use of torch that torch does not promise to keep, each with what is done where it is gone."""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager
from typing import Any

import torch

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
