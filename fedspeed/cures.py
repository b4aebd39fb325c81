"""What an illness of a run usually means, and what to try, as options that the run's config can take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .plan import Plan

MEANS = {
    "constant outputs": "The model gives every sample the same scores. Large first steps have driven the features to "
    "one common value (a start where the loss is strongly curved, a high rate, a large rho), and hardly any gradient "
    "leads back. resnet18_gn from its usual start does this; one whose residual branches start at zero does not.",
    "dead layer": "A layer gives zeros for every sample: its units are switched off, by a huge step or by a negative "
    "bias before a ReLU. What lies before it gets no gradient, so no later rate brings it back; the start or the "
    "first steps must be other ones.",
    "untrained weights": "Weights are where they started but for weight decay, and the loss, which needs them, has no "
    "gradient there: a layer behind them is dead, or the forward pass cuts them off (detach, no_grad).",
    "loss above guessing": "Equal odds for all classes would lose less. Local steps overshoot (the rate, or their "
    "number, is too large for this model), or clients go so far apart that their mean is worse than each of them.",
    "chance": "The accuracy is that of always naming one class. Training is on a plateau at its start, or what was "
    "learned has been lost again.",
    "standing still": "The model is where it started: steps are far too small to be seen, or no gradient arrives.",
    "growing state": "A vector that server or clients carry from round to round, a correction for example, grows "
    "instead of settling. Corrections that are seldom refreshed (few active clients), or that come from local "
    "steps that overshoot, feed themselves; numbers overflow in the end.",
    "diverged": "Numbers became NaN or Inf, so the run was stopped; nothing of that round was kept.",
}
TRY = {
    "constant outputs": ("start", "warmup", "clip", "lr", "rho", "server"),
    "dead layer": ("lr", "warmup", "clip", "he", "start"),
    "untrained weights": ("lr", "warmup", "clip", "he", "start"),
    "loss above guessing": ("start", "warmup", "clip", "lr", "steps", "server"),
    "chance": ("start", "warmup", "lr", "rho", "clip"),
    "standing still": ("higher lr", "start"),
    "growing state": ("lr", "steps", "clip", "active", "server", "warmup"),
    "diverged": ("lr", "clip", "steps", "warmup", "server"),
}
"""What to try, in order; keys of `CURES`."""


class Cure(NamedTuple):
    """One thing to try: a key of the config, its value, and why."""

    key: str
    value: str
    why: str

    @property
    def option(self) -> str:
        """As the command line takes it.

        Example:
            >>> Cure("model.init", "zero-residual", "").option, Cure("local_steps", "5", "").option
            ('--set model.init=zero-residual', '--local-steps 5')
        """
        return f"--set {self.key}={self.value}" if "." in self.key else f"--{self.key.replace('_', '-')} {self.value}"


def cures(name: str, config: dict[str, Any]) -> list[Cure]:
    """What to try for an illness, in order: what this config can have and does not have yet.

    Args:
        config: its tables, as in `config.toml`.
    """
    keys = TRY[name]
    if _number(config.get("lr")) > 10 * Plan.lr:  # a rate far above the usual one is to blame before all else
        keys = tuple(sorted(keys, key=lambda key: key != "lr"))
    made = (CURES[key](config) for key in keys)
    return [cure for cure in made if cure is not None]


def _start(config: dict[str, Any]) -> Cure | None:
    model = _table(config, "model")
    if model["name"] != "resnet18_gn" or model.get("init") == "zero-residual":
        return None
    return Cure(
        "model.init", "zero-residual", "residual branches start at zero, so that a block starts as its shortcut"
    )


def _he(config: dict[str, Any]) -> Cure | None:
    model = _table(config, "model")
    if model["name"] != "mlp" or model.get("init") == "he":
        return None
    return Cure("model.init", "he", "biases start at zero, weights as wide as ReLU needs")


def _warmup(config: dict[str, Any]) -> Cure | None:
    rounds = min(10, int(_number(config.get("rounds")) or 0) // 4)  # one longer than the run would be refused
    if rounds < 2 or config.get("warmup"):
        return None
    rho = f",rho={rounds}" * bool(_number(_table(config, "method").get("rho")))
    return Cure("warmup", f"lr={rounds}{rho}", "small first steps, while the loss is most curved")


def _clip(config: dict[str, Any]) -> Cure | None:
    now = _number(config.get("clip"))
    value = 10.0 if not now or now > 10 else now / 10
    return Cure("clip", f"{value:g}", f"no gradient is longer than this; now {f'{now:g}' if now else 'not clipped'}")


def _lr(config: dict[str, Any]) -> Cure | None:
    now = _number(config.get("lr"))
    lower = 0.2 * now if now <= 10 * Plan.lr else Plan.lr
    return Cure("lr", _two_digits(lower), f"smaller local steps; now {now:g}") if now else None


def _higher_lr(config: dict[str, Any]) -> Cure | None:
    now = _number(config.get("lr"))
    return Cure("lr", _two_digits(max(10 * now, Plan.lr / 10)), f"larger local steps; now {now:g}") if now else None


def _rho(config: dict[str, Any]) -> Cure | None:
    now = _number(_table(config, "method").get("rho"))
    return Cure("method.rho", _two_digits(now / 10), f"a shorter ascent step; now {now:g}") if now else None


def _steps(config: dict[str, Any]) -> Cure | None:
    for key in ("local_steps", "local_epochs"):
        now = int(_number(config.get(key)))
        if now:
            less = Cure(key, str(max(1, now // 5)), f"clients stay closer to the model they were sent; now {now}")
            return less if now > 1 else None
    return None


def _active(config: dict[str, Any]) -> Cure | None:
    now, clients = int(_number(config.get("active"))), int(_number(config.get("clients")))
    more = min(clients, 2 * now)
    why = f"what clients keep is refreshed more often; now {now} of {clients}"
    return Cure("active", str(more), why) if more > now > 0 else None


def _server(config: dict[str, Any]) -> Cure | None:
    method = _table(config, "method")
    if method["name"] == "fedspeed" and method.get("server") == "active":
        return Cure("method.server", "all", "the mean of all corrections in place of a random part of them")
    now = _number(method.get("eta_g"))
    return Cure("method.eta_g", _two_digits(now / 2), f"smaller steps of the server; now {now:g}") if now else None


CURES: dict[str, Callable[[dict[str, Any]], Cure | None]] = {
    "start": _start,
    "he": _he,
    "warmup": _warmup,
    "clip": _clip,
    "lr": _lr,
    "higher lr": _higher_lr,
    "rho": _rho,
    "steps": _steps,
    "active": _active,
    "server": _server,
}


def _two_digits(value: float) -> str:
    return f"{float(f'{value:.2g}'):g}"


def _table(config: dict[str, Any], key: str) -> dict[str, Any]:
    """A table of a config; one that may be somebody else's, so whatever stands there."""
    found = config.get(key)
    return {"name": "", **found} if isinstance(found, dict) else {"name": found}


def _number(value: Any) -> float:
    """A number that can be computed with, 0 for anything else."""
    return float(value) if type(value) in (int, float) and 0 < value < 1e300 else 0.0
