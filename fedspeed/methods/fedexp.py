"""FedExP: a server rate from the norms of what came up, around methods whose server takes a plain step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ..errors import UserError
from ..utils.checked_fields import param
from .base import Client, Down, Local, Method, Round, Vec, nested
from .fedavg import FedAvg, FedProx
from .fedcm import FedCM, MoFedSAM
from .fedsam import FedLESAM, FedLESAMS, FedSAM
from .scaffold import FedGamma, Scaffold
from .terms import norm
from .wrapper import Wrapper

PLAIN = (FedAvg, FedProx, Scaffold, FedCM, FedSAM, MoFedSAM, FedGamma, FedLESAM, FedLESAMS)
"""Methods with x^{t+1} = x^t + eta_g mean_S D_i."""


class Server(NamedTuple):
    x: Vec  # the mean of the last two y: evaluated, never sent
    base: Any  # what the base method keeps; its x is y, which is sent


class Up(NamedTuple):
    base: Any  # what the base method sends, D among it
    square: Vec  # ||D_i||^2, one element


@dataclass(frozen=True)
class FedExP(Wrapper):
    """Extrapolation around a method with a plain server step: far where the clients' updates point apart.

        1  server sends what `base` sends, y^t for its model
        2  client i does what `base` does and sends ||D_i||^2 too,   D_i = x_iK - y^t
        3  server:   eta_g = max(1, mean_S ||D_i||^2 / (2 (||mean_S D_i||^2 + eps_t))),   eps_t = eps decay^{2t}
        4            y^{t+1} = y^t + eta_g mean_S D_i;   what else `base` keeps, it keeps as always
        5            x^{t+1} = (y^t + y^{t+1}) / 2        is evaluated and stored as the model; y^0 = x^0

    Around FedAvg, FedProx, SCAFFOLD, FedCM, their sharpness-aware kin, and wrappers of them; eta_g of `base` is 1.
    D_i is what is sent: wrappers that change it stand inside (`fedavg+topk+fedexp`), the other order is refused. DP is
    refused in both orders, since line 2 sends ||D_i||^2 without noise.
    Recovers: eps -> inf: `base`, whose x^t is y^t.
    The released code (Divyansh03/FedExP@56dfaf9, main.py) multiplies eps by S and evaluates y^1 itself in round 1.

    Args:
        base: the method inside; in TOML a table `[method.base]`, on the command line `--set method.base=scaffold`.
        eps: keeps eta_g small where updates vanish; of the size of ||D_i||^2 at the end of a run.
        decay: of the square root of eps per round: the learning rate's.

    Example:
        >>> FedExP(Scaffold()).to_dict()["base"]
        {'name': 'scaffold', 'eta_g': 1.0}

    Reference: Jhunjhunwala et al., FedExP: Speeding Up Federated Averaging via Extrapolation, ICLR 2023. Their code
    has lr 0.01, decay 0.998, weight decay 1e-4, clip 10, 20 steps, batch 50, eps 1e-3 (EMNIST: lr 0.1, eps 0.1).
    """

    eps: float = param(1e-3, "[0, inf)", "eps, keeps eta_g small where updates vanish")
    decay: float = param(0.998, "(0, 1]", "the decay of the square root of eps per round")
    hands_on: ClassVar[Collection[str]] = ("received", "settle")
    measures_uploads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        *_, inner = nested(self.base)
        if not isinstance(inner, PLAIN) or inner.eta_g != 1:
            found = f"eta_g = {inner.eta_g:g}" if isinstance(inner, PLAIN) else type(inner).__name__
            names = ", ".join(cls.__name__ for cls in PLAIN)
            raise UserError(
                f"FedExP: base must be a method whose server adds the mean update, with eta_g = 1 (one of {names}), "
                f"got {found}: FedExP finds the server rate by itself"
            )

    def refuse_around(self, inside: Method) -> None:
        """Raise for a second FedExP, and for a bound on uploads that would not hold for ||D_i||^2."""
        if isinstance(inside, FedExP):
            raise UserError("FedExP: base must not be another FedExP, got one inside; leave one out")
        if inside.bounds_uploads:
            name = type(inside).__name__
            raise UserError(
                f"FedExP: expected a base without {name}, found one: FedExP sends ||D_i||^2, to which {name} would "
                f"add no noise; leave one of them out"
            )

    @property
    def numbers(self) -> Collection[str]:
        return ("square", *(f"base.{name}" for name in self.base.numbers))

    @property
    def running_mean(self) -> tuple[str, str] | None:
        kept = self.base.running_mean
        return kept and (kept[0], f"base.{kept[1]}")

    def init_server(self, x0: Vec) -> Server:
        return Server(x0, super().init_server(x0))

    def broadcast(self, server: Server) -> Any:
        return super().broadcast(server.base)  # line 1

    def upload(self, xK: Vec, down: Down, client: Client, run: Local) -> tuple[Up, Client]:
        up, kept = super().upload(xK, down, client, run)
        return Up(up, norm(up.D) ** 2), kept  # line 2

    def sent(self, up: Up) -> int:
        return super().sent(up.base) + up.square.element_size()

    def received(self, mean: Up, round: Round) -> Up:
        return Up(super().received(mean.base, round), mean.square)

    def settle(self, client: Client, mean: Up, round: Round) -> Any:
        return super().settle(client, mean.base, round)

    def update(self, server: Server, mean: Up, round: Round) -> Server:
        base = super().update(server.base, mean.base, round)
        y = server.base.x + self.extrapolation(mean, round) * (base.x - server.base.x)  # line 4
        return Server((server.base.x + y) / 2, base._replace(x=y))  # line 5

    def metrics(self, server: Server, mean: Up, round: Round) -> Mapping[str, float]:
        found = super().metrics(server.base, mean.base, round)
        return {**found, "eta_g": float(self.extrapolation(mean, round))}

    def extrapolation(self, mean: Up, round: Round) -> Vec:
        """Return eta_g of line 3."""
        room = 2 * (norm(mean.base.D) ** 2 + self.eps * self.decay ** (2 * round.t))
        return (mean.square / room.clamp(min=1e-30)).clamp(min=1)
