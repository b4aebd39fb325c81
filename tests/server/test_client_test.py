"""Scores on each client's test part: the server's model, clients' own models, and the model after local steps."""

from __future__ import annotations

import copy
import math
import shutil

import numpy as np
import pytest
import torch
from same_bits import SETTINGS, assert_same_bits, leaves
from torch import nn

from fedspeed import load_data, load_runs, simulate
from fedspeed.backends.serial import Serial
from fedspeed.cli import main
from fedspeed.config.config import Config
from fedspeed.config.plan import Plan
from fedspeed.data import federate, from_arrays
from fedspeed.data.federated import Federated
from fedspeed.errors import UserError
from fedspeed.methods import FedAvg, FedSpeed
from fedspeed.models import build_model
from fedspeed.record import Record
from fedspeed.report.run_files import numbers
from fedspeed.runs.directory import RunDir
from fedspeed.runs.launch import load_federation, resume, run_config
from fedspeed.runs.verify import verify
from fedspeed.server.client_metrics import ClientMetrics, parse
from fedspeed.utils.registry import BACKENDS

FIXED = {"lr": 1e-30, "weight_decay": 0.0, "local_steps": 1, "rounds": 1, "engine": "loop"}
"""Settings with which training leaves the model as it is, up to 1e-30."""
RIGHT = [(3, 4), (0, 5), (0, 0), (700, 700), (2, 8)]
"""Right answers and test rows of each client; the third has none, the fourth fills more than a slice."""


def counted():
    """Inputs that are class numbers, one-hot, and targets that differ from them where the answer is to be wrong."""
    right = np.concatenate([np.arange(n) < k for k, n in RIGHT])
    seen = np.arange(len(right)) % 3
    held = (np.eye(3, dtype="f4")[seen], np.where(right, seen, (seen + 1) % 3))
    owned = np.split(np.arange(len(right)), np.cumsum([n for _, n in RIGHT])[:-1])
    x = np.eye(3, dtype="f4")[np.arange(50) % 3]
    return Federated.from_arrays(x, np.arange(50) % 3, np.arange(50) // 10, held, client_test=owned)


def identity():
    model = nn.Linear(3, 3, bias=False)
    nn.init.eye_(model.weight)
    return model


def test_accuracies_that_were_counted():
    asked = {**FIXED, "active": 2, "client_metrics": "every=1,own,personalised=2"}
    with simulate("fedavg", identity(), counted(), **asked) as run:
        (record,) = run
        found = run.client_metrics
    assert found.on == "test"
    assert found.samples.tolist() == [n for _, n in RIGHT]
    wanted = np.array([k / n if n else math.nan for k, n in RIGHT])
    np.testing.assert_array_equal(found.accuracy[0], wanted)
    np.testing.assert_array_equal(found.personalised_accuracy[0], wanted)
    active = np.isin(np.arange(5), record.cohort)
    np.testing.assert_array_equal(found.own_accuracy[0], np.where(active, wanted, math.nan))
    # cross-entropy of (1, 0, 0): log(e + 2) - 1 where the answer is right, log(e + 2) where it is not
    np.testing.assert_allclose(found.loss[0], math.log(math.e + 2) - wanted, rtol=1e-6)
    assert record.client_train == {}
    kept = np.float32(wanted[[0, 1, 3, 4]]).astype(float)
    told = record.client_test
    assert told["clients"] == told["personalised_clients"] == 4
    assert told["own_clients"] == (active & ~np.isnan(wanted)).sum()
    assert told["accuracy_mean"] == pytest.approx(kept.mean(), abs=1e-15)
    assert told["accuracy_sd"] == pytest.approx(kept.std(), abs=1e-15)
    pooled = sum(k for k, _ in RIGHT) / sum(n for _, n in RIGHT)
    assert told["accuracy_weighted"] == pytest.approx(pooled, abs=1e-7)  # scores are kept in float32
    assert record.test_accuracy == pytest.approx(pooled)
    assert (told["accuracy_worst10"], told["accuracy_best10"]) == (0.0, 1.0)
    assert told["accuracy_median"] == np.median(kept) == 0.5
    assert told["accuracy_q10"] == pytest.approx(np.quantile(kept, 0.1))
    assert told["loss_worst10"] == pytest.approx(math.log(math.e + 2), rel=1e-6)


def test_a_share_of_the_training_data():
    """A fixed linear model, its right answers counted by NumPy on the rows that were drawn."""
    r = np.random.default_rng(0)
    x, y = r.normal(size=(300, 6)).astype("f4"), r.integers(0, 3, 300)
    data = Federated.from_arrays(x, y, np.repeat(np.arange(4), [1, 9, 90, 200]), classes=3).with_client_test(0.3)
    model = nn.Linear(6, 3)
    with simulate("fedspeed", model, data, **FIXED, active=4, client_metrics="every=1,own") as run:
        next(iter(run))
        found = run.client_metrics
    answers = (x @ model.weight.detach().numpy().T + model.bias.detach().numpy()).argmax(1)
    rows, offsets, _ = data.client_test
    for i in range(4):
        drawn = rows[offsets[i] : offsets[i + 1]]
        share = (answers[drawn] == y[drawn]).mean() if len(drawn) else math.nan
        np.testing.assert_array_equal((found.accuracy[0, i], found.own_accuracy[0, i]), (share, share))
    assert found.samples.tolist() == [0, 3, 27, 60]


def test_worst_and_best_tenth():
    """Of 25 clients a tenth is 2.5, which rounds to 3."""
    r = np.random.default_rng(1)
    accuracy, loss = r.random((1, 25)).astype("f4"), r.random((1, 25)).astype("f4")
    found = ClientMetrics(np.array([7]), np.ones(25, int), loss, accuracy).statistics()
    order = np.sort(accuracy[0].astype(float)), np.sort(loss[0].astype(float))
    assert found["accuracy_worst10"] == pytest.approx(order[0][:3].mean())
    assert found["accuracy_best10"] == pytest.approx(order[0][-3:].mean())
    assert found["loss_worst10"] == pytest.approx(order[1][-3:].mean())
    assert found["loss_best10"] == pytest.approx(order[1][:3].mean())
    empty = ClientMetrics(np.array([7]), np.zeros(2, int), *np.full((2, 1, 2), np.nan)).statistics()
    assert empty == {"clients": 0}
    huge = ClientMetrics(np.array([7]), np.ones(2, int), np.array([[1e300, 1]]), np.full((1, 2), np.nan)).statistics()
    assert huge["loss_mean"] == math.inf
    assert not any(name.startswith("accuracy") for name in huge)


# --- personalised scores ---


def softmax_loop(x, y, weight, bias, steps, lr, decay):
    """Full-batch gradient descent on softmax regression, in NumPy."""
    target = np.eye(len(bias))[y]
    for _ in range(steps):
        z = x @ weight.T + bias
        p = np.exp(z - z.max(1, keepdims=True))
        g = (p / p.sum(1, keepdims=True) - target) / len(x)
        weight, bias = weight - lr * (g.T @ x + decay * weight), bias - lr * (g.sum(0) + decay * bias)
    return weight, bias


@pytest.mark.parametrize("method", ["fedavg", "fedspeed", "scaffold"])
def test_a_personalised_score_is_that_of_a_plain_loop(method):
    r = np.random.default_rng(0)
    x, y = r.normal(size=(120, 5)), r.integers(0, 3, 120)
    data = Federated.from_arrays(x, y, np.repeat(np.arange(4), [1, 20, 39, 60]), classes=3).with_client_test(0.4)
    torch.manual_seed(0)
    settings = {"rounds": 2, "active": 2, "batch_size": 100, "lr": 0.5, "lr_decay": 0.5, "weight_decay": 0.05}
    with simulate(method, nn.Linear(5, 3).double(), data, **settings, client_metrics="every=2,personalised=6") as run:
        assert [record.client_test == {} for record in run] == [True, False]
        found, model = run.client_metrics, copy.deepcopy(run.model)
    assert found.own_loss is None
    start = model.weight.detach().numpy(), model.bias.detach().numpy()
    rows, offsets, _ = data.client_test
    assert np.isnan(found.personalised_loss[0, 0])
    for i in range(1, 4):
        own, drawn = data.rows(i), rows[offsets[i] : offsets[i + 1]]
        weight, bias = softmax_loop(x[own], y[own], *start, steps=6, lr=0.5 * 0.5, decay=0.05)  # the rate of round 2
        z = x[drawn] @ weight.T + bias
        loss = (np.log(np.exp(z).sum(1)) - z[np.arange(len(z)), y[drawn]]).mean()
        assert found.personalised_loss[0, i] == pytest.approx(loss, abs=1e-12)
        assert found.personalised_accuracy[0, i] == (z.argmax(1) == y[drawn]).mean()
        assert abs(found.personalised_loss[0, i] - found.loss[0, i]) > 1e-6


def test_minibatches_of_the_clients_rows():
    """Five steps of batches of 4 of 8 rows: each epoch sees every row once, in torch's own SGD."""
    r = np.random.default_rng(0)
    x, y = r.normal(size=(10, 3)), r.normal(size=(10, 1))
    data = Federated.from_arrays(x, y, np.zeros(10, int)).with_client_test(0.2)
    seen = []

    def watched(output, targets):
        if torch.is_grad_enabled():
            seen.append(targets[:, 0].tolist())
        return nn.functional.mse_loss(output, targets)

    asked = {"rounds": 1, "local_steps": 1, "batch_size": 4, "client_metrics": "every=1,personalised=5"}
    with simulate("fedavg", nn.Linear(3, 1).double(), data, loss=watched, **asked, engine="loop") as run:
        next(iter(run))
        found, model = run.client_metrics, copy.deepcopy(run.model).train()
    batches, rows = seen[-5:], data.rows(0)
    for epoch in (batches[:2], batches[2:4]):
        assert sorted(value for batch in epoch for value in batch) == sorted(y[rows, 0].tolist())
    assert set(batches[4]) < set(y[rows, 0].tolist())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=1e-3)
    for batch in batches:
        taken = [int(np.flatnonzero(y[:, 0] == value)[0]) for value in batch]
        optimiser.zero_grad()
        nn.functional.mse_loss(model(torch.tensor(x[taken])), torch.tensor(y[taken])).backward()
        optimiser.step()
    drawn = data.client_test.indices
    error = nn.functional.mse_loss(model(torch.tensor(x[drawn])), torch.tensor(y[drawn])).detach()
    assert found.personalised_loss[0, 0] == pytest.approx(float(error), abs=1e-12)
    assert np.isnan(found.personalised_accuracy).all()  # regression has losses only


@pytest.mark.parametrize("kept", ["average", "local"])
def test_running_statistics_follow_the_local_steps(kept):
    r = np.random.default_rng(0)
    x, y = r.normal(3, 2, size=(80, 4)), r.integers(0, 2, 80)
    data = Federated.from_arrays(x, y, np.arange(80) // 20, classes=2).with_client_test(0.25)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    asked = {"rounds": 2, "active": 2, "batch_size": 50, "weight_decay": 0.0, "lr_decay": 1.0, "batch_norm": kept}
    with simulate("fedavg", net, data, **asked, client_metrics="every=2,personalised=3") as run:
        list(run)
        found, server = run.client_metrics, copy.deepcopy(run.model)
    for i in range(4):
        model, rows = copy.deepcopy(server).train(), torch.from_numpy(data.rows(i))
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(data.x[rows]), data.y[rows]).backward()
            optimiser.step()
        drawn = torch.from_numpy(data.client_test.indices[5 * i : 5 * i + 5])
        loss = nn.functional.cross_entropy(model.eval()(data.x[drawn]), data.y[drawn]).detach()
        assert found.personalised_loss[0, i] == pytest.approx(float(loss), abs=1e-10)


def test_it_expects_a_test_part(tmp_path, capsys):
    data = load_data("digits", clients=5)
    with pytest.raises(UserError, match="personalised expects a test part per client, found none") as caught:
        simulate("fedavg", "linear", data, client_metrics="every=1,personalised=2")
    assert "\n" not in str(caught.value)
    out = str(tmp_path / "run")
    assert main(["run", "--client-metrics", "every=1,personalised=2", "--rounds", "1", "--out", out]) == 2
    assert "--client-test 0.2" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_part_of_the_data_is_no_setting_of_simulate():
    for name in ("client_test", "validation"):
        with pytest.raises(UserError, match=rf"{name}: expected as a part of the data, .*with_{name}"):
            simulate("fedavg", "linear", load_data("digits", clients=5), **{name: 0.2})


def test_devices_have_no_test_part():
    from fedspeed.flower.device import own_part

    data = load_data("digits", clients=5, client_test=0.2)
    with pytest.raises(UserError, match="expected no test part per client, found one"):
        own_part(data, 2, 5)


def test_without_the_test_set_there_are_no_own_parts(tmp_path):
    """As `tune` runs its trials; a share of the training data stays set aside."""
    ids, x = np.repeat(np.arange(4), 10), np.arange(40.0)[:, None]
    np.savez(tmp_path / "d.npz", x=x, y=np.arange(40) % 2, client=ids)
    tables = {"data": "arrays", "data_dir": str(tmp_path / "d.npz"), "split": "natural", "test_set": False}
    for given, held in (("own", False), ("0.25", True)):
        data = load_federation(Config.from_dict({**tables, "client_test": given}))[1]
        assert (data.client_test is not None) == held
        assert data.x_test is None
        assert len(data.indices) == (24 if held else 32)


# --- training does not notice; every back end; resumed runs ---


def pictures():
    """Data that are augmented, with a test part per client, and a model that draws random numbers."""
    r = np.random.default_rng(0)
    samples = from_arrays(r.integers(0, 255, (200, 3, 8, 8), dtype=np.uint8), r.integers(0, 4, 200))
    data = federate(samples, split="dirichlet-class:0.5", clients=12, augment="paper", client_test=0.3)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(0.3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
    return data, net


class Noisy(FedAvg):
    """Draws from torch's own generator, as it stands after the last step."""

    def upload(self, xK, down, client, run):
        up, client = super().upload(xK, down, client, run)
        return up._replace(D=up.D + 0.1 * torch.rand_like(up.D)), client


def trained(data, model, method, **settings):
    """Records without scores of clients, the model and the states."""
    with simulate(method, model, data, **{**SETTINGS, **settings}) as run:
        records = [{k: v for k, v in r.to_dict().items() if not k.startswith(("client_t", "seconds", "eval_s"))}
                   for r in run]  # fmt: skip
        return records, run.x, {i: run.states.get(i) for i in run.states}


@pytest.mark.parametrize("method", [FedSpeed(), Noisy()], ids=lambda m: type(m).__name__)
def test_training_does_not_notice(method):
    torch.manual_seed(0)
    data, net = pictures()
    off = trained(data, net, method)
    assert_same_bits(off, trained(data, net, method, client_metrics="every=1,own,personalised=3"))


def test_the_block_engine_does_not_notice():
    data = load_data("digits", split="dirichlet-class:0.5", clients=12, client_test=0.2)
    model = build_model("mlp", data, hidden=[8])
    asked = {"client_metrics": "every=1,own,personalised=3", "engine": "block"}
    assert_same_bits(trained(data, model, FedSpeed(), engine="block"), trained(data, model, FedSpeed(), **asked))


class Plain:
    """A back end from outside the package that knows nothing of scores of clients."""

    def __init__(self, work, workers, touched):
        self.inner = Serial(work)

    def run(self, jobs, down, state):
        return self.inner.run(jobs, down, state)

    def evaluate(self, x, validation=False):
        return self.inner.evaluate(x, validation)

    def close(self):
        pass


def scores(held, **settings):
    """The file's bytes, the records' numbers, the model and the states of a run."""
    if held:
        ids = np.repeat(np.arange(12), np.arange(6, 30, 2))
        r = np.random.default_rng(0)
        x, y = r.normal(size=(len(ids), 5)).astype("f4"), r.integers(0, 3, len(ids))
        data = federate(from_arrays(x, y, clients=ids, holdout=0.3), split="natural", client_test="own")
        model = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.2), nn.Linear(6, 3))
    else:
        data = load_data("digits", split="dirichlet-class:0.5", clients=12, client_test=0.2, validation=0.1)
        model = build_model("mlp", data, hidden=[8])
    asked = {**SETTINGS, "client_metrics": "every=2,own,personalised=3", **settings}
    with simulate(FedSpeed(), model, data, **asked) as run:
        found = [(run.client_metrics.header() + run.client_metrics.blocks(), r.client_test) for r in run
                 if run.client_metrics is not None]  # fmt: skip
        return found, run.x, {i: run.states.get(i) for i in run.states}


def assert_same(here, there):
    assert len(here[0]) == 2
    assert here[0] == there[0]
    assert torch.equal(here[1], there[1])
    assert all(torch.equal(a, b) for i in here[2] for a, b in zip(leaves(here[2][i]), leaves(there[2][i]), strict=True))


@pytest.mark.parametrize("held", [False, True])
def test_the_same_numbers_on_every_back_end(held, monkeypatch, quick_workers):
    monkeypatch.setitem(BACKENDS, "plain", f"{__name__}:Plain")
    torch.manual_seed(0)
    here = scores(held)
    for placed in ({"backend": "process", "workers": 2}, {"backend": "plain"}):
        torch.manual_seed(0)
        assert_same(here, scores(held, **placed))


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.filterwarnings("ignore")
def test_the_same_numbers_on_ray():
    pytest.importorskip("ray")
    assert_same(scores(False), scores(False, backend="ray", workers=2))


SMALL = {"model": "linear", "rounds": 5, "clients": 12, "active": 4, "local_steps": 2, "batch_size": 10,
         "split": "dirichlet-class:0.5", "method": "fedspeed", "backend": "serial", "client_test": "0.2",
         "client_metrics": "every=2,own,personalised=2"}  # fmt: skip


def run_of(tables, out):
    run_config(Config.from_dict(tables), out)
    return RunDir(out)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return run_of(SMALL, tmp_path_factory.mktemp("client-test") / "run")


def test_the_file_and_the_records(straight):
    found = straight.client_metrics()
    assert found.on == "test"
    assert found.columns == ("loss", "accuracy", "own_loss", "own_accuracy", "personalised_loss",
                             "personalised_accuracy")  # fmt: skip
    assert found.digest() == parse(straight.client_metrics_file.read_bytes()).digest()
    records = straight.records()
    assert [bool(r.client_test) for r in records] == [False, True, False, True, True]
    for at, t in enumerate(found.rounds):
        assert found.some(np.arange(3) == at).statistics() == records[t - 1].client_test  # to the last digit
    assert Record.from_dict(records[1].to_dict()) == records[1]
    rows = found.rows()
    assert len(rows) == 3 * 12
    values = {name: pytest.approx(float(getattr(found, name)[1, 1]), nan_ok=True) for name in found.columns}
    assert rows[13] == {"round": 4, "client": 1, "samples": int(found.samples[1]), **values}


class Stop(Exception):
    pass


@pytest.mark.parametrize("when", [1, 2, 4])
def test_a_resumed_run_has_the_same_scores(straight, tmp_path, monkeypatch, when):
    from fedspeed.runs import recorder

    real = recorder.line

    def stop(record):
        if record.round == when + 1:
            raise Stop
        return real(record)

    with monkeypatch.context() as patch:
        patch.setattr(recorder, "line", stop)
        with pytest.raises(Stop):
            run_of(SMALL, tmp_path / "run")
    run = RunDir(tmp_path / "run")
    resume(run.path)
    assert run.client_metrics_file.read_bytes() == straight.client_metrics_file.read_bytes()
    assert run.summary()["digests"] == straight.summary()["digests"]


def test_verify_computes_them_again(straight, tmp_path):
    found = verify(straight.path, every_round=True)
    assert found.broken == []
    shutil.copytree(straight.path, tmp_path / "run")
    file = RunDir(tmp_path / "run").client_metrics_file
    content = bytearray(file.read_bytes())
    content[-3] ^= 1  # in the last personalised score
    file.write_bytes(content)
    assert verify(tmp_path / "run", every_round=True).broken
    config = RunDir(tmp_path / "run").config_file
    config.write_text(config.read_text().replace('client_test = "0.2"', 'client_test = "0.3"'))
    with pytest.raises(UserError):
        resume(tmp_path / "run", rounds=6)


def test_a_run_of_an_older_version_has_no_scores_in_its_records(tmp_path):
    """Scores on training data were in client_metrics.bin alone; such a directory is still whole."""
    import json

    from fedspeed.runs.verify import round_mismatches

    run = run_of({**SMALL, "client_test": "", "client_metrics": "every=2"}, tmp_path / "run")
    record = run.records()[1]
    before = {k: v for k, v in json.loads(run.rounds_file.read_text().splitlines()[1]).items() if k != "client_train"}
    assert record.client_train["clients"] == 12
    assert round_mismatches(record, Record.from_dict(before)) == []
    changed = {**before, "client_train": {"clients": 11}}
    assert len(round_mismatches(record, Record.from_dict(changed))) == 1


def test_forks_keep_the_part(straight, tmp_path, capsys):
    fork = ["fork", str(straight.path), "--at", "2", "--out", str(tmp_path / "fork"), "--quiet"]
    assert main([*fork, "--set", "lr=0.05"]) == 0
    found, before = RunDir(tmp_path / "fork").client_metrics(), straight.client_metrics()
    assert found.rounds.tolist() == [2, 4, 5]
    assert found.some(found.rounds == 2).blocks() == before.some(before.rounds == 2).blocks()
    assert verify(tmp_path / "fork", every_round=True).broken == []
    assert main([*fork[:-3], "--out", str(tmp_path / "other"), "--set", "client_test=0.3"]) == 2
    assert "what was held out stays held out" in capsys.readouterr().err


def test_replay(straight, capsys):
    client = straight.records()[1].cohort[0]
    assert main(["replay", str(straight.path), "--round", "2", "--client", str(client)]) == 0


# --- readers ---


def test_load_runs_and_export(straight, tmp_path, capsys):
    pytest.importorskip("pandas")
    table = load_runs(straight.path)
    told = straight.records()[3].client_test
    row = table[table["round"] == 4].iloc[0]
    for name in ("accuracy_mean", "accuracy_worst10", "own_accuracy_sd", "personalised_accuracy_median"):
        assert row[f"client_test.{name}"] == told[name]
    assert table["client_test.accuracy_mean"].isna().tolist() == [True, False, True, False, False]
    assert numbers(straight.records()[3])["client_test/accuracy_sd"] == told["accuracy_sd"]
    assert main(["export", str(straight.path), "--to", "csv", "-o", str(tmp_path / "t.csv")]) == 0
    assert "client_test.personalised_accuracy_worst10" in (tmp_path / "t.csv").read_text().splitlines()[0]


# --- settings ---

BAD = ("personalised", "personalised=0", "personalised=-1", "personalised=x", "personalised=1.5", "personalised=5,own",
       "personalised=5,personalised=5")  # fmt: skip


@pytest.mark.parametrize("given", ["personalised=5", *(f"every=2,{bad}" for bad in BAD)])
def test_bad_settings_in_one_line(given, capsys):
    with pytest.raises(UserError, match=r"client_metrics: expected every=N .*personalised=M .*, got") as caught:
        Plan(client_metrics=given)
    assert "\n" not in str(caught.value)
    assert main(["run", "--client-metrics", given, "--rounds", "1"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_one_spelling():
    assert Plan(client_metrics="every=3, personalized=5").client_metrics == "every=3,personalised=5"
    plan = Plan(rounds=9, client_metrics="every=3,own,personalised=12")
    assert (plan.personal_steps, plan.scores_clients(3, own=True), plan.scores_clients(4)) == (12, True, False)
    assert not Plan(rounds=9, client_metrics="every=3,personalised=12").scores_clients(3, own=True)
    assert Plan().personal_steps == 0
