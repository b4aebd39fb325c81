"""Normalisation and augmentation against a loop that does one picture at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedspeed.data.augment import Augmentation, Pipeline
from fedspeed.data.cifar import PUBLISHED_10, PUBLISHED_100
from fedspeed.data.tinyimagenet import TINY
from fedspeed.errors import UserError
from fedspeed.utils.random import rng

CIFAR = PUBLISHED_10.augmentation


def pictures(n: int = 40, side: int = 32) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (n, 3, side, side), dtype=np.uint8))


def by_hand(x: torch.Tensor, p: Pipeline, stream: np.random.Generator) -> torch.Tensor:
    """The documented rule, picture by picture, in numpy."""
    n, side, pad = len(x), x.shape[-1], p.padding
    flips = stream.random(n) < p.flip
    place = stream.integers(0, 2 * pad + 1, (2, n))
    if p.crop < 1:
        place = np.where(stream.random(n) < p.crop, place, pad)
    mean, std = (np.array(v)[:, None, None] for v in (p.mean, p.std))
    out = []
    for i in range(n):
        picture = x[i].numpy().astype(np.float64) / 255
        picture = picture[..., ::-1] if flips[i] else picture
        if p.pad_last:
            picture = (picture - mean) / std
        wide = np.pad(picture, ((0, 0), (pad, pad), (pad, pad)))
        picture = wide[:, place[0, i] : place[0, i] + side, place[1, i] : place[1, i] + side]
        out.append(picture if p.pad_last else (picture - mean) / std)
    return torch.from_numpy(np.stack(out))


@pytest.mark.parametrize("augment", ["paper", "released"])
@pytest.mark.parametrize("augmentation", [CIFAR, PUBLISHED_100.augmentation, TINY.augmentation])
def test_batches_equal_the_loop(augment: str, augmentation: Augmentation) -> None:
    x, pipeline = pictures(), augmentation.pipeline(augment)
    kept = x.clone()
    found = pipeline(x, rng(0, "augment", 3, 7))
    assert torch.allclose(found.double(), by_hand(x, pipeline, rng(0, "augment", 3, 7)), atol=1e-5)
    assert torch.equal(x, kept), "the stored pictures must not change"
    assert found.dtype == torch.float32
    assert found.is_contiguous()


def test_the_same_stream_gives_the_same_batch_and_another_does_not() -> None:
    x, pipeline = pictures(), CIFAR.pipeline("paper")
    assert torch.equal(pipeline(x, rng(1, "a", 2, 3)), pipeline(x, rng(1, "a", 2, 3)))
    assert not torch.equal(pipeline(x, rng(1, "a", 2, 3)), pipeline(x, rng(1, "a", 2, 4)))


def test_without_a_stream_nothing_is_augmented() -> None:
    x = pictures()
    for augment in ("paper", "released", "flip", "none"):
        assert torch.equal(CIFAR.pipeline(augment)(x, None), CIFAR.pipeline("none")(x, rng(0, "a")))


def test_constants_of_the_paper() -> None:
    assert (CIFAR.mean, CIFAR.std) == ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262))
    assert PUBLISHED_100.augmentation.mean == (0.5071, 0.4867, 0.4408)
    assert PUBLISHED_100.augmentation.std == (0.2675, 0.2565, 0.2761)
    assert (CIFAR.padding, PUBLISHED_100.augmentation.padding, TINY.augmentation.padding) == (4, 4, 8)
    assert TINY.augmentation.pipeline("released").mean == (0.5, 0.5, 0.5)


def test_flip_and_crop_rates() -> None:
    """Half of the pictures are mirrored; `paper` crops all, `released` half of them."""
    ramp = torch.arange(32, dtype=torch.uint8).repeat(2000, 3, 32, 1) + 100
    found = Augmentation(flip=True).pipeline("flip")(ramp, rng(0, "a"))
    assert float((found[:, 0, 0, 0] > found[:, 0, 0, -1]).double().mean()) == pytest.approx(0.5, abs=0.04)
    still = {}
    for augment in ("paper", "released"):
        moved = Augmentation(padding=4).pipeline(augment)(ramp, rng(0, "a"))
        still[augment] = float((moved == ramp / 255).flatten(1).all(1).double().mean())
    assert still["paper"] == pytest.approx(1 / 81, abs=0.01)
    assert still["released"] == pytest.approx(0.5 + 0.5 / 81, abs=0.04)


def test_the_border_is_black_before_or_zero_after_normalising() -> None:
    white = torch.full((500, 3, 32, 32), 255, dtype=torch.uint8)
    paper = CIFAR.pipeline("paper")(white, rng(0, "a"))
    assert float(paper[:, 0].min()) == pytest.approx(-0.491 / 0.247, abs=1e-5)
    released = CIFAR.pipeline("released")(white, rng(0, "a"))
    assert float(released.min()) == 0.0


def test_float_rows_and_other_dtypes() -> None:
    rows = torch.randn(5, 7)
    assert Pipeline()(rows, rng(0, "a")) is rows
    x = pictures(4)
    assert Pipeline(dtype=torch.float64)(x, None).dtype == torch.float64
    wide = CIFAR.pipeline("none")
    assert torch.allclose(wide(x / 255, None), wide(x, None), atol=1e-5)


def test_an_unknown_augmentation_is_refused() -> None:
    with pytest.raises(UserError, match="did you mean 'released'"):
        CIFAR.pipeline("realesed")
