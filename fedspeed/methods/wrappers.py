"""Methods around a method: what a wrapper does not write itself is its base's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from ..errors import UserError
from ..method import Grad, Local, Method, Round, nested
from ..params import param
from .fedavg import FedAvg

if TYPE_CHECKING:
    from torch import Tensor as Vec

OWN = {
    "source",
    "code",
    "origin",
    "block_safe",
    "bounds_uploads",
    "measures_uploads",
    "hands_on",
    "lasting",
    "released",
    "name",
    "label",
    "to_dict",
    "running_mean",
}
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
        if any(getattr(type(self), hook) is not getattr(Wrapper, hook) for hook in ("upload", "received")):
            for inside in nested(self.base):
                self.refuse_around(inside)

    def refuse_around(self, inside: Method) -> None:
        """Raise if a method inside needs uploads as they are; called for wrappers that write `upload` or `received`."""
        name, own, why = type(inside).__name__, type(self).__name__, ""
        if inside.bounds_uploads:
            why = "whose bound on uploads it would undo"
        elif inside.measures_uploads and changes_uploads(type(self)):
            why = "whose numbers are of uploads that it would change"
        if why:
            raise UserError(
                f"{own}: expected {name} around it, found it around {name}, {why}; write +{own.lower()}+{name.lower()}"
            )

    def numbers_in(self, up: Any) -> Collection[str]:
        """Return the names of the base's `numbers`; raise unless all else in its upload are vectors of one length."""
        fields, numbers = {name: v.shape[-1] for name, v in named(up)}, self.base.numbers
        lengths = {length for name, length in fields.items() if name not in numbers}
        if len(lengths) > 1 or not fields.keys() >= set(numbers):
            told = ", ".join(f"{name} ({length})" for name, length in fields.items())
            raise UserError(
                f"{type(self).__name__}: expected vectors of one length from {self.base.label} beside its numbers "
                f"{tuple(numbers)}, found {told}; name what is not a vector of the model in its class, numbers = (...)"
            )
        return numbers

    def on_vectors(self, f: Callable[..., Vec], up: Any, *others: Any) -> Any:
        """Return what the base sends with f of each vector of the model, and of those in the same place of other trees,
        in its place; its `numbers` stay as they are."""
        return mapped(f, up, *others, keep=self.numbers_in(up))

    def __getattr__(self, name: str) -> Any:
        """What no class here knows: a field of the base."""
        if name.startswith("_") or name == "base" or hasattr(type(self), name):
            return object.__getattribute__(self, name)  # no base yet, in a copy being made; or a property that failed
        return getattr(self.base, name)

    @property
    def running_mean(self) -> tuple[str, str] | None:
        """The base's, unless this class writes a hook that may end it."""
        kept = ("init_server", "init_client", "upload", "received", "settle", "update")
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


Wrapper.hands_on = {name for name in vars(Method) if not name.startswith("_")} - OWN  # also hooks that are added later
for _name in Wrapper.hands_on:
    setattr(Wrapper, _name, _of_base(_name))


def changes_uploads(wrapper: type[Wrapper]) -> bool:
    """Return whether a class writes `upload`, unless it says that it only calls its base's (`hands_on`)."""
    owner = next(cls for cls in wrapper.__mro__ if "upload" in vars(cls))
    return "upload" not in vars(owner).get("hands_on", ())


def named(tree: Any, place: str = "") -> Iterator[tuple[str, Vec]]:
    """Yield the vectors of a NamedTuple (of NamedTuples) with their names, in order; inside a tuple `base.D`."""
    for name, value in zip(tree._fields, tree, strict=True):
        if isinstance(value, tuple):
            yield from named(value, f"{place}{name}.")
        else:
            yield place + name, value


def leaves(tree: Any, without: Collection[str] = ()) -> Iterator[Vec]:
    """Yield the vectors of a NamedTuple (of NamedTuples), in order, but for those with some names."""
    return (v for name, v in named(tree) if name not in without)


def mapped(f: Callable[..., Vec], tree: Any, *others: Any, keep: Collection[str] = (), place: str = "") -> Any:
    """Return a tree of what f makes of its vectors, in order, and of those in the same place of other trees.

    Args:
        keep: names, as `named` gives them, of fields that stay as they are.
    """

    def one(name: str, *each: Any) -> Any:
        if isinstance(each[0], tuple):
            return mapped(f, *each, keep=keep, place=f"{name}.")
        return each[0] if name in keep else f(*each)

    names = (place + name for name in tree._fields)
    return type(tree)(*(one(*each) for each in zip(names, tree, *others, strict=True)))


def rebuilt(pieces: Sequence[Vec]) -> Vec:
    """A vector, or a block, from the pieces that `split` made of its last axis."""
    whole = pieces[0].new_empty((*pieces[0].shape[:-1], sum(piece.shape[-1] for piece in pieces)))
    begin = 0
    for piece in pieces:
        whole[..., begin : begin + piece.shape[-1]] = piece
        begin += piece.shape[-1]
    return whole


def drawn(v: Vec, kind: str, streams: Sequence[tuple[Any, ...]]) -> Vec:
    """Random numbers of v's shape: `random` or `standard_normal`, every row from the stream `rng(*its own)`."""
    import numpy as np

    from ..sampling import rng

    rows = [getattr(rng(*stream), kind)(v.shape[-1]) for stream in streams]
    numbers: Vec = v.new_empty(0, device="cpu").new_tensor(np.stack(rows)).to(v).view_as(v)
    return numbers


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
