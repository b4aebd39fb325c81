"""The matrix: what a run can be made of, in one table; a run by the package, and whether it is the plain loop's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import plain
import plainmethods
from safetensors.numpy import load_file

from fedspeed.config.config import Config
from fedspeed.errors import UserError
from fedspeed.runs.directory import RunDir
from fedspeed.runs.fork import fork
from fedspeed.runs.launch import extend, prepare, run_config

FILE = Path(plain.__file__).with_name("matrixfiles.py")
DIMENSIONS: dict[str, dict[str, dict[str, Any]]] = {
    "method": {name: {"method": name} for name in plainmethods.METHODS if name != "fedspeed"}
    | {
        "fedpd": {"method": "fedpd", "active": 0},
        "fedspeed active": {"method": "fedspeed", "fields": {"server": "active"}},
        "fedspeed without correction": {"method": "fedspeed", "fields": {"correction": False}},
        "fedspeed mixed": {"method": "fedspeed", "fields": {"alpha": 0.6, "ascent_fraction": 0.75}},
        "fedadmm gong": {"method": "fedadmm", "fields": {"variant": "gong", "eta_g": 0.7}},
        "fedadmm active": {"method": "fedadmm", "fields": {"variant": "active"}},
        "fednsam momentum": {"method": "fednsam", "fields": {"ascent": "momentum"}},
    },
    "around": {
        "fedinit": {"start": {"beta": 0.3, "centre": "start"}},
        "fedinit global": {"start": {"beta": 0.3, "centre": "global"}},
        "fedexp": {"exp": {"eps": 1e-3, "decay": 0.9}},
        "fedexp outermost": {"exp": {"eps": 1e-3, "decay": 0.9}, "outermost": True},
    },
    "compression": {
        "topk": {"top": {"fraction": 0.3, "feedback": True}},
        "topk without feedback": {"top": {"fraction": 0.3, "feedback": False}},
        "quantise": {"grid": {"bits": 4, "bucket": 32}},
    },
    "privacy": {
        "clip": {"clip": 0.2},
        "dp": {"dp": {"noise": 0.5, "clip": 0.2, "where": "server"}, "local_steps": 3},  # K must not depend on data
        "dp clients": {"dp": {"noise": 0.5, "clip": 0.2, "where": "clients"}, "local_steps": 3},
    },
    "cohort": {"bernoulli": {"cohort": "bernoulli"}, "all": {"active": 0}},
    "weighting": {"samples": {"weighting": "samples"}},
    "stragglers": {"stragglers": {"stragglers": 0.6}},
    "dropout": {"dropout": {"dropout": 0.4}},
    "on_client_error": {"drop": {"ill": True}},
    "validation": {"validation": {"validation": "0.25"}, "validation clients": {"validation": "clients:2"}},
    "local work": {"local_steps": {"local_steps": 3}, "gradient clip": {"gradient_clip": 0.4}},
    "local optimizer": {
        "momentum": {"optimizer": ("momentum", {"beta": 0.7})},
        "nesterov": {"optimizer": ("nesterov", {"beta": 0.7})},
        "adam": {"optimizer": ("adam", {"beta1": 0.8, "beta2": 0.9, "eps": 1e-3}), "lr": 0.05},
        "adamw": {"optimizer": ("adamw", {"beta1": 0.8, "beta2": 0.9, "eps": 1e-3}), "lr": 0.05},
    },
    "loss": {"smoothing": {"smoothing": 0.2}},
    "schedule": {
        "warm-up lr": {"warmup": {"lr": 3}},
        "warm-up rho": {"warmup": {"rho": 3}},
        "decay": {"lr_decay": 0.8},
        "step decay": {"milestones": (1, 3)},
        "eval_every": {"eval_every": 2},
    },
    "batch norm": {"group": {"norm": "group"}, "local": {"norm": "local"}, "average": {"norm": "average"}},
    "state dtype": {"float16": {"stored": "float16"}, "bfloat16": {"stored": "bfloat16"}},
    "fork": {
        "fork lr": {"fork": {"at": 2, "lr": 0.05}},
        "fork weighting": {"fork": {"at": 2, "weighting": "samples"}},
        "fork method": {"fork": {"at": 2}},
    },
    "extend": {"extend": {"extend": 3}},
    "stop rule": {"stop_at": {"goal": 1.17}, "patience": {"patience": 1}},
    "measured": {"client metrics": {"client_metrics": "every=1,own"}, "network": {"network": "lte"}},
    "states": {"disk": {"states": "disk"}},
    "engine": {"block": {"engine": "block"}},
    "back end": {"process": {"backend": "process"}},
}
"""Every dimension, its values beside the default, and what each is in the words of `plain.Case`; what must change
nothing (`HOW`) is no part of a case. The default of all is FedSpeed over 3 of 6 unequal clients."""
OPTIMIZERS = tuple(DIMENSIONS["local optimizer"])
BASE = dict.fromkeys(("fork weighting", *OPTIMIZERS), "fedlesam") | {
    "fedexp": "fedgamma",
    "fedexp outermost": "fedgamma",
}
"""The method where none is asked for, for values that are refused with FedSpeed, or with FedExP's; the first of them
counts."""
HOW = ("engine", "backend", "extend", "outermost", "client_metrics", "network", "states")
FIELD = {
    **dict.fromkeys(("fedavg", "fednova", "scaffold"), ("eta_g", 0.5)),
    **dict.fromkeys(("fedadam", "fedyogi", "fedadagrad"), ("eta_g", 0.05)),
    **dict.fromkeys(("fedadmm", "fedpd", "afedpd"), ("lam", 5.0)),
    **dict.fromkeys(("fedacg", "fedmoswa", "fedgmt"), ("gamma", 0.5)),
    **{"fedprox": ("mu", 0.3), "fedcm": ("alpha", 0.3), "feddyn": ("alpha", 0.2), "fedswa": ("alpha", 1.2)},
}
"""What `fork method` changes in the method, and to what; rho of all others."""
DPS, TOPKS = ("dp", "dp clients"), ("topk", "topk without feedback")
ALL_CLIENTS = ("scaffold", "feddyn", "fedadmm", "fedgamma", "fedsmoo", "afedpd", "afedpdsam", "fedgloss", "fedwmsam")
ALL_CLIENTS += ("fedtoga", "fedlesamd", "fedlesams", "fedgmt", "fedspeed mixed")
PLAIN_STEP = ("fedavg", "fedprox", "scaffold", "fedcm", "fedsam", "mofedsam", "fedgamma", "fedlesam", "fedlesams")
GRADIENT_FROM_D = (
    "fednova",
    "scaffold",
    "fedcm",
    "mofedsam",
    "fedgamma",
    "fedwmsam",
    "fedtoga",
    "fedlesams",
    "fedmoswa",
)
NO_RHO = ("fedavg", "fedprox", "fedadam", "fedyogi", "fedadagrad", "fednova", "scaffold", "fedcm", "feddyn", "fedadmm")
NO_RHO += ("fedpd", "afedpd", "fedacg", "fedgmt", "fedadmm gong", "fedadmm active")
Rule = tuple[tuple[str, ...], tuple[str, ...], str]
REFUSED: list[Rule] = [
    (
        ("fedexp", "fedexp outermost"),
        tuple(name for name in DIMENSIONS["method"] if name not in PLAIN_STEP),
        "their server takes another step than the mean update, or one at a rate of its own",
    ),
    (("fedexp outermost",), DPS, "it sends a number about the upload that DP has bounded"),
    (("fedexp",), (*TOPKS, "quantise", "clip"), "they would change the D whose square it has measured"),
    (DPS, ("fedexp", "fednova", "fedwmsam"), "they send numbers that DP cannot bound"),
    (DPS, ("drop",), "the divisor would depend on a client's data"),
    (("fedinit global",), GRADIENT_FROM_D, "D / (K lr) would count the relaxation as a gradient"),
    (OPTIMIZERS, GRADIENT_FROM_D, "D / (K lr) is a mean of gradients after plain SGD steps alone"),
    (("fedpd",), ("bernoulli", "dropout", "drop"), "every client in every round: a missing reply is not defined"),
    (
        ("fork weighting",),
        ALL_CLIENTS,
        "a mean over all clients that the server keeps has the weights of all its rounds",
    ),
    (
        DPS,
        ("bernoulli", "samples", "fork weighting"),
        "the accountant is for cohorts of one size in which clients count equally",
    ),
    (DPS, ("local", "average"), "the statistics of batch norm would go to the server as they are"),
    (("block",), ("local", "average"), "clients side by side have one copy of the layers"),
    (("warm-up rho",), NO_RHO, "there is no rho"),
    (("warm-up rho",), ("fedswa", "fedmoswa"), "their rho is where the rate of a round ends, not a length"),
]
"""Pairs that are refused, and why; all others are the plain loop's."""
KNOWN: list[Rule] = []
"""Pairs that differ from the plain loop and are not refused: faults, each with what it is. To be empty."""
WORDS = {
    **{"dp clients": "dp", "fedinit global": "fedinit", "fedexp outermost": "fedexp", "topk without feedback": "topk"},
    **{"samples": "weighting", "drop": "on_client_error", "local": "batch_norm", "average": "batch_norm"},
    **{"block": "engine block", "warm-up rho": "rho", "fork weighting": "weighting"},
    **{name: case["method"] for name, case in DIMENSIONS["method"].items()},
}
"""How a message names a value, where not by its own name."""
Pair = tuple[tuple[str, str], ...]


def pairs() -> Iterator[Pair]:
    """Two values, each of another dimension."""
    for a, b in itertools.combinations(DIMENSIONS, 2):
        yield from (((a, x), (b, y)) for x in DIMENSIONS[a] for y in DIMENSIONS[b])


def described(pair: Pair) -> str:
    return " + ".join(name for _, name in pair)


def of(rules: list[Rule], pair: Pair) -> str:
    """Why a rule has a pair; "" if none has."""
    names = {name for _, name in pair}
    return next((why for left, right, why in rules if any({a, b} == names for a in left for b in right)), "")


def combined(pair: Pair) -> tuple[plain.Case, dict[str, Any]]:
    """The case, and what is to be the same without."""
    given: dict[str, Any] = {}
    for dimension, name in pair:
        given |= DIMENSIONS[dimension][name]
    for name in BASE:
        if name in dict(pair).values():
            given.setdefault("method", BASE[name])
    how = {name: given.pop(name) for name in HOW if name in given}
    case = plain.Case(**given)
    if case.fork == {"at": 2}:
        name, value = FIELD.get(case.method, ("rho", 0.05))
        case = plain.Case(**{**given, "fork": {"at": 2, "fields": {**case.fields, name: value}}})
    return case, how


def method_table(case: plain.Case, how: dict[str, Any]) -> dict[str, Any]:
    """The method and its wrappers, from the inside out, as a config has them."""
    table: dict[str, Any] = {"name": case.method, **case.fields}
    around = [("fedinit", case.start), ("topk", case.top), ("quantise", case.grid)]
    around += [("clip", {"norm": case.clip} if case.clip else None), ("dp", case.dp)]
    around.insert(len(around) if "outermost" in how else 1, ("fedexp", case.exp))
    for name, fields in around:
        table = {"name": name, "base": table, **fields} if fields else table
    return table


def config(case: plain.Case, how: dict[str, Any]) -> Config:
    """The same run in the words of the package."""
    trained = len(plain.SIZES) - (int(case.validation[8:]) if case.validation.startswith("clients:") else 0)
    said = {"active": case.active or trained}
    said |= {name: getattr(case, name) for name in ("cohort", "weighting", "stragglers", "dropout")}
    said |= {name: getattr(case, name) for name in ("validation", "lr", "lr_decay", "warmup", "eval_every", "patience")}
    said |= {"lr_schedule": f"step:{','.join(map(str, case.milestones))}:0.5"} if case.milestones else {}
    said |= {"local_steps": case.local_steps, "clip": case.gradient_clip or 0.0}
    name, values = case.optimizer
    said["local_optimizer"] = ":".join([name, *([",".join(f"{k}={v}" for k, v in values.items())] if values else [])])
    said |= {"loss": f"cross-entropy:smoothing={case.smoothing}" if case.smoothing else ""}
    return Config.from_dict(
        said
        | {
            "method": method_table(case, how),
            "model": {"name": f"{FILE}:build", "norm": bool(case.norm), "ill": case.ill},
            "data": {"name": f"{FILE}:load", "ill": case.ill},
            "split": "natural",
            "batch_size": plain.BATCH,
            "local_epochs": plain.EPOCHS,
            "weight_decay": plain.DECAY,
            "on_client_error": "drop" if case.ill else "stop",
            "batch_norm": case.norm or "refuse",
            "state_dtype": case.stored or "same",
            "stop_at": "" if case.goal is None else f"loss={case.goal}",
            "rounds": how.get("extend", case.rounds),
            "engine": how.get("engine", "loop"),
            "backend": how.get("backend", "serial"),
            "workers": 2 if "backend" in how else 0,
            "device": "cpu",
            **{name: how[name] for name in ("client_metrics", "network", "states") if name in how},
            "seed": case.seed,
        }
    )


def made(case: plain.Case, how: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """The records of the run as the package makes it; a run in a folder has the last model alone."""
    asked = config(case, how)
    if case.fork is None and "extend" not in how:
        with prepare(asked) as run:
            return [{**vars(record), "x": run.x.numpy()} for record in run]
    out = folder / "run"
    run_config(asked, out)
    if "extend" in how:
        extend(out, case.rounds, allow_code=True)
    if case.fork is not None:
        inside = "method." + "base." * (len(list(_names(method_table(case, how)))) - 1)
        changes = {name: value for name, value in case.fork.items() if name in ("lr", "weighting")}
        changes |= {inside + name: value for name, value in case.fork.get("fields", {}).items()}
        fork(out, case.fork["at"], folder / "fork", changes, allow_code=True)
        out = folder / "fork"
    records = [vars(record) for record in RunDir(out).records()]
    tensors = load_file(RunDir(out).model_file)
    names = sorted((name for name in tensors if name.endswith(("weight", "bias"))), key=_place)
    return [*records[:-1], {**records[-1], "x": np.concatenate([tensors[name].ravel() for name in names])}]


def _names(table: dict[str, Any]) -> Iterator[str]:
    yield table["name"]
    if "base" in table:
        yield from _names(table["base"])


def _place(name: str) -> tuple[int, bool]:
    layer, _, part = name.partition(".")
    return int(layer), part == "bias"


def fault(pair: Pair, folder: Path) -> str:
    """What is wrong with a pair; "" if it is the plain loop's, or refused in one line that names both and expected."""
    expected, (case, how) = of(REFUSED, pair), combined(pair)
    try:
        found = made(case, how, folder)
    except UserError as error:
        told = str(error)
        unnamed = [word for _, name in pair if (word := WORDS.get(name, name)) not in told.lower()]
        if not expected:
            return f"is refused: {told}"
        return f"is refused without {unnamed} in one line: {told}" if unnamed or "\n" in told else ""
    if expected:
        return f"is not refused ({expected})"
    return difference(found, truth(case))


def truth(case: plain.Case) -> list[dict[str, Any]]:
    """The plain loop's records; once per case, which engine and back end share."""
    if repr(case) not in _found:
        _found[repr(case)] = plain.run(case)
    return _found[repr(case)]


_found: dict[str, list[dict[str, Any]]] = {}


COMPARED = ("round", "lr", "cohort", "dropped", "stragglers", "train_loss", "drift", "update_norm", "test_loss")
COMPARED += ("test_accuracy", "validation_loss", "validation_accuracy", "x")


def difference(found: list[dict[str, Any]], truth: list[dict[str, Any]]) -> str:
    """What is the first to differ beyond rounding; "" if nothing is."""
    for mine, true in zip(found, truth, strict=False):
        for name in COMPARED:
            if name in mine and not same(mine[name], true[name]):
                return f"round {true['round']}: {name} {shown(mine[name])}, the plain loop has {shown(true[name])}"
    if len(found) != len(truth):
        return f"{len(found)} rounds, the plain loop has {len(truth)}"
    return ""


def same(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b or (a is None and isinstance(b, float) and math.isnan(b))
    return np.shape(a) == np.shape(b) and bool(np.allclose(a, b, rtol=1e-8, atol=1e-9, equal_nan=True))


def shown(a: Any) -> str:
    return f"of norm {np.linalg.norm(a):.9g}" if isinstance(a, np.ndarray) else repr(a)
