"""Clipped uploads and client-level differential privacy, against NumPy and the accountant's own calculation."""

from __future__ import annotations

import json

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.rdp import RdpAccountant
from federations import Softmax, package
from hypothesis import given, settings
from hypothesis import strategies as st
from test_wrappers import moves, stream

from fedspeed import (
    DP,
    Clip,
    Config,
    FedAvg,
    FedInit,
    FedSpeed,
    Plan,
    Quantise,
    Scaffold,
    TopK,
    UserError,
    load_data,
    simulate,
)
from fedspeed.cli import main
from fedspeed.methods import privacy
from fedspeed.methods.base import Local
from fedspeed.methods.scaffold import Up
from fedspeed.runs.config_file import read_config
from fedspeed.runs.launch import resume, run_config
from fedspeed.runs.verify import verify

EQUAL = Softmax(equal=8)
PLAN = Plan(rounds=3, active=4, local_steps=2, batch_size=4, lr=0.1, weight_decay=0.0, seed=5, backend="serial")
CLIP, NOISE = 0.05, 0.7


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-(2.0**40), 2.0**40, width=32), min_size=1, max_size=40),
    st.floats(1e-6, 1e6),
    st.sampled_from([torch.float32, torch.float64]),
    st.booleans(),
)
def test_clipped_norms_never_exceed_the_bound(numbers, limit, dtype, block):
    v = torch.tensor(numbers, dtype=dtype)
    up = Up(v, v.flip(0) / 3)
    if block:
        up = Up(*(torch.stack([a, -a / 2]) for a in up))
    sent = privacy.clipped(up, limit)
    for row in range(2 if block else 1):
        before, after = (
            np.concatenate([(a[row] if block else a).double().numpy() for a in tree]) for tree in (up, sent)
        )
        assert np.linalg.norm(after) <= limit
        short = np.linalg.norm(before) <= limit * (1 - 1e-6)
        np.testing.assert_allclose(after, before if short else before * limit / np.linalg.norm(before), 1e-6, 1e-40)


def clipped(D):
    return D * min(1.0, CLIP / np.linalg.norm(D))


def run_beside_numpy(method, truth, engine="loop", **changes):
    """Every round's model beside what `truth(moves of the clients, t)` adds to the one before."""
    plan = Plan.from_fields({**PLAN.fields(), "engine": engine, **changes})
    with package(EQUAL, method, plan) as run:
        x = run.x.numpy().copy()
        for t, record in enumerate(run):
            sent = moves(x, t, [i for i in record.cohort if i not in record.dropped])
            assert any(np.linalg.norm(D) > CLIP for D in sent.values())  # the clipping does something
            x = x + truth(sent, t)
            np.testing.assert_allclose(run.x.numpy(), x, rtol=1e-9, atol=1e-12)
        return record


@pytest.mark.parametrize("engine", ["loop", "block"])
def test_clipping_alone(engine):
    run_beside_numpy(Clip(FedAvg(), CLIP), lambda sent, t: np.mean([clipped(D) for D in sent.values()], 0), engine)


@pytest.mark.parametrize("engine", ["loop", "block"])
def test_noise_of_the_server(engine):
    def truth(sent, t):
        noise = stream(PLAN.seed, "dp", t, 0).standard_normal(12)
        return (sum(clipped(D) for D in sent.values()) + NOISE * CLIP * noise) / len(sent)

    run_beside_numpy(DP(FedAvg(), NOISE, CLIP), truth, engine, dropout=0.3)


@pytest.mark.parametrize("engine", ["loop", "block"])
def test_noise_of_the_clients_and_what_lost_ones_leave_missing(engine):
    lost = []

    def truth(sent, t):
        own = {i: stream(PLAN.seed, "dp", t, i, 0).standard_normal(12) for i in sent}
        total = sum(clipped(D) + NOISE * CLIP / 2 * own[i] for i, D in sent.items())  # sqrt(4 active) = 2
        lost.append(4 - len(sent))
        missing = stream(PLAN.seed, "dp", t, 0).standard_normal(12) * np.sqrt(lost[-1] / 4)
        return (total + NOISE * CLIP * missing) / len(sent)

    run_beside_numpy(DP(FedAvg(), NOISE, CLIP, where="clients"), truth, engine, dropout=0.3)
    assert 0 < sum(lost) < 4 * PLAN.rounds


def test_epsilon_is_the_librarys():
    record = run_beside_numpy(
        DP(FedAvg(), 0.9, CLIP, delta=1e-4),
        lambda sent, t: (
            (sum(map(clipped, sent.values())) + 0.9 * CLIP * stream(5, "dp", t, 0).standard_normal(12)) / len(sent)
        ),
        dropout=0.3,
    )
    accountant = RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    event = dp_accounting.SampledWithoutReplacementDpEvent(7, 4, dp_accounting.GaussianDpEvent(0.9 / 2))
    accountant.compose(event, 3)
    assert record.metrics["epsilon"] == pytest.approx(accountant.get_epsilon(1e-4), rel=1e-12)
    assert privacy.epsilon(0.0, 1e-5, 4, 7, 3) == np.inf


@pytest.mark.parametrize(
    ("base", "sampled"),
    [
        (FedAvg(), True),
        (TopK(FedAvg(), 0.2, feedback=False), True),
        (TopK(FedAvg(), 0.2), False),
        (FedInit(FedAvg()), False),
        (FedSpeed(), False),
        (Scaffold(), False),
    ],
    ids=["fedavg", "topk", "feedback", "fedinit", "fedspeed", "scaffold"],
)
def test_amplification_by_sampling_is_counted_for_clients_without_a_state_alone(base, sampled):
    """With states epsilon is that of as many Gaussian mechanisms in a row: alpha T / (2 (noise/2)^2) at order alpha."""
    plan = Plan.from_fields({**PLAN.fields(), "active": 2})
    with package(EQUAL, DP(base, 3.0, CLIP), plan) as run:
        spent = [record.metrics["epsilon"] for record in run]
    accountant = RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    event = dp_accounting.GaussianDpEvent(3.0 / 2)
    accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(7, 2, event) if sampled else event, PLAN.rounds)
    assert spent[-1] == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-12)
    if not sampled:
        orders = np.array(accountant.orders)
        rdp = orders * PLAN.rounds / (2 * 1.5**2)
        plain = rdp + np.log1p(-1 / orders) - np.log(1e-5 * orders) / (orders - 1)  # Canonne, Kamath, Steinke 2020
        assert spent[-1] == pytest.approx(plain.min(), rel=1e-6)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(DP(FedSpeed(), NOISE, CLIP), marks=pytest.mark.slow),
        DP(TopK(Scaffold(), 0.2), NOISE, CLIP, where="clients"),
    ],
)
def test_the_same_bits_on_every_back_end(method, quick_workers):
    def ended(**changes):
        with package(EQUAL, method, Plan.from_fields({**PLAN.fields(), **changes})) as run:
            return [record.metrics for record in run], run.x

    here, there = ended(), ended(backend="process", workers=2)
    assert here[0] == there[0]
    assert torch.equal(here[1], there[1])


def test_epsilon_is_in_every_record_and_in_the_summary_and_a_run_goes_on(tmp_path):
    table = {"name": "dp", "noise": 1.0, "base": {"name": "fedspeed"}}
    given = {"method": table, "data": "digits", "clients": 20, "active": 4, "local_steps": 1, "model": "linear"}
    config = Config.from_dict({**given, "rounds": 4})
    run_config(config, tmp_path / "whole")
    run_config(Config.from_dict({**given, "rounds": 2}), tmp_path / "cut")
    resume(tmp_path / "cut", rounds=4)
    whole, cut = (
        [json.loads(line) for line in (tmp_path / name / "rounds.jsonl").read_text().splitlines()]
        for name in ("whole", "cut")
    )
    spent = [line["metrics"]["epsilon"] for line in whole]
    assert spent == sorted(spent)
    assert spent == [line["metrics"]["epsilon"] for line in cut]
    assert json.loads((tmp_path / "whole" / "summary.json").read_text())["metrics"] == {"epsilon": spent[-1]}
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() == (
        tmp_path / "cut" / "model.safetensors"
    ).read_bytes()
    assert verify(tmp_path / "whole").broken == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["fedspeed+dp", "--weighting", "samples"], "needs weighting = uniform, got samples; --weighting uniform"),
        (["fedspeed+dp", "--cohort", "bernoulli"], "needs cohort = fixed, got bernoulli"),
        (["fedspeed+dp+topk:0.1"], "TopK: expected DP around it, found it around DP"),
        (["fedspeed+dp:noise=-1"], "noise must be in [0, inf), got -1"),
        (["fedspeed+dp:epsilon=1"], "epsilon"),
        (["fedspeed+quantise:9"], "bits must be in [1, 8], got 9"),
        (["fedspeed+topk:fraction=0.1,fraction=0.2"], "expected one value for fraction, found two"),
        (["fedspeed+topk:0"], "fraction must be in (0, 1], got 0"),
        (["fedspeed+clip:loud"], "norm must be a number, got 'loud'"),
        (["fedspeed+topk:base=fedavg"], "expected wrappers without base after a +"),
        (["fedspeed+tpk:0.1"], "method"),
    ],
)
def test_bad_input_is_one_line(words, told, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["compare", *words, "--data", "digits", "--clients", "20", "--active", "4", "--out", str(out)]) == 2
    message = capsys.readouterr().err
    assert told in " ".join(message.split())
    assert not out.exists()


def test_run_takes_wrappers_by_name(tmp_path):
    words = ["--data", "digits", "--clients", "20", "--active", "4", "--rounds", "1", "--quiet"]
    assert main(["run", "--method", "fedspeed:rho=0.05+quantise:2", *words, "--out", str(tmp_path / "run")]) == 0
    assert read_config(tmp_path / "run").method == Quantise(FedSpeed(rho=0.05), bits=2)


@pytest.mark.parametrize(("where", "noise", "dense"), [("clients", 1.0, 1), ("clients", 0.0, 0), ("server", 1.0, 0)])
def test_noise_of_clients_is_sent_whole(where, noise, dense):
    inner, v = TopK(FedAvg(), fraction=0.1), torch.zeros(100)
    up = FedAvg().upload(v, FedAvg().broadcast(FedAvg().init_server(v)), FedAvg().init_client(v), Local(1, 0.1, 1))[0]
    assert DP(inner, where=where, noise=noise).sent(up) == (400 if dense else inner.sent(up))


def test_without_the_accountant_a_run_says_what_to_install(monkeypatch):
    data = load_data("digits", clients=4)
    monkeypatch.setattr(privacy, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="fedspeed\\[privacy\\]"):
        Config.from_dict({"method": {"name": "dp", "base": "fedavg"}, "clients": 20, "active": 5})
    with pytest.raises(UserError, match="fedspeed\\[privacy\\]"):
        simulate(DP(FedAvg()), "linear", data, active=2)


def test_without_the_accountant_reports_and_lists_of_methods_work(monkeypatch, tmp_path):
    """As in a plain install: both make a value of every method."""
    monkeypatch.setattr(privacy, "find_spec", lambda name: None)
    assert main(["run", "--method", "fedavg", "--rounds", "1", "--quiet", "--out", str(tmp_path / "a")]) == 0
    assert main(["report", str(tmp_path / "a"), "-o", str(tmp_path / "report.html")]) == 0
    assert main(["methods"]) == 0
    assert main(["methods", "dp"]) == 0
