"""`make gpu-check`, or `python -m benchmarks.gpu_check`: does fedspeed work on this machine's GPU?

Prints a report (docs/guides/gpu.md). Exit codes: 0 all is as it should be, 1 something is not, 2 bad input, 3 no GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fedspeed
from fedspeed import Federated, UserError, simulate
from fedspeed.client.local_loop import Oracle
from fedspeed.config.config import Config
from fedspeed.data.augment import Pipeline
from fedspeed.methods import METHODS
from fedspeed.runs.launch import resume, run_config
from fedspeed.utils.devices import deterministic, pick_device
from fedspeed.utils.processes import environment

NO_GPU = 3
FACTOR, FLOOR = 10.0, 1e-5
"""A device may be off from the CPU's float64 by so many times what the CPU's own float32 is off, and by so much."""
PLAN: dict[str, Any] = {"rounds": 3, "active": 4, "local_steps": 3, "batch_size": 10, "backend": "serial"}


@dataclass
class Report:
    """The findings; each line is printed at once."""

    wrong: list[str] = field(default_factory=list)

    def say(self, text: str = "") -> None:
        print(text, flush=True)

    def check(self, what: str, good: bool, why: str = "") -> None:
        self.say(f"{'ok   ' if good else 'WRONG'} {what}{f': {why}' if why else ''}")
        if not good:
            self.wrong.append(what)

    @contextmanager
    def part(self, title: str) -> Iterator[None]:
        """Run one part of the check; if it raises, report it as wrong and continue with the next."""
        self.say(f"\n## {title}\n")
        try:
            yield
        except Exception as error:
            self.check(title, False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            self.say(traceback.format_exc(limit=-3))


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check",
        description="Try fedspeed on a GPU, about five minutes, and print a report to send to us.",
        epilog="exit codes: 0 all is as it should be, 1 something is not, 2 bad input, 3 there is no GPU here",
    )
    parser.add_argument("--device", default="auto", help="auto (a GPU), cuda, cuda:1, mps; cpu tries the script itself")
    parser.add_argument("--quick", action="store_true", help="three methods, a small network: to try the script itself")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Try all parts and print a report; return the exit code."""
    args = parse(argv)
    try:
        device = pick_device(args.device)
    except UserError as error:
        sys.stderr.write(f"gpu-check: {error}\n")
        return 2
    if args.device == "auto" and device.type == "cpu":
        print("gpu-check: torch finds no GPU here (neither cuda nor mps); --device cpu tries the script itself")
        return NO_GPU
    report = Report()
    started = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _parts(report, device, args.quick)
    report.say("\n## Warnings\n")
    for text in dict.fromkeys(str(one.message).splitlines()[0] for one in caught) or ["none"]:
        report.say(text)
    wrong = f"{len(report.wrong)} WRONG: {'; '.join(report.wrong)}" if report.wrong else "all is as it should be"
    report.say(f"\n{device}: {wrong} ({time.perf_counter() - started:.0f} s)")
    return 1 if report.wrong else 0


def _parts(report: Report, device: torch.device, quick: bool) -> None:
    report.say(f"# fedspeed on {device}\n")
    for name, value in environment(device).items():
        report.say(f"{name}: {value}")
    if device.type == "cuda":
        with deterministic(device):
            cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
            flags = f"deterministic {cudnn.deterministic}, benchmark {cudnn.benchmark}, TF32 {cudnn.allow_tf32}"
            report.say(f"while computing: cuDNN {flags}; matrix products: TF32 {products.allow_tf32}")
    methods = ("fedavg", "scaffold", "fedspeed") if quick else tuple(METHODS)
    with report.part("Every method against the CPU"):
        _numbers(report, device, methods)
    with report.part("Two runs, the same bits"):
        _twice(report, device, quick)
    with report.part("A run that is stopped and resumed"):
        _resumed(report, device)
    with report.part("Milliseconds per gradient, and memory"):
        _speed(report, device, quick)


def digits() -> Federated:
    """Return real data that come with the package."""
    return fedspeed.load_data("digits", split="dirichlet:0.3", clients=10)


def pictures(n: int = 120) -> Federated:
    """Return random pictures of CIFAR's size, flipped and cropped."""
    random = np.random.default_rng(0)
    x, y = random.integers(0, 256, size=(n, 3, 32, 32), dtype=np.uint8), np.arange(n) % 10
    data = Federated.from_arrays(x, y, np.arange(n) % 4, test=(x[:40], y[:40]))
    half = (0.5, 0.5, 0.5)
    return Federated(**{**vars(data), "pipeline": Pipeline(mean=half, std=(0.25,) * 3, flip=0.5, padding=4)})


def _numbers(report: Report, device: torch.device, methods: tuple[str, ...]) -> None:
    """Compare with the CPU's float64: the distance after three rounds, relative to the distance covered."""
    data = digits()
    report.say(f"limit: {FACTOR:g} times what the CPU's float32 is off, plus {FLOOR:g}")
    for name in methods:
        for engine in ("loop", "block"):
            more = {"engine": engine, **({"active": data.clients} if name == "fedpd" else {})}
            ends = {
                kind: _end(name, fedspeed.build_model("mlp", data).to(dtype), data, place, **more)
                for kind, place, dtype in (
                    ("truth", "cpu", torch.float64),
                    ("cpu", "cpu", torch.float32),
                    ("device", str(device), torch.float32),
                )
            }
            start, truth = ends["truth"]
            way = float((truth - start).norm())
            cpu, ours = (float((ends[kind][1] - truth).norm()) / way for kind in ("cpu", "device"))
            report.check(f"{name}, {engine}", ours <= FACTOR * cpu + FLOOR, f"off by {ours:.1e}, the CPU by {cpu:.1e}")


def _end(method: str, model: nn.Module, data: Federated, device: str, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and the last model, float64 on the CPU."""
    run = simulate(method, model, data, device=device, **{**PLAN, **more})
    first = run.x.cpu().double()
    for _ in run:
        pass
    return first, run.x.cpu().double()


def _twice(report: Report, device: torch.device, quick: bool) -> None:
    for name in ("mlp", "cnn") if quick else ("mlp", "cnn", "lenet", "resnet18_gn"):
        data = digits() if name == "mlp" else pictures()
        for engine in ("loop", "block") if name == "mlp" else ("loop",):
            a, b = (
                _end("fedspeed", fedspeed.build_model(name, data), data, str(device), engine=engine)[1]
                for _ in range(2)
            )
            off = float((a - b).norm() / b.norm())
            report.check(
                f"{name}, {engine}", torch.equal(a, b), "" if torch.equal(a, b) else f"they differ by {off:.1e}"
            )


def _resumed(report: Report, device: torch.device) -> None:
    tables = {"rounds": 4, "clients": 10, "active": 4, "local_steps": 3, "batch_size": 10, "device": str(device)}
    for method, states in (("fedspeed", "memory"), ("scaffold", "disk")):
        with tempfile.TemporaryDirectory(prefix="fedspeed-gpu-") as folder:
            config = {**tables, "method": method, "states": states}
            whole = run_config(Config.from_dict(config), Path(folder) / "whole")
            run_config(Config.from_dict({**config, "rounds": 2}), Path(folder) / "run")
            again = resume(Path(folder) / "run", rounds=4)
            report.check(f"{method}, states in {states}", again["digests"] == whole["digests"])


def _speed(report: Report, device: torch.device, quick: bool) -> None:
    """Measure milliseconds per gradient, and the memory of a client's turn."""
    data, batch = pictures(), 2 if quick else 50
    low = ["tf32", *["bfloat16"] * torch.cuda.is_bf16_supported()] if device.type == "cuda" else []
    for precision in ("full", *low):
        name = "cnn" if quick else "resnet18_gn"
        model = fedspeed.build_model(name, data)
        run = simulate("fedspeed", model, data, device=str(device), precision=precision, engine="loop", **PLAN)
        oracle, x = Oracle(run.work, []), run.x
        oracle.next_step(*run.work.data.batch(np.arange(batch)), mask_seed=0)
        run.work.flat.model.train()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

        def gradient(oracle: Oracle = oracle, x: torch.Tensor = x) -> None:
            oracle.calls = 0
            oracle(x)

        with deterministic(device):
            took = _milliseconds(gradient, device, 3 if quick else 20)
        size = f"{run.work.flat.d:,} parameters, batch {batch}"
        report.say(f"{name}, {precision}: {took:.2f} ms per gradient ({size}); memory {_memory(device)}")
        run.close()


def _milliseconds(work: Callable[[], None], device: torch.device, times: int) -> float:
    wait = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}.get(device.type, lambda: None)
    for _ in range(3):
        work()
    found = []
    for _ in range(times):
        wait()
        began = time.perf_counter()
        work()
        wait()
        found.append(1000 * (time.perf_counter() - began))
    return statistics.median(found)


def _memory(device: torch.device) -> str:
    if device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        return f"{torch.cuda.max_memory_allocated(device) / 2**20:.0f} MiB at most, of {whole / 2**20:.0f}"
    if device.type == "mps":
        return f"{torch.mps.driver_allocated_memory() / 2**20:.0f} MiB"
    return "not measured on the CPU"


if __name__ == "__main__":
    sys.exit(main())
