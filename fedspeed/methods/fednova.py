"""FedNova: the mean of normalised movements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ..utils.params import param
from .base import Grad, Local, Method, Model, Nothing, Round

if TYPE_CHECKING:
    from torch import Tensor as Vec


class Up(NamedTuple):
    d: Vec  # (x_iK - x^t) / a_i
    a: Vec  # a_i = K_i, one element: a number about the work


@dataclass(frozen=True)
class FedNova(Method):
    """FedAvg for clients that take different numbers of steps: no client counts for more because it did more.

        1  server sends x^t; client i runs K_i steps of SGD from it
        2  client i sends d_i = (x_iK - x^t) / a_i and a_i = K_i
        3  server:   x^{t+1} = x^t + eta_g (mean_S a_i) (mean_S d_i)

    Recovers: equal K_i: FedAvg.

    Args:
        eta_g: server rate.

    Example:
        >>> FedNova().eta_g
        1.0

    Reference: Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization,
    NeurIPS 2020.
    """

    eta_g: float = param(1.0, "(0, inf)", "the server rate eta_g")
    family = "averaging"
    reads_gradient_from_D = (
        "its a_i = K_i is the sum of the weights that gradients have in D_i, which it is after plain SGD steps alone"
    )
    numbers = ("a",)

    def init_server(self, x0: Vec) -> Model:
        return Model(x0)

    def broadcast(self, server: Model) -> Model:
        return Model(server.x)

    def direction(self, x: Vec, grad: Grad, down: Model, client: Nothing) -> Vec:
        return grad(x)  # line 1

    def upload(self, xK: Vec, down: Model, client: Nothing, run: Local) -> tuple[Up, Nothing]:
        return Up((xK - down.x) / run.K, xK.new_full((*xK.shape[:-1], 1), run.K)), client  # line 2

    def update(self, server: Model, mean: Up, round: Round) -> Model:
        return Model(server.x + self.eta_g * mean.a * mean.d)  # line 3
