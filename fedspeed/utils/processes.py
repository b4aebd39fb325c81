"""Processes: what their results depend on, safe start of workers, end with the parent, critical sections.

The environment is everything besides config and data that can change a result's last bits: versions, hardware,
variables. Imports no torch, so that workers can install their parent watch before the slow import.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import UserError

VARIABLE = "PYTHONSAFEPATH"
STARTING = threading.RLock()
"""Held while this process looks otherwise to those that it starts: threads may start some at the same time."""
PR_SET_PDEATHSIG = 1


@contextmanager
def without_main() -> Iterator[None]:
    """Hide the user's script from processes that start inside: they need nothing of it, and it needs no guard."""
    with STARTING:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


@contextmanager
def safe_path() -> Iterator[None]:
    """Keep processes that are started within from importing modules of the current folder, an untrusted run directory.

    multiprocessing starts them, and its resource tracker, as `python -c`, which looks there first. The entries of this
    process's `sys.path`, a script's own folder for example, are passed on later by multiprocessing itself.

    Example:
        >>> with safe_path():
        ...     os.environ["PYTHONSAFEPATH"]
        '1'
    """
    if sys.flags.ignore_environment and not sys.flags.safe_path:
        raise UserError(
            "worker processes: Python was started with -E, so they would import modules from the current folder; start "
            "it with -P as well (python -P -E ...), or use --backend serial"
        )
    with STARTING:
        before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = "1"
        try:
            yield
        finally:
            if before is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = before


def in_main_thread() -> bool:
    """Return whether this is the main thread, which lives as long as the process and receives its signals."""
    return threading.current_thread() is threading.main_thread()


def end_with_parent(kernel: bool = False) -> None:
    """End this process as soon as its parent has ended, whatever it is doing.

    Args:
        kernel: let Linux do it, also while C code holds the interpreter. Only if the parent's main thread started this
            process: Linux takes the end of the starting thread for that of the parent.
    """
    parent = parent_process()
    if parent is None:
        return
    if kernel and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True, name="fedspeed-parent").start()


def _end_after(sentinel: int) -> None:
    wait([sentinel])  # returns at once if the parent has already ended
    os._exit(1)


@contextmanager
def delay_signals() -> Iterator[None]:
    """Delay SIGINT and SIGTERM until a short critical section is complete."""
    numbers = (signal.SIGINT, signal.SIGTERM) if in_main_thread() else ()
    # Only handlers written in Python are held back: SIG_DFL and SIG_IGN raise nothing between two statements.
    held = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}
    pending: list[int] = []
    for number in held:
        signal.signal(number, lambda number, _: pending.append(number))
    try:
        yield
    finally:
        for number, handler in held.items():
            signal.signal(number, handler)
        if pending:
            signal.raise_signal(pending[0])


VARIABLES = (
    "ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_DEBUG_CPU_TYPE", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA", "ONEDNN_CPU_ISA_HINTS", "DNNL_CPU_ISA_HINTS", "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE", "OPENBLAS_CORETYPE", "NPY_DISABLE_CPU_FEATURES", "NPY_ENABLE_CPU_FEATURES",
    "GLIBC_TUNABLES", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)  # fmt: skip
"""Environment variables that choose instructions or precision and so change bits. Numbers of threads change none."""


def bits_environment() -> dict[str, str]:
    """Return those of `VARIABLES` that are set.

    Example:
        >>> os.environ["MKL_CBWR"] = "COMPATIBLE"
        >>> bits_environment()["MKL_CBWR"]
        'COMPATIBLE'
        >>> del os.environ["MKL_CBWR"]
    """
    return {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def vendor() -> str:
    """Return who made the processor: MKL adds in another order on AMD's than on Intel's with the same instructions."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("vendor_id", "CPU implementer"):
                return value.strip()
    return platform.processor() or "unknown"


def environment(device: Any) -> dict[str, Any]:
    """Return versions, hardware and variables; where they are equal, results on `device` are equal bit for bit."""
    import numpy
    import torch

    place = torch.device(device)
    cudnn: Any = torch.backends.cudnn
    cuda = {"cuda": torch.version.cuda, "cudnn": cudnn.version()} if place.type == "cuda" else {}
    return {
        "fedspeed": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "vendor": vendor(),
        "cores": cores(),
        "device": torch.cuda.get_device_name(place) if cuda else place.type,
        **cuda,
        "variables": ", ".join(f"{name}={value}" for name, value in bits_environment().items()) or "none",
    }
