"""Simulated time: the formula by hand, the same numbers everywhere, and no bit of training moved."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from federations import Softmax
from same_bits import assert_same_bits, outcome
from torch import nn
from watching import Stop, stop_after

from fedspeed import Config, FedAvg, FedSpeed, Scaffold, UserError, simulate
from fedspeed.cli import main
from fedspeed.client.work import Facts
from fedspeed.config.network import DEVICES, NETWORKS, Clock, parse_devices, parse_network
from fedspeed.models.fast_conv import Conv
from fedspeed.models.resnet import choose_layers, resnet18_gn, resolve_layers
from fedspeed.record import Record
from fedspeed.report.comparison import costed
from fedspeed.report.run_files import RunFiles
from fedspeed.runs.launch import resume, run_config
from fedspeed.runs.verify import verify
from fedspeed.server.simulated_time import gradient_flops, samples
from fedspeed.utils.random import batch_order

ONE = Record(
    round=1, cohort=[2, 5, 7], lr=0.1, train_loss=1.0, test_loss=None, test_accuracy=None, drift=0.0, update_norm=0.0,
    bytes_down=3_000_000, bytes_up=5_000_000, grad_evals=3.0, dropped=[5], stragglers=[], seconds=0.0, eval_seconds=0.0,
    virtual_seconds=0.0, client_flops=[20_000_000_000, 5_000_000_000], client_bytes_up=[1_000_000, 4_000_000],
)  # fmt: skip
SMALL = {
    "rounds": 4,
    "clients": 8,
    "active": 3,
    "local_epochs": 1,
    "batch_size": 10,
    "engine": "loop",
    "model": "linear",
}


def config(**changes) -> Config:
    return Config.from_dict({**SMALL, "backend": "serial", "network": "lte", "devices": "phones", **changes})


@pytest.mark.parametrize(
    ("network", "seconds"),
    [
        (
            "up=8,down=16,latency=250",
            5.25,
        ),  # client 7: 0.25 + 1 MB / 2 MB/s + 0.5 + 4 MB / 1 MB/s; 2: 0.25 + 0.5 + 2 + 1
        ("up=80,down=16,latency=250", 2.85),  # client 2: 0.25 + 0.5 + 2 + 0.1; 7: 0.25 + 0.5 + 0.5 + 0.4
        ("up=inf,down=inf,latency=0", 2.0),
    ],
)
def test_the_slowest_counted_client_decides(network, seconds):
    assert Clock(network).round(ONE) == pytest.approx(seconds, rel=1e-12)
    slow = replace(ONE, dropped=[2, 5], client_flops=[0], client_bytes_up=[0])
    assert Clock("up=8,down=16,latency=250", "0.5x1").round(slow) == pytest.approx(0.75, rel=1e-12)


def test_rounds_add_up_and_devices_divide_the_work():
    clock = Clock("up=inf,down=inf,latency=100", "0.25x1")
    assert list(clock.rounds([ONE, ONE])) == pytest.approx([8.1, 16.2], rel=1e-12)


def test_a_device_is_a_function_of_seed_and_client():
    mix = "1x0.5,4x0.3,9x0.2"
    first = [Clock("lte", mix, seed=3).speed(i) for i in range(4000)]
    backwards = Clock("wifi", mix, seed=3)
    assert [backwards.speed(i) for i in reversed(range(4000))] == first[::-1]
    assert first != [Clock("lte", mix, seed=4).speed(i) for i in range(4000)]
    shares = {speed: count / 4000 for speed, count in Counter(first).items()}
    assert shares == pytest.approx({1.0: 0.5, 4.0: 0.3, 9.0: 0.2}, abs=0.03)  # four standard deviations


def test_names_stand_for_what_the_document_says():
    page = (Path(__file__).parents[2] / "docs/guides/simulated-time.md").read_text("utf-8")
    for name, net in NETWORKS.items():
        assert f"| `{name}` | {net.up} | {net.down} | {net.latency} |" in page
        assert parse_network(f"latency={net.latency}, up={net.up},down={net.down}") == net
    for name, mix in DEVICES.items():
        assert parse_devices(",".join(f"{speed}x{share}" for speed, share in mix)) == mix
        if len(mix) > 1:
            assert f"| `{name}` | {', '.join(f'{share:.0%} {speed:g}' for speed, share in mix)} |" in page


@pytest.mark.parametrize(
    ("model", "shape", "forward"),
    [
        (nn.Linear(5, 2), (1, 5), 2 * 5 * 2),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 10)), (1, 3, 6, 6), 2 * (4 * 16 * 27 + 640)),
        (Conv(8, 16), (1, 8, 4, 4), 2 * 16 * 16 * 8 * 9),  # it takes a quarter of these products, and counts as all
        (nn.PReLU(), (1, 5), 2 * 1),
    ],
)
def test_operations_are_counted_by_shapes(model, shape, forward):
    model.train()
    before = torch.get_rng_state()
    assert gradient_flops(model, torch.ones(shape)) == 3 * forward
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)


class Looks(nn.Linear):
    """Depends on the numbers, so shapes alone do not do."""

    def forward(self, x):
        return super().forward(x) if x.sum().item() > 0 else x


class Scaled(nn.Sequential):
    """Divides pictures by their largest number, so shapes alone do not do."""

    def forward(self, x):
        return super().forward(x / x.max().item())


def test_a_model_that_looks_at_numbers_is_given_some():
    assert gradient_flops(Looks(5, 2), torch.ones(1, 5)) == 60
    net, picture = resnet18_gn((3, 32, 32), 10), torch.ones(1, 3, 32, 32)
    found = [gradient_flops(Scaled(net), picture)]  # with stock convolutions and with compiled blocks
    choose_layers(net, resolve_layers(net))
    assert gradient_flops(Scaled(net), picture) == found[0] >= gradient_flops(net, picture)
    with pytest.raises(UserError, match="network: the model's operations cannot be counted"):
        gradient_flops(nn.Linear(5, 2), torch.ones(1, 7))


@pytest.mark.parametrize(("n", "batch", "K"), [(15, 10, 3), (15, 10, 4), (7, 10, 5), (25, 10, 2), (20, 10, 1)])
def test_samples_are_those_of_the_batches(n, batch, K):
    rows = sum(map(len, batch_order(n, batch, K, key=1)))
    assert samples(Facts(K, n, 0.0, 0.0, grad_evals=2.0 * K), batch) == pytest.approx(2 * rows, rel=1e-12)


@pytest.mark.parametrize(("method", "calls", "copies"), [(FedAvg(), 1, 1), (FedSpeed(), 2, 1), (Scaffold(), 1, 2)])
def test_a_run_by_hand(method, calls, copies):
    """A linear model of 12 float64 weights on clients of 5, 8, ... 23 samples, each step of every client counted."""
    problem = Softmax()
    plan = {"rounds": 3, "active": 4, "local_epochs": 2, "batch_size": 4, "dropout": 0.3, "stragglers": 0.5, "seed": 2}
    given = {"network": "up=0.001,down=0.002,latency=40", "devices": "1e-6x0.5,2e-6x0.5"}
    run = simulate(method, problem.model(), problem.federated(), engine="loop", backend="serial", **plan, **given)
    clock = Clock(given["network"], given["devices"], seed=2)
    now = 0.0
    for record in run:
        counted = [i for i in record.cohort if i not in record.dropped]
        whole = {i: calls * 72 * 2 * problem.sizes[i] for i in counted}
        for i, flops in zip(counted, record.client_flops, strict=True):
            assert flops < whole[i] if i in record.stragglers else flops == whole[i]
        assert record.client_bytes_up == [96 * copies] * len(counted)
        down = 96 * (record.bytes_down // 96 // len(record.cohort))
        now += max(
            0.04 + down / 250 + flops / (1e10 * clock.speed(i)) + 96 * copies / 125
            for i, flops in zip(counted, record.client_flops, strict=True)
        )
        assert record.virtual_seconds == pytest.approx(now, rel=1e-12)
        assert Record.from_dict(json.loads(json.dumps(record.to_dict()))) == record
    assert {1e-6, 2e-6} == {clock.speed(i) for i in range(7)}


def test_the_same_numbers_in_workers_and_no_bit_of_training_moves(quick_workers):
    timed = {"network": "lte", "devices": "phones"}
    plain = outcome(Scaffold())
    serial = outcome(Scaffold(), **timed)
    assert_same_bits(serial, outcome(Scaffold(), backend="process", workers=1, **timed))
    block = outcome(Scaffold(), engine="block", **timed)
    own = ("virtual_seconds", "client_flops", "client_bytes_up")
    assert [[r[key] for key in own] for r in block[0]] == [[r[key] for key in own] for r in serial[0]]
    assert not any(key in r for r in plain[0] for key in own)
    assert_same_bits(plain, ([{k: v for k, v in r.items() if k not in own} for r in serial[0]], *serial[1:]))


def test_time_goes_on_after_a_stop(tmp_path):
    whole = run_config(config(targets=[0.05, 0.99]), tmp_path / "whole")
    with pytest.raises(Stop):
        run_config(config(targets=[0.05, 0.99]), tmp_path / "broken", observers=[stop_after(2)])
    ended = resume(tmp_path / "broken")
    assert ended["digests"] == whole["digests"]
    assert ended["virtual_seconds"] == whole["virtual_seconds"] > ended["targets"]["0.05"]["virtual_seconds"] > 0
    assert verify(tmp_path / "broken").broken == []
    lines = (tmp_path / "broken/rounds.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["virtual_seconds"] == whole["virtual_seconds"]
    longer = resume(tmp_path / "broken", rounds=6)
    assert longer["digests"] == run_config(config(rounds=6, targets=[0.05, 0.99]), tmp_path / "long")["digests"]


def test_verify_finds_a_time_that_was_changed(tmp_path):
    run_config(config(rounds=2), tmp_path / "a")
    rounds = tmp_path / "a/rounds.jsonl"
    lines = [json.loads(text) for text in rounds.read_text().splitlines()]
    lines[-1]["virtual_seconds"] /= 2
    rounds.write_text("".join(json.dumps(each) + "\n" for each in lines))
    assert any("virtual_seconds" in wrong for wrong in verify(tmp_path / "a").broken)


def test_finished_runs_are_timed_for_another_network_as_if_run_with_it(own_folder, capsys):
    for method in ("fedavg", "scaffold"):
        run_config(config(method=method), f"lte/{method}")
        run_config(config(method=method, network="wifi", devices="lab"), f"wifi/{method}")
    live, asked = RunFiles.read(Path("wifi/scaffold")), RunFiles.read(Path("lte/scaffold"))
    assert costed(asked, "wifi", "lab").curve("virtual_seconds") == live.curve("virtual_seconds")
    assert costed(asked).rounds == asked.rounds
    assert replace(asked, rounds=[]).numbers([0.5])["virtual_seconds"] == 0.0  # one that diverged at once
    given = ["--network", "wifi", "--devices", "lab", "--targets", "0.01,0.99", "--out", "t"]
    assert main(["compare", "lte", *given]) == 0
    assert "virtual seconds: network wifi, devices lab" in capsys.readouterr().out
    averaged, scaffold = json.loads(Path("t/table.json").read_text())["rows"]
    assert scaffold["virtual_seconds"]["values"] == [live.summary["virtual_seconds"]]
    assert scaffold["virtual_seconds_to_1"]["values"] == [live.rounds[0]["virtual_seconds"]]
    assert scaffold["virtual_seconds"]["mean"] > averaged["virtual_seconds"]["mean"]
    assert f"> {live.summary['virtual_seconds']:.2f}" in Path("t/table.md").read_text()
    run_config(config(network="", devices="uniform"), "none/fedspeed")
    for words in (["none", "--network", "lte"], ["none", "--devices", "lab"], ["none", "lte", "--network", "lte"]):
        assert main(["compare", *words, "--out", "u"]) == 2
        assert "only a run made with --network can be timed for another" in capsys.readouterr().err
    assert main(["compare", "none", "lte", "--out", "u", "--quiet"]) == 0  # untimed beside timed: no such column
    assert "virtual s" not in Path("u/table.md").read_text().splitlines()[0]


@pytest.mark.parametrize(
    "broken", [{"client_flops": [1]}, {"client_flops": "x"}, {"cohort": []}, {"cohort": [2**70, 1, 2]}, {"round": None}]
)
def test_rounds_that_were_changed_are_not_timed(tmp_path, broken):
    run_config(config(rounds=1), tmp_path / "a")
    run = RunFiles.read(tmp_path / "a")
    with pytest.raises(UserError, match="expected rounds that say what every client computed and sent"):
        costed(replace(run, rounds=[{**run.rounds[0], **broken}]), "wifi")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--network lt", "unknown network 'lt'; did you mean 'lte'?"),
        ("--network up=1,down=2", "network: expected up, down and latency once each, such as up=10,down=30"),
        ("--network up=1,down=2,latency=3,up=4", "network: expected up, down and latency once each"),
        ("--network up=1,down=2,ping=3", "network: expected up, down and latency once each"),
        ("--network up=0,down=2,latency=3", "network: expected rates of at least 1e-6 Mbit/s"),
        ("--network up=nan,down=2,latency=3", "network: expected rates of at least 1e-6 Mbit/s"),
        ("--network up=fast,down=2,latency=3", "network: expected rates of at least 1e-6 Mbit/s"),
        ("--network up=1,down=fast,latency=3", "network: expected rates of at least 1e-6 Mbit/s"),
        ("--network up=1,down=2,latency=inf", "network: expected rates of at least 1e-6 Mbit/s"),
        ("--network lte --devices phone", "unknown mix of devices 'phone'; did you mean 'phones'?"),
        ("--network lte --devices 1x0.5,2x0.4", "devices: expected SPEEDxSHARE,.. with speeds from 1e-6"),
        ("--network lte --devices 0x1", "devices: expected SPEEDxSHARE"),
        ("--network lte --devices 1x-1,1x2", "devices: expected SPEEDxSHARE"),
        ("--network lte --devices 2", "devices: expected SPEEDxSHARE"),
        ("--devices phones", "devices: phones expects a network too, found none; add one, --network lte"),
    ],
)
def test_bad_input_is_one_line(own_folder, capsys, words, says):
    assert main(["run", "--rounds", "1", "--quiet", "--out", "a", *words.split()]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1
    assert list(Path().iterdir()) == []
