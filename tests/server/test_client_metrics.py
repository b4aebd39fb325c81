"""Scores on every client's data: against a loop over clients, on every back end, after kills, in the file."""

from __future__ import annotations

import copy
import json
import shutil

import numpy as np
import pytest
import torch
from same_bits import SETTINGS, assert_same_bits, digits, outcome
from torch import nn

from fedspeed import simulate
from fedspeed.backends.serial import Serial
from fedspeed.cli import main
from fedspeed.config.config import Config
from fedspeed.config.plan import Plan
from fedspeed.data.federated import Federated
from fedspeed.errors import UserError
from fedspeed.methods import FedAvg, FedSpeed
from fedspeed.report.diff import differences
from fedspeed.runs.directory import RunDir
from fedspeed.runs.launch import resume, run_config
from fedspeed.runs.verify import verify
from fedspeed.server.client_metrics import ClientMetrics, parse
from fedspeed.utils.registry import BACKENDS

SMALL = {"model": "linear", "rounds": 5, "clients": 12, "active": 4, "local_steps": 2, "batch_size": 10,
         "split": "dirichlet-class:0.5", "method": "fedspeed", "backend": "serial", "eval_every": 2}  # fmt: skip
ASKED = {**SMALL, "client_metrics": "every=2,own"}


def by_hand(model, data, loss=nn.functional.cross_entropy):
    """Loss and accuracy of a module on each client's rows, one client after the other, in float64."""
    model = copy.deepcopy(model).double().eval().requires_grad_(False)
    found = []
    for i in range(data.clients):
        rows = torch.from_numpy(data.rows(i))
        inputs = data.pipeline(data.x[rows], None).double()
        output = model(inputs)
        found.append((float(loss(output, data.y[rows])), float((output.argmax(1) == data.y[rows]).double().mean())))
    return np.array(found).T


def large():
    """Clients that lie in several slices, and slices with several clients."""
    r, owner = np.random.default_rng(0), np.repeat(np.arange(5), [3, 1100, 40, 500, 7])
    return Federated.from_arrays(r.normal(size=(1650, 6)).astype("f4"), r.integers(0, 3, 1650), owner, classes=3)


def smooth(output, targets):
    return nn.functional.cross_entropy(output, targets, label_smoothing=0.1)


@pytest.mark.parametrize("loss", [nn.functional.cross_entropy, smooth])
def test_against_a_loop_over_clients(loss):
    data = large()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3))
    settings = {"rounds": 3, "active": 2, "local_steps": 3, "client_metrics": "every=2", "engine": "loop"}
    with simulate("fedavg", net, data, loss=loss, **settings) as run:
        for record in run:
            if record.round == 1:
                assert run.client_metrics is None
                continue
            wanted = by_hand(run.model, data, loss)
            found = run.client_metrics
            assert found.rounds.tolist() == [record.round]
            assert found.samples.tolist() == [3, 1100, 40, 500, 7]
            assert found.on == "train"
            assert found.own_loss is None
            np.testing.assert_allclose(found.loss[0], wanted[0], rtol=1e-5)
            np.testing.assert_array_equal(found.accuracy[0], wanted[1])


@pytest.mark.parametrize("engine", ["loop", "block"])
def test_own_models(engine):
    """With one client active, an aggregate of one upload and no momentum, the server's model is the client's own."""
    data, model = digits()
    common = {"rounds": 2, "active": 1, "local_steps": 3, "engine": engine, "client_metrics": "every=1,own"}
    with simulate(FedAvg(), model, data, **common) as run:
        for record in run:
            found, i = run.client_metrics, record.cohort[0]
            others = np.arange(data.clients) != i
            assert np.isnan(found.own_loss[0, others]).all()
            assert np.isnan(found.own_accuracy[0, others]).all()
            np.testing.assert_allclose(found.own_loss[0, i], found.loss[0, i], rtol=1e-5)
            assert found.own_accuracy[0, i] == pytest.approx(found.accuracy[0, i], abs=1.5 / data.sizes[i])


def test_a_model_without_classes_has_losses_only():
    r = np.random.default_rng(0)
    x = r.normal(size=(60, 4)).astype("f4")
    data = Federated.from_arrays(x, x[:, :1], np.arange(60) // 20)
    with simulate(
        "fedavg", nn.Linear(4, 1), data, loss=nn.functional.mse_loss, rounds=1, client_metrics="every=1"
    ) as run:
        list(run)
        error = (run.model(data.x) - data.y).square().reshape(3, 20).mean(1)
    np.testing.assert_allclose(run.client_metrics.loss[0], error.detach().numpy(), rtol=1e-5)
    assert np.isnan(run.client_metrics.accuracy).all()


class Plain:
    """A back end from outside the package that knows nothing of scores on clients' data."""

    def __init__(self, work, workers, touched):
        self.inner = Serial(work)

    def run(self, jobs, down, state):
        return self.inner.run(jobs, down, state)

    def evaluate(self, x, validation=False):
        return self.inner.evaluate(x, validation)

    def close(self):
        pass


def scores(**settings):
    data, model = digits()
    with simulate(FedSpeed(), model, data, **{**SETTINGS, "client_metrics": "every=2,own", **settings}) as run:
        return b"".join(run.client_metrics.blocks() for _ in run if run.client_metrics is not None), run.x


@pytest.mark.parametrize("engine", ["loop", pytest.param("block", marks=pytest.mark.slow)])
def test_the_same_numbers_on_every_back_end(engine, monkeypatch, quick_workers):
    monkeypatch.setitem(BACKENDS, "plain", f"{__name__}:Plain")
    here = scores(engine=engine)
    assert len(here[0]) == 2 * (8 + 4 * 4 * 12)  # rounds 2 and 3: four columns of float32
    for placed in ({"backend": "process", "workers": 2}, {"backend": "plain"}):
        there = scores(engine=engine, **placed)
        assert there[0] == here[0]
        assert torch.equal(there[1], here[1])


def unscored(found):
    """What a run gave, with records that have no scores of clients."""
    records, *rest = found
    return [{k: v for k, v in r.items() if not k.startswith("client_t")} for r in records], *rest


def test_training_does_not_notice():
    assert_same_bits(outcome(FedSpeed()), unscored(outcome(FedSpeed(), client_metrics="every=1,own")))


class Noisy(FedAvg):
    """Draws from torch's own generator, as it stands after the last step."""

    def upload(self, xK, down, client, run):
        up, client = super().upload(xK, down, client, run)
        return up._replace(D=up.D + 0.1 * torch.rand_like(up.D)), client


def test_an_upload_that_draws_does_not_notice():
    assert_same_bits(outcome(Noisy()), unscored(outcome(Noisy(), client_metrics="every=1,own")))


def run_of(tables, out):
    run_config(Config.from_dict(tables), out)
    return RunDir(out)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return run_of(ASKED, tmp_path_factory.mktemp("client-metrics") / "run")


def test_the_file(straight):
    found = straight.client_metrics()
    assert found.rounds.tolist() == [2, 4, 5]
    assert found.loss.shape == found.accuracy.shape == found.own_loss.shape == found.own_accuracy.shape == (3, 12)
    cohorts = [straight.records()[t - 1].cohort for t in found.rounds]
    assert [np.flatnonzero(~np.isnan(row)).tolist() for row in found.own_loss] == cohorts
    assert straight.summary()["digests"]["client_metrics"] == found.digest()
    assert found.digest() == parse(straight.client_metrics_file.read_bytes()).digest()


def test_off_writes_nothing(straight, tmp_path):
    off = run_of(SMALL, tmp_path / "off")
    assert off.client_metrics() is None
    text = "".join(path.read_text() for path in off.path.glob("*.*[lt]"))
    assert not any(name in text for name in ("client_metrics", "client_train", "client_test"))
    assert {path.name for path in straight.path.iterdir()} - {path.name for path in off.path.iterdir()} == {
        straight.client_metrics_file.name
    }
    assert "client_metrics" not in off.manifests()[0].read_text()
    assert off.model_digest() == straight.model_digest()
    assert "client_metrics" not in Config.from_dict(SMALL).to_dict()


class Stop(Exception):
    pass


@pytest.mark.parametrize("tail", [b"half a block", bytes(1000)])
@pytest.mark.parametrize(("when", "every"), [(1, 1), (3, 1), (4, 3), (2, 0)])
def test_a_resumed_run_has_the_same_file(straight, tmp_path, monkeypatch, when, every, tail):
    """Stopped after some line was written, with a block cut off or too many; the manifest may be of earlier rounds."""
    from fedspeed.runs import recorder

    tables, real = {**ASKED, "checkpoint_every": every or 100}, recorder.line

    def stop(record):
        if record.round == when + 1:
            raise Stop
        return real(record)

    with monkeypatch.context() as patch:
        patch.setattr(recorder, "line", stop)
        with pytest.raises(Stop):
            run_of(tables, tmp_path / "run")
    run = RunDir(tmp_path / "run")
    with run.client_metrics_file.open("ab") as file:
        file.write(tail)
    resume(run.path)
    assert run.client_metrics_file.read_bytes() == straight.client_metrics_file.read_bytes()
    assert verify(run.path).broken == []


def test_more_rounds_are_those_of_one_long_run(straight, tmp_path):
    """Round 5 was measured only because it was the last."""
    shutil.copytree(straight.path, tmp_path / "more")
    resume(tmp_path / "more", rounds=6)
    long = run_of({**ASKED, "rounds": 6}, tmp_path / "long")
    assert RunDir(tmp_path / "more").client_metrics_file.read_bytes() == long.client_metrics_file.read_bytes()
    assert long.client_metrics().rounds.tolist() == [2, 4, 6]


def test_only_measured_as_the_last(tmp_path):
    every = {**SMALL, "eval_every": 1, "rounds": 3, "client_metrics": "every=2"}
    run = run_of(every, tmp_path / "run")
    resume(run.path, rounds=4)
    assert run.client_metrics().rounds.tolist() == [2, 4]
    assert verify(run.path, every_round=True).broken == []


def test_verify(straight, tmp_path):
    found = verify(straight.path, every_round=True)
    assert found.broken == []
    assert any(straight.client_metrics_file.name in line for line in found.held)
    for number, change in enumerate((_flip, _shorten, _remove)):
        run = RunDir(tmp_path / str(number))
        shutil.copytree(straight.path, run.path)
        change(run.client_metrics_file)
        assert any(straight.client_metrics_file.name in line for line in verify(run.path, every_round=True).broken)


def _flip(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def _shorten(path):
    path.write_bytes(path.read_bytes()[:-1])


def _remove(path):
    path.unlink()


def test_scores_that_were_changed_with_all_digests(straight, tmp_path):
    """Only rounds run again find those."""
    from fedspeed.runs.verify import measured_mismatches, measured_round_mismatches

    before = straight.client_metrics()
    changed = before._replace(loss=before.loss * 2)
    assert measured_mismatches(before, before.some(before.rounds == 4), 4) == []
    assert len(measured_mismatches(changed, before.some(before.rounds == 4), 4)) == 1
    simulation = type("", (), {"plan": Plan(rounds=5, client_metrics="every=2")})
    assert measured_round_mismatches(before, simulation, 5) == []
    assert "round 4 is missing" in measured_round_mismatches(before.some(before.rounds != 4), simulation, 5)[0]
    simulation.plan = Plan(rounds=5)
    assert "does not ask" in measured_round_mismatches(before, simulation, 5)[0]


def test_diff_names_other_scores(straight, tmp_path):
    shutil.copytree(straight.path, tmp_path / "other")
    assert differences(straight.path, tmp_path / "other") == []
    _flip(RunDir(tmp_path / "other").client_metrics_file)
    assert [found.name for found in differences(straight.path, tmp_path / "other")] == ["client_metrics.bin"]


def test_a_given_model_too(tmp_path):
    data, model = digits()
    call = {"rounds": 3, "active": 3, "local_steps": 1, "client_metrics": "every=2", "out": tmp_path / "run"}
    with simulate("fedavg", model, data, **call) as run:
        next(iter(run))
    list(simulate("fedavg", model, data, **call, resume=True))
    assert RunDir(tmp_path / "run").client_metrics().rounds.tolist() == [2, 3]
    with pytest.raises(UserError, match="client_metrics"):
        simulate("fedavg", model, data, **{**call, "client_metrics": "every=1"}, resume=True)


BAD = ("every", "10", "every=0", "every=-1", "every=x", "own", "every=2,mine", "every=1e3", "every=2,own,own")


@pytest.mark.parametrize("given", BAD)
def test_bad_settings_in_one_line(given, capsys):
    with pytest.raises(UserError, match=r"client_metrics: expected every=N or every=N,own .*, got") as caught:
        Plan(client_metrics=given)
    assert "\n" not in str(caught.value)
    assert main(["run", "--client-metrics", given, "--rounds", "1"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_one_spelling_and_types():
    assert Plan(client_metrics=" every=10, own").client_metrics == "every=10,own"
    assert Plan(client_metrics=" ").client_metrics == ""
    assert Config.from_dict({"client_metrics": "every=3"}).to_dict()["client_metrics"] == "every=3"
    with pytest.raises(UserError, match="client_metrics must be text"):
        Config.from_dict({"client_metrics": 3})


ONE = ClientMetrics(np.array([3]), np.array([2, 5]), np.array([[1e300, np.nan]]), np.array([[1, 0.25]]))


@pytest.mark.parametrize(
    "content",
    [
        b"no json\n",
        b"[1]\n",
        b'{"format": 2}\n',
        ONE.header().replace(b'"loss"', b'"x"'),
        ONE.header().replace(b"train", b"both"),
        ONE.header().replace(b"[2, 5]", b"[]"),
        ONE.header().replace(b"[2, 5]", b'[2, "5"]'),
        b"[" * 100_000 + b"\n",
    ],
)
def test_files_that_are_none_in_one_line(content, tmp_path):
    RunDir(tmp_path).client_metrics_file.write_bytes(content)
    with pytest.raises(UserError, match="cannot be read") as caught:
        RunDir(tmp_path).client_metrics()
    assert len(str(caught.value)) < 600
    assert "\n" not in str(caught.value)


def test_a_file_that_has_just_begun(tmp_path):
    run = RunDir(tmp_path)
    for content, rounds in ((b"", None), (ONE.header()[:-3], None), (ONE.header(), []), (ONE.header() + b"12", [])):
        run.client_metrics_file.write_bytes(content)
        found = run.client_metrics()
        assert (found if found is None else found.rounds.tolist()) == rounds
    run.client_metrics_file.unlink()
    run.add_client_metrics(ONE)
    run.client_metrics_file.write_bytes(run.client_metrics_file.read_bytes() + bytes(len(ONE.blocks())))
    assert run.client_metrics().rounds.tolist() == [3]  # a disk may keep a file's length and lose its end
    assert run.client_metrics().loss[0].tolist()[:1] == [np.inf]
    assert json.loads(run.client_metrics_file.read_bytes().partition(b"\n")[0])["samples"] == [2, 5]
