"""The setting of a run, read from its directory, and which assumptions of the theorem it meets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from ..config.lr_schedule import shown
from ..config.warmup import LR, follow_text, followers, lengths, warmup_text
from ..errors import UserError
from ..runs.directory import RunDir
from ..utils.files import read_text, read_toml

FAMILY = ("fedspeed", "feddyn", "fedadmm")
"""Under full participation FedDyn and FedADMM are FedSpeed with rho = 0, so the theorem covers them."""

LEFT_OPEN = "lr_decay 0 takes the method's own, below 1"


class Fact(NamedTuple):
    """An assumption of the theorem about a run; `holds` is None if the files do not say."""

    name: str
    holds: bool | None
    why: str


class RunSetting(NamedTuple):
    """The fields of `Setting` that a run determines (not L, sigmas and gap), and the assumptions."""

    fields: dict[str, Any]
    facts: tuple[Fact, ...]
    L: float | None  # the largest curvature at the run's last model, if `fedspeed inspect` measured it
    sigma_g: float | None  # the clients' dissimilarity there


def read_run(path: Path, K: int | None = None) -> RunSetting:
    """Read the setting of a run from `config.toml`, `rounds.jsonl` and `inspect.json`.

    Args:
        K: local steps, if the files do not contain them (a config with local_epochs and no finished round).
    """
    try:
        return _read(path, K)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"theory: {path} is not a run of fedspeed, or was changed ({type(error).__name__}: {error}); expected what "
            f"`fedspeed run` writes"
        ) from None


def _read(path: Path, K: int | None) -> RunSetting:
    config = _config(path)
    method = config.get("method", {})
    name = method.get("name")
    if name not in FAMILY:
        raise UserError(
            f"theory: {path} is a run of {name}; the theorem is about FedSpeed (and feddyn and fedadmm, which are "
            f"FedSpeed with rho = 0 under full participation)"
        )
    lam = 1 / float(method["alpha"]) if name == "feddyn" else float(method["lam"])
    ascends = name == "fedspeed"
    alpha, rho = (float(method["alpha"]), float(method["rho"])) if ascends else (1.0, 0.0)
    fields = {
        "eta": float(config["lr"]),
        "lam": lam,
        "K": K or _steps(path, config, 1 + float(method["ascent_fraction"]) if alpha * rho else 1.0),
        "alpha": alpha,
        "rho": rho,
        "normalise": bool(method.get("normalise", False)),
        "m": int(config["clients"]),
        "T": _rounds(path, config),
    }
    seen = _inspected(path)
    spread = seen.get("dissimilarity")
    return RunSetting(
        fields, _facts(config, alpha * rho), seen.get("eigenvalue"), None if spread is None else float(spread) ** 0.5
    )


def _rounds(path: Path, config: dict[str, Any]) -> int:
    """Return T: all rounds, or the finished ones of a run that a rule stopped."""
    summary = RunDir(path).summary()
    return int(summary["rounds"] if str(summary.get("status")).startswith("stopped: ") else config["rounds"])


def _facts(config: dict[str, Any], ascent: float) -> tuple[Fact, ...]:
    method = config["method"]
    full = config["active"] == config["clients"] and config["cohort"] == "fixed"
    decay = config["lr_decay"]
    warmup = warmup_text(config.get("warmup", ""))
    warmed, schedule = lengths(warmup), str(config.get("lr_schedule", ""))
    constant = decay == 1 and LR not in warmed and schedule in ("", "constant")
    facts = [
        Fact("every client in every round", full, f"active {config['active']} of {config['clients']}"),
        Fact(
            "a constant rate",
            constant,
            (f"lr_schedule {shown(schedule)}" if schedule else f"lr_decay {decay:g}" if decay else LEFT_OPEN)
            + (f", warmup {warmup}" if LR in warmed else ""),
        ),
        Fact(
            "the same K everywhere",
            True if config["local_steps"] else None,
            f"local_steps {config['local_steps']}"
            if config["local_steps"]
            else "local_epochs: only if all clients hold equally many samples",
        ),
        Fact("uniform averages", config["weighting"] == "uniform", f"weighting {config['weighting']}"),
        Fact("no clipping", config["clip"] == 0, f"clip {config['clip']:g}"),
        Fact(
            "weight decay inside F_i",
            config["weight_decay"] == 0 or ascent == 0,
            f"weight_decay {config['weight_decay']:g}, added outside the perturbation",
        ),
        Fact(
            "independent minibatches (A2)",
            None,
            "reshuffled every epoch; independent only if a batch holds all of a client's samples",
        ),
    ]
    if steps := config.get("local_optimizer"):
        facts.append(Fact("plain SGD steps", steps == "sgd", f"local_optimizer {steps}"))
    if config.get("until"):
        facts.append(Fact("the same settings in all rounds", False, "a fork: its first rounds had others"))
    if method["name"] == "fedspeed":
        on = method["correction"] and method["prox"]
        facts.insert(
            0, Fact("prox term and correction on", on, f"prox {method['prox']}, correction {method['correction']}")
        )
        if ascent:
            facts.append(Fact("both gradients on one minibatch", method["ascent_fraction"] == 1, "ascent_fraction"))
        if ascent and "rho" in warmed:
            facts.append(Fact("a constant rho", False, f"warmup {warmup}"))
        elif ascent and "rho" in followers(follow_text(config.get("follow_lr", ""))):
            facts.append(Fact("a constant rho", constant, "follow_lr rho"))
    return tuple(facts)


def _config(path: Path) -> dict[str, Any]:
    file = RunDir(path).config_file if path.is_dir() else path
    config = read_toml(file)
    needed = ("method", "lr", "clients", "active", "rounds", "cohort", "lr_decay", "weighting", "clip", "weight_decay",
              "local_steps")  # fmt: skip
    missing = [key for key in needed if key not in config]
    if missing or not isinstance(config["method"], dict):
        raise UserError(
            f"theory: {file} is not the config of a run, it lacks {missing[0] if missing else 'a [method] table'}; "
            f"`fedspeed run` writes a complete one"
        )
    return config


def _steps(path: Path, config: dict[str, Any], gradients: float) -> int:
    """Return K: the given one, or computed from the gradients of the first round."""
    if config["local_steps"]:
        return int(config["local_steps"])
    try:
        first = next(RunDir(path).lines())
        return max(1, round(float(first["grad_evals"]) / gradients / len(first["cohort"])))
    except (StopIteration, ValueError, KeyError):
        raise UserError(
            f"theory: {path} gives local_epochs and has no finished round to count steps in; give --K"
        ) from None


def _inspected(path: Path) -> dict[str, float]:
    """Return the measurements of `fedspeed inspect`; only finite numbers >= 0."""
    try:
        found = json.loads(read_text(path / "inspect.json"))
    except (OSError, ValueError, RecursionError):
        return {}
    numbers = found.items() if isinstance(found, dict) else ()
    return {key: value for key, value in numbers if type(value) in (int, float) and 0 <= value < 1e300}
