"""A client's turn run again: its upload's digest is the one that was noted, its steps are those of a plain loop."""

from __future__ import annotations

import json
import random
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from same_bits import digits
from torch.nn.functional import cross_entropy

import fedspeed
from fedspeed.cli import main
from fedspeed.client.upload_digest import PRIME, SPAN, WEIGHTS, upload_digests
from fedspeed.config.config import Config
from fedspeed.errors import UserError
from fedspeed.methods.scaffold import Up
from fedspeed.runs.binary_files import read_uploads
from fedspeed.runs.directory import RunDir, exclusive
from fedspeed.runs.launch import prepare, resume, run_config
from fedspeed.runs.verify import verify
from fedspeed.server.simulation import Simulation

SMALL = {"model": "linear", "rounds": 6, "clients": 12, "active": 5, "local_steps": 3, "batch_size": 10,
         "eval_every": 6, "split": "iid", "backend": "serial", "checkpoint_every": 3, "states": "disk"}  # fmt: skip
KINDS = [("fedspeed", "loop"), ("fedspeed", "block"), ("scaffold", "loop"), ("scaffold", "block")]


def config(method="fedspeed", engine="loop", **changes):
    return Config.from_dict({**SMALL, "method": method, "engine": engine, **changes})


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A finished run of every kind, states on disk; its checkpoints are of rounds 3 and 6."""
    folder = tmp_path_factory.mktemp("runs")
    for method, engine in KINDS:
        run_config(config(method, engine, warmup="lr=3"), folder / f"{method}-{engine}")
    return folder


@pytest.mark.parametrize(("method", "engine"), KINDS)
def test_ten_random_turns_have_the_digests_that_were_noted(runs, method, engine):
    run = runs / f"{method}-{engine}"
    before, records = files(runs), RunDir(run).records()
    turns = random.Random(method + engine).sample([(r.round, i) for r in records for i in r.cohort], 10)
    told = []
    for t, client in turns[: 10 if engine == "loop" else 4]:
        found = fedspeed.replay(run, round=t, client=client)
        assert found.matches, (t, client)
        assert found.unlike == []
        assert found.began == (3 if t > 3 else 0)
        assert len(found.steps) == 3
        told.append(found.recorded)
    assert len(set(told)) == len(told)  # no two turns send the same
    assert files(runs) == before
    noted = read_uploads(RunDir(run))
    assert {t: sorted(noted[t]) for t in noted} == {r.round: r.cohort for r in records}


def test_a_turn_that_is_not_the_same_is_told(runs, monkeypatch, capsys):
    """A state that was changed on the way."""
    run = runs / "scaffold-loop"
    client = RunDir(run).records()[5].cohort[0]
    plain = Simulation.client_state

    def tampered(self, i):
        state = plain(self, i)
        state.c[-1] += 1e-4
        return state

    monkeypatch.setattr(Simulation, "client_state", tampered)
    found = fedspeed.replay(run, 4, RunDir(run).records()[3].cohort[0])
    assert found.matches is False
    assert main(["replay", str(run), "--round", "6", "--client", str(client)]) == 1
    assert "NOT the same" in " ".join(capsys.readouterr().out.split())


def test_steps_are_those_of_a_plain_loop(tmp_path):
    """FedAvg, by hand, in float64: batches, losses, gradients, the model, the upload."""
    settings = {"weight_decay": 0.01, "lr": 0.2, "lr_decay": 0.9, "split": "dirichlet:0.5"}
    run_config(config("fedavg", **settings), tmp_path / "a")
    record = RunDir(tmp_path / "a").records()[1]
    client = record.cohort[2]
    found = fedspeed.replay(tmp_path / "a", 2, client)
    with prepare(config("fedavg", **settings)) as run:
        run.step()
        data, model = run.data, run.model.double()
        start = torch.cat([p.detach().reshape(-1).clone() for p in model.parameters()])
        seen = []
        for step in found.steps:
            assert len(step.samples) == len(set(step.samples)) == 10
            seen += step.samples
            rows = torch.tensor(step.samples)
            loss = cross_entropy(model(data.pipeline(data.x[rows], None).double()), data.y[rows])
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            norm, loss = torch.cat([g.reshape(-1) for g in gradients]).norm(), loss.detach()
            assert step.loss == pytest.approx(float(loss), rel=1e-5)
            assert step.gradients == [pytest.approx(float(norm), rel=1e-5)]
            with torch.no_grad():
                for p, g in zip(model.parameters(), gradients, strict=True):
                    p -= 0.2 * 0.9 * (g + 0.01 * p)
        end = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        assert set(seen) <= set(data.rows(client).tolist())
        assert found.labels == np.bincount(data.y.numpy()[data.rows(client)], minlength=10).tolist()
    assert torch.allclose(found.x.double(), end, atol=1e-6)
    assert torch.allclose(found.upload.D.double().abs(), (end - start).abs(), atol=1e-6)
    inside = torch.cat([p.detach().reshape(-1) for p in found.model.parameters()])
    assert torch.equal(inside, found.x)
    assert found.matches


def by_integers(leaves):
    """The digest of some bytes objects in Python's own integers."""
    total = 0
    for raw in leaves:
        words = list(struct.unpack(f"<{len(raw) // 8}Q", raw[: len(raw) // 8 * 8]))
        rest = raw[len(raw) // 8 * 8 :].ljust(8, b"\0")
        pieces = [words[i : i + SPAN] for i in range(0, len(words), SPAN)] + [list(struct.unpack("<Q", rest))]
        for piece in pieces:
            total = (total * int(PRIME) + sum(w * int(k) for w, k in zip(piece, WEIGHTS, strict=False))) % 2**64
    return total


@pytest.mark.parametrize("d", [1, 2, 5, 2 * SPAN + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_digest_is_of_every_byte(d, dtype):
    block = torch.randn(3, d, generator=torch.Generator().manual_seed(d)).to(dtype)
    up = Up(block, block[0])  # the second is shared by the rows
    raws = [row.view(torch.uint8).numpy().tobytes() for row in block]
    assert upload_digests(up, 3) == [by_integers([raw, raws[0]]) for raw in raws]
    for i in {0, d // 2, d - 1}:
        other = block[0].clone()
        other.view(torch.uint8)[i * dtype.itemsize] ^= 1
        assert upload_digests(Up(other, block[0])) != upload_digests(Up(block[0], block[0]))


@pytest.mark.parametrize("backend", ["serial", pytest.param("process", marks=pytest.mark.slow)])
def test_digests_survive_a_stop_and_are_the_same_on_every_back_end(runs, tmp_path, backend):
    """Also where rows of rounds that do not count were written already."""
    from watching import Stop, stop_after

    out = tmp_path / "a"
    with pytest.raises(Stop):
        run_config(
            config("scaffold", "block", warmup="lr=3", backend=backend, workers=2), out, observers=[stop_after(4)]
        )
    assert sorted(read_uploads(RunDir(out))) == [1, 2, 3, 4]
    with (out / "uploads.bin").open("ab") as file:
        file.write(b"half a row")
    resume(out)
    assert (out / "uploads.bin").read_bytes() == (runs / "scaffold-block" / "uploads.bin").read_bytes()
    assert verify(out, every_round=True).broken == []


def test_a_run_from_before_there_were_digests(tmp_path, capsys):
    run = Path(shutil.copytree(Path(__file__).parents[1] / "fixtures" / "run-format-2", tmp_path / "run"))
    record = RunDir(run).records()[0]
    before = files(run)
    found = fedspeed.replay(run, 1, record.cohort[0])
    assert (found.matches, found.recorded) == (None, None)
    assert main(["replay", str(run), "--round", "1", "--client", str(record.cohort[0])]) == 0
    assert "nothing to compare with" in " ".join(capsys.readouterr().out.split())
    assert files(run) == before
    resume(run)
    begun = min(read_uploads(RunDir(run)))
    assert begun > 1
    assert fedspeed.replay(run, begun, RunDir(run).records()[begun - 1].cohort[0]).matches


@pytest.mark.parametrize("engine", ["loop", "block"])
def test_the_turn_that_diverged(tmp_path, capsys, engine):
    """It is of the round after the last that was written down; the others of its cohort did not diverge."""
    with pytest.raises(fedspeed.Diverged):
        run_config(config("fedavg", engine, lr=1e30), tmp_path / "a")
    done = len(RunDir(tmp_path / "a").records())
    with prepare(config("fedavg", engine)) as run:
        from fedspeed.server.round import plan_round

        client = plan_round(run.work, done, run.cohort).jobs[0].client
    found = fedspeed.replay(tmp_path / "a", done + 1, client)
    assert "diverged" in found.error
    assert found.steps
    with pytest.raises(UserError, match="has no model"):
        _ = found.model
    assert main(["replay", str(tmp_path / "a"), "--round", str(done + 1), "--client", str(client)]) == 1
    assert "diverged (NaN or Inf)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--round", "0", "--client", "1"], "round: expected one of RUN, 1 to 6, found 0"),
        (["--round", "7", "--client", "1"], "1 to 6, found 7"),
        (["--round", "4", "--client", "99"], "client: expected one that was active in round 4 (COHORT), found 99"),
        (["--round", "4"], "the following arguments are required: --client"),
        (["--round", "4", "--client", "1", "--backend", "nowhere"], "backend must be one of"),
    ],
)
def test_bad_input_is_one_line(runs, capsys, given, told):
    run, before = runs / "fedspeed-loop", files(runs)
    cohort = ", ".join(map(str, RunDir(run).records()[3].cohort))
    assert main(["replay", str(run), *given]) == 2
    err = capsys.readouterr().err
    assert told.replace("RUN", str(run)).replace("COHORT", cohort) in err
    assert err.count("\n") == 1
    assert files(runs) == before


def test_a_client_that_was_absent_is_told_before_rounds_are_run_again(runs):
    told = []
    with pytest.raises(UserError, match="expected one that was active in round 4"):
        fedspeed.replay(runs / "fedspeed-loop", 4, 99, progress=lambda *done: told.append(done))
    assert not [what for what, *_ in told if what == "rounds run again"]


def test_what_cannot_be_replayed(runs, tmp_path):
    run = tmp_path / "a"
    shutil.copytree(runs / "fedspeed-loop", run)
    client = RunDir(run).records()[5].cohort[0]
    with exclusive(run), pytest.raises(UserError, match="is in progress"):
        fedspeed.replay(run, 6, client)
    state = sorted(run.glob("states/[0-9]*@[0-2]"))[0]
    state.write_bytes(state.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match=f"{state.name} is damaged"):
        fedspeed.replay(run, 4, RunDir(run).records()[3].cohort[0])
    assert fedspeed.replay(run, 1, RunDir(run).records()[0].cohort[0]).matches  # from round 0, which needs no state


def test_a_client_whose_reply_was_lost(tmp_path):
    run_config(config("fedavg", dropout=0.5, rounds=2), tmp_path / "a")
    record = next(r for r in RunDir(tmp_path / "a").records() if r.dropped)
    with pytest.raises(UserError, match=f"client {record.dropped[0]} was lost in round {record.round}"):
        fedspeed.replay(tmp_path / "a", record.round, record.dropped[0])


def test_json(runs, capsys):
    run = runs / "scaffold-loop"
    client = RunDir(run).records()[3].cohort[1]
    assert main(["replay", str(run), "--round", "4", "--client", str(client), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["matches"] is True
    assert [len(step["samples"]) for step in found["steps"]] == [10] * 3


def test_a_run_of_given_objects_and_a_fork(runs, tmp_path):
    data, model = digits()
    how = {"rounds": 3, "active": 4, "local_steps": 2, "batch_size": 10, "backend": "serial"}
    with fedspeed.simulate("fedspeed", model, data, **how, out=tmp_path / "a") as run:
        for _ in run:
            pass
        record = RunDir(tmp_path / "a").records()[1]
        assert fedspeed.replay(run, 2, record.cohort[0]).matches
        assert (run.t, run.out) == (3, tmp_path / "a")
    with pytest.raises(UserError, match="from Python"):
        fedspeed.replay(tmp_path / "a", 2, record.cohort[0])
    with pytest.raises(UserError, match="without out="):
        fedspeed.replay(fedspeed.simulate("fedspeed", model, data, **how), 2, 1)
    fedspeed.fork(runs / "fedspeed-block", 2, tmp_path / "b", {"lr": 0.01, "local_steps": 4})
    for record in RunDir(tmp_path / "b").records()[1:3]:
        found = fedspeed.replay(tmp_path / "b", record.round, record.cohort[0])
        assert found.matches
        assert len(found.steps) == (3 if record.round == 2 else 4)
