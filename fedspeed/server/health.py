"""Health of a run: numbers measured besides its scores that show trouble, `Record.signs`; a healthy round has none.

Numbers are recorded where they are beyond those of a healthy run; `runs/diagnosis.py` interprets them. They cost
a norm of each server vector per round and a look at the weights in rounds 4, 8, 16, ..., with one gradient where some
of them hardly moved; only a model that scores no better than guessing is looked into, with one slice of the test set.
They change no bit of the run.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ..client.batch_norm import full_vector, method_part
from ..client.evaluate import Score, slices
from ..client.losses import bce, has_accuracy, is_entropy
from ..client.trees import all_finite, grown, large, named, norm, one_thread, sum_dtype
from ..errors import Diverged
from ..utils.devices import to_device
from ..utils.random import torch_seed

if TYPE_CHECKING:
    from ..client.work import Work
    from ..methods.base import Method

FLAT = 0.02
"""The spread of logits over pictures below which probabilities are the same for all of them to two digits."""
LOST = 0.1
"""The part of the first model's spread below which it was lost: some start with outputs that are nearly alike."""
STILL = 1e-4
"""How far a weight has moved, relative to itself, if it has only been scaled and rounded; a slow one may have, too."""
FEW = 50
"""Samples of which a gradient is taken, to tell weights that it reaches, however slowly they move."""
FIRST = 2
EARLY = 5
"""Rounds at first in which outputs may be alike, and in which loss and accuracy may be those of guessing."""


class HealthMonitor:
    """Monitor that measures every round of a run; norms are large compared with that of x0, the first model."""

    def __init__(self, work: Work, x0: torch.Tensor) -> None:
        self.work, self.x0 = work, x0
        with one_thread():
            self.most = large(x0)
        self._client: dict[str, float] = {}
        data = work.data
        self.validation = not slices(data, False)
        self.scored = data.validation_batch if self.validation else data.test_batch
        held = data.validation if self.validation else None
        labels = data.y_test if held is None else data.y[to_device(held, data.y.device)]
        self.labels = labels.numel() if labels is not None and has_accuracy(data, work.loss) else 0
        shares = (torch.unique(labels, return_counts=True)[1] / self.labels).tolist() if self.labels else []
        self.likely = max(shares, default=0.0)
        if labels is not None and self.labels and work.loss is bce:
            share = (labels > 0.5).reshape(len(labels), -1).cpu().double().mean(0)
            self.likely = float(torch.maximum(share, 1 - share).mean())  # each label's more frequent value is guessed
        self.entropy = -math.fsum(p * math.log(p) for p in shares)
        self.guess = math.log(data.classes) if data.classes and is_entropy(work.loss) else None

    def client(self, state: Any) -> None:
        """Measure the new state of a client, the first of a round whose reply counts."""
        with one_thread():
            self._client = self._large("client", method_part(state))

    def round(
        self, t: int, server: Any, train_loss: float, scores: tuple[Score | None, Score | None]
    ) -> dict[str, float]:
        """Return the signs of round t = 1, 2, ..."""
        score = scores[1 if self.validation else 0]
        found, self._client = self._client, {}
        with one_thread():
            found |= self._large("server", method_part(server))
            if t >= 4 and t & (t - 1) == 0:
                found |= self._untrained(server)
            if score is not None and t > FIRST and self._suspicious(score):
                found |= self._inside(full_vector(server))
        if t > EARLY:
            found |= self._guessing(train_loss, score)
        return {name: float(f"{value:.4g}") for name, value in found.items()}

    def _large(self, whose: str, tree: Any) -> dict[str, float]:
        return {f"norm {name}": size for name, size in grown(whose, tree, self.most).items()}

    def _untrained(self, server: Any) -> dict[str, float]:
        """Return weights that were scaled, by weight decay, and never trained, while others were: no gradient reaches
        them. One that hardly moved but has a gradient learns (LoRA's A, a block that starts as its shortcut)."""
        flat, first, x = self.work.flat, self.x0.to(server.x.dtype), server.x
        moved = [_moved(a, b) for a, b in zip(x.split(flat.sizes), first.split(flat.sizes), strict=True)]  # type: ignore[no-untyped-call]
        most = max((m for m in moved if m < math.inf), default=math.inf)
        layers = zip(flat.names, flat.shapes, moved, strict=True)
        still = {name: m for name, shape, m in layers if len(shape) > 1 and m <= min(STILL, 1e-3 * most)}
        unreached = self._unreached(full_vector(server), list(still)) if still else []
        return {f"untrained {name}": still[name] for name in unreached}

    def _unreached(self, x: torch.Tensor, names: list[str]) -> list[str]:
        """Return the weights that the loss needs and that no gradient reaches. A weight that nothing uses (its value
        may be any) is not one: it has no gradient by design."""
        flat = self.work.flat
        weights = dict(zip(flat.names, flat.parameters, strict=True))
        some = [weights[name] for name in names]
        try:
            flat.load(x.to(flat.dtype, copy=True))
            flat.model.eval()
            batch = self._few()
            with torch.enable_grad():
                value = self._loss(*batch)
            grads = torch.autograd.grad(value, some, allow_unused=True)
            return [
                name
                for name, p, g in zip(names, some, grads, strict=True)
                if (self._needs(p, float(value.detach()), batch) if g is None else not bool(g.any()))
            ]
        except Exception:  # a model or a loss that cannot be asked here; the run continues without this sign
            return []

    def _needs(self, p: nn.Parameter, before: float, batch: tuple[torch.Tensor, torch.Tensor]) -> bool:
        """Return whether the loss changes with the values of a parameter."""
        kept = p.data
        p.data = torch.randn(p.shape, generator=torch.Generator().manual_seed(0)).to(kept)
        try:
            with torch.no_grad():
                return float(self._loss(*batch)) != before
        finally:
            p.data = kept  # The run continues with its own values, whatever the loss did.

    def _few(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return some samples that are scored, or training samples where none are."""
        data, pieces = self.work.data, slices(self.work.data, self.validation)
        if pieces:
            return self.scored(0, min(FEW, pieces[0][1]))
        return data.batch(np.arange(min(FEW, len(data.y))))

    def _loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch_seed(0, "symptoms"):
            return self.work.loss(self.work.flat.model(inputs), targets)

    def _suspicious(self, score: Score) -> bool:
        """Return whether outputs may be the same for every input: then the loss is at least the labels' entropy."""
        if self.guess is not None:
            return not score.loss < 0.99 * self.entropy
        return score.accuracy <= 1.02 * self.likely

    def _inside(self, x: torch.Tensor) -> dict[str, float]:
        """Return the spread of the outputs over some pictures if it is too small, and the first layer of zeros."""
        dead = list[str]()

        def look(name: str, given: Any, output: Any) -> None:
            if not dead and _is_zero(output) and not any(map(_is_zero, given)):
                dead.append(name)

        hooks = []
        stop = slices(self.work.data, self.validation)[0][1]
        try:
            for name, module in self.work.flat.model.named_modules():
                hooks.append(module.register_forward_hook(lambda _, a, b, name=name: look(name, a, b)))
            wide = self._spread(x, stop)
        except Exception:  # a model that cannot be looked into; the run continues without this sign
            return {}
        finally:
            for hook in hooks:
                hook.remove()
        found = {f"zeros from {name}": float(stop) for name in dead}
        if wide < FLAT:
            first = torch.cat([self.x0, self.work.flat.statistics.first.to(self.x0)])
            if wide < LOST * self._spread(first, stop):
                return {"spread of outputs": wide} | found
        return found

    def _spread(self, x: torch.Tensor, stop: int) -> float:
        """Return the spread of the outputs at x for the first samples that are scored."""
        flat = self.work.flat
        with torch_seed(0, "symptoms"), torch.no_grad():
            flat.load(x.to(flat.dtype, copy=True))
            flat.model.eval()
            inputs, _ = self.scored(0, stop)
            return spread(flat.model(inputs))

    def _guessing(self, train_loss: float, score: Score | None) -> dict[str, float]:
        """Return the loss of guessing if a loss is above it, and the accuracy of guessing if it is not exceeded."""
        found = {}
        if self.guess is not None and not (train_loss <= self.guess and (score is None or score.loss <= self.guess)):
            found["loss of guessing"] = self.guess
        noise = 2 * math.sqrt(self.likely * (1 - self.likely) / max(1, self.labels))
        if score is not None and self.labels and score.accuracy <= self.likely + noise:
            found["accuracy of guessing"] = self.likely
        return found


def server_diverged(method: Method, server: Any, t: int, lr: float) -> Diverged:
    """Return the error for a server step in round t + 1 that gives NaN or Inf; uploads were checked before."""
    bad = [name for name, a in named("", method_part(server)) if not all_finite((a,))]
    what = "the server model" if "x" in bad else f"the server's {bad[0]}"
    rate = method.fields().get("eta_g")
    server_rate = f" (eta_g, now {rate:g})" if rate else ""
    return Diverged(
        f"{type(method).__name__}: {what} diverged (NaN or Inf) in round {t + 1}; "
        f"try a lower server rate{server_rate} or a lower --lr (now {lr:.4g}): the mean of what clients "
        f"sent is finite, the server's {', '.join(bad)} after its step not"
    )


def spread(logits: torch.Tensor) -> float:
    """Return how much logits, (pictures, classes), differ between pictures, up to a constant per picture.

    Example:
        >>> spread(torch.tensor([[0.0, 2.0], [5.0, 7.0]]))
        0.0
    """
    if logits.ndim != 2:
        return math.inf
    centred = logits.to(sum_dtype(logits))
    centred = centred - centred.mean(1, keepdim=True)
    return float((centred - centred.mean(0)).square().mean().sqrt())


def _moved(now: torch.Tensor, first: torch.Tensor) -> float:
    """Return the distance of `now` from the line through `first`, relative to ||first||."""
    size = float(first @ first)
    if not size:
        return math.inf if norm(now) else 0.0
    return norm(now - float(now @ first) / size * first) / math.sqrt(size)


def _is_zero(a: Any) -> bool:
    return isinstance(a, torch.Tensor) and a.is_floating_point() and a.numel() > 0 and not bool(a.any())
