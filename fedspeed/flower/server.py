"""The ServerApp: the round loop of `simulate`, with devices as clients."""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided

from ..backends import CustomBackend
from ..client.losses import fitting_loss
from ..client.trees import has_leaves
from ..data.federated import Federated, federated
from ..errors import Diverged, UserError
from ..record import Record
from ..runs.directory import RunDir, Split
from ..runs.recorder import RunRecorder
from ..runs.simulate import recorded
from ..server.simulation import Simulation
from ..utils.files import write
from .agreement import SHAPE, Agreement
from .backend import FlowerBackend
from .roster import MOST_IN_ALL, ClientsFile, Roster, listed
from .states import CountedRounds

log = logging.getLogger("flwr.fedspeed")
KINDS = ("uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64")
"""The dtypes that inputs and targets may have."""
MOST_INPUT = 2**28
"""Largest number of elements of one input that a device may claim."""


@dataclass(frozen=True)
class ServerSide:
    """The settings that only the server needs; see `server_app`."""

    clients: int
    test: Callable[[], Federated | None] | None
    out: Path
    timeout: float
    wait: float
    poll: float
    bind_keys: bool

    def __post_init__(self) -> None:
        if self.clients < 1 or min(self.timeout, self.wait, self.poll) <= 0:
            raise UserError(
                f"flower: expected clients >= 1 and timeout, wait, poll > 0, found {self.clients}, {self.timeout:g}, "
                f"{self.wait:g}, {self.poll:g}"
            )


def make_server_app(agreement: Agreement, side: ServerSide) -> Any:
    """Return the ServerApp of an agreement."""
    from flwr.serverapp import ServerApp

    app = ServerApp()
    app.fedspeed = (agreement, side)  # `fedspeed deploy check` reads it.

    def main(grid: Any, context: Any) -> None:
        logging.getLogger("flwr").addFilter(in_one_line)
        config = dict(context.run_config)
        run_rounds(grid, agreement.configured(config), replace(side, out=Path(str(config.get("out", side.out)))))

    app.main()(main)
    return app


def in_one_line(record: logging.LogRecord) -> bool:
    """Filter Flower's log: an error that the user can correct is logged without a traceback."""
    error = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
    if isinstance(error, UserError | Diverged):
        record.msg, record.args, record.exc_info = "fedspeed: %s", (str(error),), None
    return True


def run_rounds(grid: Any, agreement: Agreement, side: ServerSide) -> None:
    """Wait for the devices, then run the remaining rounds of the run in `side.out`."""
    agreement.plan.require_clients(agreement.method, side.clients)
    clients_file = ClientsFile(side.out, side.clients)
    roster = Roster(grid, clients_file, side.bind_keys, side.timeout)
    shape = meet(roster, side)
    data = remote_data(clients_file, side.test() if side.test else None, shape)
    module = agreement.module(data)
    roster.compare(agreement.statements(data, module))
    if not roster.at:
        raise UserError(
            f"flower: expected devices that run what the server runs, found none (refused: "
            f"{clients_file.refusals.total()}, in {clients_file.lines}); install the same versions and run the same "
            f"app everywhere"
        )
    first = agreement.work(data, module)
    counted = CountedRounds(has_leaves(first.hooks.init_client(first.flat.x)))
    backend = CustomBackend(
        "flower", lambda work, *_: FlowerBackend(work, counted, grid, roster, side.timeout, side.poll)
    )

    def make(*, new: bool, folder: Path, layers: str) -> Simulation:
        del new  # The server has no sample to try the model's outputs on.
        plan = agreement.plan if agreement.plan.layers != "auto" else replace(agreement.plan, layers=layers)
        loss = fitting_loss(agreement.loss, data)
        how = (agreement.method, module, data, plan, loss, agreement.no_decay, folder)
        return Simulation(*how, states=counted, place=backend)

    with recorded(side.out, True, make, module) as run:
        write_sizes(run)
        for record in run:
            # Durable before a message says that the round was counted: devices then delete older states.
            assert isinstance(run.recorder, RunRecorder)
            run.recorder.checkpoints.write(run.t, run.server, run.states)
            run.recorder.checkpoints.wait()
            log.info("fedspeed: %s", shown(record))
    refused = ", ".join(f"{count} {kind}" for kind, count in sorted(clients_file.refusals.items())) or "nothing"
    log.info("fedspeed: %s after %d rounds in %s; refused: %s", run.ended, run.t, side.out, refused)


def meet(roster: Roster, side: ServerSide) -> dict[str, str]:
    """Wait until all clients have reported their sizes and return the statements on their shapes.

    A run that is continued knows the sizes and waits for one client only.
    """
    end = time.monotonic() + side.wait
    next_log = 0.0
    while True:
        roster.look()
        if roster.at and roster.clients_file.sizes() is not None:
            said = [{name: roster.said[i].get(name, "") for name in SHAPE} for i in sorted(roster.at)]
            return max(said, key=said.count)
        now = time.monotonic()
        if now > end:
            raise UserError(
                f"flower: expected {side.clients} clients within {side.wait:g} s, found no SuperNode for "
                f"{listed(roster.missing())} (refused: {roster.clients_file.refusals.total()}, see the log); start "
                f"SuperNodes with --node-config 'fedspeed-client=N' and register their keys"
            )
        if now > next_log:
            log.info("fedspeed: waiting for clients %s", listed(roster.missing()))
            next_log = now + 30
        time.sleep(side.poll)


def remote_data(clients_file: ClientsFile, test: Federated | None, shape: dict[str, str]) -> Federated:
    """Return the federation as the server knows it: sizes, shapes and its own test set, but no training sample."""
    sizes = clients_file.sizes() or []
    if sum(sizes) > MOST_IN_ALL:
        most = max(range(len(sizes)), key=sizes.__getitem__)
        raise UserError(
            f"flower: expected at most {MOST_IN_ALL} samples in all, found {sum(sizes)}, {sizes[most]} of them claimed "
            f"by client {most}; see to that device"
        )
    if test is not None:
        held = replace(federated(test), validation=None, client_test=None)
        base = replace(held, x=torch.zeros_like(held.x[:1]), y=torch.zeros_like(held.y[:1]))
    else:
        x, y, classes = claimed(shape)
        base = Federated(x, y, np.zeros(1, np.int64), np.array([0, 1]), classes=classes, name="devices")
    indices = as_strided(np.zeros(1, np.int64), (sum(sizes),), (0,))  # One number, whatever sizes devices claim.
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return replace(base, indices=indices, offsets=offsets, split="devices")


def claimed(shape: dict[str, str]) -> tuple[torch.Tensor, torch.Tensor, int | None]:
    """Return an input and a target of zeros, and the number of classes, as devices state them."""
    found = [shape.get(name, "") for name in SHAPE]
    sizes = [int(n) for n in re.findall(r"\d{1,9}", found[0])]
    known = found[1] in KINDS and found[2] in KINDS and re.fullmatch(r"None|\d{1,6}", found[3])
    if not known or math.prod(sizes) > MOST_INPUT:
        raise UserError(f"flower: expected the shape and the kind of inputs from the devices, found {str(found)[:200]}")
    x, y = torch.zeros(1, *sizes, dtype=getattr(torch, found[1])), torch.zeros(1, dtype=getattr(torch, found[2]))
    return x, y, None if found[3] == "None" else int(found[3])


def write_sizes(run: Simulation) -> None:
    """Write `split.json` with the sizes; the server does not know the counts of classes."""
    assert run.recorder is not None
    path, data = RunDir(run.recorder.out).split_file, run.data
    if not path.exists():
        found = Split(data.split_fingerprint, data.name, data.split, data.sizes.tolist(), [], list(data.class_names))
        write(path, json.dumps(found._asdict()) + "\n")


def shown(record: Record) -> str:
    """Return a round as one line of the log."""
    score = "" if record.test_accuracy is None else f", test accuracy {100 * record.test_accuracy:.2f}%"
    dropped = f", without clients {listed(record.dropped)}" if record.dropped else ""
    return f"round {record.round}: train loss {record.train_loss:.4f}{score}{dropped}"
