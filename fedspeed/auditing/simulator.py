"""Pairs of classes as in FL-Simulator: a Server with hooks around one round, a Client that is made anew for every turn.

Their code runs as it is: vectors are torch's, the model is a module whose output is the client's loss, and a batch is
the client's number. Only `loss` and `dataset` of a client are replaced.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import UserError
from .adapters import Subject
from .reference import Reference
from .trace import Trace, vector

PROX = ("lam", "mu", "alpha")


class Model(nn.Module):
    """A vector as a module: what it returns for client i is F_i up to a constant."""

    def __init__(self, reference: Reference, points: dict[str, list[np.ndarray]]) -> None:
        super().__init__()
        self.w = nn.Parameter(reference.x0.clone())
        self.quadratic = (reference.H, reference.v)
        self.points = points

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The loss of the client whose number the batch holds."""
        H, v = self.quadratic
        i = int(inputs.reshape(-1)[0])
        self.points["now"].append(self.w.detach().numpy().copy())
        return 0.5 * self.w @ H[i] @ self.w - v[i] @ self.w


@contextmanager
def doubles() -> Iterator[None]:
    """New tensors are float64 for a while."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Simulator(Subject):
    """A Server class whose instances name a Client, or a pair (Server, Client)."""

    def run(self, thing: Any, reference: Reference) -> Trace:
        """The loop of FL-Simulator's `Server.train`."""
        Server, given = thing if isinstance(thing, tuple) else (thing, None)
        trace, setting, points = Trace(), self.setting, {"now": list[np.ndarray]()}
        args = self.args()
        with doubles():
            x = reference.x0.clone()
            # n / batchsize is K there; client_x is all that a server reads of its data
            data = [np.full((setting.local_steps, 1), i, dtype=np.float64) for i in range(setting.clients)]
            datasets = SimpleNamespace(client_x=data, client_y=data)
            more = {"device": torch.device("cpu"), "model_func": lambda: Model(reference, points)}
            with self.during("making the server"):
                server = Server(**more, init_model=Model(reference, points), init_par_list=x.clone(),
                                datasets=datasets, method=self.method.name, args=args)  # fmt: skip
            Client: Any = given or getattr(server, "Client", None)
            self.require(server, Client)
            kept = {
                "server_model_params_list": x.clone(),
                "lr": setting.lr,
                "clients_params_list": x.repeat(setting.clients, 1),
                "clients_updated_params_list": torch.zeros(setting.clients, setting.dim),
            }
            for name, value in kept.items():  # of FL-Simulator's base class
                if not hasattr(server, name):
                    setattr(server, name, value)
            mean_update = torch.zeros(setting.dim)
            for t, cohort in enumerate(setting.cohorts):
                for i in cohort:
                    points["now"] = trace.points.setdefault((t + 1, i), [])
                    with self.during("process_for_communication", t, i):
                        server.process_for_communication(i, mean_update)
                    with self.during("the client", t, i):
                        edge = Client(
                            **more, received_vecs=server.comm_vecs, dataset=(data[i], data[i]), lr=server.lr, args=args
                        )
                        edge.loss = lambda prediction, labels: prediction
                        edge.dataset = [(torch.full((1, 1), float(i)), torch.zeros(1))] * setting.local_steps
                        reply = edge.train()
                    self.keep(server, reply, trace, t, i)
                chosen = list(cohort)
                mean_update = server.clients_updated_params_list[chosen].mean(0)
                mean_model = server.clients_params_list[chosen].mean(0)
                with self.during("global_update", t):
                    new = server.global_update(np.array(chosen), mean_update, mean_model)
                trace.add(t + 1, None, "x", vector(new, setting.dim, self.where("global_update returned", t)))
                server.server_model_params_list = new.detach().clone()
                if hasattr(server, "_lr_scheduler_"):
                    server._lr_scheduler_()
                else:
                    server.lr *= setting.lr_decay
        return trace

    def args(self) -> SimpleNamespace:
        """What their command line would give, and our fields by their own names."""
        setting, fields = self.setting, self.method.fields()
        prox = next((fields[name] for name in PROX if name in fields), 1.0)
        theirs = {
            "total_client": setting.clients,
            "comm_rounds": setting.rounds,
            "active_ratio": setting.active / setting.clients,
            "local_epochs": 1,
            "batchsize": 1,
            "weight_decay": 0.0,
            "local_learning_rate": setting.lr,
            "lr_decay": setting.lr_decay,
            "global_learning_rate": fields.get("eta_g", 1.0),
            "lamb": 1 / prox if "lam" in fields else prox,
            "epsilon": fields.get("tau", 0.01),
            "use_RI": False,
            "seed": setting.seed,
            "dataset": "CIFAR10",
            "method": self.method.name,
        }
        return SimpleNamespace(**{**theirs, **fields})

    def require(self, server: Any, Client: Any) -> None:
        """Raise for a hook that is missing."""
        for hook in ("process_for_communication", "global_update"):
            if not callable(getattr(server, hook, None)):
                raise UserError(
                    f"audit {self.name}: its server needs {hook}(...); `fedspeed audit --list` says what of"
                )
        if not isinstance(getattr(server, "comm_vecs", None), dict):
            raise UserError(f"audit {self.name}: its server needs a dict comm_vecs, which clients receive")
        if not callable(getattr(Client, "train", None)):
            raise UserError(f"audit {self.name}: no client class with train(); name it: file.py:Server,Client")

    def keep(self, server: Any, reply: Any, trace: Trace, t: int, i: int) -> None:
        """What the loop does with a client's reply."""
        where = self.where("train() returned", t, i)
        if not isinstance(reply, dict) or not {"local_update_list", "local_model_param_list"} <= set(reply):
            raise UserError(f"{where}: expected a dict with local_update_list and local_model_param_list")
        for name, kept in (
            ("local_update_list", "clients_updated_params_list"),
            ("local_model_param_list", "clients_params_list"),
        ):
            getattr(server, kept)[i] = torch.from_numpy(vector(reply[name], self.setting.dim, f"{where} {name}"))
        trace.add(t + 1, i, "x_K", vector(reply["local_model_param_list"], self.setting.dim, where))
        server.received_vecs = reply
        hook = getattr(server, "postprocess", None)
        if hook is not None:
            with self.during("postprocess", t, i):
                takes = len(inspect.signature(hook).parameters)
                hook(*(i, reply)[:takes])
