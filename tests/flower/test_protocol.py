"""Server and devices with Flower's real records and apps, without its network: bits, states, refusals, restarts."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

flwr = pytest.importorskip("flwr", reason="make test-flower has it")

import torch  # noqa: E402
from flowerloop import Loop  # noqa: E402
from flowerrun import N, Run, alone, line_of  # noqa: E402
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.app.error import Error  # noqa: E402
from google.protobuf.message import DecodeError  # noqa: E402

import fedspeed  # noqa: E402
from fedspeed.cli.options import parse_method  # noqa: E402
from fedspeed.flower import client_app, server_app  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:google.*", "ignore::DeprecationWarning:flwr.*")
METHODS = ["fedavg", "fedspeed", "scaffold", "feddyn", "fedadmm", "fedcm", "fedlesam", "fedsmoo", "fedadam"]


@pytest.mark.parametrize("method", METHODS)
def test_a_deployed_run_has_the_bits_of_simulate(tmp_path, data, method):
    """Every kind of state: none, a dual, control variates, two vectors, a flag, a server's own."""
    assert Run(tmp_path, data, method).go().equals()


@pytest.mark.parametrize(
    "settings",
    [
        {"weighting": "samples"},
        {"cohort": "bernoulli", "stragglers": 0.5, "dropout": 0.2},
        {"warmup": "lr=3", "local_steps": 3, "local_epochs": 1},
        {"local_optimizer": "adam:beta1=0.8", "lr": 0.01},
        {"state_dtype": "bfloat16", "precision": "bfloat16", "lr_decay": 0.0},
        {"loss": "cross-entropy:smoothing=0.1"},
    ],
    ids=lambda s: "-".join(s),
)
def test_settings_too(tmp_path, data, settings):
    assert Run(tmp_path, data, "fedspeed", **settings).go().equals()


@pytest.mark.parametrize("method", ["fedspeed+topk:0.1", "fedspeed+clip:1", "scaffold+quantise:8"])
def test_wrappers_too(tmp_path, data, method):
    assert Run(tmp_path, data, parse_method(method)).go().equals()


def test_a_lost_reply_changes_no_state(tmp_path, data):
    """Client 1 works in round 2, its reply is lost for good: it drops out, and its state is that of round 1."""

    def lose(node, message, reply):
        here = message.metadata.message_type == "train" and node == 101 and message.content["job"]["round"] == 1
        return [] if here else [reply]

    run = Run(tmp_path, data, "scaffold", lose, active=4).go(timeout=1.0)
    assert [row["dropped"] for row in run.rows] == [[], [1], [], []]
    assert run.equals(failing={(1, 1)})


def test_an_error_of_flowers_is_tried_again(tmp_path, data):
    """The first message of every round to client 2 comes back as an error: it is sent again, with the same bits."""
    seen = set()

    def fail(node, message, reply):
        key = (node, message.metadata.message_type, str(message.metadata.group_id))
        first, _ = key not in seen, seen.add(key)
        return [Message(Error(5, "node unavailable"), reply_to=message)] if node == 102 and first else [reply]

    assert Run(tmp_path, data, "fedspeed", fail).go().equals()


def test_a_device_that_starts_again_in_the_middle_of_its_turn(tmp_path, data):
    """Its reply never comes, its SuperNode has another start: the message is sent again."""
    run, killed = None, []

    def crash(node, message, reply):
        if node == 100 and message.metadata.message_type == "train" and not killed:
            killed.append(message.content["job"]["round"])
            run.join(0)
            return []
        return [reply]

    run = Run(tmp_path, data, "fedspeed", crash)
    assert run.go().equals()
    assert killed


def test_a_server_that_is_killed_continues(tmp_path, data):
    """It dies while replies come in, in every round once; the run ends with the same bits and no state is lost."""

    class Killed(BaseException):
        pass

    died = set()

    def die(node, message, reply):
        job = message.content["job"]
        if message.metadata.message_type == "train" and job["round"] not in died and len(died) < 4:
            died.add(job["round"])
            raise Killed
        return [reply]

    run = Run(tmp_path, data, "scaffold", die)
    for _ in range(4):
        with pytest.raises(Killed):
            run.go()
    assert run.go().equals()
    assert [refusal["kind"] for refusal in run.refused] == []


DIES = """
import os, sys
from pathlib import Path
from flowerrun import Run, unequal

def die(node, message, reply):
    if message.metadata.message_type == "train" and message.content["job"]["round"] == 5:
        os._exit(9)
    return [reply]

Run(Path(sys.argv[1]), unequal(), "scaffold", die, active=4, rounds=6, checkpoint_every=3).go()
"""


def test_a_server_that_is_gone_between_two_checkpoints_of_its_plan(tmp_path, data):
    """A process that ends without a word in round 6: rounds 4 and 5, which devices know of, are not played again."""
    where = os.pathsep.join(sys.path)
    told = subprocess.run([sys.executable, "-c", DIES, str(tmp_path)], env=os.environ | {"PYTHONPATH": where})
    assert told.returncode == 9
    run = Run(tmp_path, data, "scaffold", active=4, rounds=6, checkpoint_every=3)
    assert len(run.rows) == 5
    assert run.go().equals()
    assert run.refused == []


def test_more_rounds_go_on(tmp_path, data):
    run = Run(tmp_path, data, "fedspeed").go(rounds=2)
    assert len(run.rows) == 2
    assert run.go().equals()


def test_lost_files_are_told_and_begin_anew(tmp_path, data):
    run = Run(tmp_path, data, "scaffold", active=4).go(rounds=2)
    for path in run.states.glob("*/3@*"):
        path.unlink()
    run.go(rounds=3)
    assert [(r["kind"], r["client"], r["round"]) for r in run.refused] == [("lost state", 3, 3)]
    assert run.equals(rounds=3, forgetting={(2, 3)})
    damaged = next(iter(run.states.glob("*/2@2")))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    run.go(rounds=4)
    assert [(r["kind"], r["client"], r["round"]) for r in run.refused][1:] == [("lost state", 2, 4)]
    assert run.equals(forgetting={(2, 3), (3, 2)})


def test_old_states_are_removed(tmp_path, data):
    run = Run(tmp_path, data, "scaffold", active=4, rounds=6).go()
    assert sorted(path.name for path in run.states.glob("*/1@*")) == ["1@3", "1@4", "1@5"]


def tampered(kind):
    """Faults that turn the reply of client 3 into something else; an old reply is that of round 1."""
    old = []

    def change(node, message, reply):
        if node != 103 or message.metadata.message_type != "train":
            return [reply]
        content = reply.content
        up, facts = content["up"], content["facts"]
        name = next(iter(up))
        a = up[name]
        numbers = np.frombuffer(a.data, "f4").copy()
        old.append(content)
        if kind == "NaN":
            numbers[5] = np.nan
            up[name] = Array(a.dtype, a.shape, a.stype, numbers.tobytes())
        elif kind == "Inf":
            numbers[-1] = np.inf
            up[name] = Array(a.dtype, a.shape, a.stype, numbers.tobytes())
        elif kind == "oversized":
            up[name] = Array(a.dtype, a.shape, a.stype, a.data + b"\0" * 10_000_000)
        elif kind == "short":
            up[name] = Array(a.dtype, a.shape, a.stype, a.data[:-4])
        elif kind == "shape":
            up[name] = Array(a.dtype, (a.shape[0] // 2, 2), a.stype, a.data)
        elif kind == "dtype":
            up[name] = Array("float64", a.shape, a.stype, numbers.astype("f8").tobytes())
        elif kind == "pickled":
            up[name] = Array(a.dtype, a.shape, "numpy.ndarray", a.data)
        elif kind == "another name":
            content["up"] = ArrayRecord({"evil": a})
        elif kind == "one more":
            up["evil"] = a
        elif kind == "another record":
            content["evil"] = ConfigRecord({"a": 1})
        elif kind == "no record":
            del content["facts"]
        elif kind == "a record of another kind":
            content["up"] = MetricRecord({"D": 1.0})
        elif kind == "empty":
            content = RecordDict()
        elif kind == "replayed":
            content = old[0] if len(old) > 1 else content
        elif kind == "another run":
            content["about"]["run"] = "0" * 32
        elif kind == "another client":
            content["about"]["client"] = 0
        elif kind == "text for a number":
            content["about"]["round"] = str(message.content["job"]["round"])
        elif kind == "more samples":
            facts["n"] = 10**9
        elif kind == "other steps":
            facts["K"] = 1
        elif kind == "NaN in the facts":
            facts["train_loss"] = float("nan")
        elif kind == "metrics":
            content["metrics"] = MetricRecord({f"m{i}": 1.0 for i in range(1000)})
        elif kind == "names of metrics":
            content["metrics"] = MetricRecord({"__import__('os')": 1.0})
        elif kind == "a metric nobody asked for":
            content["metrics"] = MetricRecord({"epsilon": 1.0})
        elif kind == "another rate":
            facts["mean_rate"] = 0.5
        elif kind == "gradients":
            facts["grad_evals"] = 1e12
        elif kind == "undecodable":
            return [DecodeError("Error parsing message")]
        elif kind == "no content":
            reply.__dict__["_content"] = None
            return [reply]
        elif kind == "duplicate":
            return [Message(content, reply_to=message), Message(content, reply_to=message)]
        return [Message(content, reply_to=message)]

    return change


BAD = {
    "NaN": "not finite",
    "Inf": "not finite",
    "oversized": "oversized",
    "short": "malformed",
    "shape": "malformed",
    "dtype": "malformed",
    "pickled": "malformed",
    "another name": "malformed",
    "one more": "malformed",
    "another record": "malformed",
    "no record": "malformed",
    "a record of another kind": "malformed",
    "empty": "malformed",
    "another run": "stale",
    "another client": "stale",
    "text for a number": "stale",
    "more samples": "malformed",
    "other steps": "malformed",
    "NaN in the facts": "not finite",
    "metrics": "oversized",
    "names of metrics": "malformed",
    "a metric nobody asked for": "malformed",
    "another rate": "malformed",
    "gradients": "malformed",
    "undecodable": "malformed",
    "no content": "malformed",
}


@pytest.mark.parametrize("kind", BAD)
def test_a_reply_that_is_no_reply_is_refused_and_the_run_goes_on(tmp_path, data, kind):
    run = Run(tmp_path, data, "fedspeed", tampered(kind), active=4, rounds=2).go()
    assert [(r["kind"], r["client"], r["round"]) for r in run.refused] == [(BAD[kind], 3, 1), (BAD[kind], 3, 2)]
    assert [row["dropped"] for row in run.rows] == [[3], [3]]
    assert run.equals(failing={(0, 3), (1, 3)})


def test_an_old_reply_is_refused(tmp_path, data):
    run = Run(tmp_path, data, "fedspeed", tampered("replayed"), active=4, rounds=3).go()
    assert [(r["kind"], r["round"]) for r in run.refused] == [("stale", 2), ("stale", 3)]
    assert run.equals(failing={(1, 3), (2, 3)})


def test_a_reply_counts_once(tmp_path, data):
    run = Run(tmp_path, data, "fedspeed", tampered("duplicate"), active=4, rounds=2).go()
    assert {r["kind"] for r in run.refused} == {"duplicate"}
    assert run.equals()


def test_two_nodes_that_are_one_client(tmp_path, data, log):
    run = Run(tmp_path, data, "fedspeed")
    run.join(2, node=500)
    assert run.go().equals()
    assert [(r["kind"], r["client"], r["node"]) for r in run.refused] == [("index", 2, "500")]
    assert "expected one SuperNode with fedspeed-client=2, found node 102 too" in line_of(log, "refused")


def test_a_second_node_takes_over_when_the_first_has_gone(tmp_path, data):
    """Without authentication a SuperNode that was killed comes back as another, while it seems to be there still."""
    run = Run(tmp_path, data, "fedspeed", active=4)
    run.join(1, node=501, key=b"another start")
    rounds = []

    def leave(node, message, reply):
        rounds.append(message.content["job"].get("round", -1))
        if rounds[-1] == 1 and node == 101:
            del run.loop.nodes[101]
            return []
        return [reply]

    run.loop.fault = leave
    assert run.go(bind_keys=False).equals()
    assert [(r["kind"], r["node"]) for r in run.refused] == [("index", "501")]
    assert (501, "train") in run.loop.log


def test_an_index_belongs_to_a_key(tmp_path, data):
    """A SuperNode with another key does not become client 1, not even when client 1 is away."""
    run = Run(tmp_path, data, "fedspeed", active=4).go(rounds=1)
    del run.loop.nodes[101]
    run.join(1, node=501, key=b"a thief's")
    run.go(timeout=1.0, rounds=2)
    assert [r["kind"] for r in run.refused] == ["key"]
    assert run.rows[1]["dropped"] == [1]
    assert (501, "train") not in run.loop.log
    run.go(timeout=5.0, rounds=3, bind_keys=False)
    assert run.rows[2]["dropped"] == []


def test_another_version_takes_no_part(tmp_path, data, log, monkeypatch):
    run = Run(tmp_path, data, "fedspeed", active=4)
    app = run.app()

    def older(message, context):
        reply = app(message, context)
        if "terms" in reply.content:
            reply.content["terms"]["torch"] = "2.5.0"
        return reply

    run.join(3, app=older)
    run.go(timeout=1.0, rounds=1)
    assert "expected torch" in line_of(log, "refused")
    assert "found 2.5.0; install the same versions" in line_of(log, "refused")
    assert run.rows[0]["dropped"] == [3]
    assert (103, "train") not in run.loop.log


def test_another_app_takes_no_part(tmp_path, data, log):
    run = Run(tmp_path, data, fedspeed.FedSpeed(lam=10), active=4)
    run.join(0, app=run.app(method=fedspeed.FedSpeed(lam=20)))
    run.go(timeout=1.0, rounds=1)
    assert "expected method" in line_of(log, "refused")
    assert run.rows[0]["dropped"] == [0]


def test_another_loss_takes_no_part(tmp_path, data, log):
    run = Run(tmp_path, data, "fedavg", active=4, loss="cross-entropy:smoothing=0.1")
    run.join(0, app=run.app(loss="cross-entropy:smoothing=0.2"))
    run.go(timeout=1.0, rounds=1)
    assert "expected loss torch.nn.functional:cross_entropy(label_smoothing=0.1), found" in line_of(log, "refused")


def test_nobody_runs_what_the_server_runs(tmp_path, data):
    """That is told at once, and no run begins."""
    run = Run(tmp_path, data, fedspeed.FedSpeed(lam=10))
    for i in range(N):
        run.join(i, app=run.app(method=fedspeed.FedSpeed(lam=20)))
    with pytest.raises(fedspeed.UserError, match=r"expected devices that run what the server runs, .*\(refused: 4"):
        run.go()
    assert not (run.out / "config.toml").exists()


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (
            {},
            "expected fedspeed-client, a whole number from 0, in the SuperNode's --node-config, found none",
        ),
        ({"fedspeed-client": "two"}, "found 'two'"),
        ({"fedspeed-client": 17}, "expected fedspeed-client in 0..3, found 17"),
    ],
)
def test_a_node_without_an_index(tmp_path, data, log, config, why):
    run = Run(tmp_path, data, "fedavg")
    run.join(9, config=config)
    run.go(rounds=1)
    assert why in line_of(log, "refused")


def test_a_node_without_data(tmp_path, data, log):
    def nothing(client, config):
        raise FileNotFoundError(2, "No such file or directory", "/srv/data/train.npz")

    run = Run(tmp_path, data, "fedavg")
    run.join(3, app=run.app(data=nothing))
    with pytest.raises(
        fedspeed.UserError, match=r"expected 4 clients within 0.5 s, found no SuperNode for 3 \(refused: 1"
    ):
        run.go()
    assert "client 3 has no data (FileNotFoundError: [Errno 2] No such file" in line_of(log, "refused")
    assert not (run.out / "config.toml").exists()


def test_other_data_than_before(tmp_path, data):
    run = Run(tmp_path, data, "fedavg", active=4).go(rounds=1)
    run.join(2, app=run.app(data=lambda i, _: alone(data, 0)))
    run.go(timeout=1.0, rounds=2)
    assert [(r["kind"], r["client"]) for r in run.refused] == [("data", 2)]
    assert run.rows[1]["dropped"] == [2]


def test_a_client_that_diverges_drops_out(tmp_path, data):
    bad = replace(alone(data, 3), x=torch.full_like(alone(data, 3).x, torch.nan))
    run = Run(tmp_path, data, "fedspeed", active=4, rounds=1)
    run.join(3, app=run.app(data=lambda i, _: bad))
    run.go()
    assert [(r["kind"], r["client"]) for r in run.refused] == [("diverged", 3)]
    assert "the data of client 3 hold NaN" in run.refused[0]["why"]


def test_nobody_answers(tmp_path, data):
    def silence(node, message, reply):
        return [] if message.metadata.message_type == "train" else [reply]

    run = Run(tmp_path, data, "fedspeed", silence)
    with pytest.raises(fedspeed.UserError, match=r"flower: round 1, client \d: no reply within 0.5 s"):
        run.go(timeout=0.5)


def test_settings_of_flowers_run_config(tmp_path, data):
    """`--run-config 'seed=9 batch-size=25'` reaches server and devices; one that has another is refused."""
    run, config = Run(tmp_path, data, "fedspeed"), {"seed": 9, "batch-size": 25, "mine": "anything"}
    for i in range(N):
        run.join(i, run_config=config)
    run.go(config=config)
    run.settings |= {"seed": 9, "batch_size": 25}
    assert run.equals()
    run.join(0, run_config=config | {"seed": 8}, app=Run(tmp_path, data, "fedspeed").app())
    run.go(config=config, rounds=5, timeout=1.0)
    assert [(r["kind"], r["client"]) for r in run.refused] == [("terms", 0)]


def test_scores_on_devices(tmp_path, data):
    """Without a test set at the server: every client's loss and accuracy, from the devices."""
    run = Run(tmp_path, data, "fedspeed", client_metrics="every=2", rounds=2).go(test=False)
    assert [row["test_accuracy"] for row in run.rows] == [None, None]
    measured = fedspeed.RunDir(run.out).client_metrics()
    whole, _ = run.simulated()
    x = whole.x
    for i in range(N):
        own = whole.data.batch(whole.data.rows(i))
        whole.work.flat.load(x)
        with torch.no_grad():
            outputs = whole.work.flat.model.eval()(own[0])
        assert measured.loss[0, i] == pytest.approx(float(torch.nn.functional.cross_entropy(outputs, own[1])), rel=1e-5)
        assert measured.accuracy[0, i] == pytest.approx(float((outputs.argmax(1) == own[1]).float().mean()))


def test_methods_that_settle_are_refused(tmp_path, data):
    with pytest.raises(fedspeed.UserError, match="flower: afedpd changes states once the mean"):
        Run(tmp_path, data, "afedpd").go()


def test_a_method_that_needs_every_reply_is_refused(tmp_path, data):
    with pytest.raises(fedspeed.UserError, match="flower: fedpd needs every reply, and a device may be lost"):
        Run(tmp_path, data, "fedpd").go()


@pytest.mark.parametrize("method", ["fedavg+dp:noise=0.1", "fedspeed+dp:noise=1,where=clients"])
def test_noise_that_every_device_can_compute_is_refused(data, method):
    found = parse_method(method)
    app = client_app(found, "mlp", lambda i, _: data)
    with pytest.raises(fedspeed.UserError, match="its noise is a function of the seed"):
        app.fedspeed[0].configured({})


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"engine": "block"}, "engine must be loop, found block"),
        ({"client_metrics": "every=1,own"}, "client_metrics must be every=N"),
        ({"client_metrics": "every=1,personalised=2"}, "client_metrics must be every=N"),
    ],
)
def test_plans_that_devices_cannot_run(tmp_path, data, how, why):
    with pytest.raises(fedspeed.UserError, match=why):
        Run(tmp_path, data, "fedavg").go(**how)


def test_the_apps_are_flowers_own(data):
    server = server_app("fedspeed", "mlp", clients=3, rounds=2)
    client = client_app("fedspeed", "mlp", lambda i, _: data)
    assert type(server).__module__.startswith("flwr.serverapp")
    assert type(client).__module__.startswith("flwr.clientapp")
    with pytest.raises(fedspeed.UserError, match="expected clients >= 1"):
        server_app("fedspeed", "mlp", clients=0)
    with pytest.raises(fedspeed.UserError, match="unknown keyword"):
        server_app("fedspeed", "mlp", clients=2, learning_rate=1)


def test_an_error_of_a_user_is_one_line_in_flowers_log(data, tmp_path, capsys):
    """Flower logs what a ServerApp raises with its traceback; ours is a line."""
    app = server_app("fedspeed", "mlp", clients=3, wait=0.1, poll=0.01, out=tmp_path / "run")
    with pytest.raises(fedspeed.UserError) as error:
        app(Loop(), SimpleNamespace(run_config={"rounds": 2}))
    record = logging.LogRecord("flwr", 40, "", 1, "%s raised an exception", ("ServerApp",), None)
    record.exc_info = (type(error.value), error.value, error.value.__traceback__)
    assert logging.getLogger("flwr").filter(record)
    text = logging.Formatter("%(message)s").format(record)
    assert text.startswith("fedspeed: flower: expected 3 clients within 0.1 s")
    assert "\n" not in text
    assert not (tmp_path / "run").exists()
