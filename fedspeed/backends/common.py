"""Code that back ends with workers in other processes share: errors that travel, evaluation in pieces, fresh states."""

from __future__ import annotations

import ctypes
import sys
import traceback
from collections.abc import Callable, Container, Iterable
from typing import Any, NamedTuple

import torch

from ..client.engines import make_engine
from ..client.evaluate import Score, Sums, client_slices, score_clients, score_slice, slices, total
from ..client.personalise import personalised
from ..client.trees import tree_leaves
from ..client.work import Failed, Job, Work
from ..errors import ClientFailed, Diverged, UserError
from ..methods.source import reason

Piece = tuple[int, int]
"""First row, and the row after the last, of a slice of samples."""
KINDS = {"Diverged": Diverged, "ClientFailed": ClientFailed, "UserError": UserError}
"""Errors that keep their kind on the way; a ClientFailed is a UserError too, so it stands first."""


class RemoteError(NamedTuple):
    """An error on its way from a worker: its kind, its message, and the traceback of the worker."""

    kind: str
    text: str
    trace: str


def remote_error(error: Exception, otherwise: str = "") -> RemoteError:
    """Return an error in the form that travels; `otherwise` is the message of one that is not of `KINDS`."""
    trace = "".join(traceback.format_exception(error))
    kind = next((name for name, cls in KINDS.items() if isinstance(error, cls)), "")
    return RemoteError(kind or "UserError", str(error) if kind else otherwise or reason(error), trace)


def as_error(remote: RemoteError) -> Exception:
    """Return a worker's error as an exception to be raised here."""
    error: Exception = KINDS[remote.kind](remote.text)
    error.add_note(f"In the worker process:\n{remote.trace}")
    return error


def failed_job(job: Job, remote: RemoteError) -> Failed:
    """Return the reply of a job whose client failed or diverged; raise any other error."""
    error = as_error(remote)
    if not isinstance(error, ClientFailed | Diverged):
        raise error
    return Failed(job, error)


def called(chunk: list[Job]) -> str:
    """Return a chunk in words, for messages."""
    first, others = chunk[0], len(chunk) - 1
    beside = f" and {others} other{'s' * (others > 1)} in a block" if others else ""
    return f"client {first.client}{beside} of round {first.t + 1}"


SCORERS: dict[str, Callable[..., Any]] = {"evaluate": score_slice, "evaluate_clients": score_clients}


def score_pieces(work: Work, x: torch.Tensor, what: str, pieces: list[Piece], *about: Any) -> list[Any]:
    """Evaluate a vector on some pieces in a worker; `what` is a key of `SCORERS`, or `personalise` (of clients)."""
    if what == "personalise":
        return [personalised(work, x, client, *about) for client, _ in pieces]
    return [SCORERS[what](work.flat, x, work.data, work.loss, a, b, *about) for a, b in pieces]


class RemoteBackend:
    """Base of the back ends whose workers are other processes; for the arguments see `Backend`."""

    size: int  # the number of workers

    def __init__(self, work: Work, touched: Container[int]) -> None:
        self.work = work
        self.touched = touched
        self.engine = make_engine(work)
        self._starts_at_zero = not any(bool(a.any()) for a in tree_leaves(work.hooks.init_client(work.flat.x)))

    def evaluate(self, x: torch.Tensor, validation: bool = False) -> Score:
        """Return loss and accuracy of a vector on the test set, or on the validation set."""
        pieces = slices(self.work.data, validation)
        return total(self._spread(x, pieces, "evaluate", validation), pieces[-1][1] if pieces else 0)

    def evaluate_clients(self, x: torch.Tensor) -> list[Sums]:
        """Return sums over the slices of all clients' data, in order."""
        return self._spread(x, client_slices(self.work.data), "evaluate_clients")

    def personalise(self, x: torch.Tensor, t: int, lr: float) -> list[Score]:
        """Return the personalised score of every client, in order."""
        return self._spread(x, [(i, i + 1) for i in range(self.work.data.clients)], "personalise", t, lr)

    def _spread(self, x: torch.Tensor, pieces: list[Piece], what: str, *about: Any) -> list[Any]:
        """Return the workers' answers in the order of the pieces, not of the workers: it fixes the bits of sums."""
        count = min(len(pieces), self.size)
        shares = [pieces[w::count] for w in range(count)]
        found: dict[Piece, Any] = {}
        for share, answer in zip(shares, self._answers(x, shares, what, about), strict=True):
            found.update(zip(share, answer, strict=True))
        return [found[piece] for piece in pieces]

    def _answers(
        self, x: torch.Tensor, shares: list[list[Piece]], what: str, about: tuple[Any, ...]
    ) -> Iterable[list[Any]]:
        """Return one worker's answer per share, in order; `what` and `about` are for `score_pieces`."""
        raise NotImplementedError

    def _fresh(self, clients: list[int]) -> set[int]:
        """Return those of some clients whose state a worker makes itself: untouched ones, if it is all zeros."""
        return {i for i in clients if i not in self.touched} if self._starts_at_zero else set()


def keep_memory() -> None:
    """Keep freed vectors in this process (glibc).

    By default a large block goes back to the system every time, and its pages are faulted in again, which costs more
    than the arithmetic on it. glibc before 2.35 refuses a limit above 32 MB, and setting only the other one would fix
    the first at 128 kB.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        limit = getattr(libc, "mallopt", lambda *_: 0)
        if limit(-3, 2**30) or limit(-3, 2**25):  # M_MMAP_THRESHOLD
            limit(-1, 2**30)  # M_TRIM_THRESHOLD
