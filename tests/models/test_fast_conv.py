"""The fast layers are the stock ones to rounding: values, gradients, double backward, torch.func."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedspeed.models import fast_conv
from fedspeed.models.fast_conv import Conv, RowConv, bilinear
from fedspeed.utils import devices

CASES = [(side, taps, stride) for side in (1, 2, 3, 4, 8) for taps in (1, 3) for stride in (1, 2)]


def stock(x, w, stride):
    return F.conv2d(x, w, None, stride, w.shape[-1] // 2)


def fast(side, taps, stride):
    """Whether the layer is not the stock one: 1x1 filters are products everywhere."""
    return taps == 1 or bilinear(side, stride, torch.float32) is not None


def layer(taps, stride, dtype=torch.float64):
    torch.manual_seed(0)
    return Conv(3, 4, taps, stride).to(dtype)


def test_the_cases_hold_every_fast_path():
    assert [(side, stride) for side, taps, stride in CASES if taps == 3 and fast(side, taps, stride)] == [
        *((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1), (8, 2))
    ]
    assert all(bilinear(side, 1, torch.float32) is None for side in (0, 16, 32))


@pytest.mark.parametrize(("side", "taps", "stride"), CASES)
def test_values_gradients_and_double_backward(side, taps, stride):
    conv = layer(taps, stride)
    x = torch.randn(5, 3, side, side, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(conv(x), stock(x, conv.weight, stride), rtol=0, atol=1e-13)
    v = torch.randn_like(conv(x))

    def second_order(y):
        gx, gw = torch.autograd.grad((y.tanh() * v).sum(), (x, conv.weight), create_graph=True)
        return gx, gw, *torch.autograd.grad((gx.sin().sum() + gw.cos().sum()), (x, conv.weight))

    for a, b in zip(second_order(conv(x)), second_order(stock(x, conv.weight, stride)), strict=True):
        assert (a - b).norm() < 2e-13 * b.norm()


@pytest.mark.parametrize(("side", "taps", "stride"), CASES)
def test_under_torch_func(side, taps, stride):
    """vmap over clients with their own weights, of a gradient."""
    conv = layer(taps, stride)
    weights = torch.randn(6, *conv.weight.shape, dtype=torch.float64)
    x = torch.randn(6, 5, 3, side, side, dtype=torch.float64)

    def loss(w, inputs):
        return torch.func.functional_call(conv, {"weight": w}, (inputs,)).square().mean()

    grads = torch.func.vmap(torch.func.grad(loss))(weights, x)
    for i in range(6):
        w = weights[i].clone().requires_grad_()
        (truth,) = torch.autograd.grad(stock(x[i], w, stride).square().mean(), w)
        torch.testing.assert_close(grads[i], truth, rtol=0, atol=1e-13)


def test_dead_taps_have_zero_gradient_as_in_the_stock_layer():
    conv = layer(3, 1)
    x = torch.randn(5, 3, 1, 1, dtype=torch.float64)
    (g,) = torch.autograd.grad(conv(x).sum(), conv.weight)
    live = torch.zeros(3, 3, dtype=torch.bool)
    live[1, 1] = True
    assert (g[:, :, ~live] == 0).all()
    assert (g[:, :, live] != 0).all()


@pytest.mark.parametrize(("side", "taps", "stride"), [case for case in CASES if fast(*case)])
def test_float32_is_as_good_as_rounding_allows(side, taps, stride):
    """Values and gradients at the network's widths, against float64: ten times the stock layer's error at most."""
    torch.manual_seed(0)
    conv = Conv(64, 128, taps, stride)
    x = torch.randn(20, 64, side, side).relu()
    v = torch.randn_like(conv(x))

    def results(f, dtype):
        w, inputs = (a.detach().to(dtype).requires_grad_() for a in (conv.weight, x))
        y = f(inputs, w)
        return [y.detach(), *torch.autograd.grad(y, (inputs, w), v.to(dtype))]

    def ours(inputs, w):
        return torch.func.functional_call(conv, {"weight": w}, (inputs,))

    truth = results(lambda inputs, w: stock(inputs, w, stride), torch.float64)
    plain = results(lambda inputs, w: stock(inputs, w, stride), torch.float32)
    for a, b, exact in zip(results(ours, torch.float32), plain, truth, strict=True):
        assert (a - exact).norm() < 10 * (b - exact).norm() + 1e-7 * exact.norm()


def test_what_is_no_batch_of_maps_is_left_to_the_stock_layer():
    conv = layer(3, 1)
    for shape in ((3, 4, 4), (0, 3, 4, 4), (2, 3, 4, 2)):
        x = torch.randn(shape, dtype=torch.float64)
        assert torch.equal(conv(x), stock(x, conv.weight, 1))


def test_the_first_call_leaves_no_mode_behind():
    """Under inference mode, then inside torch.func; double backward must work afterwards."""
    conv, x = layer(3, 1), torch.randn(5, 3, 2, 2, dtype=torch.float64)
    for first in (torch.inference_mode(), torch.no_grad()):
        bilinear.cache_clear()
        with first:
            conv(x)
        (g,) = torch.autograd.grad(conv(x).square().sum(), conv.weight, create_graph=True)
        torch.autograd.grad(g.square().sum(), conv.weight)
    bilinear.cache_clear()
    torch.func.grad(lambda a: conv(a).sum())(x)
    assert not any(devices.transformed(m) for m in bilinear(2, 1, torch.float64)[:3])


def test_inside_a_transform_of_something_else():
    conv, x = layer(3, 1), torch.randn(5, 3, 4, 4, dtype=torch.float64)
    truth = stock(x, conv.weight, 1).sum()
    torch.testing.assert_close(torch.func.grad(lambda a: a * conv(x).sum())(torch.ones(()).double()), truth)


def test_low_precision_takes_the_stock_layer():
    conv, x = layer(3, 1, torch.float32), torch.randn(5, 3, 4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert conv(x).dtype == torch.bfloat16
        assert torch.equal(conv(x), stock(x, conv.weight, 1))
    assert torch.equal(conv.bfloat16()(x.bfloat16()), stock(x.bfloat16(), conv.weight, 1))


def test_resnet_equals_one_of_stock_layers():
    """The whole network in float64: outputs and gradient."""
    from fedspeed.models.resnet import resnet18_gn

    torch.manual_seed(0)
    fast = resnet18_gn((3, 32, 32), 10).double()
    slow = resnet18_gn((3, 32, 32), 10).double()
    for name, module in list(slow.named_modules()):
        if isinstance(module, Conv):
            parent = slow.get_submodule(name.rpartition(".")[0])
            size, stride, padding = module.kernel_size, module.stride, module.padding
            plain = nn.Conv2d(module.in_channels, module.out_channels, size, stride, padding, bias=False).double()
            setattr(parent, name.rpartition(".")[2], plain)
    assert not any(isinstance(module, Conv) for module in slow.modules())
    slow.load_state_dict(fast.state_dict())
    x, y = torch.randn(2, 3, 32, 32, dtype=torch.float64), torch.tensor([3, 7])
    results = []
    for net in (fast, slow):
        loss = F.cross_entropy(net(x), y)
        results.append((loss, *torch.autograd.grad(loss, list(net.parameters()))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


ROWS = [(32, 5, 0, 9), (33, 5, 2, 6), (32, 3, 1, 4), (3, 5, 2, 7)]
"""Channels, taps, padding, side; the last has too few channels and is the stock layer."""


def row_layer(channels, taps, padding):
    torch.manual_seed(0)
    return RowConv(channels, 4, taps, padding).double()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("channels", "taps", "padding", "side"), ROWS)
def test_the_gradient_by_rows(channels, taps, padding, side, layout):
    """Pictures that are not square, in both layouts: outputs, gradients, second gradients."""
    conv = row_layer(channels, taps, padding)
    x = torch.randn(5, channels, side, side + 2, dtype=torch.float64).contiguous(memory_format=layout).requires_grad_()
    truth = F.conv2d(x, conv.weight, conv.bias, padding=padding)
    assert torch.equal(conv(x), truth)
    v, parameters = torch.randn_like(truth), (x, conv.weight, conv.bias)
    for a, b in zip(*(torch.autograd.grad((y.tanh() * v).sum(), parameters) for y in (conv(x), truth)), strict=True):
        assert (a - b).norm() < 1e-14 * b.norm() * channels

    def second_order(y):
        gx, gw, gb = torch.autograd.grad((y.tanh() * v).sum(), parameters, create_graph=True)
        return torch.autograd.grad(gx.sin().sum() + gw.cos().sum() + gb.sum(), parameters)

    for a, b in zip(
        second_order(conv(x)), second_order(F.conv2d(x, conv.weight, conv.bias, padding=padding)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_the_gradient_by_rows_is_used_where_it_should_be():
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        real = fast_conv._row_gradient
        patch.setattr(fast_conv, "_row_gradient", lambda *given: calls.append(given) or real(*given))
        for channels, taps, padding, side in ROWS:
            conv = row_layer(channels, taps, padding)
            conv(torch.randn(2, channels, side, side, dtype=torch.float64)).sum().backward()
        conv = row_layer(32, 5, 0)
        torch.func.grad(lambda x: conv(x).sum())(torch.randn(2, 32, 6, 6, dtype=torch.float64))
        conv.bfloat16()(torch.randn(2, 32, 6, 6).bfloat16()).sum().backward()
        conv(torch.zeros(0, 32, 6, 6).bfloat16())
    assert len(calls) == 3
