"""A compression wrapper as a user would write it, outside the package: random quantisation of all that is sent."""

from dataclasses import dataclass

import numpy as np
import torch

from fedspeed import Wrapper, param, rng


@dataclass(frozen=True)
class Quantised(Wrapper):
    """Every vector as whole numbers in [-levels, levels] times a scale, rounded at random so that the mean is right."""

    levels: int = param(4, "[1, 127]", "the number of levels on each side of 0")
    block_safe = True

    def upload(self, xK, down, client, run):
        up, client = super().upload(xK, down, client, run)
        return type(up)(*(self.rounded(v, run, k) for k, v in enumerate(up))), client

    def rounded(self, v, run, k):
        scale = v.abs().amax(-1, keepdim=True).clamp(min=1e-30) / self.levels
        rows = [rng(run.seed, "quantise", run.t, i, k).random(v.shape[-1]) for i in run.clients]
        return (v / scale + torch.from_numpy(np.stack(rows)).to(v).view_as(v)).floor() * scale

    def sent(self, up):
        bits = (2 * self.levels + 1).bit_length()
        return sum(-(-v.numel() * bits // 8) + v.element_size() for v in up)
