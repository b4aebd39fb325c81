"""A setting of the convergence theorem and its quantities; that of a run, and which assumptions the run meets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from ..config.lr_schedule import shown
from ..config.warmup import LR, follow_text, followers, lengths, warmup_text
from ..errors import UserError
from ..runs.directory import RunDir
from ..utils.checked_fields import Params, param
from ..utils.files import read_json, read_toml

FORMS = ("printed", "consistent", "corrected", "tracking")
"""`printed`: the theorem as published. `consistent`: the same text made consistent with itself (errata 2, 4, 5, 6, 8,
10), its constants still unproved. `corrected`: the same route with every step proved. `tracking`: another route."""


@dataclass(frozen=True)
class Setting(Params):
    """Everything in the theorem except the starting point; symbols as in the paper.

    Args:
        eta, lam, K: local rate, penalty parameter (1/w), local steps; eta <= lam (erratum 8).
        L: smoothness of every F_i (A1); with noise and a perturbation also of every minibatch loss (erratum 15).
        alpha, rho: weight and step of the ascent; rho is a plain step unless `normalise`, which only `tracking` covers.
        m, T: clients (all of them active) and rounds.
        sigma_l, sigma_g: noise of a minibatch gradient (A2) and heterogeneity (A3, mean over clients).

    Example:
        >>> setting = Setting(eta=0.01, lam=0.1, K=20)
        >>> round(setting.gamma, 4), round(setting.shift, 4)
        (0.8784, 0.0862)
    """

    eta: float = param(0.1, "(0, inf)", "the local rate eta_l")
    lam: float = param(10.0, "(0, inf)", "the penalty parameter lambda, 1/w")
    K: int = param(50, "[1, inf)", "the number of local steps")
    L: float = param(1.0, "(0, inf)", "the smoothness constant")
    alpha: float = param(1.0, "[0, 1]", "the weight of the perturbed gradient")
    rho: float = param(0.0, "[0, inf)", "the ascent step")
    normalise: bool = param(False, about="whether rho is divided by the gradient's norm")
    m: int = param(10, "[1, inf)", "the number of clients")
    T: int = param(100, "[1, inf)", "the number of rounds")
    sigma_l: float = param(0.0, "[0, inf)", "the noise of a minibatch gradient")
    sigma_g: float = param(0.0, "[0, inf)", "the heterogeneity of the clients")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eta > self.lam:
            raise UserError(
                f"Setting: eta must be at most lam, got eta {self.eta:g} and lam {self.lam:g}; above lam no form "
                f"of the theorem holds (erratum 8): lower eta or raise lam"
            )

    def but(self, **changes: Any) -> Self:
        """Return the setting with some fields changed."""
        return replace(self, **changes)

    @property
    def s(self) -> float:
        """s = eta / lam, in (0, 1]: the relative step towards the prox centre."""
        return self.eta / self.lam

    @property
    def gamma(self) -> float:
        """gamma = 1 - (1 - eta/lam)^K."""
        return gamma(self.eta, self.lam, self.K)

    @property
    def tau(self) -> float:
        """tau = (1 - 2 gamma) / gamma, so that x^t - z^t = lam tau mean_i g_hat_i^{t-1}."""
        return (1 - 2 * self.gamma) / self.gamma

    @property
    def shift(self) -> float:
        """r = lam |1 - 2 gamma| / gamma, so that ||x^t - z^t|| = r ||mean_i g_hat_i^{t-1}||."""
        return self.lam * abs(self.tau)

    @property
    def q(self) -> float:
        """q = (alpha L rho)^2: the perturbation moves a gradient by at most sqrt(q) of its norm."""
        return (self.alpha * self.L * self.rho) ** 2

    @property
    def W(self) -> float:
        """W = sum_k (gamma_k/gamma)^2 = s (2 - gamma) / ((2 - s) gamma), in [1/K, 1]: the factor of averaged noise."""
        return self.s * (2 - self.gamma) / ((2 - self.s) * self.gamma)


def gamma(eta: float, lam: float, K: int) -> float:
    """Return gamma = 1 - (1 - eta/lam)^K, accurate also for small eta/lam.

    Example:
        >>> round(gamma(0.1, 10.0, 50), 3)
        0.395
    """
    s = _ratio(eta, lam, K)
    return float(-np.expm1(K * np.log1p(-s))) if s < 1 else 1 - (1 - s) ** K


def gamma_k(eta: float, lam: float, K: int) -> np.ndarray:
    """Return gamma_k = (eta/lam) (1 - eta/lam)^{K-1-k} for k = 0..K-1; they add up to gamma and increase with k.

    For lam < eta < 2 lam, which the printed theorem allows, they alternate in sign (erratum 8).

    Example:
        >>> gamma_k(1.5, 1.0, 3).tolist()
        [0.375, -0.75, 1.5]
    """
    s = _ratio(eta, lam, K)
    weights: np.ndarray = s * (1 - s) ** np.arange(K - 1, -1, -1.0)
    return weights


def _ratio(eta: float, lam: float, K: int) -> float:
    if not (0 < eta < 2 * lam):
        raise UserError(f"gamma: eta must lie in (0, 2 lam), got eta {eta:g} and lam {lam:g}; lower eta or raise lam")
    if K < 1:
        raise UserError(f"gamma: K must be at least 1, got {K}; it is the number of local steps")
    return eta / lam


def P(setting: Setting, form: str = "corrected") -> float:
    """Return P from 1/P = 1 - 24 lam^2 L^2 (1 - 2 gamma)^2 / gamma^2; infinite if the right side is not positive.

    The last display of the paper's proof prints (1 - 2 gamma^2) instead: form="slip" (erratum 2).

    Example:
        >>> round(P(Setting(eta=0.01, lam=0.1, K=20)), 3)
        1.217
    """
    part = 1 - 2 * setting.gamma**2 if form == "slip" else (1 - 2 * setting.gamma) ** 2
    inverse = 1 - 24 * (setting.lam * setting.L) ** 2 * part / setting.gamma**2
    return 1 / inverse if inverse > 0 else float("inf")


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
    """Read the setting of a run from `config.toml`, `rounds.jsonl` and `inspect.json`; K is for files that do not
    contain it (a config with local_epochs and no finished round)."""
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
    summary = RunDir(path).summary()
    stopped = str(summary.get("status")).startswith("stopped: ")
    fields = {
        "eta": float(config["lr"]),
        "lam": lam,
        "K": K or _steps(path, config, 1 + float(method["ascent_fraction"]) if alpha * rho else 1.0),
        "alpha": alpha,
        "rho": rho,
        "normalise": bool(method.get("normalise", False)),
        "m": int(config["clients"]),
        "T": int(summary["rounds"] if stopped else config["rounds"]),
    }
    found = read_json(path / "inspect.json").items()  # the measurements of `fedspeed inspect`
    seen = {key: value for key, value in found if type(value) in (int, float) and 0 <= value < 1e300}
    sigma_g = float(seen["dissimilarity"]) ** 0.5 if "dissimilarity" in seen else None
    return RunSetting(fields, _facts(config, alpha * rho), seen.get("eigenvalue"), sigma_g)


def _facts(config: dict[str, Any], ascent: float) -> tuple[Fact, ...]:
    method, steps, weighting, clip = (config[key] for key in ("method", "local_steps", "weighting", "clip"))
    full = config["active"] == config["clients"] and config["cohort"] == "fixed"
    decay, weights = config["lr_decay"], config["weight_decay"]
    warmup = warmup_text(config.get("warmup", ""))
    warmed, schedule = lengths(warmup), str(config.get("lr_schedule", ""))
    constant = decay == 1 and LR not in warmed and schedule in ("", "constant")
    rate = f"lr_schedule {shown(schedule)}" if schedule else f"lr_decay {decay:g}" if decay else LEFT_OPEN
    rate += f", warmup {warmup}" if LR in warmed else ""
    equal = f"local_steps {steps}" if steps else "local_epochs: only if all clients hold equally many samples"
    drawn = "reshuffled every epoch; independent only if a batch holds all of a client's samples"
    outside = f"weight_decay {weights:g}, added outside the perturbation"
    facts = [
        Fact("every client in every round", full, f"active {config['active']} of {config['clients']}"),
        Fact("a constant rate", constant, rate),
        Fact("the same K everywhere", True if steps else None, equal),
        Fact("uniform averages", weighting == "uniform", f"weighting {weighting}"),
        Fact("no clipping", clip == 0, f"clip {clip:g}"),
        Fact("weight decay inside F_i", weights == 0 or ascent == 0, outside),
        Fact("independent minibatches (A2)", None, drawn),
    ]
    if optimizer := config.get("local_optimizer"):
        facts.append(Fact("plain SGD steps", optimizer == "sgd", f"local_optimizer {optimizer}"))
    if config.get("until"):
        facts.append(Fact("the same settings in all rounds", False, "a fork: its first rounds had others"))
    if method["name"] == "fedspeed":
        prox, correction = method["prox"], method["correction"]
        about = f"prox {prox}, correction {correction}"
        facts.insert(0, Fact("prox term and correction on", correction and prox, about))
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
