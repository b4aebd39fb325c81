"""Noise of the ascent step against NumPy and against closed forms, and `fedspeed inspect --noise` at checkpoints."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedspeed import Plan, simulate
from fedspeed.cli import main
from fedspeed.client.sharpness import ascent_noise
from fedspeed.data import Federated
from fedspeed.data.augment import Pipeline
from fedspeed.errors import UserError
from fedspeed.methods import FedAvg, FedProx, FedSpeed
from fedspeed.runs import checkpoint
from fedspeed.runs.directory import RunDir
from fedspeed.runs.fork import fork
from fedspeed.runs.inspect import inspect_noise
from fedspeed.utils.random import rng

D, N = 3, 12
CLIENTS = {0: np.arange(6), 1: np.arange(6, N)}


class Problem:
    """Linear regression of two clients with six rows each, and the gradient of every row at a point, in NumPy."""

    def __init__(self, seed: int = 0) -> None:
        stream = np.random.default_rng(seed)
        self.a, self.y = (stream.normal(size=shape).astype("float32").astype(float) for shape in ((N, D), (N, 1)))
        self.x = stream.normal(size=D)
        self.rows = 2 * (self.a @ self.x - self.y[:, 0])[:, None] * self.a  # of (a.x - y)^2

    def noise(self, populations=CLIENTS, pairs: int = 5, method=None, batch: int = 2, seed: int = 0, **plan):
        data = Federated.from_arrays(self.a, self.y, list(CLIENTS.values()))
        model = nn.Linear(D, 1, bias=False).double()
        loop = simulate(method or FedAvg(), model, data, Plan(active=2, batch_size=batch, rounds=1, **plan))
        return ascent_noise(loop.work, torch.from_numpy(self.x), populations, pairs, seed)

    def moments(self, batch: int) -> tuple[float, float]:
        """||E g||^2 and E ||g||^2 of minibatches drawn without replacement, each a mean over the clients."""
        first, second = [], []
        for rows in CLIENTS.values():
            g, n = self.rows[rows], len(rows)
            mean = g.mean(0)
            spread = np.square(g - mean).sum(-1).mean()
            first.append(mean @ mean)
            second.append(mean @ mean + spread / batch * (n - batch) / (n - 1))
        return float(np.mean(first)), float(np.mean(second))


def test_numbers_are_those_of_numpy():
    problem = Problem()
    found = problem.noise(pairs=5, seed=3)
    products, squares, cosines = [], [], []
    for i, rows in CLIENTS.items():
        drawn = [rng(3, "noise", i, k).choice(rows, 2, replace=False) for k in range(10)]
        g = np.array([problem.rows[batch].mean(0) for batch in drawn])
        for u, v in zip(g[::2], g[1::2], strict=True):
            products.append(u @ v)
            squares += [u @ u, v @ v]
            cosines.append(u @ v / np.linalg.norm(u) / np.linalg.norm(v))
    full = [np.square(problem.rows[rows].mean(0)).sum() for rows in CLIENTS.values()]
    assert found.pairs == 10
    assert found.cosine == pytest.approx(np.mean(cosines), rel=1e-12)
    assert found.error == pytest.approx(np.std(cosines, ddof=1) / math.sqrt(10), rel=1e-12)
    assert found.share == pytest.approx(1 - np.mean(products) / np.mean(squares), rel=1e-12)
    assert found.norm == pytest.approx(math.sqrt(np.mean(squares)), rel=1e-12)
    assert found.full_norm == pytest.approx(math.sqrt(np.mean(full)), rel=1e-12)


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_the_share_is_estimated_without_bias(batch):
    """The closed form of minibatches drawn without replacement, within four standard errors of 3,000 pairs."""
    problem, pairs = Problem(1), 1500
    first, second = problem.moments(batch)
    found = problem.noise(pairs=pairs, batch=batch)
    product, square = (1 - found.share) * found.norm**2, found.norm**2
    largest = max(np.square(problem.rows).sum(-1))
    near = 4 * largest / math.sqrt(2 * pairs)  # no product or square is larger than that
    assert abs(product - first) < near
    assert abs(square - second) < near
    assert found.share == pytest.approx(1 - first / second, abs=0.06)
    assert found.full_norm == pytest.approx(math.sqrt(first), rel=1e-12), "known without sampling"


def test_a_minibatch_of_all_rows_has_no_noise():
    found = Problem().noise(batch=6)
    assert found.cosine == pytest.approx(1, abs=1e-12)
    assert found.share == pytest.approx(0, abs=1e-12)
    assert found.norm == pytest.approx(found.full_norm, rel=1e-12)


def test_opposite_rows_are_nothing_but_noise():
    """One row a minibatch, gradients v and -v: each pair has the cosine 1 or -1, and the mean gradient is 0."""
    problem = Problem()
    problem.a = np.tile([[1.0, 2.0, 2.0]], (N, 1))
    problem.y = np.tile([[1.0], [-1.0]], (N // 2, 1))
    problem.x = np.zeros(D)
    found = problem.noise(pairs=400, batch=1)
    assert found.norm == pytest.approx(2 * 3)
    assert found.full_norm == pytest.approx(0, abs=1e-12)
    assert abs(found.cosine) < 4 / math.sqrt(800)
    assert found.share == pytest.approx(1 - found.cosine)


def test_two_populations_as_one_have_the_spread_between_them_too():
    """Minibatches of all rows: the noise within clients and the difference between their gradients."""
    problem = Problem(2)
    found = problem.noise({2: np.arange(N)}, pairs=3000, batch=1)
    mean = problem.rows.mean(0)
    assert found.full_norm == pytest.approx(np.linalg.norm(mean), rel=1e-12)
    expected = 1 - mean @ mean / np.square(problem.rows).sum(-1).mean()
    assert found.share == pytest.approx(expected, abs=0.06)


def test_gradients_are_clipped_as_those_of_the_ascent():
    problem = Problem()
    plain, clipped = problem.noise(), problem.noise(clip=1e-3)
    assert clipped.norm == pytest.approx(1e-3, rel=1e-9), "every gradient is longer than that"
    assert clipped.cosine == pytest.approx(plain.cosine, rel=1e-9)
    assert clipped.share == pytest.approx(1 - clipped.cosine, rel=1e-9)
    assert clipped.full_norm == plain.full_norm
    released = problem.noise(method=FedProx(), clip=1e-3, clip_mode="released")
    assert released == plain, "there the step's direction is clipped, not the gradient of the ascent"


def test_prox_term_and_weight_decay_are_no_part_of_it():
    assert Problem().noise(method=FedSpeed(lam=0.5, rho=0.1), lr=0.01, weight_decay=0.5) == Problem().noise()


def test_the_part_of_the_minibatch_that_the_ascent_takes():
    """Half of four rows: the first two, whose gradient has the noise of two rows."""
    problem = Problem(1)
    found = problem.noise(pairs=5, batch=4, method=FedSpeed(lam=10, ascent_fraction=0.5))
    drawn = [rng(0, "noise", i, k).choice(rows, 4, replace=False)[:2] for i, rows in CLIENTS.items() for k in range(10)]
    squares = [np.square(problem.rows[batch].mean(0)).sum() for batch in drawn]
    assert found.norm == pytest.approx(math.sqrt(np.mean(squares)), rel=1e-12)


def test_augmentation_is_noise_as_well():
    """A minibatch of all rows, one picture, flipped with probability 1/2: its gradient is one of two, in NumPy."""
    picture, x = np.arange(6, dtype="float32").reshape(1, 1, 2, 3), np.linspace(-1, 1, 6)
    data = Federated.from_arrays(picture, np.ones((1, 1)), [[0]], pipeline=Pipeline(torch.float64, flip=0.5))
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 1, bias=False)).double()
    work = simulate(FedAvg(), model, data, Plan(active=1, batch_size=4, rounds=1)).work
    found = ascent_noise(work, torch.from_numpy(x), {0: np.array([0])}, 400)
    u, v = (2 * (a.ravel() @ x - 1) * a.ravel() for a in (picture[0, 0], picture[0, 0, :, ::-1]))
    cosine = u @ v / np.linalg.norm(u) / np.linalg.norm(v)
    assert cosine < 0.9
    assert found.cosine == pytest.approx((1 + cosine) / 2, abs=4 * (1 - cosine) / 2 / math.sqrt(400))
    assert found.share == pytest.approx(1 - (u + v) @ (u + v) / 2 / (u @ u + v @ v), abs=0.1)
    assert found.full_norm == pytest.approx(np.linalg.norm(u), rel=1e-12), "without augmentation"


def test_the_same_seed_draws_the_same():
    problem = Problem()
    assert problem.noise(seed=1) == problem.noise(seed=1)
    assert problem.noise(seed=1).cosine != problem.noise(seed=2).cosine
    alone = problem.noise({1: CLIENTS[1]}, pairs=4)
    both = problem.noise(pairs=4)
    assert 2 * both.norm**2 == pytest.approx(alone.norm**2 + problem.noise({0: CLIENTS[0]}, pairs=4).norm ** 2)


def test_gradients_that_are_not_finite_are_refused():
    problem = Problem()
    problem.x = np.full(D, np.nan)
    with pytest.raises(UserError, match="finite gradients"):
        problem.noise()


# --- the command ---

RUN = (
    "run --method fedspeed --data digits --model linear --split iid --clients 20 --active 4 --batch-size 10 "
    "--local-epochs 1 --quiet --keep-every 2 --checkpoint-every 1"
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "six"
    assert main([*RUN.split(), "--rounds", "6", "--out", str(out)]) == 0
    return out


def test_a_checkpoint_has_the_numbers_of_the_run_that_ended_there(finished, tmp_path):
    assert main([*RUN.split(), "--rounds", "2", "--out", str(tmp_path / "two")]) == 0
    ended = inspect_noise(tmp_path / "two", pairs=2)
    (tmp_path / "two" / "summary.json").unlink()  # as if it were in progress: its checkpoint is read
    (tmp_path / "two" / "model.safetensors").unlink()
    assert inspect_noise(tmp_path / "two", pairs=2) == ended
    assert inspect_noise(finished, pairs=2, round=2, out=tmp_path) == ended
    assert ended.round == 2
    assert ended.client.pairs == ended.whole.pairs == 40


def test_a_fork_has_the_settings_of_the_round(finished, tmp_path):
    """Before the fork and after it: batches of 10, then of 5."""
    fork(finished, 4, tmp_path / "forked", {"batch_size": 5})
    before, after = (inspect_noise(tmp_path / "forked", pairs=1, round=t) for t in (4, None))
    assert (before.round, before.batch_size, after.round, after.batch_size) == (4, 10, 6, 5)
    assert before == inspect_noise(finished, pairs=1, round=4, out=tmp_path)


NORMED = """
from torch import nn

def build(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, outputs))
"""


def test_running_statistics_are_those_of_the_model(tmp_path):
    """At a checkpoint as at the end, and unchanged by the minibatches of the clients before."""
    (tmp_path / "net.py").write_text(NORMED)
    out = tmp_path / "normed"
    words = (
        RUN.replace("--model linear", f"--model {tmp_path / 'net.py'}:build --batch-norm average")
        .replace("size 10", "size 11")
        .split()
    )
    assert main([*words, "--rounds", "4", "--out", str(out)]) == 0
    ended = inspect_noise(out, pairs=2, clients=3, allow_code=True)
    (out / "summary.json").unlink()
    (out / "model.safetensors").unlink()
    assert inspect_noise(out, pairs=2, clients=3, allow_code=True) == ended
    more = inspect_noise(out, pairs=3, clients=3, allow_code=True)
    assert (more.client.full_norm, more.whole.full_norm) == (ended.client.full_norm, ended.whole.full_norm)


def test_a_checkpoint_that_a_run_replaces_meanwhile_is_not_called_damaged(finished, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / "summary.json").unlink()
    (folder / "model.safetensors").unlink()
    newest, older = (RunDir(folder).checkpoints / f"{t}.json" for t in (6, 5))
    asked, server_of = [], checkpoint.server_of

    def replaced(run, t):
        asked.append(t)
        newest.unlink(missing_ok=True)  # as the run does once a later one is complete
        if t == 6:
            raise UserError("damaged")
        return server_of(run, t)

    monkeypatch.setattr(checkpoint, "server_of", replaced)
    assert older.exists()
    assert inspect_noise(folder, pairs=1, clients=2).round == 5
    assert asked == [6, 5]


def test_measurements_of_several_rounds_are_kept_together(finished, tmp_path, capsys):
    for given in (["--round", "4"], [], ["--round", "2"], ["--round", "4"]):
        assert main(["inspect", str(finished), "--noise", "--pairs", "1", *given, "--out", str(tmp_path)]) == 0
    entries = json.loads((tmp_path / "noise.json").read_text())
    assert [entry["round"] for entry in entries] == [2, 4, 6]
    assert {"cosine", "error", "share", "norm", "full_norm", "pairs"} == entries[0]["client"].keys()
    out = capsys.readouterr().out
    assert out.count("one client") == out.count("all clients") == 4
    assert f"{entries[2]['client']['cosine']:.3f}" in out
    assert not (finished / "noise.json").exists()


def test_a_minibatch_that_is_all_of_a_client_is_said_to_measure_no_noise(finished, tmp_path, capsys):
    command = ["inspect", "--noise", "--pairs", "1", "--out", str(tmp_path)]
    assert main([*command, str(finished)]) == 0
    assert "does not measure noise" not in capsys.readouterr().out
    assert main([*RUN.split(), "--rounds", "1", "--batch-size", "500", "--out", str(tmp_path / "all")]) == 0
    assert main([*command, str(tmp_path / "all")]) == 0
    assert "does not measure noise" in " ".join(capsys.readouterr().out.split())
    part = [*RUN.replace("fedspeed", "fedspeed:ascent_fraction=0.25").split(), "--rounds", "1", "--batch-size", "500"]
    assert main([*part, "--out", str(tmp_path / "part")]) == 0
    assert main([*command, str(tmp_path / "part")]) == 0
    assert "does not measure noise" not in capsys.readouterr().out


def test_the_command_as_json_is_deterministic(finished, tmp_path, capsys):
    command = ["inspect", str(finished), "--noise", "--pairs", "2", "--clients", "3", "--seed", "5", "--json"]
    seen = []
    for _ in range(2):
        assert main([*command, "--out", str(tmp_path)]) == 0
        seen.append(capsys.readouterr().out)
    assert seen[0] == seen[1]
    found = json.loads(seen[0])[str(finished)]
    assert (found["clients"], found["seed"], found["round"], found["client"]["pairs"]) == (3, 5, 6, 6)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--noise", "--pairs", "0"], "pairs must be at least 1, got 0"),
        (["--noise", "--clients", "0"], "clients must be at least 1, got 0"),
        (["--noise", "--round", "3"], "expected a checkpoint of round 3, found checkpoints of rounds 2, 4, 5, 6"),
        (["--round", "2"], "--round expects --noise"),
        (["--pairs", "2"], "--pairs expects --noise"),
        (["--seed", "2"], "--seed expects --noise"),
        (["--noise", "--samples", "2"], "--samples expects no --noise beside it"),
        (["--noise", "--rho", "0.1"], "--rho expects no --noise beside it"),
        (["--noise", "--seed", "-1"], "--seed: expected a whole number from 0 to 1e18, got '-1'"),
        (["--noise", "--seed", "1" + "0" * 19], "--seed: expected a whole number from 0 to 1e18"),
    ],
)
def test_bad_options(finished, extra, said, capsys):
    assert main(["inspect", str(finished), *extra]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1


def test_bad_folders(finished, tmp_path, capsys):
    assert main(["inspect", str(tmp_path), "--noise"]) == 2
    assert "holds no run" in capsys.readouterr().err
    (tmp_path / "config.toml").write_text((finished / "config.toml").read_text())
    assert main(["inspect", str(tmp_path), "--noise"]) == 2
    assert "found no checkpoint" in capsys.readouterr().err
    (tmp_path / "noise.json").write_text("{}")
    assert main(["inspect", str(finished), "--noise", "--pairs", "1", "--out", str(tmp_path)]) == 2
    assert "noise.json: expected a list of measurements" in capsys.readouterr().err
    (tmp_path / "noise.json").unlink()
    (tmp_path / "noise.json").mkdir()
    assert main(["inspect", str(finished), "--noise", "--pairs", "1", "--out", str(tmp_path)]) == 2
    assert "noise.json: expected a list of measurements" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_named(tmp_path, capsys):
    assert main([*RUN.split(), "--rounds", "3", "--out", str(tmp_path)]) == 0
    server = tmp_path / "checkpoints" / "server@2"
    server.write_bytes(server.read_bytes()[:-1] + b"x")
    assert main(["inspect", str(tmp_path), "--noise", "--round", "2"]) == 2
    assert "server@2 is damaged" in capsys.readouterr().err
    (tmp_path / "checkpoints" / "2.json").write_text("[]")
    assert main(["inspect", str(tmp_path), "--noise", "--round", "2"]) == 2
    assert "2.json is damaged" in capsys.readouterr().err
