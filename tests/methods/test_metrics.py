"""Named numbers that a method and its clients report: one file, every engine, every back end."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from federations import Softmax
from watching import Rounds

from fedspeed import (
    Config,
    FedDyn,
    FedInit,
    FedSpeed,
    Method,
    Record,
    Scaffold,
    UserError,
    load_data,
    param,
    run_config,
    simulate,
)
from fedspeed.cli import main
from fedspeed.client.hooks import overrides
from fedspeed.errors import Diverged
from fedspeed.methods import METHODS
from fedspeed.record import MOST, older, rounds_digest
from fedspeed.report.diff import differences
from fedspeed.runs.fork import Origin
from fedspeed.runs.launch import resume
from fedspeed.runs.verify import round_mismatches, verify
from fedspeed.server.round import merged

FILE = """
from dataclasses import dataclass, replace
from typing import NamedTuple
from fedspeed import Method


class Model(NamedTuple):
    x: object


class Client(NamedTuple):
    turns: object


@dataclass(frozen=True)
class Telling(Method):
    block_safe = True

    def init_server(self, x0):
        return Model(x0)

    def init_client(self, x0):
        return Client(x0.new_zeros(1))

    def broadcast(self, server):
        return server

    def direction(self, x, grad, down, client):
        return grad(x)

    def upload(self, xK, down, client, run):
        return Model(xK - down.x), Client(client.turns + 1)

    def update(self, server, mean, round):
        return Model(server.x + mean.x)

    def client_metrics(self, xK, down, client, run):
        return {"moved": (xK - down.x).double().square().sum(), "turns": client.turns, "steps": run.K}

    def metrics(self, server, mean, round):
        return {"step": float(mean.x.norm()), "at": server.x.norm(), "unknown": float("nan")}
"""
GIVEN = ["--clients", "8", "--active", "4", "--local-steps", "2", "--split", "iid", "--model", "linear", "--quiet"]


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "telling.py"
    path.write_text(FILE)
    return f"{path}:Telling"


def lines(out) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (out / "rounds.jsonl").read_text().splitlines()]


def bits(out) -> list[Any]:
    rounds = [{k: v for k, v in r.items() if not k.endswith("seconds")} for r in lines(out)]
    return [rounds, (out / "model.safetensors").read_bytes()]


@pytest.mark.parametrize("engine", ["loop", pytest.param("block", marks=pytest.mark.slow)])
def test_a_metric_takes_one_file_and_gives_the_same_bits_everywhere(tmp_path, own, engine, quick_workers):
    """Against what the engine measures by itself: drift is the mean of ||x_iK - x||^2, the update's norm the step's."""
    runs = {}
    for name, extra in {"serial": [], "process": ["--workers", "2"]}.items():
        runs[name] = tmp_path / name
        place = ["--backend", name, "--engine", engine, "--out", str(runs[name])]
        assert main(["run", "--method", own, *GIVEN, "--rounds", "4", *place, *extra]) == 0
    turns = np.zeros(8)
    for told in lines(runs["serial"]):
        metrics = told["metrics"]
        assert list(metrics) == ["moved", "turns", "steps", "step", "at", "unknown"]
        assert metrics["moved"] == pytest.approx(told["drift"], rel=1e-5)
        assert metrics["step"] == pytest.approx(told["update_norm"], rel=1e-5)
        assert metrics["steps"] == 2.0
        assert metrics["unknown"] is None  # as JSON has it
        assert metrics["turns"] == turns[told["cohort"]].mean()
        turns[told["cohort"]] += 1
    assert bits(runs["serial"]) == bits(runs["process"])

    def stop(record):
        if record.round == 2:
            raise KeyboardInterrupt

    config = Config.from_toml(runs["serial"] / "config.toml")
    with pytest.raises(KeyboardInterrupt):
        run_config(config, tmp_path / "broken", observers=[Rounds(stop)])
    resume(tmp_path / "broken", allow_code=True)
    assert bits(tmp_path / "broken") == bits(runs["serial"])
    digests = [
        json.loads((out / "summary.json").read_text())["digests"] for out in (tmp_path / "broken", runs["serial"])
    ]
    assert digests[0] == digests[1]
    found = verify(runs["serial"], every_round=True, allow_code=True)
    assert found.broken == []
    assert any("run again: the same bits" in text for text in found.held)


def test_diff_and_verify_see_a_metric_that_was_changed(tmp_path, own):
    out = tmp_path / "a"
    assert main(["run", "--method", own, *GIVEN, "--rounds", "2", "--out", str(out)]) == 0
    assert main(["run", str(out / "config.toml"), "--out", str(tmp_path / "b"), "--quiet"]) == 0
    assert differences(out, tmp_path / "b") == []
    rounds = lines(tmp_path / "b")
    rounds[1]["metrics"]["steps"] = 3.0
    (tmp_path / "b" / "rounds.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rounds))
    (found,) = differences(out, tmp_path / "b")
    assert (found.section, found.name) == ("results", "round 2 (the first that differs): metrics.steps")
    assert (found.a, found.b) == (2.0, 3.0)
    assert any("metrics" in text for text in verify(tmp_path / "b", every_round=True, allow_code=True).broken)


def test_loop_and_block_agree_to_rounding(own):
    problem = Softmax(equal=6)
    settings = {"rounds": 3, "active": 5, "local_steps": 2, "batch_size": 3}
    runs = [
        [r.metrics for r in simulate(own, problem.model(), problem.federated(), engine=engine, **settings)]
        for engine in ("loop", "block")
    ]
    for a, b in zip(*runs, strict=True):
        assert list(a) == list(b)
        assert [a[name] for name in a] == pytest.approx([b[name] for name in b], rel=1e-9, nan_ok=True)


# --- what is refused ---


class Model(NamedTuple):
    x: torch.Tensor


@dataclass(frozen=True)
class Says(Method):
    """FedAvg that reports what it is told to."""

    block_safe = True
    hook: str = param("metrics", ("metrics", "client_metrics", "both"), "which")
    value: Any = None

    def init_server(self, x0):
        return Model(x0)

    def broadcast(self, server):
        return server

    def direction(self, x, grad, down, client):
        return grad(x)

    def upload(self, xK, down, client, run):
        return Model(xK - down.x), client

    def update(self, server, mean, round):
        return Model(server.x + mean.x)

    def metrics(self, server, mean, round):
        return self._say("metrics", server.x)

    def client_metrics(self, xK, down, client, run):
        return self._say("client_metrics", xK)

    def _say(self, hook, x):
        if self.hook not in (hook, "both"):
            return {}
        return self.value(x) if callable(self.value) else self.value


def says(hook: str, value: Any, engine: str = "loop", **settings):
    problem = Softmax(equal=6)
    settings = {"rounds": 2, "active": 4, "local_steps": 1, "batch_size": 3, "engine": engine, **settings}
    return simulate(Says(hook=hook, value=value), problem.model(), problem.federated(), **settings)


@pytest.mark.parametrize("engine", ["loop", "block"])
@pytest.mark.parametrize("hook", ["metrics", "client_metrics"])
@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, "must return a dict of names and numbers, found None"),
        ([("a", 1)], "must return a dict of names and numbers"),
        ({1: 2.0}, "must return names such as update_norm, found 1"),
        ({"a b": 2.0}, "must return names such as update_norm, found 'a b'"),
        ({"": 2.0}, "must return names such as update_norm, found ''"),
        ({"a": "2"}, "must return numbers, found a = '2'"),
        ({"a": None}, "must return numbers, found a = None"),
        ({"a": 1j}, "must return numbers, found a = 1j"),
        ({"a": torch.zeros(3)}, "must return numbers, found a = tensor"),
        ({"a": torch.zeros((), dtype=torch.complex64)}, "must return numbers, found a = tensor"),
        (lambda x: (x.zero_(), {})[1], r"must not change (server\.x|xK) in place"),
    ],
)
def test_anything_but_names_and_numbers_is_refused_with_the_hook(engine, hook, value, told):
    run = says(hook, value, engine)
    with pytest.raises(UserError, match=rf"Says\.{hook} {told}") as caught:
        run.step()
    assert "test_metrics.py, line" in str(caught.value)
    assert run.t == 0


@pytest.mark.parametrize("value", [3, 2.5, True, np.float32(0.5), np.int64(4), torch.tensor(1.5), torch.ones(1)])
def test_real_numbers_of_every_kind(value):
    for hook in ("metrics", "client_metrics"):
        (record, _) = says(hook, {"a": value})
        assert record.metrics == {"a": float(value)}
        assert type(record.metrics["a"]) is float


@pytest.mark.parametrize(
    "value", [math.inf, -math.inf, math.nan, 10**400, -(10**400), MOST, -2 * MOST], ids=lambda v: f"{v!r:.6}"
)
def test_a_number_that_is_not_finite_ends_no_run_and_is_null(value):
    (record, _) = says("metrics", {"a": value})
    assert math.copysign(1, record.metrics["a"]) == (-1 if value < 0 else 1)
    assert not abs(record.metrics["a"]) < MOST
    assert Record.from_dict(json.loads(json.dumps(record.to_dict()))).to_dict()["metrics"] == {"a": None}


@pytest.mark.parametrize("engine", ["loop", "block"])
def test_a_hook_that_raises(engine):
    def fail(x):
        raise ZeroDivisionError("nothing")

    with pytest.raises(UserError, match=r"Says\.metrics: round 1: ZeroDivisionError: nothing \(.*test_metrics.py"):
        says("metrics", fail, engine).step()
    with pytest.raises(Exception, match=r"client \d, step 1 of 1: ZeroDivisionError: nothing"):
        says("client_metrics", fail, engine).step()


def test_one_name_is_reported_once():
    with pytest.raises(UserError, match="Says: metrics and client_metrics both report a; give one of them another"):
        says("both", {"a": 1.0}).step()


@pytest.mark.parametrize("engine", ["loop", "block"])
def test_divergence_is_not_blamed_on_the_metric(engine):
    for hook in ("metrics", "client_metrics"):
        with pytest.raises(Diverged, match="diverged"):
            list(says(hook, lambda x: {"norm": x.norm()}, engine, lr=1e200, rounds=9, lr_decay=1.0))


def test_the_mean_is_over_those_who_report_in_their_order():
    told = [{"norm": 1.0}, None, {"norm": 2.0, "cosine": 0.5}]
    replies = [SimpleNamespace(facts=SimpleNamespace(metrics=metrics)) for metrics in told]
    assert merged(Says(), {"own": 3.0}, replies) == {"norm": 1.5, "cosine": 0.5, "own": 3.0}


# --- wrappers, and those who report nothing ---


def test_a_method_inside_a_wrapper_reports(own):
    problem = Softmax(equal=6)
    base = Says(hook="client_metrics", value=lambda x: {"norm": x.norm()})
    settings = {"rounds": 2, "active": 4, "local_steps": 1, "batch_size": 3}
    inside = list(simulate(FedInit(base, beta=0.0), problem.model(), problem.federated(), **settings))
    outside = list(simulate(base, problem.model(), problem.federated(), **settings))
    assert [r.metrics for r in inside] == [r.metrics for r in outside]
    assert inside[0].metrics["norm"] > 0


@pytest.mark.parametrize("cls", METHODS.values(), ids=list(METHODS))
def test_a_method_without_the_hooks_is_not_asked(cls, monkeypatch):
    assert not any(overrides(m, hook) for m in (cls(), FedInit(cls())) for hook in ("metrics", "client_metrics"))
    for hook in ("metrics", "client_metrics"):
        monkeypatch.setattr(Method, hook, None)  # a call would fail
    problem = Softmax()
    (record,) = simulate(cls(), problem.model(), problem.federated(), rounds=1, active=7, local_steps=1, batch_size=2)
    assert record.to_dict().get("metrics", {}).keys() <= {"x_norm", "H_norm", "c_norm"}  # the engine's


# --- a client that raises in a block ---


@pytest.mark.parametrize("backend", ["serial", pytest.param("process", marks=pytest.mark.slow)])
@pytest.mark.parametrize("hook", ["direction", "upload", "client_metrics"])
def test_one_client_of_a_block_that_raises_is_dropped_and_the_others_stay(hook, backend):
    problem = Softmax(clients=6, equal=6)
    data = problem.federated()
    data.x[2 * 6 : 3 * 6] *= 1e6  # client 2, whose gradient is then huge
    settings = {"rounds": 2, "active": 6, "local_steps": 1, "batch_size": 6, "on_client_error": "drop"}
    runs = [
        simulate(Choosy(hook=hook), problem.model(), data, engine=engine, backend=backend, workers=2, **settings)
        for engine in ("loop", "block")
    ]
    loop, block = (list(run) for run in runs)
    assert [r.dropped for r in loop] == [r.dropped for r in block] == [[2], [2]]
    assert [r.update_norm for r in loop] == pytest.approx([r.update_norm for r in block], rel=1e-9)


@dataclass(frozen=True)
class Choosy(Says):
    """Raises at a huge step, in one hook."""

    block_safe = True
    hook: str = param("direction", ("direction", "upload", "client_metrics"), "where")

    def _refuse(self, hook, v):
        if hook == self.hook and bool((v.abs() > 1e4).any()):
            raise RuntimeError("too much")

    def direction(self, x, grad, down, client):
        g = grad(x)
        self._refuse("direction", g)
        return g

    def upload(self, xK, down, client, run):
        self._refuse("upload", xK)
        return super().upload(xK, down, client, run)

    def client_metrics(self, xK, down, client, run):
        self._refuse("client_metrics", xK)
        return {}

    def metrics(self, server, mean, round):
        return {}


@pytest.mark.parametrize("method", [FedSpeed(), FedDyn(), Scaffold(), FedInit(FedSpeed())])
def test_norms_of_x_and_of_the_running_mean_are_recorded(method):
    """H is the mean over all clients of what each keeps: summed here from the clients' own states."""
    data = load_data("digits", split="iid", clients=6)
    run = simulate(method, "linear", data, rounds=3, active=2, local_steps=2, batch_size=10, backend="serial")
    records = list(run)
    field = method.running_mean[0]
    kept = [attrgetter(field)(run.client_state(i)).double() for i in range(6)]
    expected = float((sum(kept) / 6).norm())
    name = {"h": "H_norm", "c": "c_norm"}[field.rpartition(".")[2]]
    assert records[-1].metrics.keys() == {"x_norm", name}
    assert records[-1].metrics[name] == pytest.approx(expected, rel=1e-5)
    assert records[-1].metrics["x_norm"] == pytest.approx(float(run.server.x.norm()), rel=1e-12)
    assert all(r.metrics["x_norm"] > 0 for r in records)


def test_no_norms_without_a_running_mean():
    data = load_data("digits", split="iid", clients=6)
    run = simulate(FedSpeed(server="active"), "linear", data, rounds=1, active=2, local_steps=1, backend="serial")
    assert next(iter(run)).metrics == {}


def test_a_run_that_is_older_than_the_norms_is_verified(tmp_path):
    """Its records lack them, and nothing else is forgiven."""
    out = tmp_path / "run"
    run_config(Config.from_dict({"method": "fedspeed", "model": "linear", "rounds": 2, "clients": 6, "active": 2,
                                 "local_steps": 1, "backend": "serial"}), out)  # fmt: skip
    new = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    again, before = Record.from_dict(new[0]), Record.from_dict({k: v for k, v in new[0].items() if k != "metrics"})
    assert round_mismatches(again, before) == []
    assert round_mismatches(again, again) == []
    (wrong,) = round_mismatches(again, replace(again, metrics={**again.metrics, "H_norm": 0.0}))
    assert "metrics" in wrong


def test_a_method_s_own_norm_is_verified_as_any_number():
    """A method without a running mean has no norms of the engine's: what it calls step_norm is its own."""
    told = {"step_norm": 0.5}
    costs = {"drift": 0.0, "update_norm": 0.0, "bytes_down": 1, "bytes_up": 1, "grad_evals": 1.0, "eval_seconds": 0.5}
    record = Record(round=1, cohort=[], lr=0.1, train_loss=1.0, test_loss=None, test_accuracy=None, dropped=[],
                    stragglers=[], seconds=1.0, metrics=told, **costs)  # fmt: skip
    assert round_mismatches(record, record) == []
    assert round_mismatches(record, replace(record, metrics={})) != []


def test_a_run_that_is_older_than_the_norms_can_be_forked(tmp_path):
    """Its first rounds are run again with norms, and are still its own."""
    out = tmp_path / "run"
    run_config(Config.from_dict({"method": "fedspeed", "model": "linear", "rounds": 4, "clients": 6, "active": 2,
                                 "local_steps": 1, "backend": "serial"}), out)  # fmt: skip
    records = [Record.from_dict(json.loads(line)) for line in (out / "rounds.jsonl").read_text().splitlines()]
    parent = Origin(str(out), 2, rounds_digest(older(r) for r in records[:2]), {})
    assert parent.mismatches(records) == []
    assert parent.mismatches([replace(records[0], lr=0.2), *records[1:]]) != []
