"""The fault catalogue: common mistakes as changes of our own run, to show that `fedspeed audit` finds them.

A fault that reproduces all numbers of a wrong implementation is its cause.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch

from fedspeed.client.trees import named, tree_leaves, tree_map
from fedspeed.experiments.audit import Key, Reference, Setting, Subject, Trace, first_difference
from fedspeed.methods import FedAvg
from fedspeed.methods.base import Local, Method, Round
from fedspeed.runs.simulate import as_method

KINDS = {
    "denominator": "a sum divided by the wrong number: S, N, K or nothing",
    "sign": "a term with the wrong sign",
    "state": "a state that leaks from another client, is lost between rounds, or is old",
    "missing term": "a term that has no effect: no gradient flows, it is never added, or it is overwritten",
    "local steps": "K off by one, or a wrong K or rate where a sum of steps is scaled back",
    "learning rate": "a rate that does not decay, or decays at the wrong time",
    "field": "a hyper-parameter used as its inverse, its double, its half or its complement, or another variant",
}


class Cause(NamedTuple):
    """A mistake that, made by our own run, gives the numbers that were found: all, or up to a point."""

    kind: str
    says: str
    until: Key | None = None  # the first vector that it does not explain


class Seams(NamedTuple):
    """Where a run can be changed: each function is given what is right and returns what is used instead."""

    steps: Callable[[int], int] = lambda K: K
    age: Callable[[int], int] = lambda t: t  # how often the rate has decayed by round t = 0, 1, ...
    point: Callable[[Any, Any], Any] = lambda x, start: x  # where a gradient is taken
    seen: Callable[[Any, Any, Any], tuple[Any, Any]] = lambda down, client, x: (down, client)  # by `direction`
    turned: Callable[[Any], Any] = lambda direction: direction
    told: Callable[[Local], Local] = lambda run: run  # what `upload` is told
    counted: Callable[[Round], Round] = lambda round: round  # what `update` is told
    owner: Callable[[int, int], int] = lambda i, position: i  # whose state client i works with
    fresh: Callable[[Any, Any], Any] = lambda first, last: first  # the state of a client that has none yet
    stored: Callable[[Any, Any], Any] = lambda old, new: new
    start: Callable[[Any, Any, Any], Any] = lambda x, own, last: x  # own: its last model; last: the last client's
    sent: Callable[[Any, Any], Any] = lambda down, before: down  # before: what was sent in the last round
    mean: Callable[[Any, int, int], Any] = lambda mean, S, N: mean
    updated: Callable[[Any, Any, Any, Any], Any] = lambda old, new, mean, first: new


class Faulty(Reference):
    """Our run with seams at which a fault can be planted."""

    def __init__(self, method: Method, setting: Setting, seams: Seams | None = None) -> None:
        super().__init__(method, setting)
        self.seams = seams or Seams()
        self.models: dict[int, Any] = {}  # where each client ended last
        self.last: Any = None  # (state, model) of the client that ran last
        self.before: Any = None

    def lr(self, t: int) -> float:
        """The local rate of round t."""
        return self.setting.lr * self.setting.lr_decay ** self.seams.age(t)

    def run(self) -> Trace:
        """All rounds."""
        for t, cohort in enumerate(self.setting.cohorts):
            down = self.method.broadcast(self.server)
            sent = self.seams.sent(down, down if self.before is None else self.before)
            self.before = down
            self.serve([self.turn_at(t, position, i, sent) for position, i in enumerate(cohort)], t)
        return self.trace

    def turn_at(self, t: int, position: int, i: int, down: Any) -> Any:
        """One client's round: what it sends; its model is in the trace."""
        method, seams, K, lr = self.method, self.seams, self.seams.steps(self.setting.local_steps), self.lr(t)
        old = self.state(position, i)
        client = tree_map(torch.clone, old)
        rates = [method.rate(k, K) for k in range(K)]
        model = self.last[1] if self.last else down.x
        start = seams.start(method.start(down, client), self.models.get(i, down.x), model).clone()
        x = start.clone()

        def grad(x: Any, fraction: float = 1.0, **teacher: Any) -> Any:
            return torch.from_numpy(self.setting.gradient(i, seams.point(x, start).numpy()))

        for rate in rates:
            x = x - lr * rate * seams.turned(method.direction(x.clone(), grad, *seams.seen(down, client, x)))
        local = Local(K, lr, 1, t, self.setting.seed, i, mean_rate=sum(rates) / max(1, K))
        up, kept = method.upload(x.clone(), down, client, seams.told(local))
        kept = seams.stored(old, kept)
        self.states[seams.owner(i, position)], self.models[i], self.last = kept, x, (kept, x)
        self.trace.add(t + 1, i, "x_K", x)
        return up

    def state(self, position: int, i: int) -> Any:
        """What client i finds."""
        owner = self.seams.owner(i, position)
        if owner not in self.states:
            first = self.method.init_client(self.x0.clone())
            self.states[owner] = self.seams.fresh(first, self.last[0] if self.last else first)
        return self.states[owner]

    def serve(self, ups: list[Any], t: int) -> None:
        """The server's part of a round, and what clients do once the mean is known."""
        S, N, K = len(ups), self.setting.clients, self.setting.local_steps
        means = (torch.stack(each).mean(0) for each in zip(*map(tree_leaves, ups), strict=True))
        mean = self.seams.mean(tree_map(lambda _: next(means), ups[0]), S, N)
        rate = sum(self.rates) / K
        round = Round(t, float(S), float(N), float(K), self.lr(t), self.setting.seed, mean_rate=rate)
        round = self.seams.counted(round)
        new = self.method.update(self.server, mean, round)
        for position, i in enumerate(self.setting.cohorts[t]):
            owner = self.seams.owner(i, position)
            self.states[owner] = self.method.settle(self.states[owner], mean, round)
            self.note(t + 1, i, self.states[owner])
        self.server = self.seams.updated(self.server, new, mean, self.first)
        self.trace.add(t + 1, None, "x", self.server.x)
        self.note(t + 1, None, self.server)


def vectors(tree: Any) -> dict[str, torch.Tensor]:
    """The tensors of a state by name."""
    return dict(named("", tree))


def finite(trace: Trace) -> bool:
    """Whether no vector has NaN or Inf."""
    return all(bool(np.isfinite(value).all()) for value in trace.vectors.values())


class Fault(NamedTuple):
    """A mistake: its kind, what it is, and how our run makes it."""

    kind: str  # one of KINDS
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


def explain(adapter: Any, method: Method | str, **settings: Any) -> tuple[tuple[Cause, ...], Cause | None]:
    """The faults that give all numbers of an implementation, and where none does the one that does so longest."""
    setting = Setting.from_fields(settings)
    reference = Reference(as_method(method), setting)
    theirs = Subject("toy", reference).run(adapter)
    first = first_difference(theirs, reference.run(), setting.tolerance)
    assert first is not None
    places = {key: place for place, key in enumerate(theirs.vectors)}
    causes: list[Cause] = []
    known: list[Trace] = []
    nearest, furthest = None, places[first.key]
    for fault in faults(reference.method, setting):
        try:
            with np.errstate(all="ignore"):
                made = Faulty(fault.method, setting, fault.seams).run()
        except Exception:  # a mistake that this method cannot make
            continue
        if not finite(made):
            continue
        apart = first_difference(theirs, made, setting.tolerance)
        if apart is None and all(
            first_difference(made, one, setting.tolerance) for one in known
        ):  # not one in two ways
            known.append(made)
            causes.append(Cause(fault.kind, fault.says))
        elif apart is not None and places[apart.key] > furthest:
            nearest, furthest = Cause(fault.kind, fault.says, apart.key), places[apart.key]
    return tuple(causes), None if causes else nearest
