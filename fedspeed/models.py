"""The models of the paper and smaller ones. A builder takes the input's shape and the number of outputs.

No batch norm anywhere: clients cannot share running statistics, so normalisation is by groups.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .data.federated import Federated, federated
from .errors import UserError, unknown
from .layers import Conv, Layout, RowConv
from .recurrent import CharLSTM, charlstm
from .sampling import torch_seed
from .trim import trimmed
from .trim import untrim as untrim
from .usercode import file_of, load_code, raised, require_part, to_install

Shape = tuple[int, ...]


def linear(shape: Shape, outputs: int) -> nn.Module:
    """One affine layer: softmax regression under cross-entropy."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), outputs))


class Vector(nn.Module):
    """One weight per column and no bias: inputs are matrices A, outputs A x."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.randn(d))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """A x, row by row."""
        return inputs @ self.x


def vector(shape: Shape, outputs: int) -> nn.Module:
    """The parameter vector itself: an input is a matrix A, the outputs are A x (data `quadratic`, `logistic`)."""
    if len(shape) != 2 or shape[0] != outputs:
        raise UserError(
            f"model vector: expected inputs of shape ({outputs}, d), one row an output, found {shape}; use linear, or "
            f"the data quadratic or logistic"
        )
    return Vector(shape[1])


INITS = ("torch", "he")


def mlp(shape: Shape, outputs: int, hidden: Sequence[int] = (64,), init: str = "torch") -> nn.Module:
    """Fully connected layers with ReLU between them.

    `init` is how they start: `torch`, PyTorch's uniform, or `he`, He's normal (fan in) with zero biases.
    """
    if init not in INITS:
        raise unknown("init of model mlp", init, INITS)
    widths = [math.prod(shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Linear(widths[-1], outputs))
    for layer in net if init == "he" else ():
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return net


def cnn(shape: Shape, outputs: int, widths: Sequence[int] = (16, 32, 64), padding: int = 2) -> nn.Module:
    """5x5 convolutions, each with ReLU and 2x2 max-pooling, then one hidden layer (the last width).

    `widths=(16, 32, 64), padding=2` is the CPU-scale net on CIFAR-10 (145,834 parameters);
    `widths=(32, 64, 128), padding=0` the classic one of the benchmarks.
    """
    channels, height, width = _image(shape, "cnn")
    if not widths:
        raise UserError(
            "model cnn: widths must hold at least the hidden layer's width, got []; for example [16, 32, 64]"
        )
    layers: list[nn.Module] = [Layout()]
    for out in widths[:-1]:
        layers += [RowConv(channels, out, 5, padding), nn.MaxPool2d(2), nn.ReLU()]
        channels = out
        height = (height + 2 * padding - 4) // 2
        width = (width + 2 * padding - 4) // 2
        if height < 1 or width < 1:
            raise UserError(
                f"model cnn: pictures of {shape[1]}x{shape[2]} are too small for {len(widths) - 1} convolutions "
                f"with padding {padding}; use fewer widths or padding=2"
            )
    hidden = nn.Linear(channels * height * width, widths[-1])
    return nn.Sequential(*layers, nn.Flatten(), hidden, nn.ReLU(), nn.Linear(widths[-1], outputs))


def lenet(shape: Shape, outputs: int) -> nn.Module:
    """LeNet of the federated literature: 5x5 convolutions of 64 channels twice, then 384 and 192 units."""
    channels, height, width = _image(shape, "lenet")
    size = [((side - 4) // 2 - 4) // 2 for side in (height, width)]
    if min(size) < 1:
        raise UserError(f"model lenet: expected pictures of at least 16x16, found {height}x{width}; use mlp or cnn")
    return nn.Sequential(
        Layout(),
        RowConv(channels, 64, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        RowConv(64, 64, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * size[0] * size[1], 384),
        nn.ReLU(),
        nn.Linear(384, 192),
        nn.ReLU(),
        nn.Linear(192, outputs),
    )


class Block(nn.Module):
    """Two 3x3 convolutions with group norm and a shortcut."""

    def __init__(self, channels: int, out: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = Conv(channels, out, stride=stride)
        self.norm1 = nn.GroupNorm(groups, out)
        self.conv2 = Conv(out, out)
        self.norm2 = nn.GroupNorm(groups, out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(Conv(channels, out, 1, stride), nn.GroupNorm(groups, out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """relu(norm(conv(relu(norm(conv x)))) + shortcut x)."""
        y = torch.relu_(self.norm1(self.conv1(x)))
        return torch.relu_(self.norm2(self.conv2(y)).add_(self.shortcut(x)))


STARTS = ("usual", "zero-residual")


def resnet18_gn(
    shape: Shape, outputs: int, groups: int = 2, init: str = "usual", trim: bool = False, keep_norm: bool = False
) -> nn.Module:
    """ResNet-18 as in the paper: 7x7 stride-2 stem, max-pool, every batch norm a group norm of 2 groups.

    11,181,642 parameters for three channels and 10 classes. Convolutions start from He's normal (fan out), as usual;
    with `init="zero-residual"` the last norm of each block has weight zero, so that a block starts as its shortcut.
    `trim` leaves out taps that never meet a pixel: on 32x32 pictures 6,946,816 parameters, whose gradient is always
    zero. What is left is the same network from the same seed (`fedspeed/trim.py`); on 64x64 pictures no tap is dead.
    `keep_norm` adds one parameter to a trimmed network that stands for them in norms of the whole vector, so that
    `clip_mode="released"` clips as on the untrimmed network.
    """
    channels, _, _ = _image(shape, "resnet18_gn")
    if init not in STARTS:
        raise unknown("init of model resnet18_gn", init, STARTS)
    if keep_norm and not trim:
        raise UserError("model resnet18_gn: keep_norm expects trim=true, found trim=false; without it no norm is lost")
    layers: list[nn.Module] = [
        Layout(),
        nn.Conv2d(channels, 64, 7, 2, 3, bias=False),
        nn.GroupNorm(groups, 64),
        nn.MaxPool2d(3, 2, 1),
        nn.ReLU(),
        Layout(),  # nothing is left to do: parameters keep the names they had
    ]
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    for i, (a, b) in enumerate(pairwise(widths)):
        layers.append(Block(a, b, 2 if i in (2, 4, 6) else 1, groups))
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, outputs))
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, Block) and init == "zero-residual":
            nn.init.zeros_(module.norm2.weight)
    return trimmed(net, shape, keep_norm) if trim else net


MODELS: dict[str, Callable[..., nn.Module]] = {
    f.__name__: f for f in (linear, vector, mlp, cnn, lenet, resnet18_gn, charlstm)
}


def takes_numbers(builder: Callable[..., nn.Module]) -> bool:
    """Whether a builder is one of `MODELS` that computes with its inputs, so that whole numbers become floats.

    A builder of `MODELS` for token ids says so by its attribute `takes_tokens`. A builder of the user's gets its inputs
    as they are. Wherever a builder is defined, the answer stays the same: results depend on it.
    """
    return builder in MODELS.values() and not getattr(builder, "takes_tokens", False)


def find_builder(name: str, code: str = "") -> Callable[..., nn.Module]:
    """The function of a name in `MODELS`, or of `path/to/file.py:build`, which is executed.

    Args:
        code: the digest the file must have, "" for any.
    """
    if name in MODELS:
        return MODELS[name]
    if not file_of(name):
        require_part("model", name)
        raise unknown("model", name, MODELS)
    builder: Callable[..., nn.Module] = load_code("model", name, code)
    if not callable(builder):
        raise UserError(f"model {name}: expected a function build(shape, outputs, **options), found {builder!r}")
    return builder


def build_model(name: str, data: Federated, *, seed: int = 0, **options: Any) -> nn.Module:
    """A named model that fits the data, initialised as a function of the seed alone.

    Args:
        name: one of `MODELS`, or `path/to/file.py:build` with a function `build(shape, outputs, **options)`.
        options: the builder's own keywords, e.g. `hidden=(32, 32)` for `mlp`.
    """
    federated(data)
    if not isinstance(name, str):
        raise UserError(
            f"build_model: expected a name, one of {', '.join(MODELS)}, found {name!r}; give a module of your own to "
            f"simulate as it is"
        )
    return build_with(find_builder(name), name, data, seed, options)


def build_with(
    builder: Callable[..., nn.Module], name: str, data: Federated, seed: int, options: dict[str, Any]
) -> nn.Module:
    """What `build_model` does with the function that a name names."""
    if takes_numbers(builder) and not data.x.dtype.is_floating_point and data.x.dtype != torch.uint8:
        raise UserError(
            f"model {name}: expected floating inputs or bytes, found {data.x.dtype}; use data.floats(), or for token "
            f"ids a model of your own with an embedding"
        )
    parameters = list(inspect.signature(builder).parameters.values())[2:]
    known = {p.name: p.default for p in parameters if p.kind is not p.VAR_KEYWORD}
    for option, value in options.items():
        if len(known) < len(parameters):  # it takes any
            break
        if option not in known:
            raise (
                unknown(f"option of model {name}", option, known)
                if known
                else UserError(f"model {name} has no options, found {option!r}; leave it out")
            )
        if not file_of(name):
            _check_option(name, option, value, known[option])
    shape = tuple(data.y.shape[1:])
    with torch_seed(seed, "init"):
        try:
            model = builder(data.shape, data.classes or math.prod(shape), **options)
        except Exception as error:
            if isinstance(error, UserError):
                raise
            reason = (str(error).splitlines() or ["not enough memory"])[0]
            reason = raised(error, Path(file_of(name)).resolve()) if file_of(name) else reason
            reason += to_install("model", error) if file_of(name) else ""
            raise UserError(f"model {name}: cannot be built with {options}: {reason}") from error
    if not isinstance(model, nn.Module):
        raise UserError(f"model {name}: expected an nn.Module, found a {type(model).__name__}; return one")
    if isinstance(model, CharLSTM):
        model.check(data.x, data.x_test)
    if data.classes or len(shape) == 1:
        return model
    return nn.Sequential(model, nn.Unflatten(1, shape) if shape else nn.Flatten(0))  # outputs shaped like the targets


def _check_option(model: str, option: str, value: Any, default: Any) -> None:
    """Widths are whole numbers >= 1 in a list; which names there are the builder knows; numbers are whole and >= 0."""
    if isinstance(default, bool):
        wanted, good = "true or false", isinstance(value, bool)
    elif isinstance(default, str):
        wanted, good = f"a name such as {default!r}", isinstance(value, str)
    elif isinstance(default, tuple):
        wanted = f"a list of whole numbers >= 1 such as {list(default)}"
        good = isinstance(value, list | tuple) and all(type(a) is int and a >= 1 for a in value)
    else:
        wanted, good = "a whole number >= 0", type(value) is int and value >= 0
    if not good:
        raise UserError(f"model {model}: {option} must be {wanted}, got {value!r}")


def _image(shape: Shape, name: str) -> Shape:
    if len(shape) != 3:
        raise UserError(
            f"model {name}: expected pictures of shape (channels, height, width), found inputs of shape {shape}; "
            f"use linear or mlp"
        )
    return shape
