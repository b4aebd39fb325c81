"""A real Flower federation on loopback: SuperLink and SuperNodes as processes, TLS, keys; made as the README says."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest

pytest.importorskip("flwr", reason="make test-flower has it")

import torch
from flowerlink import Federation, until
from safetensors.torch import load_file

import fedspeed
from fedspeed.backends import CustomBackend
from fedspeed.backends.serial import Serial
from fedspeed.client.work import Failed
from fedspeed.errors import ClientFailed
from fedspeed.server.simulation import Simulation

pytestmark = pytest.mark.slow
ROUNDS = 5
EVIL = '''

honest = client._registered_funcs["train.default"]


def evil(message, context):
    """What the SuperNode with `evil` in its --node-config sends: another wrong thing in every round."""
    from flwr.app import Array, ArrayRecord, Message

    reply = honest(message, context)
    t = message.content["job"]["round"]
    if "evil" not in context.node_config:
        return reply
    up = reply.content["up"]
    name = next(iter(up))
    a = up[name]
    if t == 0:
        up[name] = Array(a.dtype, a.shape, a.stype, bytes.fromhex("0000c07f") * (len(a.data) // 4))
    elif t == 1:
        up[name] = Array(a.dtype, a.shape, a.stype, a.data * 200)
    elif t == 2:
        reply.content["up"] = ArrayRecord({"theta": a})
    elif t == 3:
        reply.content["about"]["round"] = 1
    else:
        raise RuntimeError("boom")
    return reply


client._registered_funcs["train.default"] = evil
'''


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """SuperLink, three SuperNodes with registered keys, a fourth that misbehaves, a fifth whose key nobody knows."""
    with Federation(tmp_path_factory.mktemp("flower")) as made:
        made.make_keys()
        for name in ("device-3", "stranger"):
            made.shell(f'ssh-keygen -q -t ecdsa -b 384 -N "" -C "" -f keys/{name}')
        made.link()
        made.register()
        made.shell("flwr supernode register keys/device-3.pub fedspeed")
        for i in range(3):
            made.node(i)
        made.node(0, key="keys/device-3", client=3, name="evil", more=" evil=true")
        made.node(0, key="keys/stranger", client=0, name="stranger")
        yield made
    assert made.own() == []


def edit(federation, clients, method, active):
    """The app of the template, with other settings."""
    app = federation.app / "app.py"
    text = (federation.original + EVIL).replace("CLIENTS = 3", f"CLIENTS = {clients}")
    text = re.sub(r"METHOD = [^#]*#", f"METHOD = {method}  #", text).replace("active=2", f"active={active}")
    app.write_text(text)


def simulated(clients, method, active, failing=()):
    class Without(Serial):
        def run(self, jobs, down, state):
            for reply in super().run(jobs, down, state):
                yield Failed(reply.job, ClientFailed("dropped")) if reply.job.client in failing else reply

    data = fedspeed.load_data("digits", split="dirichlet:0.3", clients=clients)
    how = {"batch_size": 10, "local_epochs": 1, "lr": 0.1, "seed": 0, "engine": "loop", "on_client_error": "drop"}
    plan = fedspeed.Plan(rounds=ROUNDS, active=active, **how)
    model = fedspeed.build_model("mlp", data, seed=0)
    run = Simulation(method, model, data, plan, place=CustomBackend("without", lambda work, *_: Without(work)))
    return run, list(run)


def same(federation, out, run, records):
    tensors = load_file(federation.app / out / "model.safetensors")
    assert torch.equal(torch.cat([tensors[name].reshape(-1) for name in run.work.flat.names]), run.x)
    rows = [json.loads(line) for line in (federation.app / out / "rounds.jsonl").read_text().splitlines()]
    for row, record in zip(rows, records, strict=True):
        wanted = {k: v for k, v in json.loads(json.dumps(record.to_dict())).items() if "seconds" not in k}
        assert {k: row[k] for k in wanted} == wanted


def server_process(federation):
    """The process of the ServerApp."""
    for pid in federation.own():
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if b"flwr-serverapp" in file.read():
                    return pid
        except OSError:
            continue
    return None


def test_fedspeed_through_kills_of_a_supernode_and_of_the_server(federation):
    """The bits of `simulate`; a SuperNode without a registered key, or an index out of range, changes nothing."""
    edit(federation, 3, "fedspeed.FedSpeed(lam=10, rho=0.1)", active=3)
    out = "runs/a"
    federation.begin(f'rounds={ROUNDS} out="{out}"')
    until(lambda: federation.rounds(out) >= 2, 300, told="two rounds")
    federation.kill("node-1")
    kept = sorted(path.name for path in federation.app.glob("states/*/1@*"))
    assert kept
    federation.revive(1)
    until(lambda: federation.rounds(out) >= 3, 300, told="a third round")
    os.kill(server_process(federation), signal.SIGKILL)
    federation.begin(f'rounds={ROUNDS} out="{out}"')
    until(lambda: federation.ended(out) == "finished", 400, told="the end of the run")
    same(federation, out, *simulated(3, fedspeed.FedSpeed(lam=10, rho=0.1), 3))
    refused = federation.refused(out)
    assert {r["kind"] for r in refused} == {"failed"}
    assert all("expected fedspeed-client in 0..2, found 3" in r["why"] for r in refused)
    assert "Activated" not in federation.log("stranger")
    assert "Receiving" not in federation.log("stranger")
    assert federation.processes["stranger"].poll() not in (None, 0)


def test_what_a_user_reads(federation):
    """In Flower's log: who is who, how it ended (at once: it is done); a user's error is one line, no traceback."""
    out = "runs/a"
    done = federation.told(federation.begin(f'rounds={ROUNDS} out="{out}"'), "refused: ")
    assert f"fedspeed: finished after {ROUNDS} rounds in {out}" in done
    assert re.search(r"fedspeed: client \d is node \d+, with \d+ samples", done)
    wrong = federation.told(federation.begin(f'rounds=0 out="{out}"'), "rounds must be")
    assert "fedspeed: " in wrong
    assert "Traceback" not in wrong


def test_scaffold_with_a_supernode_that_misbehaves(federation):
    """NaN, an oversized array, another name, a replayed round, an exception: refused, and the run goes on."""
    edit(federation, 4, "fedspeed.Scaffold()", active=4)
    out = "runs/b"
    federation.begin(f'rounds={ROUNDS} out="{out}"')
    until(lambda: federation.ended(out) == "finished", 500, told="the end of the run")
    same(federation, out, *simulated(4, fedspeed.Scaffold(), 4, failing={3}))
    kinds = [(r["kind"], r["round"], r["client"]) for r in federation.refused(out)]
    assert kinds == [("not finite", 1, 3), ("oversized", 2, 3), ("malformed", 3, 3), ("stale", 4, 3), ("failed", 5, 3)]


def test_the_commands_that_check(federation):
    """`fedspeed deploy check` against the real server: one line each."""
    address = f"127.0.0.1:{federation.port}"
    good = federation.shell(
        f"fedspeed deploy check . --client 1 --superlink {address} --root-certificates keys/ca.crt --key keys/device-1"
    )
    assert "certificate good" in good.stdout
    assert "samples of shape (1, 8, 8), 10 classes" in good.stdout
    untrusted = federation.shell(f"fedspeed deploy check . --superlink {address}", check=False)
    assert untrusted.returncode == 2
    assert untrusted.stderr.count("\n") == 1
    assert "certificate that is not trusted" in untrusted.stderr
