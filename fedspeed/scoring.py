"""What is scored after a round: test and validation set, and every client's data where the plan asks for it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .client_metrics import ClientMetrics
from .evaluate import Score, slices

if TYPE_CHECKING:
    import torch

    from .backends import Whole
    from .client import Reply, Work
    from .clientscores import Sums
    from .data.federated import Federated


class Scored(NamedTuple):
    """The scores of a round; None where there is none."""

    test: Score | None = None
    validation: Score | None = None
    clients: ClientMetrics | None = None


def score_round(backend: Whole, work: Work, x: torch.Tensor, t: int, replies: list[Reply]) -> Scored:
    """Scores of the server's vector after t rounds (`carried.whole`), and of the clients' own, in their replies."""
    plan, data = work.plan, work.data
    due, each = t % plan.eval_every == 0 or t == plan.rounds, plan.measures(t)
    if not due and not each:
        return Scored()
    vector = x.to(work.flat.dtype, copy=True)
    test = backend.evaluate(vector) if due and slices(data, False) else None
    validation = backend.evaluate(vector, validation=True) if due and slices(data, True) else None
    if not each:
        return Scored(test, validation)
    own = {reply.job.client: reply.facts.own for reply in replies} if plan.measures(t, own=True) else None
    return Scored(test, validation, measured(backend.evaluate_clients(vector), data, t, own))


def measured(parts: Iterable[Sums], data: Federated, t: int, own: dict[int, Score | None] | None) -> ClientMetrics:
    """The scores of round t, from the slices' sums; `own` are the active clients' own, None if not asked for."""
    m = data.clients
    loss, correct = np.zeros(m), np.zeros(m)
    for part in parts:
        here = slice(part.first, part.first + len(part.loss))
        loss[here] += part.loss
        correct[here] += part.right
    found = ClientMetrics(np.array([t]), data.sizes, (loss / data.sizes)[None], (correct / data.sizes)[None])
    if own is None:
        return found
    scores = np.full((2, 1, m), math.nan)
    for client, score in own.items():
        if score is not None:  # a back end from elsewhere may have lost it
            scores[:, 0, client] = score
    return found._replace(own_loss=scores[0], own_accuracy=scores[1])
