"""The two files that a deployed run adds to its run directory: `flower.json` and `refused.jsonl`.

`flower.json` holds the run's name on devices and, per client, its number of samples and the key it is bound to; it is
written when the first round begins. `refused.jsonl` has one line per message that was refused.
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
"""Largest number of samples that a client may claim, and that all clients may claim together."""


class ClientsFile:
    """The clients of a deployed run, in a file that outlives the run's processes.

    Args:
        out: the run directory.
        clients: the number of clients.
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
        if self.begun and not _is_valid(found, clients):
            raise UserError(
                f"{self.path}: expected a run of {clients} clients, found another; put it back, or choose another out"
            )
        self.run: str = found.get("run") or secrets.token_hex(16)
        self.known: dict[int, dict[str, Any]] = {int(i): about for i, about in found.get("known", {}).items()}

    def sizes(self) -> list[int] | None:
        """Return the number of samples per client; None before all clients have reported theirs."""
        if len(self.known) < self.clients:
            return None
        return [int(self.known[i]["n"]) for i in range(self.clients)]

    def bound(self, key: str) -> int | None:
        """Return the client that a key is bound to."""
        return next((i for i, about in self.known.items() if about["key"] == key), None)

    def learn(self, client: int, n: int, key: str) -> None:
        """Note a client's size and key; until the run begins a later device may replace both."""
        if not self.begun:
            self.known[client] = {"n": n, "key": key}
        elif not self.known[client]["key"]:
            self.known[client]["key"] = key
            self._write()

    def release(self, client: int) -> None:
        """Unbind a client from the key of a device that was refused, unless the run has begun."""
        if not self.begun:
            self.known[client]["key"] = ""

    def begin(self) -> None:
        """Write the clients to the file before the first of them works; the caller holds the run directory's lock."""
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
        """Log a refusal, count it, and append it to `refused.jsonl`."""
        self.refusals[kind] += 1
        where = "" if t is None else f"round {t + 1}, "
        who = f"node {node}" if client is None else f"client {client} (node {node})"
        log.warning("fedspeed: %s%s: refused (%s): %s", where, who, kind, why)
        line = {"kind": kind, "round": None if t is None else t + 1, "client": client, "node": str(node), "why": why}
        self.lines.parent.mkdir(parents=True, exist_ok=True)
        with self.lines.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def note_lost(self, node: int, client: int, t: int) -> None:
        """Note that a device had lost its client's state and used that of `init_client`; its reply is counted."""
        self.refuse(
            "lost state",
            "started from the initial state: a mean over all clients that the server keeps is off by its share",
            node,
            client,
            t,
        )


def _is_valid(found: dict[str, Any], clients: int) -> bool:
    """Return whether a file holds exactly the clients of a run."""
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
