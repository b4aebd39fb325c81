"""The ClientApp: a device introduces itself, runs its client's turn, evaluates a model on its data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..backends.serial import Serial, alone
from ..client.evaluate import client_slices, score_clients
from ..client.trees import has_leaves, tree_map
from ..client.work import Failed, Job, Work
from ..data.federated import Federated, federated
from ..errors import Diverged, UserError, one_line
from .agreement import Agreement
from .messages import Refused, Vector, from_arrays, to_failure, to_reply
from .states import NEVER, DeviceStates

CLIENT, STATES = "fedspeed-client", "fedspeed-states"
Data = Callable[[int, Mapping[str, Any]], Federated]


def make_client_app(agreement: Agreement, data: Data) -> Any:
    """Return the ClientApp for a run on whose settings server and devices have agreed."""
    from flwr.app import Message
    from flwr.clientapp import ClientApp

    app = ClientApp()
    app.fedspeed = (agreement, data)  # `fedspeed deploy check` reads it.

    def handler(action: Callable[[Device, Any], Any]) -> Callable[[Any, Any], Any]:
        def handle(message: Any, context: Any) -> Any:
            return Message(answer(action, agreement, data, message.content, context), reply_to=message)

        return handle

    app.query("hello")(handler(Device.hello))
    app.train()(handler(Device.train))
    app.evaluate()(handler(Device.evaluate))
    return app


def answer(action: Callable[[Device, Any], Any], agreement: Agreement, data: Data, content: Any, context: Any) -> Any:
    """Return the reply of an action; an error becomes a reply of one line."""
    try:
        return action(Device(agreement.configured(context.run_config), data, context.node_config, content), content)
    except (UserError, Diverged, Refused) as error:
        return to_failure(type(error).__name__, str(error))
    except Exception as error:
        # Anything unexpected, such as a full disk: the server gets the reason, and the SuperNode continues.
        return to_failure("failed", one_line(error))


class Device:
    """One client during one message.

    Args:
        config: the SuperNode's `--node-config`.
        content: the message's content; its record `job` names the run and the number of clients.
    """

    def __init__(self, agreement: Agreement, data: Data, config: Mapping[str, Any], content: Any) -> None:
        self.agreement = agreement
        self.client = _index(config)
        self.job: Mapping[str, Any] = content["job"]
        self.clients = int(self.job["clients"])
        self.folder = Path(str(config.get(STATES, "~/.fedspeed/flower"))).expanduser()
        if not 0 <= self.client < self.clients:
            raise UserError(
                f"flower: expected {CLIENT} in 0..{self.clients - 1}, found {self.client}; correct --node-config"
            )
        self.data = own_part(loaded(data, self.client, config), self.client, self.clients)
        self.module = agreement.module(self.data)

    @cached_property
    def work(self) -> Work:
        """The local work on this device's data."""
        return self.agreement.work(self.data, self.module)

    def hello(self, _: Any) -> Any:
        """Reply with the client's index, its number of samples, and its settings, for the server to compare."""
        from flwr.app import ConfigRecord, RecordDict

        said = self.agreement.statements(self.data, self.module)
        about = {"client": self.client, "n": int(self.data.sizes[self.client]), "run": str(self.job["run"])}
        _ = self.work  # Building it now reports a model that cannot be trained here before the first round.
        return RecordDict({"about": ConfigRecord(about), "terms": ConfigRecord(said)})

    def train(self, content: Any) -> Any:
        """Run the client's turn from the newest state that the server counted; write the new one to the disk, reply."""
        # `counted`: the round whose state the turn starts from; `before`: the one whose state may be deleted.
        about, work = self.job, self.work
        if int(about["client"]) != self.client:
            raise UserError(
                f"flower: a message for client {about['client']} came to client {self.client}; give every "
                f"SuperNode a number of its own, --node-config '{CLIENT}=N', and keep it during a run"
            )
        job = Job(self.client, int(about["round"]), float(about["lr"]), int(about["K"]))
        down = tree_map(lambda a: a.to(work.flat.device), from_arrays(content["down"], work.shapes.down))
        dtype = None if work.plan.state_dtype == "same" else getattr(torch, work.plan.state_dtype)
        states = DeviceStates(self.folder, str(about["run"]), self.client, dtype)
        first = work.hooks.init_client(work.flat.x)
        counted, stateful = int(about["counted"]), has_leaves(first)
        state = states.read(counted, first) if stateful and counted != NEVER else None
        lost = stateful and counted != NEVER and state is None
        begun = first if state is None else state
        copied = partial(tree_map, lambda a: a.to(work.flat.device, copy=True), begun)
        reply = next(Serial(work).run([job], down, lambda _: copied()))
        if isinstance(reply, Failed):
            raise reply.error
        if stateful:
            # Durable before the reply: the server may count the reply once it has it.
            states.write(job.t, reply.client)
            states.drop(int(about["before"]))
        return to_reply(reply, str(about["run"]), lost)

    def evaluate(self, content: Any) -> Any:
        """Reply with a model's summed loss and number of right answers over this client's data."""
        from flwr.app import ConfigRecord, MetricRecord, RecordDict

        work, data = self.work, self.work.data
        like = torch.empty(work.flat.d + len(work.flat.statistics.first), dtype=work.flat.dtype, device="meta")
        x = from_arrays(content["down"], Vector(like)).x
        with alone(work):
            ends = client_slices(data, self.client)
            parts = [score_clients(work.flat, x.to(work.flat.device), data, work.loss, a, b) for a, b in ends]
        sums = {"loss": sum(float(p.loss[0]) for p in parts), "right": sum(float(p.right[0]) for p in parts)}
        about = {"run": str(self.job["run"]), "round": int(self.job["round"]), "client": self.client}
        return RecordDict({"about": ConfigRecord(about), "sums": MetricRecord(sums)})


def own_part(data: Federated, client: int, clients: int) -> Federated:
    """Return a client's data under its own index, without the data of the other clients.

    Example:
        >>> data = Federated.from_arrays(np.zeros((4, 2), "f4"), np.array([0, 1, 0, 1]), clients=[[0, 1, 3]])
        >>> own_part(data, 2, 4).sizes.tolist()
        [0, 0, 3, 0]
    """
    if data.clients not in (1, clients):
        raise UserError(
            f"flower: the data of client {client}: expected those of one client, or of all {clients}, found "
            f"{data.clients} clients; correct the app's data function"
        )
    if data.client_test is not None:
        raise UserError(
            f"flower: the data of client {client}: expected no test part per client, found one: devices score a model "
            f"on their training data; leave client_test out of the app's data function"
        )
    rows = data.rows(client if data.clients == clients else 0)
    offsets = np.where(np.arange(clients + 1) > client, len(rows), 0)
    taken = torch.from_numpy(np.ascontiguousarray(rows))
    own = replace(data, x=data.x[taken], y=data.y[taken], indices=np.arange(len(rows)), offsets=offsets)
    return replace(own, x_test=None, y_test=None, validation=None)


def _index(config: Mapping[str, Any]) -> int:
    found = config.get(CLIENT)
    if type(found) is not int or found < 0:
        raise UserError(
            f"flower: expected {CLIENT}, a whole number from 0, in the SuperNode's --node-config, found "
            f"{'none' if found is None else repr(found)}; start the first with --node-config '{CLIENT}=0'"
        )
    return found


def loaded(data: Data, client: int, config: Mapping[str, Any]) -> Federated:
    """Return the data of the app's data function; any exception becomes an error of one line."""
    try:
        return federated(data(client, dict(config)))
    except Exception as error:
        raise UserError(
            f"flower: client {client} has no data ({one_line(error)}); check its files, or correct the app's data "
            f"function"
        ) from None
