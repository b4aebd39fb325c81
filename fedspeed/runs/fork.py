"""Fork of a run: a run that shares its first rounds with another, bit for bit, and continues with other settings.

A fork is a run directory like any other. Its config has the settings of the first rounds (`until`), `fork.json` its
origin: the run whose first rounds it shares, and their digest. It starts from the last checkpoint of the original run
that is not beyond the fork, or from round 0, and computes the rounds up to the fork with the original settings.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config.config import ANY_ROUND, FIXED, Config, changed_lasting_field, class_chain
from ..config.plan import PLACEMENT
from ..config.presets import paper_decay
from ..config.spec import SETTINGS
from ..errors import UserError
from ..methods.base import Method, nested
from ..record import Record, older, rounds_digest
from ..server.observers import Observer
from ..utils.files import SEAL, difference, flat, flush, merged, read_json, read_text, seal_holds, sealed, write
from .config_file import config_digest, read_config, write_config
from .directory import FORK, RunDir, exclusive, is_running

if TYPE_CHECKING:
    from .checkpoint import Saved


FORMAT = 1


class Origin(NamedTuple):
    """The run that a fork comes from, and the rounds that they share."""

    folder: str  # where that run was
    at: int  # the number of shared rounds
    rounds: str  # the digest of the shared rounds, without their times
    changes: dict[str, list[Any]]  # field -> [then, now]

    def text(self) -> str:
        """Return the origin and the changes in one line.

        Example:
            >>> Origin("runs/a", 300, "", {"lr": [0.1, 0.05]}).text()
            'fork of runs/a at round 300: lr 0.1 -> 0.05'
        """
        new = ", ".join(f"{name} {then} -> {now}" for name, (then, now) in self.changes.items())
        return f"fork of {self.folder} at round {self.at}: {new or 'nothing changed'}"

    def mismatches(self, records: Sequence[Record]) -> list[str]:
        """Return how the first rounds of a run differ from the origin's, bit for bit."""
        own = records[: self.at]
        found = rounds_digest(own)
        # The origin may be of a version without norms in its records.
        if found == self.rounds or rounds_digest(map(older, own)) == self.rounds:
            return []
        wrong = f"the first {self.at} rounds are not those of {self.folder}"
        return [f"{wrong}: expected digest {self.rounds}, found {found}"]

    def require(self, records: Sequence[Record]) -> None:
        """Raise unless the first rounds of a run are the origin's."""
        for wrong in self.mismatches(records):
            raise UserError(f"{wrong}; fork where that run was made, or start a run with its config")


def read_parent(run: RunDir) -> Origin | None:
    """Return the origin of a run, None if it is not a fork; raise for a file that was changed."""
    if not run.fork_file.exists():
        return None
    plain = read_json(run.fork_file)
    holds = seal_holds(read_text(run.fork_file).removesuffix("\n"), indent=1) if plain else None
    folder, at, rounds, changes = (plain.get(name) for name in Origin._fields)
    if (
        plain.get("format") != FORMAT
        or plain.keys() - {SEAL} != {"format", *Origin._fields}
        or holds is False
        or not (isinstance(folder, str) and isinstance(rounds, str) and type(at) is int and at > 0)
        or not isinstance(changes, dict)
        or not all(isinstance(pair, list) and len(pair) == 2 for pair in changes.values())
    ):
        raise UserError(f"{run.fork_file} is not a {FORK} of format {FORMAT} as it was written; put it back")
    return Origin(folder, at, rounds, changes)


def write_parent(run: RunDir, parent: Origin) -> None:
    """Write `fork.json`."""
    write(run.fork_file, sealed({"format": FORMAT, **parent._asdict()}, indent=1) + "\n", durable=True)


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
    from .launch import resume

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
    from .checkpoint import Checkpoints, nearest  # torch, which a refusal above does not need

    files = RunDir(out)
    made = files.missing_folders()
    with is_running(run) as in_progress:
        if in_progress:
            raise UserError(f"{run} is in progress; fork it when it has ended or was stopped")
        saved = nearest(RunDir(run), at)
        if saved is None or saved.log is None:  # Format 1 has no digest of the config.
            saved = None
        else:
            Checkpoints(run).check(saved, {"config": config_digest(RunDir(run).config())})
        with exclusive(out):
            _require_free(out)  # Another process may have made one before the lock.
            try:
                files.create()
                then, now = (flat({k: v for k, v in _full(one).items() if k != "until"}) for one in (old, new))
                changed = {name: [then.get(name), now[name]] for name in now if then.get(name) != now[name]}
                write_parent(files, Origin(str(run.resolve()), at, rounds_digest(records[:at]), changed))
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
    _require_fit(old, new)
    segments: list[tuple[int, dict[str, Any]]] = []
    for upto, config in [*old.stretches, (at, old)]:
        if segments and segments[-1][0] >= at:
            break
        settings = _then(config, new, min(upto, at))
        if segments and segments[-1][1] == settings:  # They are joined.
            segments.pop()
        segments.append((min(upto, at), settings))
    return replace(new, until=tuple(one for i, one in enumerate(segments) if any(o for _, o in segments[i:])))


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


def _refused(name: str, why: str) -> UserError:
    return UserError(f"a fork cannot change {name}: {why}; start a run of its own, `fedspeed run CONFIG.toml`")


def _require_fit(old: Config, new: Config) -> None:
    """Raise if the states of one method cannot be continued by another."""
    from ..client.hooks import overrides

    if class_chain(old.method) != class_chain(new.method):
        raise _refused("the method", f"its states are {old.method.label}'s")
    if name := changed_lasting_field(old.method, new.method):
        raise _refused(f"the method's {name}", "what it says counts all rounds together, with one value for all")
    then, now = (flat(config.method.to_dict()) for config in (old, new))
    first = next((f"method.{name}" for name in now if then[name] != now[name]), "")
    before, after = (_shapes(config.method) for config in (old, new))
    if before != after:
        raise _refused(first, f"states are {before} now and would be {after}")
    # The innermost method's mean over all clients: a wrapper that changes uploads names none.
    mean, other = ([*nested(config.method)][-1].running_mean for config in (old, new))
    if mean != other:
        raise _refused(first, "what the server keeps as a mean over all clients would not be one")
    if mean and old.weighting != new.weighting:
        kept, of = f"the server's {mean[1]}", f"the clients' {mean[0]}"
        raise _refused("weighting", f"{kept} is a mean of {of} with its weights ({old.method.label})")
    if old.weighting != new.weighting and overrides(old.method, "settle"):
        raise _refused("weighting", f"{old.method.label}'s clients keep what follows from means with its weights")


def _shapes(method: Method) -> str:
    """Return the states of server and clients, in words."""
    import torch

    from ..client.trees import named

    x0 = torch.zeros(8)
    kept = {"server": method.init_server(x0.double()), "client": method.init_client(x0)}
    return ", ".join(f"{name} ({len(a)})" for whose, tree in kept.items() for name, a in named(whose, tree)) or "none"


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
            source, target = (run.state_path(client, entry.generation) for run in (saved.run, to))
            try:
                os.link(source, target)  # The file is never changed.
            except OSError:  # Another file system, or one without links.
                _copy_file(source, target)
    flush(to.states)
    bound = {**manifest.bound, "config": config_digest(to.config())}
    write(to.manifest_path(saved.t), replace(manifest, bound=bound).text(), durable=True)
    flush(to.checkpoints)


def _copy_file(source: Path, target: Path, length: int | None = None) -> None:
    shutil.copyfile(source, target)
    if length is not None:
        os.truncate(target, length)
    flush(target)


def _remove(out: Path, made: list[Path]) -> None:
    """Remove a fork that could not begin."""
    RunDir(out).create()
    RunDir(out).withdraw(made)
