"""What a deployed run writes beside its run directory's own files: who the devices are, and what was refused.

`flower.json` holds what the run is called on devices, and of every client how many samples it has and whose key it is
bound to; `refused.jsonl` a line for everything that was refused.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections import Counter
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import read_json, write
from .kept import RUN

log = logging.getLogger("flwr.fedspeed")
NAME, REFUSED = "flower.json", "refused.jsonl"


class Book:
    """The facts of a deployed run that outlive its processes.

    Args:
        out: the run directory.
        clients: how many there are.
    """

    def __init__(self, out: Path, clients: int) -> None:
        self.path, self.lines = out / NAME, out / REFUSED
        self.refusals: Counter[str] = Counter()
        found = read_json(self.path)
        if self.path.exists() and not (
            RUN.fullmatch(str(found.get("run")))
            and found.get("clients") == clients
            and isinstance(found.get("known"), dict)
            and all(_is_known(about) for about in found["known"].values())
        ):
            raise UserError(
                f"{self.path}: expected a run of {clients} clients, found another; put it back, or choose another out"
            )
        self.clients = clients
        self.run: str = found.get("run") or secrets.token_hex(16)
        self.known: dict[int, dict[str, Any]] = {int(i): about for i, about in found.get("known", {}).items()}

    def sizes(self) -> list[int] | None:
        """Samples of every client; None before all have said."""
        if len(self.known) < self.clients:
            return None
        return [int(self.known[i]["n"]) for i in range(self.clients)]

    def learn(self, client: int, n: int, key: str) -> None:
        """Write down who a client is, when it is first seen."""
        if client not in self.known:
            self.known[client] = {"n": n, "key": key}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            known = {str(i): self.known[i] for i in sorted(self.known)}
            write(
                self.path, json.dumps({"run": self.run, "clients": self.clients, "known": known}) + "\n", durable=True
            )

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


def _is_known(about: Any) -> bool:
    return isinstance(about, dict) and type(about.get("n")) is int and isinstance(about.get("key"), str)
