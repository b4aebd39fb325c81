"""The loss where nobody gives one: the squared error for floating targets, cross-entropy for classes. One rule for
`simulate` and the command line; targets that look like neither are refused, in a line that says what was found."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from ..data.convert import MOST_CLASSES
from ..data.federated import Federated
from ..errors import UserError
from ..utils.random import torch_seed

if TYPE_CHECKING:
    from .flat_model import Loss
    from .work import Work


def usual_loss(data: Federated) -> Loss:
    """The loss of some data where nobody gives one.

    Example:
        >>> numbers = Federated.from_arrays(np.zeros((4, 2)), np.array([0.5, 1.5, 2.0, 0.1]), [[0, 1], [2, 3]])
        >>> usual_loss(numbers) is mse_loss
        True
    """
    return mse_loss if data.classes is None and data.y.is_floating_point() else cross_entropy


def fitting_loss(loss: Loss | None, data: Federated) -> Loss:
    """The loss that was given, or the usual one; raise where it would be trained without a meaning."""
    if loss is None:
        if found := doubtful(data.y.cpu().numpy()) if data.classes is None else "":
            raise UserError(f"data {data.name}: {found}")
        return usual_loss(data)
    if is_entropy(loss) and data.y.is_floating_point() and data.y.ndim == 1 and len(data.y) > 1:
        raise UserError(
            f"loss: expected class labels for cross-entropy, found a {str(data.y.dtype).removeprefix('torch.')} per "
            f"sample; write y.astype(int) for classes, loss=torch.nn.functional.mse_loss for numbers"
        )
    return loss


def is_entropy(loss: Any) -> bool:
    """Whether a loss is cross-entropy."""
    return loss is cross_entropy or type(loss) is nn.CrossEntropyLoss


def doubtful(y: np.ndarray) -> str:
    """What targets without classes look like if that is not numbers to predict, and what to write; "" if it is.

    Example:
        >>> doubtful(np.eye(3)[[0, 1, 2, 1]])
        'targets of shape (4, 3) are one-hot, a single 1 per row; write y.argmax(1) for classes, or give a loss='
        >>> doubtful(np.array([0.5, 1.0, 2.0, 0.0]))
        ''
    """
    if y.ndim == 1 and y.dtype.kind == "f":
        values = np.unique(y)
        low, count = values[0], len(values)
        whole = low in (0, 1) and np.array_equal(values, np.arange(count) + low)
        if not whole or not 2 <= count <= min(MOST_CLASSES, len(y) // 2):
            return ""
        return (
            f"targets are floats, and exactly the whole numbers {low:g} to {values[-1]:g}; give "
            f"classes={int(values[-1]) + 1} (--set data.classes={int(values[-1]) + 1}) if they are class labels, "
            f"y[:, None] if they are numbers to predict"
        )
    if y.ndim != 2 or y.shape[1] < 2 or not y.any() or not np.isin(y, (0, 1)).all():
        return ""
    if (y.sum(1) == 1).all():
        found = "one-hot, a single 1 per row; write y.argmax(1) for classes, or give a loss="
    else:
        found = "0 and 1, several labels per row; give a loss= of your own, such as nn.BCEWithLogitsLoss()"
    return f"targets of shape {y.shape} are {found}"


def require_outputs(work: Work) -> None:
    """Raise if a model's outputs are not shaped like numbers to predict: a difference would be taken of all pairs."""
    flat, data = work.flat, work.data
    if work.loss is not mse_loss:
        return
    inputs, targets = data.batch(np.arange(min(2, len(data.x))))
    try:
        with torch_seed(0, "outputs"), torch.no_grad(), flat.statistics.kept():
            found = flat.model.eval()(inputs)
        shape = tuple(found.shape)
    except Exception:  # the run itself says what a model cannot do
        return
    if shape != tuple(targets.shape):
        fix = "write y[:, None]" if shape == (*targets.shape, 1) else "reshape them"
        raise UserError(
            f"model: expected outputs of shape {shape_text(targets.shape)}, as floating targets have, found "
            f"{shape_text(shape)}; {fix}, or give whole numbers for classes"
        )


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape of a batch with its first axis by name."""
    return f"({', '.join(['batch', *map(str, shape[1:])])})"


def loss_name(loss: Any) -> str:
    """A loss by its qualified name; with its settings, as far as they are plain, where it is an object.

    Example:
        >>> loss_name(functools.partial(cross_entropy, label_smoothing=0.1))
        'torch.nn.functional:cross_entropy(label_smoothing=0.1)'
    """
    if isinstance(loss, functools.partial):
        plain: dict[str, Any] = {**{str(i): a for i, a in enumerate(loss.args)}, **loss.keywords}
        return loss_name(loss.func) + _settings(plain)
    if hasattr(loss, "__qualname__"):
        return place(loss)
    return place(type(loss)) + _settings({k: v for k, v in vars(loss).items() if not k.startswith("_")})


def _settings(values: dict[str, Any]) -> str:
    plain = (f"{k}={v!r}" for k, v in values.items() if isinstance(v, str | int | float | bool) and k != "training")
    return f"({', '.join(plain)})"


STORED_NAMES = {
    "Block": "fedspeed.models:Block",
    "CharLSTM": "fedspeed.recurrent:CharLSTM",
    "Conv": "fedspeed.layers:Conv",
    "Layout": "fedspeed.layers:Layout",
    "RowConv": "fedspeed.layers:RowConv",
    "TrimmedConv": "fedspeed.trim:TrimmedConv",
    "Vector": "fedspeed.models:Vector",
}
"""What this package's layers are called in run directories and by Flower devices: the name under which each was stored
first, wherever it is defined now. Change no entry: a run of such a model could not be continued."""


def place(thing: Any) -> str:
    """Return `module:name` of a class or function; a layer of this package has its name in `STORED_NAMES`."""
    found = f"{thing.__module__}:{thing.__qualname__}"
    ours = thing.__module__.partition(".")[0] == __name__.partition(".")[0]
    return STORED_NAMES.get(thing.__qualname__, found) if ours else found
