"""The arrays that all contenders share, made from the project's own data."""

from __future__ import annotations

import os

import numpy as np

from fedspeed import Federated, load_data

from .workloads import Arrays, Workload, load

TEST = 1000
"""Test samples kept for the check that a contender trains."""


def prepare(workload: Workload) -> None:
    """Write the workload's arrays into the cache, unless they exist."""
    if (workload.folder / "done").exists():
        return
    made = _pictures(workload) if workload.data.startswith("cifar10") else _vectors(workload)
    workload.folder.mkdir(parents=True, exist_ok=True)
    for name, array in made._asdict().items():
        part = workload.folder / f"{name}.{os.getpid()}.npy"
        np.save(part, array)
        part.replace(workload.folder / f"{name}.npy")
    (workload.folder / "done").touch()


def federated(workload: Workload, augment: str = "none") -> Federated:
    """Return the same samples as the contenders', as fedspeed keeps them: pictures as bytes, vectors as they are."""
    if workload.data.startswith("cifar10"):
        return _cifar(workload, augment)
    a = load(workload)
    owner = np.repeat(np.arange(workload.clients), workload.samples)
    x, y = a.x.reshape(-1, *a.x.shape[2:]), a.y.reshape(-1)
    return Federated.from_arrays(x, y, owner, (a.x_test, a.y_test), name=workload.data)


def _cifar(workload: Workload, augment: str = "none") -> Federated:
    return load_data("cifar10", split="iid", clients=workload.clients, augment=augment)


def _pictures(workload: Workload) -> Arrays:
    """CIFAR-10, normalised, float32, client by client."""
    data = _cifar(workload)
    if {int(n) for n in data.sizes} != {workload.samples}:
        raise ValueError(f"{workload.name}: expected {workload.samples} samples per client, found {set(data.sizes)}")
    x, y = data.batch(data.indices)
    shape = (workload.clients, workload.samples)
    x_test, y_test = data.test_batch(0, TEST)
    return Arrays(x.view(*shape, *x.shape[1:]).numpy(), y.view(shape).numpy(), x_test.numpy(), y_test.numpy())


def _vectors(workload: Workload) -> Arrays:
    """64 uniform features, labels from a noisy linear teacher."""
    stream = np.random.default_rng(0)
    n = workload.clients * workload.samples
    teacher = stream.standard_normal((64, 10))
    x = (stream.random((n + TEST, 64)) - 0.5).astype(np.float32)
    y = (x @ teacher + 0.2 * stream.standard_normal((n + TEST, 10))).argmax(1)
    shape = (workload.clients, workload.samples)
    return Arrays(x[:n].reshape(*shape, 64), y[:n].reshape(shape), x[n:], y[n:])
