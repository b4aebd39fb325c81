"""Profile of a client's turn: where each millisecond goes, and its time at the machine's limits.

python -m benchmarks.profile [W1 W2 W4 W5] [--methods fedavg,fedspeed] [--turns N]

One client's local work in one process with one thread. The total is the processor time of a local step WITHOUT the
profiler, of the fastest turn. PyTorch's profiler then watches a turn and says how that total divides: operations are
put into a few kinds, whose times are scaled so that all of them add up to the total. Kinds of many small operations
come out a little too large, since the profiler costs a microsecond or two per operation.

Turns come first that are not looked at, without the profiler and under it. The profiler's own memory splits the heap:
in the first turn under it fresh pages are faulted in for many tensors, which doubles its time; a second one finds them.

Beside the time stands a limit: products at the speed of a large product, all else at the speed at which memory is
copied, each measured here. Bytes are counted from the shapes of what an operation reads, and once more for what it
writes, so what stays in the cache can be faster than its limit. Inside a custom function (a layer of `fedspeed.models`)
operations count as elsewhere; the rest of its time, Python and compiled code that PyTorch does not see, is a kind of
its own, whose limit is its arguments read once, and once more for its result.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity

from fedspeed.backends.common import keep_memory
from fedspeed.client.local_loop import run_client
from fedspeed.client.trees import tree_map
from fedspeed.client.work import Job
from fedspeed.server.round import broadcast

from . import arrays
from .contenders.ours import METHODS, start
from .runner import ROOT
from .workloads import Part, find

KINDS = {
    "products": ("mm", "bmm", "addmm", "baddbmm"),
    "convolutions": ("mkldnn_convolution", "convolution_backward"),
    "norms": ("native_group_norm", "native_group_norm_backward"),
    "pooling": ("max_pool2d_with_indices", "max_pool2d_with_indices_backward", "_adaptive_avg_pool2d"),
    "copies": ("copy_", "cat", "constant_pad_nd", "fill_", "zero_"),
    "element by element": (
        *("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "addcmul_", "relu", "relu_", "clamp_min"),
        *("clamp_min_", "threshold_backward", "sum", "linalg_vector_norm", "aminmax"),
    ),
}
REST = "other operations"
CUSTOM = "custom functions, outside of torch"
OUTSIDE = "outside of torch"
MULTIPLIED = ("products", "convolutions")
WARM = 2
"""Turns before anything is looked at."""
WATCHES = 3
"""Turns under the profiler; the fastest counts, which the first never is."""
WATCHED = Part(epochs=1)
"""A turn is one epoch of a client: more steps are the same steps again, and take the profiler's memory."""


class Line(NamedTuple):
    """One kind of operation: milliseconds per local step, and what they would be at the limit."""

    kind: str
    measured: float
    limit: float


class Profile(NamedTuple):
    """A profile of one workload and method, in milliseconds per local step.

    Args:
        step: processor time without the profiler.
        watched: time by the clock under the profiler, whose own times are such; lines are scaled by `step / watched`.
    """

    workload: str
    method: str
    step: float
    watched: float
    lines: list[Line]

    def to_dict(self) -> dict[str, Any]:
        """Return the values that JSON can hold."""
        limit = sum(line.limit for line in self.lines)
        return {**self._asdict(), "limit": limit, "lines": [line._asdict() for line in self.lines]}


def measure(workload: str, method: str, turns: int) -> Profile:
    """Return the profile of one workload and method."""
    with start(find(workload, WATCHED), method, backend="serial") as run:
        work, plan = run.work, run.plan
        down = broadcast(run, run.work)
        state = work.hooks.init_client(work.flat.x)
        steps = work.local_steps(int(work.data.sizes[0]))
        buffers: list[torch.Tensor] = []

        def turn() -> float:
            """Return milliseconds of processor time per step; every turn is the same one."""
            began = time.process_time()
            run_client(work, Job(0, 0, plan.lr), down, tree_map(torch.clone, state), buffers)
            return 1e3 * (time.process_time() - began) / steps

        torch.set_num_threads(1)
        keep_memory()
        with torch.no_grad():
            for _ in range(WARM):
                turn()
            step = min(turn() for _ in range(turns))
            watched, events = min((_watch(turn, steps) for _ in range(WATCHES)), key=lambda found: found[0])
    found = list(lines(events, watched * steps, steps, gemm_speed(), copy_speed()))
    scaled = [line._replace(measured=line.measured * step / watched) for line in found]
    return Profile(workload, method, step, watched, scaled)


def _watch(turn: Callable[[], object], steps: int) -> tuple[float, list[Any]]:
    """Return milliseconds per step of a turn under the profiler, and its operations."""
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_flops=True) as seen:
        began = time.perf_counter()
        turn()
        took = time.perf_counter() - began
    return 1e3 * took / steps, list(seen.events())


def in_a_process(workload: str, method: str) -> dict[str, Any]:
    """Return a profile from a process of its own, whose memory and threads are not the caller's."""
    command = [sys.executable, "-m", "benchmarks.profile", workload, "--methods", method, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(f"profile: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def custom_functions() -> set[str]:
    """Return the names that custom functions have in a profile, forward and backward."""
    found, waiting = set(), [torch.autograd.Function]
    while waiting:
        for each in waiting.pop().__subclasses__():
            found |= {each.__name__, f"{each.__name__}Backward"}
            waiting.append(each)
    return found


def lines(events: list[Any], total: float, steps: int, flops: float, bandwidth: float) -> Iterator[Line]:
    """Yield times by kind, largest first, and what is left of the total; per step."""
    spent: dict[str, list[float]] = {}
    ours = custom_functions()
    for event in events:
        name = event.name.removeprefix("aten::")
        kind = next((kind for kind, names in KINDS.items() if name in names), CUSTOM if name in ours else REST)
        found = spent.setdefault(kind, [0.0, 0.0])
        found[0] += event.self_cpu_time_total / 1e3
        if kind in MULTIPLIED:
            found[1] += 1e3 * (event.flops or _convolved(name, event.input_shapes)) / flops
        elif kind != REST:
            sizes = [math.prod(shape) for shape in event.input_shapes or () if shape]
            found[1] += 1e3 * 4 * (sum(sizes) + max(sizes, default=0)) / bandwidth
    for kind, (measured, limit) in sorted(spent.items(), key=lambda item: -item[1][0]):
        yield Line(kind, measured / steps, limit / steps)
    yield Line(OUTSIDE, max(0.0, total - sum(found[0] for found in spent.values())) / steps, 0.0)


def _convolved(name: str, shapes: list[list[int]]) -> int:
    """Return operations of a convolution, all counted where its gradient is computed: the profiler counts none."""
    if name != "convolution_backward":
        return 0
    gy, x, w = shapes[:3]
    passes = 2 if x[1] == 3 else 3  # pictures need no gradient
    return passes * 2 * math.prod(gy) * math.prod(w[1:])


def gemm_speed(side: int = 1024) -> float:
    """Return operations per second of a large product, one thread."""
    a = torch.randn(side, side)
    return 2 * side**3 / _best(lambda: a @ a)


def copy_speed(size: int = 2**24) -> float:
    """Return bytes per second, read and written, of a copy that does not fit into the cache."""
    a, b = torch.zeros(size), torch.ones(size)
    return 8 * size / _best(lambda: a.copy_(b))


def _best(call: Callable[[], object], times: int = 15) -> float:
    """Return the least processor time of some calls."""
    found = []
    for _ in range(times):
        began = time.process_time()
        call()
        found.append(time.process_time() - began)
    return min(found)


def table(found: dict[str, Any]) -> str:
    """Return a profile as Markdown."""
    step, limit = found["step"], found["limit"]
    head = (
        f"{found['workload']}, {found['method']}: {step:.1f} ms per local step without the profiler, "
        f"{step / limit:.2f} times its limit of {limit:.1f} ms. Under the profiler {found['watched']:.1f} ms; "
        f"the parts are scaled by {step / found['watched']:.2f}."
    )
    rows = [
        f"| {line['kind']} | {line['measured']:.2f} | {line['measured'] / step:.0%} | {line['limit']:.2f} |"
        for line in found["lines"]
    ]
    return "\n".join([head, "", "| | ms | share | at the limit, ms |", "|---|--:|--:|--:|", *rows])


def main() -> None:
    """Print one table per workload and method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=["W1", "W2", "W4", "W5"])
    parser.add_argument("--methods", default="fedavg,fedspeed", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--turns", type=int, default=5, help="turns without the profiler; the fastest counts")
    parser.add_argument("--json", action="store_true", help="a line of JSON per table")
    args = parser.parse_args()
    for workload in args.workloads:
        arrays.prepare(find(workload))
        for method in args.methods.split(","):
            found = measure(workload, method, args.turns).to_dict()
            print(json.dumps(found) if args.json else f"\n{table(found)}", flush=True)


if __name__ == "__main__":
    main()
