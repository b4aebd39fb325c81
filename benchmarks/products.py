"""Products of ResNet-18-GN's layers as libraries compute them, layer by layer, and `torch.compile` on a step.

python -m benchmarks.products [--batches 50,20] [--no-compile] [--out DIR]

One thread; shapes of 32x32 pictures. Four forms of each layer, forward and both gradients:

    bilinear, MKL      the batched products of `fedspeed/models/fast_conv.py` (`torch.bmm`), without the transforms
                       around them; the strided layers and those on 1x1 maps are one product each
    bilinear, oneDNN   the same products as oneDNN has them in float32: a 1x1 convolution with a group per product
    convolution        the plain convolution (oneDNN), channels last
    unrolled           inputs copied side by side tap by tap (im2col), then one product (`torch.mm`, MKL); the gradient
                       by filters takes the unrolled inputs of the forward pass

Every call works on other buffers, which together are larger than the cache. A time is the least processor time of many
calls, and GFLOP/s are those of the products that the form has, not of the plain sum over taps. Beside them stands the
speed of one large product. Last, a residual block and a whole step, forward and backward, as PyTorch runs them and
compiled by `torch.compile`, which needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import conv2d, cross_entropy, pad

from fedspeed import Federated, build_model
from fedspeed.backends.common import keep_memory

from . import machine, report, stock
from .contenders.ours import MODELS
from .profile import gemm_speed
from .runner import ROOT

RESULTS = Path(__file__).resolve().parent / "results"
COLD = 96 * 2**20
"""Bytes that the buffers of a call have together: three times the last cache of the machines we use."""
SECONDS, FEWEST = 0.12, 8
"""Time for the calls of one figure, and how many there are at least."""
PATIENCE = 240.0
"""Seconds for everything that is compiled."""
PASSES = ("forward", "by input", "by filters")

Call = Callable[[], object]
Made = tuple[list[Call], list[torch.Tensor]]
"""The three passes of a layer, and the tensors that they read."""


class Layer(NamedTuple):
    """A convolution of square maps.

    Args:
        bilinear: batched products of the bilinear form: how many, rows of one per picture, summands per channel; None
            if the form is not used.
    """

    side: int
    channels: int
    out: int
    size: int
    stride: int
    bilinear: tuple[int, int, int] | None

    @property
    def outputs(self) -> int:
        """The side of the output maps."""
        return (self.side - 1) // self.stride + 1

    def __str__(self) -> str:
        stride = f", stride {self.stride}" * (self.stride > 1)
        return f"{self.size}x{self.size}{stride}, {self.side}x{self.side}, {self.channels} to {self.out}"


LAYERS = (
    Layer(32, 3, 64, 7, 2, None),
    Layer(8, 64, 64, 3, 1, (36, 4, 1)),
    Layer(8, 64, 128, 3, 2, (1, 16, 9)),
    Layer(8, 64, 128, 1, 2, None),
    Layer(4, 128, 128, 3, 1, (36, 1, 1)),
    Layer(4, 128, 256, 3, 2, (1, 4, 9)),
    Layer(4, 128, 256, 1, 2, None),
    Layer(2, 256, 256, 3, 1, (9, 1, 1)),
    Layer(2, 256, 512, 3, 2, (1, 1, 4)),  # five taps meet padding alone
    Layer(2, 256, 512, 1, 2, None),
    Layer(1, 512, 512, 3, 1, (1, 1, 1)),  # one tap is live
)


class Figure(NamedTuple):
    """The time of one pass of a layer in one form."""

    batch: int
    layer: str
    form: str
    what: str
    ms: float
    gflops: float


def figures(layer: Layer, batch: int) -> Iterator[Figure]:
    """Yield the figures of a layer; none of a gradient by pictures, which no step needs."""
    plain = 2 * batch * layer.outputs**2 * layer.channels * layer.out * layer.size**2
    for form, make in FORMS.items():
        flops = plain
        if form.startswith("bilinear"):
            if layer.bilinear is None:
                continue
            count, rows, depth = layer.bilinear
            flops = 2 * count * batch * rows * depth * layer.channels * layer.out
        calls = rotated(make, layer, batch)
        for k, what in enumerate(PASSES):
            if layer.channels > 3 or what != "by input":
                seconds = least([passes[k] for passes in calls])
                yield Figure(batch, str(layer), form, what, 1e3 * seconds, flops / seconds / 1e9)


def bilinear(layer: Layer, batch: int) -> Made:
    """Return the three passes as batched products of transformed maps and filters."""
    count, rows, depth = layer.bilinear or (0, 0, 0)
    V = torch.rand(count, batch * rows, depth * layer.channels)
    U = torch.rand(count, depth * layer.channels, layer.out)
    M = torch.rand(count, batch * rows, layer.out)
    forward, by_input = lambda: torch.bmm(V, U), lambda: torch.bmm(M, U.transpose(1, 2))
    return [forward, by_input, lambda: torch.bmm(V.transpose(1, 2), M)], [V, U, M]


def grouped(layer: Layer, batch: int) -> Made:
    """Return the three passes of `bilinear` as a convolution of one column with a group per product."""
    count, rows, depth = layer.bilinear or (0, 0, 0)
    c = depth * layer.channels
    x, w, gy = (
        torch.rand(shape).contiguous(memory_format=torch.channels_last)
        for shape in (
            (1, count * c, batch * rows, 1),
            (count * layer.out, c, 1, 1),
            (1, count * layer.out, batch * rows, 1),
        )
    )
    return convolution(x, w, gy, 1, 0, count), [x, w, gy]


def tensors(layer: Layer, batch: int) -> list[torch.Tensor]:
    """Return maps, filters and a gradient by outputs, channels last."""
    shapes = (
        (batch, layer.channels, layer.side, layer.side),
        (layer.out, layer.channels, layer.size, layer.size),
        (batch, layer.out, layer.outputs, layer.outputs),
    )
    return [torch.rand(shape).contiguous(memory_format=torch.channels_last) for shape in shapes]


def plain_convolution(layer: Layer, batch: int) -> Made:
    """Return the three passes as PyTorch's convolution."""
    x, w, gy = tensors(layer, batch)
    return convolution(x, w, gy, layer.stride, layer.size // 2, 1), [x, w, gy]


def convolution(x: torch.Tensor, w: torch.Tensor, gy: torch.Tensor, step: int, margin: int, groups: int) -> list[Call]:
    """Return a convolution and its gradients by input and by filters."""
    stride, padding = [step] * 2, [margin] * 2

    def backward(by_input: bool) -> object:
        wanted = (by_input, not by_input, False)
        return torch.ops.aten.convolution_backward(
            gy, x, w, None, stride, padding, [1, 1], False, [0, 0], groups, wanted
        )

    return [
        lambda: conv2d(x, w, None, stride, padding, groups=groups),
        lambda: backward(True),
        lambda: backward(False),
    ]


def unrolled(layer: Layer, batch: int) -> Made:
    """Return the three passes as one product each."""
    x, w, gy = tensors(layer, batch)
    taps = w.permute(2, 3, 1, 0).reshape(-1, layer.out)
    gM = gy.permute(0, 2, 3, 1).reshape(-1, layer.out)
    seen = unroll(x, layer)
    passes: list[Call] = [
        lambda: torch.mm(unroll(x, layer), taps),
        lambda: fold(torch.mm(gM, taps.t()), layer, batch),
        lambda: torch.mm(seen.t(), gM),
    ]
    return passes, [x, taps, gM]


def unroll(x: torch.Tensor, layer: Layer) -> torch.Tensor:
    """Return (batch outputs, taps channels): beside every output the inputs that it sees."""
    wide = pad(x, (layer.size // 2,) * 4).permute(0, 2, 3, 1)
    windows = wide.unfold(1, layer.size, layer.stride).unfold(2, layer.size, layer.stride)
    return windows.permute(0, 1, 2, 4, 5, 3).reshape(-1, layer.size**2 * layer.channels)


def fold(columns: torch.Tensor, layer: Layer, batch: int) -> torch.Tensor:
    """Return the sum of unrolled gradients at every input, channels last."""
    n, margin, reach = layer.outputs, layer.size // 2, layer.stride * (layer.outputs - 1) + 1
    parts = columns.view(batch, n, n, layer.size, layer.size, layer.channels)
    wide = columns.new_zeros(batch, layer.side + 2 * margin, layer.side + 2 * margin, layer.channels)
    for a, b in product(range(layer.size), repeat=2):
        wide[:, a : a + reach : layer.stride, b : b + reach : layer.stride] += parts[:, :, :, a, b]
    return wide[:, margin : margin + layer.side, margin : margin + layer.side]


FORMS = {
    "bilinear, MKL": bilinear,
    "bilinear, oneDNN": grouped,
    "convolution": plain_convolution,
    "unrolled": unrolled,
}


def rotated(make: Callable[[Layer, int], Made], layer: Layer, batch: int) -> list[list[Call]]:
    """Return the passes on as many sets of buffers as do not fit into the cache together."""
    passes, tensors = make(layer, batch)
    numbers = sum(tensor.numel() for tensor in tensors)
    return [passes] + [make(layer, batch)[0] for _ in range(max(1, min(64, COLD // (4 * numbers))))]


def least(calls: list[Call], seconds: float = SECONDS) -> float:
    """Return the least processor time of one call, each on its own buffers, in turn."""
    best, spent, n = float("inf"), 0.0, 0
    for call in calls[:2]:
        call()
    while spent < seconds or n < FEWEST:
        began = time.process_time()
        calls[n % len(calls)]()
        took = time.process_time() - began
        best, spent, n = min(best, took), spent + took, n + 1
    return best


def compiled() -> dict[str, Any]:
    """Return what `torch.compile` does for a block and a step, from a process of its own with an empty cache.

    Compilation can fail or take too long; the reason is then in place of the figures.
    """
    with tempfile.TemporaryDirectory(prefix="fedspeed-bench-") as folder:
        command = [sys.executable, "-m", "benchmarks.products", "--compile-only"]
        settings = {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONPATH": str(ROOT)}
        rows: list[dict[str, Any]] = []
        failure = ""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(command, stdout=out, stderr=errors, cwd=ROOT, env={**os.environ, **settings})
            try:
                if process.wait(PATIENCE):
                    errors.seek(0)
                    failure = (errors.read().strip().splitlines() or ["it said nothing"])[-1][:300]
            except subprocess.TimeoutExpired:
                failure = f"not done within {PATIENCE:.0f} s"
            finally:
                process.kill()
                process.wait()
            out.seek(0)
            rows = [json.loads(line) for line in out if line.startswith("{")]
    return {"rows": rows, "failure": failure}


def steps() -> Iterator[tuple[str, Call, Call | None]]:
    """Yield a name, the step as it is and the step compiled, batch 50.

    Our layers are timed as they are: under a compiler they leave the work to the stock layers.
    """
    x = torch.rand(50, 64, 8, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
    block = stock.Block(64, 64, 1).to(memory_format=torch.channels_last)
    yield "a residual block, 8x8, 64 channels", *pair(block, x, lambda y: y.sum())
    pictures, labels = torch.rand(50, 3, 32, 32), torch.arange(50) % 10
    whole = stock.build("resnet18_gn")
    yield "a step of ResNet-18-GN, stock layers", *pair(whole, pictures, lambda y: cross_entropy(y, labels))
    data = Federated.from_arrays(pictures.numpy(), labels.numpy(), clients=[list(range(50))])
    name, options = MODELS["resnet18_gn"]
    ours = build_model(name, data, **options)
    step, _ = pair(ours, pictures, lambda y: cross_entropy(y, labels))
    yield "a step of ResNet-18-GN, our layers, trimmed", step, None


def pair(net: nn.Module, x: torch.Tensor, loss: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Call, Call]:
    """Return forward and backward of a network as it is, and compiled; compilation happens at the first call."""
    faster = torch.compile(net)

    def step(forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        net.zero_grad()
        loss(forward(x)).backward()

    return lambda: step(net), lambda: step(faster)


def compile_and_print() -> None:
    """Print a line of JSON for every step."""
    prepare()
    for name, plain, faster in steps():
        row: dict[str, Any] = {"what": name, "eager_ms": 1e3 * least([plain], 2.0)}
        if faster:
            began = time.perf_counter()
            faster()
            row["compile_seconds"] = time.perf_counter() - began
            row["compiled_ms"] = 1e3 * least([faster], 2.0)
        print(json.dumps(row), flush=True)


def prepare() -> None:
    """Take one thread, and keep freed memory as workers do."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    keep_memory()


def tables(found: list[Figure], compilation: dict[str, Any] | None) -> str:
    """Return the figures as Markdown."""
    texts = [products_table(found, batch) for batch in dict.fromkeys(figure.batch for figure in found)]
    if compilation:
        lines = [
            "| batch 50, ms | eager | torch.compile | eager / compiled | compilation, s |",
            "|---|--:|--:|--:|--:|",
        ]
        for row in compilation["rows"]:
            cells = "| | |"
            if "compiled_ms" in row:
                ratio = row["eager_ms"] / row["compiled_ms"]
                cells = f"{row['compiled_ms']:.1f} | {ratio:.2f} | {row['compile_seconds']:.0f} |"
            lines.append(f"| {row['what']} | {row['eager_ms']:.1f} | {cells}")
        failure = compilation["failure"]
        texts.append("\n".join(lines) + (f"\n\n`torch.compile` ended early: {failure}" if failure else ""))
    return "\n\n".join(texts)


def products_table(found: list[Figure], batch: int) -> str:
    """Return one line per layer and pass: milliseconds, and GFLOP/s in brackets."""
    lines = [f"| batch {batch}: ms (GFLOP/s) | pass | {' | '.join(FORMS)} |", "|---|---|" + "--:|" * len(FORMS)]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for figure in found:
        if figure.batch == batch:
            text = f"{figure.ms:.3f} ({figure.gflops:.0f})"
            cells.setdefault((figure.layer, figure.what), {})[figure.form] = text
    for (layer, what), row in cells.items():
        lines.append(f"| {layer} | {what} | {' | '.join(row.get(form, '') for form in FORMS)} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.products", description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="50,20", metavar="N,N", help="default: %(default)s")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out, which takes minutes")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where the JSON file goes")
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.compile_only:
        compile_and_print()
        return 0
    machine.require_linux()
    meter = machine.Meter()
    prepare()
    large = gemm_speed() / 1e9
    found = [f for batch in map(int, args.batches.split(",")) for layer in LAYERS for f in figures(layer, batch)]
    compilation = None if args.no_compile else compiled()
    foreign = meter.foreign()
    busy = [f"others used {foreign:.2f} cores"] if foreign > machine.BUSY else []
    command = " ".join(["python -m benchmarks.products", *(sys.argv[1:] if argv is None else argv)])
    result = {
        "command": command,
        "environment": machine.environment(),
        "busy": busy,
        "large_product_gflops": large,
        "products": [figure._asdict() for figure in found],
        "compile": compilation,
    }
    parts = [f"`{command}`", ", ".join(f"{key} {value}" for key, value in result["environment"].items())]
    parts += [f"**BUSY MACHINE**: {warning}; times are the least of many" for warning in busy]
    parts += [f"One thread; a product of 1024 x 1024 matrices: {large:.0f} GFLOP/s.", tables(found, compilation)]
    text = "\n\n".join(parts)
    print(text)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-products"
    print(f"\nwritten: {report.write(args.out, name, result, text).name} in {args.out.name}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
