"""Personalised scores: the server's model after some local steps of a client, on that client's test part.

It is an evaluation, not a method: the model that was tuned is thrown away, and no random stream of training is read.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from ..methods import FedAvg
from ..utils.files import key
from ..utils.random import batch_order, rng
from .evaluate import Score, own_score
from .local_loop import Oracle, Steps
from .work import Work


def personalised(work: Work, x: torch.Tensor, client: int, t: int, lr: float) -> Score:
    """Return a client's score of the server's model after `personal_steps` steps `x -= lr * (grad(x) + wd * x)`.

    Steps follow the gradient, whatever the method is, on minibatches of the rows that the client trains on, with the
    plan's local optimiser, batch size, augmentation, weight decay and clipping. Running statistics of batch norm begin
    as the server's.

    Args:
        x: the server's full vector.
        t: the round, 0 is the first; minibatches are drawn by (seed, round, client).
        lr: the local rate of that round.
    """
    data, flat, plan = work.data, work.flat, work.plan
    if not np.diff(data.scored.offsets[client : client + 2])[0]:
        return Score(math.nan, math.nan)
    plain, rows, about = replace(work, method=FedAvg()), data.rows(client), (t, client)
    stream = rng(plan.seed, "personalised augment", *about) if data.pipeline.random else None
    masks = key(plan.seed, "personalised masks", *about) % 2**62
    batches = key(plan.seed, "personalised", *about)
    oracle, step_ = Oracle(plain, []), Steps(plain)
    flat.load(x)  # with its running statistics, if there are any
    flat.model.train()
    own = x[: flat.d].clone()
    for k, positions in enumerate(batch_order(len(rows), plan.batch_size, plan.personal_steps, batches), 1):
        oracle.next_step(*data.batch(rows[positions], stream), mask_seed=masks + k)
        step_(own, oracle(own), lr)
    return own_score(flat, own, data, work.loss, client)
