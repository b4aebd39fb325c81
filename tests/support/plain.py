"""A federated run as one plain loop in NumPy and torch, which knows nothing of the package: the truth of the matrix.

From the package it takes the random numbers alone (`fedspeed.utils.random`: who is active, in which order batches
come, who is late, who is lost, the noise), since a stream is defined by its name. Steps, weights, means over all
clients, schedules, batch norm, rounding of states, scores, stop rules and forks are written here again, with the
methods of `plainmethods`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from matrixfiles import CLASSES, FEATURES, ILL, SIZES, WIDTH, arrays, build
from oracle import Job  # (written from the papers; imports nothing of the package)
from plainmethods import METHODS, FedAvg, Tree, Vec

from fedspeed.utils.files import key
from fedspeed.utils.random import batch_order, cohort, dropped, rng, straggler_steps

BATCH, EPOCHS, DECAY = 4, 1, 0.01


@dataclass(frozen=True)
class Case:
    """A run, in the words of this file. Fields are what the matrix varies."""

    method: str = "fedspeed"
    fields: dict[str, float] = field(default_factory=dict)
    start: dict[str, Any] | None = None  # FedInit: beta, centre
    exp: dict[str, float] | None = None  # FedExP: eps, decay
    top: dict[str, Any] | None = None  # TopK: fraction, feedback
    grid: dict[str, int] | None = None  # Quantise: bits, bucket
    clip: float = 0.0
    dp: dict[str, Any] | None = None  # noise, clip, where
    active: int = 3  # 0 for all who train
    cohort: str = "fixed"
    weighting: str = "uniform"
    stragglers: float = 0.0
    dropout: float = 0.0
    ill: bool = False  # one client's inputs are not numbers
    validation: str = ""
    local_steps: int = 0  # 0 for EPOCHS epochs
    gradient_clip: float | None = None
    optimizer: tuple[str, dict[str, float]] = ("sgd", {})
    lr: float = 0.1
    lr_decay: float = 0.998
    milestones: tuple[int, ...] = ()  # the rounds after which the rate is halved, instead of lr_decay
    warmup: dict[str, int] = field(default_factory=dict)
    eval_every: int = 1
    norm: str = ""  # "", group, local, average
    stored: str = ""  # float16, bfloat16
    fork: dict[str, Any] | None = None  # at, and what changes after it
    smoothing: float = 0.0  # of the labels in cross-entropy
    goal: float | None = None  # of the test loss
    patience: int = 0
    rounds: int = 4
    seed: int = 1


@dataclass
class Turn(Job):
    planned: int = 0  # steps that it was asked for


class Model:
    """linear, norm, tanh, linear; in float64, by torch's autograd but for the norms."""

    def __init__(self, kind: str, smoothing: float = 0.0) -> None:
        self.kind, self.smoothing = kind, smoothing
        shapes = [(WIDTH, FEATURES), (WIDTH,), *([(WIDTH,), (WIDTH,)] if kind else []), (CLASSES, WIDTH), (CLASSES,)]
        self.shapes = shapes
        self.x0 = np.concatenate(
            [p.detach().numpy().ravel() for p in build((FEATURES,), CLASSES, bool(kind)).parameters()]
        )

    def outputs(self, v: torch.Tensor, x: torch.Tensor, running: Tree | None = None) -> tuple[torch.Tensor, Tree]:
        """Outputs, and a batch's mean and variance; with `running` those are used instead."""
        parts = v.split([math.prod(s) for s in self.shapes])
        W, b, *scale, U, c = (a.view(s) for a, s in zip(parts, self.shapes, strict=True))
        z, seen = x @ W.T + b, {}
        if self.kind == "group":
            halves = z.view(len(z), 2, WIDTH // 2)
            mean, var = halves.mean(-1, keepdim=True), halves.var(-1, correction=0, keepdim=True)
            z = ((halves - mean) / torch.sqrt(var + 1e-5)).view(len(z), WIDTH) * scale[0] + scale[1]
        elif self.kind:
            mean, var = z.mean(0), z.var(0, correction=0)
            if running is not None:
                mean, var = torch.from_numpy(running["mean"]), torch.from_numpy(running["var"])
            else:
                seen = {"mean": mean.detach().numpy(), "var": var.detach().numpy() * len(z) / (len(z) - 1)}
            z = (z - mean) / torch.sqrt(var + 1e-5) * scale[0] + scale[1]
        return torch.tanh(z) @ U.T + c, seen

    def loss(self, outputs: torch.Tensor, y: Vec) -> torch.Tensor:
        own, all_alike = outputs[torch.arange(len(y)), torch.from_numpy(y)], outputs.mean(1)
        return (outputs.logsumexp(1) - (1 - self.smoothing) * own - self.smoothing * all_alike).mean()

    def gradient(self, w: Vec, x: Vec, y: Vec) -> tuple[Vec, float, Tree]:
        v = torch.from_numpy(w.copy()).requires_grad_()
        outputs, seen = self.outputs(v, torch.from_numpy(x))
        loss = self.loss(outputs, y)
        loss.backward()
        return v.grad.numpy(), float(loss.detach()), seen

    def pulled(self, w: Vec, teacher: Vec, x: Vec, tau: float) -> Vec:
        """The gradient of KL(teacher || w) at a temperature."""
        v, inputs = torch.from_numpy(w.copy()).requires_grad_(), torch.from_numpy(x)
        p = torch.log_softmax(self.outputs(torch.from_numpy(teacher), inputs)[0] / tau, 1)
        q = torch.log_softmax(self.outputs(v, inputs)[0] / tau, 1)
        (p.exp() * (p - q)).sum(1).mean().backward()
        return v.grad.numpy()

    def score(self, w: Vec, running: Tree | None, x: Vec, y: Vec) -> tuple[float, float]:
        outputs, _ = self.outputs(torch.from_numpy(w), torch.from_numpy(x), running)
        return float(self.loss(outputs, y)), float((outputs.argmax(1).numpy() == y).mean())


class Data:
    """Who owns what, and what is held out."""

    def __init__(self, case: Case) -> None:
        self.x, self.y, owner, *self.test = arrays()
        if case.ill:
            self.x[owner == ILL] = np.nan
        rows = [np.flatnonzero(owner == i) for i in range(len(SIZES))]
        held: list[np.ndarray] = []
        if case.validation.startswith("clients:"):
            out = rng(case.seed, "validation").choice(len(rows), int(case.validation[8:]), replace=False)
            held, rows = [rows[i] for i in out], [own for i, own in enumerate(rows) if i not in out]
        elif case.validation:
            for i, own in enumerate(rows):
                count = math.floor(float(case.validation) * len(own) + 0.5)
                taken = rng(case.seed, "validation", i).permutation(len(own))[:count]
                held.append(own[taken])
                rows[i] = np.delete(own, taken)
        self.rows, self.held = rows, np.sort(np.concatenate(held)) if held else None


class Client:
    """One client's turn: its oracle, the running statistics of its batch norm, its losses."""

    def __init__(self, case: Case, model: Model, data: Data, i: int, t: int, steps: int, running: Tree) -> None:
        own = data.rows[i]
        order = batch_order(len(own), BATCH, steps, key(case.seed, "batches", t, i))
        self.model, self.batches = model, [(data.x[own[p]], data.y[own[p]]) for p in order]
        self.running, self.step, self.losses = dict(running), -1, []

    def gradient(self, i: int, t: int, k: int, w: Vec, fraction: float) -> Vec:
        x, y = self.batches[k]
        used = max(1, round(fraction * len(y)))
        found, loss, seen = self.model.gradient(w, x[:used], y[:used])
        if k > self.step:  # the first call of a step counts, others do not
            self.step = k
            self.losses.append(loss)
            self.running = {name: 0.9 * self.running[name] + 0.1 * seen[name] for name in self.running}
        return found

    def kl(self, i: int, t: int, k: int, w: Vec, teacher: Vec, tau: float) -> Vec:
        return self.model.pulled(w, teacher, self.batches[k][0], tau)


def descended(job: Turn, name: str, how: dict[str, float]) -> Callable[..., Vec]:
    """K steps of a local optimiser that knows nothing at the first: the equations of Adam's paper (its moments are
    sums, m_k = (1 - beta1) sum_j beta1^(k-j) g_j), AdamW's and of momentum, sum_j beta^(k-j) g_j."""

    def descend(direction: Callable[[int, Vec], Vec], etas: Sequence[float] | None = None) -> Vec:
        x, seen = job.start, list[Vec]()
        for k in range(job.K):
            eta = job.lr if etas is None else etas[k]
            seen.append(direction(k, x))
            if name == "adamw":
                x = x - eta * DECAY * x
            if name in ("adam", "adamw"):
                a, b = how["beta1"], how["beta2"]
                first = sum((1 - a) * a ** (k - j) * g for j, g in enumerate(seen)) / (1 - a ** (k + 1))
                second = sum((1 - b) * b ** (k - j) * g**2 for j, g in enumerate(seen)) / (1 - b ** (k + 1))
                x = x - eta * first / (np.sqrt(second) + how["eps"])
            else:
                heavy = sum(how["beta"] ** (k - j) * g for j, g in enumerate(seen))
                x = x - eta * (seen[-1] + how["beta"] * heavy if name == "nesterov" else heavy)
        return x

    return descend


def arriving(case: Case, up: Tree, error: Tree, t: int, i: int, asked: int) -> tuple[Tree, Tree]:
    """What of an upload arrives, and what TopK keeps of it: the wrappers from the inside out. Numbers that are no part
    of a vector (steps of FedNova, FedWMSAM's v) are sent as they are; FedExP's square is of the D that arrives."""
    vectors = {name: a for name, a in up.items() if a.size > 1}
    if case.top is not None:
        feedback = case.top["feedback"]
        whole = {name: a + error[name] if feedback else a for name, a in vectors.items()}
        vectors = {name: largest(a, case.top["fraction"]) for name, a in whole.items()}
        error = {name: whole[name] - vectors[name] for name in vectors} if feedback else {}
    if case.grid is not None:
        vectors = {n: rounded(case, a, rng(case.seed, "quantise", t, i, k)) for k, (n, a) in enumerate(vectors.items())}
    bound = case.dp["clip"] if case.dp else case.clip
    if bound:
        norm = math.sqrt(sum(float(a @ a) for a in vectors.values()))
        vectors = {name: a * min(1.0, bound / norm) for name, a in vectors.items()}
    if case.dp and case.dp["where"] == "clients":
        size = case.dp["noise"] * bound / math.sqrt(asked)
        vectors = noisy(vectors, size, (case.seed, "dp", t, i))
    sent = {**up, **vectors}
    return ({**sent, "square": np.array([vectors["D"] @ vectors["D"]])} if case.exp else sent), error


def largest(a: Vec, fraction: float) -> Vec:
    count = math.ceil(fraction * a.size)
    return np.where(np.abs(a) >= np.sort(np.abs(a))[-count], a, 0.0)


def rounded(case: Case, a: Vec, stream: np.random.Generator) -> Vec:
    """To a grid between minus and plus the largest entry of each piece, up or down at random."""
    half, chance = ((1 << case.grid["bits"]) - 2) / 2, stream.random(a.size)
    pieces = []
    for begin in range(0, a.size, case.grid["bucket"]):
        piece = a[begin : begin + case.grid["bucket"]]
        s = np.abs(piece).max()
        place = np.floor((piece / s + 1) * half + chance[begin : begin + len(piece)])
        pieces.append((np.clip(place, 0, 2 * half) / half - 1) * s)
    return np.concatenate(pieces)


def noisy(vectors: Tree, size: float, stream: tuple[Any, ...]) -> Tree:
    return {n: a + size * rng(*stream, k).standard_normal(a.size) for k, (n, a) in enumerate(vectors.items())}


def stored(tree: Tree, dtype: str) -> Tree:
    """A client's state as it is kept."""
    if isinstance(tree, dict):
        return {name: stored(a, dtype) for name, a in tree.items()}
    return torch.from_numpy(np.array(tree)).to(getattr(torch, dtype)).double().numpy() if dtype else tree


class Server:
    """The server, and all clients' states."""

    def __init__(self, case: Case) -> None:
        self.case, self.model, self.data = case, Model(case.norm, case.smoothing), Data(case)
        x0 = self.model.x0
        self.method: FedAvg = METHODS[case.method](x0, **case.fields)
        tracks = case.norm in ("local", "average")
        self.running = {"mean": np.zeros(WIDTH), "var": np.ones(WIDTH)} if tracks else {}
        self.clients = len(self.data.rows)
        self.asked = case.active or self.clients
        first = {"method": self.method.first(x0), "error": {}, "last": x0, "running": self.running}
        self.kept = {i: first for i in range(self.clients)}
        self.shown = x0  # what is evaluated

    def at(self, t: int) -> Case:
        """The settings of round t, which a fork changes."""
        case, change = self.case, self.case.fork or {"at": math.inf}
        if t < change["at"]:
            return case
        return Case(**{**vars(case), **{name: value for name, value in change.items() if name != "at"}})

    def round(self, t: int) -> dict[str, Any]:
        case = self.at(t)
        warm = {name: min(1.0, (t + 1) / length) for name, length in case.warmup.items()}
        halved = 0.5 ** sum(t >= one for one in case.milestones)
        lr = case.lr * (halved if case.milestones else case.lr_decay**t) * warm.get("lr", 1.0)
        fields = {**self.method.fields, **case.fields}
        fields |= {name: fields[name] * warm[name] for name in warm if name != "lr"}
        vars(self.method).update(fields)
        active = cohort(case.seed, t, self.clients, self.asked, case.cohort)
        lost = {int(i) for i in dropped(case.seed, t, active, case.dropout)}
        found: dict[int, dict[str, Any]] = {}
        failed, late = set[int](), list[int]()
        x = self.method.sent()
        for i in sorted({int(i) for i in active} - lost):
            planned = case.local_steps or EPOCHS * math.ceil(len(self.data.rows[i]) / BATCH)
            K = straggler_steps(case.seed, t, i, planned, case.stragglers)
            turn = self.turn(case, i, t, K, planned, lr, x)
            if not math.isfinite(turn["loss"]):
                failed.add(i)
                continue
            found[i] = turn
            late += [i] if planned > K else []
        weights = [float(len(own)) if case.weighting == "samples" else 1.0 for own in self.data.rows]
        p = {i: weights[i] for i in found}
        total = sum(p.values())

        def mean(of: dict[int, Any]) -> Any:
            return sum(p[i] * of[i] for i in of) / total

        names = next(iter(found.values()))["up"]
        arrived = {name: mean({i: found[i]["up"][name] for i in found}) for name in names}
        arrived = self.noise(case, arrived, len(found), len(failed), len(active), t)
        for i in found:
            state = {**found[i]["keeps"], "method": self.method.settled(found[i]["keeps"]["method"], arrived)}
            self.kept[i] = stored(state, case.stored)
        before, showed = self.method.x, self.shown
        self.method.update(arrived, total / sum(weights), mean({i: found[i]["K"] for i in found}), lr)
        self.extrapolate(case, arrived, before, t)
        if self.running:
            self.running = {n: mean({i: found[i]["keeps"]["running"][n] for i in found}) for n in self.running}
        each = list(found.values())
        record = {"round": t + 1, "lr": lr, "cohort": sorted(int(i) for i in active), "dropped": sorted(lost | failed)}
        record |= {"stragglers": late, "train_loss": float(np.mean([turn["loss"] for turn in each]))}
        record |= {"drift": float(np.mean([turn["drift"] for turn in each])), "x": self.shown}
        record["update_norm"] = float(np.linalg.norm(self.shown - showed))
        return record | self.scores(case, t)

    def turn(self, case: Case, i: int, t: int, K: int, planned: int, lr: float, x: Vec) -> dict[str, Any]:
        """One client's turn: what arrives of it, what it keeps."""
        kept = self.kept[i]
        client = Client(case, self.model, self.data, i, t, K, kept["running"] if case.norm == "local" else self.running)
        centre, start = x, self.method.start(x, kept["method"])
        if case.start is not None:
            relaxed = x + case.start["beta"] * (x - kept["last"])
            centre = relaxed if case.start["centre"] == "start" else x
            start = self.method.start(relaxed, kept["method"]) if case.start["centre"] == "start" else relaxed
        name, how = case.optimizer
        decay = np.full_like(x, 0.0 if name == "adamw" else DECAY)
        job = Turn(i, t, K, lr, centre, start, client.gradient, decay, case.gradient_clip, client.kl, planned)
        ends: list[Vec] = []
        whole = job.descend if name == "sgd" else descended(job, name, how)
        job.descend = lambda *how: ends.append(whole(*how)) or ends[0]  # type: ignore[method-assign, func-returns-value]
        up, mine = self.method.turn(job, kept["method"])
        error = kept["error"] or {name: np.zeros_like(a) for name, a in up.items()}
        sent, error = arriving(case, up, error, t, i, self.asked)
        keeps = {"method": mine, "error": error if case.top else {}, "running": client.running}
        keeps["last"] = ends[0]
        drift = float(((ends[0] - x) ** 2).sum())
        return {"up": sent, "keeps": keeps, "K": K, "loss": float(np.mean(client.losses)), "drift": drift}

    def noise(self, case: Case, arrived: Tree, replies: int, failed: int, asked: int, t: int) -> Tree:
        """The server's noise on the mean, or what is missing of the clients'. Who failed because of its data counts as
        zero: a divisor must not depend on data."""
        if case.dp is None:
            return arrived
        counted = replies + failed
        share = 1.0 if case.dp["where"] == "server" else 1 - replies / asked
        size = case.dp["noise"] * case.dp["clip"] * math.sqrt(share) / counted
        vectors = {name: a * replies / counted for name, a in arrived.items() if a.size > 1}
        return {**arrived, **noisy(vectors, size, (case.seed, "dp", t))}

    def extrapolate(self, case: Case, arrived: Tree, before: Vec, t: int) -> None:
        """FedExP; what is shown is the mean of the last two models that were sent."""
        self.shown = self.method.x
        if case.exp is not None:
            room = 2 * (arrived["D"] @ arrived["D"] + case.exp["eps"] * case.exp["decay"] ** (2 * t))
            self.method.x = before + max(1.0, float(arrived["square"][0]) / room) * (self.method.x - before)
            self.shown = (before + self.method.x) / 2

    def scores(self, case: Case, t: int) -> dict[str, Any]:
        names = ("test_loss", "test_accuracy", "validation_loss", "validation_accuracy")
        if (t + 1) % case.eval_every and t + 1 < case.rounds:
            return dict.fromkeys(names)
        sets = (
            [self.data.test]
            if self.data.held is None
            else [self.data.test, (self.data.x[self.data.held], self.data.y[self.data.held])]
        )
        found = [number for x, y in sets for number in self.model.score(self.shown, self.running or None, x, y)]
        return dict(zip(names, [*found, None, None], strict=False))


def stops(case: Case, records: list[dict[str, Any]]) -> bool:
    """Whether a rule ends the run after these rounds."""
    last = records[-1]
    if case.fork and last["round"] <= case.fork["at"]:
        return False
    if case.goal is not None and last["test_loss"] is not None and last["test_loss"] <= case.goal:
        return True
    name = "validation_accuracy" if case.validation else "test_accuracy"
    scores = [record[name] for record in records if record[name] is not None]
    if not case.patience or last[name] is None:
        return False
    best = max(range(len(scores)), key=lambda j: (scores[j], -j))
    return len(scores) - 1 - best >= case.patience


def run(case: Case) -> list[dict[str, Any]]:
    """One record per round: the model that is shown, scores, who took part."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a second one only waits: vectors are short
    try:
        server, records = Server(case), list[dict[str, Any]]()
        while len(records) < case.rounds and not (records and stops(case, records)):
            records.append(server.round(len(records)))
        return records
    finally:
        torch.set_num_threads(threads)
