"""Residual blocks as one function each, with compiled kernels, are the plain layers to rounding."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedspeed import FedAdam, FedAvg, FedSpeed, Scaffold, UserError, simulate
from fedspeed.client.flat_model import FlatModel
from fedspeed.data.federated import Federated
from fedspeed.models import compiled_kernels, fast_conv, resnet18_gn
from fedspeed.models.fast_conv import Conv, Rule, convolve
from fedspeed.models.resnet import Block, choose_layers, resolve_layers
from fedspeed.models.trim import TrimmedConv
from fedspeed.utils import devices

BUILT = compiled_kernels.library() is not None
built = pytest.mark.skipif(not BUILT, reason="the package was installed without a C compiler")
BLOCKS = [  # channels, out, stride, side of the maps
    (64, 64, 1, 8),
    (64, 128, 2, 8),
    (16, 16, 1, 4),
    (16, 32, 2, 4),
    (32, 32, 1, 2),
    (32, 48, 2, 2),
    (48, 48, 1, 1),
    (10, 10, 1, 4),
]


def stock_block(block, x):
    """The block with PyTorch's own layers."""

    def normed(x, conv, norm):
        y = F.conv2d(x, conv.weight, None, conv.stride, conv.padding)
        return F.group_norm(y, norm.num_groups, norm.weight, norm.bias, norm.eps)

    z = torch.relu(normed(x, block.conv1, block.norm1))
    shortcut = x if isinstance(block.shortcut, nn.Identity) else normed(x, *block.shortcut)
    return torch.relu(normed(z, block.conv2, block.norm2) + shortcut)


def made(channels, out, stride, layers="plain", dtype=torch.float64):
    torch.manual_seed(1)
    block = Block(channels, out, stride, 2).to(dtype)
    for p in block.parameters():  # gammas and betas other than 1 and 0
        nn.init.normal_(p, 0.3 * (p.ndim == 1), 0.5)
    choose_layers(block, layers)
    return block


def trimmed(block, side):
    inner = (side - 1) // block.conv1.stride[0] + 1
    block.conv1, block.conv2 = TrimmedConv(block.conv1, (side, side)), TrimmedConv(block.conv2, (inner, inner))
    return block


@built
@pytest.mark.parametrize(("channels", "out", "stride", "side"), BLOCKS)
@pytest.mark.parametrize("n", [1, 7])
def test_a_block_is_that_of_stock_layers(channels, out, stride, side, n):
    """Values and every gradient to 1e-12 in float64, for maps in either layout."""
    block = made(channels, out, stride, "compiled")
    x = torch.randn(n, channels, side, side, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    for a in (x.requires_grad_(), x.detach().contiguous().requires_grad_()):
        y, expected = block(a), stock_block(block, a)
        assert "BlockFunction" in type(y.grad_fn).__name__
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
        v = torch.randn_like(y)
        inputs = [a, *block.parameters()]
        pairs = zip(torch.autograd.grad(y, inputs, v), torch.autograd.grad(expected, inputs, v), strict=True)
        assert all((g - e).norm() <= 1e-12 * e.norm() for g, e in pairs)


@built
@pytest.mark.parametrize(("channels", "out", "stride", "side"), BLOCKS[:7])
def test_a_trimmed_block(channels, out, stride, side):
    full, small = made(channels, out, stride), trimmed(made(channels, out, stride, "compiled"), side)
    x = torch.randn(5, channels, side, side, dtype=torch.float64, requires_grad=True)
    y, expected = small(x), stock_block(full, x)
    assert "BlockFunction" in type(y.grad_fn).__name__
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    v = torch.randn_like(y)
    gx, *_ = torch.autograd.grad(y, [x, *small.parameters()], v)
    found = torch.autograd.grad(small(x), small.conv1.weight, v)[0]
    expected_gx, expected_gw = torch.autograd.grad(expected, [x, full.conv1.weight], v)
    assert (gx - expected_gx).norm() <= 1e-12 * expected_gx.norm()
    assert (small.conv1.untrimmed(found) - expected_gw).norm() <= 1e-12 * expected_gw.norm()


@built
def test_a_gradient_of_a_gradient():
    """A function of the gradients is differentiated by inputs and parameters, as with stock layers."""
    block = made(16, 32, 2, "compiled")
    x = torch.randn(3, 16, 4, 4, dtype=torch.float64, requires_grad=True)
    v = torch.randn_like(block(x))

    def second_order(y):
        inputs = [x, *block.parameters()]
        grads = torch.autograd.grad((y.tanh() * v).sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(g.sin().sum() for g in grads), inputs)

    for found, expected in zip(second_order(block(x)), second_order(stock_block(block, x)), strict=True):
        assert (found - expected).norm() <= 1e-11 * expected.norm()


@built
@pytest.mark.parametrize("trim", [True, False])
def test_the_network(trim):
    """Outputs and gradients of ResNet-18-GN, in training and without a graph."""
    torch.manual_seed(0)
    net = resnet18_gn((3, 32, 32), 10, trim=trim).double()
    x, y = torch.randn(3, 3, 32, 32, dtype=torch.float64), torch.tensor([1, 5, 9])
    results = {}
    for way in ("plain", "compiled"):
        choose_layers(net, way)
        grads = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
        with torch.no_grad():
            results[way] = (net(x), *grads)
    for found, expected in zip(results["compiled"], results["plain"], strict=True):
        assert (found - expected).norm() <= 1e-12 * expected.norm()


@built
def test_float32_is_as_good_as_rounding_allows():
    """Its error is at most three times that of the plain fast layers."""
    torch.manual_seed(0)
    net = resnet18_gn((3, 32, 32), 10, trim=True)
    x, y = torch.randn(8, 3, 32, 32), torch.arange(8)

    def gradient(net, x):
        return torch.cat([g.flatten() for g in torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))])

    plain = gradient(net, x).double()
    choose_layers(net, "compiled")
    found = gradient(net, x).double()
    choose_layers(net, "plain")
    exact = gradient(net.double(), x.double())
    assert 0 < (found - exact).norm() < 3 * (plain - exact).norm()


@built
@pytest.mark.parametrize("shape", [(3, 64, 64), (3, 24, 24), (3, 40, 32)])
def test_maps_without_a_rule_take_the_plain_layers(shape):
    torch.manual_seed(0)
    net = resnet18_gn(shape, 4).double()
    x = torch.randn(2, *shape, dtype=torch.float64)
    expected = net(x)
    choose_layers(net, "compiled")
    torch.testing.assert_close(net(x), expected, rtol=1e-11, atol=1e-11)


@built
def test_what_is_added_to_a_block_is_not_left_out():
    """A hook on a layer of a block is called, and a layer of another class computes."""
    block = made(16, 16, 1, "compiled")
    x = torch.randn(2, 16, 4, 4, dtype=torch.float64, requires_grad=True)
    before = block(x)
    handle = block.conv2.register_forward_hook(lambda module, inputs, output: 2 * output + 1)
    assert not torch.allclose(block(x), before)
    handle.remove()
    torch.testing.assert_close(block(x), before, rtol=0, atol=0)
    block.norm2 = nn.Identity()
    assert not torch.allclose(block(x), before)
    assert "BlockFunction" not in type(block(x).grad_fn).__name__


@built
def test_frozen_parameters_and_transforms():
    block = made(16, 32, 2, "compiled")
    block.conv1.weight.requires_grad_(False)
    block.norm2.bias.requires_grad_(False)
    x = torch.randn(3, 16, 4, 4, dtype=torch.float64)
    trained = [p for p in block.parameters() if p.requires_grad]
    found, expected = (
        torch.autograd.grad(f(x).square().sum(), trained) for f in (block, lambda x: stock_block(block, x))
    )
    assert all((a - b).norm() <= 1e-12 * b.norm() for a, b in zip(found, expected, strict=True))
    found, expected = (
        torch.func.grad(lambda a, f=f: f(a).square().sum())(x) for f in (block, lambda a: stock_block(block, a))
    )
    assert (found - expected).norm() <= 1e-12 * expected.norm()


class Twice(nn.Module):
    """A model that uses one block twice."""

    def __init__(self):
        super().__init__()
        self.block = made(16, 16, 1, "compiled")
        self.last = nn.Linear(16, 3).double()

    def forward(self, x):
        return self.last(self.block(self.block(x)).mean((2, 3)))


@built
@pytest.mark.parametrize("model", [Twice, lambda: resnet18_gn((3, 32, 32), 3, trim=True).double()])
def test_gradients_are_written_into_the_flat_vector(model):
    """Also by a block that is used twice, whose gradients add up."""
    torch.manual_seed(0)
    net = model()
    choose_layers(net, "compiled")
    shape = (4, 16, 4, 4) if isinstance(net, Twice) else (4, 3, 32, 32)
    x, y = torch.randn(*shape, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    choose_layers(net, "plain")
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))])
    choose_layers(net, "compiled")
    flat = FlatModel(net)
    out = torch.full((flat.d,), 9.0, dtype=torch.float64)
    for _ in range(2):
        flat.gradient(flat.x.clone(), x, y, F.cross_entropy, out)
        assert (out - expected).norm() <= 1e-12 * expected.norm()


# --- the kernels, each against PyTorch's own ---


@built
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("rule", "channels", "out"),
    [
        (Rule(8, 1), 5, 3),
        (Rule(8, 1), 64, 64),
        (Rule(4, 1), 16, 48),
        (Rule(2, 1), 80, 16),
        (Rule(8, 2), 16, 32),
        (Rule(2, 2, live=True), 16, 16),
        (Rule(1, 1, live=True), 32, 64),
        (Rule(4, 2), 3, 7),
        (Rule(4, 2, 1), 16, 32),
        (Rule(8, 1, 1), 7, 9),
    ],
)
def test_a_convolution_and_its_gradients(rule, channels, out, n, dtype):
    torch.manual_seed(2)
    k, matrices = compiled_kernels, rule.matrices(torch.float64)
    taps = {Rule(2, 2, live=True): 4, Rule(1, 1, live=True): 1}.get(rule, rule.size**2)
    x = torch.randn(n, rule.side**2, channels, dtype=torch.float64, requires_grad=True)
    w = torch.randn(taps, channels, out, dtype=torch.float64, requires_grad=True)
    maps = x.unflatten(1, (rule.side, rule.side)).permute(0, 3, 1, 2)
    expected = convolve(maps, w, matrices).permute(0, 2, 3, 1).flatten(1, 2)  # held to stock layers elsewhere
    g = torch.randn_like(expected)
    expected_gx, expected_gw = torch.autograd.grad(expected, (x, w), g)
    add = torch.randn_like(x)
    room = torch.full_like(w, 5.0).to(dtype)
    y, V, U = k.conv_forward(x.detach().to(dtype), w.detach().to(dtype), rule)
    gx = k.conv_backward(g.to(dtype), V, U, rule, room, add.to(dtype))
    close = 1e-12 if dtype == torch.float64 else 1e-5
    for found, truth in ((y, expected), (gx, expected_gx + add), (room, expected_gw)):
        assert (found.double() - truth).norm() <= close * truth.norm()


@built
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("turn", ["neither", "first", "second"])
@pytest.mark.parametrize(
    ("batch", "rows", "columns", "depth"),
    [(1, 1, 16, 16), (3, 6, 64, 5), (2, 7, 80, 32), (2, 13, 144, 48), (1, 20, 24, 16), (4, 5, 10, 3), (2, 8, 48, 7)],
)
def test_products(batch, rows, columns, depth, turn, dtype):
    torch.manual_seed(3)
    a, b = torch.randn(batch, rows, depth, dtype=dtype), torch.randn(batch, depth, columns, dtype=dtype)
    a = a.transpose(1, 2).contiguous().transpose(1, 2) if turn == "first" else a
    b = b.transpose(1, 2).contiguous().transpose(1, 2) if turn == "second" else b
    out = torch.full((batch, rows, columns + 5), 7.0, dtype=dtype)
    found = compiled_kernels._multiply(a, b, out[:, :, :columns])
    truth = torch.einsum("pik,pkj->pij", a.double(), b.double())
    assert (found.double() - truth).norm() <= (1e-14 if dtype == torch.float64 else 1e-6) * truth.norm()
    assert (out[:, :, columns:] == 7).all()
    again = compiled_kernels._multiply(a, b)
    assert (again.double() - truth).norm() <= (1e-14 if dtype == torch.float64 else 1e-6) * truth.norm()


@built
@pytest.mark.parametrize(("pixels", "channels", "groups"), [(1, 6, 2), (4, 10, 1), (16, 64, 2), (64, 12, 3)])
@pytest.mark.parametrize("relu", [True, False])
def test_norms(pixels, channels, groups, relu):
    torch.manual_seed(4)
    k = compiled_kernels
    y = (3 + torch.randn(5, pixels, channels, dtype=torch.float64)).requires_grad_()
    add = torch.randn_like(y).requires_grad_()
    gamma, beta = (torch.randn(channels, dtype=torch.float64, requires_grad=True) for _ in range(2))
    expected = F.group_norm(y.transpose(1, 2), groups, gamma, beta, 1e-5).transpose(1, 2) + add
    expected = torch.relu(expected) if relu else expected
    out, mean, rstd = k.norm_forward(y.detach(), gamma.detach(), beta.detach(), (groups, 1e-5), relu, add.detach())
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    g = torch.randn_like(out)
    room = torch.full((2, channels), 3.0, dtype=torch.float64)
    gy, masked = k.norm_backward(g, out if relu else None, y.detach(), gamma.detach(), mean, rstd, *room)
    truth = torch.autograd.grad(expected, (y, add, gamma, beta), g)
    for found, exact in zip((gy, masked, *room), truth, strict=True):
        assert (found - exact).norm() <= 1e-11 * exact.norm()


@built
@pytest.mark.parametrize("side", [1, 2, 5, 8])
def test_pooling(side):
    """Also with equal maxima, whose gradient goes to the first, and with NaN, which stays."""
    torch.manual_seed(5)
    k = compiled_kernels
    x = torch.randint(-2, 3, (3, side, side, 6)).double().requires_grad_()
    expected = torch.relu(F.max_pool2d(x.permute(0, 3, 1, 2), 3, 2, 1)).permute(0, 2, 3, 1).flatten(1, 2)
    out, place = k.pool_forward(x.detach().flatten(1, 2), side)
    assert torch.equal(out, expected)
    g = torch.randn_like(out)
    found = k.pool_backward(g, out, place, side)
    assert torch.equal(found, torch.autograd.grad(expected, x, g)[0].flatten(1, 2))
    ill = x.detach().flatten(1, 2).clone()
    ill[1, 0, 2] = float("nan")
    assert k.pool_forward(ill, side)[0][1, :, 2].isnan().any()


# --- in runs ---


def pictures(n=80):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (n, 3, 8, 8), generator=generator, dtype=torch.uint8)
    return Federated.from_arrays(
        x.numpy(), (x.float().mean((1, 2, 3)) > 127.5).long().numpy(), clients=[i % 8 for i in range(n)]
    )


class Small(nn.Module):
    """Two blocks on maps of 4x4 and 2x2."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1)
        self.blocks = nn.Sequential(Block(16, 16, 1, 2), Block(16, 32, 2, 2))
        self.last = nn.Linear(32, 2)

    def forward(self, x):
        return self.last(self.blocks(self.stem(x)).mean((2, 3)))


def begun(method, rounds=4, dtype=torch.float32, **settings):
    torch.manual_seed(0)
    return simulate(method, Small().to(dtype), pictures(), rounds=rounds, active=4, batch_size=5, lr=0.05, **settings)


def run(method, **settings):
    simulation = begun(method, **settings)
    return list(simulation), simulation


@built
@pytest.mark.parametrize("method", [FedAvg(), FedSpeed(), Scaffold(), FedAdam(eta_g=0.01)], ids=lambda m: m.name)
def test_the_same_training(method):
    """The same model after four rounds in float64, to rounding that grew over 32 steps.

    In float32 the two may part by more than rounding: where a number before ReLU is within rounding of zero, one way
    has its slope and the other has none. With SCAFFOLD that happens in round 4 on some processors.
    """
    (_, plain), (_, other) = (run(method, layers=layers, dtype=torch.float64) for layers in ("plain", "compiled"))
    moved = (plain.x - plain.x0).norm()
    assert 0 < (plain.x - other.x).norm() < 1e-11 * moved


@built
def test_the_same_bits_in_worker_processes(quick_workers):
    (_, here), (_, there) = (
        run(FedSpeed(), layers="compiled"),
        run(FedSpeed(), layers="compiled", backend="process", workers=2),
    )
    assert torch.equal(here.x, there.x)
    assert here.plan.layers == there.plan.layers == "compiled"


def test_auto_takes_the_compiled_kernels_where_they_are(monkeypatch):
    assert resolve_layers(Small(), "auto") == ("compiled" if BUILT else "plain")
    assert resolve_layers(nn.Linear(2, 2), "auto") == "auto"  # nothing to decide
    monkeypatch.setattr(compiled_kernels, "library", lambda: None)
    assert resolve_layers(Small(), "auto") == "plain"
    with pytest.raises(UserError, match=r"layers: expected an installation with compiled kernels.*GCC.*plain"):
        run(FedAvg(), layers="compiled")


def test_a_run_keeps_its_layers(tmp_path, monkeypatch):
    """Its directory says how it was computed; without the library it is refused, or continued as it says."""
    first, _ = run(FedAvg(), layers="plain", out=tmp_path / "plain")
    text = (tmp_path / "plain" / "config.toml").read_text("utf-8")
    assert 'layers = "plain"' in text
    _, _ = run(FedAvg(), out=tmp_path / "auto")
    assert f'layers = "{"compiled" if BUILT else "plain"}"' in (tmp_path / "auto" / "config.toml").read_text("utf-8")
    more = begun(FedAvg(), rounds=6, out=tmp_path / "plain", resume=True)
    assert more.plan.layers == "plain"
    longer, straight = [*more], [*begun(FedAvg(), rounds=6, layers="plain")]
    assert [r.train_loss for r in straight] == [r.train_loss for r in [*first, *longer]]
    if BUILT:
        monkeypatch.setattr(compiled_kernels, "library", lambda: None)
        with pytest.raises(UserError, match="compiled kernels"):
            begun(FedAvg(), rounds=6, out=tmp_path / "auto", resume=True)


def test_a_run_of_before_is_continued_layer_by_layer(tmp_path):
    """A directory with rounds that does not say how they were computed is of the time when there was one way."""
    run(FedAvg(), layers="plain", out=tmp_path)
    config = tmp_path / "config.toml"
    config.write_text(config.read_text("utf-8").replace('layers = "plain"\n', ""), "utf-8")
    if BUILT:
        with pytest.raises(UserError, match=r"expected layers 'plain', found 'compiled'"):
            begun(FedAvg(), layers="compiled", out=tmp_path, resume=True)
    with pytest.raises(UserError, match="another config"):  # bound to the file that this test changed
        begun(FedAvg(), out=tmp_path, resume=True)


# --- where the plain layers compute ---


def other_parts():
    """Blocks of which one part is not as it was built."""

    def changed(**parts):
        block = made(16, 16, 1, "compiled")
        for name, part in parts.items():
            setattr(block, name, part)
        return block

    yield "groups", changed(norm2=nn.GroupNorm(4, 16).double())
    yield "eps", changed(norm1=nn.GroupNorm(2, 16, eps=1e-2).double())
    yield "no weight", changed(norm1=nn.GroupNorm(2, 16, affine=False).double())
    yield "no norm", changed(norm1=nn.Identity())
    yield "a shortcut of its own", changed(shortcut=nn.Tanh())
    yield "dropout on the shortcut", changed(shortcut=nn.Sequential(nn.Dropout(0.0)))
    yield "another convolution", changed(conv2=nn.Conv2d(16, 16, 3, padding=1).double())
    hooked = changed()
    hooked.shortcut.register_forward_hook(lambda module, inputs, output: output + 1)
    yield "a hook on the shortcut", hooked
    replaced = changed()
    replaced.norm1.forward = lambda y: 2 * y
    yield "a forward of its own", replaced


@built
@pytest.mark.parametrize("which", range(9))
def test_another_part_is_not_passed_over(which):
    """What the plain layers compute, to the bit."""
    _, block = [*other_parts()][which]
    x = torch.randn(2, 16, 4, 4, dtype=torch.float64, requires_grad=True)
    found = block(x)
    assert "BlockFunction" not in type(found.grad_fn).__name__
    choose_layers(block, "plain")
    assert torch.equal(found, block(x))


@built
def test_numbers_that_do_not_fit_raise_as_in_plain_layers():
    """They never reach the kernels, which would read and write beyond them."""
    mixed = made(16, 16, 1, "compiled")
    mixed.norm2.float()
    with pytest.raises(RuntimeError):
        mixed(torch.randn(2, 16, 4, 4, dtype=torch.float64))
    for channels in (8, 64):
        with pytest.raises(RuntimeError):
            made(16, 16, 1, "compiled")(torch.randn(2, channels, 4, 4, dtype=torch.float64))
    with pytest.raises(UserError, match="expected maps of 1x1, found 4x4"):
        trimmed(made(16, 16, 1, "compiled"), 1)(torch.randn(2, 16, 4, 4, dtype=torch.float64))
    narrow = nn.Sequential(Conv(16, 16, 1), nn.GroupNorm(2, 16)).double()
    for out, stride, shortcut in [
        (32, 1, nn.Identity()),
        (16, 2, nn.Sequential()),
        (32, 2, nn.Identity()),
        (32, 1, narrow),
    ]:
        block = made(16, out, stride, "compiled")
        block.shortcut = shortcut
        with pytest.raises(RuntimeError, match=r"must match|broadcast"):
            block(torch.randn(2, 16, 4, 4, dtype=torch.float64))
    net = resnet18_gn((3, 32, 32), 10, trim=True)
    choose_layers(net, "compiled")
    with pytest.raises(UserError, match="trimmed for one size of pictures"):
        net(torch.randn(2, 3, 64, 64))


@built
@pytest.mark.parametrize("missing", ["kernels", "names of torch"])
def test_a_compiled_model_is_computed_by_plain_layers_where_kernels_cannot_be(missing, monkeypatch):
    """A saved model on another machine; a torch without the private names that say whether a transform is active."""
    net = resnet18_gn((3, 32, 32), 4)
    x = torch.randn(2, 3, 32, 32)
    if missing == "kernels":
        monkeypatch.setattr(compiled_kernels, "library", lambda: None)
    else:
        monkeypatch.setattr(devices, "_active", None)
    expected = net(x)
    choose_layers(net, "compiled")
    assert torch.equal(net(x), expected)


@built
@pytest.mark.parametrize(
    ("place", "layer"), [(3, nn.Identity()), (4, nn.Tanh()), (2, nn.Identity()), (2, nn.GroupNorm(2, 64, eps=1e-2))]
)
def test_another_stem_is_not_passed_over(place, layer):
    torch.manual_seed(0)
    net = resnet18_gn((3, 32, 32), 4)
    net[place] = layer
    x = torch.randn(2, 3, 32, 32)
    expected = net(x)
    choose_layers(net, "compiled")
    torch.testing.assert_close(net(x), expected, rtol=1e-3, atol=1e-4)
    assert len(net[5:]) == len(net) - 5


@built
def test_a_gradient_of_a_gradient_of_a_block_that_is_used_twice():
    net = Twice()
    choose_layers(net, "compiled")
    x = torch.randn(2, 16, 4, 4, dtype=torch.float64)

    def second_order():
        grads = torch.autograd.grad(net(x).square().sum(), list(net.parameters()), create_graph=True)
        return torch.autograd.grad(sum(g.sin().sum() for g in grads), list(net.parameters()))

    found = second_order()
    choose_layers(net, "plain")
    assert all((a - b).norm() <= 1e-11 * b.norm() for a, b in zip(found, second_order(), strict=True))


@built
@pytest.mark.parametrize("trim", [True, False])
def test_what_watches_operations_or_layers_sees_plain_layers(trim):
    """A tracer, a counter, tensors without memory and hooks of all layers: the kernels are hidden from them."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils.flop_counter import FlopCounterMode

    torch.manual_seed(0)
    net, x = resnet18_gn((3, 32, 32), 10, trim=trim).double().eval(), torch.randn(2, 3, 32, 32, dtype=torch.float64)

    def seen():
        names, handle = [], nn.modules.module.register_module_forward_hook(lambda m, *_: names.append(type(m).__name__))
        try:
            with FlopCounterMode(display=False) as counter:
                net(x)
        finally:
            handle.remove()
        return names, counter.get_total_flops()

    with torch.no_grad():
        fast_conv.bilinear.cache_clear()  # as before the first forward pass of a process: constants are made inside
        choose_layers(net, "compiled")
        traced = make_fx(net)(x)
        watched = seen()
        other = torch.randn_like(x)
        torch.testing.assert_close(traced(other), net(other), rtol=1e-9, atol=1e-11)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert net(mode.from_tensor(x)).shape == (2, 10)
        compiled = net(x)
        choose_layers(net, "plain")
        assert watched == seen()
        torch.testing.assert_close(compiled, net(x), rtol=1e-9, atol=1e-11)


@built
def test_another_default_device():
    block = made(24, 24, 1, "compiled")
    x = torch.randn(3, 24, 4, 4, dtype=torch.float64)
    with torch.device("meta"):
        found = block(x)
    torch.testing.assert_close(found, stock_block(block, x), rtol=0, atol=1e-12)
