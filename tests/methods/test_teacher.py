"""A teacher in the gradient oracle, on both engines: against softmax regression by hand, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from federations import Softmax, package
from torch import nn

from fedspeed import FedAvg, FedGMT, Plan, UserError, simulate
from fedspeed.data.federated import Federated
from fedspeed.utils.files import key
from fedspeed.utils.random import batch_order

PROBLEM = Softmax(equal=6)
PLAN = Plan(rounds=1, active=3, local_steps=2, batch_size=6, lr=0.1, weight_decay=0.0, backend="serial")
both = pytest.mark.parametrize("engine", ["loop", "block"])
TEACHER = torch.from_numpy(np.random.default_rng(5).normal(size=12))


@dataclass(frozen=True)
class Asks(FedAvg):
    """Asks the oracle at every step and writes the answers down: the gradient of the loss alone, and with a teacher."""

    given: dict[str, Any] = field(default_factory=dict, metadata={"allowed": None})
    log: list[Any] = field(default_factory=list, metadata={"allowed": None}, hash=False)
    fraction: float = field(default=1.0, metadata={"allowed": None})
    block_safe = True

    def direction(self, x, grad, down, client):
        plain = grad(x, self.fraction).clone()
        pulled = grad(x, self.fraction, **self.given)
        self.log.append((x.clone(), plain, pulled.clone()))
        return plain


def answers(engine, given, problem=PROBLEM, model=None, fraction=1.0, data=None):
    """Points and gradients of the first step: (clients, d) each, and the first record."""
    method = Asks(given=given, log=[], fraction=fraction)
    plan = Plan.from_fields({**PLAN.fields(), "engine": engine, "local_steps": 1})
    with simulate(method, model or problem.model(), data or problem.federated(), plan) as run:
        (record,) = run
    rows = [[a.reshape(-1, a.shape[-1]) for a in one] for one in method.log]
    if engine == "block":  # without those that are run alone as well, to see whether they agree
        rows = [one for one, (x, *_) in zip(rows, method.log, strict=True) if x.ndim == 2]
    return [torch.cat(column) for column in zip(*rows, strict=True)], record


@both
@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize(("pull", "tau"), [(1.0, 3.0), (0.7, 0.5)])
def test_the_gradient_is_that_of_softmax_regression_by_hand(engine, pull, tau, fraction):
    """Every client's term, of the first part of its minibatch; a pass forward counts as a third of a gradient."""
    (x, plain, pulled), record = answers(engine, {"teacher": TEACHER, "pull": pull, "tau": tau}, fraction=fraction)
    _, _, rows = PROBLEM.arrays()
    assert record.grad_evals == pytest.approx(3 * fraction * (1 + 1 + 1 / 3))
    found = {tuple(np.round(g, 9)) for g in (pulled - plain).numpy()}
    truth = []
    for i in record.cohort:
        part = batch_order(6, 6, 1, key(PLAN.seed, "batches", 0, i))[0][: round(6 * fraction)]
        truth.append(pull * tau**2 * PROBLEM.kl_gradient(rows[i][part], x[0].numpy(), TEACHER.numpy(), tau))
    assert found == {tuple(np.round(g, 9)) for g in truth}
    assert min(np.abs(g).max() for g in truth) > 1e-2


@both
def test_no_pull_where_the_teacher_is_the_model_and_none_asked(engine):
    start = torch.cat([p.detach().reshape(-1) for p in PROBLEM.model().parameters()])
    (_, plain, pulled), _ = answers(engine, {"teacher": start, "pull": 5.0, "tau": 2.0})
    torch.testing.assert_close(pulled, plain, rtol=0, atol=1e-14)
    (_, plain, pulled), record = answers(engine, {"teacher": TEACHER, "pull": 0.0})
    assert torch.equal(pulled, plain)
    assert record.grad_evals == 6


@both
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_any_module_and_one_dropout_mask_for_teacher_and_model(engine, dropout):
    """Through autograd in the loop and torch.func in the block; a central difference of the KL is the truth."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(dropout), nn.Linear(5, 3)).double()
    start = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    (_, plain, pulled), _ = answers(engine, {"teacher": start, "pull": 5.0}, model=model)
    torch.testing.assert_close(pulled, plain, rtol=0, atol=1e-13)  # the same mask: nothing to tell them apart
    if dropout:
        return
    e = start + 0.5 * torch.from_numpy(np.random.default_rng(1).normal(size=len(start)))
    (x, plain, pulled), record = answers(engine, {"teacher": e, "pull": 0.8, "tau": 2.0}, model=model)
    inputs = PROBLEM.federated().x
    found = {}
    for i in record.cohort:
        own = inputs[torch.from_numpy(PROBLEM.federated().rows(i))]
        towards = torch.from_numpy(np.random.default_rng(2).normal(size=len(start)))
        values = [kl(model, x[0] + s * 1e-6 * towards, e, own, 2.0) for s in (1, -1)]
        found[i] = 0.8 * 4 * (values[0] - values[1]) / 2e-6
    slopes = sorted(((pulled - plain) @ towards).tolist())
    np.testing.assert_allclose(slopes, sorted(found.values()), rtol=1e-6)


def kl(model, x, e, inputs, tau) -> float:
    """Mean KL of the probabilities of two vectors, in NumPy from the logits."""

    def probabilities(v):
        nn.utils.vector_to_parameters(v, model.parameters())
        with torch.no_grad():
            z = model(inputs).numpy() / tau
        z = np.exp(z - z.max(1, keepdims=True))
        return z / z.sum(1, keepdims=True)

    p, q = probabilities(e), probabilities(x)
    return float((p * np.log(p / q)).sum(1).mean())


@both
@pytest.mark.parametrize("precision", ["full", "bfloat16"])
def test_in_any_precision_the_teacher_does_not_stand_in_for_the_model(precision, engine):
    """Autocast remembers the weights it has cast: those of a teacher have no gradient, and are not the model's."""
    model, plan = PROBLEM.model().float(), Plan.from_fields({**PLAN.fields(), "engine": engine, "precision": precision})
    found = []
    for gamma in (0.0, 1e-9):
        with simulate(FedGMT(gamma=gamma), model, PROBLEM.federated(), plan) as run:
            (record,) = run
            found.append(run.x)
            assert record.grad_evals == (6 if gamma == 0 else 8)  # exactly, no sum of thirds
    assert (found[0] - run.x0).norm() > 0.01
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-6)


@both
def test_the_loss_that_is_recorded_is_the_loss(engine):
    plan = Plan.from_fields({**PLAN.fields(), "engine": engine, "local_steps": 1, "rounds": 2})
    runs = [list(package(PROBLEM, FedGMT(gamma=gamma, lam=1e9, alpha=0.0), plan)) for gamma in (0.0, 9.0)]
    assert runs[0][0].train_loss == pytest.approx(runs[1][0].train_loss, rel=1e-14)


# What is refused


@both
def test_data_without_classes(engine):
    x = np.random.default_rng(0).normal(size=(12, 4))
    data = Federated.from_arrays(x, x[:, :2], list(np.arange(12).reshape(3, 4)))
    with pytest.raises(
        UserError, match=r"^FedGMT: grad\(x, teacher=...\) compares class probabilities, and these data"
    ):
        simulate(FedGMT(), nn.Linear(4, 2).double(), data, loss=nn.functional.mse_loss, active=3, engine=engine).step()
    simulate(
        FedGMT(gamma=0), nn.Linear(4, 2).double(), data, loss=nn.functional.mse_loss, active=3, engine=engine
    ).step()


@both
def test_outputs_that_are_no_classes(engine):
    def loss(output, target):
        return (output.squeeze(1) - target).square().mean()

    with pytest.raises(UserError, match=r"expected outputs of shape \(batch, classes\).*found of shape \(6, 1\)"):
        simulate(FedGMT(), nn.Linear(4, 1).double(), PROBLEM.federated(), PLAN, loss=loss, engine=engine).step()


@both
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"teacher": TEACHER, "pull": -1.0}, "pull must be a number >= 0, got -1.0"),
        ({"teacher": TEACHER, "pull": float("nan")}, "pull must be a number >= 0, got nan"),
        ({"teacher": TEACHER, "pull": "1"}, "pull must be a number >= 0, got '1'"),
        ({"teacher": TEACHER, "tau": 0.0}, "tau must be a number > 0, got 0.0"),
        ({"teacher": TEACHER, "tau": True}, "tau must be a number > 0, got True"),
        ({"teacher": TEACHER[:5]}, r"must be one vector for all clients, torch.float64 of shape \(12\), got .* \(5,\)"),
        ({"teacher": TEACHER.expand(3, 12)}, r"one vector for all clients, .* got torch.float64 of shape \(3, 12\)"),
        ({"teacher": TEACHER.float()}, "one vector for all clients, .* got torch.float32"),
        ({"teacher": [0.0] * 12}, "one vector for all clients, .* got \\[0.0"),
    ],
    ids=str,
)
def test_a_teacher_that_makes_no_sense(given, says, engine):
    with pytest.raises(UserError, match=f"Asks: grad.x, teacher=....: .*{says}"):
        answers(engine, given)


def test_a_teacher_made_of_the_whole_block_is_refused():
    """As the loop would not have it: a row alone has another one."""

    @dataclass(frozen=True)
    class Mixes(FedAvg):
        block_safe = True

        def direction(self, x, grad, down, client):
            return grad(x, teacher=x.reshape(-1, x.shape[-1]).mean(0) + x.numel())

    with pytest.raises(UserError, match=r"^Mixes\.direction does on a block of 3 clients .*the teacher of gradient 1"):
        package(PROBLEM, Mixes(), PLAN, engine="block").step()
