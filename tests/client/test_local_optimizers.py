"""Local optimisers: those of torch in both engines, closed forms, the same bits everywhere, and who needs plain SGD."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass

import matrix
import numpy as np
import pytest
import torch
from federations import Softmax, package
from same_bits import assert_same_bits, outcome
from torch import nn
from watching import Stop, stop_after

import fedspeed
from fedspeed import DP, METHODS, FedAvg, FedDyn, FedInit, FedProx, FedSpeed, Plan, Scaffold, TopK, UserError, simulate
from fedspeed.cli import main
from fedspeed.config.config import Config
from fedspeed.config.damping import damping
from fedspeed.data.federated import Federated
from fedspeed.experiments.grid import spaces
from fedspeed.methods.local_optimizers import OPTIMIZERS, optimizer_text
from fedspeed.runs.config_file import read_config
from fedspeed.runs.directory import RunDir
from fedspeed.runs.launch import resume, run_config
from fedspeed.runs.verify import verify
from fedspeed.theory.setting import read_run
from fedspeed.utils.files import key
from fedspeed.utils.random import batch_order

TORCH = {
    "momentum:0.9": lambda x, lr, wd: torch.optim.SGD(x, lr, momentum=0.9, weight_decay=wd),
    "nesterov:0.8": lambda x, lr, wd: torch.optim.SGD(x, lr, momentum=0.8, nesterov=True, weight_decay=wd),
    "adam": lambda x, lr, wd: torch.optim.Adam(x, lr, weight_decay=wd),
    "adam:beta1=0.7,beta2=0.95,eps=1e-3": lambda x, lr, wd: torch.optim.Adam(x, lr, (0.7, 0.95), 1e-3, wd),
    "adamw": lambda x, lr, wd: torch.optim.AdamW(x, lr, weight_decay=wd),
}
NEEDS_PLAIN = {name for name, cls in METHODS.items() if cls.reads_gradient_from_D}


@pytest.mark.parametrize("engine", ["loop", "block"])
@pytest.mark.parametrize("no_decay", [(), ("bias",)], ids=["all decay", "biases do not"])
@pytest.mark.parametrize("text", TORCH)
def test_a_turn_is_that_of_torch(text, no_decay, engine):
    """Three rounds by hand, a new torch.optim object for every turn: the mean of the clients' models to 1e-12."""
    problem = Softmax(clients=3, equal=11)
    x, y, rows = problem.arrays()
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    mine = copy.deepcopy(model)
    settings = {"rounds": 3, "active": 3, "local_epochs": 2, "batch_size": 4, "lr": 0.02, "weight_decay": 0.05}
    plan = Plan(**settings, lr_decay=0.9, local_optimizer=text, engine=engine)
    run = simulate(FedAvg(), model, problem.federated(), plan, no_decay=no_decay)
    for t, _ in enumerate(run):
        ends = []
        for i, own in enumerate(rows):
            local = copy.deepcopy(mine)
            named = list(local.named_parameters())
            kept = [p for name, p in named if not name.endswith(no_decay)] if no_decay else list(local.parameters())
            groups = [{"params": kept}, {"params": [p for _, p in named if all(p is not q for q in kept)]}]
            groups[1]["weight_decay"] = 0.0
            optimizer = TORCH[text](groups[: 1 + bool(no_decay)], 0.02 * 0.9**t, 0.05)
            for positions in batch_order(11, 4, 6, key(0, "batches", t, i)):
                batch = own[positions]
                optimizer.zero_grad()
                outputs = local(torch.from_numpy(x[batch]))
                nn.functional.cross_entropy(outputs, torch.from_numpy(y[batch])).backward()
                optimizer.step()
            ends.append(nn.utils.parameters_to_vector(local.parameters()).detach())
        mean = torch.stack(ends).mean(0)
        torch.testing.assert_close(run.x, mean, atol=1e-12, rtol=0)
        nn.utils.vector_to_parameters(mean, mine.parameters())


BESIDE = [("method", "fedspeed mixed"), ("method", "feddyn"), ("method", "fedswa"), ("stragglers", "stragglers"),
          ("engine", "block"), ("local work", "gradient clip"), ("privacy", "dp"), ("compression", "topk")]  # fmt: skip


@pytest.mark.parametrize("beside", BESIDE, ids=lambda value: value[1])
@pytest.mark.parametrize("name", matrix.OPTIMIZERS)
def test_with_methods_wrappers_and_settings_it_is_the_loop_in_numpy(name, beside, tmp_path):
    """A few of the pairs of the matrix, whose loop has the optimisers as sums over all past directions of a turn."""
    assert matrix.fault((("local optimizer", name), beside), tmp_path) == ""


def test_a_direction_is_clipped_then_decays_then_gathers_momentum():
    """`released` clips the direction without its multiples of x; weight decay and momentum come after: in NumPy."""
    problem, mu, wd, lr, beta, limit = Softmax(clients=1, equal=9), 0.3, 0.2, 0.1, 0.6, 0.25
    clipping = {"clip": limit, "clip_mode": "released", "weight_decay": wd}
    plan = Plan(rounds=1, active=1, local_steps=4, batch_size=9, lr=lr, local_optimizer=f"momentum:{beta}", **clipping)
    run = package(problem, FedProx(mu=mu), plan)
    centre = run.x.numpy().copy()
    run.step()
    x, m, cut = centre.copy(), 0.0, 0
    for _ in range(4):
        bounded = problem.gradient(np.arange(9), x) - mu * centre  # the direction without mu x
        size = np.linalg.norm(bounded)
        cut += size > limit
        m = beta * m + bounded * min(1, limit / size) + mu * x + wd * x
        x = x - lr * m
    assert cut
    np.testing.assert_allclose(run.x.numpy(), x, atol=1e-13)


def linear(d: int = 3) -> tuple[nn.Module, Federated]:
    """A loss that is linear in the parameters, with the gradient (1, 2, ..., d) everywhere."""
    data = Federated.from_arrays(np.tile(np.arange(1.0, d + 1), (6, 1)), np.zeros((6, 1)), [np.arange(6)])
    return nn.Linear(d, 1, bias=False).double(), data


def moved(text: str, steps: int, rounds: int = 1) -> np.ndarray:
    model, data = linear()
    plan = {"local_steps": steps, "batch_size": 6, "lr": 0.05, "lr_decay": 1.0, "weight_decay": 0.0, "rounds": rounds}
    run = simulate(FedAvg(), model, data, loss=lambda out, _: out.mean(), active=1, local_optimizer=text, **plan)
    before = run.x.numpy().copy()
    list(run)
    return before - run.x.numpy()


def test_constant_gradients_in_closed_form():
    """Momentum: lr g sum_k (1 - beta^k) / (1 - beta); Adam without eps: lr K in every coordinate, whatever its size."""
    g, beta, K = np.arange(1.0, 4.0), 0.75, 5
    heavy = sum((1 - beta**k) / (1 - beta) for k in range(1, K + 1))
    looking = sum((1 - beta ** (k + 1)) / (1 - beta) for k in range(1, K + 1))
    np.testing.assert_allclose(moved(f"momentum:{beta}", K), 0.05 * heavy * g, rtol=1e-12)
    np.testing.assert_allclose(moved(f"nesterov:{beta}", K), 0.05 * looking * g, rtol=1e-12)
    np.testing.assert_allclose(moved("adam:eps=1e-20", K), 0.05 * K * np.ones(3), rtol=1e-12)


@pytest.mark.parametrize("text", ["momentum:0.9", "nesterov:0.9", "adam"])
def test_nothing_is_kept_between_turns(text):
    """Three rounds along a constant gradient move as far as three times one."""
    np.testing.assert_allclose(moved(text, 2, rounds=3), 3 * moved(text, 2), rtol=1e-10)


def test_sgd_is_the_default_and_is_not_stored():
    assert "local_optimizer" not in Config().to_dict()
    assert Config().to_dict() == Config.from_dict({"local_optimizer": "sgd"}).to_dict()
    for text in TORCH:
        config = Config.from_dict({"method": "fedavg", "local_optimizer": text})
        assert Config.from_dict(config.to_dict()) == config
        assert config.local_optimizer == optimizer_text(config.local_optimizer)


@pytest.mark.parametrize("text", ["nesterov", "adamw"])
def test_two_workers_have_the_bits_of_one(text, quick_workers):
    here = outcome(FedSpeed(), local_optimizer=text, lr=0.01)
    assert_same_bits(here, outcome(FedSpeed(), local_optimizer=text, lr=0.01, backend="process", workers=2))


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", ["loop", "block"])
def test_a_cluster_has_the_bits_of_one_process(engine):
    pytest.importorskip("ray")
    how = {"local_optimizer": "adam:beta2=0.99", "lr": 0.01, "engine": engine}
    assert_same_bits(outcome(FedDyn(), **how), outcome(FedDyn(), **how, backend="ray", workers=2))


@pytest.fixture(scope="module", params=["loop", "block"])
def stored(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("stored") / "run"
    settings = {"rounds": 5, "clients": 12, "active": 4, "local_steps": 3, "batch_size": 10, "split": "iid", "lr": 0.01}
    settings |= {"backend": "serial", "checkpoint_every": 2, "method": "fedspeed", "engine": request.param}
    run_config(Config.from_dict({**settings, "local_optimizer": "adam:beta1=0.8"}), out)
    return out


def test_a_stopped_run_is_continued_with_the_same_bits(stored, tmp_path):
    with pytest.raises(Stop):
        run_config(read_config(stored), tmp_path / "run", observers=[stop_after(3)])
    resume(tmp_path / "run")
    digests = [json.loads((out / "summary.json").read_text())["digests"] for out in (stored, tmp_path / "run")]
    assert digests[0] == digests[1]


def test_a_stored_run_is_verified_and_its_turns_repeat(stored):
    assert verify(stored, every_round=True).broken == []
    last = RunDir(stored).records()[-1]
    for client in last.cohort[:2]:
        assert fedspeed.replay(stored, round=last.round, client=client).matches


@pytest.mark.parametrize("name", METHODS)
def test_a_method_takes_any_optimizer_or_says_why_not(name):
    """Those that divide D by K, or by K lr, are refused before round 1, bare and inside a wrapper."""
    problem, cls = Softmax(), METHODS[name]
    plan = Plan(rounds=2, active=7, local_steps=3, batch_size=4, lr=0.01, local_optimizer="adam")
    for method in (cls(), FedInit(cls()), TopK(cls())):
        if name in NEEDS_PLAIN:
            expected = f"^{name}: needs local_optimizer = sgd, got adam: its .* after plain SGD steps alone; leave out"
            with pytest.raises(UserError, match=expected):
                package(problem, method, plan)
            with pytest.raises(UserError, match=expected):
                Config.from_dict({"method": method.to_dict(), "local_optimizer": "adam"})
        elif method.label == name:
            package(problem, method, plan).step()
    assert len(NEEDS_PLAIN) == 9


def test_a_users_method_takes_any_unless_it_declares():
    @dataclass(frozen=True)
    class Mine(Scaffold):
        reads_gradient_from_D = ""

    @dataclass(frozen=True)
    class Declared(Scaffold):
        reads_gradient_from_D = True

    plan = Plan(rounds=1, active=2, local_steps=2, local_optimizer="momentum")
    package(Softmax(), Mine(), plan).step()
    with pytest.raises(
        UserError, match=r"^declared: needs local_optimizer = sgd, got momentum:0\.9: it takes D / lr_sum"
    ):
        package(Softmax(), Declared(), plan)


BAD = {
    "adamm": "unknown local_optimizer 'adamm'; did you mean 'adam'",
    "": "unknown local_optimizer ''",
    "momentum:1.5": r"local_optimizer: Momentum: beta must be in \[0, 1\), got 1.5",
    "momentum:nan": r"Momentum: beta must be in \[0, 1\), got nan",
    "adam:beta2=1": r"Adam: beta2 must be in \[0, 1\), got 1.0",
    "adam:eps=0": r"Adam: eps must be in \[1e-30, inf\), got 0.0",
    "adam:eps=inf": r"Adam: eps must be in \[1e-30, inf\), got inf",
    "adam:b1=0.9": "local_optimizer: unknown field of Adam 'b1'; .*Known: beta1, beta2, eps",
    "adam:beta1=0.9,beta1=0.8": "expected sgd, momentum:0.9, .* found 'adam:beta1=0.9,beta1=0.8'",
    "adam:0.9,0.99": "expected sgd, .* found 'adam:0.9,0.99'",
    "adam:beta1": "expected sgd, .* found 'adam:beta1'",
    "momentum:": "expected sgd, .* found 'momentum:'",
    "momentum:fast": "expected sgd, .* found 'momentum:fast'",
    "sgd:0.9": "expected sgd, momentum:0.9, .* found 'sgd:0.9'",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_input_is_one_line(text, tmp_path, capsys):
    with pytest.raises(UserError, match=BAD[text]):
        Plan(local_optimizer=text)
    out = tmp_path / "run"
    assert main(["run", "--method", "fedavg", "--local-optimizer", text, "--out", str(out), "--quiet"]) == 2
    told = capsys.readouterr().err
    assert "local_optimizer" in told
    assert told.count("\n") == 1
    assert not out.exists()


def test_a_value_that_is_not_text_is_refused():
    for value in (0.9, None, ["adam"], {"name": "adam"}):
        with pytest.raises(UserError, match=r"^local_optimizer: expected sgd, momentum:0\.9"):
            Plan(local_optimizer=value)


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        (["--momentum", "0.9"], "it is a local optimiser: --local-optimizer momentum:0.9"),
        (["--adam"], "it is a local optimiser: --local-optimizer adam"),
        (["--optimizer", "adam"], "--local-optimizer adam for the clients' steps"),
        (["--local-optimiser", "adam"], "did you mean --local-optimizer"),
    ],
)
def test_other_names_of_the_option_are_answered(typed, answer, capsys):
    assert main(["run", *typed]) == 2
    assert answer in capsys.readouterr().err


def test_the_settings_in_force_name_it_and_only_if_it_is_set():
    runs = [
        package(Softmax(), FedAvg(), Plan(rounds=1, active=2, local_optimizer=text)) for text in ("sgd", "nesterov")
    ]
    assert "local_optimizer" not in runs[0].settings
    assert runs[1].settings.endswith("local_optimizer nesterov:0.9")


def test_what_assumes_plain_sgd_elsewhere_knows(tmp_path):
    """The linear model of the damping, the theorem's assumptions, and the rates that tuning tries."""
    plan = {"rounds": 1500, "active": 10, "local_steps": 10}
    assert damping(FedDyn(), Plan(**plan), [100] * 500) is not None
    assert damping(FedDyn(), Plan(**plan, local_optimizer="momentum"), [100] * 500) is None
    stated = {}
    for text in ("sgd", "nesterov"):
        config = Config.from_dict({"rounds": 1, "clients": 4, "local_steps": 1, "local_optimizer": text})
        run_config(config, tmp_path / text)
        stated[text] = {fact.name: fact for fact in read_run(tmp_path / text).facts}
    assert "plain SGD steps" not in stated["sgd"]
    assert stated["nesterov"]["plain SGD steps"].holds is False
    tried = {text: str(spaces({"a": {"name": "fedavg"}}, {"local_optimizer": text})["a"]["lr"]) for text in OPTIMIZERS}
    assert tried["sgd"] == "0.01..1:log"
    assert tried["adam"] == tried["adamw"] == "0.0001..0.01:log"


def test_a_rate_that_is_one_of_sgds_is_warned_about():
    for text in ("adam", "adamw"):
        with pytest.warns(UserWarning, match=rf"^local_optimizer: {text} moves a parameter by about lr .* --lr 0\.001"):
            package(Softmax(), FedAvg(), Plan(rounds=1, active=2, local_optimizer=text))


def test_the_page_of_a_method_says_what_it_needs(capsys):
    assert main(["methods", "scaffold"]) == main(["methods", "feddyn"]) == 0
    told = capsys.readouterr().out
    assert told.count("needs --local-optimizer sgd: its control variate takes") == 1


def test_dp_bounds_what_is_sent_whatever_the_steps():
    """An upload's norm is at most `clip` under Adam too: 20 steps of 0.05 in every coordinate would be longer."""
    pytest.importorskip("dp_accounting")
    run = package(
        Softmax(),
        DP(FedAvg(), noise=0.0, clip=0.3),
        Plan(rounds=1, active=1, local_steps=20, local_optimizer="adam", lr=0.05, weight_decay=0.0),
    )
    before = run.x.clone()
    run.step()
    assert 0.29 < float((run.x - before).norm()) <= 0.3
