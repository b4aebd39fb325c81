"""The start of ResNet-18-GN: curvature of the loss at its first vector, and its features during training.

python -m benchmarks.start [--rounds 10] [--rho 0,0.01,0.05,0.1] [--seeds 3] [--out DIR]

The setting is that of `fedspeed reproduce start --preset paper-2pct-mixed-start`: CIFAR-10, 10 of 500 clients, Dir-0.6,
batch 20, K = 10, rate 0.1. First a lower bound of the Hessian's largest eigenvalue at the start beside 2/lr, above
which plain descent grows, and the curvature along one direction that is known in closed form: let m be the mean
feature (what enters the last layer, averaged over pictures) and u a unit vector over classes. Moving the last layer's
weights by u m^T / ||m|| adds u ||m|| to the logits of every picture alike, so the curvature there is about u^T (diag
p - p p^T) u ||m||^2. Then FedSpeed with several rho from both starts: norm of the mean feature and spread of features
around it, after every block. Last, both as the tables and the figure of docs/explanation/paper-scale.md. What is
stored in the folder is not measured again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from fedspeed.client.sharpness import batches, mean_gradient
from fedspeed.config.config import Config, Spec
from fedspeed.models.resnet import STARTS, Block
from fedspeed.report import figures
from fedspeed.report.tables import markdown
from fedspeed.reproduce.recipes import find_recipe
from fedspeed.runs.launch import prepare
from fedspeed.server.simulation import Simulation

PICTURES = 200


class Features(NamedTuple):
    """A layer's outputs over pictures: the norm of their mean, and the root mean square distance from it."""

    mean: float
    spread: float


class Curvature(NamedTuple):
    """The loss at the first vector: its value, the Hessian's largest eigenvalue, and what the features say of it."""

    start: str
    seed: int
    loss: float
    eigenvalue: float  # of the Hessian, the largest, at least
    along_mean: float  # measured, by a product with the Hessian
    closed_form: float  # u^T (diag p - p p^T) u ||m||^2
    limit: float  # 2 / lr
    mean: float
    spread: float


def setting(start: str, rho: float, seed: int, rounds: int) -> Config:
    """Return the config of the recipe's run of FedSpeed, with another start, rho, seed and number of rounds."""
    cells = find_recipe("start").cells("paper-2pct-mixed-start")
    config = next(cell for cell in cells if cell.row == "FedSpeed").config(seed)
    model = Spec(config.model.name, {**config.model.options, "init": start})
    method = replace(config.method, rho=rho)
    return replace(config, model=model, method=method, rounds=rounds, eval_every=rounds)


def pictures(run: Simulation) -> Any:
    """Return training pictures, the same for every start: not augmented, in batches."""
    rows = np.unique(run.work.data.indices)
    return batches(run.work.data, rows[:: max(1, len(rows) // PICTURES)][:PICTURES])


def forward(run: Simulation, x: torch.Tensor) -> None:
    """Run all pictures through the network at x."""
    run.work.flat.load(x)
    run.work.flat.model.eval()
    with torch.no_grad():
        for inputs, _ in pictures(run):
            run.work.flat.model(inputs)


def features(run: Simulation, x: torch.Tensor) -> list[Features]:
    """Return the features after the stem's pooling, after every block, and at the classifier's input."""
    flat = run.work.flat
    layers = [m for m in flat.model.modules() if isinstance(m, nn.MaxPool2d | Block | nn.Flatten)]
    seen: list[list[torch.Tensor]] = [[] for _ in layers]
    hooks = [
        layer.register_forward_hook(lambda _, __, y, kept=kept: kept.append(y.detach().flatten(1).double()))
        for layer, kept in zip(layers, seen, strict=True)
    ]
    try:
        forward(run, x)
    finally:
        for hook in hooks:
            hook.remove()
    return [_features(torch.cat(kept)) for kept in seen]


def _features(outputs: torch.Tensor) -> Features:
    mean = outputs.mean(0)
    return Features(float(mean.norm()), float((outputs - mean).square().sum(1).mean().sqrt()))


def curvature(start: str, seed: int) -> Curvature:
    """Return the curvature at the first vector of a start."""
    config = setting(start, 0.0, seed, 1)
    with prepare(replace(config, backend="serial", workers=1)) as run:
        flat, loss, data = run.work.flat, run.work.loss, pictures(run)
        x = run.x.to(next(flat.model.parameters()).dtype)
        value, _ = mean_gradient(flat, x, data, loss)
        last = features(run, x)[-1]
        v, form = common_mode(run, x)
        n = sum(len(y) for _, y in data)
        quotients = []
        for _ in range(4):  # power iteration from there: each quotient is a lower bound of the largest eigenvalue
            image = torch.stack([flat.hvp(x, v, a, y, loss) * (len(y) / n) for a, y in data]).sum(0)
            quotients.append(float(v @ image))
            v = image / image.norm()
        most = max(quotients)
        return Curvature(start, seed, value, most, quotients[0], form, 2 / config.lr, last.mean, last.spread)


def common_mode(run: Simulation, x: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return the unit vector that moves the last layer's weights by u m^T, and the curvature along it."""
    flat = run.work.flat
    inside, outside = list[torch.Tensor](), list[torch.Tensor]()
    layer = next(m for m in flat.model.modules() if isinstance(m, nn.Linear))
    hook = layer.register_forward_hook(lambda _, given, y: inside.append(given[0]) or outside.append(y))
    forward(run, x)
    hook.remove()
    m = torch.cat(inside).mean(0)
    p = torch.cat(outside).softmax(1)
    covariance = torch.diag(p.mean(0)) - p.T @ p / len(p)
    values, vectors = torch.linalg.eigh(covariance)
    u = vectors[:, -1]
    v = torch.zeros_like(x)
    end = len(x) - layer.out_features  # the last layer is the last of the vector: weights, then biases
    v[end - layer.weight.numel() : end] = torch.outer(u, m / m.norm()).flatten()
    return v, float(values[-1] * m.square().sum())


def course(start: str, rho: float, rounds: int) -> Iterator[dict[str, Any]]:
    """Features before the first round and after each, of FedSpeed from one start with one rho."""
    with prepare(setting(start, rho, 0, rounds)) as run:
        dtype = next(run.work.flat.model.parameters()).dtype
        yield {"start": start, "rho": rho, "round": 0, "features": features(run, run.x.to(dtype))}
        for record in run:
            found = features(run, run.x.to(dtype))
            yield {"start": start, "rho": rho, "round": record.round, "features": found, "loss": record.train_loss}


def read(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a file that `main` wrote."""
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def courses(folder: Path) -> dict[tuple[str, float], list[dict[str, Any]]]:
    """What `course` found, by start and rho."""
    found = (read(file) for start in STARTS for file in folder.glob(f"{start}-*.jsonl"))
    return dict(sorted(((lines[0]["start"], lines[0]["rho"]), lines) for lines in found))


def tables(folder: Path) -> tuple[str, str]:
    """Curvature at the first vector, a line per start and seed; spread / mean of the last features over rounds."""
    header = ("start", "seed", "loss", "largest eigenvalue, at least", "along the mean feature", "closed form", "2/lr")
    names = ("eigenvalue", "along_mean", "closed_form", "limit")
    lines = [
        (a["start"], str(a["seed"]), f"{a['loss']:.2f}", *(f"{a[name]:.0f}" for name in names))
        for a in sorted(read(folder / "curvature.jsonl"), key=lambda a: a["start"])
    ]
    found = courses(folder)
    last = min(lines[-1]["round"] for lines in found.values())
    shown = [t for t in (0, 1, 2, 5, 10, 20, 50) if t <= last]
    ratios = [
        (start, f"{rho:g}", *(f"{_ratio(rounds[t]['features'][-1]):.3f}" for t in shown))
        for (start, rho), rounds in found.items()
    ]
    return markdown(header, lines), markdown(("start", "rho", *(f"round {t}" for t in shown)), ratios)


def _ratio(found: list[float]) -> float:
    mean, spread = found
    return spread / mean


def draw(folder: Path) -> Path:
    """start.png: spread / mean block by block, at first and at last, with the largest rho; of the last features round
    by round."""
    found = courses(folder)
    rhos = sorted({rho for _, rho in found})
    figure, whole = figures.new_figure(9, 3.4)
    whole.remove()
    left, right = figure.subplots(1, 2, sharey=True)
    for (start, rho), lines in found.items():
        colour, line = figures.COLOURS[STARTS.index(start)], figures.LINES[rhos.index(rho) % len(figures.LINES)]
        last = [_ratio(at["features"][-1]) for at in lines]
        right.plot([at["round"] for at in lines], last, color=colour, linestyle=line, label=f"{start}, rho {rho:g}")
        for at, line in ((lines[0], "--"), (lines[-1], "-")) if rho == rhos[-1] else ():
            blocks = [_ratio(layer) for layer in at["features"][:-1]]
            left.plot(blocks, color=colour, linestyle=line, marker=".", label=f"{start}, round {at['round']}")
    left.set(xlabel="residual blocks passed", ylabel="spread / mean of features", title=f"FedSpeed, rho {rhos[-1]:g}")
    right.set(xlabel="round", yscale="log", title="what enters the last layer")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    return figures.save_as(figure, folder / "start.png", "png")


def main() -> None:
    """Print a line per measurement, keep them as JSON lines, then print the tables and draw the figure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--rho", default="0,0.01,0.05,0.1", help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="of the curvature at the start; default: %(default)s")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("benchmarks/results/start"),
        help="what is there already is not measured again; default: %(default)s",
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / "curvature.jsonl"
    if not file.exists():
        found = [curvature(start, seed)._asdict() for seed in range(args.seeds) for start in STARTS]
        file.write_text("".join(json.dumps(a) + "\n" for a in found), "utf-8")
    for start in STARTS:
        for rho in map(float, args.rho.split(",")):
            file = args.out / f"{start}-{rho:g}.jsonl"
            if not file.exists():
                lines = []
                for line in course(start, rho, args.rounds):
                    lines.append(json.dumps(line))
                    last = line["features"][-1]
                    print(f"{start} rho {rho:g} round {line['round']}: mean {last.mean:.3g}, spread {last.spread:.3g}")
                file.write_text("\n".join(lines) + "\n", "utf-8")
    print(*tables(args.out), draw(args.out), sep="\n")


if __name__ == "__main__":
    main()
