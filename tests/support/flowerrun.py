"""A deployed run in one process: devices that join, a server that goes, and the same run by `simulate`."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import torch
from flowerloop import Loop
from safetensors.torch import load_file

import fedspeed
from fedspeed.backends import CustomBackend
from fedspeed.backends.serial import Serial
from fedspeed.client.trees import tree_map
from fedspeed.client.work import Failed
from fedspeed.errors import ClientFailed
from fedspeed.flower import client_app
from fedspeed.flower.agreement import Agreement
from fedspeed.flower.server import ServerSide, run_rounds
from fedspeed.runs.simulate import as_loss, as_method, as_plan
from fedspeed.server.simulation import Simulation

N = 4
SETTINGS = {"active": 3, "batch_size": 20, "local_epochs": 1, "lr": 0.1, "seed": 3}


def unequal():
    """Digits over clients of unequal sizes, so that job order matters."""
    whole = fedspeed.load_data("digits", split="iid", clients=1)
    rows = np.split(np.arange(300), [30, 110, 190])
    test = (whole.x_test.numpy(), whole.y_test.numpy())
    return fedspeed.Federated.from_arrays(whole.x.numpy(), whole.y.numpy(), rows, test, classes=10)


def alone(data, i):
    """The data of one client, as a device has them."""
    rows = data.rows(i)
    return fedspeed.Federated.from_arrays(data.x[rows].numpy(), data.y[rows].numpy(), [range(len(rows))], classes=10)


class Run:
    """A deployed run: start what is needed, `go`, look."""

    def __init__(self, tmp_path, data, method, fault=None, **settings):
        self.out, self.states, self.data = tmp_path / "run", tmp_path / "states", data
        self.loss = as_loss(settings.pop("loss", None))
        self.settings = SETTINGS | {"rounds": 4} | settings
        self.method = as_method(method)
        self.loop = Loop(fault)
        for i in range(N):
            self.join(i)

    def app(self, **changes):
        how = {"method": self.method, "model": "mlp", "data": lambda i, _: alone(self.data, i), "loss": self.loss}
        settings = {k: v for k, v in self.settings.items() if k != "rounds"}
        return client_app(**how | changes, **settings)

    def join(self, i, node=None, key=None, app=None, config=None, run_config=None):
        config = {"fedspeed-client": i, "fedspeed-states": str(self.states)} if config is None else config
        self.loop.join(100 + i if node is None else node, app or self.app(), config, key, run_config)

    def go(self, timeout=20.0, wait=0.5, bind_keys=True, test=True, config=None, **settings):
        plan = as_plan(None, self.settings | settings)
        loss = self.loss or torch.nn.functional.cross_entropy
        agreement = Agreement(self.method, "mlp", plan, loss, ()).configured(config or {})
        side = ServerSide(N, (lambda: self.data) if test else None, self.out, timeout, wait, 0.01, bind_keys)
        run_rounds(self.loop, agreement, side)
        return self

    @property
    def rows(self):
        return [json.loads(line) for line in (self.out / "rounds.jsonl").read_text().splitlines()]

    @property
    def refused(self):
        path = self.out / "refused.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def simulated(self, failing=(), forgetting=(), **settings):
        """The same run by `simulate`; `failing` are (round, client) that are dropped, `forgetting` that begin anew."""

        class Without(Serial):
            def run(self, jobs, down, state):
                new, t = self.work.hooks.init_client(self.work.flat.x), jobs[0].t
                own = lambda i: tree_map(torch.clone, new) if (t, i) in forgetting else state(i)  # noqa: E731
                for reply in super().run(jobs, down, own):
                    bad = (reply.job.t, reply.job.client) in failing
                    yield Failed(reply.job, ClientFailed("dropped")) if bad else reply

        plan = as_plan(None, self.settings | {"engine": "loop", "on_client_error": "drop"} | settings)
        model = fedspeed.build_model("mlp", self.data, seed=plan.seed)
        place = CustomBackend("without", lambda work, *_: Without(work))
        run = Simulation(self.method, model, self.data, replace(plan), self.loss, place=place)
        return run, list(run)

    def equals(self, failing=(), **how):
        """The same vector, and the same records but for times."""
        run, records = self.simulated(failing, **how)
        tensors = load_file(self.out / "model.safetensors")
        x = torch.cat([tensors[name].reshape(-1) for name in run.work.flat.names])
        assert torch.equal(x, run.x)
        for row, record in zip(self.rows, records, strict=True):
            wanted = {k: v for k, v in json.loads(json.dumps(record.to_dict())).items() if "seconds" not in k}
            assert {k: row[k] for k in wanted} == wanted
        return True


def line_of(caplog, word):
    found = [record.getMessage() for record in caplog.records if word in record.getMessage()]
    assert found, [record.getMessage() for record in caplog.records]
    assert all("\n" not in line for line in found)
    return found[0]
