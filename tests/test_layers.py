"""The fast layers are the stock ones to rounding: values, gradients, double backward, torch.func."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedspeed.layers import Conv3x3

CASES = [(side, stride) for side in (1, 2, 3, 4) for stride in (1, 2)]


def stock(x, w, stride):
    return F.conv2d(x, w, None, stride, 1)


def layer(stride, dtype=torch.float64):
    torch.manual_seed(0)
    return Conv3x3(3, 4, stride).to(dtype)


@pytest.mark.parametrize(("side", "stride"), CASES)
def test_values_gradients_and_double_backward(side, stride):
    conv = layer(stride)
    x = torch.randn(5, 3, side, side, dtype=torch.float64, requires_grad=True)
    for a, b in ((conv(x), stock(x, conv.weight, stride)),):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
    v = torch.randn_like(conv(x))

    def second_order(y):
        gx, gw = torch.autograd.grad((y.tanh() * v).sum(), (x, conv.weight), create_graph=True)
        return gx, gw, *torch.autograd.grad((gx.sin().sum() + gw.cos().sum()), (x, conv.weight))

    for a, b in zip(second_order(conv(x)), second_order(stock(x, conv.weight, stride)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("side", "stride"), CASES)
def test_under_torch_func(side, stride):
    """vmap over clients with their own weights, of a gradient."""
    conv = layer(stride)
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
    conv = layer(1)
    x = torch.randn(5, 3, 1, 1, dtype=torch.float64)
    (g,) = torch.autograd.grad(conv(x).sum(), conv.weight)
    live = torch.zeros(3, 3, dtype=torch.bool)
    live[1, 1] = True
    assert (g[:, :, ~live] == 0).all()
    assert (g[:, :, live] != 0).all()


def test_resnet_equals_one_of_stock_layers():
    """The whole network in float64: outputs and gradient."""
    from fedspeed.models import resnet18_gn

    torch.manual_seed(0)
    fast = resnet18_gn((3, 32, 32), 10).double()
    slow = resnet18_gn((3, 32, 32), 10).double()
    for name, module in list(slow.named_modules()):
        if isinstance(module, Conv3x3):
            parent = slow.get_submodule(name.rpartition(".")[0])
            plain = nn.Conv2d(module.in_channels, module.out_channels, 3, module.stride, 1, bias=False).double()
            setattr(parent, name.rpartition(".")[2], plain)
    assert not any(isinstance(module, Conv3x3) for module in slow.modules())
    slow.load_state_dict(fast.state_dict())
    x, y = torch.randn(2, 3, 32, 32, dtype=torch.float64), torch.tensor([3, 7])
    results = []
    for net in (fast, slow):
        loss = F.cross_entropy(net(x), y)
        results.append((loss, *torch.autograd.grad(loss, list(net.parameters()))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
