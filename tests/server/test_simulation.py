"""The round loop: bits, records, weights, what a failed round leaves, and a federation of a million."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from federations import Softmax, package
from torch import nn

from fedspeed import METHODS, Diverged, FedAvg, Federated, FedSpeed, Plan, UserError, simulate
from fedspeed.methods.base import Round
from fedspeed.utils.devices import pick_device

PLAN = Plan(rounds=4, active=3, local_epochs=2, batch_size=4, weight_decay=0.01)


def with_(plan: Plan, **changes) -> Plan:
    return Plan.from_fields({**plan.fields(), **changes})


def average_output(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """A loss that is linear in the parameters: its gradient is the mean input, at every point."""
    return output.mean()


def line(weight: float = 0.0, dtype: torch.dtype = torch.float64) -> nn.Module:
    """x -> weight * x, one parameter."""
    model = nn.Linear(1, 1, bias=False).to(dtype)
    nn.init.constant_(model.weight, weight)
    return model


def uneven(test: bool = False) -> Federated:
    """Client 0 owns one row of 1, client 1 three of 2, client 2 two of -4: the mean inputs a client."""
    x = np.array([[1.0], [2.0], [2.0], [2.0], [-4.0], [-4.0]])
    return Federated.from_arrays(x, np.zeros(6), [[0], [1, 2, 3], [4, 5]], test=(x, np.zeros(6)) if test else None)


def timeless(run) -> list[dict]:
    return [{k: v for k, v in r.to_dict().items() if not k.endswith("seconds")} for r in run]


@pytest.mark.parametrize("name", sorted(METHODS))
def test_the_same_seed_gives_the_same_bits(name):
    full = with_(PLAN, active=7)  # which every method accepts
    runs = [package(Softmax(), METHODS[name](), full) for _ in range(2)]
    first, second = (timeless(run) for run in runs)
    assert first == second
    assert torch.equal(runs[0].server.x, runs[1].server.x)
    for i in runs[0].states:
        assert all(map(torch.equal, runs[0].states.get(i), runs[1].states.get(i)))


def test_another_seed_gives_other_cohorts_and_batches():
    a, b = (package(Softmax(), FedAvg(), with_(PLAN, seed=seed)) for seed in (0, 1))
    assert [r.cohort for r in a] != [r.cohort for r in b]
    a, b = (package(Softmax(), FedAvg(), with_(PLAN, active=7, seed=seed)) for seed in (0, 1))
    assert timeless(a) != timeless(b)


def test_dropout_has_the_same_bits_whatever_the_caller_drew():
    ends = []
    for caller in (1, 2):
        model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 3)).double()
        for p in model.parameters():
            nn.init.constant_(p, 0.1)
        torch.manual_seed(caller)
        run = simulate(FedAvg(), model, Softmax().federated(), PLAN)
        records = timeless(run)
        ends.append((run.x, records))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


@dataclass(frozen=True)
class Summing(FedAvg):
    """FedAvg whose server takes an inner product, which torch splits over threads."""

    def update(self, server, mean, round):
        return type(server)(server.x + mean.D * (1 + mean.D @ mean.D))


def test_the_number_of_threads_does_not_change_the_bits():
    x = np.random.default_rng(0).normal(size=(8, 30_000)).astype("f4")
    data = Federated.from_arrays(x, np.arange(8) % 2, [[2 * i, 2 * i + 1] for i in range(4)])
    before, ends = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            model = nn.Linear(30_000, 2)
            for p in model.parameters():
                nn.init.zeros_(p)
            run = simulate(Summing(), model, data, rounds=3, active=3, local_steps=2, lr=0.01)
            ends.append((timeless(run), run.server.x))
    finally:
        torch.set_num_threads(before)
    for records, end in ends[1:]:
        assert records == ends[0][0]
        assert torch.equal(end, ends[0][1])


def test_a_record_by_hand():
    """One step a client from w = 0.5 on a linear loss: D_i = -lr mean(x_i), everything else follows."""
    run = simulate(FedAvg(), line(0.5), uneven(test=True), loss=average_output, rounds=1, active=3, local_epochs=1,
                   lr=0.1, weight_decay=0.0)  # fmt: skip
    record = run.step()
    D = -0.1 * np.array([1.0, 2.0, -4.0])
    assert record.round == 1
    assert record.cohort == [0, 1, 2]
    assert record.lr == 0.1
    assert record.train_loss == pytest.approx(0.5 * np.mean([1, 2, -4]), abs=1e-15)
    assert record.drift == pytest.approx(np.mean(D**2), abs=1e-15)
    assert record.update_norm == pytest.approx(abs(D.mean()), abs=1e-15)
    assert record.bytes_down == record.bytes_up == 3 * 8  # one float64 each way
    assert record.grad_evals == 3
    assert record.test_loss == pytest.approx((0.5 + D.mean()) * np.mean([1, 2, 2, 2, -4, -4]), abs=1e-15)
    assert record.test_accuracy is None  # regression
    assert record.seconds > 0
    assert record.eval_seconds > 0


def test_bytes_are_those_of_what_the_method_sends():
    """SCAFFOLD sends two vectors each way, FedAvg one; float32 costs half of float64."""
    for name, vectors in (("fedavg", 1), ("scaffold", 2)):
        for model, size in ((line(), 8), (line(dtype=torch.float32), 4)):
            record = simulate(METHODS[name](), model, uneven(), loss=average_output, rounds=1, active=2).step()
            assert record.bytes_down == record.bytes_up == 2 * vectors * size


def test_weighting_by_samples():
    D = -0.1 * np.array([1.0, 2.0, -4.0])
    settings = {"rounds": 1, "active": 3, "local_epochs": 1, "lr": 0.1, "weight_decay": 0.0}
    uniform = simulate(FedAvg(), line(), uneven(), loss=average_output, **settings)
    uniform.step()
    assert uniform.x.item() == pytest.approx(D.mean(), abs=1e-15)
    samples = simulate(FedAvg(), line(), uneven(), loss=average_output, weighting="samples", **settings)
    record = samples.step()
    assert samples.x.item() == pytest.approx(D @ [1, 3, 2] / 6, abs=1e-15)
    assert record.drift == pytest.approx(np.mean(D**2), abs=1e-15)  # a mean over clients all the same


@dataclass(frozen=True)
class Told(FedAvg):
    """FedAvg that keeps what the server was told."""

    log: list = field(default_factory=list, compare=False)

    def update(self, server, mean, round: Round):
        self.log.append(round)
        return super().update(server, mean, round)


@pytest.mark.parametrize(
    ("weighting", "S", "N", "K"),
    [("uniform", 3, 3, (2 * 1 + 2 * 2 + 2 * 1) / 3), ("samples", 6, 6, (1 * 2 + 3 * 4 + 2 * 2) / 6)],
)
def test_what_the_server_is_told(weighting, S, N, K):
    """Two epochs of batches of 2: K_i = 2, 4, 2 steps for 1, 3 and 2 samples."""
    method = Told()
    run = simulate(method, line(), uneven(), loss=average_output, rounds=2, active=3, local_epochs=2, batch_size=2,
                   lr=0.1, lr_decay=0.5, weighting=weighting)  # fmt: skip
    for _ in run:
        pass
    assert method.log == [
        Round(0, S, N, pytest.approx(K), 0.1, active=3),
        Round(1, S, N, pytest.approx(K), 0.05, active=3),
    ]


def test_partial_participation_by_samples_tells_the_weight_of_the_active():
    method = Told()
    run = simulate(method, line(), uneven(), loss=average_output, rounds=20, active=1, weighting="samples")
    sizes = [1, 3, 2]
    for record in run:
        assert sizes[record.cohort[0]] == method.log[-1].S
        assert method.log[-1].N == 6


def test_learning_rate_decays_a_round():
    rates = [r.lr for r in package(Softmax(), FedSpeed(), with_(PLAN, lr=0.2, lr_decay=0.5))]
    assert rates == pytest.approx([0.2, 0.1, 0.05, 0.025])
    usual = [r.lr for r in package(Softmax(), FedSpeed(), PLAN)]
    assert usual == pytest.approx([0.1 * 0.998**t for t in range(4)])
    own = [r.lr for r in package(Softmax(), FedSpeed(), with_(PLAN, lr_decay=0.0))]  # the paper's
    assert own == pytest.approx([0.1 * 0.9995**t for t in range(4)])


def test_eval_every_and_always_the_last():
    evaluated = [r.round for r in package(Softmax(), FedAvg(), with_(PLAN, rounds=7, eval_every=3)) if r.test_loss]
    assert evaluated == [3, 6, 7]


def test_without_a_test_set_nothing_is_evaluated():
    x, y, rows = Softmax().arrays()
    for test in (None, (x[:0], y[:0])):
        data = Federated.from_arrays(x, y, rows, test=test)
        record = simulate(FedAvg(), Softmax().model(), data, PLAN).step()
        assert (record.test_loss, record.test_accuracy) == (None, None)


def test_test_loss_and_accuracy_equal_numpy():
    """More test rows than one slice, and a number that is not a multiple of it."""
    r = np.random.default_rng(0)
    x, y = r.normal(size=(1203, 4)), r.integers(0, 3, 1203)
    problem = Softmax()
    X, Y, rows = problem.arrays()
    run = simulate(FedAvg(), problem.model(), Federated.from_arrays(X, Y, rows, test=(x, y), classes=3), PLAN)
    record = run.step()
    z = x @ run.x.numpy().reshape(3, 4).T
    log_p = z - np.log(np.exp(z).sum(1, keepdims=True))
    assert record.test_loss == pytest.approx(-log_p[np.arange(1203), y].mean(), abs=1e-12)
    assert record.test_accuracy == (z.argmax(1) == y).mean()


@pytest.mark.parametrize("shape", [(1,), ()])
def test_one_logit_has_no_accuracy(shape):
    """The largest of one output is always the first: that is no accuracy."""
    x = np.random.default_rng(0).normal(size=(10, 3))
    y = (x[:, 0] > 0).astype(int)
    model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0) if not shape else nn.Identity()).double()
    loss = nn.functional.binary_cross_entropy_with_logits
    run = simulate(FedAvg(), model, Federated.from_arrays(x, y, [range(5), range(5, 10)], test=(x, y)), rounds=1,
                   active=2, loss=lambda out, y: loss(out.reshape(-1), y.double()))  # fmt: skip
    record = run.step()
    assert record.test_accuracy is None
    assert record.test_loss is not None


def test_bernoulli_cohorts():
    run = package(Softmax(clients=20), FedAvg(), with_(PLAN, rounds=60, active=5, cohort="bernoulli", local_steps=1))
    sizes = [len(record.cohort) for record in run]
    assert len(set(sizes)) > 3
    assert min(sizes) >= 1
    assert np.mean(sizes) == pytest.approx(5, abs=4 * np.sqrt(20 * 0.25 * 0.75 / 60))


def test_iterating_again_goes_on_where_it_was():
    run, whole = (package(Softmax(), FedAvg(), PLAN) for _ in range(2))
    for record in run:
        if record.round == 2:
            break
    assert [record.round for record in run] == [3, 4]
    assert list(run) == []
    for _ in whole:
        pass
    assert torch.equal(run.x, whole.x)


def snapshot(run) -> tuple:
    return copy.deepcopy((run.t, run.server, {i: run.states.get(i) for i in run.states}))


def same(a: tuple, b: tuple) -> bool:
    states = all(all(map(torch.equal, a[2][i], b[2][i])) for i in a[2])
    return a[0] == b[0] and all(map(torch.equal, a[1], b[1])) and a[2].keys() == b[2].keys() and states


@dataclass(frozen=True)
class Exploding(FedSpeed):
    """FedSpeed in which client 2 uploads NaN from round 3 on."""

    value: float = float("nan")

    def upload(self, xK, down, client, run):
        up, kept = super().upload(xK, down, client, run)
        return (type(up)(up.D * self.value) if run.n == 11 and run.t == 2 else up), kept


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_divergence_names_round_and_client_and_keeps_nothing_of_the_round(value):
    run = package(Softmax(), Exploding(value=value), with_(PLAN, active=7))
    run.step()
    run.step()
    before = snapshot(run)
    with pytest.raises(Diverged, match=r"Exploding\.upload made NaN or Inf .* in round 3, client 2;"):
        run.step()
    assert same(snapshot(run), before)
    assert len(before[2]) == 7


def test_a_run_that_really_diverges_is_stopped():
    """Squared loss, far too large a rate: |w| grows 199-fold a step."""
    x = np.full((4, 1), 10.0)
    data = Federated.from_arrays(x, np.ones((4, 1)), [range(2), range(2, 4)])
    run = simulate(FedAvg(), line(1.0, torch.float32), data, loss=nn.functional.mse_loss, rounds=50, active=2, lr=1.0)
    with pytest.raises(Diverged, match="round") as stopped:
        list(run)
    assert "\n" not in str(stopped.value)
    assert torch.isfinite(run.x).all()


def test_a_loss_that_overflows_counts_as_diverged():
    """The gradient of (1e25)^2 is finite in float32, the loss is not."""
    data = Federated.from_arrays(np.ones((2, 1), "f4"), np.zeros((2, 1), "f4"), [[0, 1]])
    run = simulate(FedAvg(), line(1e25, torch.float32), data, loss=nn.functional.mse_loss, rounds=1, active=1,
                   lr=0.1, local_steps=1)  # fmt: skip
    with pytest.raises(Diverged, match="client 0 diverged"):
        run.step()


@dataclass(frozen=True)
class Leaping(FedAvg):
    """FedAvg whose server overflows."""

    def update(self, server, mean, round):
        return type(server)(server.x * 1e308 * 1e308)


def test_a_server_that_diverges_names_the_round():
    run = package(Softmax(), Leaping(), PLAN)
    before = snapshot(run)
    with pytest.raises(Diverged, match=r"Leaping\.update made NaN or Inf .* in round 1;"):
        run.step()
    assert same(snapshot(run), before)


def test_a_failing_client_leaves_the_round_undone():
    run = package(Softmax(), FedSpeed(), PLAN)
    run.step()
    before = snapshot(run)
    intact = run.work.data.batch
    object.__setattr__(run.work.data, "batch", lambda rows, stream: 1 / 0)
    with pytest.raises(UserError, match=r"FedSpeed: round 2, client .*ZeroDivisionError"):
        run.step()
    assert same(snapshot(run), before)
    object.__setattr__(run.work.data, "batch", intact)
    whole = package(Softmax(), FedSpeed(), PLAN)
    assert timeless(whole)[1:] == timeless(run)  # it can go on, and nothing was applied twice
    assert torch.equal(run.x, whole.x)


@dataclass(frozen=True)
class Careless(FedAvg):
    """FedAvg that works in place on what it was given."""

    def upload(self, xK, down, client, run):
        up = type(super().upload(xK, down, client, run)[0])(xK - down.x)
        down.x.fill_(torch.nan)
        return up, client


def test_a_method_that_spoils_its_message_is_refused_and_the_server_is_whole():
    run = package(Softmax(), Careless(), with_(PLAN, active=1))
    before = snapshot(run)
    with pytest.raises(UserError, match=r"Careless.upload must not change down.x in place.*test_simulation.py, line"):
        run.step()
    assert same(snapshot(run), before)


def test_a_server_that_works_in_place_is_refused_and_the_initial_model_is_whole():
    @dataclass(frozen=True)
    class InPlace(FedAvg):
        def update(self, server, mean, round):
            server.x.add_(mean.D)
            return server

    run = package(Softmax(), InPlace(), PLAN)
    start = run.x0.clone()
    with pytest.raises(UserError, match=r"InPlace.update must not change server.x in place"):
        run.step()
    assert torch.equal(run.x0, start)


def test_the_user_s_model_is_not_touched():
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).double().eval()
    before = copy.deepcopy(model.state_dict())
    places = [p.data_ptr() for p in model.parameters()]
    run = simulate(FedAvg(), model, Softmax().federated(), PLAN)
    list(run)
    assert all(torch.equal(a, before[name]) for name, a in model.state_dict().items())
    assert [p.data_ptr() for p in model.parameters()] == places
    assert all(p.grad is None for p in model.parameters())
    assert not model.training
    assert not torch.equal(run.model[0].weight, model[0].weight)


def test_the_model_is_the_vector():
    run = package(Softmax(), FedSpeed(), PLAN)
    for _ in run:
        assert torch.equal(torch.cat([p.detach().reshape(-1) for p in run.model.parameters()]), run.x)
    assert not run.model.training
    run.x.fill_(0)  # a copy
    assert run.x.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_everything_is_in_the_model_s_dtype_and_the_server_in_float64(dtype):
    run = simulate(FedSpeed(), Softmax().model().to(dtype), Softmax().federated(), PLAN)
    run.step()
    assert run.x.dtype == dtype
    assert all(run.states.get(i).h.dtype == dtype for i in run.states)
    assert run.server.x.dtype == run.server.H.dtype == torch.float64


def test_a_million_clients_keep_the_state_of_those_touched():
    clients = 1_000_000
    x = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))
    data = Federated(x, (x[:, 0] > 0).long(), np.arange(clients) % 1000, np.arange(clients + 1), classes=2)
    run = simulate(FedSpeed(), nn.Linear(3, 2), data, rounds=1, active=10, local_steps=2)
    record = run.step()
    assert len(run.states) == 10
    assert list(run.states) == record.cohort
    assert max(record.cohort) > 10_000
    assert run.states.get(min(set(range(20)) - set(record.cohort))) is None


def test_a_stateless_method_keeps_nothing():
    run = package(Softmax(), FedAvg(), PLAN)
    list(run)
    assert len(run.states) == 0


def test_states_hand_out_copies():
    run = package(Softmax(), FedSpeed(), PLAN)
    record = run.step()
    i = record.cohort[0]
    run.states.get(i).h.fill_(torch.nan)
    run.client_state(i).h.fill_(torch.nan)
    assert torch.isfinite(run.states.get(i).h).all()


def test_your_own_module_loss_and_data_in_ten_lines():
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 60)[:, None]
    y = torch.sin(3 * x)
    data = Federated.from_arrays(x, y, [range(i, 60, 6) for i in range(6)], test=(x, y))
    net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    run = simulate(FedSpeed(rho=0.01), net, data, loss=nn.functional.smooth_l1_loss, rounds=30, active=3, batch_size=5)
    losses = [record.test_loss for record in run]
    assert losses[-1] < losses[0] / 2
    assert nn.functional.smooth_l1_loss(run.model(x), y).item() == pytest.approx(losses[-1], rel=1e-5)


def test_token_inputs_stay_whole_numbers():
    tokens = np.random.default_rng(0).integers(0, 9, (20, 4))
    net = nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Linear(12, 2))
    data = Federated.from_arrays(tokens, tokens[:, 0] % 2, [range(10), range(10, 20)], test=(tokens, tokens[:, 0] % 2))
    assert simulate(FedAvg(), net, data, rounds=1, active=2).step().test_accuracy is not None


def test_a_plan_or_its_fields_or_both():
    plan = with_(PLAN, rounds=9)
    run = simulate(FedAvg(), Softmax().model(), Softmax().federated(), plan, rounds=2, lr=0.5)
    assert (run.plan.rounds, run.plan.lr, run.plan.active) == (2, 0.5, 3)
    with pytest.raises(UserError, match="unknown keyword of simulate 'round'; did you mean 'rounds'"):
        simulate(FedAvg(), Softmax().model(), Softmax().federated(), round=3)


def test_numbers_of_numpy_are_numbers():
    run = simulate(FedAvg(), Softmax().model(), Softmax().federated(), rounds=np.int64(1), active=np.int32(2),
                   lr=np.float32(0.5))  # fmt: skip
    assert (run.step().lr, type(run.plan.rounds), type(run.plan.lr)) == (0.5, int, float)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"active": 8}, "active must be at most the number of clients, got 8 active of 7"),
        ({"lr": -0.1}, r"lr must be in \(0, inf\), got -0.1"),
        ({"lr": float("nan")}, r"lr must be in \(0, inf\), got nan"),
        ({"lr": 20.0}, "lr must be < 2"),
        ({"device": "nowhere"}, "device: expected auto, cpu, cuda, cuda:N or mps, found 'nowhere'$"),
        ({"device": "gpu"}, "device: expected auto, cpu, cuda, cuda:N or mps, found 'gpu'$"),
        ({"device": "meta"}, "device: expected auto, cpu, cuda, cuda:N or mps, found 'meta'$"),
        ({"device": "cuda:99"}, "device 'cuda:99' cannot be used here.*try --device cpu"),
    ],
    ids=str,
)
def test_a_run_that_cannot_be_is_refused_at_once(settings, message):
    with pytest.raises(UserError, match=message):
        simulate(FedSpeed(), Softmax().model(), Softmax().federated(), **{"active": 2} | settings)


def test_an_empty_client_is_refused_by_name():
    data = Federated(torch.ones(4, 1), torch.zeros(4).long(), np.arange(4), np.array([0, 2, 2, 4]), classes=1)
    with pytest.raises(UserError, match="client 1 has none"):
        simulate(FedAvg(), nn.Linear(1, 1), data, active=1, local_steps=3)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_model_that_cannot_be_copied_is_refused():
    for model in (nn.utils.weight_norm(nn.Linear(4, 3)), nn.Sequential(nn.LazyBatchNorm1d(), nn.Linear(4, 3))):
        with pytest.raises(UserError, match=r"cannot be copied.*lazy modules.*parametrizations") as refused:
            simulate(FedAvg(), model, Softmax().federated(), PLAN)
        assert "\n" not in str(refused.value)


def test_pick_device():
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type in ("cpu", "cuda", "mps")


class Restless(nn.Module):
    """A model that drops also in evaluation, a usual slip with the functional form."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3).double()
        for p in self.linear.parameters():
            nn.init.constant_(p, 0.1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(nn.functional.dropout(inputs, 0.5))


def test_evaluation_neither_reads_nor_moves_the_caller_s_generator():
    losses = []
    for caller in (1, 2):
        run = simulate(FedAvg(), Restless(), Softmax().federated(), PLAN)
        torch.manual_seed(caller)
        state = torch.get_rng_state()
        losses.append([record.test_loss for record in run])
        assert torch.equal(torch.get_rng_state(), state)
    assert losses[0] == losses[1]
