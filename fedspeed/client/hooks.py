"""Checked calls of a method's hooks: the contract of `methods/base.py`; an error names the user's own line.

The checks look at types, shapes, dtypes and version counters of tensors. They cost microseconds, so every call is
checked, not only those of the first round.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from numbers import Real
from typing import Any

import torch

from ..errors import Diverged, UserError
from ..methods.base import Grad, Local, Method, Round, dense_bytes, nested
from ..methods.source import defined, reason
from ..utils.devices import version
from .trees import Fields, all_finite, fields_of, kind, named, shape_text

REQUIRED = ("init_server", "broadcast", "direction", "upload", "update")


class Hooks:
    """A method's hooks as the engines call them: each checks the returned value, and that no argument was changed.

    Args:
        d, dtype: of the model's vector; the server's has the same length and a dtype of its own.
    """

    def __init__(self, method: Method, d: int, dtype: torch.dtype) -> None:
        self.method = method
        self.d = d
        self.dtype = dtype
        self._up: Fields = []  # fields of the first upload; all others must have the same
        hooks = ("metrics", "client_metrics", "sent", "settle", "received", "rate")
        self.overridden = {hook for hook in hooks if overrides(method, hook)}

    def expect(self, up: Any) -> None:
        """Require the fields of this upload of all others."""
        self._up[:] = fields_of(up)

    def with_method(self, method: Method) -> Hooks:
        """Return the hooks of the same method with other values of its fields; uploads must have the same fields."""
        other = copy.copy(self)
        other.method = method
        return other

    def init_server(self, x0: torch.Tensor) -> Any:
        """Return the server's first state: a NamedTuple with a field x."""
        with self.hook("init_server"), self._forbid_mutation("init_server", x0=x0):
            server = self.method.init_server(x0)
        return self._declared("init_server", self._tree("init_server", server, x0.dtype, named_x=True))

    def init_client(self, x0: torch.Tensor) -> Any:
        """Return a client's first state: a NamedTuple, perhaps empty."""
        with self.hook("init_client"), self._forbid_mutation("init_client", x0=x0):
            client = self.method.init_client(x0)
        return self._declared("init_client", self._tree("init_client", client, x0.dtype))

    def broadcast(self, server: Any) -> Any:
        """Return the server's message: a NamedTuple with a field x."""
        with self.hook("broadcast"), self._forbid_mutation("broadcast", server=server):
            down = self.method.broadcast(server)
        return self._tree("broadcast", down, server.x.dtype, named_x=True)

    def start(self, down: Any, client: Any) -> torch.Tensor:
        """Return the first point of the local work: one vector, in a block perhaps one per row."""
        with self._forbid_mutation("start", down=down):
            x = self.method.start(down, client)
        self._vector("start", x, (self.d,) if isinstance(x, torch.Tensor) and x.ndim == 1 else (-1, self.d))
        return x

    def direction(self, x: torch.Tensor, grad: Grad, down: Any, client: Any) -> torch.Tensor:
        """Return one direction per point of x."""
        with self._forbid_mutation("direction", down=down, x=x):
            direction = self.method.direction(x, grad, down, client)
        self._vector("direction", direction, tuple(x.shape))
        return direction

    def rates(self, K: int, done: int) -> list[float]:
        """Return the factors on the rate for the first `done` of K planned steps."""
        if "rate" not in self.overridden:
            return [1.0] * done
        with self._forbid_mutation("rate"):
            reported = [self.method.rate(k, K) for k in range(done)]
        good: list[float] = []
        for k, given in enumerate(reported):
            rate = number(given)
            if rate is None or not 0 <= rate < math.inf:
                raise self._error("rate", f"must return a number >= 0, found {kind(given)} in step {k} of {K}")
            good.append(rate)
        if not any(good):
            steps = f"a round's {K} steps" if done == K else f"the {done} of {K} steps that a straggler takes"
            raise self._error("rate", f"must not be 0 in all of {steps}")
        return good

    def upload(self, xK: torch.Tensor, down: Any, client: Any, run: Local) -> tuple[Any, Any]:
        """Return the upload, always with the same fields, and the state to keep, with the fields it had."""
        with self._forbid_mutation("upload", down=down):
            both = self.method.upload(xK, down, client, run)
        if not isinstance(both, tuple) or hasattr(both, "_fields") or len(both) != 2:
            raise self._error("upload", f"must return a pair (Up, Client), found {kind(both)}")
        up, kept = both
        rows = len(xK) if xK.ndim == 2 else 0
        self._tree("upload", up, self.dtype, rows=rows, what="Up")
        self._tree("upload", kept, self.dtype, rows=rows, what="Client")
        sent = fields_of(up)
        if not self._up:
            self._up[:] = sent
        self._alike("upload", "Up", sent, self._up, "as the first client's")
        self._alike("upload", "Client", fields_of(kept), fields_of(client), "as before the round")
        return up, kept

    def sent(self, up: Any) -> int:
        """Return the bytes of one client's upload."""
        if "sent" not in self.overridden:
            return dense_bytes(up)
        with self._forbid_mutation("sent", up=up):
            size = self.method.sent(up)
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise self._error("sent", f"must return a whole number of bytes >= 0, found {kind(size)}")
        return size

    def received(self, mean: Any, round: Round) -> Any:
        """Return the mean of the uploads as the server uses it, with the same fields."""
        if "received" not in self.overridden:
            return mean
        with self.hook("received", f"round {round.t + 1}"):
            new = self.method.received(mean, round)
        self._tree("received", new, next(a.dtype for _, a in named("", mean)), what="Up")
        self._alike("received", "Up", fields_of(new), fields_of(mean), "as was sent")
        return new

    def settle(self, client: Any, mean: Any, round: Round) -> Any:
        """Return the state to store of a counted client, with the fields it had."""
        with self.hook("settle", f"round {round.t + 1}"), self._forbid_mutation("settle", mean=mean):
            kept = self.method.settle(client, mean, round)
        self._tree("settle", kept, self.dtype, what="Client")
        self._alike("settle", "Client", fields_of(kept), fields_of(client), "as `upload` returned it")
        if not all_finite(kept):
            place = defined(self.method, "settle")
            raise Diverged(f"{self._name('settle')}: round {round.t + 1}: a client's state became NaN or Inf ({place})")
        return kept

    def update(self, server: Any, mean: Any, round: Round) -> Any:
        """Return the next server state, with the fields it had."""
        with self.hook("update", f"round {round.t + 1}"), self._forbid_mutation("update", server=server):
            new = self.method.update(server, mean, round)
        self._tree("update", new, server.x.dtype, named_x=True)
        self._alike("update", "Server", fields_of(new), fields_of(server), "as before the round")
        return new

    def client_metrics(self, xK: torch.Tensor, down: Any, client: Any, run: Local) -> dict[str, float] | None:
        """Return names and numbers about one client; None from a method that reports none."""
        if "client_metrics" not in self.overridden:
            return None
        with self._forbid_mutation("client_metrics", xK=xK, down=down, client=client):
            reported = self.method.client_metrics(xK, down, client, run)
        return numbers(reported, partial(self._error, "client_metrics"))

    def metrics(self, server: Any, mean: Any, round: Round) -> dict[str, float]:
        """Return names and numbers about a round, after its update."""
        if "metrics" not in self.overridden:
            return {}
        with self.hook("metrics", f"round {round.t + 1}"), self._forbid_mutation("metrics", server=server):
            reported = self.method.metrics(server, mean, round)
        return numbers(reported, partial(self._error, "metrics"))

    @contextmanager
    def hook(self, hook: str, when: str = "before round 1") -> Iterator[None]:
        """Turn an exception of a server's hook into one line; the engine does it for a client's hooks."""
        try:
            yield
        except (UserError, Diverged):
            raise
        except (Exception, SystemExit) as error:
            raise UserError(f"{self._name(hook)}: {when}: {reason(error)}") from error

    @contextmanager
    def _forbid_mutation(self, hook: str, **given: Any) -> Iterator[None]:
        """Raise if a hook changed one of these arguments in place."""
        before = [(name, a, version(a)) for name, tree in given.items() for name, a in named(name, tree)]
        try:
            yield
        except SystemExit as error:  # else a hook could end a run without a message
            raise self._error(hook, "must not end the program (SystemExit)") from error
        for name, a, then in before:
            if version(a) != then:
                why = "a round that fails leaves it as it was" if name.startswith("server") else "others see it too"
                raise self._error(hook, f"must not change {name} in place: {why}; work on a copy, {name}.clone()")

    def _vector(self, hook: str, value: Any, shape: tuple[int, ...]) -> None:
        if not isinstance(value, torch.Tensor):
            fix = "; is there a return?" if value is None else ""
            raise self._error(hook, f"must return a vector, found {kind(value)}{fix}")
        if value.ndim != len(shape) or any(b not in (a, -1) for a, b in zip(value.shape, shape, strict=True)):
            raise self._error(
                hook, f"must return a vector of shape {shape_text(shape)}, found {shape_text(value.shape)}"
            )
        self._dtype(hook, "a vector", value, self.dtype)

    def _dtype(self, hook: str, what: str, a: torch.Tensor, dtype: torch.dtype) -> None:
        if a.requires_grad:
            raise self._error(hook, f"must return {what} without a graph behind it; .detach() it")
        if a.dtype != dtype:
            raise self._error(hook, f"must return {what} of {dtype}, found {a.dtype}; convert with .to(x.dtype)")

    def _tree(
        self, hook: str, tree: Any, dtype: torch.dtype, *, rows: int = 0, named_x: bool = False, what: str = ""
    ) -> Any:
        """Return a value; raise unless it is a NamedTuple (of NamedTuples) of vectors."""
        if not isinstance(tree, tuple) or not hasattr(tree, "_fields"):
            fix = "; is there a return?" if tree is None else ""
            raise self._error(hook, f"must return a NamedTuple{what and ' as ' + what}, found {kind(tree)}{fix}")
        if named_x and "x" not in tree._fields:
            raise self._error(hook, f"must return a NamedTuple with a field x, found {', '.join(tree._fields) or '-'}")
        for name, value in zip(tree._fields, tree, strict=True):
            place = f"{what or type(tree).__name__}.{name}"
            if isinstance(value, tuple):
                self._tree(hook, value, dtype, rows=rows, what=place)
                continue
            if not isinstance(value, torch.Tensor):
                raise self._error(hook, f"must return tensors, found {place} = {kind(value)}; use x.new_full((1,), v)")
            per_row = rows and value.ndim == 2 and len(value) == rows
            if value.ndim != 1 and not per_row:
                raise self._error(
                    hook, f"must return vectors (one axis), found {place} of shape {shape_text(value.shape)}; "
                    f"a single number is of shape (1)"
                )  # fmt: skip
            self._dtype(hook, place, value, dtype)
            if named_x and name == "x" and len(value) != self.d:
                raise self._error(hook, f"must return x of shape ({self.d}), found {shape_text(value.shape)}")
        return tree

    def _declared(self, hook: str, tree: Any) -> Any:
        """Return a first state; raise unless it has the field that `running_mean` names."""
        with self.hook("running_mean"):
            pair = self.method.running_mean
        if pair is None:
            return tree
        fields = [name for name, _ in named("", tree)]
        if not isinstance(pair, tuple) or len(pair) != 2 or pair[hook == "init_server"] not in fields:
            raise UserError(
                f"{type(self.method).__name__}.running_mean must be None or a pair (field of the client, field of the "
                f"server), found {pair!r} where {hook} has {', '.join(fields) or 'no field'} ({defined(self.method)})"
            )
        return tree

    def _alike(self, hook: str, what: str, found: Fields, expected: Fields, when: str) -> None:
        """Raise unless two trees have the same fields of the same lengths."""
        if found == expected:
            return
        words = [", ".join(f"{name} ({n})" for name, n in fields) or "no field" for fields in (expected, found)]
        raise self._error(hook, f"must return a {what} with {words[0]}, {when}; found {words[1]}")

    def _name(self, hook: str) -> str:
        return f"{type(self.method).__name__}.{hook}"

    def _error(self, hook: str, message: str) -> UserError:
        return UserError(f"{self._name(hook)} {message} ({defined(self.method, hook)})")


def require_hooks(method: Method) -> None:
    """Raise if a method, or one that it wraps, lacks a hook that it must have."""
    for each, hook in itertools.product(nested(method), REQUIRED):
        if getattr(type(each), hook) is getattr(Method, hook):
            names = ", ".join(inspect.signature(getattr(Method, hook)).parameters)
            raise UserError(
                f"{type(each).__name__} has no hook `{hook}`; write `def {hook}({names})` as in docs/guides/methods.md "
                f"({defined(each)})"
            )


def overrides(method: Method, hook: str) -> bool:
    """Return whether a method, or one inside it, overrides an optional hook (`metrics`, `sent`, `settle`, ...)."""
    owner = next((cls for cls in type(method).__mro__ if hook in vars(cls)), Method)
    inner = [value for value in method.fields().values() if isinstance(value, Method)]
    if inner and hook in vars(owner).get("hands_on", ()):  # a wrapper whose own hook only calls the inner one
        return any(overrides(each, hook) for each in inner)
    return owner is not Method and callable(getattr(method, hook))


def numbers(reported: Any, error: Callable[[str], UserError]) -> dict[str, float]:
    """Return the numbers that a hook reported as floats; raise `error(message)` unless they are names and real numbers.

    A number that is not finite stays as it is: it must not end a run. In JSON it is `null`, see `Record.to_dict`.
    """
    if not isinstance(reported, Mapping):
        raise error(f"must return a dict of names and numbers, found {reported!r}")
    found: dict[str, float] = {}
    for name, value in reported.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise error(f"must return names such as update_norm, found {name!r}")
        one = number(value)
        if one is None:
            raise error(f"must return numbers, found {name} = {value!r}; a vector's norm is one: v.norm()")
        found[name] = one
    return found


def number(value: Any) -> float | None:
    """Return a real number, or a tensor of one, as a float; None for anything else."""
    try:
        one = value.item() if hasattr(value, "item") else value
        return float(one) if isinstance(one, Real) else None
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except (TypeError, ValueError, RuntimeError):  # a tensor of several
        return None
