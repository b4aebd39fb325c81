"""Audit of a user's implementation: it runs beside our method on small quadratics, and the first vector that differs is
reported, with the line of the method's pseudo-code that computes it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from ..client.trees import named, tree_leaves, tree_map
from ..data.problems import Quadratic, random_quadratic
from ..errors import UserError
from ..methods.base import Local, Method, Round
from ..methods.source import reason
from ..runs.simulate import as_method
from ..utils.checked_fields import Params, param
from ..utils.registry import file_of, load_code, require_part


@dataclass(frozen=True)
class Setting(Params):
    """A small federation: heterogeneous quadratics, full gradients, a rate that decays, partial participation.

    S, N, K and d are different numbers greater than 1, so that a mistake cannot hide behind equal ones.

    Example:
        >>> Setting(rounds=3).cohorts
        ((0, 1, 2), (0, 1, 3), (0, 1, 4))
    """

    rounds: int = param(6, "[1, 1000]", "the number of rounds")
    clients: int = param(5, "[1, 1000]", "N, the number of clients")
    active: int = param(3, "[1, 1000]", "S, the number of clients in each round")
    local_steps: int = param(4, "[1, 1000]", "K, the local steps of every client")
    lr: float = param(0.1, "(0, inf)", "the local rate eta_l of the first round")
    lr_decay: float = param(0.9, "(0, 1]", "the factor of the rate from a round to the next")
    dim: int = param(6, "[2, 50]", "d, the length of a vector")
    seed: int = param(0, "[0, inf)", "the seed of problem and cohorts")
    tolerance: float = param(1e-6, "(0, 0.1]", "the largest error, relative to numbers above 1, that is rounding")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.active > self.clients:
            raise UserError(f"audit: active must be at most clients, got active {self.active} of {self.clients}")

    @cached_property
    def problem(self) -> Quadratic:
        """The clients' losses."""
        return random_quadratic(self.clients, self.dim, 1, mu=0.2, sigma_g=2.0, shared=False, seed=self.seed)

    @cached_property
    def x0(self) -> np.ndarray:
        """The first model, away from 0 and from every optimum."""
        return np.random.default_rng([self.seed, 1]).normal(size=self.dim) + 1.0

    @cached_property
    def cohorts(self) -> tuple[tuple[int, ...], ...]:
        """The active clients of every round, in the order in which they run."""
        draw = np.random.default_rng([self.seed, 2])
        chosen = (draw.choice(self.clients, self.active, replace=False) for _ in range(self.rounds))
        return tuple(tuple(sorted(int(i) for i in each)) for each in chosen)

    def gradient(self, i: int, x: np.ndarray) -> np.ndarray:
        """Return grad F_i(x)."""
        return np.asarray(self.problem.H[i] @ x - self.problem.v[i])


class Key(NamedTuple):
    """Name of a vector: `client` is None for the server."""

    round: int  # from 1
    client: int | None
    what: str

    def __str__(self) -> str:
        return f"round {self.round}, {'server' if self.client is None else f'client {self.client}'}, {self.what}"


class Difference(NamedTuple):
    """The first vector that differs."""

    key: Key
    found: np.ndarray
    expected: np.ndarray
    error: float
    call: int = 0  # the first gradient of that turn that was asked for at another point, from 1; 0: none, or unknown
    calls: tuple[int, int] = (0, 0)  # gradients asked for in that turn: found, expected


class Trace:
    """The vectors of one run in the order of their computation, and the points where clients asked for gradients."""

    def __init__(self) -> None:
        self.vectors: dict[Key, np.ndarray] = {}
        self.points: dict[tuple[int, int], list[np.ndarray]] = {}
        self.changed = ""  # where a gradient that was handed out was first changed in place; "" for nowhere

    def add(self, round: int, client: int | None, what: str, value: Any) -> None:
        """Keep a copy of a vector."""
        array = value.detach().numpy() if hasattr(value, "detach") else value
        self.vectors[Key(round, client, what)] = np.array(array, dtype=np.float64)


def error(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference of two vectors, relative where the expected one has numbers above 1.

    Example:
        >>> error(np.array([1.0, 21.0]), np.array([1.0, 20.0]))
        0.05
    """
    return float(np.abs(found - expected).max() / max(1.0, np.abs(expected).max()))


def first_difference(found: Trace, expected: Trace, tolerance: float) -> Difference | None:
    """Return the first vector that differs between two runs; only vectors that both have are compared."""
    for key, value in found.vectors.items():
        wanted = expected.vectors.get(key)
        if wanted is None or error(value, wanted) <= tolerance:
            continue
        if key.client is None or not found.points:
            return Difference(key, value, wanted, error(value, wanted))
        theirs, ours = (trace.points.get((key.round, key.client), []) for trace in (found, expected))
        pairs = enumerate(zip(theirs, ours, strict=False), 1)
        call = next((k for k, (a, b) in pairs if error(a, b) > tolerance), 0)
        return Difference(key, value, wanted, error(value, wanted), call, (len(theirs), len(ours)))
    return None


class Reference:
    """Our own run of a method on a setting: its hooks in float64, one client's turn at a time."""

    def __init__(self, method: Method, setting: Setting) -> None:
        self.method = method
        self.setting = setting
        self.x0 = torch.from_numpy(setting.x0.copy())
        self.first = self.server = method.init_server(self.x0.clone())
        self.rates = [method.rate(k, setting.local_steps) for k in range(setting.local_steps)]
        self.states: dict[int, Any] = {}
        self.trace = Trace()

    def lr(self, t: int) -> float:
        """Return the local rate of round t."""
        return self.setting.lr * self.setting.lr_decay**t

    def run(self) -> Trace:
        """Run all rounds."""
        for t, cohort in enumerate(self.setting.cohorts):
            down = self.method.broadcast(self.server)
            self.serve([self.turn(t, i, down) for i in cohort], t)
        return self.trace

    def turn(self, t: int, i: int, down: Any) -> Any:
        """Run one client's round and return its upload; its model is in the trace."""
        method, K, lr = self.method, self.setting.local_steps, self.lr(t)
        client = tree_map(torch.clone, self.states[i] if i in self.states else method.init_client(self.x0))
        x = method.start(down, client).clone()
        points = self.trace.points.setdefault((t + 1, i), [])

        def grad(x: torch.Tensor, fraction: float = 1.0, **teacher: Any) -> torch.Tensor:
            if teacher.get("teacher") is not None:
                raise UserError(f"audit: {method.name} asks for a teacher's outputs, and a quadratic has none")
            points.append(x.numpy().copy())
            return torch.from_numpy(self.setting.gradient(i, points[-1]))

        for rate in self.rates:
            x = x - lr * rate * method.direction(x.clone(), grad, down, client)
        local = Local(K, lr, 1, t, self.setting.seed, i, mean_rate=sum(self.rates) / K)
        up, self.states[i] = method.upload(x.clone(), down, client, local)
        self.trace.add(t + 1, i, "x_K", x)
        return up

    def serve(self, ups: list[Any], t: int) -> None:
        """Run the server's part of a round, and the clients' `settle`."""
        method, K, N = self.method, self.setting.local_steps, self.setting.clients
        means = (torch.stack(vectors).mean(0) for vectors in zip(*map(tree_leaves, ups), strict=True))
        mean = tree_map(lambda _: next(means), ups[0])
        rate = sum(self.rates) / K
        round = Round(t, float(len(ups)), float(N), float(K), self.lr(t), self.setting.seed, mean_rate=rate)
        self.server = method.update(self.server, mean, round)
        for i in self.setting.cohorts[t]:
            self.states[i] = method.settle(self.states[i], mean, round)
            self.note(t + 1, i, self.states[i])
        self.trace.add(t + 1, None, "x", self.server.x)
        self.note(t + 1, None, self.server)

    def note(self, round: int, client: int | None, tree: Any) -> None:
        """Put the vectors of a state into the trace, by name."""
        for name, value in named("", tree):
            if name != "x" or client is not None:
                self.trace.add(round, client, f"state {name}", value)


class Subject:
    """A user's class with `client` and `server` on flat NumPy vectors, in the setting of our run.

    Its errors become one line, with the class or file as its `name`.
    """

    def __init__(self, name: str, reference: Reference) -> None:
        self.name = name
        self.reference = reference
        self.setting = reference.setting
        self.method = reference.method

    def run(self, adapter: Any) -> Trace:
        """Run all rounds of a class, of a function that makes an object, or of an object."""
        subject = self.made(adapter) if callable(adapter) else adapter
        if subject is None:
            raise UserError(f"audit {self.name}: expected an adapter, found NoneType; see `fedspeed audit --list`")
        for hook in ("client", "server"):
            if not callable(getattr(subject, hook, None)):
                raise UserError(f"audit {self.name}: it needs {hook}(...); see `fedspeed audit --list`")
        trace, x = Trace(), self.setting.x0.copy()
        for t, cohort in enumerate(self.setting.cohorts):
            replies = {i: self.turn(subject, t, i, x, trace) for i in cohort}
            with self.during("server", t):
                x = subject.server(x.copy(), replies, t)
            x = vector(x, self.setting.dim, self.where("server returned", t)).copy()
            for i in cohort:
                self.note(subject, "client_state", trace, t, i, self.method.init_client(self.reference.x0))
            trace.add(t + 1, None, "x", x)
            self.note(subject, "server_state", trace, t, None, self.reference.first)
        return trace

    def turn(self, subject: Any, t: int, i: int, x: np.ndarray, trace: Trace) -> Any:
        """Return client i's reply of round t; its model goes into the trace."""
        points = trace.points.setdefault((t + 1, i), [])
        handed: list[tuple[np.ndarray, np.ndarray]] = []  # every gradient as it was handed out, and a copy

        def grad(y: Any) -> np.ndarray:
            at = vector(y, self.setting.dim, self.where("the point of grad(x)", t, i))
            points.append(at.copy())
            g = self.setting.gradient(i, at)
            handed.append((g, g.copy()))
            return g

        with self.during("client", t, i):
            reply = subject.client(i, x.copy(), grad, t)
        if not all(np.array_equal(*pair, equal_nan=True) for pair in handed):
            trace.changed = trace.changed or f"round {t + 1}, client {i}"
        model = reply[0] if isinstance(reply, tuple) and reply else reply
        trace.add(t + 1, i, "x_K", vector(model, self.setting.dim, self.where("client returned x_K", t, i)))
        return reply

    def note(self, subject: Any, hook: str, trace: Trace, t: int, i: int | None, tree: Any) -> None:
        """Put the states that it exports into the trace; `tree` has their names and lengths."""
        if not hasattr(subject, hook):
            return
        with self.during(hook, t, i):
            states = getattr(subject, hook)(*(() if i is None else (i,)))
        where, known = self.where(hook, t, i), dict(named("", tree))
        if not isinstance(states, Mapping):
            raise UserError(f"{where}: expected a dict of vectors by name, found {type(states).__name__}")
        for name, value in states.items():
            if name not in known:
                raise UserError(f"{where}: no state is called {name!r}; this method has {', '.join(known) or 'none'}")
            trace.add(t + 1, i, f"state {name}", vector(value, len(known[name]), f"{where}, {name}"))

    @contextmanager
    def during(self, what: str, t: int | None = None, i: int | None = None) -> Iterator[None]:
        """Turn an exception of the user's code into one line, with that code's own line."""
        try:
            yield
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            raise UserError(f"{self.where(what, t, i)} raised {reason(error)}") from error

    def where(self, what: str, t: int | None = None, i: int | None = None) -> str:
        """Return whose hook was called when, for messages."""
        when = "" if t is None else f", round {t + 1}" + ("" if i is None else f", client {i}")
        return f"audit {self.name}{when}: {what}"

    def made(self, factory: Callable[..., Any]) -> Any:
        """Call a class or function with the arguments it names: x0, the setting's and the method's fields."""
        given = {**self.setting.fields(), **self.method.fields(), "x0": self.setting.x0.copy()}
        with self.during("reading its arguments"):
            wanted = inspect.signature(factory).parameters.values()
        takes_all = any(one.kind is one.VAR_KEYWORD for one in wanted)
        options = given if takes_all else {one.name: given[one.name] for one in wanted if one.name in given}
        for one in wanted:
            missing = one.default is one.empty and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
            if missing and one.name not in options:
                known = ", ".join(given)
                raise UserError(f"audit {self.name}: it asks for {one.name}, which is unknown; known are {known}")
        with self.during("making it"):
            return factory(**options)


def vector(value: Any, d: int, where: str) -> np.ndarray:
    """Return a flat finite vector of length d from what the user's code returned."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    try:
        array = np.asarray(value, dtype=np.float64)
    except (TypeError, ValueError):
        raise UserError(f"{where}: expected a vector of {d} numbers, found {type(value).__name__}") from None
    if array.shape != (d,):
        raise UserError(f"{where}: expected a vector of shape ({d},), found {array.shape}; flatten the model first")
    if not np.isfinite(array).all():
        raise UserError(f"{where}: NaN or Inf; it diverged, so there is nothing to compare: try a lower --lr")
    return array


@dataclass(frozen=True, eq=False)
class Audit:
    """The verdict on an implementation.

    Args:
        compared: how many vectors were compared.
        first: the first difference; None if it conforms.
        changed: where it first changed in place a gradient that it was handed; "" for nowhere. Here every call gives a
            fresh vector, so this is not a difference; it is one wherever gradients share memory.
    """

    subject: str
    method: Method
    setting: Setting
    compared: int
    first: Difference | None
    changed: str = ""

    @property
    def conforms(self) -> bool:
        """Whether all numbers are ours."""
        return self.first is None

    @property
    def lines(self) -> list[str]:
        """The lines of the method's pseudo-code that compute the first difference; all lines if none matches."""
        if self.first is None:
            return []
        box = (inspect.getdoc(type(self.method)) or "").split("\n\n")[1:2]  # the paragraph after the first line
        rows = [row.strip() for text in box for row in text.splitlines()]
        wanted = {"x_K": "k+1", "x": "x^{t+1}"}.get(self.first.key.what, self.first.key.what.removeprefix("state "))
        return [row for row in rows if wanted in row] or rows

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON takes it."""
        first = self.first and {
            **self.first.key._asdict(), "found": self.first.found.tolist(), "expected": self.first.expected.tolist(),
            "error": self.first.error, "gradient_call": self.first.call or None,
            "gradient_calls": dict(zip(("found", "expected"), self.first.calls, strict=True)), "lines": self.lines,
        }  # fmt: skip
        return {
            "subject": self.subject, "method": self.method.to_dict(), "setting": self.setting.fields(),
            "conforms": self.conforms, "compared": self.compared, "first_difference": first,
            "gradient_changed_in_place": self.changed or None,
        }  # fmt: skip

    def __str__(self) -> str:
        s, fields = self.setting, self.method.fields()
        shown = ", ".join(f"{key} {value}" for key, value in fields.items() if not isinstance(value, Method))
        about = (
            f"{self.subject} beside {self.method.label} ({shown}): {s.rounds} rounds, {s.active} of {s.clients} "
            f"clients, K = {s.local_steps}, lr {s.lr:g} x {s.lr_decay:g}^t"
        )
        if self.first is None:
            verdict = [f"conforms: {self.compared} vectors, all equal within {s.tolerance:g}"]
        else:
            box = [f"    {line}" for line in self.lines]
            verdict = [f"DIFFERS first in {self.first.key}", *_numbers(self.first)]
            verdict += [f"  in the box of {self.method.label}:", *box] if box else []
        if self.changed:
            verdict.append(
                f"note: {self.changed}: it changes the gradient it is handed in place: right here, where every call "
                "gives a fresh vector; wrong where gradients share memory (p.grad); copy it first"
            )
        return "\n".join([about, *verdict])


def _numbers(first: Difference) -> list[str]:
    """Return lines that say by how much two vectors differ, and where in a client's turn."""
    i = int(np.abs(first.found - first.expected).argmax())
    lines = [f"  found    {_shown(first.found)}", f"  expected {_shown(first.expected)}",
             f"  largest error {first.error:.3g}, in entry {i}"]  # fmt: skip
    theirs, ours = first.calls
    if theirs != ours and ours:
        lines.append(f"  gradients asked for in that turn: {theirs}, expected {ours}")
    if first.call:
        lines.append(f"  gradient {first.call} of that turn is the first that is asked for at another point")
    elif ours and theirs == ours:
        lines.append("  all gradients of that turn were asked for at the right points: the last step differs")
    return lines


def _shown(v: np.ndarray) -> str:
    return "[" + ", ".join(f"{a:.6g}" for a in v[:6]) + (", ..." if len(v) > 6 else "") + "]"


def audit(adapter: Any, method: Method | type[Method] | str = "fedavg", **settings: Any) -> Audit:
    """Run a user's implementation of a method beside ours.

    Args:
        adapter: a class with `client` and `server`, a function that makes such an object, or `path/to/file.py:NAME`,
            whose code is executed; `fedspeed audit --list` has the hooks.
        method: what it should be, for example `FedSpeed(lam=10)`.
        settings: fields of `Setting`: rounds, clients, active, local_steps, lr, lr_decay, dim, seed, tolerance.

    Returns:
        An `Audit`: `.conforms`, `.first` (the first difference), `.lines` (of the method's box); `print` shows it all.

    Example:
        >>> class Mine:
        ...     def __init__(self, lr):
        ...         self.lr = lr
        ...     def client(self, i, x, grad, t):
        ...         return x - self.lr * grad(x)  # one local step, not K
        ...     def server(self, x, replies, t):
        ...         return sum(replies.values()) / len(replies)
        >>> print(audit(Mine, "fedavg").first.key)
        round 1, client 0, x_K
    """
    setting, ours = Setting.from_fields(settings), as_method(method)
    ours.check(setting.lr, setting.active, setting.clients)
    if isinstance(adapter, str):
        require_part("adapter", adapter)
        if not file_of(adapter) or adapter.endswith(":"):
            raise UserError(f"audit: expected path/to/file.py:Class, got {adapter!r}")
        thing, name = load_code("adapter", adapter), adapter
    else:
        thing, name = adapter, getattr(adapter, "__name__", type(adapter).__name__)
    reference = Reference(ours, setting)
    expected = reference.run()
    if not all(np.isfinite(value).all() for value in expected.vectors.values()):
        raise UserError(f"audit: our own {ours.name} diverges in this setting; try a lower lr (now {setting.lr:g})")
    theirs = Subject(name, reference).run(thing)
    first = first_difference(theirs, expected, setting.tolerance)
    compared = len(theirs.vectors.keys() & expected.vectors.keys())
    return Audit(name, ours, setting, compared, first, theirs.changed)
