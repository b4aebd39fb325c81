"""The contests: each is one workload and the contenders whose rounds are interleaved."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from .peers import PEERS, python
from .workloads import CORES, Part

OURS = "fedspeed: FedAvg"
SPEED = "fedspeed: FedSpeed"
TWO_GRADIENTS = "bare loop 2x1, two gradients per step"
AUTHORS = "authors"
RAY = "fedspeed: FedAvg, Ray, 3 nodes on one host"


@dataclass(frozen=True)
class Entry:
    """A contender of a contest.

    Args:
        program: a module of `benchmarks.contenders`.
        arguments: its arguments after the workload.
        against: the entry that its time is divided by; "" for none.
        rival: whether it counts among "the best of the others": what others would use as it comes.
        peer: whose environment it needs; "" for our own.
        torchrun: number of processes to start it with, 0 for a plain start.
        frozen: stopped by signal while it waits, because its framework polls.
        quick: whether it takes part in quick mode.
        word: the word of `--contenders` without which it does not take part; "" if it always does.
    """

    name: str
    program: str
    arguments: tuple[str, ...] = ()
    against: str = OURS
    rival: bool = False
    peer: str = ""
    torchrun: int = 0
    frozen: bool = False
    quick: bool = True
    word: str = ""

    def command(self, workload: str, part: Part) -> list[str]:
        """Return the command to start."""
        interpreter = str(python(PEERS[self.peer])) if self.peer else sys.executable
        launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={self.torchrun}"] if self.torchrun else []
        return [
            interpreter,
            *launcher,
            "-m",
            f"benchmarks.contenders.{self.program}",
            workload,
            *self.arguments,
            *part.options(),
        ]


@dataclass(frozen=True)
class Contest:
    """A workload and its contenders.

    Args:
        quick_part: the part of a round that is timed in quick mode.
        usual_part: the part of a round that is timed otherwise, where a whole round is too long.
        quick_seconds: time a quick contest may take before it stops repeating.
    """

    name: str
    workload: str
    entries: tuple[Entry, ...]
    quick_part: Part = Part()  # noqa: RUF009
    usual_part: Part = Part()  # noqa: RUF009
    quick_seconds: float = 60.0

    def part(self, quick: bool, whole: bool) -> Part:
        """Return the part of a round that is timed."""
        return Part() if whole else self.quick_part if quick else self.usual_part

    def only(self, parts: list[str], peers: bool) -> Contest:
        """Return the contest with those whose name contains one of `parts`, and those they are compared with."""
        allowed = [e for e in self.entries if (peers or not e.peer) and (not e.word or e.word in parts)]
        kept = {entry.name for entry in allowed if any(part in entry.name for part in parts)}
        kept |= {entry.against for entry in self.entries if entry.name in kept}
        return replace(self, entries=tuple(entry for entry in self.entries if entry.name in kept))


_FEDAVG = Entry(OURS, "ours", ("fedavg",), against="")
_IN_WORKERS = Entry("fedspeed: FedAvg, two workers", "ours", ("fedavg", "--backend", "process"))
_RAY = Entry(RAY, "ours", ("fedavg", "--backend", "ray"), frozen=True)
_SPEED = Entry(SPEED, "ours", ("fedspeed",))
_QUARTER = Entry("fedspeed: FedSpeed, ascent_fraction 1/4", "ours", ("fedspeed-quarter",))
_BARE = (
    Entry("bare loop 1x2", "bare", rival=True),
    Entry("bare loop 2x1", "bare", ("--processes", str(CORES)), rival=True),
)
_BARE_OUR_LAYERS = (
    Entry("bare loop 1x2, our layers", "bare", ("--layers", "ours"), quick=False),
    Entry("bare loop 2x1, our layers", "bare", ("--processes", str(CORES), "--layers", "ours"), quick=False),
)
_PEERS = (
    Entry("pfl 1x2", "peer_pfl", ("--threads", str(CORES)), rival=True, peer="pfl"),
    Entry("pfl 2x1", "peer_pfl", ("--threads", "1"), rival=True, peer="pfl", torchrun=CORES),
    Entry("Flower", "peer_flower", rival=True, peer="flower", frozen=True),
    Entry("FedJAX", "peer_fedjax", rival=True, peer="fedjax"),
)
_TWO_GRADIENTS = Entry(TWO_GRADIENTS, "bare", ("--processes", "2", "--gradients", "2"), SPEED)
_FEDSPEED = (
    _SPEED,
    _QUARTER,
    Entry("bare loop 1x2, two gradients a step", "bare", ("--gradients", "2"), against=SPEED),
)
_SETTINGS = ("--settings", AUTHORS)
_AUTHORS = (
    Entry(f"{OURS}, the authors' settings", "ours", ("fedavg", *_SETTINGS), word=AUTHORS),
    Entry("the authors' loop 1x2, FedAvg", "authors", ("fedavg",), f"{OURS}, the authors' settings", word=AUTHORS),
)
_AUTHORS_SPEED = (
    Entry(f"{SPEED}, the authors' settings", "ours", ("fedspeed", *_SETTINGS), SPEED, word=AUTHORS),
    Entry("the authors' loop 1x2, FedSpeed", "authors", ("fedspeed",), f"{SPEED}, the authors' settings", word=AUTHORS),
)
_W3_METHODS = (
    _SPEED,
    Entry("fedspeed: SCAFFOLD", "ours", ("scaffold",)),
)

_PART_OF_W5 = Part(active=2, epochs=1)
"""A twenty-fifth of a round of W5. Besides its steps a round and a client cost us something, and a bare loop nothing.
That weighs more here than in the whole round, so the ratios to bare loops are no better than the whole round's."""

CONTESTS = {
    contest.name: contest
    for contest in (
        Contest("W1", "W1", (_FEDAVG, *_BARE, *_BARE_OUR_LAYERS, *_PEERS), quick_part=Part(2), quick_seconds=50),
        Contest("W1-fedspeed", "W1", (_FEDAVG, *_FEDSPEED), quick_part=Part(2), quick_seconds=55),
        Contest("W2", "W2", (_FEDAVG, *_BARE, *_BARE_OUR_LAYERS, *_PEERS), quick_part=Part(4), quick_seconds=30),
        Contest("W3", "W3", (_FEDAVG, _IN_WORKERS, *_BARE, *_PEERS), quick_seconds=20),
        Contest("W3-methods", "W3", (_FEDAVG, *_W3_METHODS), quick_seconds=20),
        Contest("W4", "W4", (_FEDAVG, *_BARE, *_PEERS[:2]), quick_part=Part(4), quick_seconds=40),
        Contest("W4-fedspeed", "W4", (_FEDAVG, _SPEED, _QUARTER, _TWO_GRADIENTS), quick_part=Part(4), quick_seconds=40),
        Contest("W5", "W5", (_FEDAVG, *_BARE, *_PEERS[:2], *_AUTHORS), _PART_OF_W5, _PART_OF_W5, quick_seconds=20),
        Contest(
            "W5-fedspeed",
            "W5",
            (_FEDAVG, _SPEED, _TWO_GRADIENTS, *_AUTHORS_SPEED),
            _PART_OF_W5,
            _PART_OF_W5,
            quick_seconds=30,
        ),
        Contest("W1-ray", "W1", (_FEDAVG, _RAY), quick_part=Part(2), quick_seconds=60),
        Contest("W2-ray", "W2", (_FEDAVG, _RAY), quick_part=Part(4), quick_seconds=60),
        Contest("smoke", "smoke", (_FEDAVG, *_BARE), quick_seconds=20),
    )
}
BY_NAME = ("smoke", "W1-ray", "W2-ray")
"""Contests that are held only if they are asked for: one shows nothing, the others need Ray."""
