"""The models: sizes that the literature states, shapes, seeds, and what does not fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedspeed import MODELS, Federated, UserError, build_model
from fedspeed.client.flat_model import FlatModel
from fedspeed.models.basic import cnn, lenet, linear, mlp
from fedspeed.models.resnet import resnet18_gn

CIFAR = (3, 32, 32)


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def pictures(shape: tuple[int, ...] = (1, 8, 8), classes: int = 4) -> Federated:
    return Federated.from_arrays(np.zeros((8, *shape), "f4"), np.arange(8) % classes, [range(8)])


def test_linear_and_mlp_by_arithmetic():
    assert size(linear((1, 8, 8), 10)) == 64 * 10 + 10
    assert size(mlp((1, 8, 8), 10)) == 64 * 64 + 64 + 64 * 10 + 10
    assert size(mlp((5,), 2, hidden=(7, 3))) == 5 * 7 + 7 + 7 * 3 + 3 + 3 * 2 + 2
    assert size(mlp((5,), 2, hidden=())) == 5 * 2 + 2


@pytest.mark.parametrize(
    ("widths", "padding", "parameters"),
    [((16, 32, 64), 2, 145_834), ((8, 16, 64), 2, 70_074), ((32, 64, 128), 0, None)],
)
def test_cnn_by_arithmetic(widths, padding, parameters):
    a, b, hidden = widths
    side = ((32 + 2 * padding - 4) // 2 + 2 * padding - 4) // 2
    counted = 75 * a + a + 25 * a * b + b + side * side * b * hidden + hidden + 10 * hidden + 10
    assert size(cnn(CIFAR, 10, widths, padding)) == counted
    assert parameters in (None, counted)


def test_lenet_by_arithmetic():
    """3 x 32 x 32 -> 64 x 14 x 14 -> 64 x 5 x 5 -> 384 -> 192 -> 10."""
    counted = 75 * 64 + 64 + 25 * 64 * 64 + 64 + 1600 * 384 + 384 + 384 * 192 + 192 + 192 * 10 + 10
    assert size(lenet(CIFAR, 10)) == counted


@pytest.mark.parametrize(("classes", "parameters"), [(10, 11_181_642), (100, 11_227_812), (200, 11_279_112)])
def test_resnet18_has_the_size_of_the_paper_s(classes, parameters):
    with torch.device("meta"):  # shapes only
        assert size(resnet18_gn(CIFAR, classes)) == parameters


def test_mlp_starts_from_he_s_normal_if_asked():
    torch.manual_seed(0)
    first = mlp((400,), 2, hidden=(500,), init="he")[1]
    assert first.weight.std().item() == pytest.approx((2 / 400) ** 0.5, rel=0.01)
    assert first.weight.mean().abs().item() < 1e-3
    assert not first.bias.any()


def test_resnet18_has_the_paper_s_layers():
    with torch.device("meta"):
        net = resnet18_gn(CIFAR, 10)
    kinds = [type(module) for module in net.modules()]
    assert nn.BatchNorm2d not in kinds
    norms = [module for module in net.modules() if isinstance(module, nn.GroupNorm)]
    assert len(norms) == 20
    assert {norm.num_groups for norm in norms} == {2}
    convolutions = [module for module in net.modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) == 20
    assert (convolutions[0].kernel_size, convolutions[0].stride) == ((7, 7), (2, 2))
    assert sum(isinstance(module, nn.MaxPool2d) for module in net.modules()) == 1
    assert all(conv.bias is None for conv in convolutions)


def test_resnet18_halves_the_picture_five_times_and_starts_from_he_s_normal():
    torch.manual_seed(0)
    net = resnet18_gn(CIFAR, 10)
    body = net[:-3]  # without pooling, flattening and the last layer
    assert body(torch.zeros(1, 3, 64, 64)).shape == (1, 512, 2, 2)
    for conv in (module for module in net.modules() if isinstance(module, nn.Conv2d)):
        fan_out = conv.out_channels * conv.kernel_size[0] ** 2
        assert conv.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.05)


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"charlstm"}))  # that one: test_recurrent.py
def test_outputs_are_one_score_a_class(name):
    shape = {"lenet": (3, 16, 16), "resnet18_gn": (3, 16, 16), "vector": (4, 5)}.get(name, (1, 8, 8))
    model = build_model(name, pictures(shape))
    assert model(torch.zeros(2, *shape)).shape == (2, 4)
    FlatModel(model)  # no running statistics, nothing lazy


def test_a_model_is_a_function_of_the_seed_alone():
    a, b, c = (torch.nn.utils.parameters_to_vector(build_model("mlp", pictures(), seed=seed).parameters())
               for seed in (0, 0, 1))  # fmt: skip
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_building_a_model_leaves_the_caller_s_generator():
    torch.manual_seed(4)
    state = torch.get_rng_state()
    build_model("mlp", pictures())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("y", [(), (1,), (3,), (2, 3)])
def test_regression_outputs_have_the_targets_shape(y):
    """Outputs (n, 1) against targets (n,) would broadcast to n x n under a squared loss."""
    data = Federated.from_arrays(np.zeros((6, 5), "f4"), np.zeros((6, *y), "f4"), [range(6)])
    assert build_model("linear", data)(data.x).shape == data.y.shape


def test_options_reach_the_builder():
    assert size(build_model("mlp", pictures(), hidden=[7])) == 64 * 7 + 7 + 7 * 4 + 4


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mpl", {}, "unknown model 'mpl'; did you mean 'mlp'"),
        ("mlp", {"hiden": [3]}, "unknown option of model mlp 'hiden'; did you mean 'hidden'"),
        ("mlp", {"init": "hee"}, "unknown init of model mlp 'hee'; did you mean 'he'"),
        ("mlp", {"init": 3}, "init must be a name such as 'torch', got 3"),
        ("mlp", {"hidden": "he"}, r"hidden must be a list of whole numbers"),
        ("linear", {"hidden": [3]}, "model linear has no options, found 'hidden'"),
        ("mlp", {"hidden": 32}, r"hidden must be a list of whole numbers >= 1 such as \[64\], got 32"),
        ("mlp", {"hidden": [0]}, r"hidden must be a list of whole numbers >= 1 .*got \[0\]"),
        ("mlp", {"hidden": [1.5]}, "hidden must be a list of whole numbers"),
        ("mlp", {"hidden": "wide"}, "hidden must be a list of whole numbers"),
        ("mlp", {"hidden": [True]}, "hidden must be a list of whole numbers"),
        ("cnn", {"widths": []}, "widths must hold at least the hidden layer's width"),
        ("cnn", {"padding": -1}, "padding must be a whole number >= 0, got -1"),
        ("cnn", {"padding": 0}, "pictures of 8x8 are too small for 2 convolutions with padding 0; use fewer widths"),
        ("lenet", {}, "expected pictures of at least 16x16, found 8x8; use mlp or cnn"),
        ("resnet18_gn", {"trim": 1}, "trim must be true or false, got 1"),
        ("resnet18_gn", {"groups": True}, "groups must be a whole number >= 0, got True"),
        ("resnet18_gn", {"init": "zero"}, "unknown init of model resnet18_gn 'zero'.*zero-residual"),
        ("resnet18_gn", {"groups": 3}, "resnet18_gn: cannot be built with .*divisible"),
    ],
    ids=str,
)
def test_what_cannot_be_built_is_refused(name, options, message):
    with pytest.raises(UserError, match=message):
        build_model(name, pictures(), **options)


@pytest.mark.parametrize("name", ["cnn", "lenet", "resnet18_gn"])
def test_picture_models_refuse_vectors(name):
    with pytest.raises(UserError, match=r"expected pictures .*found inputs of shape \(60,\); use linear or mlp"):
        build_model(name, pictures((60,)))


OWN = """
from torch import nn


class Net(nn.Module):
    def __init__(self, channels, heads):
        super().__init__()
        self.first = nn.Linear(channels % 3, heads)


class Plain(nn.Sequential):
    def __init__(self, width=3):
        super().__init__(nn.Flatten(), nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))


class Two(Plain):
    def __init__(self, width=3, bias=True):
        super().__init__(width)
        self[3].bias.requires_grad_(bias)


class Fitting(nn.Linear):
    def __init__(self, shape=(4,), outputs=2):
        super().__init__(shape[0], outputs)


def one(shape):
    return nn.Linear(4, 2)
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "net.py").write_text(OWN)
    data = Federated.from_arrays(np.zeros((6, 4), "f4"), np.arange(6) % 2, [range(6)])
    return lambda name, **options: build_model(f"{tmp_path}/net.py:{name}", data, **options)


def test_a_class_that_needs_no_arguments_is_a_model(own):
    assert [sum(p.numel() for p in own(name).parameters()) for name in ("Plain", "Two")] == [15 + 8, 15 + 8]
    assert own("Plain", width=5)[1].out_features == own("Two", width=5)[1].out_features == 5
    assert torch.equal(own("Two", seed=3)[1].weight, own("Plain", seed=3)[1].weight)  # a function of the seed alone
    assert own("Fitting").out_features == 2
    with pytest.raises(UserError, match=r"unknown option of model .*net.py:Plain 'wdth'; did you mean 'width'"):
        own("Plain", wdth=5)


@pytest.mark.parametrize(("name", "why"), [("Net", "unsupported operand"), ("one", "takes 1 positional argument")])
def test_a_builder_with_another_signature_is_told_how_it_is_called(own, name, why):
    called = rf"{why}.*; it is called as {name}\(shape, outputs, \*\*options\), here {name}\(\(4,\), 2\)"
    with pytest.raises(UserError, match=called):
        own(name)
