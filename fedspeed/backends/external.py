"""Checks around a back end from outside the package: an error is one line that names it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..client.evaluate import Score
from ..client.work import Failed, Job, Reply, Work
from ..errors import Diverged, UserError, one_line
from . import REQUIRED
from .serial import Scoring

if TYPE_CHECKING:
    import torch


class CheckedBackend(Scoring):
    """Back end that checks every answer of the one inside, which `make` makes; clients are scored in this process."""

    def __init__(self, name: str, make: Callable[[], Any], work: Work) -> None:
        super().__init__(work)
        self.name = name
        with self._named("cannot be made"):
            self.inner = make()
        missing = [method for method in REQUIRED if not callable(getattr(self.inner, method, None))]
        if missing:
            raise UserError(f"back end {name}: expected an object with {missing[0]}, found {self.inner!r}")

    def run(self, jobs: Sequence[Job], down: Any, state: Callable[[int], Any]) -> Iterator[Reply | Failed]:
        """Yield the replies of the back end inside; raise unless they are one per job, in job order."""
        with self._named("run failed"):
            replies = iter(self.inner.run(jobs, down, state))
        for job in jobs:
            with self._named("run failed"):
                reply = next(replies, None)
            if reply is None:
                raise self._order(f"none for client {job.client}")
            if not isinstance(reply, Reply | Failed):
                raise UserError(f"back end {self.name}: run must give a Reply or Failed, found {reply!r}")
            if reply.job != job:
                raise self._order(f"client {reply.job.client}'s in place of client {job.client}'s")
            yield reply
        with self._named("run failed"):
            if next(replies, None) is not None:
                raise self._order("one too many")

    def evaluate(self, x: torch.Tensor, validation: bool = False) -> Score:
        """Return the score of the back end inside; raise unless it is one."""
        with self._named("evaluate failed"):
            score = self.inner.evaluate(x, validation)
        if not isinstance(score, Score) or not all(isinstance(value, float) for value in score):
            raise UserError(f"back end {self.name}: evaluate must return a Score of two floats, found {score!r}")
        return score

    def close(self) -> None:
        """Close the back end inside; a failure is a warning and does not change the run."""
        try:
            self.inner.close()
        except Exception as error:
            warnings.warn(
                f"back end {self.name}: close failed ({one_line(error)}); what it started may be running still",
                stacklevel=2,
            )

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except (UserError, Diverged):
            raise
        except (Exception, SystemExit) as error:
            raise UserError(
                f"back end {self.name}: {what} ({one_line(error)}); repair it, or use --backend serial"
            ) from error

    def _order(self, found: str) -> UserError:
        return UserError(f"back end {self.name}: run must give one reply per job, in job order, found {found}")
