"""A contender's side of the line protocol; imports nothing but the standard library.

    harness      contender
                 {"ready": {"parameters": 4810, ...}}
    round 3      {"seconds": [0.011, 0.010, 0.010]}
    check        {"accuracy": 0.41}
    stop         (ends; so it does at the end of its input)

Commands come on standard input, answers go to standard output, one JSON object a line. Between commands a contender
waits in a read, which costs nothing. A framework that owns its loop calls `Turns.wait` from inside it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


class Turns:
    """The rounds of a contender: waits for the command of each and reports its time.

    Args:
        check: the accuracy on the test samples as of now; it shows that the contender really trains.
        facts: what to say when ready: number of parameters, versions.
    """

    def __init__(self, check: Callable[[], float], **facts: Any) -> None:
        self._answers = _take_stdout()
        self._check, self._left, self._seconds = check, 0, list[float]()
        self._answer(ready=facts)

    def wait(self) -> bool:
        """Wait for the next command; return True for a round, False for the end. Then start the clock."""
        while not self._left:
            if self._seconds:
                self._answer(seconds=self._seconds)
                self._seconds = []
            command, _, count = sys.stdin.readline().strip().partition(" ")
            if command == "round":
                self._left = int(count)
            elif command == "check":
                self._answer(accuracy=self._check())
            else:
                return False
        self._started = time.perf_counter()
        return True

    def done(self) -> None:
        """Report the end of the round that `wait` started."""
        self._seconds.append(time.perf_counter() - self._started)
        self._left -= 1

    def _answer(self, **message: Any) -> None:
        with os.fdopen(os.dup(self._answers), "w") as out:
            out.write(json.dumps(message) + "\n")


def serve(one_round: Callable[[], object], check: Callable[[], float], **facts: Any) -> None:
    """Run rounds on command, for contenders that are a function."""
    turns = Turns(check, **facts)
    while turns.wait():
        one_round()
        turns.done()


def _take_stdout() -> int:
    """Keep standard output for answers; whatever else is printed joins standard error."""
    sys.stdout.flush()
    answers = os.dup(1)
    os.dup2(2, 1)
    return answers
