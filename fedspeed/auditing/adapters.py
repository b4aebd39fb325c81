"""Somebody's code made to run: classes of one's own here, Flower's strategies and FL-Simulator's pairs elsewhere."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UserError
from ..methods.source import reason
from .trace import Trace, named, vector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..methods.base import Method
    from .reference import Reference
    from .setting import Setting

NEEDS = {
    "a class of your own": {
        "client(i, x, grad, t)": "client i's round t = 0, 1, ...: x_K, or a tuple (x_K, whatever else it sends)",
        "server(x, replies, t)": "the next model from the last one and {i: what client i returned}",
        "client_state(i), server_state()": "optional: {name: vector} under our names, compared after every round",
    },
    "a Flower strategy": {
        "aggregate_fit(server_round, results, failures)": "the next parameters from the clients' x_K; clients are ours",
    },
    "an FL-Simulator pair, `file.py:Server,Client`": {
        "Server: global_update(selected, mean_update, mean_model)": "the next model, a torch vector",
        "Server: process_for_communication(client, mean_update)": "fills self.comm_vecs",
        "Server: postprocess(client, received)": "optional",
        "Client: train()": "{'local_update_list': D, 'local_model_param_list': x_K}",
    },
}
"""What an adapter needs, by kind: `fedspeed audit --list`."""


class Subject:
    """What is audited: called by name, its errors told in one line.

    Args:
        name: of the class or file, for messages.
    """

    def __init__(self, name: str, setting: Setting, method: Method) -> None:
        self.name = name
        self.setting = setting
        self.method = method

    @contextmanager
    def during(self, what: str, t: int | None = None, i: int | None = None) -> Iterator[None]:
        """An exception of somebody's code as one line, with that code's own line."""
        try:
            yield
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            raise UserError(f"{self.where(what, t, i)} raised {reason(error)}") from error

    def where(self, what: str, t: int | None = None, i: int | None = None) -> str:
        """For messages: whose hook, when."""
        when = "" if t is None else f", round {t + 1}" + ("" if i is None else f", client {i}")
        return f"audit {self.name}{when}: {what}"

    def made(self, factory: Callable[..., Any], more: dict[str, Any] | None = None) -> Any:
        """An object from a class or function, which is given what it names: x0, the setting, the method's fields."""
        given = {**self.setting.fields(), **self.method.fields(), "x0": self.setting.x0.copy(), **(more or {})}
        try:
            wanted = inspect.signature(factory).parameters.values()
        except (TypeError, ValueError):
            wanted = inspect.signature(lambda: None).parameters.values()
        if any(one.kind is one.VAR_KEYWORD for one in wanted):
            options = given
        else:
            options = {one.name: given[one.name] for one in wanted if one.name in given}
        for one in wanted:
            missing = one.default is one.empty and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
            if missing and one.name not in options:
                raise UserError(
                    f"audit {self.name}: it asks for {one.name}, which is unknown; known are {', '.join(given)}"
                )
        with self.during("making it"):
            return factory(**options)

    def gradient(
        self, trace: Trace, t: int, i: int, handed: list[tuple[np.ndarray, np.ndarray]]
    ) -> Callable[[Any], np.ndarray]:
        """The gradient of client i's loss, which keeps the points at which it is asked for.

        Args:
            handed: takes every gradient as it is handed out, and a copy.
        """
        points = trace.points.setdefault((t + 1, i), [])

        def grad(x: Any) -> np.ndarray:
            at = vector(x, self.setting.dim, self.where("the point of grad(x)", t, i))
            points.append(at.copy())
            g = self.setting.gradient(i, at)
            handed.append((g, g.copy()))
            return g

        return grad


class Own(Subject):
    """A class of one's own: `client` and `server` on flat NumPy vectors."""

    def run(self, factory: Any, reference: Reference) -> Trace:
        """All rounds."""
        from .reference import vectors

        subject = self.made(factory) if callable(factory) else factory
        for hook in ("client", "server"):
            if not callable(getattr(subject, hook, None)):
                raise UserError(f"audit {self.name}: it needs {hook}(...); `fedspeed audit --list` says what of")
        trace, d, x = Trace(), self.setting.dim, self.setting.x0.copy()
        known = {
            "client_state": vectors(reference.method.init_client(reference.x0)),
            "server_state": vectors(reference.first),
        }
        for t, cohort in enumerate(self.setting.cohorts):
            replies = {}
            for i in cohort:
                handed: list[tuple[np.ndarray, np.ndarray]] = []
                with self.during("client", t, i):
                    replies[i] = subject.client(i, x.copy(), self.gradient(trace, t, i, handed), t)
                if not all(np.array_equal(*pair, equal_nan=True) for pair in handed):
                    trace.changed = trace.changed or f"round {t + 1}, client {i}"
                model = replies[i][0] if isinstance(replies[i], tuple) and replies[i] else replies[i]
                trace.add(t + 1, i, "x_K", vector(model, d, self.where("client returned x_K", t, i)))
            with self.during("server", t):
                x = subject.server(x.copy(), replies, t)
            x = vector(x, d, self.where("server returned", t)).copy()
            for i in cohort:
                self.note(subject, "client_state", trace, t, i, known["client_state"])
            trace.add(t + 1, None, "x", x)
            self.note(subject, "server_state", trace, t, None, known["server_state"])
        return trace

    def note(self, subject: Any, hook: str, trace: Trace, t: int, i: int | None, known: dict[str, Any]) -> None:
        """The states that it exports, if it does."""
        if not hasattr(subject, hook):
            return
        with self.during(hook, t, i):
            told = getattr(subject, hook)(*(() if i is None else (i,)))
        for name, value in named(told, self.where(hook, t, i), known).items():
            trace.add(t + 1, i, f"state {name}", value)


def kind_of(thing: Any) -> str:
    """Which kind of adapter a class or an object is: own, flower or simulator; "" for a function that makes one."""
    if isinstance(thing, tuple) or hasattr(thing, "global_update"):
        return "simulator"
    if hasattr(thing, "aggregate_fit"):
        return "flower"
    return "own" if isinstance(thing, type) or not callable(thing) else ""


def run_adapter(thing: Any, name: str, reference: Reference) -> Trace:
    """Run what is audited on the setting of a reference."""
    from .flower import Flower, parameters
    from .simulator import Simulator

    setting, method = reference.setting, reference.method
    kind = kind_of(thing)
    if not kind:
        made = Subject(name, setting, method).made(thing, {"initial_parameters": parameters([setting.x0])})
        if kind_of(made) == "" or made is None:
            raise UserError(
                f"audit {name}: expected an adapter, found {type(made).__name__}; see `fedspeed audit --list`"
            )
        return run_adapter(made, name, reference)
    kinds: dict[str, type[Own] | type[Flower] | type[Simulator]] = {
        "own": Own,
        "flower": Flower,
        "simulator": Simulator,
    }
    return kinds[kind](name, setting, method).run(thing, reference)
