"""Methods around a method: what a wrapper does not write itself is its base's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from ..errors import UserError
from ..method import Grad, Local, Method, Round
from ..params import param
from .fedavg import FedAvg

if TYPE_CHECKING:
    from torch import Tensor as Vec

OWN = {"source", "code", "origin", "block_safe", "released", "name", "label", "to_dict", "running_mean"}
"""What a wrapper says for itself; all else that `Method` has is asked of the base."""


@dataclass(frozen=True)
class Wrapper(Method):
    """Base of methods around a method: write the hooks that differ, `super().upload(...)` is the base's.

    Args:
        base: the method inside; in TOML a table `[method.base]`, on the command line `--set method.base=fedspeed`.

    Example:
        >>> from fedspeed import FedProx
        >>> Wrapper(FedProx(mu=0.5)).shrink, Wrapper(FedProx(mu=0.5)).mu
        (0.5, 0.5)
    """

    base: Method = field(default_factory=FedAvg, metadata={"about": "the method inside"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.base, Method):
            raise UserError(
                f"{type(self).__name__}: base must be a method such as FedAvg(), got {self.base!r}; a name of one is "
                f"understood in TOML and by --set method.base=NAME"
            )

    def __getattr__(self, name: str) -> Any:
        """What no class here knows: a field of the base."""
        if name.startswith("_") or name == "base" or hasattr(type(self), name):
            return object.__getattribute__(self, name)  # no base yet, in a copy being made; or a property that failed
        return getattr(self.base, name)

    @property
    def running_mean(self) -> tuple[str, str] | None:
        """The base's, unless this class writes a hook that may end it."""
        kept = ("init_server", "init_client", "upload", "settle", "update")
        same = all(getattr(type(self), hook) is getattr(Wrapper, hook) for hook in kept)
        return self.base.running_mean if same else None

    def to_dict(self) -> dict[str, Any]:
        """The table of the wrapper, with that of its base."""
        return {**super().to_dict(), "base": self.base.to_dict()}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """An instance from its fields; `base` may be a method, a name or a table."""
        from . import build

        base = fields.get("base", "fedavg")
        table = {"name": base} if isinstance(base, str) else base
        return super().from_fields({**fields, "base": base if isinstance(base, Method) else build(table)})


def _of_base(name: str) -> property:
    return property(lambda self: getattr(self.base, name), doc=f"The base's `{name}`.")


for _name in vars(Method):  # every hook, also one that is added later
    if not _name.startswith("_") and _name not in OWN:
        setattr(Wrapper, _name, _of_base(_name))


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
        >>> FedInit(FedAvg(), beta=0.05).to_dict()["base"]
        {'name': 'fedavg', 'eta_g': 1.0}

    Reference: Sun et al., Understanding How Consistency Works in Federated Learning via Stage-wise Relaxed
    Initialization, NeurIPS 2023.
    """

    beta: float = param(0.1, "[0, inf)", "beta, the relaxation coefficient")
    centre: str = param("start", ("start", "global"), "what the base method sees as its centre")

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

    def relaxed(self, down: Any, client: Client) -> Vec:
        """s_i of line 2."""
        s: Vec = down.x + self.beta * (down.x - client.last)
        return s

    def seen(self, down: Any, client: Client) -> Any:
        """What the base method receives, line 3."""
        return down._replace(x=self.relaxed(down, client)) if self.centre == "start" else down

    def start(self, down: Any, client: Client) -> Vec:
        if self.centre == "global":
            return self.relaxed(down, client)
        return super().start(self.seen(down, client), client.base)

    def direction(self, x: Vec, grad: Grad, down: Any, client: Client) -> Vec:
        return super().direction(x, grad, self.seen(down, client), client.base)

    def upload(self, xK: Vec, down: Any, client: Client, run: Local) -> tuple[Any, Client]:
        up, kept = super().upload(xK, self.seen(down, client), client.base, run)
        return up, Client(xK, kept)  # line 4

    def settle(self, client: Client, mean: Any, round: Round) -> Client:
        return Client(client.last, super().settle(client.base, mean, round))

    def client_metrics(self, xK: Vec, down: Any, client: Client, run: Local) -> Mapping[str, float]:
        return super().client_metrics(xK, self.seen(down, client), client.base, run)
