"""The contract between a method and everything that runs it. Read this file, then write a method.

A method is a frozen dataclass of hyper-parameters with five hooks on flat vectors of length d and six optional
ones. What it keeps and sends are four NamedTuples, `Server`, `Down`, `Client` and `Up`, whose fields are vectors,
one-element tensors or NamedTuples of them; `Model`, `Movement` and `Dual` below are those that many methods share. A
round is

    down = broadcast(server)                                    once, sent to every active client
    x    = start(down, client)                                  on each active client
    x   -= lr * rate(k, K) * (direction(x, grad, down, client) + mix * wd * x)     for k = 0..K-1; rate is 1 by default
                                                                (or what the plan's `local_optimizer` makes of these)
    up, client = upload(x, down, client, Local(K, lr, n, ...))  `client` is stored if and only if `up` is counted
    client = settle(client, mean(up), Round(t, S, N, K, ...))   each counted client, before it is stored; few need it
    server = update(server, mean(up), Round(t, S, N, K, ...))   only the mean (`received`) reaches the server

A method may also report named numbers: `client_metrics` of each client (their mean over clients is recorded) and
`metrics` of the round. They stand in the round's record and change nothing.

The engine owns minibatches, weight decay, clipping and the learning rate; a hook that draws random numbers takes them
from `rng(run.seed, "what for", run.t, client)`, so that they are a function of what they are for. Server vectors are
float64, what travels and what clients keep is in the model's dtype: write the equations, the engine converts.
`Vec` has one axis. Hooks of a class that says `block_safe = True` are also called with a (clients, d) block: norms,
means and sorts then go over the last axis (`norm(v)` of `terms.py`). `client/hooks.py` checks what hooks return.
Nothing here or in `methods/` imports torch: the operators of the vectors are all it takes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias

from ..utils.checked_fields import Params

if TYPE_CHECKING:
    from torch import Tensor

Vec: TypeAlias = "Tensor"  # a vector of length d; in a block, a (clients, d) matrix
Server = Any  # the server's state, which `init_server` and `update` return: float64 vectors, a field x among them
Down = Any  # the message to the clients, which `broadcast` returns: in the model's dtype, a field x among them
Client = Any  # the state of one client, which `upload` and `settle` return: in the model's dtype, stored between rounds
Up = Any  # the message of one client, which `upload` returns; also the mean of these messages over the counted clients


class Grad(Protocol):
    """Stochastic gradient of the client's LOSS (no weight decay, prox or correction) at any point.

    All calls of one step see the same minibatch, augmentation and dropout mask. Each call returns a buffer of its
    own that is yours to overwrite until the step ends. `fraction` < 1 uses only the first part of the minibatch (and a
    dropout mask of that size); the cost of a run is counted in fractions of a minibatch.

    With a `teacher`, one vector of length d for all clients, the gradient is that of

        loss(x) + pull tau^2 KL(softmax(f(teacher) / tau) || softmax(f(x) / tau))

    f being the model's outputs on the same minibatch; the teacher is not differentiated, and its pass counts as a third
    of a gradient. Data without classes are refused.
    """

    def __call__(
        self, x: Vec, fraction: float = 1.0, *, teacher: Vec | None = None, pull: float = 1.0, tau: float = 1.0
    ) -> Vec: ...


class Local(NamedTuple):
    """The local work that a client has done: K steps of size lr on n examples, in round t of the run with this seed.

    Example:
        >>> Local(5, 0.1, 100, t=3, client=17).clients, Local(5, 0.1, 100, client=(17, 4)).clients
        ((17,), (17, 4))
    """

    K: int
    lr: float
    n: int
    t: int = 0
    seed: int = 0
    client: int | tuple[int, ...] = 0  # in a block one index per row; all else is the same for all rows
    active: int = 0  # number of clients that were asked in this round
    mean_rate: float = 1.0  # mean of rate(k, K) over the steps

    @property
    def lr_sum(self) -> float:
        """Sum of the rates of all steps, K lr unless the method has a `rate`: -D / lr_sum is a mean direction."""
        return self.K * self.lr * self.mean_rate

    @property
    def clients(self) -> tuple[int, ...]:
        """Index of the client of every row, one for a vector: the i of `rng(run.seed, "noise", run.t, i)`."""
        return self.client if isinstance(self.client, tuple) else (self.client,)


class Round(NamedTuple):
    """The round as the server knows it: S and N are the weight of the counted replies and of all clients (plain counts
    when the average is uniform), K the mean number of local steps under those weights, lr this round's local rate,
    active the number of clients that were asked."""

    t: int
    S: float
    N: float
    K: float
    lr: float
    seed: int = 0
    active: int = 0
    mean_rate: float = 1.0  # mean of rate(k, K_i) over all steps, under those weights

    @property
    def lr_sum(self) -> float:
        """Mean of the clients' `Local.lr_sum` under those weights."""
        return self.K * self.lr * self.mean_rate


class Nothing(NamedTuple):
    """The state of a client that keeps none."""


class Model(NamedTuple):
    """A model alone: the state of a server that keeps nothing else, or a broadcast of nothing else."""

    x: Vec


class Movement(NamedTuple):
    """An upload of one vector: how far local work has moved the model that was received, D_i = x_iK - x."""

    D: Vec


class Dual(NamedTuple):
    """The state of a client that keeps its dual alone, in parameter units: h_i, the sum of its own past D_i."""

    h: Vec


@dataclass(frozen=True)
class Method(Params):
    """Base of every method: its description, then the hooks in the order in which a round calls them."""

    source: ClassVar[str] = ""  # name of a method from outside the package: `/path/to/file.py:Class`
    code: ClassVar[str] = ""  # digest of that file
    origin: ClassVar[str] = ""  # path of the user's file, if the file is a run directory's copy
    block_safe: ClassVar[bool] = False  # True: hooks also take a (clients, d) block; a class says so for itself alone
    released: ClassVar[Mapping[str, Any]] = {}  # fields that the authors' code sets otherwise: `--preset released`
    bounds_uploads: ClassVar[bool] = False  # uploads have at most some norm: no wrapper around it may change them
    measures_uploads: ClassVar[bool] = False  # sends numbers about its vectors: no wrapper around it may change them
    lasting: ClassVar[Collection[str]] = ()  # fields that no fork may change: the method reports on all rounds together
    hands_on: ClassVar[Collection[str]] = ()  # hooks that a wrapper writes only to call its base's
    reads_gradient_from_D: ClassVar[str | bool] = ""  # what takes D / lr_sum as a mean gradient: D is measured from the
    # start, and steps are plain SGD, so that another `local_optimizer` is refused with this reason; "" if nothing does
    reads_K: ClassVar[bool] = False  # `update` depends on how many steps the clients took: on K or lr_sum of `Round`
    family: ClassVar[str] = ""  # the kind of method it is, one of `methods.FAMILIES`: how lists are grouped
    paper_decay: ClassVar[float] = 0.998  # the paper's decay of the local rate per round, for `--preset paper`

    @property
    def mix(self) -> float:
        """Coefficient of the fresh gradient in `direction`; weight decay is a part of that gradient."""
        return 1.0

    @property
    def shrink(self) -> float:
        """Coefficient of x itself in `direction` (1/lam for prox methods); only clip="released" reads it."""
        return 0.0

    @property
    def running_mean(self) -> tuple[str, str] | None:
        """(field of the client, field of the server that is its mean over ALL clients), which `verify` then checks."""
        return None

    @property
    def numbers(self) -> Collection[str]:
        """Name the fields of `Up` that are numbers about the work ("a", in a tuple inside it "base.a") and not vectors
        of the model: wrappers change vectors only."""
        return ()

    @property
    def needs(self) -> Mapping[str, str]:
        """Fields of the plan that this method needs, and the one value that each must have."""
        return {}

    def init_server(self, x0: Vec) -> Server:
        """Return the server's state before round 0."""
        raise NotImplementedError

    def init_client(self, x0: Vec) -> Client:
        """Return a client's state before its first round; x0 is the run's INITIAL model."""
        return Nothing()

    def broadcast(self, server: Server) -> Down:
        """Return the message to the clients; it has a field x."""
        raise NotImplementedError

    def start(self, down: Down, client: Client) -> Vec:
        """Return the point where local work begins."""
        start: Vec = down.x
        return start

    def direction(self, x: Vec, grad: Grad, down: Down, client: Client) -> Vec:
        """Return the descent direction at x. May change `client` in place (it is a private copy), nothing else."""
        raise NotImplementedError

    def rate(self, k: int, K: int) -> float:
        """Return the factor of the local rate, weight decay included, in step k = 0..K-1 of a round. K is the planned
        number of steps: a straggler takes the first of them at these rates."""
        return 1.0

    def upload(self, xK: Vec, down: Down, client: Client, run: Local) -> tuple[Up, Client]:
        """Return the message to the server after K steps, and the state that the client keeps."""
        raise NotImplementedError

    def sent(self, up: Up) -> int:
        """Return the bytes of one client's upload on the wire: all its numbers, unless a method sends less."""
        return dense_bytes(up)

    def received(self, mean: Up, round: Round) -> Up:
        """Return the mean upload that the hooks below are given: a server that adds noise adds it here."""
        return mean

    def settle(self, client: Client, mean: Up, round: Round) -> Client:
        """Return the state to store of a client that was counted, from the one that `upload` returned and the mean, in
        the model's dtype. Called where states are stored, client by client, never with a block; may change `client` in
        place."""
        return client

    def update(self, server: Server, mean: Up, round: Round) -> Server:
        """Return the next server state from the mean upload."""
        raise NotImplementedError

    def client_metrics(self, xK: Vec, down: Down, client: Client, run: Local) -> Mapping[str, float]:
        """Return numbers of this client to record, by name; called just before `upload`, with the same arguments."""
        return {}

    def metrics(self, server: Server, mean: Up, round: Round) -> Mapping[str, float]:
        """Return numbers of this round to record, by name; called after `update`, with the state that it returned."""
        return {}

    def check(self, lr: float, active: int, clients: int) -> None:
        """Raise UserError for a run that this method is not made for, or warn about it."""

    @property
    def name(self) -> str:
        """Name in `METHODS`, the CLI and TOML."""
        return self.source or type(self).__name__.lower()

    @property
    def label(self) -> str:
        """Short name for people and folders: the class alone where `name` holds a path."""
        return type(self).__name__ if self.code else self.name

    def to_dict(self) -> dict[str, Any]:
        """Return `{"name": ..., field: value}`, the form of a method in TOML; with its code's digest if it has one."""
        code = {"code": self.code, "origin": self.origin} if self.code else {}
        return {"name": self.name, **code, **self.fields()}


def dense_bytes(tree: Any) -> int:
    """Return the bytes of all numbers of a NamedTuple (of NamedTuples) of vectors."""
    return sum(dense_bytes(a) if isinstance(a, tuple) else a.numel() * a.element_size() for a in tree)


def nested(method: Method) -> Iterator[Method]:
    """Yield a method and those inside it, from the outermost wrapper inwards."""
    yield method
    for value in method.fields().values():
        if isinstance(value, Method):
            yield from nested(value)
