"""Everything besides config and data that can change a result's last bits: versions, hardware, variables."""

from __future__ import annotations

import os
import platform
from typing import Any

from .. import __version__

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


def environment(device: Any) -> dict[str, Any]:
    """Return versions, hardware and variables; where they are equal, results are equal bit for bit.

    Args:
        device: the device that computed, a `torch.device` or its name.
    """
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
        "cores": cores(),
        "device": torch.cuda.get_device_name(place) if cuda else place.type,
        **cuda,
        "variables": ", ".join(f"{name}={value}" for name, value in bits_environment().items()) or "none",
    }
