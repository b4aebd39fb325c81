"""Our own run of a method on a setting: its hooks in float64, with seams at which a fault can be planted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import UserError
from ..methods.base import Local, Method, Round
from ..vec import tree_map
from .setting import Setting
from .trace import Trace


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


class Reference:
    """A method that runs on a setting, a turn at a time.

    Args:
        seams: what differs from the method; nothing by default.
    """

    def __init__(self, method: Method, setting: Setting, seams: Seams | None = None) -> None:
        self.method = method
        self.setting = setting
        self.seams = seams or Seams()
        self.H, self.v = (torch.from_numpy(np.array(a)) for a in (setting.problem.H, setting.problem.v))
        self.x0 = torch.from_numpy(setting.x0.copy())
        self.first = method.init_server(self.x0.clone())
        self.server = self.first
        self.states: dict[int, Any] = {}
        self.models: dict[int, Any] = {}  # where each client ended last
        self.last: Any = None  # (state, model) of the client that ran last
        self.before: Any = None
        self.trace = Trace()

    def lr(self, t: int) -> float:
        """The local rate of round t."""
        return self.setting.lr * self.setting.lr_decay ** self.seams.age(t)

    def rates(self, K: int) -> list[float]:
        """What the rate is multiplied with in each step."""
        rate = getattr(self.method, "rate", lambda k, K: 1.0)
        return [rate(k, K) for k in range(K)]

    def run(self) -> Trace:
        """All rounds."""
        for t, cohort in enumerate(self.setting.cohorts):
            down = self.broadcast()
            self.serve([self.turn(t, position, i, down) for position, i in enumerate(cohort)], t)
        return self.trace

    def broadcast(self) -> Any:
        """What travels down."""
        down = self.method.broadcast(self.server)
        sent = self.seams.sent(down, down if self.before is None else self.before)
        self.before = down
        return sent

    def turn(self, t: int, position: int, i: int, down: Any) -> Any:
        """One client's round: what it sends; its model is in the trace."""
        method, seams, K, lr = self.method, self.seams, self.seams.steps(self.setting.local_steps), self.lr(t)
        old = self.state(position, i)
        client = tree_map(torch.clone, old)
        rates = self.rates(K)
        points = self.trace.points.setdefault((t + 1, i), [])
        model = self.last[1] if self.last else down.x
        start = seams.start(method.start(down, client), self.models.get(i, down.x), model).clone()
        x = start.clone()

        def grad(x: Any, fraction: float = 1.0, **teacher: Any) -> Any:
            if teacher.get("teacher") is not None:
                raise UserError(f"audit: {method.name} asks for a teacher's outputs, and a quadratic has none")
            at = seams.point(x, start)
            points.append(at.numpy().copy())
            return self.H[i] @ at - self.v[i]

        for rate in rates:
            x = x - lr * rate * seams.turned(method.direction(x.clone(), grad, *seams.seen(down, client, x)))
        told: dict[str, Any] = {"K": K, "lr": lr, "n": 1, "t": t, "seed": self.setting.seed, "client": i}
        if "mean_rate" in Local._fields:
            told["mean_rate"] = sum(rates) / max(1, K)
        up, kept = method.upload(x.clone(), down, client, seams.told(Local(**told)))
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
        S, N = len(ups), self.setting.clients
        mean = self.seams.mean(type(ups[0])(*(_mean(field) for field in zip(*ups, strict=True))), S, N)
        K, lr = self.setting.local_steps, self.lr(t)
        told: dict[str, Any] = {
            "t": t,
            "S": float(S),
            "N": float(N),
            "K": float(K),
            "lr": lr,
            "seed": self.setting.seed,
        }
        if "mean_rate" in Round._fields:
            told["mean_rate"] = sum(self.rates(K)) / K
        round = self.seams.counted(Round(**told))
        new = self.method.update(self.server, mean, round)
        settle = getattr(self.method, "settle", lambda client, mean, round: client)
        for position, i in enumerate(self.setting.cohorts[t]):
            owner = self.seams.owner(i, position)
            self.states[owner] = settle(self.states[owner], mean, round)
            self.note(t + 1, i, self.states[owner])
        self.server = self.seams.updated(self.server, new, mean, self.first)
        self.trace.add(t + 1, None, "x", self.server.x)
        self.note(t + 1, None, self.server)

    def note(self, round: int, client: int | None, tree: Any) -> None:
        """The vectors of a state, by name."""
        for name, value in vectors(tree).items():
            if name != "x" or client is not None:
                self.trace.add(round, client, f"state {name}", value)


def _mean(values: tuple[Any, ...]) -> Any:
    """The mean of tensors, or of NamedTuples of them."""
    if isinstance(values[0], tuple):
        return type(values[0])(*(_mean(each) for each in zip(*values, strict=True)))
    return torch.stack(values).mean(0)


def vectors(tree: Any, before: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a NamedTuple (of NamedTuples) by name, `base.h` inside of a wrapper.

    Example:
        >>> class Client(NamedTuple):
        ...     h: torch.Tensor
        >>> list(vectors(Client(torch.zeros(2))))
        ['h']
    """
    found: dict[str, torch.Tensor] = {}
    for name, value in zip(tree._fields, tree, strict=True):
        found |= vectors(value, f"{before}{name}.") if isinstance(value, tuple) else {before + name: value}
    return found
