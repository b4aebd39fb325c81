"""Losses: the default one, those with a name, checks of a given one, and names of losses and layers in run directories.

The default is the squared error for floating targets and cross-entropy for classes, by one rule for `simulate` and the
command line. Targets that look like neither are an error that describes them. A loss that was asked for is tried on a
few rows before round 1, and refused if it does not fit targets or outputs.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import warnings
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, huber_loss, mse_loss

from ..config.spec import as_setting, loaded, parse_loss
from ..data.federated import Federated
from ..data.samples import MOST_CLASSES
from ..errors import UserError, one_line
from ..utils.devices import deterministic
from ..utils.random import torch_seed

if TYPE_CHECKING:
    from .flat_model import FlatModel, Loss
    from .work import Work


def bce(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over rows and labels of the binary cross-entropy; outputs are logits, targets 0, 1 or between.

    Example:
        >>> round(float(bce(torch.tensor([[0.0, 0.0]]), torch.tensor([[0, 1]]))), 4)   # log 2
        0.6931
    """
    return binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype))


NAMED: dict[str, Loss] = {"cross-entropy": cross_entropy, "mse": mse_loss, "huber": huber_loss, "bce": bce}
"""The functions of `config.spec.LOSSES`."""
KEYWORDS = {"smoothing": "label_smoothing", "delta": "delta"}
"""The keywords by which torch knows the parameters of a named loss."""
KINDS: dict[Any, str] = {
    **{function: name for name, function in NAMED.items()},
    binary_cross_entropy_with_logits: "bce",
    nn.CrossEntropyLoss: "cross-entropy",
    nn.MSELoss: "mse",
    nn.HuberLoss: "huber",
    nn.BCEWithLogitsLoss: "bce",
}
"""The names of torch's functions and classes of the same losses."""
FEW = 8
"""The rows on which a loss is tried."""


def named_loss(setting: Any) -> Loss:
    """Return the function of a loss by name; parameters at their defaults leave torch's own function.

    Args:
        setting: text, or a `Spec` of a user's file, which is executed.

    Example:
        >>> named_loss("mse") is mse_loss, named_loss("huber:delta=0.5").keywords
        (True, {'delta': 0.5})
    """
    given = as_setting("loss", setting)
    if not isinstance(given, str):
        own_loss: Loss = loaded("loss", given)
        return own_loss
    name, own = parse_loss(given)
    keywords = {KEYWORDS[key]: value for key, value in own.items()}
    return functools.partial(NAMED[name], **keywords) if own else NAMED[name]


def kind_of(loss: Any) -> str:
    """Return the name of a loss in `NAMED`, whatever its parameters; "" for any other.

    Example:
        >>> kind_of(nn.HuberLoss(delta=0.5)), kind_of(named_loss("cross-entropy:smoothing=0.1")), kind_of(max)
        ('huber', 'cross-entropy', '')
    """
    base = loss.func if isinstance(loss, functools.partial) else loss
    try:
        return KINDS.get(type(base) if isinstance(base, nn.Module) else base, "")
    except TypeError:  # It cannot be hashed.
        return ""


def fitting_loss(loss: Loss | None, data: Federated) -> Loss:
    """Return the given loss, or the default one; raise if it does not fit the targets.

    Example:
        >>> numbers = Federated.from_arrays(np.zeros((4, 2)), np.array([0.5, 1.5, 2.0, 0.1]), [[0, 1], [2, 3]])
        >>> fitting_loss(None, numbers) is mse_loss
        True
    """
    if loss is None:
        if found := doubtful(data.y.cpu().numpy()) if data.classes is None else "":
            raise UserError(f"data {data.name}: {found}")
        return mse_loss if data.classes is None and data.y.is_floating_point() else cross_entropy
    if found := misfit(kind_of(loss), data.y, data.classes):
        raise UserError(f"loss {kind_of(loss)}: expected {found}")
    return loss


def misfit(kind: str, y: torch.Tensor, classes: int | None) -> str:
    """Return what targets a loss expects, and what they are, if these targets do not fit it; "" if they do.

    Example:
        >>> misfit("mse", torch.tensor([0, 1, 2]), 3)
        'floating targets, found int64 of shape (3,); write y.astype("float32"), or for classes take cross-entropy'
    """
    found = f"found {str(y.dtype).removeprefix('torch.')} of shape {tuple(y.shape)}"
    if kind == "cross-entropy" and y.is_floating_point() and len(y) > 1:
        if y.ndim > 1 and bool((y >= 0).all()) and bool((y.sum(1) - 1).abs().max() < 1e-3):  # probabilities
            return ""
        return f"class labels, {found}; write y.astype(int) for classes, or take mse or huber for numbers"
    if kind in ("mse", "huber") and not y.is_floating_point():
        return f'floating targets, {found}; write y.astype("float32"), or for classes take cross-entropy'
    if kind != "bce":
        return ""
    if classes is not None:
        return f"a 0 or 1 per label, {found}, class numbers; take cross-entropy, or write np.eye(classes)[y]"
    if len(y) and not (y.min() >= 0 and y.max() <= 1):
        return f"a 0 or 1 per label, found targets from {y.min():g} to {y.max():g}; take mse or huber for numbers"
    return ""


def is_entropy(loss: Any) -> bool:
    """Return whether a loss is cross-entropy, perhaps smoothed: equal odds then lose log(classes)."""
    plain = not isinstance(loss, functools.partial) or set(loss.keywords) <= {"label_smoothing"}
    return kind_of(loss) == "cross-entropy" and plain


def has_accuracy(data: Federated, loss: Loss) -> bool:
    """Return whether outputs are scored by an accuracy: with classes, or per label where the loss is `bce`."""
    return data.classes is not None or loss is bce


def doubtful(y: np.ndarray) -> str:
    """Describe targets without classes that do not look like numbers to predict, with a fix; return "" if they do.

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
        found = '0 and 1, several labels per row; give a loss=, "bce" for labels (--loss bce), "mse" for numbers'
    return f"targets of shape {y.shape} are {found}"


def require_outputs(work: Work, given: bool) -> None:
    """Raise if the loss does not fit the model's outputs: it is tried on a few rows.

    The squared error and others like it would broadcast outputs and targets of different shapes to all pairs.

    Args:
        given: whether the loss was asked for. Of the default one only the outputs' shape is looked at.
    """
    flat, data, loss = work.flat, work.data, work.loss
    kind = kind_of(loss)
    if not kind:
        _require_two(loss)
    inputs, targets = data.batch(np.arange(min(FEW, work.plan.batch_size, len(data.x))))
    try:
        found = _outputs(flat, inputs)
        if kind and not isinstance(found, torch.Tensor) and not _scored(data):
            found = _outputs(flat, inputs, training=True)
    except Exception:  # the run itself reports an error of the model
        return
    if isinstance(found, torch.Tensor):
        _require_shape(kind, tuple(found.shape), tuple(targets.shape), None if data.classes is None else _labels(data))
    elif kind:
        raise UserError(
            f"model: expected outputs as one tensor, found a {type(found).__name__}; return the scores alone, "
            f"outputs[0] or outputs.logits for example"
        )
    if given:
        with deterministic(flat.device), torch_seed(0, "loss"), torch.no_grad():
            doubt = require_mean(loss, found, targets)
        if doubt:
            warnings.warn(f"{doubt}; use .mean()", stacklevel=4)


def _outputs(flat: FlatModel, inputs: torch.Tensor, training: bool = False) -> Any:
    """Return what a copy of the model answers: a model may keep what it was given."""
    with deterministic(flat.device), torch_seed(0, "outputs"), torch.no_grad():
        return copy.deepcopy(flat.model).train(training)(inputs)


def _scored(data: Federated) -> bool:
    return data.y_test is not None or data.validation is not None or data.client_test is not None


def _labels(data: Federated) -> int:
    """Return the largest label that occurs, plus one: data may name more classes, of which no loss needs an output."""
    return 1 + max(int(y.max()) for y in (data.y, data.y_test) if y is not None and len(y))


def _require_shape(kind: str, shape: tuple[int, ...], wanted: tuple[int, ...], classes: int | None) -> None:
    """Raise for outputs that are not shaped like the targets, or are fewer than the classes."""
    if kind in ("mse", "huber", "bce") and shape != wanted:
        fix = "write y[:, None]" if shape == (*wanted, 1) else "reshape them"
        raise UserError(
            f"model: expected outputs of shape {shape_text(wanted)}, as the targets have, found "
            f"{shape_text(shape)}; {fix}, or give whole numbers for classes"
        )
    if kind == "cross-entropy" and classes is not None and len(shape) == 1:
        raise UserError(
            f"model: expected outputs of shape (batch, {classes}), one per class, found {shape_text(shape)}; widen its "
            f"last layer"
        )
    if kind == "cross-entropy" and classes is not None and len(shape) == 2 and shape[1] < classes:
        raise UserError(f"model: expected {classes} outputs, one per class, found {shape[1]}; widen its last layer")


def _require_two(loss: Any) -> None:
    """Raise if a loss cannot be called with outputs and targets."""
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):  # It has none that can be read.
        return
    try:
        signature.bind(None, None)
    except TypeError:
        raise UserError(
            f"loss {_short(loss)}: expected a function of two arguments, loss(model(x), y), found {signature}"
        ) from None


def require_mean(loss: Loss, outputs: Any, targets: torch.Tensor) -> str:
    """Raise unless a loss gives one finite number for outputs and targets; return a warning if it is a sum."""
    name = f"loss {kind_of(loss) or _short(loss)}"
    try:
        value: Any = loss(outputs, targets)
    except Exception as error:
        kind = str(targets.dtype).removeprefix("torch.")
        shape = f" of shape {shape_text(outputs.shape)}" if isinstance(outputs, torch.Tensor) else ""
        raise UserError(
            f"{name}: expected loss(model(x), y) of outputs{shape} and {kind} targets of shape "
            f"{shape_text(targets.shape)}, found {one_line(error)}"
        ) from error
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        many = isinstance(value, torch.Tensor)
        found = f"shape {tuple(value.shape)}; add .mean()" if many else f"a {type(value).__name__}; compute it by torch"
        raise UserError(f"{name}: expected one number as a tensor, the mean over a batch, found {found}")
    if not math.isfinite(value):
        if kind_of(loss):  # The run itself reports numbers that overflow.
            return ""
        raise UserError(f"{name}: expected a finite number at the first model, found {float(value):g}; correct it")
    with suppress(Exception):  # It may not take twice as many rows.
        twice = float(loss(torch.cat([outputs, outputs]), torch.cat([targets, targets])))
        if float(value) and math.isclose(twice, 2 * float(value), rel_tol=1e-4):
            return f"{name}: expected the mean over a batch, found a sum: rates and scores depend on the batch size"
    return ""


def _short(loss: Any) -> str:
    return loss_name(loss).partition(":")[2]


def shape_text(shape: tuple[int, ...]) -> str:
    """Return the shape of a batch in words, its first axis by name."""
    return f"({', '.join(['batch', *map(str, shape[1:])])})"


def loss_name(loss: Any) -> str:
    """Return the qualified name of a loss, with its plain settings if it is an object.

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
    "ResNet": "torch.nn.modules.container:Sequential",
    "RowConv": "fedspeed.layers:RowConv",
    "TrimmedConv": "fedspeed.trim:TrimmedConv",
    "Vector": "fedspeed.models:Vector",
}
"""Names of this package's layers in run directories and on Flower devices: the name under which each was stored first,
wherever it is defined now. Do not change an entry: a run of such a model could not be continued."""


def place(thing: Any) -> str:
    """Return `module:name` of a class or function; a layer of this package has its name in `STORED_NAMES`."""
    found = f"{thing.__module__}:{thing.__qualname__}"
    ours = thing.__module__.partition(".")[0] == __name__.partition(".")[0]
    return STORED_NAMES.get(thing.__qualname__, found) if ours else found
