"""`python -m benchmarks`, or `make bench`: see docs/explanation/benchmarks.md."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from . import checkpoint, machine, memory, peers, profile, report, startup
from .contests import AUTHORS, BY_NAME, CONTESTS, Contest
from .goals import goals
from .timing import Outcome, hold
from .workloads import CORES

PARTS = [name for name in CONTESTS if name not in BY_NAME] + ["profile", "memory", "startup", "checkpoint", "many"]
RESULTS = Path(__file__).resolve().parent / "results"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Time fedspeed against others.")
    parser.add_argument(
        "--quick", action="store_true", help="fewer clients a round, three repetitions: under 5 minutes"
    )
    parser.add_argument("--peers", action="store_true", help="other simulators too, installed into the cache")
    parser.add_argument("--full-memory", action="store_true", help="500 clients of ResNet-18-GN: 10 GB of disk")
    parser.add_argument("--only", default=",".join(PARTS), metavar="A,B", help=f"of {', '.join([*PARTS, *BY_NAME])}")
    parser.add_argument("--whole", action="store_true", help="whole rounds, also of W5 (a minute each) and if --quick")
    parser.add_argument(
        "--contenders",
        default="",
        metavar="A,B",
        help=f"only those whose name contains one of these; {AUTHORS!r} adds the client loop of the paper's authors",
    )
    parser.add_argument("--pairs", type=int, default=0, metavar="N", help="repetitions; default 9, or 3 with --quick")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where the JSON file goes")
    args = parser.parse_args(argv)
    args.only = args.only.split(",")
    unknown = [name for name in args.only if name not in (*PARTS, *BY_NAME)]
    if unknown or args.pairs < 0:
        parser.error(f"--only: unknown {unknown[0]!r}" if unknown else "--pairs must be at least 1")
    args.pairs = args.pairs or (3 if args.quick else 9)
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write."""
    args = parse(argv)
    machine.require_linux()
    machine.adopt_orphans()
    if len(machine.pin(CORES)) < CORES:
        say(f"this machine has one core: figures for {CORES} say nothing")
    unavailable = install() if args.peers else {}
    before = load_before()
    outcomes = [hold(contest, args.pairs, args.quick, unavailable, say, args.whole) for contest in chosen(args)]
    stepped = profile.in_a_process("W1", "fedavg") if "profile" in args.only else None
    resident = memory.measure(args.full_memory, args.quick, say) if "memory" in args.only else None
    started = startup.measure(3 if args.quick else 5) if "startup" in args.only else None
    waited = checkpoint.measure(args.quick, say) if "checkpoint" in args.only else None
    crowd = checkpoint.many(args.quick, say) if "many" in args.only else None
    found = goals({outcome.contest.name: outcome for outcome in outcomes}, resident, started, waited, crowd, stepped)
    result = {
        "command": " ".join(["python -m benchmarks", *(sys.argv[1:] if argv is None else argv)]),
        "environment": {**machine.environment(), "peers": peer_versions(outcomes)},
        "quick": args.quick,
        "busy": report.busy(before, outcomes),
        "cores_used_by_others_before": before,
        "contests": [report.to_dict(outcome) for outcome in outcomes],
        "profile": stepped,
        "memory": resident,
        "startup": started,
        "checkpoint": waited,
        "many": crowd,
        "goals": found,
    }
    text = markdown(result, outcomes)
    print(text)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{'quick' if args.quick else 'full'}"
    print(f"\nwritten: {report.write(args.out, name, result, text).name} in {args.out.name}/")
    return 0


def chosen(args: argparse.Namespace) -> list[Contest]:
    """Return the contests that were asked for, with the contenders that were asked for."""
    wanted = [contest for name, contest in CONTESTS.items() if name in args.only]
    return [contest.only(args.contenders.split(","), args.peers) for contest in wanted]


def install() -> dict[str, str]:
    """Install every peer; return the reasons of those that failed."""
    reasons = {name: peers.install(peer) for name, peer in peers.PEERS.items()}
    for name, reason in reasons.items():
        say(f"{name}: {reason or 'installed'}")
    return {name: reason for name, reason in reasons.items() if reason}


def load_before() -> float:
    """Return the number of cores in use before the benchmarks start."""
    meter = machine.Meter()
    time.sleep(3)
    before = meter.foreign()
    if before > machine.BUSY:
        say(f"BUSY: others use {before:.2f} cores; two-thread timings collapse under foreign load")
    return before


def peer_versions(outcomes: list[Outcome]) -> dict[str, dict[str, str]]:
    """Return the versions in the environments of the peers that ran."""
    ran = {row.entry.peer for outcome in outcomes for row in outcome.rows if row.entry.peer and row.seconds}
    return {name: peers.versions(peers.PEERS[name]) for name in sorted(ran)}


def markdown(result: dict[str, Any], outcomes: list[Outcome]) -> str:
    """Return everything that is printed."""
    machine_line = ", ".join(f"{key} {value}" for key, value in result["environment"].items() if key != "peers")
    parts = [f"`{result['command']}`\n\n{machine_line}"]
    parts += [f"**BUSY MACHINE**: {warning}" for warning in result["busy"]]
    if outcomes:
        parts += [report.about(outcomes), report.table(outcomes)]
    parts += [f"{outcome.contest.name}: {note}" for outcome in outcomes for note in outcome.notes]
    if result["profile"]:
        parts.append(profile.table(result["profile"]))
    if result["memory"]:
        parts.append(report.memory_table(result["memory"]))
    if result["startup"]:
        parts.append(startup.line(result["startup"]))
    for name, each in (result["checkpoint"] or {}).items():
        parts.append(
            f"checkpoints, {name}: {each['written']} in {len(each['seconds'])} rounds; waits {each['share']:.2%}"
        )
    if result["many"]:
        parts.append(
            "SCAFFOLD, {clients:,} clients, {active} active, {rounds} rounds, {touched:,} with a state: {first:.3f} s "
            "per round by the clock in the first tenth, {last:.3f} s in the last (reported {first_reported:.3f} and "
            "{last_reported:.3f} s); waits {share:.2%}".format(**result["many"])
        )
    if result["quick"] or result["busy"]:
        parts.append(f"Goals: an indication only ({'quick mode' if result['quick'] else 'busy machine'}).")
    return "\n\n".join([*parts, report.goal_table(result["goals"])])


def say(text: str) -> None:
    """Print progress on standard error."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
