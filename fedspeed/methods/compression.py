"""Smaller uploads, around any method: the largest entries with error feedback, or a few bits per number."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from itertools import count
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, NamedTuple

from ..utils.checked_fields import param
from .base import Down, Grad, Local, Nothing, Round, Up, Vec
from .wrapper import Wrapper, drawn, leaves, mapped, named, rebuilt

if TYPE_CHECKING:
    import numpy as np


class Client(NamedTuple):
    error: Any  # what was not sent so far, in the form of an upload; nothing under feedback=False
    base: Any  # what the base method keeps


class Coded(Wrapper):
    """Base of both: an upload as bytes, numbers about the work first and as they are, then vector by vector."""

    def sent(self, up: Up) -> int:
        numbers = self.base.numbers
        vectors = sum(self._bytes(v.shape[-1], v.element_size()) for v in leaves(up, numbers))
        return vectors + sum(v.numel() * v.element_size() for name, v in named(up) if name in numbers)

    def encode(self, up: Up) -> bytes:
        """Return an upload as bytes, as many as `sent` says."""
        numbers = self.base.numbers
        parts = [v.cpu().numpy().tobytes() for name, v in named(up) if name in numbers]
        return b"".join([*parts, *map(self._packed, leaves(up, numbers))])

    def decode(self, data: bytes, like: Any) -> Any:
        """Return an upload from its bytes; `like` is one of the same form."""
        file = BytesIO(data)
        vectors = [name for name, _ in named(like) if name not in self.base.numbers]
        numbers = mapped(lambda v: v.new_tensor(read(file, v, v.numel())), like, keep=vectors)
        return self.on_vectors(lambda v: self._unpacked(file, v), numbers)

    def _bytes(self, d: int, each: int) -> int:
        """Return the bytes of a vector of d numbers of `each` bytes."""
        raise NotImplementedError

    def _packed(self, v: Vec) -> bytes:
        """Return a vector as bytes."""
        raise NotImplementedError

    def _unpacked(self, file: BinaryIO, v: Vec) -> Vec:
        """Return the vector at the position of a file; v is one of the same form."""
        raise NotImplementedError


def read(file: BinaryIO, v: Vec, count: int) -> np.ndarray:
    """Return the next numbers of a file, of the dtype of v; too few bytes are an error."""
    import numpy as np

    return np.frombuffer(file.read(count * v.element_size()), v.cpu().numpy().dtype, count)


@dataclass(frozen=True)
class TopK(Coded):
    """Sparse uploads: the entries of each vector that are largest in size; what is left out is sent later.

        1  client i: v = u_i + e_i, u_i what `base` sends, e_i what was not sent so far (0 at first)
        2  sends the ceil(fraction d) largest entries of v, the others count as 0
        3  e_i = v - what was sent

    Without feedback line 1 has no e_i: what is small in every round is then never sent, and training stalls.
    Numbers about the work that `base` sends beside vectors (FedNova's K_i) are sent as they are.
    Bytes are those of `encode`: the values, and where they are as numbers of 4 bytes or one bit per entry.

    Args:
        base: the method inside; `fedspeed+topk:0.01` on the command line.
        fraction: the part of the entries that is sent.
        feedback: whether what is left out is kept and added next time.

    Example:
        >>> from fedspeed import FedSpeed
        >>> TopK(FedSpeed(), fraction=0.01).size(1000)
        10

    Reference: Stich, Cordonnier, Jaggi, Sparsified SGD with Memory, NeurIPS 2018.
    """

    fraction: float = param(0.01, "(0, 1]", "the part of the entries that is sent")
    feedback: bool = param(True, about="whether what is left out is added to the next upload")
    block_safe: ClassVar[bool] = True
    hands_on: ClassVar[Collection[str]] = ("settle", "client_metrics")

    def size(self, d: int) -> int:
        """Return how many of d entries are sent."""
        return max(1, math.ceil(self.fraction * d))

    def init_client(self, x0: Vec) -> Client:
        base = super().init_client(x0)
        if not self.feedback:
            return Client(Nothing(), base)
        down = super().broadcast(super().init_server(x0.clone()))
        up, _ = super().upload(x0.clone(), down, base, Local(1, 1.0, 1, active=1))
        fresh = super().init_client(x0)  # `upload` may have changed `base` in place
        return Client(mapped(lambda v: v.new_zeros(v.shape), up), fresh)

    def start(self, down: Down, client: Client) -> Vec:
        return super().start(down, client.base)

    def direction(self, x: Vec, grad: Grad, down: Down, client: Client) -> Vec:
        return super().direction(x, grad, down, client.base)

    def client_metrics(self, xK: Vec, down: Down, client: Client, run: Local) -> Mapping[str, float]:
        return super().client_metrics(xK, down, client.base, run)

    def upload(self, xK: Vec, down: Down, client: Client, run: Local) -> tuple[Up, Client]:
        up, kept = super().upload(xK, down, client.base, run)
        if not self.feedback:
            return self.on_vectors(self.largest, up), Client(client.error, kept)
        up = self.on_vectors(lambda u, e: u + e, up, client.error)  # line 1
        sent = self.on_vectors(self.largest, up)  # line 2
        return sent, Client(self.on_vectors(lambda e, v, s: v - s, client.error, up, sent), kept)  # line 3

    def settle(self, client: Client, mean: Up, round: Round) -> Client:
        return Client(client.error, super().settle(client.base, mean, round))

    def largest(self, v: Vec) -> Vec:
        """Return v with all but its largest entries zero."""
        at = v.abs().topk(self.size(v.shape[-1]), dim=-1).indices
        return v.new_zeros(v.shape).scatter_(-1, at, v.gather(-1, at))

    def _as_mask(self, d: int) -> bool:
        """Return whether one bit per entry is shorter than the places of the entries as numbers of 4 bytes."""
        return -(-d // 8) < 4 * self.size(d)

    def _bytes(self, d: int, each: int) -> int:
        k = self.size(d)
        return (-(-d // 8) if self._as_mask(d) else 4 * k) + k * each

    def _packed(self, v: Vec) -> bytes:
        import numpy as np

        values = v.cpu().numpy()
        k, d = self.size(len(values)), len(values)
        at = np.sort(np.argsort(values == 0, kind="stable")[:k])  # the entries that are not 0, then others
        mask = np.isin(np.arange(d), at)
        places = np.packbits(mask).tobytes() if self._as_mask(d) else at.astype("<u4").tobytes()
        return bytes(places + values[at].tobytes())

    def _unpacked(self, file: BinaryIO, v: Vec) -> Vec:
        import numpy as np

        d = v.shape[-1]
        k = self.size(d)
        if self._as_mask(d):
            at = np.flatnonzero(np.unpackbits(np.frombuffer(file.read(-(-d // 8)), np.uint8, -(-d // 8)))[:d])
        else:
            at = np.frombuffer(file.read(4 * k), "<u4", k).astype(np.int64)
        return v.new_zeros(d).scatter_(0, v.new_tensor(at).long(), v.new_tensor(read(file, v, k)))


@dataclass(frozen=True)
class Quantise(Coded):
    """Numbers of a few bits: every vector that `base` sends, rounded at random to a grid so that its mean is right.

        1  in every piece of `bucket` entries: s = max |v|, a grid of 2^bits - 1 points from -s to s (1 bit: -s, s)
        2  an entry becomes one of its two neighbours on the grid, the nearer the likelier: E[sent] = v

    Numbers about the work that `base` sends beside vectors (FedNova's K_i) are sent as they are.
    Bytes are those of `encode`: one scale per piece, and `bits` bits per entry.

    Args:
        base: the method inside; `fedspeed+quantise:4` on the command line.
        bits: per entry, 1 to 8.
        bucket: entries that share a scale.

    Example:
        >>> from fedspeed import FedAvg
        >>> Quantise(FedAvg(), bits=4).steps
        14

    Reference: Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, NIPS 2017.
    """

    bits: int = param(4, "[1, 8]", "the number of bits per entry")
    bucket: int = param(512, "[1, inf)", "the number of entries that share a scale")
    block_safe: ClassVar[bool] = True

    @property
    def steps(self) -> int:
        """Number of steps between the ends of the grid; even but for one bit, so that 0 is on it."""
        return max(1, (1 << self.bits) - 2)

    def upload(self, xK: Vec, down: Down, client: Client, run: Local) -> tuple[Up, Client]:
        up, kept = super().upload(xK, down, client, run)
        number = count()

        def rounded(v: Vec) -> Vec:
            k = next(number)
            chance = drawn(v, "random", [(run.seed, "quantise", run.t, i, k) for i in run.clients])
            return rebuilt([self.round(a, b) for a, b in zip(self.pieces(v), self.pieces(chance), strict=True)])

        return self.on_vectors(rounded, up), kept

    def pieces(self, v: Vec) -> Iterator[Vec]:
        """Cut a vector, or the rows of a block, into pieces."""
        yield from v.split(self.bucket, dim=-1)  # type: ignore[no-untyped-call]

    def round(self, v: Vec, chance: Vec) -> Vec:
        """Return a piece rounded to its grid, upwards where `chance` says so."""
        scale = v.abs().amax(-1, keepdim=True)
        return self.value(self.coded(v, scale, chance), scale)

    def coded(self, v: Vec, scale: Vec, chance: Vec) -> Vec:
        """Return the number of each entry's point of the grid, 0 .. steps."""
        place = (v / scale.clamp(min=1e-30) + 1) * (self.steps / 2)
        code: Vec = (place + chance).floor().clamp(0, self.steps)
        return code

    def value(self, code: Vec, scale: Vec) -> Vec:
        """Return the points of the grid that numbers stand for."""
        value: Vec = (code / (self.steps / 2) - 1) * scale
        return value

    def _bytes(self, d: int, each: int) -> int:
        return -(-d // self.bucket) * each + -(-d * self.bits // 8)

    def _packed(self, v: Vec) -> bytes:
        import numpy as np

        # The entry of largest size is exactly plus or minus the scale, so the rounded vector has the scale of the one
        # before, and its entries are points of the grid: rounding to the nearest gives their numbers back.
        scales = [a.abs().amax(-1, keepdim=True) for a in self.pieces(v)]
        half = v.new_full((1,), 0.5)
        codes = rebuilt([self.coded(a, scale, half) for a, scale in zip(self.pieces(v), scales, strict=True)])
        numbers = codes.cpu().numpy().astype(np.uint8)
        bits = np.unpackbits(numbers[:, None], axis=1)[:, 8 - self.bits :]
        return bytes(rebuilt(scales).cpu().numpy().tobytes() + np.packbits(bits.ravel()).tobytes())

    def _unpacked(self, file: BinaryIO, v: Vec) -> Vec:
        import numpy as np

        d = v.shape[-1]
        scales = read(file, v, -(-d // self.bucket))
        size = -(-d * self.bits // 8)
        packed = np.frombuffer(file.read(size), np.uint8, size)
        bits = np.unpackbits(packed)[: d * self.bits].reshape(d, self.bits)
        codes = v.new_tensor(bits @ (1 << np.arange(self.bits)[::-1]))
        return rebuilt([self.value(c, v.new_tensor(s)) for c, s in zip(self.pieces(codes), scales, strict=True)])
