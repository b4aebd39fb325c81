"""Flower's messages without its network: real ClientApps, real records through real protobuf, in one process."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

from flwr.app import Context, Message, RecordDict
from flwr.app.error import Error
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as Proto
from flwr.supercore.task_identity import TaskIdentity


def travelled(content: RecordDict) -> RecordDict:
    """A content as it arrives: bytes, and records again."""
    return recorddict_from_proto(Proto.FromString(recorddict_to_proto(content).SerializeToString()))


class Loop:
    """What a ServerApp is given as its grid; `fault(node, message, reply)` gives the replies that arrive, or what
    Flower raises when one is pulled."""

    def __init__(self, fault=None) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.nodes: dict[int, SimpleNamespace] = {}
        self.replies: dict[str, list[Message]] = {}
        self.numbers = itertools.count(1)
        self.fault = fault or (lambda node, message, reply: [reply])
        self.log: list[tuple[int, str]] = []

    def join(self, node_id, app, config, key=None, run_config=None) -> None:
        """A SuperNode starts, or starts again."""
        key = f"key of {node_id}".encode() if key is None else key
        since = str(next(self.numbers))
        self.nodes[node_id] = SimpleNamespace(
            node_id=node_id,
            last_activated_at=since,
            public_key=key,
            app=app,
            config=config,
            run_config=run_config or {},
        )

    def get_nodes(self):
        return list(self.nodes.values())

    def push_messages(self, messages):
        found = []
        for message in messages:
            name = f"message-{next(self.numbers)}"
            message.metadata.__dict__["_message_id"] = name
            node = self.nodes[message.metadata.dst_node_id]
            self.log.append((node.node_id, message.metadata.message_type))
            message.content = travelled(message.content)
            context = Context(1, node.node_id, node.config, RecordDict(), node.run_config)
            try:
                reply = node.app(message, context)
                reply = Message(travelled(reply.content), reply_to=message)
            except Exception as error:
                reply = Message(Error(2, str(error)), reply_to=message)
            self.replies[name] = self.fault(node.node_id, message, reply)
            found.append(name)
        return found

    def pull_messages(self, names):
        found = [reply for name in list(names) for reply in self.replies.pop(name, [])]
        for reply in found:
            if isinstance(reply, Exception):
                raise reply
        return found
