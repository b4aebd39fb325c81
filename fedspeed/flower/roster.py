"""The roster of SuperNodes: which is which client, learned from one `query.hello` to each and checked afterwards."""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from .agreement import ALIKE, differs
from .clients_file import MOST_N, NAME, ClientsFile
from .messages import Refused, cut, failure, pulled, refusal

log = logging.getLogger("flwr.fedspeed")
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
        clients_file: the clients of the run.
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
        self._seen: dict[int, float] = dict.fromkeys(
            range(clients_file.clients), time.monotonic()
        )  # Client -> when it was last connected.

    def look(self) -> None:
        """Update the connected nodes, send a hello to new ones, and handle the answers."""
        online = {
            Node(info.node_id, info.last_activated_at, _fingerprint(info.public_key)) for info in self.grid.get_nodes()
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
            self._admit(client, node)
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

    def _admit(self, client: int, node: Node) -> None:
        """Raise if another connected SuperNode is this client."""
        other = self.at.get(client)
        if other is not None and other.id != node.id:
            self._second[node] = client
            raise Refused("index", f"expected one SuperNode with fedspeed-client={client}, found node {other.id} too")

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


def _fingerprint(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()[:32]
