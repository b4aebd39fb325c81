"""The origin of a fork: `fork.json` names the run whose first rounds it shares, and their digest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import UserError
from ..record import Record, older, rounds_digest
from ..utils.files import SEAL, read_json, read_text, seal_holds, sealed, write
from .directory import FORK, RunDir

FORMAT = 1


class Origin(NamedTuple):
    """The run that a fork comes from, and the rounds that they share.

    Args:
        folder: where that run was.
        at: the number of shared rounds.
        rounds: the digest of the shared rounds, without their times.
        changes: field -> [then, now].
    """

    folder: str
    at: int
    rounds: str
    changes: dict[str, list[Any]]

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
        if (
            found != self.rounds and rounds_digest(map(older, own)) == self.rounds
        ):  # The origin is of a version without norms in its records.
            return []
        wrong = f"the first {self.at} rounds are not those of {self.folder}"
        return [] if found == self.rounds else [f"{wrong}: expected digest {self.rounds}, found {found}"]

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
    pairs = changes.values() if isinstance(changes, dict) else [None]
    if (
        plain.get("format") != FORMAT
        or plain.keys() - {SEAL} != {"format", *Origin._fields}
        or holds is False
        or not (isinstance(folder, str) and isinstance(rounds, str) and type(at) is int and at > 0)
        or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)
    ):
        raise UserError(f"{run.fork_file} is not a {FORK} of format {FORMAT} as it was written; put it back")
    assert isinstance(changes, dict)
    return Origin(folder, at, rounds, changes)


def write_parent(run: RunDir, parent: Origin) -> None:
    """Write `fork.json`."""
    write(run.fork_file, sealed({"format": FORMAT, **parent._asdict()}, indent=1) + "\n", durable=True)
