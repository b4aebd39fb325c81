"""`batch_norm`: every choice against a plain loop over copies of a module whose `state_dict`s are averaged."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from same_bits import leaves
from torch import nn
from torch.nn.functional import cross_entropy

from fedspeed import Config, FedAvg, Federated, FedInit, FedSpeed, Scaffold, UserError, fork, simulate
from fedspeed.cli import main
from fedspeed.client.batch_norm import BatchNormHooks, with_group_norm
from fedspeed.client.hooks import Hooks
from fedspeed.client.trees import one_thread
from fedspeed.methods import DP, FedGMT
from fedspeed.runs.directory import RunDir
from fedspeed.runs.inspect import inspect_run
from fedspeed.runs.launch import run_config
from fedspeed.runs.replay import replay
from fedspeed.runs.verify import verify
from fedspeed.server.segments import sibling

CLIENTS, K, LR = 5, 3, 0.2
NUMBERS = 2 * (3 + 4) + 2  # means and variances of two layers, and their counts


def net(norm=nn.BatchNorm2d) -> nn.Module:
    """A batch norm over pictures, and one over vectors that weighs all batches alike (momentum None)."""
    torch.manual_seed(1)
    last = nn.BatchNorm1d(4, momentum=None) if norm is nn.BatchNorm2d else norm(4)
    layers = [nn.Conv2d(1, 3, 3), norm(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4), last, nn.Linear(4, 3)]
    return nn.Sequential(*layers).double()


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():  # small sums: threads only wait for each other
        yield


@pytest.fixture(scope="module")
def data() -> Federated:
    r = np.random.default_rng(0)
    owner = np.repeat(np.arange(CLIENTS), [3, 5, 7, 9, 11])
    x = r.normal(size=(len(owner), 1, 4, 4)) + owner[:, None, None, None]  # their statistics differ
    y = r.integers(0, 3, len(owner))
    return Federated.from_arrays(x, y, owner, test=(x + 0.1, y))


def settings(**changes):
    """Batches are all that a client has: no order of batches is needed to say what must come out."""
    plain = {
        "rounds": 4,
        "active": 3,
        "local_steps": K,
        "batch_size": 50,
        "lr": LR,
        "lr_decay": 1.0,
        "weight_decay": 0.0,
    }
    return {**plain, "backend": "serial", **changes}


def own(data: Federated, client: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.from_numpy(data.rows(client))
    return data.x[rows].double(), data.y[rows]


def average(dicts: list[dict], weights: list[float]) -> dict:
    total = sum(weights)
    mean = {k: sum(w * d[k].double() for w, d in zip(weights, dicts, strict=True)) / total for k in dicts[0]}
    return {k: a.round().long() if "tracked" in k else a for k, a in mean.items()}


def reference(data: Federated, cohorts: list[list[int]], choice: str, weighting: str):
    """Plain FedAvg: who takes part trains a copy of the server's module; statistics begin with the client's own or
    with the server's."""
    server = net()
    kept = {i: buffers(server) for i in range(CLIENTS)}
    losses = []
    for cohort in cohorts:
        dicts = []
        for i in cohort:
            client = copy.deepcopy(server).train()
            if choice == "local":
                client.load_state_dict(kept[i], strict=False)
            optimizer = torch.optim.SGD(client.parameters(), LR)
            x, y = own(data, i)
            for _ in range(K):
                optimizer.zero_grad()
                cross_entropy(client(x), y).backward()
                optimizer.step()
            dicts.append(copy.deepcopy(client.state_dict()))
            kept[i] = buffers(client)
        weights = [len(own(data, i)[1]) if weighting == "samples" else 1 for i in cohort]
        server.load_state_dict(average(dicts, weights))
        with torch.no_grad():
            losses.append(float(cross_entropy(server.eval()(data.x_test.double()), data.y_test)))
    return server.state_dict(), kept, losses


def buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: b.clone() for name, b in model.named_buffers()}


def flat(named: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([a.reshape(-1).double() for a in named.values()])


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("choice", ["local", "average"])
def test_a_run_is_that_of_a_plain_loop_over_modules(data, choice, weighting):
    run = simulate(FedAvg(), net(), data, batch_norm=choice, weighting=weighting, **settings())
    records = list(run)
    wanted, kept, losses = reference(data, [r.cohort for r in records], choice, weighting)
    found = run.model.state_dict()
    assert found.keys() == wanted.keys()
    for name, a in wanted.items():
        torch.testing.assert_close(found[name], a, rtol=1e-9, atol=1e-11)
    assert [r.test_loss for r in records] == pytest.approx(losses, rel=1e-9)
    states = {i: run.states.get(i) for i in run.states}
    if choice == "average":
        assert states == {}
    else:
        assert states.keys() == {i for r in records for i in r.cohort}
        for i, state in states.items():
            torch.testing.assert_close(state.statistics, flat(kept[i]), rtol=1e-9, atol=1e-11)


def test_statistics_that_travel_are_counted_and_change_no_weight(data):
    """In training a batch norm looks at its batch alone, so all choices but group norm train the same weights."""
    blind = net()
    for norm in (blind[1], blind[5]):
        norm.track_running_stats, norm.running_mean, norm.running_var = False, None, None
    plain, local, sent = (
        simulate(Scaffold(), model, data, batch_norm=choice, **settings())
        for model, choice in ((blind, "refuse"), (net(), "local"), (net(), "average"))
    )
    for a, b, c in zip(plain, local, sent, strict=True):
        assert (b.bytes_up, b.bytes_down) == (a.bytes_up, a.bytes_down)
        assert (c.bytes_up - a.bytes_up, c.bytes_down - a.bytes_down) == (3 * 8 * NUMBERS, 3 * 8 * NUMBERS)
    assert torch.equal(plain.x, local.x)
    assert torch.equal(plain.x, sent.x)


def test_group_norm_in_its_place_is_the_model_built_with_it(data):
    """Two groups, one for an odd number of channels; weights, bias and names of parameters stay."""
    built = net(lambda width: nn.GroupNorm(1 if width % 2 else 2, width))
    given = net()
    with torch.no_grad():
        for model in (built, given):
            model[1].weight.copy_(torch.tensor([0.5, 1.0, 2.0]))
            model[5].bias.fill_(0.25)
    runs = [simulate(FedSpeed(), m, data, batch_norm=c, **settings()) for m, c in ((built, "refuse"), (given, "group"))]
    (_, a), (_, b) = ((list(run), run.model.state_dict()) for run in runs)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert isinstance(given[1], nn.BatchNorm2d)  # a copy was changed


def test_group_norm_reaches_every_place():
    shared = nn.BatchNorm1d(4, eps=0.5, affine=False)
    model = with_group_norm(nn.ModuleDict({"a": nn.Sequential(shared), "b": shared, "c": nn.SyncBatchNorm(3)}))
    assert model["a"][0] is model["b"]
    assert repr(model["b"]) == repr(nn.GroupNorm(2, 4, eps=0.5, affine=False))
    assert repr(model["c"]) == repr(nn.GroupNorm(1, 3))
    assert isinstance(with_group_norm(nn.BatchNorm1d(2)), nn.GroupNorm)


def test_only_the_first_of_two_gradients_of_a_step_counts(data):
    """FedSpeed's first round, written out: the perturbed point is looked at in a module that is thrown away."""
    method = FedSpeed(lam=2.0, rho=0.3, alpha=1.0)
    run = simulate(method, net(), data, batch_norm="average", **settings(rounds=1, active=CLIENTS))
    list(run)
    dicts = []
    for i in range(CLIENTS):
        model, (x, y) = net().train(), own(data, i)
        start = [p.detach().clone() for p in model.parameters()]
        for _ in range(K):
            g = torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters()))
            norm = torch.cat([a.reshape(-1) for a in g]).norm()
            away = copy.deepcopy(model)
            with torch.no_grad():
                for p, a in zip(away.parameters(), g, strict=True):
                    p.add_(a, alpha=method.rho / float(norm))
            g = torch.autograd.grad(cross_entropy(away(x), y), list(away.parameters()))
            with torch.no_grad():
                for p, a, b in zip(model.parameters(), g, start, strict=True):
                    p.sub_(LR * (a + (p - b) / method.lam))
        dicts.append(buffers(model))
    found = buffers(run.model)
    for name, a in average(dicts, [1.0] * CLIENTS).items():
        torch.testing.assert_close(found[name], a, rtol=1e-7, atol=1e-9)
    assert int(found["5.num_batches_tracked"]) == K


def everything(run):
    return [run.x, *run.model.state_dict().values(), *(a for i in run.states for a in leaves(run.states.get(i)))]


@pytest.mark.parametrize(
    ("choice", "backend"),
    [
        ("local", "serial"),
        pytest.param("local", "process", marks=pytest.mark.slow),
        pytest.param("average", "process", marks=pytest.mark.slow),
    ],
)
def test_a_stopped_run_ends_with_the_same_bits_on_every_back_end(data, tmp_path, choice, backend):
    plan = settings(batch_norm=choice, rounds=6, client_metrics="every=2,own")
    with simulate(FedSpeed(), net(), data, **plan) as run:
        records = [r.to_dict() for r in run]
    given = dict(method=FedSpeed(), model=net(), data=data, out=tmp_path / "run")
    moved = plan | {"backend": backend, "workers": 2, "states": "disk"}
    for record in simulate(**given, **moved):
        if record.round == 3:
            break
    with simulate(**given, **moved, resume=True) as resumed:
        list(resumed)
        assert all(torch.equal(a, b) for a, b in zip(everything(run), everything(resumed), strict=True))
    assert [r["test_loss"] for r in records] == [r.test_loss for r in resumed.recorder.records]
    with pytest.raises(UserError, match=f"expected batch_norm '{choice}', found"):
        simulate(**given, **moved | {"batch_norm": "group"}, resume=True)


OWN = """
from torch import nn


def build(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, outputs))
"""
SMALL = ["--quiet", "--rounds", "3", "--clients", "8", "--active", "3", "--local-epochs", "1", "--split", "iid"]


def test_on_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    given = ["run", "--model", "own.py:build", "--out", "run", "--method", "fedspeed", *SMALL]
    assert main(given) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "--batch-norm group (nn.GroupNorm(2, 8) in its place), local or average" in err
    assert not (tmp_path / "run").exists()
    assert main([*given, "--batch-norm", "local"]) == 0
    found = verify(tmp_path / "run", allow_code=True)
    assert found.broken == []
    assert any("run again: the same bits" in line for line in found.held)
    assert inspect_run(tmp_path / "run", samples=50, iterations=2, allow_code=True).loss > 0


class Named(nn.BatchNorm1d):
    """Does something else besides, as timm's do."""


@pytest.mark.parametrize(
    ("model", "changes", "told"),
    [
        (net, {"batch_norm": "fedbn"}, "batch_norm must be .*refuse, group, local"),
        (net, {"batch_norm": "local", "engine": "block"}, "engine block: .*found batch_norm local; use --engine loop"),
        (lambda: Named(4), {"batch_norm": "group"}, "the model is a Named .*choose --batch-norm local or average"),
        (
            net,
            {"batch_norm": "average", "batch_size": 4},
            "client 1 with 5 samples has a batch .*--batch-size 7 leaves",
        ),
        (
            net,
            {"batch_norm": "average", "batch_size": 1},
            "client 0 with 3 samples has a batch .*--batch-size 7 leaves",
        ),
    ],
)
def test_refused_in_one_line(data, model, changes, told):
    with pytest.raises(UserError, match=told) as refusal:
        simulate(FedAvg(), model(), data, **settings(**changes))
    assert "\n" not in str(refusal.value)


def test_a_part_of_a_batch_that_is_one_sample_is_refused_before_it_is_met(data):
    """Batches of client 3 (9 samples) are 7 and 2, of which an ascent on half of them takes 1."""
    told = r"client 3 with 9 samples .*batch size 7, with ascent_fraction 0.5 of fedinit; --batch-size 11 leaves none"
    with pytest.raises(UserError, match=told) as refusal:
        simulate(FedInit(FedSpeed(ascent_fraction=0.5)), net(), data, **settings(batch_norm="average", batch_size=7))
    assert "\n" not in str(refusal.value)
    simulate(FedSpeed(), net(), data, **settings(batch_norm="average", batch_size=7)).close()


def test_statistics_do_not_reach_a_private_model(data):
    pytest.importorskip("dp_accounting")
    with pytest.raises(UserError, match=r"dp: bounds what clients send, got batch_norm average.*--batch-norm group"):
        simulate(DP(FedAvg()), net(), data, **settings(batch_norm="average", weighting="uniform"))
    simulate(DP(FedAvg()), net(), data, **settings(batch_norm="group", weighting="uniform")).close()


@pytest.mark.parametrize("choice", ["local", "average"])
def test_a_simulation_made_alike_after_some_rounds_begins_with_the_first_statistics(data, choice):
    with simulate(FedAvg(), net(), data, **settings(batch_norm=choice)) as run:
        first = run.work.flat.statistics.first
        run.step()
        with sibling(run, run.method, run.plan) as other:
            assert torch.equal(other.work.flat.statistics.first, first)
            assert torch.equal(other.x0, run.x0)


@pytest.mark.parametrize("choice", ["local", "average"])
def test_a_turn_that_is_replayed_sends_what_was_noted(data, tmp_path, choice):
    run = simulate(FedSpeed(), net(), data, **settings(batch_norm=choice), out=tmp_path / "run")
    last = list(run)[-1]
    found = replay(run, last.round, last.cohort[0])
    assert found.matches
    assert len(found.upload.statistics) == NUMBERS


def test_a_batch_of_one_picture_has_a_variance(data):
    """Of its pixels; only layers over vectors cannot take it."""
    pictures = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(16, 3)).double()
    (record,) = simulate(FedAvg(), pictures, data, batch_norm="average", **settings(rounds=1, batch_size=2))
    assert record.grad_evals == 9


@pytest.mark.parametrize("choice", ["local", "average"])
def test_a_turn_and_a_forks_first_rounds_are_run_again_with_their_statistics(tmp_path, monkeypatch, choice):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    given = {"model": "own.py:build", "method": "fedspeed", "rounds": 5, "clients": 8, "active": 3, "local_steps": 2,
             "split": "iid", "backend": "serial", "checkpoint_every": 2, "batch_norm": choice}  # fmt: skip
    run_config(Config.from_dict(given), "run")
    for t, record in enumerate(RunDir(tmp_path / "run").records(), 1):  # 5 from a checkpoint, 1 from round 0
        turn = replay("run", t, record.cohort[0], allow_code=True) if t in (1, 5) else None
        assert turn is None or (turn.matches, turn.unlike) == (True, [])
    assert verify(tmp_path / "run", allow_code=True).broken == []  # from a checkpoint
    assert fork("run", 3, "fork", {"lr": 0.05}, allow_code=True)["rounds"] == 5
    found = verify(
        tmp_path / "fork", every_round=True, allow_code=True
    )  # who runs rounds 1 to 3 is made from the model
    assert found.broken == []


def test_a_run_made_from_another_begins_with_its_first_statistics(data):
    with simulate(FedAvg(), net(), data, **settings(batch_norm="average")) as run:
        first = run.work.flat.statistics.first.clone()
        list(run)
        assert not torch.equal(run.work.flat.statistics.read(), first)
        assert torch.equal(sibling(run, run.method, run.plan).work.flat.statistics.first, first)


def test_a_teachers_pass_is_not_counted(data):
    counted = []
    for method in (FedAvg(), FedGMT()):
        with simulate(method, net(), data, **settings(batch_norm="average", rounds=1)) as run:
            list(run)
            counted.append(run.model[1].num_batches_tracked.item())
    assert counted == [K, K]


def test_statistics_are_no_part_of_what_dp_bounds(data):
    pytest.importorskip("dp_accounting")
    with pytest.raises(UserError, match=r"dp: bounds what clients send, got batch_norm local.*--batch-norm group"):
        simulate(DP(FedAvg()), net(), data, **settings(batch_norm="local"))


def test_every_hook_has_its_part_beside_statistics():
    hooks = {name for name, value in vars(Hooks).items() if callable(value) and not name.startswith("_")}
    assert hooks - vars(BatchNormHooks).keys() == {"with_method", "rates", "hook"}  # which see no tree
