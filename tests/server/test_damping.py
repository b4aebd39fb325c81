"""The running mean's damping: the linear model is what the methods do, runs show what it says, and one line tells."""

from __future__ import annotations

import cmath
import itertools
import json

import numpy as np
import pytest
import torch
from torch import nn

from fedspeed import METHODS, FedDyn, Federated, FedGMT, FedInit, FedSpeed, Plan, load_data, simulate
from fedspeed.cli import main
from fedspeed.config.damping import WEIGHTS, damping, warning, warning_of
from fedspeed.runs.diagnosis import WarnObserver
from fedspeed.utils.random import cohort

STEPS, RATE, DECAY = 6, 0.2, 0.15


def matrix(p: float, K: int, lr: float, a: float, w: float, prox: bool = True) -> np.ndarray:
    """A round on (x, H), by K local steps on the unit vectors with every h_i = H; nothing in closed form."""
    columns = []
    for x, H in np.eye(2):
        y = x
        for _ in range(K):
            y = y - lr * (a * y + w * (H + prox * (y - x)))
        columns.append([y + H + p * (y - x), H + p * (y - x)])
    return np.array(columns).T


class Decayed(nn.Module):
    """A model whose loss does not depend on its one parameter: weight decay alone moves it."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0 * self.v


def decayed(method, clients: int, active: int, rounds: int, seed: int = 0) -> list[np.ndarray]:
    """(x, H) after every round."""
    x, y = np.eye(2)[np.arange(clients) % 2], np.arange(clients) % 2
    data = Federated.from_arrays(x, y, [np.array([i]) for i in range(clients)], classes=2)
    run = simulate(method, Decayed(), data, rounds=rounds, active=active, local_steps=STEPS, lr=RATE, lr_decay=1.0,
                   weight_decay=DECAY, seed=seed)  # fmt: skip
    return [np.array([run.server.x.numpy(), run.server.H.numpy()]) for _ in run]


def made(name: str, w: float):
    """A method without what the linear model leaves out: a moved start, and last round's step in the direction."""
    more = {"fedgloss": {"rho": 0.0}, "fedtoga": {"beta": 0.0}}.get(name, {})
    return METHODS[name](**{WEIGHTS[name]: w if WEIGHTS[name] == "alpha" else 1 / w}, **more)


@pytest.mark.parametrize("name", WEIGHTS)
def test_with_all_clients_every_method_of_the_table_follows_the_linear_model(name):
    round_of = matrix(1.0, STEPS, RATE, DECAY, 0.3, prox=name != "fedgmt")
    state = np.array([[1.0, -2.0], [0.0, 0.0]])
    for found in decayed(made(name, 0.3), clients=3, active=3, rounds=8):
        state = round_of @ state
        np.testing.assert_allclose(found, state, rtol=0, atol=1e-13)


def test_with_some_clients_its_mean_over_all_cohorts_does():
    """Of three clients one is active in each of three rounds: 27 histories, equally likely."""
    seeds: dict[tuple[int, ...], int] = {}
    for seed in range(2000):
        seeds.setdefault(tuple(int(cohort(seed, t, 3, 1, "fixed")[0]) for t in range(3)), seed)
    assert sorted(seeds) == list(itertools.product(range(3), repeat=3))
    runs = [decayed(FedDyn(alpha=0.3), clients=3, active=1, rounds=3, seed=seed) for seed in seeds.values()]
    state = np.array([[1.0, -2.0], [0.0, 0.0]])
    for t in range(3):
        state = matrix(1 / 3, STEPS, RATE, DECAY, 0.3) @ state
        np.testing.assert_allclose(np.mean([run[t] for run in runs], axis=0), state, rtol=0, atol=1e-13)
    assert np.std([run[2][0, 0] for run in runs]) > 0.01  # each history is another


GRID = [(S, K, w, a) for S in (1, 5, 20) for K in (1, 10, 50) for w in (0.001, 0.1, 1.0) for a in (1e-4, 1e-2)]


@pytest.mark.parametrize("method", [FedDyn, METHODS["fedgmt"]])
def test_ratio_memory_and_critical_weight_are_those_of_the_eigenvalues(method):
    field, prox = ("alpha", True) if method is FedDyn else ("lam", False)
    for S, K, w, a in GRID:
        plan = Plan(rounds=300, active=S, local_steps=K, weight_decay=a, lr_decay=1.0)
        found = damping(method(**{field: w if prox else 1 / w}), plan, [1] * 20)
        M = matrix(S / 20, K, 0.1, a, w, prox)
        half, det = np.trace(M) / 2, np.linalg.det(M)
        assert (found.ratio < 1) == (half**2 < det)
        assert found.ratio == pytest.approx((1 - half) / cmath.sqrt(1 - 2 * half + det).real, rel=1e-6)
        leak = 1 - matrix(S / 20, K, 0.1, a, w, prox)[1, 1]
        assert found.memory == pytest.approx(1 / leak, rel=1e-6)
        M = matrix(S / 20, K, 0.1, a, found.critical, prox)
        overdamped = (
            damping(method(**{field: 1e-9 if prox else 1e9}), plan, [1] * 20).ratio > 1
        )  # by weight decay alone
        assert overdamped or (np.trace(M) / 2) ** 2 == pytest.approx(np.linalg.det(M), abs=1e-9)
        xs = [1.0, *(np.linalg.matrix_power(matrix(S / 20, K, 0.1, a, w, prox), t)[0, 0] for t in range(1, 301))]
        assert found.zero == next((t for t, x in enumerate(xs) if x < 0), None)


SETTINGS = [  # clients, active, K, w, rounds: whether it is told
    ((100, 10, 50, 0.1, 1500), False),  # the FedSpeed paper, 10%: about critical
    ((500, 10, 10, 0.001, 1500), True),  # its 2%, the main text
    ((500, 10, 10, 0.1, 1500), True),
    ((500, 10, 25, 0.1, 1500), False),  # its appendix: 0.5
    ((500, 10, 10, 0.5, 1500), False),
    ((500, 10, 10, 0.1, 300), False),  # over before anything can swing
    ((100, 10, 10, 0.1, 500), False),
    ((50, 5, 5, 0.1, 100), False),  # the demo
]


@pytest.mark.parametrize(("setting", "told"), SETTINGS)
def test_which_settings_are_warned_about(setting, told):
    clients, active, K, w, rounds = setting
    plan = Plan(rounds=rounds, active=active, local_steps=K, lr_decay=0.0)
    text = warning(FedSpeed(lam=1 / w), plan, [100] * clients)
    assert bool(text) == told
    assert bool(warning(FedDyn(alpha=w), plan, [100] * clients)) == told
    if told:
        assert text.startswith("FedSpeed: expected a damping ratio of H near 1, found 0.")
        memory = {0.1: "memory 523 rounds of 1,500;", 0.001: "memory 50,045 rounds of 1,500;"}[w]
        assert memory in text
        assert text.endswith("; --set method.lam=2.3 is critical")
        assert "\n" not in text
        for other in (FedSpeed(lam=1 / w, server="active"), FedSpeed(lam=1 / w, correction=False), METHODS["fedavg"](),
                      FedInit(FedSpeed(lam=1 / w)), METHODS["scaffold"](), METHODS["afedpd"](lam=1 / w)):  # fmt: skip
            assert warning(other, plan, [100] * clients) == ""
        assert warning(FedSpeed(lam=1 / w), Plan.from_fields({**plan.fields(), "weight_decay": 0.0}), [100] * 500) == ""


class Normalised(nn.Module):
    """Two layers whose outputs do not depend on the length of their weights, which start at many times the length at
    which training settles: at first weight decay moves that length, as the linear model says."""

    def __init__(self) -> None:
        super().__init__()
        r = np.random.default_rng(0)
        self.a, self.b = (nn.Parameter(torch.from_numpy(r.normal(size=s)).float()) for s in ((24, 64), (10, 24)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(nn.functional.layer_norm(x.flatten(1) @ self.a.T, (24,)))
        return 3 * nn.functional.layer_norm(hidden @ self.b.T, (10,))


@pytest.mark.parametrize(("w", "swings"), [(0.01, True), (1.0, False)])
def test_a_run_that_is_warned_about_swings_and_another_settles(w, swings):
    """The recorded norms beside |x| of the linear model; what they have in common ends where training holds them."""
    data, told = load_data("digits", split="iid", clients=40), []
    plan = {"rounds": 60, "active": 4, "local_steps": 8, "batch_size": 10, "weight_decay": 0.02, "lr_decay": 1.0}
    method = FedDyn(alpha=w)
    records = list(simulate(method, Normalised(), data, eval_every=60, observers=[WarnObserver(told.append)], **plan))
    start = float(sum(p.detach().square().sum() for p in Normalised().parameters())) ** 0.5
    norms = [record.metrics["x_norm"] / start for record in records]
    linear = [np.linalg.matrix_power(matrix(0.1, 8, 0.1, 0.02, w), t)[:, 0] for t in range(1, 61)]
    assert norms[:20] == pytest.approx([abs(x) for x, _ in linear[:20]], abs=0.03)
    assert records[19].metrics["H_norm"] / start == pytest.approx(
        abs(linear[19][1]), rel=0.2
    )  # H holds steps of training too
    low = int(np.argmin(norms))
    assert (max(norms[low:]) > 1.5 * norms[low]) == swings
    assert any("damping ratio" in text for text in told) == swings


QUICK = ["--clients", "4", "--active", "2", "--local-steps", "10", "--weight-decay", "0.14", "--rounds", "10",
         "--model", "linear", "--eval-every", "10"]  # fmt: skip


def test_run_says_it_once_before_round_1_and_explain_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["run", *QUICK, "--set", "method.lam=100", "--out", "a"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    line = "FedSpeed: expected a damping ratio of H near 1, found 0."
    assert out.count(line) == 1
    assert out.index(line) < out.index("round 1/10")
    assert main(["explain", "a"]) == 0
    assert f"note: {line}" in " ".join(capsys.readouterr().out.split())
    assert main(["explain", "a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"][0].startswith(line)
    assert main(["resume", "a", "--rounds", "11"]) == 0
    assert main(["run", *QUICK, "--set", "method.lam=100", "--out", "b", "--quiet"]) == 0
    assert main(["run", *QUICK, "--set", "method.lam=2", "--out", "c"]) == 0
    assert "damping" not in capsys.readouterr().out


@pytest.mark.parametrize("config", [{}, {"method": 3}, {"method": {"name": []}}, {"method": {"name": "feddyn", "x": 1}},
                                    {"method": {"name": "feddyn"}, "lr": "high"}])  # fmt: skip
def test_a_config_that_may_be_anything_is_no_error(config):
    assert warning_of(config, [10] * 4) == ""


@pytest.mark.parametrize(
    ("method", "settings"),
    [(FedSpeed(), {"weight_decay": 30.0, "local_steps": 4}), (FedSpeed(), {"weight_decay": 30.0, "local_steps": 2000}),
     (FedDyn(), {"weight_decay": 1e-320}), (FedGMT(), {"weight_decay": 1e-17})],
)  # fmt: skip
def test_a_setting_beyond_the_model_is_silent(method, settings):
    """Steps that overshoot, or hardly move: nothing is said, and nothing fails."""
    plan = Plan(rounds=3, active=3, lr=0.1, **settings)
    assert warning(method, plan, [20] * 10) == ""
    assert damping(method, plan, []) is None
