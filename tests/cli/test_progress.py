"""What is shown while runs go on, inside a round too; and the command that a run proposes next."""

from __future__ import annotations

import io
import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fedspeed import Config, FedAvg, FedSpeed
from fedspeed.cli import main, options, progress
from fedspeed.config.config import Spec
from fedspeed.methods import FedInit


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until told."""
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@dataclass
class Round:
    """As much of a record as is shown."""

    round: int
    train_loss: float = 0.5
    test_loss: float | None = 0.25
    test_accuracy: float | None = 0.75
    seconds: float = 40.0


def plain() -> Console:
    return Console(file=io.StringIO(), width=120, highlight=False)


def test_a_long_round_says_how_far_it_is_at_most_every_30_seconds(clock):
    console = plain()
    with progress.Live(console, 5, "fedavg") as live:
        for i in range(1, 11):
            clock[0] += 10
            live.client(i, 10)
        live.round(Round(1), None)
        live.client(1, 10)
    assert console.file.getvalue().splitlines() == [
        "fedavg: round 1/5, client 4/10",
        "fedavg: round 1/5, client 8/10",
        "fedavg: round 1/5  accuracy 75.00%  test loss 0.2500  40.00 s",
    ]


def test_a_line_of_a_round_without_a_test_has_no_old_score(clock):
    console = plain()
    with progress.Live(console, 3, "fedavg") as live:
        live.round(Round(1), None)
        live.round(Round(2, test_loss=None, test_accuracy=None), None)
        live.round(Round(3, test_loss=0.125, test_accuracy=None), None)
    assert console.file.getvalue().splitlines() == [
        "fedavg: round 1/3  accuracy 75.00%  test loss 0.2500  40.00 s",
        "fedavg: round 2/3  train loss 0.5000  40.00 s",
        "fedavg: round 3/3  test loss 0.1250  40.00 s",
    ]


def test_on_a_terminal_the_bar_moves_inside_a_round(clock):
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with progress.Live(console, 5, "fedavg") as live:
        live.round(Round(1), None)
        live.client(2, 8)  # at once: not worth a change
        assert live.bar.tasks[0].completed == 1
        clock[0] += 1
        live.client(4, 8)
        assert live.bar.tasks[0].completed == 1.5
        assert live.bar.tasks[0].fields["score"] == "accuracy 75.00%  test loss 0.2500  client 4/8"
        live.round(Round(2), None)
        assert "client" not in live.bar.tasks[0].fields["score"]
        live.bar.refresh()
    assert "Traceback" not in console.file.getvalue()


def test_diverging_losses_are_short(clock):
    console = plain()
    with progress.Live(console, 1, "fedavg") as live:
        live.round(Round(1, test_loss=30617569160463768572919808.0), None)
    assert "test loss 3.1e+25  " in console.file.getvalue()


@dataclass
class Several:
    """A run of several."""

    key: str
    label: str
    cost: float = 1.0


def test_time_left_is_by_work_and_not_by_what_was_there_before(clock):
    """Half of `a` was there before; its other half and `b` are 1.5 runs of work, of which a third took 10 s."""
    console, several = plain(), [Several("a", "a"), Several("b", "b")]
    with progress.ManyRunsProgress(console, "both", several, True) as runs:
        clock[0] += 25  # what it takes to start does not count
        runs.on_part(several[0], 0.5)
        clock[0] += 10
        runs.on_done(several[0], "done")
        clock[0] += 31
        runs.on_part(several[1], 0.5, "round 5/10")
        runs.on_done(several[1], "diverged", bad=True)
    assert console.file.getvalue().splitlines() == [
        "a: done  (1/2 runs, 20 s left)",
        "b: round 5/10  (1/2 runs, 41 s left)",
        "b: diverged  (2/2 runs)",
    ]


# --- what next ---


CONFIGS = [
    {},
    {"method": FedAvg(), "clients": 20, "active": 4, "lr": 0.05, "weighting": "samples", "targets": (0.5, 0.8)},
    {"method": FedSpeed(rho=0.05, prox=True, server="active"), "decay_outside_mix": True, "local_steps": 3},
    {"method": FedInit(FedSpeed(), beta=0.3), "model": Spec("mlp", {"hidden": [32, 16]}), "lr_decay": 0.9},
    {"data": Spec("synthetic", {"alpha": 0.5}), "split": "natural", "clients": 30},
    {"data": Spec("arrays"), "data_dir": "a folder/it's.npz", "split": "dirichlet:0.3", "eval_every": 5},
]


@pytest.mark.parametrize("changes", CONFIGS, ids=lambda changes: ",".join(changes))
def test_the_options_of_a_config_make_that_config(changes):
    from fedspeed.cli import build_parser, compare

    config = Config(**changes)
    words = shlex.split(shlex.join(["compare", options.as_text(config.method), *options.as_given(config)]))
    args = build_parser().parse_args(words)
    made = Config.from_dict({**compare.base_tables(args), "method": options.parse_method(args.methods[0])})
    assert made.to_dict() == config.to_dict()


def test_a_method_inside_a_method_with_fields_has_no_short_text():
    assert options.as_text(FedInit(FedSpeed(rho=0.3), beta=0.2)) == "fedspeed:rho=0.3+fedinit:beta=0.2"
    assert options.as_text(FedInit(FedSpeed())) == "fedinit:base=fedspeed"


def test_the_proposed_command_runs_in_the_same_setting(own_folder, capsys):
    rng = np.random.default_rng(0)
    np.savez("my data.npz", x=rng.normal(size=(200, 8)).astype("float32"), y=np.arange(200) % 3)
    given = ["--data", "arrays", "--data-dir", "my data.npz", "--split", "iid", "--clients", "10", "--active", "3"]
    small = ["--rounds", "2", "--model", "linear", "--lr", "0.05", "--backend", "serial"]
    assert main(["run", *given, *small, "--set", "method.rho=0.3", "--out", "a"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("next: ")]
    words = shlex.split(line.removeprefix("next: ").removesuffix("(is the difference real?)"))
    assert words[:2] == ["fedspeed", "compare"]
    assert main([*words[1:], "--quiet", "--out", "c"]) == 0
    first = Config.from_toml(Path("a/config.toml"))
    second = Config.from_toml(Path("c/fedspeed_rho=0.3-s0/config.toml"))
    assert first.to_dict() == second.to_dict()
    assert Path("a/model.safetensors").read_bytes() == Path("c/fedspeed_rho=0.3-s0/model.safetensors").read_bytes()


def test_a_run_that_goes_on_is_shown_where_it_stands(monkeypatch):
    from types import SimpleNamespace

    from fedspeed.experiments.batch import ProgressObserver

    told = []
    monkeypatch.setattr("fedspeed.experiments.batch.BLINK", 0.0)
    watch = ProgressObserver(80, told.append)
    watch.started(SimpleNamespace(t=46), {})
    watch.client(1, 10)
    assert told == [((46 + 0.1) / 80, "round 47/80, client 1/10")]
