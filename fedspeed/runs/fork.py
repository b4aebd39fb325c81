"""Fork of a run: a run that shares its first rounds with another, bit for bit, and continues with other settings.

A fork is a run directory like any other. Its config has the settings of the first rounds (`until`), `fork.json` its
origin (`fork_origin.py`). It starts from the last checkpoint of the original run that is not beyond the fork, or from
round 0, and computes the rounds up to the fork with the original settings.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..client.hooks import overrides
from ..config.config import Config
from ..config.plan import PLACEMENT
from ..config.presets import paper_decay
from ..config.spec import SETTINGS
from ..config.until import ANY_ROUND, FIXED, changed_lasting_field, class_chain
from ..errors import UserError
from ..methods.base import Method, nested
from ..record import Record, rounds_digest
from ..server.observers import Observer
from ..utils.files import flush, write
from ..utils.tables import difference, flat, merged
from .config_file import config_digest, read_config, write_config
from .directory import RunDir, exclusive, is_running
from .fork_origin import Origin, write_parent
from .launch import resume

if TYPE_CHECKING:
    from .checkpoint import Saved

__all__ = ["fork", "forked"]


def fork(
    run: Path | str,
    at: int,
    out: Path | str,
    changes: Mapping[str, Any] | None = None,
    *,
    observers: Iterable[Observer | str] = (),
    progress: Callable[[str, int, int], None] | None = None,
    allow_code: bool = False,
) -> dict[str, Any]:
    """Continue another run from its round `at` with some fields changed, in a new directory; return the summary.

    The first rounds are the other run's, bit for bit; changes apply from round `at` + 1 on: the rate of round t + 1 is
    `lr * lr_decay ** t` for every t, and a warm-up counts from the run's first round. A fork that was stopped can be
    resumed like any run. Refused changes leave no files behind.

    Args:
        run: the run directory to fork, finished or stopped; it is only read.
        at: the number of shared rounds.
        out: the new run directory.
        changes: config keys and values, `{"lr": 0.05, "method.rho": 0.2}`; none gives the run's own bits.
        observers, progress: as for `run_config`.
        allow_code: also if the run's config names Python files, which are then executed.

    Example:
        >>> fork("runs/a", 300, "runs/b", {"lr": 0.05})  # doctest: +IGNORE_EXCEPTION_DETAIL
        Traceback (most recent call last):
        fedspeed.errors.UserError: runs/a holds no run: expected a config.toml; start one with `fedspeed run --out ...`
    """
    run, out = Path(run), Path(out)
    made = RunDir(out).missing_folders()
    branch(run, at, out, changes or {}, allow_code)
    try:
        # The code of the run was allowed when it was read above; other code was named by this call.
        return resume(out, observers=observers, progress=progress, allow_code=True)
    except UserError:
        if len(RunDir(out).records()) <= at:  # It has no rounds of its own.
            _remove(out, made)
        raise


def branch(run: Path, at: int, out: Path, changes: Mapping[str, Any], allow_code: bool = False) -> Config:
    """Make the directory of a fork, which `resume` then runs, and return its config."""
    old = read_config(run, allow_code)
    records = require(run, at, out)
    new = forked(old, at, changes)
    files = RunDir(out)
    made = files.missing_folders()
    with is_running(run) as in_progress:
        if in_progress:
            raise UserError(f"{run} is in progress; fork it when it has ended or was stopped")
        saved = _start(RunDir(run), at)
        with exclusive(out):
            _require_free(out)  # Another process may have made one before the lock.
            try:
                files.create()
                origin = Origin(str(run.resolve()), at, rounds_digest(records[:at]), _changes(old, new))
                write_parent(files, origin)
                write_config(out, new)
                if saved is not None:
                    _copy(saved, files)
            except BaseException:
                _remove(out, made)
                raise
    return new


def require(run: Path, at: int, out: Path) -> list[Record]:
    """Return the rounds of a run; raise unless round `at` is one of them, and no run is yet where its fork is to be."""
    records = RunDir(run).records()
    if type(at) is not int or not 1 <= at <= len(records):
        raise UserError(f"at: expected how many rounds of {run} to share, 1 to {len(records)}, found {at!r}")
    _require_free(out)
    return records


def _require_free(out: Path) -> None:
    """Raise if a directory holds a run."""
    new = RunDir(out)
    cut_off = new.fork_file.exists() and not new.config_file.exists()  # the process that made it was killed
    if new.existing() and not cut_off:
        raise UserError(f"{out} already holds a run; choose another --out")


def forked(old: Config, at: int, changes: Mapping[str, Any]) -> Config:
    """Return the config of a fork: the changed one, with the settings of the shared rounds in `until`.

    Raises a UserError for a change that is not possible.

    Example:
        >>> forked(Config(rounds=60), 30, {"lr": 0.05, "method.rho": 0.2}).to_dict()["until"]
        {'30': {'lr': 0.1, 'method': {'rho': 0.1}}}
    """
    over: dict[str, Any] = {}
    for name, value in changes.items():
        root, *inner = str(name).split(".")
        table: Any = dict(value) if isinstance(value, Mapping) else value
        for key in reversed(inner):
            table = {key: table}
        over = merged(over, {root: table})
    if isinstance(over.get("method"), str):
        over["method"] = {"name": over["method"]}
    if isinstance(over.get("method"), dict) and over["method"].get("name", old.method.name) != old.method.name:
        raise _refused("the method", f"its states are {old.method.label}'s")
    for name in over:
        if name in FIXED and (name in ("until", "format") or over[name] != _full(old).get(name)):
            raise _refused(name, FIXED[name])
    plain = {key: value for key, value in old.to_dict().items() if key != "until"}
    new = Config.from_dict(merged(plain, over))
    new = replace(new, lr_decay=new.lr_decay or paper_decay(new.method))
    if at >= new.rounds:
        raise UserError(
            f"a fork at round {at} of {new.rounds} has no round of its own; change rounds too (--set rounds={2 * at}), "
            f"or fork earlier"
        )
    for why in _misfits(old, new):
        raise why
    segments: list[tuple[int, dict[str, Any]]] = []
    for upto, config in [*old.stretches, (at, old)]:
        if not segments or segments[-1][0] < at:
            segments = _with(segments, min(upto, at), _then(config, new, min(upto, at)))
    return replace(new, until=tuple(one for i, one in enumerate(segments) if any(o for _, o in segments[i:])))


def _with(
    segments: list[tuple[int, dict[str, Any]]], upto: int, over: dict[str, Any]
) -> list[tuple[int, dict[str, Any]]]:
    """Return the segments and one more, which is joined to the last one if their settings are equal."""
    return [*(segments[:-1] if segments and segments[-1][1] == over else segments), (upto, over)]


def _then(config: Config, new: Config, upto: int) -> dict[str, Any]:
    """Return the settings that rounds up to `upto` had and that differ from a new config."""
    matter = upto == config.rounds or config.lr_schedule != new.lr_schedule  # a schedule must reach all rounds
    ignored = (*PLACEMENT, "until", *(name for name in ANY_ROUND if name != "rounds" or not matter))
    found = difference(*({k: v for k, v in _full(one).items() if k not in ignored} for one in (config, new)))
    if config.lr_schedule != new.lr_schedule:  # else more rounds of the fork would be more of this schedule
        found["rounds"] = config.rounds
    return found | {key: _full(config)[key] for key in SETTINGS if key in found}  # whole: options belong to a file


def _full(config: Config) -> dict[str, Any]:
    """Return all tables of a config, with the defaults of fields that later versions added."""
    later = {f.name: f.default for f in fields(Config) if f.metadata.get("later") and f.name != "until"}
    return {**later, **config.to_dict()}


def _changes(old: Config, new: Config) -> dict[str, list[Any]]:
    then, now = (flat({k: v for k, v in _full(one).items() if k != "until"}) for one in (old, new))
    return {name: [then.get(name), now[name]] for name in now if then.get(name) != now[name]}


def _refused(name: str, why: str) -> UserError:
    return UserError(f"a fork cannot change {name}: {why}; start a run of its own, `fedspeed run CONFIG.toml`")


def _misfits(old: Config, new: Config) -> Iterator[UserError]:
    """Why the states of one method cannot be continued by another."""
    if class_chain(old.method) != class_chain(new.method):
        yield _refused("the method", f"its states are {old.method.label}'s")
        return
    if name := changed_lasting_field(old.method, new.method):
        yield _refused(f"the method's {name}", "what it says counts all rounds together, with one value for all")
    shapes = [_shapes(config.method) for config in (old, new)]
    fields_of = [
        name for name, value in flat(new.method.to_dict()).items() if flat(old.method.to_dict())[name] != value
    ]
    if shapes[0] != shapes[1]:
        yield _refused(f"method.{fields_of[0]}", f"states are {shapes[0]} now and would be {shapes[1]}")
    means = [_running_mean(config.method) for config in (old, new)]
    if means[0] != means[1]:
        yield _refused(f"method.{fields_of[0]}", "what the server keeps as a mean over all clients would not be one")
    if old.weighting == new.weighting:
        return
    if means[0]:
        kept, of = f"the server's {means[0][1]}", f"the clients' {means[0][0]}"
        yield _refused("weighting", f"{kept} is a mean of {of} with its weights ({old.method.label})")
    if overrides(old.method, "settle"):
        yield _refused("weighting", f"{old.method.label}'s clients keep what follows from means with its weights")


def _running_mean(method: Method) -> tuple[str, str] | None:
    """Return the mean over all clients of the innermost method; a wrapper that changes uploads names none."""
    *_, inner = nested(method)
    return inner.running_mean


def _shapes(method: Method) -> str:
    """Return the states of server and clients, in words."""
    import torch

    from ..client.trees import named

    x0 = torch.zeros(8)
    kept = {"server": method.init_server(x0.double()), "client": method.init_client(x0)}
    return ", ".join(f"{name} ({len(a)})" for whose, tree in kept.items() for name, a in named(whose, tree)) or "none"


def _start(run: RunDir, at: int) -> Saved | None:
    """Return the checkpoint to start from, of the directory's config; None for round 0."""
    from .checkpoint import Checkpoints, nearest

    saved = nearest(run, at)
    if saved is None or saved.log is None:  # Format 1 has no digest of the config.
        return None
    Checkpoints(run.path).check(saved, {"config": config_digest(run.config())})
    return saved


def _copy(saved: Saved, to: RunDir) -> None:
    """Copy a checkpoint, and the rounds up to it, into the directory of a fork.

    Every file is flushed to the disk before the manifest, which comes last, so that a fork killed here restarts.
    """
    manifest = saved.manifest
    for folder in (to.states, to.checkpoints):
        folder.mkdir(exist_ok=True)
    for part in (manifest.server, manifest.log, *manifest.grown):
        if part is not None:
            _copy_file(saved.run.path / part.name, to.path / part.name, part.length)
    for client, entry in saved.entries.items():
        if entry.digest:
            _share(saved.run.state_path(client, entry.generation), to.state_path(client, entry.generation))
    flush(to.states)
    bound = {**manifest.bound, "config": config_digest(to.config())}
    write(to.manifest_path(saved.t), replace(manifest, bound=bound).text(), durable=True)
    flush(to.checkpoints)


def _copy_file(source: Path, target: Path, length: int | None) -> None:
    shutil.copyfile(source, target)
    if length is not None:
        os.truncate(target, length)
    flush(target)


def _share(source: Path, target: Path) -> None:
    """Link, or copy, a file that is never changed."""
    try:
        os.link(source, target)
    except OSError:  # Another file system, or one without links.
        shutil.copyfile(source, target)
        flush(target)


def _remove(out: Path, made: list[Path]) -> None:
    """Remove a fork that could not begin."""
    RunDir(out).create()
    RunDir(out).withdraw(made)
