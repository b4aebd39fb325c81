"""Whether this processor computes the bits that the pages show: the one place where tests ask which it is."""

from __future__ import annotations

import os

import torch

from fedspeed.utils.processes import bits_environment, vendor

MADE_ON = ("2.13.0", "AVX512", "AuthenticAMD")  # torch, and what decides the last bits: instructions and MKL's paths
TORCH_READS = ("ATEN_", "MKL_", "ONEDNN_", "DNNL_")  # beginnings of variables that choose its instructions
FORCE = "FEDSPEED_OTHER_PROCESSOR"
"""Set to anything, this variable makes tests take the branch for other processors; lowered instructions do, too."""


def same_bits() -> bool:
    """Whether numbers are computed here as on the machine that wrote the pages."""
    here = (torch.__version__.split("+")[0], torch.backends.cpu.get_cpu_capability(), vendor())
    lowered = any(name.startswith(TORCH_READS) for name in bits_environment())
    return here == MADE_ON and not lowered and not os.environ.get(FORCE)


SAME_BITS = same_bits()
