"""Tuning: every method gets the same budget of gradients on held-out data, and is then judged with fresh seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UserError

if TYPE_CHECKING:
    from ...methods.base import Method
    from .result import Tuned
    from .tuner import Make, Tuning

FIRST = 1000
"""Default first seed of trials; it is far from 0, where comparisons and single runs begin."""


def tune(
    methods: Iterable[str | Mapping[str, Any] | Method | type[Method]] | str,
    budget: float,
    *,
    strategy: str = "random",
    space: Mapping[str, Any] | Sequence[str] = (),
    seeds: int | Sequence[int] = 3,
    tune_seeds: int | Sequence[int] = 1,
    out: Path | str,
    jobs: int = 1,
    baseline: str = "",
    **settings: Any,
) -> Tuned:
    """Tune methods with equal budgets on held-out data, then judge the chosen points with fresh seeds.

    Only the judged runs read the test set. A call that was stopped at any instant continues when it is repeated,
    because trials are run directories in `out`.

    Args:
        methods: names, tables such as `{"name": "fedspeed", "rho": 0.0}` or methods; a field that a table sets, or
            that differs from its default in a method, is not tuned.
        budget: gradients of minibatches for each method.
        strategy: `random`, `halving` or `optuna` (which needs the package).
        space: values to try beside or instead of the declared ones: `{"lr": "0.01..1:log", "fedspeed.lam": [1, 10]}`.
        seeds: the seeds of the judged runs, or their number (0, 1, ...).
        tune_seeds: the seeds of the trials, or their number (1000, 1001, ...).
        jobs: the number of runs side by side; 0 for one per core.
        baseline: the method that the others are compared with; the first by default.
        settings: config keys of all runs; a key that is given is not tuned. `validation` is the held-out part: `0.2`
            of every client by default, or `"clients:0.2"`.

    Example:
        >>> tuned = tune(["fedavg", "fedspeed"], 2e4, out="runs/tuned", clients=20, rounds=20)  # doctest: +SKIP
        >>> tuned.chosen["fedspeed"]  # doctest: +SKIP
        {'lr': 0.1, 'lam': 10.0, 'rho': 0.1}
    """
    from ...utils.processes import cores
    from ..batch import make_runs
    from .tuner import Tuning

    for key, instead in (("method", "methods"), ("seed", "seeds and tune_seeds"), ("test_set", "none of it")):
        if key in settings:
            raise UserError(f"tune: {key} is not a setting of all runs, got {settings[key]!r}; give {instead}")
    if not isinstance(jobs, int) or jobs < 0:
        raise UserError(f"tune: jobs must be a whole number >= 0, got {jobs!r}")
    tables: dict[str, dict[str, Any]] = {}
    for method in [methods] if isinstance(methods, str) else methods:
        label, table = labelled(method)
        if label in tables:
            raise UserError(f"tune: expected every method once, got {label} twice; leave one out")
        tables[label] = table
    entries = [f"{name}={_text(axis)}" for name, axis in space.items()] if isinstance(space, Mapping) else list(space)
    trials = range(FIRST, FIRST + tune_seeds) if isinstance(tune_seeds, int) else tune_seeds
    judges = range(seeds) if isinstance(seeds, int) else seeds
    tuning = Tuning(tables, settings, budget, strategy, entries, list(trials), list(judges), Path(out))
    return finish(tuning, lambda tasks: make_runs(tasks, jobs or cores()), baseline)


def finish(tuning: Tuning, make: Make, baseline: str = "") -> Tuned:
    """Search, judge the chosen points, and write the result."""
    from ..batch import one_command
    from .result import result

    if baseline and baseline not in tuning.methods:
        raise UserError(f"--baseline: expected one of {', '.join(tuning.methods)}, got {baseline!r}")
    with one_command(tuning.out):
        chosen = tuning.search(make)
        runs, failed = tuning.judge(make, chosen)
        found = result(tuning, chosen, runs, failed, baseline)
        found.write()
    return found


def labelled(method: str | Mapping[str, Any] | Method | type[Method]) -> tuple[str, dict[str, Any]]:
    """Return the label of a method, and its table with the fields that are not tuned.

    Example:
        >>> from fedspeed import FedSpeed
        >>> labelled("fedspeed"), labelled(FedSpeed(rho=0.0))
        (('fedspeed', {'name': 'fedspeed'}), ('fedspeed:rho=0', {'name': 'fedspeed', 'rho': 0.0}))
    """
    from ...methods import require_name
    from ...methods.base import Method

    if isinstance(method, type) and issubclass(method, Method):
        method = method()
    if isinstance(method, Method):
        require_name(method)
        table = _unusual(method)
    elif isinstance(method, str | Mapping):
        table = {"name": method} if isinstance(method, str) else dict(method)
    else:
        raise UserError(f"tune: expected a method's name, its table or a method, got {method!r}")
    return _label(table), table


def _unusual(method: Method) -> dict[str, Any]:
    """Return a method's table without the fields that have their defaults; also inside a wrapper."""
    usual = type(method).from_fields({}).to_dict()
    table = {k: v for k, v in method.to_dict().items() if k in ("name", "code", "origin") or v != usual.get(k)}
    return table | ({"base": _unusual(getattr(method, "base"))} if "base" in table else {})  # noqa: B009


def _label(table: Mapping[str, Any]) -> str:
    """Return `fedspeed:rho=0`, or `fedspeed:rho=0+topk:fraction=0.1`."""
    from ..grid import point_text

    base = table.get("base")
    inside = f"{_label(base if isinstance(base, Mapping) else {'name': base})}+" if base else ""
    own = tuple((key, value) for key, value in table.items() if key not in ("name", "code", "origin", "base"))
    return inside + str(table.get("name")) + (f":{point_text(own)}" if own else "")


def _text(axis: Any) -> str:
    """Return an axis in the notation of `--space`."""
    from ..grid import shown

    if isinstance(axis, str):
        return axis
    if not isinstance(axis, Iterable):
        raise UserError(f"space: expected a list of values or text such as 0.01..1:log, got {axis!r}")
    return ",".join(shown(value) for value in axis)
