"""What torch does not promise to keep: named in one place, and without it everything computes the same."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedspeed
from fedspeed.client.flat_model import FlatModel
from fedspeed.errors import UserError
from fedspeed.models import fast_conv
from fedspeed.utils import devices

NAMES = ("_active", "_disable", "_wrapped", "_modes", "_no_modes")


def private(path: Path) -> set[str]:
    """Names of torch with a leading underscore that a file uses."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            of_torch = node.attr == "_version" or ast.unparse(node.value).partition(".")[0] == "torch"
            found |= {node.attr} if of_torch else set()
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            found |= {name for name in (*node.module.split("."), *(a.name for a in node.names)) if name[0] == "_"}
    return found


def test_private_names_of_torch_are_in_one_file():
    files = Path(fedspeed.__file__).parent.rglob("*.py")
    assert {path.name for path in files if private(path)} == {"devices.py"}


def test_this_torch_has_them():
    """The torch that is tested takes the fast layers, and counts versions."""
    assert devices.can_ask()
    assert isinstance(devices.version(torch.zeros(2)), int)


@pytest.fixture(params=NAMES)
def one_gone(request, monkeypatch):
    """A torch that lacks one of the names."""
    monkeypatch.setattr(devices, request.param, None)


@pytest.mark.usefixtures("one_gone")
@pytest.mark.parametrize("side", [1, 2, 4, 8])
def test_without_them_layers_are_the_stock_ones(side):
    torch.manual_seed(0)
    x, conv, row = torch.randn(3, 32, side, side), fast_conv.Conv(32, 4), fast_conv.RowConv(32, 4, 3, padding=1)
    assert torch.equal(conv(x), F.conv2d(x, conv.weight, padding=1))
    assert torch.equal(row(x), F.conv2d(x, row.weight, row.bias, padding=1))
    assert fast_conv.Layout()(x) is x


@pytest.mark.usefixtures("one_gone")
def test_without_them_torch_func_works():
    torch.manual_seed(0)
    conv, weights, x = fast_conv.Conv(3, 4), torch.randn(5, 4, 3, 3, 3), torch.randn(5, 2, 3, 4, 4)

    def loss(w, inputs):
        return torch.func.functional_call(conv, {"weight": w}, (fast_conv.Layout()(inputs),)).square().mean()

    for i, g in enumerate(torch.func.vmap(torch.func.grad(loss))(weights, x)):
        w = weights[i].clone().requires_grad_()
        (truth,) = torch.autograd.grad(F.conv2d(x[i], w, padding=1).square().mean(), w)
        torch.testing.assert_close(g, truth)


def test_without_them_a_model_is_the_same_function(monkeypatch):
    """Values and gradients of a network with fast layers, in float64."""
    from fedspeed.models.basic import cnn

    torch.manual_seed(0)
    net = cnn((3, 32, 32), 10).double()
    x, y = torch.randn(2, 3, 32, 32, dtype=torch.float64), torch.tensor([3, 7])

    def results():
        loss = F.cross_entropy(net(x), y)
        return loss, *torch.autograd.grad(loss, list(net.parameters()))

    fast = results()
    monkeypatch.setattr(devices, "_active", None)
    stock = results()
    assert any(not torch.equal(a, b) for a, b in zip(fast, stock, strict=True))  # it was another path
    for a, b in zip(fast, stock, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


class Uncounted(torch.Tensor):
    """A tensor of a torch that counts no versions."""

    _version = None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_a_change_in_place_is_seen_without_a_counter(dtype):
    a = torch.ones(3, 2, dtype=dtype).T.as_subclass(Uncounted)
    before = devices.version(a)
    assert isinstance(before, str)
    assert devices.version(a) == before
    a[1, 2] = 0
    assert devices.version(a) != before


class Counts(nn.Module):
    """A buffer that a forward pass changes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("seen", torch.zeros(()).as_subclass(Uncounted))

    def forward(self, x):
        self.seen += 1
        return self.layer(x)


def test_a_changed_buffer_is_refused_without_a_counter():
    flat = FlatModel(Counts())
    flat.refuse_changed_buffers()
    flat.model(torch.zeros(1, 2))
    with pytest.raises(UserError, match="buffer 'seen' changes in a forward pass"):
        flat.refuse_changed_buffers()
