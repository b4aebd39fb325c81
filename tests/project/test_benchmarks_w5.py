"""W5 of the benchmarks: its contenders train one model on the same pictures, the authors' loop by the same formulas."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fedspeed

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import report, stock  # noqa: E402
from benchmarks.contenders import authors, bare, ours  # noqa: E402
from benchmarks.contests import CONTESTS, OURS  # noqa: E402
from benchmarks.timing import Outcome, Timed  # noqa: E402
from benchmarks.workloads import WORKLOADS, Part, Workload, find  # noqa: E402
from fedspeed.models.trim import untrim  # noqa: E402


class Still:
    """A stream of draws with which no picture is changed."""

    def random(self) -> float:
        return 1.0


@pytest.fixture
def one_client(tmp_path, monkeypatch) -> Workload:
    """W5 in float64 with one client of four pictures: every batch is all of them, so their order does not matter."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for module, name in ((fedspeed, "build_model"), (stock, "build")):
        monkeypatch.setattr(module, name, doubled(getattr(module, name)))
    monkeypatch.setattr(authors, "Pictures", lambda x, y, stream: pictures(x, y, Still()))
    workload = replace(WORKLOADS["W5"], data="pictures", clients=1, samples=4, active=1, batch=4, epochs=2)
    stream = np.random.default_rng(0)
    x = stream.normal(size=(1, 4, 3, 32, 32))
    y = np.array([[0, 9, 3, 3]])
    workload.folder.mkdir(parents=True)
    for name, array in {"x": x, "y": y, "x_test": x[0], "y_test": y[0]}.items():
        np.save(workload.folder / f"{name}.npy", array)
    threads = torch.get_num_threads()
    yield workload
    torch.set_num_threads(threads)


pictures = authors.Pictures


def doubled(build):
    return lambda *args, **options: build(*args, **options).double()


def trained(workload: Workload, method: str, settings: str, rounds: int):
    """Vectors before and after some rounds of ours, as the stock network has them."""

    def vector() -> torch.Tensor:
        run.work.flat.load(run.x)
        return torch.cat([value.detach().flatten().clone() for value in untrim(run.model).values()])

    with ours.start(workload, method, "serial", **ours.SETTINGS[settings]) as run:
        before = vector()
        for _ in range(rounds):
            run.step()
        return before, vector()


def test_ours_and_the_bare_loop_train_the_same_network(one_client):
    before, after = trained(one_client, "fedavg", "plain", 2)
    loop = bare.Loop(one_client, (0, 1), "stock", 1)
    torch.nn.utils.vector_to_parameters(before.clone(), loop.model.parameters())
    loop.round()
    loop.round()
    theirs = torch.nn.utils.parameters_to_vector(loop.model.parameters()).detach()
    assert float((after - theirs).norm()) < 1e-8 * float((after - before).norm())


@pytest.mark.parametrize("method", ["fedavg", "fedspeed"])
def test_ours_with_the_authors_settings_does_what_their_loop_does(one_client, method, monkeypatch):
    """The second round has a correction. A clip at 1 is at work in every step; PyTorch's adds 1e-6 to the norm."""
    monkeypatch.setattr(authors, "CLIP", 1.0)
    monkeypatch.setitem(ours.SETTINGS, "authors", {**ours.SETTINGS["authors"], "clip": 1.0})
    before, after = trained(one_client, method, "authors", 2)
    loop = authors.Loop(one_client, method)
    loop.x = before.clone()
    loop.round()
    loop.round()
    assert float((after - loop.x).norm()) < 1e-6 * float((after - before).norm())


def gradient(theta: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The gradient of softmax regression with three classes, weights and then biases."""
    W, b = theta[:-3].reshape(3, -1), theta[-3:]
    logits = x @ W.T + b
    p = np.exp(logits - logits.max(1, keepdims=True))
    p = p / p.sum(1, keepdims=True) - np.eye(3)[y]
    return np.concatenate([(p.T @ x / len(x)).ravel(), p.mean(0)])


@pytest.mark.parametrize("size", [0.1, 300.0], ids=["not clipped", "clipped"])
@pytest.mark.parametrize("perturbed", [False, True])
def test_a_step_of_the_authors_loop_written_out(size, perturbed):
    stream = np.random.default_rng(1)
    x, y, theta = stream.normal(size=(7, 5)), stream.integers(0, 3, 7), stream.normal(size=18)
    linear, lr, decay = size * stream.normal(size=18), 0.3, 1e-3 + 0.1 * perturbed
    net = torch.nn.Linear(5, 3).double()
    torch.nn.utils.vector_to_parameters(torch.from_numpy(theta.copy()), net.parameters())
    sgd = torch.optim.SGD(net.parameters(), lr=lr, weight_decay=decay)
    inputs = torch.from_numpy(x * (1 if perturbed else size)), torch.from_numpy(y)
    if perturbed:
        authors.perturbed_step(net, sgd, *inputs, torch.from_numpy(linear))
        g1 = gradient(theta, x, y)
        direction = gradient(theta + 0.1 * g1 / np.linalg.norm(g1), x, y) + 0.1 * linear
    else:
        authors.plain_step(net, sgd, *inputs)
        direction = gradient(theta, inputs[0].numpy(), y)
    clipped = np.linalg.norm(direction) > 10
    assert clipped == (size > 1)
    if clipped:
        direction *= 10 / np.linalg.norm(direction)
    expected = theta - lr * (direction + decay * theta)
    found = torch.nn.utils.parameters_to_vector(net.parameters()).detach().numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_pictures_are_flipped_and_shifted_by_at_most_four_pixels():
    x = np.random.default_rng(0).normal(size=(1, 3, 6, 6)).astype("float32") + 5
    data = pictures(x, np.array([7]), np.random.default_rng(0))
    allowed, flips, shifts = {}, 0, 0
    for flipped in (False, True):
        wide = np.pad(x[0][:, :, ::-1] if flipped else x[0], ((0, 0), (4, 4), (4, 4)))
        for top in range(9):
            for left in range(9):
                key = wide[:, top : top + 6, left : left + 6].tobytes()
                allowed[key] = (flipped, (top, left) != (4, 4))
    for _ in range(400):
        picture, label = data[0]
        assert label == 7
        flipped, shifted = allowed[picture.numpy().tobytes()]
        flips, shifts = flips + flipped, shifts + shifted
    assert 150 < flips < 250
    assert 150 < shifts < 250  # one of 81 places is the picture's own


def test_the_authors_loop_takes_part_on_request():
    for name, ours_too in (("W5", OURS), ("W5-fedspeed", "fedspeed: FedSpeed")):
        contest = CONTESTS[name]
        usual = [entry.name for entry in contest.only([""], peers=True).entries]
        assert not any("authors" in each for each in usual)
        assert ours_too in usual
        asked = [entry.name for entry in contest.only(["authors"], peers=False).entries]
        assert any(each.startswith("the authors' loop") for each in asked)
        assert f"{ours_too}, the authors' settings" in asked
        everything = contest.only(["fedspeed", "bare", "authors"], peers=False).entries
        assert {*usual, *asked} - {"pfl 1x2", "pfl 2x1"} == {entry.name for entry in everything}


def test_every_contender_of_w5_gets_the_part_that_is_timed():
    for contest in (CONTESTS["W5"], CONTESTS["W5-fedspeed"]):
        part = contest.part(quick=False, whole=False)
        assert contest.part(quick=False, whole=True) == Part()
        for entry in contest.entries:
            command = entry.command(contest.workload, part)
            assert command[command.index("--active") :] == ["--active", "2", "--epochs", "1"]
            assert "--active" not in entry.command(contest.workload, Part())
        timed = find("W5", part)
        assert (timed.active, timed.epochs, timed.batch, timed.samples) == (2, 1, 50, 500)
        outcome = Outcome(contest, timed.active, timed.epochs, [Timed(entry) for entry in contest.entries])
        assert "TIMED IN PART: 2 active, 1 epoch" in report.about([outcome])
        assert "IN PART" not in report.about([Outcome(contest, 10, 5, [])])
