"""Flat vectors: a model's parameters as views of one, its derivatives against closed forms, and what is refused."""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from fedspeed import FedAvg, Federated, FlatModel, UserError, simulate
from fedspeed.client.trees import (
    all_finite,
    clip_,
    distance,
    squared_distance,
    tree_bytes,
    tree_leaves,
    tree_map,
)
from fedspeed.methods.base import Movement
from fedspeed.methods.terms import add_corrected_prox_, add_prox_, ascend_
from fedspeed.server.round import Mean

mse = nn.functional.mse_loss


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).to(dtype)


def gradient(flat: FlatModel, x: torch.Tensor, inputs, targets, loss=mse) -> torch.Tensor:
    out = torch.empty_like(flat.x)
    flat.gradient(x, inputs, targets, loss, out)
    return out


def differences(flat: FlatModel, x: torch.Tensor, inputs, targets, loss=mse, step: float = 1e-6) -> torch.Tensor:
    """The gradient by central differences, coordinate by coordinate."""

    @torch.no_grad()
    def value(point: torch.Tensor) -> float:
        flat.load(point)
        return float(loss(flat.model(inputs), targets))

    unit = torch.eye(len(x), dtype=x.dtype) * step
    return torch.tensor([(value(x + e) - value(x - e)) / (2 * step) for e in unit], dtype=x.dtype)


class Tied(nn.Module):
    """An autoencoder whose decoder is the transpose of its encoder, with a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(3, 3).double()
        self.decoder = nn.Linear(3, 3, bias=False).double()
        self.decoder.weight = self.encoder.weight
        self.scale = nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.scale * self.decoder(torch.tanh(self.encoder(inputs)))


class Mixed(nn.Module):
    """A narrow layer under a wide one; the forward pass casts between them."""

    def __init__(self, narrow: torch.dtype, wide: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3).to(narrow)
        self.second = nn.Linear(3, 2).to(wide)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs.to(self.first.weight.dtype)))
        return self.second(hidden.to(self.second.weight.dtype))


def test_parameters_are_views_of_the_vector():
    flat = FlatModel(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    x = torch.arange(float(flat.d))
    flat.load(x)
    start = x.data_ptr()
    for p, size in zip(flat.model.parameters(), (12, 4, 8, 2), strict=True):
        assert p.data_ptr() == start
        start += size * x.element_size()
    x[0] = -7.0  # no copy: the model sees what happens to the vector
    assert flat.model[0].weight[0, 0] == -7.0


def test_the_vector_starts_at_the_model_s_own_parameters():
    model = nn.Linear(3, 2)
    before = torch.cat([model.weight.detach().reshape(-1), model.bias.detach()]).clone()
    assert torch.equal(FlatModel(model).x, before)


def test_tied_parameters_come_once_and_frozen_ones_stay():
    model = Tied()
    flat = FlatModel(model)
    assert flat.names == ["unused", "encoder.weight", "encoder.bias"]
    assert flat.d == 2 + 9 + 3
    flat.load(torch.zeros(flat.d, dtype=torch.float64))
    assert model.decoder.weight is model.encoder.weight
    assert torch.equal(model.scale, torch.full((3,), 2.0, dtype=torch.float64))


def test_gradient_of_tied_frozen_and_unused_parameters_equals_finite_differences():
    flat = FlatModel(Tied())
    x, inputs = normal(flat.d, seed=1), normal(5, 3, seed=2)
    g = gradient(flat, x, inputs, inputs)
    assert torch.allclose(g, differences(flat, x, inputs, inputs), atol=1e-8)
    assert torch.equal(g[:2], torch.zeros(2, dtype=torch.float64))  # unused
    assert g[2:].abs().min() > 1e-4


@pytest.mark.parametrize(
    ("narrow", "wide", "tolerance"),
    [(torch.float32, torch.float64, 1e-6), (torch.float16, torch.float32, 2e-3), (torch.bfloat16, torch.float32, 2e-2)],
)
def test_mixed_dtypes_live_in_the_widest(narrow, wide, tolerance):
    flat = FlatModel(Mixed(narrow, wide))
    assert flat.x.dtype == flat.dtype == wide
    assert [p.dtype for p in flat.model.parameters()] == [narrow, narrow, wide, wide]
    x, inputs, targets = (normal(*shape, seed=3, dtype=wide) for shape in ((flat.d,), (6, 4), (6, 2)))
    g = gradient(flat, x, inputs, targets)
    assert [p.dtype for p in flat.model.parameters()] == [narrow, narrow, wide, wide]
    exact = FlatModel(Mixed(torch.float64, torch.float64))
    truth = gradient(exact, x.double(), inputs.double(), targets.double())
    assert torch.allclose(g.double(), truth, atol=tolerance)
    assert truth.abs().max() > 10 * tolerance


def test_two_narrow_dtypes_meet_in_the_type_that_holds_both():
    flat = FlatModel(Mixed(torch.bfloat16, torch.float16))
    assert flat.dtype == torch.float32
    g = gradient(flat, flat.x, torch.ones(2, 4), torch.ones(2, 2, dtype=torch.float16))
    assert g.dtype == torch.float32
    assert all_finite((g,))


def test_gradient_of_least_squares_is_the_closed_form():
    flat = FlatModel(nn.Linear(4, 1, bias=False).double())
    A, b, x = normal(7, 4, seed=1), normal(7, 1, seed=2), normal(4, seed=3)
    assert torch.allclose(gradient(flat, x, A, b), 2 / 7 * A.T @ (A @ x - b[:, 0]), atol=1e-14)


def test_gradient_returns_the_loss_and_keeps_no_graph():
    flat = FlatModel(nn.Linear(4, 1, bias=False).double())
    A, b, x, out = normal(7, 4, seed=1), normal(7, 1, seed=2), normal(4, seed=3), torch.empty(4, dtype=torch.float64)
    value = flat.gradient(x, A, b, mse, out)
    assert not value.requires_grad
    assert not out.requires_grad
    assert value.item() == pytest.approx(float((A @ x - b[:, 0]).square().mean()), abs=1e-14)


def test_gradient_inside_no_grad():
    flat = FlatModel(nn.Linear(2, 1))
    with torch.no_grad():
        inside = gradient(flat, flat.x, torch.ones(3, 2), torch.zeros(3, 1))
    assert torch.equal(inside, gradient(flat, flat.x, torch.ones(3, 2), torch.zeros(3, 1)))


def test_hessian_of_least_squares_is_the_closed_form():
    flat = FlatModel(nn.Linear(4, 1, bias=False).double())
    A, b, x = normal(7, 4, seed=1), normal(7, 1, seed=2), normal(4, seed=3)
    for v in torch.eye(4, dtype=torch.float64):
        assert torch.allclose(flat.hvp(x, v, A, b, mse), 2 / 7 * A.T @ (A @ v), atol=1e-13)


def test_hessian_of_logistic_regression_is_the_closed_form():
    """mean_i sigma(1 - sigma) a_i a_i^T at x, where sigma depends on x: the second derivative is really taken there."""
    flat = FlatModel(nn.Linear(4, 1, bias=False).double())
    A, x, v = normal(9, 4, seed=1), normal(4, seed=3), normal(4, seed=4)
    y = (normal(9, 1, seed=2) > 0).double()
    p = torch.sigmoid(A @ x)
    truth = A.T @ (p * (1 - p) * (A @ v)) / 9
    assert torch.allclose(flat.hvp(x, v, A, y, nn.functional.binary_cross_entropy_with_logits), truth, atol=1e-13)


def test_hessian_with_an_unused_parameter_is_the_difference_of_gradients():
    flat = FlatModel(Tied())
    x, v, inputs = normal(flat.d, seed=1), normal(flat.d, seed=5), normal(5, 3, seed=2)
    step = 1e-6
    ahead, behind = (gradient(flat, x + s * v, inputs, inputs) for s in (step, -step))
    assert torch.allclose(flat.hvp(x, v, inputs, inputs, mse), (ahead - behind) / (2 * step), atol=1e-7)


@pytest.mark.parametrize(
    ("no_decay", "expected"),
    [(("bias",), [1] * 6 + [0] * 2), ("bias", [1] * 6 + [0] * 2), (("weight", "bias"), [0] * 8), ((), None)],
)
def test_no_decay_group(no_decay, expected):
    decay = FlatModel(nn.Linear(3, 2), no_decay).decay
    assert decay is None if expected is None else decay.tolist() == expected


def test_no_decay_names_one_layer_of_several():
    flat = FlatModel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), ("1.weight",))
    assert flat.decay.tolist() == [1] * 6 + [0] * 2 + [1]


def test_no_decay_that_names_nothing_is_refused():
    with pytest.raises(UserError, match="'norm' ends no parameter's name; the names are weight, bias"):
        FlatModel(nn.Linear(3, 2), ("norm",))


class Shared(nn.Module):
    """Two parameters, one memory: not what torch calls tied."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.b.weight.data = self.a.weight.data


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(2, dtype=torch.complex64))


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.nothing = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(0, 3))


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), r"1 is a BatchNorm1d .*nn\.GroupNorm\(2, 4\)"),
        (lambda: nn.BatchNorm2d(3), r"the model is a BatchNorm2d .*nn\.GroupNorm\(1, 3\)"),
        (lambda: nn.InstanceNorm2d(4, track_running_stats=True), "running statistics.*track_running_stats=False"),
        (lambda: nn.Sequential(nn.LazyLinear(2)), "'0.weight' is lazy.*run one batch"),
        (Complex, "'phase' is torch.complex64"),
        (lambda: nn.Sequential(nn.Embedding(5, 2, sparse=True)), "0 gives sparse gradients.*sparse=False"),
        (frozen, "expected trainable parameters, found none"),
        (nn.ReLU, "expected trainable parameters, found none"),
        (Empty, r"'nothing' is empty \(shape \(0, 3\)\)"),
        (Shared, "'a.weight' and 'b.weight' share memory"),
    ],
    ids=lambda a: a if isinstance(a, str) else getattr(a, "__name__", ""),
)
def test_what_a_vector_cannot_hold_is_refused_by_name(build, message):
    with pytest.raises(UserError, match=message):
        FlatModel(build())


def test_the_fix_a_refusal_names_works():
    """nn.GroupNorm(2, 4) and nn.GroupNorm(1, 3) can be built: groups divide the channels."""
    for width in (3, 4):
        with pytest.raises(UserError) as refusal:
            FlatModel(nn.BatchNorm1d(width))
        groups, channels = map(int, re.search(r"nn\.GroupNorm\((\d+), (\d+)\)", str(refusal.value)).groups())
        FlatModel(nn.GroupNorm(groups, channels))


def test_batch_norm_without_running_statistics_is_accepted():
    assert FlatModel(nn.BatchNorm1d(4, track_running_stats=False)).d == 8


class Buffered(nn.Module):
    """A layer with a constant buffer, and, if asked, one that counts its forward passes in training."""

    def __init__(self, counts: str = "") -> None:
        super().__init__()
        self.counts = counts
        self.linear = nn.Linear(3, 2)
        self.register_buffer("shift", torch.tensor([10.0, 0.0]))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.counts == "in place" and self.training:
            self.seen += 1
        if self.counts == "anew" and self.training:
            self.seen = self.seen + 1
        return self.linear(inputs) + self.shift


def small() -> Federated:
    x = np.random.default_rng(0).normal(size=(12, 3)).astype("f4")
    y = (x[:, 0] > 0).astype(int)
    return Federated.from_arrays(x, y, [range(0, 6), range(6, 12)], test=(x, y))


@pytest.mark.parametrize("counts", ["in place", "anew"])
def test_a_buffer_that_a_forward_pass_changes_is_refused(counts):
    with pytest.raises(UserError, match="buffer 'seen' changes in a forward pass"):
        simulate(FedAvg(), Buffered(counts), small(), rounds=1, active=1).step()


def test_constant_buffers_are_carried():
    run = simulate(FedAvg(), Buffered(), small(), rounds=2, active=2)
    records = list(run)
    assert run.model.shift.tolist() == [10.0, 0.0]
    assert records[0].train_loss > 1  # class 0 is far ahead because of the buffer


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


class Nest(NamedTuple):
    pair: Pair
    c: torch.Tensor


def nest(scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Nest:
    ones = torch.ones(3, dtype=dtype) * scale
    return Nest(Pair(ones, 2 * ones), 3 * ones[:1])


def test_tree_functions():
    tree = nest()
    assert [a.tolist() for a in tree_leaves(tree)] == [[1, 1, 1], [2, 2, 2], [3]]
    doubled = tree_map(lambda a: 2 * a, tree)
    assert isinstance(doubled, Nest)
    assert isinstance(doubled.pair, Pair)
    assert doubled.pair.b.tolist() == [4, 4, 4]
    assert tree_bytes(tree) == 4 * 7
    assert tree_bytes(nest(dtype=torch.float64)) == 8 * 7
    assert all_finite(tree)
    assert not all_finite(tree._replace(c=torch.tensor([torch.nan])))
    assert not all_finite(tree._replace(pair=Pair(torch.ones(1), torch.tensor([torch.inf]))))


def test_mean_is_weighted_and_leaves_what_it_counts():
    mean, trees = Mean(torch.float64), [nest(4.0), nest(1.0)]
    for tree, weight in zip(trees, (2.0, 1.0), strict=True):
        mean.add(tree, weight)
    result = mean.result()
    assert result.pair.a.dtype == torch.float64
    assert result.pair.a.tolist() == [3.0] * 3  # (2 * 4 + 1 * 1) / 3
    assert result.c.tolist() == [9.0]
    assert trees[0].pair.a.tolist() == [4.0] * 3


def test_mean_of_a_matrix_that_is_transposed_in_memory():
    mean, matrix = Mean(torch.float64), torch.arange(6.0).view(2, 3).t()
    mean.add(Movement(matrix), 1.0)
    mean.add(Movement(3 * matrix), 1.0)
    assert torch.equal(mean.result().D, 2 * matrix.double())


def test_mean_sums_in_its_own_dtype():
    """1 + 1e-8 is lost in float32 and kept in float64."""
    mean = Mean(torch.float64)
    mean.add(Pair(torch.ones(1), torch.ones(1)), 1.0)
    mean.add(Pair(torch.full((1,), 1e-8), torch.ones(1)), 1.0)
    assert mean.result().a.item() == pytest.approx((1 + float(np.float32(1e-8))) / 2, abs=1e-16)


def test_mean_of_trees_of_different_shape_is_an_error():
    mean = Mean(torch.float64)
    mean.add(nest(), 1.0)
    with pytest.raises(ValueError):
        mean.add(Pair(torch.ones(3), torch.ones(3)), 1.0)


def test_long_vectors_are_worked_on_in_pieces_with_the_same_bits():
    """3,000,001 numbers: several pieces and a rest, against the whole expression at once."""
    torch.manual_seed(0)
    g, x, centre, h = torch.randn(4, 3_000_001)
    assert torch.equal(add_prox_(g.clone(), x, centre, 0.3), g.add(x, alpha=0.3).sub(centre, alpha=0.3))
    whole = g.add(x, alpha=0.3).sub(centre, alpha=0.3).add(h, alpha=0.3)
    assert torch.equal(add_corrected_prox_(g.clone(), x, centre, h, 0.3), whole)
    assert torch.equal(ascend_(x, g.clone(), 0.1), g.mul(0.1 / (g.norm(dim=-1, keepdim=True) + 1e-7)).add(x))
    assert torch.equal(ascend_(x, g.clone(), 0.1, normalise=False), g.mul(0.1).add(x))
    one = torch.tensor([0.5])
    assert torch.equal(add_prox_(g.clone(), x, one, 0.3), g.add(x, alpha=0.3).sub(one, alpha=0.3))
    exact = np.linalg.norm(x.double().numpy() - g.double().numpy())
    assert distance(x, g) == pytest.approx(exact, rel=1e-6)
    assert squared_distance(x.double(), g.double()) == pytest.approx(exact**2, rel=1e-13)
    mean = Mean(torch.float64)
    for v, weight in ((g, 2.0), (x, 3.5), (h, 0.7)):
        mean.add(Movement(v), weight)
    total = g.double().mul(2.0).add(x.double(), alpha=3.5).add(h.double(), alpha=0.7)
    assert torch.equal(mean.result().D, total.div(2.0 + 3.5 + 0.7))


def test_clip_scales_long_vectors_only():
    long = torch.tensor([3.0, 4.0])
    assert clip_(long, 1.0) is long  # in place
    assert long.tolist() == pytest.approx([0.6, 0.8])
    assert clip_(torch.tensor([0.3, 0.4]), 1.0).tolist() == pytest.approx([0.3, 0.4])
    assert clip_(torch.zeros(2), 1.0).tolist() == [0.0, 0.0]


def test_clip_takes_each_row_of_a_block_on_its_own():
    block = clip_(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0)
    assert torch.allclose(block, torch.tensor([[0.6, 0.8], [0.3, 0.4]]))
