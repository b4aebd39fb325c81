"""What usually goes wrong, as changes of our own run: one that reproduces somebody's numbers is a likely cause."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, NamedTuple

from ..methods import FedAvg
from ..methods.base import Method
from ..vec import tree_map
from .reference import Seams, vectors
from .setting import Setting


class Fault(NamedTuple):
    """A mistake: its kind, what it is, and how our run makes it."""

    kind: str  # one of result.KINDS
    says: str
    method: Method
    seams: Seams = Seams()


def faults(method: Method, setting: Setting) -> Iterator[Fault]:
    """Every single mistake that is tried, the commonest first."""
    for kind, says, seams in (
        *_counting(setting),
        *_states(method, setting),
        *_terms(method, setting),
        *_rates(setting),
    ):
        yield Fault(kind, says, method, seams)
    yield Fault("missing term", "no term beside the gradient has an effect: this is FedAvg", FedAvg())
    yield from _fields(method)


Row = tuple[str, str, Seams]


def _counting(setting: Setting) -> Iterator[Row]:
    """Wrong denominators."""
    S, N = float(setting.active), float(setting.clients)
    seams = {
        "the mean of what came up is divided by all N clients, not by the S active ones": Seams(
            mean=lambda mean, S, N: tree_map(lambda a: a * (S / N), mean)
        ),
        "what came up is summed, not averaged: a division by S is missing": Seams(
            mean=lambda mean, S, N: tree_map(lambda a: a * S, mean)
        ),
        "the sum of the active clients' MODELS is divided by all N clients, not by the S active ones": Seams(
            updated=lambda old, new, mean, first: new._replace(x=new.x + (S / N - 1) * (old.x + mean[0]))
        ),
        "the server's running mean over ALL clients is updated by the mean over the active ones, without S/N": Seams(
            counted=lambda round: round._replace(S=N)
        ),
        "the server's running mean over ALL clients is divided by S once too often: 1/N in place of S/N": Seams(
            counted=lambda round: round._replace(S=1.0)
        ),
        "the server's running mean is a sum: it is not divided by N": Seams(
            counted=lambda round: round._replace(N=1.0)
        ),
        "S/N is upside down in the server's running mean": Seams(counted=lambda round: round._replace(S=N, N=S)),
    }
    for says, wrong in seams.items():
        yield "denominator", says, wrong


def _states(method: Method, setting: Setting) -> Iterator[Row]:
    """States that leak, are lost or are old."""
    import torch

    x0 = torch.from_numpy(setting.x0.copy())
    client, server = method.init_client(x0), method.init_server(x0)
    own, beside = list(vectors(client)), [name for name in server._fields if name != "x"]
    if own:
        yield "state", "a client's state is lost between rounds", Seams(stored=lambda old, new: old)
        yield (
            "state",
            "one state is shared by all clients: each finds what the last one left",
            Seams(owner=lambda i, position: 0),
        )
        yield (
            "state",
            "states are kept by position in the cohort, not by client: they leak between clients",
            Seams(owner=lambda i, position: position),
        )
        yield (
            "state",
            "a client that is new inherits the state of the client before it",
            Seams(fresh=lambda first, last: last),
        )
    for name in own if len(own) > 1 else []:
        yield (
            "state",
            f"the client's {name} is lost between rounds",
            Seams(
                stored=lambda old, new, name=name: _with(new, name, vectors(old)[name])  # type: ignore[misc]
            ),
        )
    for name in own:
        yield (
            "sign",
            f"the client's {name} is updated with the wrong sign",
            Seams(
                stored=lambda old, new, name=name: _with(new, name, 2 * vectors(old)[name] - vectors(new)[name])  # type: ignore[misc]
            ),
        )
    for name in beside:
        yield (
            "state",
            f"the server's {name} is lost between rounds",
            Seams(
                updated=lambda old, new, mean, first, name=name: new._replace(**{name: getattr(first, name)})  # type: ignore[misc]
            ),
        )
    yield (
        "state",
        "a client begins at its own last model, not at the one that was sent",
        Seams(start=lambda x, own, last: own),
    )
    yield "state", "a client begins at the model that the client before it left", Seams(start=lambda x, own, last: last)
    if beside:
        yield (
            "missing term",
            "the server takes the plain mean of what came up; what else it keeps has no effect",
            Seams(updated=lambda old, new, mean, first: new._replace(x=old.x + mean[0])),
        )


def _terms(method: Method, setting: Setting) -> Iterator[Row]:
    """Terms of the local direction, and of the server's step, that are missing, turned round or old."""
    import torch

    x0 = torch.from_numpy(setting.x0.copy())
    down, client = method.broadcast(method.init_server(x0)), method.init_client(x0)
    yield (
        "missing term",
        "the pull towards the model that was sent (its prox term) has no effect",
        Seams(seen=lambda down, client, x: (down._replace(x=x), client)),
    )
    for name in vectors(client):
        yield (
            "missing term",
            f"the client's {name} has no effect on its local steps",
            Seams(
                seen=lambda down, client, x, name=name: (down, _scaled(client, name, 0.0))  # type: ignore[misc]
            ),
        )
        yield (
            "sign",
            f"the client's {name} enters the local step with the wrong sign",
            Seams(
                seen=lambda down, client, x, name=name: (down, _scaled(client, name, -1.0))  # type: ignore[misc]
            ),
        )
    for name in [name for name in vectors(down) if name != "x"]:
        yield (
            "missing term",
            f"the server's {name} has no effect on local steps",
            Seams(
                seen=lambda down, client, x, name=name: (_scaled(down, name, 0.0), client)  # type: ignore[misc]
            ),
        )
        yield (
            "sign",
            f"the server's {name} enters the local step with the wrong sign",
            Seams(
                seen=lambda down, client, x, name=name: (_scaled(down, name, -1.0), client)  # type: ignore[misc]
            ),
        )
    if len(down) > 1:
        yield (
            "state",
            "clients are sent the server's state of the round before",
            Seams(sent=lambda down, before: before._replace(x=down.x)),
        )
        yield "sign", "all corrections of the local step have the wrong sign", Seams(
            seen=lambda down, client, x: (
                tree_map(torch.neg, down)._replace(x=down.x), tree_map(torch.neg, client)
            )
        )  # fmt: skip
    yield "sign", "local steps go up the gradient", Seams(turned=lambda direction: -direction)
    yield "sign", "the server steps against what came up", Seams(mean=lambda mean, S, N: tree_map(torch.neg, mean))
    yield (
        "missing term",
        "every local step uses the gradient at the point where the client began",
        Seams(point=lambda x, start: start),
    )


def _rates(setting: Setting) -> Iterator[Row]:
    """Wrong K, and rates that do not decay."""
    yield "learning rate", "the learning rate does not decay", Seams(age=lambda t: 0)
    yield "learning rate", "the learning rate decays one round early", Seams(age=lambda t: t + 1)
    yield "learning rate", "the learning rate decays one round late", Seams(age=lambda t: max(0, t - 1))
    yield "local steps", "one local step too few: K - 1", Seams(steps=lambda K: K - 1)
    yield "local steps", "one local step too many: K + 1", Seams(steps=lambda K: K + 1)
    yield "local steps", "one local step, whatever K", Seams(steps=lambda K: 1)
    for says, K in (("1", lambda K: 1), ("K - 1", lambda K: max(1, K - 1)), ("K + 1", lambda K: K + 1)):
        for whose, client, server in (("", True, True), (" by clients", True, False), (" by the server", False, True)):
            yield (
                "local steps",
                f"a sum of K steps is scaled back{whose} with {says} in place of K",
                Seams(
                    told=lambda run, K=K, on=client: run._replace(K=K(run.K)) if on else run,  # type: ignore[misc]
                    counted=lambda round, K=K, on=server: round._replace(K=float(K(round.K))) if on else round,  # type: ignore[misc]
                ),
            )
    yield (
        "learning rate",
        "a sum of K steps is scaled back without the learning rate",
        Seams(told=lambda run: run._replace(lr=1.0), counted=lambda round: round._replace(lr=1.0)),
    )

    decay, lr = setting.lr_decay, setting.lr
    for says, other in (("the first round's", lambda now: lr), ("the next round's", lambda now: now * decay),
                        ("the last round's", lambda now: min(lr, now / decay))):  # fmt: skip
        yield (
            "learning rate",
            f"a sum of K steps is scaled back with {says} rate",
            Seams(
                told=lambda run, other=other: run._replace(lr=other(run.lr)),  # type: ignore[misc]
                counted=lambda round, other=other: round._replace(lr=other(round.lr)),  # type: ignore[misc]
            ),
        )


def _fields(method: Method) -> Iterator[Fault]:
    """Fields of the method with other values, also such as its class would refuse."""
    for field in fields(method):
        name, value = field.name, getattr(method, field.name)
        allowed = field.metadata.get("allowed")
        if isinstance(value, bool):
            yield Fault("field", f"as if {name} were {str(not value).lower()}", _other(method, name, not value))
        elif isinstance(allowed, tuple):
            for variant in allowed:
                if variant != value:
                    yield Fault(
                        "field", f"another variant: as if {name} were {variant!r}", _other(method, name, variant)
                    )
        elif isinstance(value, float) and value and math.isfinite(value):
            yield Fault("missing term", f"{name} has no effect: as if it were 0", _other(method, name, 0.0))
            yield Fault("missing term", f"what is divided by {name} has no effect", _other(method, name, math.inf))
            yield Fault("sign", f"{name} has the wrong sign", _other(method, name, -value))
            for says, other in (("its inverse", 1 / value), ("its double: a factor 2 too many", 2 * value),
                                ("its half: a factor 1/2 too many", value / 2), (f"1 - {name}", 1 - value),
                                ("its square", value**2), ("1: it is left out", 1.0)):  # fmt: skip
                if other not in (value, 0.0):
                    yield Fault("field", f"{name} is used as {says}", _other(method, name, other))


def _other(method: Method, name: str, value: Any) -> Method:
    """A method with another value of a field, unchecked."""
    other = copy.copy(method)
    object.__setattr__(other, name, value)
    return other


def _scaled(tree: Any, name: str, factor: float) -> Any:
    return _with(tree, name, factor * vectors(tree)[name])


def _with(tree: Any, name: str, value: Any) -> Any:
    """A NamedTuple with another vector under a name, `base.h` inside of a wrapper's."""
    head, dot, rest = name.partition(".")
    return tree._replace(**{head: _with(getattr(tree, head), rest, value) if dot else value})
