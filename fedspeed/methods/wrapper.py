"""Wrappers, methods around a method: a hook that a wrapper does not write is its base's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from ..errors import UserError
from .base import Method, Up, Vec, nested
from .fedavg import FedAvg

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
"""Attributes that a wrapper has for itself; every other attribute of `Method` is the base's."""


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

    def numbers_in(self, up: Up) -> Collection[str]:
        """Return the names of the base's `numbers`; raise unless all else in its upload are vectors of one length."""
        fields, numbers = {name: v.shape[-1] for name, v in named(up)}, self.base.numbers
        lengths = {length for name, length in fields.items() if name not in numbers}
        if len(lengths) > 1 or not fields.keys() >= set(numbers):
            sizes = ", ".join(f"{name} ({length})" for name, length in fields.items())
            raise UserError(
                f"{type(self).__name__}: expected vectors of one length from {self.base.label} beside its numbers "
                f"{tuple(numbers)}, found {sizes}; name what is not a vector of the model in its class, numbers = (...)"
            )
        return numbers

    def on_vectors(self, f: Callable[..., Vec], up: Up, *others: Any) -> Up:
        """Return what the base sends with f of each vector of the model, and of those in the same place of other trees,
        in its place; its `numbers` stay as they are."""
        return mapped(f, up, *others, keep=self.numbers_in(up))

    def __getattr__(self, name: str) -> Any:
        """Return a field of the base, for a name that no class here has."""
        if name.startswith("_") or name == "base" or hasattr(type(self), name):
            return object.__getattribute__(self, name)  # no base yet, in a copy being made; or a property that failed
        return getattr(self.base, name)

    @property
    def running_mean(self) -> tuple[str, str] | None:
        """The base's pair, unless this class writes a hook after which the mean may no longer hold."""
        kept = ("init_server", "init_client", "upload", "received", "settle", "update")
        same = all(getattr(type(self), hook) is getattr(Wrapper, hook) for hook in kept)
        return self.base.running_mean if same else None

    def to_dict(self) -> dict[str, Any]:
        """Return the table of the wrapper, with that of its base."""
        return {**super().to_dict(), "base": self.base.to_dict()}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """Return an instance from its fields; `base` may be a method, a name or a table."""
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
    """Return a tree of what f makes of its vectors, in order, and of those in the same place of other trees; fields
    that are in `keep`, by their names in `named`, stay as they are."""

    def one(name: str, *each: Any) -> Any:
        if isinstance(each[0], tuple):
            return mapped(f, *each, keep=keep, place=f"{name}.")
        return each[0] if name in keep else f(*each)

    names = (place + name for name in tree._fields)
    return type(tree)(*(one(*each) for each in zip(names, tree, *others, strict=True)))


def rebuilt(pieces: Sequence[Vec]) -> Vec:
    """Return a vector, or a block, from the pieces that `split` made of its last axis."""
    whole = pieces[0].new_empty((*pieces[0].shape[:-1], sum(piece.shape[-1] for piece in pieces)))
    begin = 0
    for piece in pieces:
        whole[..., begin : begin + piece.shape[-1]] = piece
        begin += piece.shape[-1]
    return whole


def drawn(v: Vec, kind: str, streams: Sequence[tuple[Any, ...]]) -> Vec:
    """Return random numbers of v's shape: `random` or `standard_normal`, every row from the stream `rng(*its own)`."""
    import numpy as np

    from ..utils.random import rng

    rows = [getattr(rng(*stream), kind)(v.shape[-1]) for stream in streams]
    numbers: Vec = v.new_empty(0, device="cpu").new_tensor(np.stack(rows)).to(v).view_as(v)
    return numbers
