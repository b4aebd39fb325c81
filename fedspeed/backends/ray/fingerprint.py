"""Fingerprints of processes: versions, CPU and the digest of a fixed job; equal ones compute the same bits."""

from __future__ import annotations

import hashlib
import platform
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from ... import __version__
from ...client.trees import one_thread
from ...models import compiled_kernels
from ...models.fast_conv import Rule
from ...utils.processes import bits_environment

SAME_PROGRAM = ("fedspeed", "code", "python")
"""Fields that must be equal, because workers unpickle values of this program; others may differ with --allow-mixed."""


class Fingerprint(NamedTuple):
    """Everything that decides the bits of a process, each as text."""

    fedspeed: str
    code: str  # a digest of the package's own files
    python: str
    torch: str
    numpy: str
    cpu: str
    variables: str
    job: str  # the digest of the fixed job's results
    kernels: str = "none"  # the digest of what the compiled kernels of residual blocks compute, if they were built


def bits() -> Fingerprint:
    """Return the fingerprint of this process; takes a few hundredths of a second."""
    return Fingerprint(
        fedspeed=__version__,
        code=code_digest(),
        python=".".join(platform.python_version_tuple()[:2]),
        torch=torch.__version__,
        numpy=np.__version__,
        cpu=torch.backends.cpu.get_cpu_capability(),
        variables=", ".join(f"{name}={value}" for name, value in bits_environment().items()) or "none",
        job=fixed_job(),
        kernels=compiled_job(),
    )


def differences(here: Fingerprint, there: Fingerprint) -> dict[str, str]:
    """Return the fields that differ, in words, by name.

    Example:
        >>> here = Fingerprint("0.1", "a", "3.11", "2.13.0", "2.4.6", "AVX512", "none", "d")
        >>> differences(here, here._replace(cpu="AVX2"))
        {'cpu': 'cpu AVX2 instead of AVX512'}
    """
    pairs = zip(Fingerprint._fields, here, there, strict=True)
    return {name: f"{name} {b} instead of {a}" for name, a, b in pairs if a != b}


def admit(here: Fingerprint, host: str, there: Fingerprint | None, error: str, allow_mixed: bool) -> tuple[bool, str]:
    """Return whether a worker may join, and a message if it differs; one whose bits differ may with `allow_mixed`.

    Args:
        host: the worker's machine.
        there: the worker's fingerprint; None if it could not make one because of an `error`.
    """
    if there is None:
        message = f"fedspeed cannot be imported ({error}); install the same version there as here"
        return False, f"node {host}: {message}"
    found = differences(here, there)
    message = f"node {host}: {', '.join(found.values())}"
    if any(name in found for name in SAME_PROGRAM):
        return False, f"{message}; install the same version there as here"
    if there.kernels == "none" != here.kernels:  # it could not compute the run's residual blocks at all
        return False, f"{message}; install GCC there, and the package again (pip install .)"
    if found and not allow_mixed:
        return False, f"{message}: its bits are not the driver's; use nodes that are alike, or --allow-mixed"
    return True, message if found else ""


@cache
def code_digest() -> str:
    """Return a digest of the package's Python files, names included."""
    root, digest = Path(__file__).parents[2], hashlib.blake2b(digest_size=8)
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


@cache
def fixed_job() -> str:
    """Return the digest of two gradient steps of a small network: convolution, normalisation, products, logarithms.

    Inputs are fractions of small whole numbers, the same everywhere, so that only the arithmetic can differ.
    """
    shapes = [(16, 3, 3, 3), (16,), (64, 16 * 16), (10, 64)]
    with one_thread():
        weights = [_fractions(shape, 11 + i).requires_grad_() for i, shape in enumerate(shapes)]
        inputs, targets = _fractions((40, 3, 8, 8), 5), torch.arange(40) % 10
        digest = hashlib.blake2b(digest_size=8)
        for _ in range(2):
            kernel, bias, wide, last = weights
            maps = F.group_norm(F.conv2d(inputs, kernel, bias, padding=1), 2).relu()
            hidden = (F.max_pool2d(maps, 2).flatten(1) @ wide.T).tanh()
            gradients = torch.autograd.grad(F.cross_entropy(hidden @ last.T, targets), weights)
            for gradient in gradients:
                digest.update(gradient.contiguous().numpy().tobytes())
            weights = [(w - 0.1 * g).detach().requires_grad_() for w, g in zip(weights, gradients, strict=True)]
    return digest.hexdigest()


@cache
def compiled_job() -> str:
    """Return the digest of what the compiled kernels of residual blocks make of fixed numbers; "none" without them."""
    if compiled_kernels.library() is None:
        return "none"
    x, w = _fractions((3, 16, 16), 7), _fractions((9, 16, 16), 13)
    rule, gamma, beta, gw = Rule(side=4, stride=1), w[0, 0], w[1, 0], torch.empty_like(w)
    y, V, U = compiled_kernels.conv_forward(x, w, rule)
    out, mean, rstd = compiled_kernels.norm_forward(y, gamma, beta, (2, 1e-5), relu=True)
    sums = torch.empty_like(gamma), torch.empty_like(beta)
    gy, _ = compiled_kernels.norm_backward(x, out, y, gamma, mean, rstd, *sums)
    gx = compiled_kernels.conv_backward(gy, V, U, rule, gw)
    found = (out, gy, gx, gw, *sums, *compiled_kernels.pool_forward(x, 4))
    return hashlib.blake2b(b"".join(a.contiguous().numpy().tobytes() for a in found), digest_size=8).hexdigest()


def _fractions(shape: tuple[int, ...], step: int) -> torch.Tensor:
    size = int(np.prod(shape))
    return ((torch.arange(size) * step * 7919 % 1009 - 504).to(torch.float32) / 2048).view(shape)
