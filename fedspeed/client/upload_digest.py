"""Digests of clients' uploads, one number per counted reply: used to check that a replayed turn sent the same bytes.

A digest is of the bytes of one client's upload as its engine computed it: sums of 8-byte words times fixed odd
weights, mod 2^64. It reads memory once, sees any single change, and protects against accidents, not against forgery.
An upload on a GPU is copied for it. Digests are stored in run directories, so the formula must not change.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .trees import tree_leaves

Uploads = dict[int, int]
"""Client -> digest, for one round."""
SPAN = 2**15
PRIME = np.uint64(0x9E3779B97F4A7C15)


def _weights() -> np.ndarray:
    """Return odd numbers that look random (splitmix64 of 1, 2, ...)."""
    z = np.arange(1, SPAN + 1, dtype=np.uint64) * PRIME
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


WEIGHTS = _weights()


def upload_digests(up: Any, rows: int = 1) -> list[int]:
    """Return the digest of each client's upload: a tree of vectors, or of blocks with one row per client.

    A vector that clients share counts in every row.

    Example:
        >>> from fedspeed.methods.base import Movement
        >>> block = torch.arange(6.0).view(2, 3)
        >>> each = [*upload_digests(Movement(block[0])), *upload_digests(Movement(block[1]))]
        >>> upload_digests(Movement(block), 2) == each
        True
    """
    found = np.zeros(rows, np.uint64)
    for a in tree_leaves(up):
        raw = a.detach().cpu().contiguous().view(torch.uint8).numpy()
        raw = raw.reshape(-1, raw.shape[-1])
        whole = raw.shape[1] // 8 * 8
        rest = np.zeros((len(raw), 8), np.uint8)
        rest[:, : raw.shape[1] - whole] = raw[:, whole:]
        words = raw[:, :whole].view("<u8")
        for piece in [*(words[:, i : i + SPAN] for i in range(0, words.shape[1], SPAN)), rest.view("<u8")]:
            # Not `np.dot`, which is slower on integers; sums mod 2^64 are the same in any order.
            found = found * PRIME + np.einsum("ij,j->i", piece, WEIGHTS[: piece.shape[1]])
    return found.tolist()
