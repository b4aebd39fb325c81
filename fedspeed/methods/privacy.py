"""Uploads of bounded length, and client-level differential privacy, around any method."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import count
from typing import Any, ClassVar

from ..errors import UserError
from ..utils.checked_fields import param
from .base import Client, Down, Local, Method, Round, Server, Up, Vec, dense_bytes
from .wrapper import Wrapper, drawn, leaves, mapped

MARGIN = {2: 2.0**-6, 4: 2.0**-22, 8: 2.0**-50}
"""The relative error of a norm by rounding, by the bytes of a number: clipped uploads are shorter by this."""


def clipped(up: Up, limit: float, numbers: Collection[str] = ()) -> Any:
    """Return an upload times min(1, limit / its norm), the norm over all its vectors together; one factor per client.
    The fields in `numbers` are not vectors, and stay as they are."""
    vectors = list(leaves(up, numbers))
    squares: Any = sum(v.double().square().sum(-1, keepdim=True) for v in vectors)
    margin = MARGIN[min(v.element_size() for v in vectors)]
    factor = (limit * (1 - margin) / squares.sqrt().clamp(min=1e-300)).clamp(max=1)
    return mapped(lambda v: v * factor.to(v.dtype), up, keep=numbers)


@dataclass(frozen=True)
class Clip(Wrapper):
    """Uploads of at most this norm; the state of a client is that of `base`.

        1  client i sends u_i min(1, norm / ||u_i||), u_i all vectors that `base` sends, taken together

    Numbers about the work that `base` sends beside them (FedNova's K_i) are sent as they are.

    Args:
        base: the method inside; `fedspeed+clip:0.5` on the command line.
        norm: the largest norm of an upload.

    Example:
        >>> from fedspeed import FedSpeed
        >>> Clip(FedSpeed(), norm=0.5).lam
        10.0

    Reference: McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018 (its flat clipping).
    """

    norm: float = param(1.0, "(0, inf)", "the largest norm of an upload")
    block_safe: ClassVar[bool] = True

    def upload(self, xK: Vec, down: Down, client: Client, run: Local) -> tuple[Up, Client]:
        up, kept = super().upload(xK, down, client, run)
        return clipped(up, self.norm, self.numbers_in(up)), kept


@dataclass(frozen=True)
class DP(Wrapper):
    """Client-level differential privacy: clipped uploads, Gaussian noise on their sum, epsilon in every record.

        1  client i sends v_i = u_i min(1, clip / ||u_i||), u_i all vectors that `base` sends, taken together
        2  server: the mean it hands to `base` is (sum_S v_i + noise clip z) / S, z standard normal
           where="clients": client i sends v_i + noise clip z_i / sqrt(active) instead; the server adds what is missing
           if clients were lost, so that the noise of the sum is the same

    epsilon(t) at `delta` is for all models up to round t, by the RDP accountant of `dp-accounting`, for cohorts of a
    fixed size drawn without replacement and neighbours that differ in all data of one client: its upload may go from
    any v to any other, so the sensitivity is 2 clip and the accountant gets noise / 2. Amplification by sampling is
    counted only if clients keep no state (FedAvg): the proof takes an upload to depend on the client's data and on what
    was released, and a state depends on when the client took part as well. Around FedSpeed, SCAFFOLD or TopK with
    feedback epsilon is that of the same rounds with every client in all of them, which holds and is larger.

    Nothing but the noisy mean may depend on a client's data. So clients count equally. One that fails stops the run,
    since without it the divisor S would depend on its data (`dropout` is drawn without regard to data). Methods that
    send numbers about the work (FedNova, FedWMSAM, FedExP) are refused. Those whose server reads K (FedCM, MoFedSAM,
    FedTOGA) need `local_steps`, with which K does not depend on how many examples a client has.

    epsilon says nothing of what a simulation records beside the model (losses, drift). Noise comes from the run's seed,
    for results that can be repeated; with the seed it can be subtracted, so a deployed run (`fedspeed.flower`) refuses
    this.

    Args:
        base: the method inside; `fedspeed+dp:noise=1,clip=0.5` on the command line.
        noise: the noise multiplier, standard deviation of the noise of the sum in units of `clip`.
        clip: the largest norm of an upload.
        delta: the probability for which epsilon does not hold.
        where: who adds the noise, the `server` or the `clients`.

    Example:
        >>> from fedspeed import FedAvg
        >>> DP(FedAvg(), noise=1.0, clip=0.5).needs
        {'weighting': 'uniform', 'cohort': 'fixed', 'on_client_error': 'stop'}

    Reference: McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018. Wang et al.,
    Subsampled Renyi Differential Privacy and Analytical Moments Accountant, AISTATS 2019.
    """

    noise: float = param(1.0, "[0, inf)", "the noise multiplier, in units of clip")
    clip: float = param(1.0, "(0, inf)", "the largest norm of an upload")
    delta: float = param(1e-5, "(0, 1)", "delta of (epsilon, delta)")
    where: str = param("server", ("server", "clients"), "who adds the noise")
    block_safe: ClassVar[bool] = True
    bounds_uploads: ClassVar[bool] = True
    lasting: ClassVar[Collection[str]] = ("noise",)  # epsilon is of all rounds, with the noise of each

    def __post_init__(self) -> None:
        if isinstance(self.base, Method) and self.base.numbers:
            raise UserError(
                f"DP: expected a base that sends vectors alone, found {', '.join(self.base.numbers)} of "
                f"{self.base.label}, which it cannot bound; take another method, such as fedavg"
            )
        super().__post_init__()

    def check(self, lr: float, active: int, clients: int) -> None:
        """Raise without the accountant: a run needs it. A value does not, so that reports and lists work without it."""
        super().check(lr, active, clients)
        if find_spec("dp_accounting") is None:
            raise UserError(
                "DP: expected the package dp-accounting, which is not here; pip install 'fedspeed[privacy]'"
            )

    @property
    def needs(self) -> Mapping[str, str]:
        return {**super().needs, "weighting": "uniform", "cohort": "fixed", "on_client_error": "stop"}

    def upload(self, xK: Vec, down: Down, client: Client, run: Local) -> tuple[Up, Client]:
        up, kept = super().upload(xK, down, client, run)
        up = clipped(up, self.clip, self.numbers_in(up))  # line 1
        if self.where == "server":
            return up, kept
        size = self.noise * self.clip / run.active**0.5
        rows = [(run.seed, "dp", run.t, i) for i in run.clients]
        return noisy(up, size, rows), kept

    def sent(self, up: Up) -> int:
        """Return the base's bytes; noise of clients leaves no entry zero, nor on a grid."""
        return dense_bytes(up) if self.where == "clients" and self.noise else super().sent(up)

    def received(self, mean: Up, round: Round) -> Any:
        """Return the mean of line 2; the noise of clients that were lost is added."""
        missing = 1.0 if self.where == "server" else 1 - min(round.S / round.active, 1.0)
        size = self.noise * self.clip * missing**0.5 / round.S
        return super().received(noisy(mean, size, [(round.seed, "dp", round.t)]), round)

    def metrics(self, server: Server, mean: Up, round: Round) -> Mapping[str, float]:
        """Report the base's numbers, and epsilon; without amplification by sampling if clients keep a state."""
        clients = int(round.N)
        stateful = any(True for _ in leaves(super().init_client(server.x)))
        spent = epsilon(self.noise, self.delta, clients if stateful else round.active, clients, round.t + 1)
        return {**super().metrics(server, mean, round), "epsilon": spent}


def noisy(tree: Any, size: float, streams: list[tuple[Any, ...]]) -> Any:
    """Return a tree plus size times standard normal numbers, other numbers for every vector; one stream per row."""
    if not size:
        return tree
    number = count()

    def plus(v: Vec) -> Vec:
        k = next(number)
        return v + size * drawn(v, "standard_normal", [(*stream, k) for stream in streams])

    return mapped(plus, tree)


def epsilon(noise: float, delta: float, active: int, clients: int, rounds: int) -> float:
    """Return the epsilon of `rounds` rounds, by the accountant; infinite without noise.

    Example:
        >>> epsilon(2.0, 1e-5, 10, 500, 100) < epsilon(1.0, 1e-5, 10, 500, 100) < epsilon(1.0, 1e-5, 10, 500, 200)
        True
    """
    from dp_accounting.rdp import compute_epsilon

    if not noise:
        return float("inf")
    orders, spent = _one_round(noise, active, clients)
    return float(compute_epsilon(orders, rounds * spent, delta)[0])


@lru_cache(maxsize=64)
def _one_round(noise: float, active: int, clients: int) -> tuple[Any, Any]:
    """Return orders, and the Renyi divergence of one round at each."""
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE)
    event = dp_accounting.GaussianDpEvent(noise / 2)
    accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(clients, active, event))
    return accountant.orders, accountant.rdp
