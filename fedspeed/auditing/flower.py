"""Flower's strategies: `aggregate_fit` is theirs, clients are ours. Flower itself is not imported."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ..errors import UserError
from .adapters import Subject
from .reference import Reference, vectors
from .trace import Trace, vector


class Parameters(list[Any]):
    """A list of arrays that is also what Flower calls Parameters: `tensors` in NumPy's own format."""

    tensor_type = "numpy.ndarray"

    @property
    def tensors(self) -> list[bytes]:
        """Every array as the bytes of an .npy file."""
        found = []
        for array in self:
            file = io.BytesIO()
            np.save(file, array, allow_pickle=False)
            found.append(file.getvalue())
        return found


def parameters(flat: list[np.ndarray]) -> Parameters:
    """Vectors as a network's layers: each is cut into a matrix and a rest, so that a step per layer is seen.

    Example:
        >>> [a.shape for a in parameters([np.arange(6.0)])]
        [(2, 2), (2,)]
    """
    layers = Parameters()
    for x in flat:
        if len(x) > 4:
            layers += [x[:4].reshape(2, 2).copy(), x[4:].copy()]
        else:
            layers.append(x.copy())
    return layers


def flat(told: Any, like: list[np.ndarray], where: str) -> list[np.ndarray]:
    """The vectors of what a strategy returned: Parameters, or a list of arrays, shaped as those that were sent."""
    tensors = getattr(told, "tensors", None)
    try:
        arrays = [np.load(io.BytesIO(t), allow_pickle=False) for t in tensors] if tensors is not None else list(told)
        arrays = [np.asarray(a, dtype=np.float64) for a in arrays]
    except (TypeError, ValueError, EOFError):
        raise UserError(f"{where}: expected parameters or a list of arrays, found {type(told).__name__}") from None
    wanted = [a.shape for a in parameters(like)]
    found = [a.shape for a in arrays]
    if found != wanted:
        raise UserError(f"{where}: expected arrays of shapes {wanted}, found {found}")
    whole = np.concatenate([a.ravel() for a in arrays])
    return [
        vector(part, len(x), where)
        for part, x in zip(np.split(whole, np.cumsum([len(x) for x in like])[:-1]), like, strict=True)
    ]


class Flower(Subject):
    """A strategy: it is sent what clients of the method send, models in place of differences."""

    def run(self, thing: Any, reference: Reference) -> Trace:
        """All rounds; what the strategy returns is what clients are sent."""
        down = reference.method.broadcast(reference.server)
        sent = [a.numpy().copy() for a in vectors(down).values()]
        strategy = thing
        if isinstance(thing, type):
            strategy = self.made(thing, {"initial_parameters": parameters(sent)})
        trace = Trace()
        for t, cohort in enumerate(self.setting.cohorts):
            results = []
            for position, i in enumerate(cohort):
                up = [a.numpy().copy() for a in vectors(reference.turn(t, position, i, down)).values()]
                up[0] = up[0] + down.x.numpy() if len(up[0]) == self.setting.dim else up[0]
                reply = SimpleNamespace(
                    status=SimpleNamespace(code=0, message=""), parameters=parameters(up), num_examples=1, metrics={}
                )
                results.append((SimpleNamespace(cid=str(i), node_id=i), reply))
            with self.during("aggregate_fit", t):
                told = strategy.aggregate_fit(t + 1, results, [])
            told = told[0] if isinstance(told, tuple) and len(told) == 2 else told
            if told is None:
                raise UserError(f"{self.where('aggregate_fit', t)} returned None: it refused all replies")
            sent = flat(told, sent, self.where("aggregate_fit returned", t))
            down = type(down)(*(torch.from_numpy(a.copy()) for a in sent))
            for name, value in zip(vectors(down), sent, strict=True):
                trace.add(t + 1, None, name if name == "x" else f"state {name}", value)
        return trace
