"""Profile of a client's turn: where each millisecond goes, and its time at the machine's limits.

python -m benchmarks.profile [W1 W2 W4] [--methods fedavg,fedspeed] [--turns N]

One client's local work in one process with one thread, under PyTorch's profiler. Operations are put into a few kinds.
Beside the time stands a limit: products at the speed of a large product, all else at the speed at which memory is
copied, each measured here. Bytes are counted from the shapes of what an operation reads, and once more for what it
writes, so what stays in the cache can be faster than its limit.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from fedspeed.backends.common import keep_memory
from fedspeed.client.local_loop import run_client
from fedspeed.client.trees import tree_map
from fedspeed.client.work import Job
from fedspeed.server.round import broadcast

from . import arrays
from .contenders.ours import METHODS, start
from .workloads import find

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
OUTSIDE = "outside of torch"
MULTIPLIED = ("products", "convolutions")


class Line(NamedTuple):
    """One kind of operation: milliseconds per local step, and what they would be at the limit."""

    kind: str
    measured: float
    limit: float


def measure(workload: str, method: str, turns: int) -> Iterator[Line]:
    """Yield the lines of one workload and method, in milliseconds per local step."""
    with start(find(workload), method, backend="serial") as run:
        work, plan = run.work, run.plan
        down = broadcast(run, run.work)
        state = work.hooks.init_client(work.flat.x)
        steps = work.local_steps(int(work.data.sizes[0]))
        buffers: list[torch.Tensor] = []

        def turn(t: int) -> None:
            run_client(work, Job(0, t, plan.lr), down, tree_map(torch.clone, state), buffers)

        torch.set_num_threads(1)
        keep_memory()
        turn(0)
        with torch.no_grad(), profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_flops=True) as seen:
            began = time.perf_counter()
            for t in range(turns):
                turn(t)
            wall = 1e3 * (time.perf_counter() - began)
    yield from lines(seen.events(), wall, turns * steps, gemm_speed(), copy_speed())


def lines(events: Any, wall: float, steps: int, flops: float, bandwidth: float) -> Iterator[Line]:
    """Yield times by kind, largest first, and what is left of the clock's; per step."""
    spent: dict[str, list[float]] = {}
    for event in events:
        name = event.name.removeprefix("aten::")
        kind = next((kind for kind, names in KINDS.items() if name in names), REST)
        found = spent.setdefault(kind, [0.0, 0.0])
        found[0] += event.self_cpu_time_total / 1e3
        if kind in MULTIPLIED:
            found[1] += 1e3 * (event.flops or _convolved(name, event.input_shapes)) / flops
        elif kind != REST:
            sizes = [math.prod(shape) for shape in event.input_shapes if shape]
            found[1] += 1e3 * 4 * (sum(sizes) + max(sizes, default=0)) / bandwidth
    for kind, (measured, limit) in sorted(spent.items(), key=lambda item: -item[1][0]):
        yield Line(kind, measured / steps, limit / steps)
    yield Line(OUTSIDE, max(0.0, wall - sum(found[0] for found in spent.values())) / steps, 0.0)


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


def _best(call: Callable[[], object], times: int = 7) -> float:
    found = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return min(found)


def main() -> None:
    """Print one table per workload and method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=["W1", "W2", "W4"])
    parser.add_argument("--methods", default="fedavg,fedspeed", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--turns", type=int, default=3, help="client turns to look at")
    args = parser.parse_args()
    for workload in args.workloads:
        arrays.prepare(find(workload))
        for method in args.methods.split(","):
            found = list(measure(workload, method, args.turns))
            total = sum(line.measured for line in found)
            print(f"\n{workload}, {method}: {total:.1f} ms per local step\n")
            print("| | ms | share | at the limit, ms |\n|---|---|---|---|")
            for line in found:
                print(f"| {line.kind} | {line.measured:.2f} | {line.measured / total:.0%} | {line.limit:.2f} |")


if __name__ == "__main__":
    main()
