"""The trimmed network is the untrimmed one without what has no gradient: layers, networks, runs of every method."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedspeed import simulate
from fedspeed.client.flat_model import FlatModel
from fedspeed.config.plan import Plan
from fedspeed.data.federated import Federated
from fedspeed.errors import UserError
from fedspeed.methods import METHODS, FedAdam, FedInit, FedSpeed
from fedspeed.models.fast_conv import Conv
from fedspeed.models.resnet import Block, resnet18_gn
from fedspeed.models.trim import TrimmedConv, live, trimmed, untrim

CIFAR = (3, 32, 32)
SIZES = [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (1, 4), (2, 1), (6, 2)]
CASES = [(size, taps, stride) for size in SIZES for taps in (1, 3, 5, 7) for stride in (1, 2)]


def pair(size, taps, stride, dtype=torch.float64):
    """A stock convolution and its live taps."""
    torch.manual_seed(0)
    full = nn.Conv2d(3, 4, taps, stride, taps // 2, bias=False).to(dtype)
    return full, TrimmedConv(full, size)


def test_the_cases_hold_every_kind_of_layer():
    layers = [pair(*case) for case in CASES]
    kinds = {(any(small.dead), small._rule(torch.float64) is not None) for _, small in layers}
    assert kinds == {(dead, quick) for dead in (False, True) for quick in (False, True)}
    assert all(small.pays == (any(small.dead) or small._rule(torch.float64) is not None) for _, small in layers)


@pytest.mark.parametrize(("size", "taps", "stride"), CASES)
def test_live_taps_are_those_with_a_gradient(size, taps, stride):
    full, small = pair(size, taps, stride)
    x = torch.randn(9, 3, *size, dtype=torch.float64)
    (g,) = torch.autograd.grad((full(x) * torch.randn_like(full(x))).sum(), full.weight)
    rows, columns = (live(side, taps, stride, taps // 2) for side in size)
    stored = torch.zeros(taps, taps, dtype=torch.bool)
    stored[rows.start : rows.stop, columns.start : columns.stop] = True
    assert torch.equal((g != 0).all(0).all(0), stored)
    assert torch.equal((g != 0).any(0).any(0), stored)
    assert torch.equal(small.weight.permute(2, 1, 0), full.weight[:, :, stored])
    assert torch.equal(small.untrimmed(small.weight), full.weight * stored)


@pytest.mark.parametrize(("size", "taps", "stride"), CASES)
def test_values_gradients_and_double_backward(size, taps, stride):
    full, small = pair(size, taps, stride)
    x = torch.randn(5, 3, *size, dtype=torch.float64, requires_grad=True)
    v = torch.randn_like(full(x))
    assert small(x).shape == v.shape

    def second_order(conv):
        y = conv(x)
        gx, gw = torch.autograd.grad((y.tanh() * v).sum(), (x, conv.weight), create_graph=True)
        hx, hw = torch.autograd.grad(gx.sin().sum() + (gw.square() * 0.3).sum(), (x, conv.weight))
        return y, gx, hx, *(small.untrimmed(a) if conv is small else a for a in (gw, hw))

    for a, b in zip(second_order(small), second_order(full), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("size", "taps", "stride"), [((1, 1), 3, 1), ((2, 2), 3, 2), ((1, 4), 3, 1), ((3, 3), 7, 2)])
def test_under_torch_func(size, taps, stride):
    """vmap over clients with their own weights, of a gradient."""
    _, small = pair(size, taps, stride)
    weights = torch.randn(6, *small.weight.shape, dtype=torch.float64)
    x = torch.randn(6, 5, 3, *size, dtype=torch.float64)

    def loss(w, inputs):
        return torch.func.functional_call(small, {"weight": w}, (inputs,)).square().mean()

    grads = torch.func.vmap(torch.func.grad(loss))(weights, x)
    for i in range(6):
        w = small.untrimmed(weights[i]).requires_grad_()
        (truth,) = torch.autograd.grad(F.conv2d(x[i], w, None, stride, taps // 2).square().mean(), w)
        torch.testing.assert_close(small.untrimmed(grads[i]), truth, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("size", "stride"), [((1, 1), 1), ((2, 2), 2), ((1, 4), 1)])
def test_low_precision_unbatched_and_empty(size, stride):
    full, small = pair(size, 3, stride, torch.float32)
    x = torch.randn(5, 3, *size)
    with torch.autocast("cpu", torch.bfloat16):
        a, b = small(x), full(x)
    assert a.dtype == b.dtype == torch.bfloat16
    torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(small(x[0]), full(x[0]))
    assert small(x[:0]).shape == full(x[:0]).shape
    a, b = small.bfloat16()(x.bfloat16()), full.bfloat16()(x.bfloat16())
    assert a.dtype == torch.bfloat16
    torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    assert small.to("meta")(torch.zeros(5, 3, *size, device="meta", dtype=torch.bfloat16)).shape == b.shape


def test_pictures_of_another_size_are_refused():
    """They would silently be another function: taps that are not there meet pixels."""
    net = resnet18_gn(CIFAR, 10, trim=True)
    with pytest.raises(UserError, match="expected maps of 8x8, found 16x16; it is trimmed for one size of pictures"):
        net(torch.zeros(1, 3, 64, 64))


# The whole network


@pytest.mark.parametrize(
    ("shape", "parameters"), [(CIFAR, 4_234_826), ((3, 64, 64), 11_181_642), ((3, 16, 16), 2_104_906)]
)
def test_sizes(shape, parameters):
    """By arithmetic for 32x32: 5/9 of 256 -> 512 and 8/9 of three times 512 -> 512 are dead."""
    assert 4_234_826 == 11_181_642 - 5 * 256 * 512 - 3 * 8 * 512 * 512
    with torch.device("meta"):
        assert sum(p.numel() for p in resnet18_gn(shape, 10, trim=True).parameters()) == parameters


@pytest.fixture(scope="module")
def nets():
    """The untrimmed network and the trimmed one from one seed, each followed by the generator's state."""
    found = []
    for trim in (False, True):
        torch.manual_seed(3)
        found += [resnet18_gn(CIFAR, 10, trim=trim), torch.get_rng_state()]
    return found


def test_it_starts_from_the_same_live_values(nets):
    full, after, small, after_trimmed = nets
    assert torch.equal(after, after_trimmed)
    mask, values, state = live_mask(small), untrim(small), full.state_dict()
    assert list(values) == list(state)
    assert sum(int(part.sum()) for part in mask.values()) == 4_234_826
    for name, value in state.items():
        assert torch.equal(values[name], value * mask[name])


def test_same_outputs_and_gradient_and_dead_taps_have_none(nets):
    full, small = nets[0].double(), nets[2].double()
    x, y = torch.randn(2, *CIFAR, dtype=torch.float64), torch.tensor([3, 7])
    losses = [F.cross_entropy(net(x), y) for net in (full, small)]
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
    gradients = [
        dict(zip(dict(net.named_parameters()), torch.autograd.grad(loss, list(net.parameters())), strict=True))
        for net, loss in zip((full, small), losses, strict=True)
    ]
    padded, mask = untrim(small, gradients[1]), live_mask(small)
    for name, g in gradients[0].items():
        torch.testing.assert_close(padded[name], g, rtol=1e-8, atol=1e-11)
        assert not g[~mask[name]].any()
        if g.ndim == 4:  # every tap that is kept has a gradient in some filter
            assert torch.equal((g != 0).flatten(0, 1).any(0), mask[name].flatten(0, 1).any(0))


def test_untrimmed_it_loads_into_the_untrimmed_network_with_the_same_outputs(nets):
    small, x = nets[2].double(), torch.randn(3, *CIFAR, dtype=torch.float64)
    full = resnet18_gn(CIFAR, 10).double()
    full.load_state_dict(untrim(small))
    torch.testing.assert_close(full(x), small(x), rtol=1e-11, atol=1e-12)
    stored = {name: value + 1 for name, value in small.state_dict().items()}
    again = untrim(small, stored)
    assert torch.equal(again["12.conv1.weight"][:, :, 1:, 1:].flatten(2).permute(2, 1, 0), stored["12.conv1.weight"])
    assert not again["12.conv1.weight"][:, :, 0].any()


def live_mask(small):
    """Where the untrimmed network has a value that the trimmed one stores."""
    ones = {name: torch.ones_like(value, dtype=torch.bool) for name, value in small.state_dict().items()}
    return untrim(small, ones)


@pytest.mark.parametrize("trim", [False, True])
def test_zero_residual_starts_every_block_as_its_shortcut(trim):
    torch.manual_seed(0)
    net = resnet18_gn(CIFAR, 10, init="zero-residual", trim=trim)
    x = torch.randn(2, *CIFAR)
    blocks = 0
    for layer in net:
        if isinstance(layer, Block):
            blocks += 1
            assert torch.equal(layer(x), torch.relu(layer.shortcut(x)))
            assert (layer.norm1.weight == 1).all()
        x = layer(x)
    assert blocks == 8
    torch.manual_seed(0)
    usual = resnet18_gn(CIFAR, 10, trim=trim).state_dict()
    for name, value in net.state_dict().items():
        assert torch.equal(value, torch.zeros_like(value) if "norm2.weight" in name else usual[name])


# Runs


SMALL = (2, 2, 2)
LIKE_ANOTHER = {"afedpd", "afedpdsam", "fednsam", "fedtoga"}  # what these add to a gradient, one of the others adds
EVERY = [
    pytest.param(method, id=method.name, marks=pytest.mark.slow if method.name in LIKE_ANOTHER else ())
    for method in (
        *(cls() for cls in METHODS.values()),
        FedInit(FedSpeed()),
        FedSpeed(server="active", normalise=False),
    )
]


def small_net(trim, keep_norm=False):
    """Two residual blocks on 2x2 pictures: stride 2 to 1x1, then 1x1."""
    torch.manual_seed(5)
    net = nn.Sequential(
        Conv(2, 4), Block(4, 8, 2, 2), Block(8, 8, 1, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
    ).double()
    return trimmed(net, SMALL, keep_norm) if trim else net


def pictures(shape, clients=4, each=6):
    r = np.random.default_rng(0)
    n = clients * each
    x, y = r.normal(size=(n, *shape)), r.integers(0, 3, n)
    rows = np.split(np.arange(n), clients)
    return Federated.from_arrays(x, y, rows, test=(x[:5], y[:5]), classes=3)


def both(method, net, data, plan):
    """Live values at the end of the trimmed and of the untrimmed run, and the length of the way."""
    ends = []
    for trim in (True, False):
        model = net(trim)
        with_start = copy.deepcopy(model)
        run = simulate(method, model, data, plan)
        list(run)
        ends.append((run.model, FlatModel(with_start).x, run.x))
    (small, start, end), (full, _, _) = ends
    mask = live_mask(small)
    a, b = (torch.cat([state[name][mask[name]] for name in mask]) for state in (untrim(small), full.state_dict()))
    return a, b, float((end - start).norm())


def apart(method, weight_decay, net=small_net, **settings):
    """How far trimmed and untrimmed runs of the small net end from each other, relative to the way."""
    plan = Plan(
        rounds=3,
        active=4 if method.name in ("fedpd", "fedadmm") else 3,
        local_epochs=1,
        batch_size=3,
        lr=0.02,
        weight_decay=weight_decay,
        backend="serial",
        **settings,
    )
    a, b, way = both(method, net, pictures(SMALL), plan)
    assert way > 1e-3
    return float((a - b).norm()) / way


NEEDS_NO_DECAY = {"fedlesam", "fedgloss", "fedwmsam", "fedtoga", "fedlesamd", "fedlesams"}


@pytest.mark.parametrize("clip", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
@pytest.mark.parametrize("method", EVERY)
def test_the_same_run(method, clip):
    """With weight decay, and clipping of gradients; but for methods that measure how far a model moved."""
    found = apart(method, 0.02, clip=clip)
    assert found > 1e-8 if method.name in NEEDS_NO_DECAY else found < 1e-10


@pytest.mark.parametrize(
    "name", ["fedlesam", *(pytest.param(n, marks=pytest.mark.slow) for n in sorted(NEEDS_NO_DECAY - {"fedlesam"}))]
)
def test_a_method_that_measures_movement_is_the_same_without_weight_decay(name):
    assert apart(METHODS[name](), 0.0) < 1e-10


READS_X = {"fedprox", "feddyn", "fedadmm", "fedpd", "fedspeed", "fedsmoo", "fedlesamd", "fedinit"}
READS_X |= {"afedpd", "afedpdsam", "fedgloss", "fedacg", "fedtoga"}
READS_PAST_MOVEMENT = {"scaffold", "fedgamma", "fedcm", "mofedsam", "fedmoswa", "fedgmt"} | NEEDS_NO_DECAY


@pytest.mark.parametrize("weight_decay", [pytest.param(0.0, marks=pytest.mark.slow), 0.02])
@pytest.mark.parametrize("method", EVERY)
def test_released_clipping_counts_what_dead_taps_hold(method, weight_decay):
    """It is no clipping of gradients, so the two runs differ for methods that add x or past movements to one."""
    other = method.name in READS_X or (method.name in READS_PAST_MOVEMENT and weight_decay > 0)
    found = apart(method, weight_decay, clip=0.1, clip_mode="released")
    least = 1e-10 if method.name == "fedgmt" else 1e-8  # its past movement counts a tenth, and there is no prox term
    assert found > least if other else found < 1e-10


@pytest.mark.parametrize("method", [m for m in EVERY if m.id in READS_X | READS_PAST_MOVEMENT])
def test_one_parameter_stands_for_all_dead_taps_in_norms(method):
    """With it the released clipping, and the methods that measure how far a model moved, are those of the full net."""
    net = partial(small_net, keep_norm=True)
    assert apart(method, 0.02, net, clip=0.1, clip_mode="released") < 1e-10


def test_the_extra_parameter_is_the_norm_of_the_dead_taps():
    torch.manual_seed(3)
    full = resnet18_gn(CIFAR, 10)
    torch.manual_seed(3)
    small = resnet18_gn(CIFAR, 10, trim=True, keep_norm=True)
    norms = [float(sum(p.detach().double().square().sum() for p in net.parameters())) ** 0.5 for net in (full, small)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-7)
    assert float(small.dead_norm.detach()) > 50  # of 6,946,816 values: sqrt(2 x channels of the dead share)
    assert untrim(small).keys() == full.state_dict().keys()
    with pytest.raises(UserError, match="keep_norm expects trim=true, found trim=false"):
        resnet18_gn(CIFAR, 10, keep_norm=True)
    nothing_dead = trimmed(nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1, bias=False)), (3, 9, 12), keep_norm=True)
    assert float(nothing_dead.dead_norm.detach()) == 0


@pytest.mark.parametrize("name", ["fedspeed", "scaffold", "fedlesam"])
def test_released_clipping_without_weight_decay(name):
    """Then past movements hold nothing of dead taps, x does; the slow tests above have every method."""
    found = apart(METHODS[name](), 0.0, clip=0.1, clip_mode="released")
    assert found > 1e-8 if name in READS_X else found < 1e-10


def test_the_lists_name_methods():
    assert {*METHODS, "fedinit"} >= READS_X | READS_PAST_MOVEMENT


@pytest.mark.parametrize("settings", [{"engine": "block"}, {"backend": "process", "workers": 2}], ids=str)
def test_block_engine_and_worker_processes(settings, quick_workers):
    runs = [
        simulate(FedSpeed(), small_net(True), pictures(SMALL), rounds=2, active=4, batch_size=3, lr=0.02, **how)
        for how in (settings, {"engine": "loop", "backend": "serial"})
    ]
    for run in runs:
        list(run)
    a, b = (run.x for run in runs)
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    assert "engine" in settings or torch.equal(a, b)


@pytest.mark.parametrize(
    "method", [FedSpeed(), pytest.param(FedAdam(eta_g=0.001), marks=pytest.mark.slow)], ids=lambda m: m.name
)
def test_the_same_run_of_the_real_network(method):
    plan = Plan(rounds=2, active=1, local_steps=1, batch_size=2, lr=0.02, weight_decay=0.01, backend="serial")

    def net(trim):
        torch.manual_seed(1)
        return resnet18_gn(CIFAR, 3, trim=trim).double()

    a, b, way = both(method, net, pictures(CIFAR, clients=2, each=4), plan)
    assert way > 1e-2
    assert float((a - b).norm()) < 1e-9 * way
