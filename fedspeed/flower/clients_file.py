"""What a deployed run writes beside its run directory's own files: who the devices are, and what was refused.

`flower.json` holds what the run is called on devices, and of every client how many samples it has and whose key it is
bound to; it is written when the first round begins. `refused.jsonl` has a line for everything that was refused.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections import Counter
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..runs.directory import RunDir
from ..utils.files import read_json, write
from .device_states import RUN

log = logging.getLogger("flwr.fedspeed")
NAME, REFUSED = "flower.json", "refused.jsonl"
MOST_N, MOST_IN_ALL = 2**28, 2**31
"""Samples that a client may claim, and all together."""


class ClientsFile:
    """The facts of a deployed run that outlive its processes.

    Args:
        out: the run directory.
        clients: how many there are.
    """

    def __init__(self, out: Path, clients: int) -> None:
        self.path, self.lines = out / NAME, out / REFUSED
        self.refusals: Counter[str] = Counter()
        self.clients = clients
        self.begun = self.path.exists()
        if not self.begun and RunDir(out).manifests():
            raise UserError(
                f"{out}: expected {NAME} beside its checkpoints, found none: states on devices have the name in it; "
                f"put it back, or choose another out"
            )
        found = read_json(self.path)
        if self.begun and not _is_book(found, clients):
            raise UserError(
                f"{self.path}: expected a run of {clients} clients, found another; put it back, or choose another out"
            )
        self.run: str = found.get("run") or secrets.token_hex(16)
        self.known: dict[int, dict[str, Any]] = {int(i): about for i, about in found.get("known", {}).items()}

    def sizes(self) -> list[int] | None:
        """Samples of every client; None before all have said."""
        if len(self.known) < self.clients:
            return None
        return [int(self.known[i]["n"]) for i in range(self.clients)]

    def bound(self, key: str) -> int | None:
        """The client that a key is bound to."""
        return next((i for i, about in self.known.items() if about["key"] == key), None)

    def learn(self, client: int, n: int, key: str) -> None:
        """Who a client is; until the run begins it may come back as another."""
        if not self.begun:
            self.known[client] = {"n": n, "key": key}
        elif not self.known[client]["key"]:
            self.known[client]["key"] = key
            self._write()

    def release(self, client: int) -> None:
        """A run that has not begun does not bind a client to the key of a device that it refuses."""
        if not self.begun:
            self.known[client]["key"] = ""

    def begin(self) -> None:
        """Write down who the clients are before the first of them works; the run directory is held."""
        if not self.begun:
            if self.path.exists():
                raise UserError(f"{self.path}: another `flwr run` began here meanwhile; start this one again")
            self._write()
            self.begun = True

    def _write(self) -> None:
        known = {str(i): self.known[i] for i in sorted(self.known)}
        whole = {"run": self.run, "clients": self.clients, "known": known}
        write(self.path, json.dumps(whole) + "\n", durable=True)

    def refuse(self, kind: str, why: str, node: int, client: int | None = None, t: int | None = None) -> None:
        """Log, count and write down something that was refused."""
        self.refusals[kind] += 1
        where = "" if t is None else f"round {t + 1}, "
        who = f"node {node}" if client is None else f"client {client} (node {node})"
        log.warning("fedspeed: %s%s: refused (%s): %s", where, who, kind, why)
        told = {"kind": kind, "round": None if t is None else t + 1, "client": client, "node": str(node), "why": why}
        self.lines.parent.mkdir(parents=True, exist_ok=True)
        with self.lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(told) + "\n")

    def note_lost(self, node: int, client: int, t: int) -> None:
        """A device had lost its client's state, and began anew with `init_client`: counted, and a part of the run."""
        self.refuse(
            "lost state",
            "began anew: a mean over all clients that the server keeps is off by its share",
            node,
            client,
            t,
        )


def _is_book(found: dict[str, Any], clients: int) -> bool:
    """Whether a file holds all clients of a run, and nothing else."""
    known = found.get("known")
    return (
        RUN.fullmatch(str(found.get("run"))) is not None
        and found.get("clients") == clients
        and isinstance(known, dict)
        and sorted(known) == sorted(map(str, range(clients)))
        and all(_is_known(about) for about in known.values())
    )


def _is_known(about: Any) -> bool:
    n, key = (about.get("n"), about.get("key")) if isinstance(about, dict) else (None, None)
    return type(n) is int and 0 < n <= MOST_N and isinstance(key, str)
