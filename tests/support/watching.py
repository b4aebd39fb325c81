"""Observers that are one function, and one that stops a run."""

from __future__ import annotations

from fedspeed import Observer


class Rounds(Observer):
    """Calls a function with the record of every round; what stops a run is a BaseException."""

    def __init__(self, call) -> None:
        self.call = call

    def round(self, record, run) -> None:
        self.call(record)


class Clients(Observer):
    """Calls a function with how many clients of a round have answered, and how many there are."""

    def __init__(self, call) -> None:
        self.client = call


class Stop(BaseException):
    """Something stops the run from outside."""


def stop_after(rounds: int) -> Rounds:
    """Stops a run when a round is done."""

    def call(record) -> None:
        if record.round == rounds:
            raise Stop

    return Rounds(call)
