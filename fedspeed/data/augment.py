"""Normalisation and augmentation: from stored rows to model input, in batches.

    paper      flip with probability 1/2; crop at a random place after padding with black; then normalise
    released   as the released code: crop with probability 1/2 only, padding with zeros AFTER normalising
    flip       flip only
    none       normalise only

All draws come from the numpy stream that is passed in (a function of seed, round and client), so they do not
depend on the device, the back end or the order of jobs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from ..errors import unknown
from ..utils.devices import to_device

AUGMENTATIONS = ("paper", "released", "flip", "none")


@dataclass(frozen=True)
class Pipeline:
    """The steps that turn a batch of rows into model input.

    Bytes become floats x / 255; then (x - mean) / std, channel by channel, where constants are given. With a
    stream, pictures are first flipped left to right with probability `flip` and, with probability `crop`,
    shifted by a uniform offset in -padding..padding along both axes, black coming in at the border
    (`pad_last`: zeros after normalisation instead).

    Example:
        >>> x = torch.full((2, 3, 32, 32), 255, dtype=torch.uint8)
        >>> round(float(Pipeline(mean=(0.5,) * 3, std=(0.25,) * 3)(x, None).mean()), 5)
        2.0
    """

    dtype: torch.dtype = torch.float32
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    flip: float = 0.0
    padding: int = 0
    crop: float = 1.0
    pad_last: bool = False

    def __call__(self, x: torch.Tensor, stream: np.random.Generator | None) -> torch.Tensor:
        """Return model input for rows x, augmented when a random stream is given; x itself is not changed."""
        if stream is None or not self.random:
            return self.normalise(x)
        if self.pad_last:
            return self._augment(self.normalise(x), stream)
        return self.normalise(self._augment(x, stream))

    @property
    def random(self) -> bool:
        """Return whether a stream makes a difference."""
        return bool(self.flip or self.padding)

    @property
    def augmentation(self) -> str:
        """Describe the random changes in words.

        Example:
            >>> Pipeline(flip=0.5, padding=4).augmentation, Pipeline().augmentation
            ('flip and crop by 4', 'none')
        """
        crop = f"crop by {self.padding}{'' if self.crop == 1 else f' ({self.crop:.0%} of them)'}"
        return " and ".join(["flip"] * bool(self.flip) + [crop] * bool(self.padding)) or "none"

    def normalise(self, x: torch.Tensor) -> torch.Tensor:
        """Convert bytes to floats, then return (x - mean) / std."""
        scale = 255.0 if x.dtype == torch.uint8 else 1.0
        if not self.mean:
            return x.to(self.dtype).div_(255) if scale == 255.0 else x
        shift, factor = _constants(self.mean, self.std, scale, self.dtype, str(x.device))
        return torch.addcmul(shift, x.to(self.dtype), factor)

    def _augment(self, x: torch.Tensor, stream: np.random.Generator) -> torch.Tensor:
        """Flip and shift inside a border of zeros. The order of the draws fixes the bits of a seed."""
        n = len(x)
        p = self.padding
        height, width = x.shape[-2:]
        if self.flip:
            chosen = np.arange(n) + n * (stream.random(n) < self.flip)
            x = torch.cat([x, x.flip(-1)]).index_select(0, to_device(chosen, x.device))
        if not p:
            return x
        place = stream.integers(0, 2 * p + 1, (2, n))
        if self.crop < 1:
            place = np.where(stream.random(n) < self.crop, place, p)
        wide = x.new_zeros((*x.shape[:-2], height + 2 * p, width + 2 * p))
        wide[..., p : p + height, p : p + width] = x
        down, right = to_device(place, x.device)
        windows = wide.unfold(-2, height, 1).unfold(-2, width, 1)  # a view: n, channels, 2p+1, 2p+1, height, width
        return windows[torch.arange(n, device=x.device), :, down, right]


@lru_cache(maxsize=64)
def _constants(
    mean: tuple[float, ...], std: tuple[float, ...], scale: float, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return -mean / std and 1 / (scale * std), shaped to broadcast over pictures."""
    m, s = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in (mean, std))
    return (-m / s).to(dtype).to(device), (1 / (scale * s)).to(dtype).to(device)


@dataclass(frozen=True)
class Augmentation:
    """The augmentation and normalisation of one data set (the identity by default).

    Args:
        mean, std: channel constants of the paper.
        padding: that of the random crop; 0 means no crop.
        flip: whether a mirrored picture keeps its meaning.
        released_mean, released_std: the released code's constants where they differ.
        usual: the default, one of `AUGMENTATIONS`.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    padding: int = 0
    flip: bool = False
    released_mean: tuple[float, ...] = ()
    released_std: tuple[float, ...] = ()
    usual: str = "paper"

    def pipeline(self, augment: str = "") -> Pipeline:
        """Return the pipeline for one of `AUGMENTATIONS`; for the usual one by default."""
        augment = augment or self.usual
        if augment not in AUGMENTATIONS:
            raise unknown("augmentation", augment, AUGMENTATIONS)
        released = augment == "released"
        return Pipeline(
            mean=(released and self.released_mean) or self.mean,
            std=(released and self.released_std) or self.std,
            flip=0.5 * (self.flip and augment != "none"),
            padding=self.padding * (augment in ("paper", "released")),
            crop=0.5 if released else 1.0,
            pad_last=released,
        )
