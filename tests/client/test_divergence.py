"""A NaN that a hook of the user's made of finite values is that hook's; one of a run that diverges is the rate's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

import fedspeed.client.block
import fedspeed.client.engines
from fedspeed import FedAvg, Method, load_data, simulate
from fedspeed.errors import Diverged
from fedspeed.methods.base import Model, Movement

DATA = load_data("digits", split="iid", clients=6)
PLAN: dict[str, Any] = {"rounds": 2, "active": 3, "local_steps": 4, "backend": "serial"}


class Kept(NamedTuple):
    m: torch.Tensor


@dataclass(frozen=True)
class Third(FedAvg):
    """Divides by zero in its third step."""

    def init_client(self, x0: torch.Tensor) -> Any:
        return Kept(x0.new_full((1,), 3.0))

    def direction(self, x: torch.Tensor, grad: Any, down: Any, client: Any) -> torch.Tensor:
        client.m.sub_(1)
        return grad(x) / client.m.sign()


@dataclass(frozen=True)
class Ascent(FedAvg):
    """Asks for a gradient at a point that is not finite."""

    def direction(self, x: torch.Tensor, grad: Any, down: Any, client: Any) -> torch.Tensor:
        away = x - down.x
        return grad(x + away / away.norm())


@dataclass(frozen=True)
class State(Third):
    """Spoils its own state, not its direction."""

    def direction(self, x: torch.Tensor, grad: Any, down: Any, client: Any) -> torch.Tensor:
        client.m.log_().neg_().log_()
        return grad(x)


@dataclass(frozen=True)
class Start(FedAvg):
    def start(self, down: Any, client: Any) -> torch.Tensor:
        return down.x / 0


@dataclass(frozen=True)
class Upload(FedAvg):
    def upload(self, xK: torch.Tensor, down: Any, client: Any, run: Any) -> Any:
        return Movement((xK - down.x) / 0), client


@dataclass(frozen=True)
class Update(FedAvg):
    def update(self, server: Any, mean: Any, round: Any) -> Any:
        return Model((server.x + mean.D) / 0)


@dataclass(frozen=True)
class Received(FedAvg):
    def received(self, mean: Any, round: Any) -> Any:
        return Movement(mean.D / 0)


@dataclass(frozen=True)
class Broadcast(FedAvg):
    def broadcast(self, server: Any) -> Any:
        return Model(server.x / 0)


@dataclass(frozen=True)
class First(FedAvg):
    def init_client(self, x0: torch.Tensor) -> Any:
        return Kept(x0 / 0)


@dataclass(frozen=True)
class Server0(FedAvg):
    def init_server(self, x0: torch.Tensor) -> Any:
        return Model(x0 / 0)


@pytest.mark.parametrize(
    ("method", "hook", "when"),
    [
        (Third(), "direction", r"round 1, client \d, step 3"),
        (Ascent(), "direction", r"round 1, client \d, step 1"),
        (State(), "direction", r"round 1, client \d, step 1"),
        (Broadcast(), "broadcast", "round 1;"),
        (First(), "init_client", "round 1;"),
        (Server0(), "init_server", "the server's first state;"),
        (Start(), "start", r"round 1, client \d;"),
        (Upload(), "upload", r"round 1, client \d;"),
        (Update(), "update", "round 1;"),
        (Received(), "received", "round 1;"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Method) else "",
)
def test_the_hook_is_named_with_file_and_line_and_not_the_rate(method: Method, hook: str, when: str) -> None:
    line = getattr(type(method), hook).__code__.co_firstlineno
    with pytest.raises(Diverged) as told:
        list(simulate(method, "linear", DATA, **PLAN, engine="loop"))
    assert told.match(rf"^{type(method).__name__}\.{hook} made NaN or Inf of finite values in {when}")
    assert told.match(rf"test_divergence\.py, line {line}\)$")
    assert "--lr" not in str(told.value)


@dataclass(frozen=True)
class Blocks(FedAvg):
    block_safe = True

    def direction(self, x: torch.Tensor, grad: Any, down: Any, client: Any) -> torch.Tensor:
        return grad(x) / 0


def test_in_a_block_too() -> None:
    with pytest.raises(Diverged, match=r"Blocks\.direction made NaN or Inf .*test_divergence\.py, line \d+"):
        list(simulate(Blocks(), "linear", DATA, **PLAN, engine="block"))


@dataclass(frozen=True)
class Plain(FedAvg):
    """What FedAvg does, and a norm whose square can overflow."""

    def direction(self, x: torch.Tensor, grad: Any, down: Any, client: Any) -> torch.Tensor:
        g = grad(x)
        return g * (g * g).sum().clamp(min=1e-3)

    def update(self, server: Any, mean: Any, round: Any) -> Any:
        return Model(server.x + mean.D)


@dataclass(frozen=True)
class Inherits(FedAvg):
    """Writes none of the hooks that fail."""

    def broadcast(self, server: Any) -> Any:
        return super().broadcast(server)


@pytest.mark.parametrize("method", [Plain(), Inherits(), FedAvg()], ids=lambda method: type(method).__name__)
def test_a_rate_that_is_too_high_is_the_rates(method: Method) -> None:
    with pytest.raises(Diverged, match=r"diverged .*--lr"):
        list(simulate(method, "mlp", DATA, **PLAN, lr=1e18, engine="loop"))


def test_nothing_of_this_runs_while_all_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("called on the healthy path")

    monkeypatch.setattr(fedspeed.client.engines, "blamed", never)
    monkeypatch.setattr(fedspeed.client.block, "blamed", never)
    monkeypatch.setattr(fedspeed.server.round, "server_blamed", never)
    assert len(list(simulate(Plain(), "linear", DATA, **PLAN, lr=1e-3))) == 2


def test_clients_that_a_hook_spoils_are_dropped_where_that_is_asked() -> None:
    @dataclass(frozen=True)
    class Some(FedAvg):
        def upload(self, xK: torch.Tensor, down: Any, client: Any, run: Any) -> Any:
            return Movement((xK - down.x) / (run.client % 2)), client

    records = list(simulate(Some(), "linear", DATA, **PLAN | {"active": 6}, engine="loop", on_client_error="drop"))
    assert [record.dropped for record in records] == [[0, 2, 4], [0, 2, 4]]
