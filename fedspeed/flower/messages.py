"""Messages between server and devices: trees of vectors as raw bytes in Flower's records, and checks of all input.

There is no pickle and no file format: an array is its numbers, little-endian. Its name, dtype, shape and length are
checked before any of its bytes are read.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy

from ..client.hooks import numbers
from ..client.losses import has_accuracy
from ..client.tree_bytes import encode
from ..client.trees import all_finite, named, tree_map, tree_of
from ..client.upload_digest import upload_digests
from ..client.work import Facts, Job, Reply, Work
from ..errors import UserError, one_line
from ..methods.base import Nothing, Round

RAW = "fedspeed.raw"
"""The serialisation type of arrays: raw bytes."""
FACTS = ("K", "n", "train_loss", "drift", "grad_evals", "mean_rate")
MOST_METRICS = 64
MOST_TEXT = 2_000
"""Largest number of metrics that a client may report, and of characters in a text from a device."""
MOST_GRADIENTS = 64
"""Largest number of gradients that a client may have taken per step."""
AWAY = ("httpx", "httpcore")
"""Modules whose errors mean that the SuperLink does not answer, not that a reply is wrong."""


class Refused(ValueError):
    """A message that is not used: the kind of fault, and what was expected and found."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


def refusal(error: Exception) -> Refused:
    """Return an error in reading a device's message as a refusal: no message of a device may end the run."""
    return error if isinstance(error, Refused) else Refused("malformed", f"cannot be read ({cut(one_line(error))})")


def pulled(grid: Any, message: str) -> list[Any]:
    """Return the replies to one message that have arrived; raise `Refused` for one that cannot be decoded.

    Flower decodes all messages of one pull together, so each is pulled alone: no other device's reply is lost with it.
    """
    try:
        return list(grid.pull_messages([message]))
    except Exception as error:
        if type(error).__module__.partition(".")[0] in AWAY:
            raise
        raise refusal(error) from None


class Vector(NamedTuple):
    """The tree of an evaluation message: one vector."""

    x: Any


def to_arrays(tree: Any) -> Any:
    """Return a tree of vectors as an ArrayRecord."""
    from flwr.app import Array, ArrayRecord

    header, parts = encode(tree)
    return ArrayRecord(
        {
            name: Array(dtype=dtype, shape=tuple(shape), stype=RAW, data=bytes(part))
            for (name, shape, dtype, _), part in zip(header, parts, strict=True)
        }
    )


def from_arrays(record: Any, like: Any) -> Any:
    """Return the tree in an ArrayRecord; raise `Refused` unless it is finite and has the layout of `like`."""
    from flwr.app import ArrayRecord

    if not isinstance(record, ArrayRecord):
        raise Refused("malformed", f"expected arrays, found {type(record).__name__}")
    wanted = dict(named("", like))
    if list(record) != list(wanted):
        raise Refused("malformed", f"expected the arrays {_listed(wanted)}, found {_listed(record)}")
    for name, a in wanted.items():
        found = record[name]
        dtype = str(a.dtype).removeprefix("torch.")
        if (found.stype, found.dtype) != (RAW, dtype):
            raise Refused(
                "malformed", f"{name}: expected {dtype} ({RAW}), found {cut(f'{found.dtype} ({found.stype})')}"
            )
        if tuple(found.shape) != tuple(a.shape):
            raise Refused("malformed", f"{name}: expected shape {tuple(a.shape)}, found {cut(str(tuple(found.shape)))}")
        if len(found.data) != a.numel() * a.element_size():
            kind = "oversized" if len(found.data) > a.numel() * a.element_size() else "malformed"
            raise Refused(kind, f"{name}: expected {a.numel() * a.element_size()} bytes, found {len(found.data)}")
    tree = tree_of(like, [_tensor(record[name].data, a) for name, a in wanted.items()])
    if not all_finite(tree):
        raise Refused("not finite", "expected finite numbers, found NaN or Inf")
    return tree


def _tensor(data: bytes, like: torch.Tensor) -> torch.Tensor:
    if not data:
        return torch.empty(like.shape, dtype=like.dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(like.dtype).view(like.shape)


def to_reply(reply: Reply, run: str, lost: bool) -> Any:
    """Return the message that a device sends after its turn."""
    from flwr.app import ConfigRecord, MetricRecord, RecordDict

    facts = reply.facts
    about = {"run": run, "round": reply.job.t, "client": reply.job.client, "lost": int(lost)}
    return RecordDict(
        {
            "about": ConfigRecord(about),
            "up": to_arrays(reply.up),
            "facts": MetricRecord({name: getattr(facts, name) for name in FACTS}),
            "metrics": MetricRecord(dict(facts.metrics or {})),
        }
    )


def read_reply(content: Any, run: str, job: Job, work: Work, taken: Collection[str]) -> tuple[Reply, bool]:
    """Return the reply to a job, and whether its device had lost the client's state and used the initial one.

    Raise `Refused` unless it is of this run, round and client, complete and finite. The server computes what it can:
    the steps and their rates, the bytes and the digest of the upload.

    Args:
        taken: names of metrics that a client may not report, see `server_metrics`.
    """
    from flwr.app import ConfigRecord, MetricRecord

    _only(content, {"about": ConfigRecord, "up": None, "facts": MetricRecord, "metrics": MetricRecord})
    _of_this(content["about"], run, job)
    reported = content["facts"]
    if sorted(reported) != sorted(FACTS):
        raise Refused("malformed", f"expected the facts {_listed(FACTS)}, found {_listed(reported)}")
    facts = {name: _number(name, reported[name]) for name in FACTS}
    n = int(work.data.sizes[job.client])
    expected = {"K": job.K or work.local_steps(n), "n": n}
    for name, value in expected.items():
        if facts[name] != value:
            raise Refused("malformed", f"expected {name} = {value}, found {facts[name]:g}")
    most = MOST_GRADIENTS * expected["K"]
    if facts["drift"] < 0 or not 0 <= facts["grad_evals"] <= most:
        raise Refused("malformed", f"expected a drift of at least 0 and grad_evals in 0..{most}")
    hooks, K = work.at(job.t).hooks, expected["K"]
    mean_rate = sum(hooks.rates(work.at(job.t).local_steps(n), K)) / K if "rate" in hooks.overridden else 1.0
    if not math.isclose(facts["mean_rate"], mean_rate, rel_tol=1e-9):
        raise Refused("malformed", f"expected mean_rate = {mean_rate:g}, found {facts['mean_rate']:g}")
    metrics = _metrics(content["metrics"], taken if "client_metrics" in work.hooks.overridden else None)
    up = tree_map(lambda a: a.to(work.flat.device), from_arrays(content["up"], work.shapes.up))
    done = Facts(
        K=expected["K"],
        n=n,
        train_loss=facts["train_loss"],
        drift=facts["drift"],
        grad_evals=facts["grad_evals"],
        sent=work.hooks.sent(up),
        metrics=metrics or None,
        digest=upload_digests(up)[0],
        mean_rate=mean_rate,
    )
    return Reply(job, up, Nothing(), done), bool(content["about"].get("lost"))


def server_metrics(work: Work) -> set[str]:
    """Return the names of a method's server metrics, found by one call at x^0; a client may not report them too."""
    hooks = work.hooks
    if not {"metrics", "client_metrics"} <= hooks.overridden:
        return set()
    mean = tree_map(lambda a: torch.zeros(a.shape, dtype=a.dtype, device=work.flat.device), work.shapes.up)
    server = hooks.init_server(work.flat.x.clone())
    try:
        return set(hooks.metrics(server, mean, Round(0, 1.0, 1.0, 1.0, 1.0, work.plan.seed, 1)))
    except UserError:  # The method cannot take a mean of zeros.
        return set()


def read_sums(content: Any, run: str, job: Job, work: Work) -> tuple[float, float]:
    """Return the sums of loss and right answers over a client's data (NaN right answers if there are no classes)."""
    from flwr.app import ConfigRecord, MetricRecord

    _only(content, {"about": ConfigRecord, "sums": MetricRecord})
    _of_this(content["about"], run, job)
    sums = content["sums"]
    if sorted(sums) != ["loss", "right"]:
        raise Refused("malformed", f"expected sums of loss and right answers, found {_listed(sums)}")
    loss = _number("loss", sums["loss"])
    if loss < 0 and work.loss is cross_entropy:
        raise Refused("malformed", f"expected a loss of at least 0, found {loss:g}")
    if not has_accuracy(work.data, work.loss):
        return loss, math.nan
    right, n = _number("right", sums["right"]), int(work.data.sizes[job.client])
    if not 0 <= right <= n:
        raise Refused("malformed", f"expected 0..{n} right answers, found {right:g}")
    return loss, right


def failure(content: Any) -> tuple[str, str] | None:
    """Return the kind and the line of the error in a device's answer; None if it holds no error."""
    from flwr.app import ConfigRecord

    record = content.get("failed")
    if not isinstance(record, ConfigRecord):
        return None
    return cut(str(record.get("kind", ""))), cut(str(record.get("why", "")), MOST_TEXT)


def to_failure(kind: str, why: str) -> Any:
    """Return the answer of a device that failed, in one line."""
    from flwr.app import ConfigRecord, RecordDict

    return RecordDict({"failed": ConfigRecord({"kind": kind, "why": cut(why, MOST_TEXT)})})


def _only(content: Any, kinds: Mapping[str, Any]) -> None:
    if sorted(content) != sorted(kinds):
        raise Refused("malformed", f"expected the records {_listed(kinds)}, found {_listed(content)}")
    for name, kind in kinds.items():
        if kind is not None and not isinstance(content[name], kind):
            raise Refused("malformed", f"{name}: expected a {kind.__name__}, found {type(content[name]).__name__}")


def _of_this(about: Any, run: str, job: Job) -> None:
    """Raise `Refused` unless a reply is of this run, round and client."""
    for name, value in {"run": run, "round": job.t, "client": job.client}.items():
        found = about.get(name)
        if type(found) is not type(value) or found != value:
            raise Refused("stale", f"expected {name} {value}, found {cut(repr(found))}")


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        kind = "not finite" if type(value) is float else "malformed"
        raise Refused(kind, f"{name}: expected a finite number, found {cut(repr(value))}")
    return float(value)


def _metrics(reported: Any, taken: Collection[str] | None) -> dict[str, float]:
    """Return the metrics of a client; `taken` is None if its method reports none."""
    if len(reported) > MOST_METRICS or any(len(str(name)) > MOST_METRICS for name in reported):
        raise Refused("oversized", f"metrics: expected at most {MOST_METRICS}, with names as short, found more")
    other = list(reported) if taken is None else [name for name in reported if name in taken]
    if other:
        raise Refused("malformed", f"metrics: expected none of these of a client, found {_listed(other)}")
    try:
        return numbers(dict(reported), lambda why: UserError(f"metrics: a device {why}"))
    except UserError as error:
        raise Refused("malformed", str(error)) from None


def _listed(found: Any) -> str:
    return cut(", ".join(str(name) for name in list(found)[:20]) or "none")


def cut(text: str, most: int = 200) -> str:
    """Return a device's text as one printable line of bounded length."""
    line = "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
    return line if len(line) <= most else f"{line[:most]}..."
