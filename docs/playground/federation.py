"""A federation of two-dimensional quadratics for a browser: a vector type, the local loop and the server's round.

The methods are the package's own files; here is what they need around them, in plain Python. `Vec` has the operators
that methods use of torch's vectors. `Federation.round` mirrors `client.run_client` and `server.Simulation`: exact
gradients, no weight decay, float64. tests/docs/test_playground.py holds it against the package.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

from fedspeed.methods.base import Local, Round

FAR = 1e6  # a model further out than this is not drawn any more


class Vec:
    """A vector of a few numbers. One of length 1 goes with any other, as in torch; names with _ work in place."""

    ndim = 1
    dtype = float

    def __init__(self, numbers: Any) -> None:
        self.a = [float(number) for number in numbers]

    def __repr__(self) -> str:
        return f"Vec({self.a})"

    @property
    def shape(self) -> tuple[int]:
        return (len(self.a),)

    def _with(self, other: Any, f: Any) -> Vec:
        a, b = self.a, other.a if isinstance(other, Vec) else [float(other)]
        n = max(len(a), len(b))
        a, b = (v * n if len(v) == 1 else v for v in (a, b))
        return Vec([f(p, q) for p, q in zip(a, b, strict=True)])

    def _now(self, result: Vec) -> Vec:
        assert len(result.a) == len(self.a)
        self.a = result.a
        return self

    def __add__(self, other: Any) -> Vec:
        return self._with(other, lambda p, q: p + q)

    def __sub__(self, other: Any) -> Vec:
        return self._with(other, lambda p, q: p - q)

    def __rsub__(self, other: Any) -> Vec:
        return self._with(other, lambda p, q: q - p)

    def __mul__(self, other: Any) -> Vec:
        return self._with(other, lambda p, q: p * q)

    def __truediv__(self, other: Any) -> Vec:
        return self._with(other, _divided)

    def __rtruediv__(self, other: Any) -> Vec:
        return self._with(other, lambda p, q: _divided(q, p))

    def __pow__(self, other: Any) -> Vec:
        return self._with(other, lambda p, q: p**q)

    def __gt__(self, other: Any) -> Vec:
        return self._with(other, lambda p, q: float(p > q))

    def __neg__(self) -> Vec:
        return Vec([-p for p in self.a])

    __radd__ = __add__
    __rmul__ = __mul__

    def add_(self, other: Any, alpha: float = 1.0) -> Vec:
        return self._now(self._with(other, lambda p, q: p + alpha * q))

    def sub_(self, other: Any, alpha: float = 1.0) -> Vec:
        return self._now(self._with(other, lambda p, q: p - alpha * q))

    def mul_(self, other: Any) -> Vec:
        return self._now(self * other)

    def sqrt(self) -> Vec:
        return Vec([math.sqrt(p) for p in self.a])

    def sign(self) -> Vec:
        return Vec([float(p > 0) - float(p < 0) for p in self.a])

    def clamp(self, least: float, most: float) -> Vec:
        return Vec([min(max(p, least), most) for p in self.a])

    def sum(self, dim: int = -1, keepdim: bool = True) -> Vec:
        return Vec([sum(self.a)])

    def norm(self, dim: int = -1, keepdim: bool = True) -> Vec:
        return Vec([math.hypot(*self.a)])

    def clone(self) -> Vec:
        return Vec(self.a)

    def to(self, dtype: Any) -> Vec:
        return self

    def new_full(self, shape: int | tuple[int, ...], value: float) -> Vec:
        return Vec([value] * (shape if isinstance(shape, int) else shape[-1]))

    def new_zeros(self, shape: int | tuple[int, ...]) -> Vec:
        return self.new_full(shape, 0.0)

    def new_ones(self, shape: int | tuple[int, ...]) -> Vec:
        return self.new_full(shape, 1.0)

    def expand_as(self, other: Vec) -> Vec:
        return self if len(self.a) == len(other.a) else other.new_full(other.shape, self.a[0])

    def split(self, size: int) -> tuple[Vec, ...]:
        return (self,)  # in one piece, and no copy: what is done in place to a piece is done to the whole


def _divided(p: float, q: float) -> float:
    """Divide as IEEE and torch do; Python would raise."""
    return p / q if q else math.nan if p == 0 or p != p else math.copysign(math.inf, p) * math.copysign(1.0, q)


def tree_map(f: Any, *trees: Any) -> Any:
    """Apply f to the vectors that stand in the same place of NamedTuples (of NamedTuples)."""
    return type(trees[0])(*(tree_map(f, *a) if isinstance(a[0], tuple) else f(*a) for a in zip(*trees, strict=True)))


class Quadratic(NamedTuple):
    """F(x) = 1/2 (x - optimum)' H (x - optimum), H = [[a, b], [b, c]]."""

    optimum: tuple[float, float]
    a: float
    b: float
    c: float

    def gradient(self, x: Vec) -> Vec:
        """Return grad F(x), a new vector."""
        u, v = (p - o for p, o in zip(x.a, self.optimum, strict=True))
        return Vec([self.a * u + self.b * v, self.b * u + self.c * v])

    def value(self, x: Vec) -> float:
        """Return F(x)."""
        u, v = (p - o for p, o in zip(x.a, self.optimum, strict=True))
        return 0.5 * (self.a * u * u + self.c * v * v) + self.b * u * v


def optimum(clients: list[Quadratic]) -> list[float]:
    """Return the optimum of the mean loss: (sum H_i) x = sum H_i x_i*."""
    a, b, c = (sum(getattr(client, name) for client in clients) for name in "abc")
    u = sum(client.a * client.optimum[0] + client.b * client.optimum[1] for client in clients)
    v = sum(client.b * client.optimum[0] + client.c * client.optimum[1] for client in clients)
    return [(c * u - b * v) / (a * c - b * b), (a * v - b * u) / (a * c - b * b)]


def cohort(seed: int, t: int, clients: int, active: int) -> list[int]:
    """Return the active clients of round t, in order: drawn without replacement by a small generator (Lehmer's)."""
    state = (seed * 1000003 + t * 7919 + 12345) % 2147483647 or 1
    left = list(range(clients))
    for k in range(clients):
        for _ in range(3):
            state = state * 48271 % 2147483647
        j = k + state % (clients - k)
        left[k], left[j] = left[j], left[k]
    return sorted(left[:active])


class Happened(NamedTuple):
    """A round as it is drawn."""

    cohort: list[int]
    paths: dict[int, list[list[float]]]  # of every active client: x_i0, ..., x_iK


class Federation:
    """A run: a method over clients, round by round.

    Args:
        method: an instance of one of the package's classes.
        clients: their losses.
        x0: the first model.
        K, lr: local steps and their rate.
    """

    def __init__(self, method: Any, clients: list[Quadratic], x0: list[float], K: int, lr: float) -> None:
        self.method, self.clients, self.K, self.lr = method, clients, K, lr
        self.t = 0
        self.x0 = Vec(x0)
        self.states: dict[int, Any] = {}
        self.server = method.init_server(self.x0.clone())

    def round(self, cohort: list[int]) -> Happened:
        """Run one round of these clients."""
        method, clones = self.method, {}
        down = method.broadcast(self.server)
        paths, mean = {}, None
        for i in cohort:
            paths[i], up, clones[i] = self.turn(i, tree_map(Vec.clone, down), len(cohort))
            mean = up if mean is None else tree_map(lambda total, a: total + a, mean, up)
        S, rates = float(len(cohort)), [method.rate(k, self.K) for k in range(self.K)]
        mean = tree_map(lambda a: a / S, mean)
        facts = Round(
            self.t, S, float(len(self.clients)), self.K, self.lr, active=len(cohort), mean_rate=sum(rates) / self.K
        )
        mean = method.received(mean, facts)
        for i in cohort:
            self.states[i] = method.settle(clones[i], mean, facts)
        self.server = method.update(self.server, mean, facts)
        self.t += 1
        return Happened(cohort, paths)

    def turn(self, i: int, down: Any, active: int) -> tuple[list[list[float]], Any, Any]:
        """Run K steps of client i; return its path, its upload and its new state."""
        method, loss = self.method, self.clients[i]

        def grad(x: Vec, fraction: float = 1.0) -> Vec:
            return loss.gradient(x)

        client = tree_map(Vec.clone, self.states.get(i) or method.init_client(self.x0))
        x = method.start(down, client).clone()
        path, rates = [list(x.a)], []
        for k in range(self.K):
            rates.append(method.rate(k, self.K))
            x.sub_(method.direction(x, grad, down, client), alpha=self.lr * rates[-1])
            path.append(list(x.a))
        run = Local(self.K, self.lr, 1, self.t, client=i, active=active, mean_rate=sum(rates) / self.K)
        up, kept = method.upload(x, down, client, run)
        return path, tree_map(Vec.clone, up), kept

    @property
    def x(self) -> list[float]:
        """The server's model."""
        return list(self.server.x.a)

    @property
    def lost(self) -> bool:
        """Whether the model has diverged."""
        return not all(abs(p) < FAR for p in self.x)

    def duals(self) -> dict[int, list[float]]:
        """Return the clients' duals, estimates of their gradients, with the sign of a step downhill.

        h_i / lam of a prox method (h_i = q_i + H in A-FedPD), -c_i of one with control variates: both become
        -grad F_i(x*) where the method converges. Empty for a method that keeps neither.
        """
        found = {}
        for i, client in self.states.items():
            if hasattr(client, "h"):
                found[i] = (client.h * self.method.shrink).a
            elif hasattr(client, "q"):
                found[i] = ((client.q + self.server.H) * self.method.shrink).a
            elif hasattr(client, "c"):
                found[i] = (-client.c).a
        return found


def warned(method: Any, lr: float, active: int, clients: int) -> str:
    """Return a method's warning before a run, or ""; raise a UserError where it refuses the run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        method.check(lr, active, clients)
    return str(caught[0].message) if caught else ""
