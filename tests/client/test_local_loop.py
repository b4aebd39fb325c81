"""The local loop: what a step computes, what all oracle calls of a step share, what is counted, what is said."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn

from fedspeed import FedAvg, Federated, Plan, UserError, simulate
from fedspeed.client.flat_model import FlatModel
from fedspeed.client.local_loop import run_client
from fedspeed.client.work import Job, Reply, Work
from fedspeed.data.augment import Pipeline
from fedspeed.utils.files import key
from fedspeed.utils.random import batch_order


@dataclass(frozen=True)
class Probe(FedAvg):
    """FedAvg whose direction is written down in a test: `rule(x, grad, down)`; what it returns is kept in `log`."""

    rule: object = None
    mixed: float = 1.0
    shrunk: float = 0.0
    log: list = field(default_factory=list, compare=False)

    @property
    def mix(self) -> float:
        return self.mixed

    @property
    def shrink(self) -> float:
        return self.shrunk

    def direction(self, x, grad, down, client):
        direction = self.rule(x, grad, down) if self.rule else grad(x)
        self.log.append(direction.clone())
        return direction


class Seen(nn.Module):
    """A linear model that keeps the batches it was given."""

    def __init__(self, features: int, bias: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(features, 1, bias=bias).double()
        self.batches: list[torch.Tensor] = []
        nn.init.ones_(self.linear.weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.batches.append(inputs.clone())
        return self.linear(inputs.flatten(1))


def average_output(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """A loss that is linear in the parameters: its gradient is the mean input, at every point."""
    return output.mean()


def one_client(x: np.ndarray, pipeline: Pipeline | None = None) -> Federated:
    return Federated.from_arrays(x, np.zeros(len(x)), [range(len(x))], pipeline=pipeline)


def rows(n: int, features: int = 2, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, features))


def local(
    method, x: np.ndarray, model: nn.Module | None = None, lr: float = 0.1, t: int = 0, no_decay=(), **settings
) -> Reply:
    """The reply of the only client, which owns x; every step takes all rows unless told otherwise."""
    plan = Plan(**{"batch_size": len(x), "local_epochs": 1, "weight_decay": 0.0, **settings})
    flat = FlatModel(model or Seen(x.shape[1]), no_decay)
    data = one_client(x).to("cpu", flat.dtype)
    down = method.broadcast(method.init_server(flat.x.clone()))
    return run_client(Work(method, flat, average_output, data, plan), Job(0, t, lr), down, method.init_client(flat.x))


def test_plain_steps_are_gradient_descent():
    x = rows(5)
    reply = local(FedAvg(), x, local_steps=3)
    np.testing.assert_allclose(reply.up.D.numpy(), -3 * 0.1 * x.mean(0), atol=1e-15)
    assert (reply.facts.K, reply.facts.n, reply.facts.grad_evals) == (3, 5, 3)


def test_weight_decay_is_at_the_unperturbed_iterate():
    """The oracle is asked far away; on a linear loss only a decay taken there could notice."""
    x = rows(5)
    for rule in (None, lambda x, grad, down: grad(x + 100)):
        point = np.ones(2)
        for _ in range(4):
            point = point - 0.1 * (x.mean(0) + 0.5 * point)
        reply = local(Probe(rule=rule), x, local_steps=4, weight_decay=0.5)
        np.testing.assert_allclose(reply.up.D.numpy() + 1, point, atol=1e-14)


@pytest.mark.parametrize(("outside", "decay"), [(False, 0.3 * 0.5), (True, 0.5)])
def test_weight_decay_is_part_of_the_mixed_gradient(outside, decay):
    """x -= lr (mix g + mix wd x); as released, outside the mix, x -= lr (mix g + wd x)."""
    x, point = rows(5), np.ones(2)
    for _ in range(4):
        point = point - 0.1 * (0.3 * x.mean(0) + decay * point)
    method = Probe(rule=lambda x, grad, down: 0.3 * grad(x), mixed=0.3)
    reply = local(method, x, local_steps=4, weight_decay=0.5, decay_outside_mix=outside)
    np.testing.assert_allclose(reply.up.D.numpy() + 1, point, atol=1e-14)


def test_the_no_decay_group_is_left_alone():
    """Gradient 0: weights shrink by (1 - lr wd) a step, the bias stays."""
    model = Seen(2, bias=True)
    nn.init.ones_(model.linear.bias)
    zero = Probe(rule=lambda x, grad, down: 0 * grad(x), mixed=0.3)
    reply = local(zero, rows(5), model, local_steps=3, weight_decay=0.5, no_decay=("bias",))
    shrunk = (1 - 0.1 * 0.3 * 0.5) ** 3
    np.testing.assert_allclose(reply.up.D.numpy() + 1, [shrunk, shrunk, 1], atol=1e-14)


def clipped(v: np.ndarray, limit: float) -> np.ndarray:
    return v * min(1, limit / np.linalg.norm(v))


def test_clipping_the_gradient_clips_each_oracle_call():
    """Two calls a step, their sum scaled, a prox term beside them: only what the oracle returns is clipped."""
    x = rows(5) + 3
    g = clipped(x.mean(0), 0.2)
    assert np.linalg.norm(x.mean(0)) > 0.2
    method = Probe(rule=lambda x, grad, down: 2 * grad(x) + grad(x + 1) + 5 * (x - down.x))
    point = np.ones(2)
    for _ in range(3):
        point = point - 0.1 * (3 * g + 5 * (point - 1) + 0.5 * point)
    reply = local(method, x, local_steps=3, clip=0.2, weight_decay=0.5)
    np.testing.assert_allclose(reply.up.D.numpy() + 1, point, atol=1e-14)


def test_clipping_as_released_clips_all_but_multiples_of_x():
    """direction = g + s (x - c): g - s c is clipped, s x is not, nor is weight decay."""
    x, s = rows(5) + 3, 0.7
    method = Probe(rule=lambda x, grad, down: grad(x) + s * (x - down.x), shrunk=s)
    point = np.ones(2)
    for _ in range(3):
        point = point - 0.1 * (clipped(x.mean(0) - s * np.ones(2), 0.2) + s * point + 0.5 * point)
    reply = local(method, x, local_steps=3, clip=0.2, clip_mode="released", weight_decay=0.5)
    np.testing.assert_allclose(reply.up.D.numpy() + 1, point, atol=1e-14)


@pytest.mark.parametrize("mode", ["gradient", "released"])
def test_a_wide_clip_changes_nothing(mode):
    x = rows(5)
    free, wide = (local(FedAvg(), x, local_steps=3, clip=clip, clip_mode=mode) for clip in (0.0, 1e6))
    np.testing.assert_allclose(free.up.D.numpy(), wide.up.D.numpy(), atol=1e-15)


def test_every_call_of_a_step_has_its_own_buffer():
    def rule(x, grad, down):
        a, b = grad(x), grad(x)
        kept = b.clone()
        a.mul_(1000)  # mine to overwrite
        assert torch.equal(b, kept)
        return b

    x = rows(4)
    np.testing.assert_allclose(local(Probe(rule=rule), x, local_steps=2).up.D.numpy(), -0.2 * x.mean(0), atol=1e-15)


class Dropping(nn.Module):
    """Dropout over many features of one output: the gradient shows the mask."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.drop, self.linear = nn.Dropout(0.5), nn.Linear(features, 1, bias=False).double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(self.drop(inputs))


def masks(steps: int = 4, t: int = 0, seed: int = 0, samples: int = 1) -> list[np.ndarray]:
    """Dropout masks of successive steps of a client that stands still, and a check within each step."""

    def rule(x, grad, down):
        a, b = grad(x), grad(x + 3)  # linear in x: the point does not matter, the mask does
        assert torch.equal(a, b)
        seen.append((a != 0).numpy())
        return 0 * a

    seen: list[np.ndarray] = []
    local(Probe(rule=rule), np.ones((samples, 64)), Dropping(64), local_steps=steps, t=t, seed=seed)
    return seen


def test_one_dropout_mask_a_step_another_the_next():
    seen = masks()
    assert all(10 < mask.sum() < 54 for mask in seen)
    assert len({mask.tobytes() for mask in seen}) == 4


def test_masks_are_a_function_of_seed_round_and_step():
    again = masks()
    assert all(np.array_equal(a, b) for a, b in zip(masks(), again, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(masks(t=1), again, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(masks(seed=1), again, strict=True))


def test_all_calls_of_a_step_see_the_same_rows_with_the_same_augmentation():
    pictures = np.random.default_rng(0).normal(size=(6, 1, 4, 4))
    data = one_client(pictures, Pipeline(flip=0.5, padding=2, dtype=torch.float64))
    method = Probe(rule=lambda x, grad, down: grad(x) + grad(x + 1) + grad(x, 0.5))
    run = simulate(method, Seen(16), data, loss=average_output, rounds=1, active=1, local_epochs=2, batch_size=6)
    run.step()
    seen = run.work.flat.model.batches
    assert len(seen) == 6  # three calls in each of two steps
    for first, second, part in (seen[:3], seen[3:]):
        assert torch.equal(first, second)
        assert torch.equal(first[:3], part)
    ordered = [batch.flatten(1).sum(1).sort().values for batch in (seen[0], seen[3])]
    assert not torch.allclose(*ordered)  # the two epochs are cropped differently


def test_gradients_are_counted_in_fractions_of_a_minibatch():
    """Five rows in batches of 4 and 1: 0.5 takes 2 of 4, then the only one; 0.01 always takes one row."""
    x = rows(5)
    half = local(Probe(rule=lambda x, grad, down: grad(x, 0.5) + grad(x)), x, batch_size=4)
    assert half.facts.grad_evals == pytest.approx((2 / 4 + 1) + (1 + 1))
    one = local(Probe(rule=lambda x, grad, down: grad(x, 0.01)), x, batch_size=4)
    assert one.facts.grad_evals == pytest.approx(1 / 4 + 1)


def test_a_fraction_takes_the_first_rows():
    x = rows(5)
    order = batch_order(5, 4, 2, key(0, "batches", 0, 0))
    method = Probe(rule=lambda x, grad, down: grad(x, 0.5))
    local(method, x, batch_size=4)
    np.testing.assert_allclose(method.log[0].numpy(), x[order[0][:2]].mean(0), atol=1e-15)
    np.testing.assert_allclose(method.log[1].numpy(), x[order[1]].mean(0), atol=1e-15)


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"local_epochs": 2}, [3, 3, 1, 3, 3, 1]),
        ({"local_steps": 4}, [3, 3, 1, 3]),
        ({"local_epochs": 2, "local_steps": 1}, [3]),
        ({"local_epochs": 1, "batch_size": 100}, [7]),
    ],
)
def test_epochs_and_steps_keep_the_last_smaller_batch(settings, sizes):
    x = rows(7)
    run = simulate(FedAvg(), Seen(2), one_client(x), loss=average_output, **{"rounds": 1, "active": 1, "batch_size": 3}
                   | settings)  # fmt: skip
    assert run.step().grad_evals == len(sizes)
    seen = run.work.flat.model.batches
    assert [len(batch) for batch in seen] == sizes
    if sizes[:3] == [3, 3, 1]:  # an epoch takes every row once
        epoch = torch.cat(seen[:3]).numpy()
        np.testing.assert_array_equal(np.sort(epoch, 0), np.sort(x, 0))
    if len(sizes) == 6:  # in another order the next time
        assert not torch.equal(torch.cat(seen[:3]), torch.cat(seen[3:]))


def test_train_loss_is_the_mean_at_the_first_call_of_each_step():
    x = rows(5)
    method = Probe(rule=lambda x, grad, down: 0 * grad(x) + 0 * grad(x + 100))
    reply = local(method, x, local_steps=3)
    assert reply.facts.train_loss == pytest.approx(x.sum(1).mean(), abs=1e-14)


def test_drift_is_the_squared_distance_from_the_global_model():
    x = rows(5)
    assert local(FedAvg(), x, local_steps=3).facts.drift == pytest.approx(0.09 * (x.mean(0) ** 2).sum(), rel=1e-12)


def test_a_client_s_work_does_not_depend_on_who_ran_before():
    x = np.ones((12, 64))  # so that clients differ by their dropout alone
    data = Federated.from_arrays(x, np.zeros(12), [range(0, 4), range(4, 8), range(8, 12)])
    plan = Plan(rounds=1, active=3, batch_size=2, local_epochs=2, weight_decay=0.0)
    replies = {}
    for order in ((0, 1, 2), (2, 0, 1)):
        torch.manual_seed(len(replies))
        model = Dropping(64)
        nn.init.ones_(model.linear.weight)
        run = simulate(FedAvg(), model, data, plan, loss=average_output)
        down = run.method.broadcast(run.server)
        jobs = [Job(i, 0, 0.1) for i in order]
        replies[order] = {r.job.client: r.up.D for r in run.backend.run(jobs, down, run.client_state)}
    for i in range(3):
        assert torch.equal(replies[0, 1, 2][i], replies[2, 0, 1][i])
    assert not torch.equal(replies[0, 1, 2][0], replies[0, 1, 2][1])


def test_the_caller_s_generator_and_threads_are_left_alone():
    data = one_client(np.ones((4, 64)))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run = simulate(FedAvg(), Dropping(64), data, loss=average_output, rounds=3, active=1)
        torch.manual_seed(11)
        state = torch.get_rng_state()
        for _ in run:
            assert torch.equal(torch.get_rng_state(), state)
            assert torch.get_num_threads() == 2
        for _ in run.backend.run([Job(0, 0, 0.1)], run.method.broadcast(run.server), run.client_state):
            assert torch.get_num_threads() == 2  # also while a reply is looked at
            assert torch.equal(torch.get_rng_state(), state)
    finally:
        torch.set_num_threads(threads)


class Fragile(nn.Module):
    """Raises at one of its forward passes."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.linear, self.at, self.calls = nn.Linear(2, 1).double(), at, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.at:
            raise KeyError("no such layer\nand more")
        return self.linear(inputs)


def test_a_client_that_raises_names_method_round_client_and_step():
    data = Federated.from_arrays(rows(6), np.zeros(6), [range(0, 4), range(4, 6)])
    run = simulate(FedAvg(), Fragile(at=9), data, loss=average_output, rounds=9, active=2, local_steps=3)
    run.step()  # calls 1-6; client 0, the larger, runs first: calls 7-9 are its second round
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    with pytest.raises(UserError, match=r"FedAvg: round 2, client 0, step 3 of 3: KeyError: .*no such layer") as raised:
        run.step()
    assert "\n" not in str(raised.value)
    assert isinstance(raised.value.__cause__, KeyError)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("hook", ["start", "upload"])
def test_a_hook_that_raises_is_named_too(hook):
    class Broken(FedAvg):
        pass

    def fail(self, *_):
        raise IndexError("out of reach")

    setattr(Broken, hook, fail)
    with pytest.raises(UserError, match=r"Broken: round 1, client 0, step \d of 1: IndexError: out of reach"):
        simulate(Broken(), Seen(2), one_client(rows(3)), loss=average_output, rounds=1, active=1, local_epochs=1).step()


def test_a_model_that_does_not_fit_the_data_says_so():
    with pytest.raises(UserError, match=r"FedAvg: round 1, client 0, step 1 of 5: .*inputs of shape \(3,\)"):
        simulate(FedAvg(), Seen(2), one_client(rows(4, 3)), loss=average_output, rounds=1, active=1).step()


def test_linear_regression_with_squared_loss_is_gradient_descent():
    """One full-batch step a client and round, everybody active, equal sizes: gradient descent on the whole sum."""
    r = np.random.default_rng(0)
    A, x_star = r.normal(size=(20, 3)), np.array([1.0, -2.0, 3.0])
    b = A @ x_star
    model = nn.Sequential(nn.Linear(3, 1, bias=False), nn.Flatten(0)).double()
    w = model[0].weight.detach().numpy().ravel().copy()
    data = Federated.from_arrays(A, b, [range(0, 10), range(10, 20)])
    run = simulate(FedAvg(), model, data, loss=nn.functional.mse_loss, rounds=200, active=2, local_steps=1,
                   batch_size=10, lr=0.2, lr_decay=1.0, weight_decay=0.0)  # fmt: skip
    for record in run:
        w = w - 0.2 * 2 / 20 * A.T @ (A @ w - b)
        np.testing.assert_allclose(run.x.numpy(), w, atol=1e-12)
        assert record.test_accuracy is None
    np.testing.assert_allclose(run.x.numpy(), x_star, atol=1e-3)


@pytest.mark.parametrize("engine", ["loop", "block"])
def test_sixteen_bit_gradients_are_close_but_not_the_same(engine):
    """A switch that changes results beyond rounding: off by default, and worth about three digits."""
    r = np.random.default_rng(0)
    x = r.normal(size=(40, 16)).astype(np.float32)
    data = Federated.from_arrays(x, r.integers(0, 4, 40), list(np.arange(40).reshape(4, 10)))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    results = {}
    for precision in ("full", "bfloat16", "tf32"):
        run = simulate(FedAvg(), model, data, rounds=2, active=4, batch_size=5, precision=precision, engine=engine)
        for _ in run:
            pass
        results[precision] = run.x - run.x0
    full, half = results["full"], results["bfloat16"]
    assert 1e-4 < float((half - full).norm() / full.norm()) < 0.05
    torch.testing.assert_close(results["tf32"], full, rtol=0, atol=1e-2)
