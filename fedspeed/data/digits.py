"""Handwritten digits, embedded: 1,797 grey pictures of 8 x 8, ten classes; needs no network.

The test part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak, UCI Machine
Learning Repository (1998), https://doi.org/10.24432/C50P49, licensed under CC BY 4.0; the arrays are those of
scikit-learn's `load_digits`, unchanged (grey values 0..16).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .samples import Samples

TRAIN = 1437


def digits() -> Samples:
    """Return the first 1,437 pictures for training, the last 360 for testing, in the original order; grey values 0..1.

    The order groups writers, so the writers of the test set do not occur in training.

    Example:
        >>> data = digits()
        >>> data.x.shape, data.x_test.shape, data.classes
        ((1437, 1, 8, 8), (360, 1, 8, 8), 10)
    """
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as stored:
        x = stored["x"][:, None].astype(np.float32) / np.float32(16)
        y = stored["y"].astype(np.int64)
    return Samples("digits", x[:TRAIN], y[:TRAIN], x[TRAIN:], y[TRAIN:], classes=10)
