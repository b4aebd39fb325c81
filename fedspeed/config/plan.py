"""`Plan`: the settings of training beside method, model and data. Defaults are the paper's: 10 of 100 clients.

A field states its range here; `utils/checked_fields.py` raises for a value outside of it, such as `lr = -1`.
"""

from __future__ import annotations

import inspect
import math
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, get_type_hints

from ..errors import UserError
from ..methods.base import Method, nested
from ..methods.local_optimizers import Adam, local_optimizer, optimizer_text
from ..utils.checked_fields import Params, param
from ..utils.registry import backend_names
from .lr_schedule import extremes, lr_factor, schedule_text, shown
from .network import parse_devices, parse_network
from .spec import SETTINGS, SIZED, Setting, as_setting, cohort_name, require_cohort, setting_text
from .stopping import goal_text, require_rules, time_text
from .warmup import LR, factor, fit_rounds, follow_text, following, method_at, shared, warmup_text

if TYPE_CHECKING:
    from .config import Config

# Fields of one heading of `--help`. `later`: added after configs were stored, which keep their digests. `placement`: it
# says where and how a run is computed, and changes no bit.
federation = partial(param, group="federation")
local_work = partial(param, group="model and local work")
later_work = partial(local_work, later=True)
fidelity = partial(param, group="clipping and fidelity")
course = partial(param, group="run")
later_course = partial(course, later=True)
stored = partial(course, placement=True)
fault = partial(param, group="faults")
scenario = partial(param, group="simulated time", later=True)
machine = partial(param, group="machine")
placed = partial(machine, placement=True)
ray = partial(placed, later=True)


@dataclass(frozen=True)
class Plan(Params):
    """Everything `simulate` needs beside method, model and data; each field is also a CLI option and a TOML key."""

    rounds: int = course(100, "[1, 1e7]", "the number of communication rounds T")
    active: int = federation(0, "[0, 1e8]", "the number of clients active in a round, S; 0 takes 10, or all if fewer")
    cohort: Setting = federation(  # noqa: RUF009
        "fixed",
        None,
        "who takes part: `fixed`, S at random; `bernoulli`, each alone; `cyclic` or `cyclic:in-order`, in turn; "
        "`weighted:samples`; `availability:FILE`, by a trace; or file.py:sample",
    )
    local_epochs: int = local_work(5, "[1, 1e6]", "the number of local epochs E; K = E ceil(n_i / batch_size)")
    local_steps: int = local_work(0, "[0, 1e7]", "the number of local steps K; 0 takes local_epochs instead")
    batch_size: int = local_work(50, "[1, inf)", "the minibatch size B; the last, smaller batch of an epoch is kept")
    lr: float = local_work(0.1, "(0, inf)", "the local learning rate eta_l in round 1", tune="0.01..1:log")
    lr_decay: float = local_work(0.998, "[0, 1]", "the factor on lr per round; 0 takes the paper's own for the method")
    lr_schedule: str = later_work(
        "",
        None,
        "the learning-rate schedule over rounds, instead of lr_decay: constant, exponential:0.998, step:30,60:0.1, "
        "cosine, cosine:floor=0.01,rounds=500, polynomial:2, piecewise:1=1,50=0.1, piecewise:FILE, or file.py:f, whose "
        "f(t) is the factor of lr in round t = 0, 1, ...; a warm-up multiplies it",
    )
    warmup: str = later_work(
        "",
        None,
        "the rounds over which fields rise from value/N to their value, linearly: lr=10,rho=10; `fedspeed "
        "methods` shows which fields of a method can",
    )
    follow_lr: str = later_work(
        "",
        None,
        "the fields of the method that are scheduled and warm up as lr is: with `rho`, rho in round t is rho lr_t / lr",
    )
    batch_norm: str = later_work(
        "refuse",
        ("refuse", "group", "local", "average"),
        "what becomes of batch norm: `refuse` it, `group` norm of 2 groups instead, running statistics `local` to each "
        "client, or sent and `average`d",
    )
    local_optimizer: str = later_work(
        "sgd",
        None,
        "the optimiser of local steps: sgd, momentum:0.9, nesterov:0.9, adam, adamw or adam:beta1=0.9,"
        "beta2=0.99; its state is fresh in every turn, and its rate is its own, about 0.001 for adam",
    )
    weight_decay: float = local_work(1e-3, "[0, inf)", "the coupled L2 weight decay, at the unperturbed iterate")
    clip: float = fidelity(0.0, "[0, inf)", "the largest gradient norm; 0 for no clipping")
    clip_mode: str = fidelity(
        "gradient",
        ("gradient", "released"),
        "what is clipped: each loss `gradient`, or as `released` everything but multiples of x",
    )
    decay_outside_mix: bool = fidelity(False, about="whether weight decay is added outside FedCM's mix, as released")
    weighting: str = federation(
        "uniform", ("uniform", "samples"), "how clients are averaged: `uniform` or by `samples`"
    )
    eval_every: int = course(1, "[1, inf)", "the number of rounds between evaluations; the last is always evaluated")
    seed: int = course(0, "[0, 1e18]", "the seed of split, initial model, cohorts and batches")
    client_metrics: str = later_course(
        "",
        about="when to score the model on every client's data, its test part if there is one (client_test): every=10; "
        "every=10,own: the clients' own models too; every=10,personalised=5: the model after 5 local steps too",
    )
    stop_at: str = later_course(
        "",
        about="the score at which the run stops: accuracy=0.8, loss=0.3, train_loss, validation_accuracy or _loss; "
        "accuracy=0.8,mean=5 waits for the mean of the last five scores",
    )
    patience: int = later_course(
        0, "[0, inf)", "the number of scored rounds without a better score after which it stops; 0 for never"
    )
    min_delta: float = later_course(0.0, "[0, inf)", "how much better a score must be to count for patience")
    max_time: str = later_course(
        "", about="the wall-clock time after which no round begins: 2h, 90min, 1h30min", placement=True
    )
    device: str = placed("auto", about="where to compute: auto, cpu, cuda, cuda:1, mps")

    on_client_error: str = fault(
        "stop",
        ("stop", "drop"),
        "what to do when a client raises or diverges: `stop` the run, or `drop` the client's reply",
    )
    dropout: float = fault(0.0, "[0, 1)", "the chance that an active client fails after training, a scenario")
    stragglers: float = fault(0.0, "[0, 1]", "the chance that a client finishes only some of its steps, a scenario")
    network: str = scenario(
        "", about="the network of `virtual_seconds`: lte, wifi, fibre or up=10,down=30,latency=50 (Mbit/s and ms)"
    )
    devices: str = scenario(
        "uniform", about="the clients' devices: uniform, phones, lab or SPEEDxSHARE,.. such as 1x0.5,4x0.5"
    )
    precision: str = machine(
        "full",
        ("full", "bfloat16", "tf32"),
        "the arithmetic of gradients; all but `full` change results beyond rounding",
    )
    engine: str = machine(
        "auto", ("auto", "loop", "block"), "the arithmetic: client by client, small models in a block, or `auto`"
    )
    layers: str = machine(
        "auto",
        ("auto", "plain", "compiled"),
        "how residual blocks are computed: layer by layer (`plain`), as one function each with `compiled` kernels, or "
        "`auto`; equal up to rounding",
        later=True,
    )
    backend: str = placed(
        "auto",
        backend_names,
        "where clients run: `serial`, here, in worker `process`es, on a `ray` cluster, or `auto`; same bits",
    )
    workers: int = placed(0, "[0, 1e5]", "the number of worker processes; 0 takes one per core")
    ray_address: str = ray(
        "", about="the Ray cluster to join: auto, HOST:PORT or ray://HOST:PORT; none: $RAY_ADDRESS, or one of our own"
    )
    ray_cpus: float = ray(1.0, "[0, inf)", "the CPUs that Ray counts for a worker")
    ray_gpus: float = ray(0.0, "[0, inf)", "the share of a GPU for a Ray worker")
    allow_mixed: bool = ray(
        False, about="whether Ray workers whose bits differ (another CPU, another torch) are admitted, and recorded"
    )

    states: str = placed(
        "auto", ("auto", "memory", "disk"), "where client states are kept; `auto` takes the disk above 1 GiB"
    )
    state_dtype: str = machine(
        "same", ("same", "float16", "bfloat16"), "how states are stored; the 16-bit ones halve them and round"
    )

    checkpoint_every: int = stored(
        0, "[0, inf)", "the number of rounds between checkpoints; 0 takes every round while they are small"
    )
    keep_every: int = stored(
        0,
        "[0, inf)",
        "the number of rounds between checkpoints that are never removed, for forks; 0 keeps the last two alone",
        later=True,
    )

    def __post_init__(self) -> None:
        self._set(warmup=warmup_text(self.warmup), follow_lr=follow_text(self.follow_lr))
        self._set(**{key: as_setting(key, getattr(self, key)) for key in SETTINGS})
        self._set(local_optimizer=optimizer_text(self.local_optimizer))
        super().__post_init__()
        require_cohort(self.cohort)
        fit_rounds(self.warmup, self.rounds)
        self._set(lr_schedule=schedule_text(self.lr_schedule, self.rounds))
        if self.lr_schedule:  # it stands instead of a decay
            if self.lr_decay not in (0.0, 1.0, Plan.lr_decay):
                raise UserError(
                    f"lr_schedule: expected no lr_decay beside {shown(self.lr_schedule)}, found {self.lr_decay:g}; "
                    f"leave one out (lr_decay = 1), or write exponential:{self.lr_decay:g}"
                )
            self._set(lr_decay=1.0)
        mix = parse_devices(self.devices)
        if self.network:
            parse_network(self.network)
        elif mix != parse_devices(Plan.devices):
            raise UserError(f"devices: {self.devices} expects a network too, found none; add one, --network lte")
        self._set(client_metrics=_spelled(self.client_metrics))
        self._set(stop_at=goal_text(self.stop_at), max_time=time_text(self.max_time))
        require_rules(self)

    def _set(self, **values: Any) -> None:
        """Set fields to their one spelling, while the frozen plan is made."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def scores_clients(self, t: int, own: bool = False) -> bool:
        """Return whether the model after round t = 1, 2, ... is scored on every client's data; `own`: their own models.

        Example:
            >>> [t for t in range(1, 8) if Plan(rounds=7, client_metrics="every=3").scores_clients(t)]
            [3, 6, 7]
        """
        if not self.client_metrics:  # first, since every client of every round calls this
            return False
        every, *asked = self.client_metrics.removeprefix("every=").split(",")
        return (t % int(every) == 0 or t == self.rounds) and ("own" in asked or not own)

    @property
    def personal_steps(self) -> int:
        """Return the local steps before the personalised score of a client; 0 if it was not asked for."""
        return int(self.client_metrics.partition("personalised=")[2] or 0)

    @property
    def keeps_statistics(self) -> bool:
        """Return whether running statistics of batch norm are kept, per client or averaged."""
        return self.batch_norm in ("local", "average")

    def cohort_size(self, clients: int) -> int:
        """Return S: `active`, or where it is 0, 10 of the clients or all if there are fewer."""
        return self.active or min(10, clients)

    def require_clients(self, method: Method, clients: int) -> None:
        """Raise unless there are enough clients for the cohort and the method accepts their number."""
        active = self.cohort_size(clients)
        if active > clients:
            raise UserError(
                f"active must be at most the number of clients, got {active} active of {clients}; "
                f"lower --active or raise --clients"
            )
        if isinstance(local_optimizer(self.local_optimizer), Adam) and self.lr >= Plan.lr:
            warnings.warn(
                f"local_optimizer: {self.local_optimizer} moves a parameter by about lr in a step, got lr {self.lr:g}; "
                f"a usual one is --lr 0.001",
                stacklevel=2,
            )
        among = extremes(self.lr_schedule, self.rounds) if self.lr_schedule else []
        factors = [lr_factor(self.lr_schedule, t) for t in among]
        if len({*factors}) == 1 and self.rounds > 1 and self.lr_schedule not in ("constant", "exponential:1"):
            idle = f"lr_schedule: {shown(self.lr_schedule)} changes nothing within {self.rounds} rounds"
            warnings.warn(idle, stacklevel=2)
        if cohort_name(self.cohort) == "weighted" and self.weighting == "samples":
            twice = "cohort weighted:samples with weighting samples: sizes count twice; take --weighting uniform"
            warnings.warn(twice, stacklevel=2)
        highest = max(factors, default=1.0)
        method.check(self.lr * highest, active if cohort_name(self.cohort) in SIZED else 1, clients)

    def steps_of(self, n: int) -> int:
        """Return K_i of a client with n samples."""
        return self.local_steps or self.local_epochs * math.ceil(n / self.batch_size)

    def rate(self, t: int, own_decay: float) -> float:
        """Return eta_l in round t = 0, 1, ...; `own_decay` is the method's decay from the paper."""
        scheduled, warm = self._factors(t, own_decay)
        return self.lr * scheduled * warm  # the order of the factors fixes the bits

    def _factors(self, t: int, own_decay: float) -> tuple[float, float]:
        """Return the factors of lr in round t: its schedule, or its decay without one, and its warm-up."""
        decay = lr_factor(self.lr_schedule, t) if self.lr_schedule else (self.lr_decay or own_decay) ** t
        return decay, factor(self.warmup, LR, t)

    def require(self, method: Method) -> None:
        """Raise unless the plan has the settings that the method needs."""
        if any(each.bounds_uploads for each in nested(method)):
            self._require_bounded(method)
        plain_only = (each for each in reversed(list(nested(method))) if each.reads_gradient_from_D)
        if self.local_optimizer != "sgd" and (inmost := next(plain_only, None)):
            why = inmost.reads_gradient_from_D
            because = why if isinstance(why, str) else "it takes D / lr_sum as a mean gradient"
            raise UserError(
                f"{inmost.label}: needs local_optimizer = sgd, got {self.local_optimizer}: {because}; leave out "
                f"--local-optimizer, or take a method that does not need it, such as fedavg or fedspeed"
            )
        for name, value in method.needs.items():
            if (found := getattr(self, name)) != value:
                text = setting_text(found) if name in SETTINGS else found
                raise UserError(
                    f"{method.label}: needs {name} = {value}, got {text}; --{name.replace('_', '-')} {value}"
                )

    def _require_bounded(self, method: Method) -> None:
        """Raise if something besides the uploads that a method bounds would reveal clients' data."""
        if self.cohort != "fixed":
            raise UserError(
                f"{method.label}: needs cohort = fixed, got {setting_text(self.cohort)}: its epsilon is proven for "
                f"cohorts of a fixed size that are drawn uniformly in every round; --cohort fixed"
            )
        if self.keeps_statistics:
            raise UserError(
                f"{method.label}: bounds what clients send, got batch_norm {self.batch_norm}, whose statistics go to "
                f"the server as they are; --batch-norm group"
            )
        if method.reads_K and not self.local_steps:
            raise UserError(
                f"{method.label}: expected local_steps, since its server reads how many steps clients take, found "
                f"local_epochs, with which that depends on their data; set --local-steps"
            )
        if self.stop_at.startswith("train_loss"):
            raise UserError(
                f"{method.label}: bounds what clients send, got stop_at {self.stop_at}, a loss on their data that is "
                f"not bounded; stop at a score on the test set"
            )

    def config_at(self, t: int) -> Config | None:
        """Return the config of round t = 0, 1, ... if it differs from this plan, as in a fork (`Config.until`)."""
        return None

    def method_at(self, method: Method, t: int, own_decay: float) -> Method:
        """Return the method of round t = 0, 1, ..., with warm-up and the fields that follow the rate; see `rate`."""
        warm = method_at(method, self.warmup, t)
        return following(warm, self.follow_lr, self._factors(t, own_decay), t)

    def require_schedules(self, method: Method, own_decay: float) -> None:
        """Raise unless the method accepts its scheduled values in the first, last and most extreme rounds."""
        named = {"warmup": self.warmup, "follow_lr": self.follow_lr}
        shared(named, method, [method])  # raises for a field that this method cannot have scheduled
        for t in extremes(self.lr_schedule, self.rounds):
            self.method_at(method, t, own_decay)


PLACEMENT = tuple(field.name for field in fields(Plan) if field.metadata.get("placement"))
"""Settings that say where and how to compute; they change no bit of the result (on one kind of device)."""
COMMAND_LINE_ONLY = ("ray_address",)
"""Settings that no file may hold: the user decides which cluster is trusted with code."""


def _spelled(given: str) -> str:
    """Return `client_metrics` in its one spelling: "", or "every=N" with ",own" or ",personalised=M" or both."""
    number = "[1-9][0-9]{0,8}"
    text = given.replace(" ", "").replace("personalized", "personalised")
    found = re.fullmatch(f"every={number}(,own)?(,personalised={number})?", text)
    if given.strip() and not found:
        raise UserError(
            f"client_metrics: expected every=N or every=N,own or every=N,own,personalised=M with N and M = 1, 2, ..., "
            f"got {given!r}"
        )
    return found[0] if found else ""


F = TypeVar("F", bound=Callable[..., Any])


class Settings(TypedDict, total=False):
    """The fields of `Plan` as keyword arguments, written out so that an editor completes them; a test compares."""

    rounds: int
    active: int
    cohort: Any
    local_epochs: int
    local_steps: int
    batch_size: int
    lr: float
    lr_decay: float
    lr_schedule: Any
    warmup: str
    follow_lr: str
    batch_norm: str
    local_optimizer: str
    weight_decay: float
    clip: float
    clip_mode: str
    decay_outside_mix: bool
    weighting: str
    eval_every: int
    seed: int
    client_metrics: str
    stop_at: str
    patience: int
    min_delta: float
    max_time: str
    device: str
    on_client_error: str
    dropout: float
    stragglers: float
    network: str
    devices: str
    precision: str
    engine: str
    layers: str
    backend: str
    workers: int
    ray_address: str
    ray_cpus: float
    ray_gpus: float
    allow_mixed: bool
    states: str
    state_dtype: str
    checkpoint_every: int
    keep_every: int


def lists_settings(function: F) -> F:
    """Replace `**settings` in the signature of a function by the fields of `Plan`, for `help` and for notebooks."""
    own = inspect.signature(function)
    kept = [one for one in own.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    plain = Plan().fields()
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=plain[name], annotation=kind)
        for name, kind in get_type_hints(Settings).items()
        if name not in own.parameters and not (name == "seed" and "seeds" in own.parameters)
    ]
    function.__signature__ = own.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]
    return function
