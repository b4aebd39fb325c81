"""A CUDA device that only pretends: numbers are computed on the CPU, the rules are those of a GPU.

Whether a tensor is "on the GPU" is a property of its memory. Calls that would move or make tensors there are done on
the CPU, and the memory they return is marked; every operation, backward passes included, must have its tensors on one
side (but for CPU tensors without dimensions, which CUDA takes), and marks what it returns. What CUDA refuses is
refused: `.numpy()` of a tensor that is there, for example. So code that would mix devices fails here, and code that
runs here gives the CPU's bits. Modes are a thread's own: what writes checkpoints is not watched. Masks that vmap draws
are made below, where nobody says for which device: dropout in the block engine cannot be tried.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HERE, THERE = torch.device("cpu"), torch.device("cuda:0")


class MixedDevices(RuntimeError):
    """What CUDA raises for tensors on two devices."""


class Places:
    """Which memory is there, and what was moved."""

    def __init__(self) -> None:
        self._there: dict[int, StorageWeakRef] = {}  # a weak reference keeps the address from being used again
        self.up: list[int] = []  # bytes of every copy to the device
        self.down: list[int] = []  # of every copy back
        self.pageable: list[int] = []  # of copies to the device that were not from pinned memory
        self.read = 0  # numbers that were waited for
        self._pinned: dict[int, StorageWeakRef] = {}

    def is_there(self, a: torch.Tensor) -> bool:
        while torch._C._functorch.is_functorch_wrapped_tensor(a):
            a = torch._C._functorch.get_unwrapped(a)
        return a.device.type != "meta" and a.untyped_storage()._cdata in self._there

    def put(self, a: torch.Tensor) -> None:
        if a.device.type != "meta":
            self._there[a.untyped_storage()._cdata] = StorageWeakRef(a.untyped_storage())

    def pin(self, a: torch.Tensor) -> torch.Tensor:
        made = a.clone()
        self._pinned[made.untyped_storage()._cdata] = StorageWeakRef(made.untyped_storage())
        return made

    def sent(self, a: torch.Tensor) -> None:
        size = a.numel() * a.element_size()
        self.up.append(size)
        if a.untyped_storage()._cdata not in self._pinned:
            self.pageable.append(size)


class _Rules(TorchDispatchMode):
    """Below autograd: every operation has its tensors on one side."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self.places = places

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor) and a.device.type != "meta"]
        there = [self.places.is_there(a) for a in given]
        name = func._schema.name
        if name == "aten::copy_":  # the one operation between devices
            target, source = there[:2]
            if target != source and given[1].ndim:
                self.places.sent(given[1]) if target else self.places.down.append(given[1].nbytes)
            return func(*args, **(kwargs or {}))
        if name in ("aten::index", "aten::index_put_") and there and there[0]:  # CUDA takes indices from either side
            for a in (a for a, gone in zip(given, there, strict=True) if not gone and not a.is_floating_point()):
                self.places.sent(a)
                there = [gone or a is one for one, gone in zip(given, there, strict=True)]
        if any(there) and not all(there) and any(a.ndim for a, gone in zip(given, there, strict=True) if not gone):
            shapes = ", ".join(
                f"{tuple(a.shape)} on {THERE if gone else HERE}" for a, gone in zip(given, there, strict=True)
            )
            raise MixedDevices(f"{name}: expected all tensors to be on the same device, found {shapes}")
        if name in ("aten::_local_scalar_dense", "aten::equal"):
            self.places.read += any(there)
        result = func(*args, **(kwargs or {}))
        if any(there):
            for a in tree_leaves(result):
                if isinstance(a, torch.Tensor):
                    self.places.put(a)
        return result


class _Calls(TorchFunctionMode):
    """Above autograd: what names a device, or asks for one."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self.places = places

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, places = dict(kwargs or {}), self.places
        name = getattr(func, "__name__", "")
        owner = getattr(func, "__self__", None)
        if owner is torch.Tensor.device and name == "__get__":
            return THERE if places.is_there(args[0]) else func(*args)
        if func is torch.Tensor.is_cuda.__get__:
            return places.is_there(args[0])
        if func is torch.Tensor.pin_memory:
            if places.is_there(args[0]):
                raise RuntimeError("cannot pin a tensor that is on the GPU")
            return places.pin(args[0])
        if func in (torch.Tensor.numpy, torch.Tensor.__array__) and places.is_there(args[0]):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
        if func is torch.Tensor.tolist:
            places.read += places.is_there(args[0])
        if func in (torch.Tensor.cpu, torch.Tensor.cuda, torch.Tensor.to):
            return self._moved(func, args, kwargs)
        wanted = kwargs.get("device")
        if wanted is None and func is torch.Tensor.new_zeros:
            wanted = THERE if places.is_there(args[0]) else None
        if wanted is None or torch.device(wanted).type != "cuda":
            return func(*args, **kwargs)
        result = func(*args, **{**kwargs, "device": HERE})
        for a in tree_leaves(result):
            if isinstance(a, torch.Tensor):
                places.put(a)
        return result

    def _moved(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        """`to`, `cpu` and `cuda`: a dtype is changed where the tensor is, then it moves."""
        a, places, target = args[0], self.places, {torch.Tensor.cpu: HERE, torch.Tensor.cuda: THERE}.get(func)
        kwargs.pop("non_blocking", None)
        target = kwargs.pop("device", target)
        flags = [one for one in args[1:] if isinstance(one, bool)]
        for one in args[1:]:
            if isinstance(one, str | torch.device):
                target = torch.device(one)
            elif isinstance(one, torch.dtype):
                kwargs["dtype"] = one
            elif isinstance(one, torch.Tensor):
                target, kwargs["dtype"] = (THERE if places.is_there(one) else HERE), one.dtype
        if len(flags) > 1:
            kwargs["copy"] = flags[1]
        was = places.is_there(a)
        goes = was if target is None else torch.device(target).type == "cuda"
        if target is not None and torch.device(target).type not in ("cpu", "cuda"):
            return a.to(device=target, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        moved = a.to(**kwargs) if kwargs else a
        if goes == was:
            return moved
        if goes:
            places.sent(a)
        else:
            places.down.append(moved.nbytes)
        made = _apart(moved)
        if goes:
            places.put(made)
        return made


def _apart(a: torch.Tensor) -> torch.Tensor:
    """A copy in memory of its own that nobody has marked."""
    if a.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError("moving a tensor inside a graph: not pretended")
    with torch.utils._python_dispatch._disable_current_modes():
        return a.detach().clone()


@contextlib.contextmanager
def pretended_cuda(monkeypatch: Any) -> Iterator[Places]:
    """While it lasts there is one CUDA device, "cuda:0"; yields what lies there and what was moved."""
    places = Places()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # which a run sets: as it was, afterwards
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _=None: "a GPU that only pretends")
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.default_generator,))
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda _=None: torch.default_generator.get_state())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, _=None: torch.default_generator.set_state(state))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
    with _Calls(places), _Rules(places):
        yield places
