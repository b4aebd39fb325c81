"""The roster of SuperNodes: which is which client, learned from one `query.hello` to each and checked afterwards.

A deployed run adds two files to its run directory. `flower.json` holds the run's name on devices and, per client, its
number of samples and the key it is bound to; it is written when the first round begins. `refused.jsonl` has one line
per message that was refused.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import UserError
from ..runs.directory import RunDir
from ..utils.files import read_json, write
from .agreement import ALIKE, differs
from .messages import Refused, cut, failure, pulled, refusal
from .states import RUN

log = logging.getLogger("flwr.fedspeed")
NAME, REFUSED = "flower.json", "refused.jsonl"
MOST_N, MOST_IN_ALL = 2**28, 2**31
"""Largest number of samples that a client may claim, and that all clients may claim together."""


class ClientsFile:
    """The clients of a deployed run, in a file of the run directory `out` that outlives the run's processes."""

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


HELLO = "query.hello"
TRIES = 3
"""Number of times that a SuperNode is asked which answers with an error of Flower."""
AGAIN = 60.0
"""Seconds until a SuperNode whose hello failed is asked again: its data may be available by then."""
GRACE = 120.0
"""Seconds without a SuperNode after which a client is offline; a killed SuperNode is admitted again after a minute."""


class Node(NamedTuple):
    """A connected SuperNode; one that was started again is another node."""

    id: int
    since: str
    key: str


class Roster:
    """The connected SuperNodes and the clients that they are.

    Args:
        grid: Flower's `Grid`, which sends and receives messages.
        bind: whether an index belongs to one key.
        ttl: seconds for which a hello is valid.
    """

    def __init__(self, grid: Any, clients_file: ClientsFile, bind: bool, ttl: float) -> None:
        self.grid, self.clients_file, self.bind, self.ttl = grid, clients_file, bind, ttl
        self.expected: Mapping[str, str] | None = None  # The server's statements, once it has a model.
        self.at: dict[int, Node] = {}  # Client -> its node.
        self.said: dict[int, dict[str, str]] = {}  # Client -> its statements.
        self._asked: dict[str, Node] = {}  # Message -> the node it was sent to.
        self._met: set[Node] = set()  # Asked, and perhaps refused.
        self._second: dict[Node, int] = {}  # Refused because another node is that client.
        self._tries: Counter[Node] = Counter()
        self._later: dict[Node, float] = {}  # Hello failed -> when the node is asked again.
        # Client -> when it was last connected.
        self._seen: dict[int, float] = dict.fromkeys(range(clients_file.clients), time.monotonic())

    def look(self) -> None:
        """Update the connected nodes, send a hello to new ones, and handle the answers."""
        online = {
            Node(info.node_id, info.last_activated_at, hashlib.sha256(info.public_key).hexdigest()[:32])
            for info in self.grid.get_nodes()
        }
        self.at = {client: node for client, node in self.at.items() if node in online}
        self._asked = {message: node for message, node in self._asked.items() if node in online}
        self._met -= {node for node, client in self._second.items() if client not in self.at}
        self._second = {node: client for node, client in self._second.items() if client in self.at}
        now = time.monotonic()
        self._met -= {node for node, when in self._later.items() if when <= now}
        self._later = {node: when for node, when in self._later.items() if when > now and node in online}
        new = sorted(online - self._met)
        keys = list(self.grid.push_messages([self._question(node) for node in new])) if new else []
        if new and not keys:  # Flower returns no key at all if one message is too large.
            log.warning("fedspeed: the SuperLink, or a proxy in front of it, finds a hello too large; raise its limit")
        for node, message in zip(new, keys, strict=bool(keys)):
            if message:
                self._asked[message] = node
                self._met.add(node)
        for message, node in list(self._asked.items()):
            try:
                replies = pulled(self.grid, message)
            except Refused as error:
                del self._asked[message]
                self.clients_file.refuse(error.kind, str(error), node.id)
                continue
            for reply in replies[:1]:
                self._hear(self._asked.pop(message), reply)
        self._seen |= dict.fromkeys(self.at, time.monotonic())

    def compare(self, expected: Mapping[str, str]) -> None:
        """Require these statements of devices from now on; refuse the connected ones that differ."""
        self.expected = expected
        for client, node in list(self.at.items()):
            try:
                self._agree(client, self.said[client])
            except Refused as error:
                del self.at[client]
                self.clients_file.release(client)
                self.clients_file.refuse(error.kind, str(error), node.id, client)

    def away(self, client: int) -> bool:
        """Return whether a client has been offline longer than GRACE; a node still answering hello counts as online."""
        asked = [self.clients_file.bound(node.key) if self.bind else client for node in self._asked.values()]
        here = client in self.at or client in asked
        return not here and time.monotonic() - self._seen[client] > GRACE

    def missing(self) -> list[int]:
        """Return the clients that no connected node is."""
        return [i for i in range(self.clients_file.clients) if i not in self.at]

    def _question(self, node: Node) -> Any:
        from flwr.app import ConfigRecord, Message, RecordDict

        job = {"run": self.clients_file.run, "clients": self.clients_file.clients}
        return Message(RecordDict({"job": ConfigRecord(job)}), node.id, HELLO, ttl=self.ttl)

    def _hear(self, node: Node, reply: Any) -> None:
        client = None
        try:
            if reply.has_error():
                self._tries[node] += 1
                if self._tries[node] < TRIES:
                    self._met.discard(node)  # It is asked again.
                raise Refused("failed", f"no answer to hello ({cut(str(reply.error.reason))})")
            failed = failure(reply.content)
            if failed is not None:
                raise Refused("failed", failed[1])
            client, n, said = _introduced(reply.content, self.clients_file)
            other = self.at.get(client)
            if other is not None and other.id != node.id:
                self._second[node] = client
                raise Refused(
                    "index", f"expected one SuperNode with fedspeed-client={client}, found node {other.id} too"
                )
            self._recognise(client, n, node)
            self._agree(client, said)
        except Exception as error:
            found = refusal(error)
            if found.kind == "failed" and node in self._met:
                self._later[node] = time.monotonic() + AGAIN
            self.clients_file.refuse(found.kind, str(found), node.id, client)
            return
        self.at[client], self.said[client] = node, said
        self.clients_file.learn(client, n, node.key)
        log.info("fedspeed: client %d is node %d, with %d samples", client, node.id, n)

    def _recognise(self, client: int, n: int, node: Node) -> None:
        """Raise unless key and size are as when the run began; before that, unbind the key from another index."""
        other = self.clients_file.bound(node.key) if self.bind else None
        if not self.clients_file.begun:
            if other is not None and other != client:
                del self.clients_file.known[other]
            return
        known = self.clients_file.known[client]
        if other is not None and other != client:
            raise Refused(
                "key",
                f"expected fedspeed-client={other}, to which key {node.key} is bound, found {client}; correct "
                f"--node-config",
            )
        if self.bind and known["key"] not in ("", node.key):
            raise Refused(
                "key",
                f"expected the SuperNode with key {known['key']}, found {node.key}; a SuperNode without "
                f"--auth-supernode-private-key has a new key at every start (bind_keys=False allows that); for a new "
                f"device write its key into {NAME} between two starts",
            )
        if known["n"] != n:
            raise Refused(
                "data", f"expected {known['n']} samples as before, found {n}; put its data back, or choose another out"
            )

    def _agree(self, client: int, said: Mapping[str, str]) -> None:
        if self.expected is None:
            return
        why = differs(self.expected, said)
        if why:
            raise Refused("terms", f"{why}; install the same versions and run the same app on server and devices")
        for name in ALIKE:
            if said.get(name) != self.expected[name]:
                ours, theirs = self.expected[name], cut(said.get(name, "nothing"))
                log.warning("fedspeed: client %d has %s %s, the server %s: other last bits", client, name, theirs, ours)


def _introduced(content: Any, clients_file: ClientsFile) -> tuple[int, int, dict[str, str]]:
    """Return index, number of samples and statements of a device; raise `Refused` unless they are valid."""
    from flwr.app import ConfigRecord

    if sorted(content) != ["about", "terms"] or not all(isinstance(content[k], ConfigRecord) for k in content):
        raise Refused("malformed", "expected the records about and terms in the answer to hello")
    about, said = content["about"], content["terms"]
    client, n = about.get("client"), about.get("n")
    if type(client) is not int or not 0 <= client < clients_file.clients or type(n) is not int or not 0 < n <= MOST_N:
        raise Refused(
            "malformed",
            f"expected a client in 0..{clients_file.clients - 1} with samples, found {cut(f'{client!r}, {n!r}')}",
        )
    if about.get("run") != clients_file.run:
        raise Refused("stale", "expected the answer to this run's hello, found another's")
    if len(said) > 50 or not all(isinstance(value, str) and len(value) < 100_000 for value in said.values()):
        raise Refused("malformed", "expected texts in terms")
    return client, n, {str(name): str(value) for name, value in said.items()}


def listed(clients: Iterable[int]) -> str:
    """Return some clients in words.

    Example:
        >>> listed([3, 1, 2]), listed(range(100))
        ('1, 2, 3', '0, 1, 2, 3, 4, 5, 6, 7 and 92 others')
    """
    found = sorted(clients)
    text = ", ".join(map(str, found[:8]))
    return f"{text} and {len(found) - 8} others" if len(found) > 8 else text
