"""FedInit: relaxed initialisation around any method."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ..errors import UserError
from ..utils.checked_fields import param
from .base import Down, Grad, Local, Round, Up, Vec
from .wrapper import Wrapper


class Client(NamedTuple):
    last: Vec  # the client's last local model, x^0 at first
    base: Any  # what the base method keeps


@dataclass(frozen=True)
class FedInit(Wrapper):
    """Relaxed initialisation around any method: local work begins away from the client's own last model.

        1  server sends what `base` sends
        2  client i begins at s_i = x^t + beta (x^t - x_i), x_i its last local model (x^0 at first)
        3  centre="start":   `base` sees s_i as the model it received: D_i = x_iK - s_i, prox centre s_i (as released)
           centre="global":  `base` sees x^t; only the first point differs, so FedAvg's server takes the mean model
                             (as in the paper)
        4  client i keeps x_i = x_iK; the server does what `base` does

    `centre="global"` is refused for SCAFFOLD, FedGamma, FedCM, MoFedSAM and FedNova: they read D_i / (K eta_l) as a
    mean gradient, and D_i measured from x^t would count the relaxation beta (x^t - x_i) as one.
    Recovers: beta = 0: the base method.

    Args:
        base: the method inside; in TOML a table `[method.base]`, on the command line `--set method.base=fedspeed`.
        beta: relaxation coefficient.
        centre: `start` or `global`, see above.

    Example:
        >>> from fedspeed import FedAvg
        >>> FedInit(FedAvg(), beta=0.05).to_dict()["base"]
        {'name': 'fedavg', 'eta_g': 1.0}

    Reference: Sun et al., Understanding How Consistency Works in Federated Learning via Stage-wise Relaxed
    Initialization, NeurIPS 2023.
    """

    beta: float = param(0.1, "[0, inf)", "beta, the relaxation coefficient", tune="0.01..0.3:log")
    centre: str = param("start", ("start", "global"), "what the base method sees as its centre")
    hands_on: ClassVar[Collection[str]] = ("settle", "client_metrics", "upload")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.centre == "global" and self.base.reads_gradient_from_D:
            name = type(self.base).__name__
            raise UserError(
                f"FedInit: centre must be start around {name}, got global: {name} reads D / (K eta_l) as a mean "
                f"gradient, and D measured from x^t would count the relaxation as one"
            )

    @property
    def running_mean(self) -> tuple[str, str] | None:
        kept = self.base.running_mean
        return kept and (f"base.{kept[0]}", kept[1])

    def init_client(self, x0: Vec) -> Client:
        return Client(x0, super().init_client(x0))

    def relaxed(self, down: Down, client: Client) -> Vec:
        """Return s_i of line 2."""
        s: Vec = down.x + self.beta * (down.x - client.last)
        return s

    def seen(self, down: Down, client: Client) -> Down:
        """Return what the base method receives, line 3."""
        return down._replace(x=self.relaxed(down, client)) if self.centre == "start" else down

    def start(self, down: Down, client: Client) -> Vec:
        if self.centre == "global":
            return self.relaxed(down, client)
        return super().start(self.seen(down, client), client.base)

    def direction(self, x: Vec, grad: Grad, down: Down, client: Client) -> Vec:
        return super().direction(x, grad, self.seen(down, client), client.base)

    def upload(self, xK: Vec, down: Down, client: Client, run: Local) -> tuple[Up, Client]:
        up, kept = super().upload(xK, self.seen(down, client), client.base, run)
        return up, Client(xK, kept)  # line 4

    def settle(self, client: Client, mean: Up, round: Round) -> Client:
        return Client(client.last, super().settle(client.base, mean, round))

    def client_metrics(self, xK: Vec, down: Down, client: Client, run: Local) -> Mapping[str, float]:
        return super().client_metrics(xK, self.seen(down, client), client.base, run)
