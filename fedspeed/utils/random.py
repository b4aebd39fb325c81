"""Randomness as a pure function of its purpose.

Nothing here keeps a state: a stream is named by `(seed, purpose, *path)`, so the order of jobs, the back end and
interruptions cannot change a single draw, and a resumed run needs no generator state.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from .files import key as key


def rng(seed: int, purpose: str, *path: int) -> np.random.Generator:
    """Return an independent stream for one purpose.

    Example:
        >>> rng(0, "batches", 3, 17).permutation(4).tolist() == rng(0, "batches", 3, 17).permutation(4).tolist()
        True
    """
    return np.random.Generator(np.random.Philox(key=key(seed, purpose, *path)))


def low_keys(seed: int, purpose: str, t: int, clients: Sequence[int]) -> np.ndarray:
    """Return `key(seed, purpose, t, i) % 2**64` of many clients i at once, which costs half as much per client.

    Example:
        >>> low_keys(0, "batches", 3, [17]).tolist() == [key(0, "batches", 3, 17) % 2**64]
        True
    """
    pack, name = struct.Struct("<3q").pack, purpose.encode()
    found = [hashlib.blake2b(pack(seed, t, i) + name, digest_size=16).digest() for i in clients]
    return np.frombuffer(b"".join(found), dtype="<u8")[::2]


def cohort(seed: int, t: int, clients: int, active: int, scheme: str = "fixed") -> np.ndarray:
    """Draw the active set S^t, sorted by id.

    `fixed` draws exactly `active` clients without replacement; `bernoulli` makes every client active with probability
    `active / clients`, drawn again while none is (the released code's rule).
    """
    stream = rng(seed, "cohort", t)
    if scheme == "fixed":
        return np.sort(stream.choice(clients, size=active, replace=False, shuffle=False))
    while True:
        chosen = np.flatnonzero(stream.random(clients) < active / clients)
        if len(chosen):
            return chosen


def dropped(seed: int, t: int, active: np.ndarray, chance: float) -> np.ndarray:
    """Draw the active clients that fail after training in round t; drawn again while none is left."""
    if not chance:
        return active[:0]
    stream = rng(seed, "dropout", t)
    while True:
        lost = stream.random(len(active)) < chance
        if not lost.all():
            return active[lost]


def straggler_steps(seed: int, t: int, client: int, steps: int, chance: float) -> int:
    """Draw how many local steps a client finishes: all, or if it straggles a uniform number of 1 .. steps - 1."""
    if not chance or steps < 2:
        return steps
    stream = rng(seed, "straggler", t, client)
    return int(stream.integers(1, steps)) if stream.random() < chance else steps


def batch_orders(n: int, batch_size: int, steps: int, keys: Sequence[int] | np.ndarray) -> list[np.ndarray]:
    """Draw `steps` minibatches of positions 0..n-1 for each key, of which the low 64 bits count: (keys, batch) arrays.

    Every epoch is a fresh permutation and keeps its last, smaller batch. A permutation sorts hashed counters
    (splitmix64), so that those of many clients are drawn at once and each is a function of its key alone. The constants
    and the stable sort fix the bits.
    """
    epochs = -(-steps // -(-n // batch_size))
    low = keys if isinstance(keys, np.ndarray) else [key % 2**64 for key in keys]
    start = np.asarray(low, dtype=np.uint64)[:, None]
    counter = np.arange(1, epochs * n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = start + counter
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    order = z.reshape(len(keys), epochs, n).argsort(axis=-1, kind="stable")
    return [order[:, e, a : a + batch_size] for e in range(epochs) for a in range(0, n, batch_size)][:steps]


def batch_order(n: int, batch_size: int, steps: int, key: int) -> list[np.ndarray]:
    """Draw the minibatches of one key."""
    return [batch[0] for batch in batch_orders(n, batch_size, steps, [key])]


def seed_device(device: torch.device, seed: int) -> None:
    """Seed the generator that random layers on a device draw from (100 times cheaper than torch.manual_seed)."""
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@contextmanager
def torch_seed(seed: int, purpose: str, *path: int) -> Iterator[None]:
    """Seed torch's global generators within a block and restore them afterwards."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(key(seed, purpose, *path) % 2**63)
        yield
