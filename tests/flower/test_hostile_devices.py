"""What one device says or sends ends no run, and what the server can know it does not believe."""

from __future__ import annotations

import math

import pytest

flwr = pytest.importorskip("flwr", reason="make test-flower has it")

import httpx  # noqa: E402
import torch  # noqa: E402
from flowerrun import Run, alone, line_of  # noqa: E402
from flwr.app import MetricRecord  # noqa: E402
from google.protobuf.message import DecodeError  # noqa: E402

import fedspeed  # noqa: E402
from fedspeed.cli.options import parse_method  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:google.*", "ignore::DeprecationWarning:flwr.*")


def of(kind, node, change):
    """A fault: what `change` makes of this node's replies to messages of a kind."""

    def fault(found, message, reply):
        return change(reply) if (found, message.metadata.message_type) == (node, kind) else [reply]

    return fault


def test_a_hello_that_cannot_be_decoded(tmp_path, data):
    """One more SuperNode joins, and says something that is no message."""
    run = Run(tmp_path, data, "fedavg", of("query.hello", 500, lambda reply: [DecodeError("Error parsing message")]))
    run.join(2, node=500)
    assert run.go().equals()
    assert [(r["kind"], r["node"]) for r in run.refused] == [("malformed", "500")]


def test_a_superlink_that_is_away_is_no_devices_fault(tmp_path, data):
    run = Run(tmp_path, data, "fedavg", of("train", 103, lambda reply: [httpx.ConnectError("gone")]), active=4)
    with pytest.raises(httpx.ConnectError):
        run.go()
    assert run.refused == []


def test_a_metric_of_the_servers_own(tmp_path, data):
    """The method reports `eta_g` at the server; a client that reports it too is refused, and the run goes on."""

    def named(reply):
        reply.content["metrics"] = MetricRecord({**reply.content["metrics"], "eta_g": 1.0})
        return [reply]

    method = parse_method("fedavg+topk:0.1+fedexp")
    run = Run(tmp_path, data, method, of("train", 103, named), active=4, rounds=1).go()
    assert "eta_g" in run.rows[0]["metrics"]
    assert [(r["kind"], r["client"]) for r in run.refused] == [("malformed", 3)]
    assert run.equals(failing={(0, 3)})


@pytest.mark.parametrize(
    ("sums", "why"),
    [
        ({"loss": math.inf, "right": 3.0}, "not finite"),
        ({"loss": math.nan, "right": 3.0}, "not finite"),
        ({"loss": -1.0, "right": 3.0}, "malformed"),
        ({"loss": 1.0, "right": 1e6}, "malformed"),
        ({"loss": 1.0, "right": -1}, "malformed"),
    ],
)
def test_scores_that_cannot_be(tmp_path, data, sums, why):
    def change(reply):
        reply.content["sums"] = MetricRecord(sums)
        return [reply]

    run = Run(tmp_path, data, "fedavg", of("evaluate", 103, change), client_metrics="every=1", rounds=1).go()
    assert [(r["kind"], r["client"]) for r in run.refused] == [(why, 3)]
    found = fedspeed.RunDir(run.out).client_metrics()
    assert torch.tensor(found.loss[0]).isnan().tolist() == [False, False, False, True]


def test_what_a_device_says_is_one_line_of_the_log(tmp_path, data, log):
    def change(reply):
        reply.content["terms"]["cpu"] = "x\nfedspeed: round 1: all is well \x1b[31m" + "y" * 1000
        return [reply]

    Run(tmp_path, data, "fedavg", of("query.hello", 103, change), rounds=1).go()
    found = line_of(log, "other last bits")
    assert len(found) < 500
    assert "\x1b" not in found


def test_a_message_that_is_too_large(tmp_path, data, log):
    """Flower's grid gives no names at all when the SuperLink answers 413."""
    run = Run(tmp_path, data, "fedavg")
    push = run.loop.push_messages
    run.loop.push_messages = lambda messages: [] if messages[0].metadata.message_type == "train" else push(messages)
    with pytest.raises(fedspeed.UserError, match="the message is too large for the SuperLink"):
        run.go()


def test_a_client_that_is_away_is_not_waited_for(tmp_path, data, log, monkeypatch):
    """Once it has been away for a while, no round waits its whole time for it; it takes part when it is back."""
    monkeypatch.setattr("fedspeed.flower.roster.GRACE", 0.2)
    run = Run(tmp_path, data, "scaffold", active=4).go(rounds=1)
    del run.loop.nodes[103]
    run.go(rounds=3)
    assert [row["dropped"] for row in run.rows] == [[], [3], [3]]
    assert "client 3: no SuperNode is this client; the round continues without it" in line_of(log, "client 3: no")
    assert not [line for line in log.messages if "no reply within" in line]
    run.join(3)
    assert run.go().equals(failing={(1, 3), (2, 3)})


def test_a_device_whose_data_come_later_is_asked_again(tmp_path, data, monkeypatch):
    monkeypatch.setattr("fedspeed.flower.roster.AGAIN", 0.1)
    asked = []

    def mounted(client, config):
        asked.append(client)
        if len(asked) < 3:
            raise FileNotFoundError(2, "No such file or directory", "data")
        return alone(data, client)

    run = Run(tmp_path, data, "fedavg")
    run.join(3, app=run.app(data=mounted))
    assert run.go(wait=20.0).equals()
    assert [(r["kind"], r["node"]) for r in run.refused] == [("failed", "103")] * 2
