"""A conformance kit for other people's code: it runs beside our own method on small quadratics, and the first vector
that differs is named, with a guess why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..methods import build
from ..methods.base import Method
from ..usercode import file_of, load_code, require_part
from .result import Audit as Audit
from .result import Cause as Cause
from .setting import Setting as Setting

if TYPE_CHECKING:
    from .reference import Reference
    from .trace import Trace


def audit(adapter: Any, method: Method | type[Method] | str = "fedavg", **settings: Any) -> Audit:
    """Run somebody's implementation of a method beside ours.

    Args:
        adapter: a class with `client` and `server`, a Flower strategy, an FL-Simulator pair (Server, Client), a
            function that makes one, or `path/to/file.py:NAME`, whose code is executed; `fedspeed audit --list` has
            their hooks.
        method: what it should be, for example `FedSpeed(lam=10)`.
        settings: fields of `Setting`: rounds, clients, active, local_steps, lr, lr_decay, dim, seed, tolerance.

    Returns:
        An `Audit`: `.conforms`, `.first` (the first difference), `.causes`; `print` shows it all.

    Example:
        >>> class Mine:
        ...     def __init__(self, local_steps, lr, lr_decay):
        ...         self.K, self.lr, self.lr_decay = local_steps, lr, lr_decay
        ...     def client(self, i, x, grad, t):
        ...         for _ in range(self.K):
        ...             x = x - self.lr * grad(x)
        ...         return x
        ...     def server(self, x, replies, t):
        ...         return sum(replies.values()) / len(replies)
        >>> audit(Mine, "fedavg", rounds=3).causes[0].says
        'the learning rate does not decay'
    """
    from .adapters import run_adapter
    from .reference import Reference

    setting = Setting.from_fields(settings)
    ours = given(method)
    ours.check(setting.lr, setting.active, setting.clients)
    thing, name = found(adapter)
    reference = Reference(ours, setting)
    expected = reference.run()
    if not expected.finite():
        raise UserError(f"audit: our own {ours.name} diverges in this setting; try a lower lr (now {setting.lr:g})")
    return judged(run_adapter(thing, name, Reference(ours, setting)), expected, reference, name)


def judged(theirs: Trace, expected: Trace, reference: Reference, name: str) -> Audit:
    """The verdict on a run: what differs first, and which faults of ours reproduce it."""
    from .faults import faults
    from .reference import Reference
    from .result import explain
    from .trace import first_difference

    setting, method = reference.setting, reference.method
    first = first_difference(theirs, expected, setting.tolerance)
    compared = len(theirs.vectors.keys() & expected.vectors.keys())
    if first is None:
        return Audit(name, method, setting, compared, None, (), None, theirs.changed)
    tried = ((fault, lambda f=fault: Reference(f.method, setting, f.seams).run()) for fault in faults(method, setting))
    causes, nearest = explain(theirs, first, tried, setting.tolerance)
    return Audit(name, method, setting, compared, first, causes, nearest, theirs.changed)


def given(method: Method | type[Method] | str) -> Method:
    """A method from what names it."""
    if isinstance(method, str):
        return build({"name": method})
    made = method() if isinstance(method, type) and issubclass(method, Method) else method
    if not isinstance(made, Method):
        raise UserError(f"audit: expected a method such as FedSpeed() or its name, found {method!r}")
    return made


def found(adapter: Any) -> tuple[Any, str]:
    """What is to be audited, and its name for messages."""
    if isinstance(adapter, str):
        require_part("adapter", adapter)
        file, names = file_of(adapter), adapter.rpartition(":")[2].split(",")
        if not file or not all(names) or len(names) > 2:
            raise UserError(f"audit: expected path/to/file.py:Class, or file.py:Server,Client, got {adapter!r}")
        parts = [load_code("adapter", f"{file}:{one.strip()}") for one in names]
        return (parts[0] if len(parts) == 1 else tuple(parts)), adapter
    if isinstance(adapter, tuple) and len(adapter) != 2:
        raise UserError(f"audit: expected a pair (Server, Client), found {len(adapter)} things")
    named = adapter[0] if isinstance(adapter, tuple) else adapter
    return adapter, getattr(named, "__name__", type(named).__name__)
