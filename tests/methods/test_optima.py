"""Heterogeneous quadratics with exact gradients: where each method must end, in closed form."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from torch import nn

from fedspeed import simulate
from fedspeed.config.plan import Plan
from fedspeed.data.federated import Federated
from fedspeed.methods import (
    FedADMM,
    FedAvg,
    FedCM,
    FedDyn,
    FedExP,
    FedGloSS,
    FedGMT,
    FedMoSWA,
    FedPD,
    FedProx,
    FedSpeed,
    FedSWA,
    FedTOGA,
    FedWMSAM,
    Scaffold,
)


@dataclass(frozen=True)
class Quadratics:
    """F_i(x) = ||A_i x - b_i||^2 / (2 n) with n rows a client: Hessian A_i'A_i/n, its own optimum x_i*."""

    clients: int = 8
    d: int = 4
    n: int = 12
    spread: float = 1.0
    seed: int = 0

    def parts(self) -> tuple[np.ndarray, np.ndarray]:
        r = np.random.default_rng(self.seed)
        A = r.normal(size=(self.clients, self.n, self.d))
        own = self.spread * r.normal(size=(self.clients, self.d))
        return A, np.einsum("inj,ij->in", A, own) + 0.1 * r.normal(size=(self.clients, self.n))

    def hessians(self) -> tuple[np.ndarray, np.ndarray]:
        """H_i, and g_i = A_i'b_i/n: grad F_i(x) = H_i x - g_i."""
        A, b = self.parts()
        return np.einsum("inj,ink->ijk", A, A) / self.n, np.einsum("inj,in->ij", A, b) / self.n

    def optimum(self) -> np.ndarray:
        H, g = self.hessians()
        return np.linalg.solve(H.mean(0), g.mean(0))

    def gradients(self, x: np.ndarray) -> np.ndarray:
        H, g = self.hessians()
        return H @ x - g

    def run(self, method, rounds: int, active: int, steps: int, lr: float = 0.1, **settings):
        """In blocks, whose gradients are written out: mean squares of data over sqrt(2) are F_i."""
        A, b = (part / np.sqrt(2) for part in self.parts())
        rows = np.arange(self.clients * self.n).reshape(self.clients, self.n)
        data = Federated.from_arrays(A.reshape(-1, self.d), b.reshape(-1, 1), list(rows))
        model = nn.Linear(self.d, 1, bias=False).double()
        plan = Plan(
            rounds=rounds, active=active, local_steps=steps, batch_size=self.n, lr=lr, lr_decay=1.0, weight_decay=0.0
        )
        return simulate(method, model, data, plan, loss=nn.functional.mse_loss, engine="block", **settings)


def finish(run):
    for _ in run:
        pass
    return run


@pytest.mark.parametrize(
    ("method", "variate"),
    [
        (Scaffold(), lambda client: client.c),
        (FedDyn(alpha=1.0), lambda client: -1.0 * client.h),
        (FedADMM(lam=1.0), lambda client: -1.0 * client.h),
        (FedSpeed(lam=1.0, rho=0), lambda client: -1.0 * client.h),
        (FedSpeed(lam=1.0, rho=0, alpha=0.5), lambda client: -1.0 * client.h),
        (FedGMT(gamma=0, lam=2.0), lambda client: -0.5 * client.h),
    ],
    ids=lambda value: repr(value) if isinstance(value, FedSpeed | FedADMM | FedDyn | FedGMT | Scaffold) else "",
)
def test_reaches_the_optimum_under_partial_participation(method, variate):
    """K > 1, half of the clients active: the optimum to 1e-10, and the variates are the client gradients there."""
    problem = Quadratics()
    run = finish(problem.run(method, rounds=220, active=4, steps=10))
    best = problem.optimum()
    assert np.abs(run.x.numpy() - best).max() < 1e-10
    gradients = problem.gradients(best)
    assert np.abs(gradients).max() > 0.1  # the clients disagree
    for i in range(problem.clients):
        np.testing.assert_allclose(variate(run.states.get(i)).numpy(), gradients[i], atol=1e-9)


@pytest.mark.parametrize("optimizer", ["momentum:0.9", "nesterov:0.9", "adam:eps=0.3"])
@pytest.mark.parametrize(
    ("method", "weight"),
    [
        (FedDyn(alpha=1.0), 1.0),
        (FedADMM(lam=1.0), 1.0),
        (FedSpeed(lam=1.0, rho=0), 1.0),
        (FedGMT(gamma=0, lam=2.0), 0.5),
    ],
    ids=lambda value: value if isinstance(value, float) else value.name,
)
def test_a_dual_reaches_the_optimum_with_any_local_optimizer(method, weight, optimizer):
    """h_i += D_i asks of local work where it ends, not by which steps. Adam's last steps are small by its eps."""
    problem = Quadratics()
    run = finish(problem.run(method, rounds=300, active=4, steps=10, lr=0.05, local_optimizer=optimizer))
    best = problem.optimum()
    assert np.abs(run.x.numpy() - best).max() < 1e-8
    for i in range(problem.clients):
        np.testing.assert_allclose(-weight * run.states.get(i).h.numpy(), problem.gradients(best)[i], atol=1e-6)


@pytest.mark.parametrize("base", [Scaffold, FedCM])
def test_a_gradient_read_from_d_diverges_after_steps_with_momentum(base):
    """Why they are refused: D / (K lr) is then several gradients long. Plain steps bring the same method close."""
    unaware = type("Unaware", (base,), {"reads_gradient_from_D": "", "block_safe": True})()
    problem = Quadratics()
    ends = {
        optimizer: finish(problem.run(unaware, rounds=60, active=8, steps=10, lr=0.05, local_optimizer=optimizer)).x
        for optimizer in ("sgd", "momentum:0.9")
    }
    best = problem.optimum()
    assert np.abs(ends["sgd"].numpy() - best).max() < 0.05
    assert np.abs(ends["momentum:0.9"].numpy() - best).max() > 1e6


@pytest.mark.parametrize(
    "method",
    [FedWMSAM(rho=0, alpha=0.5), pytest.param(FedTOGA(lam=1.0, rho=0), marks=pytest.mark.slow)],
    ids=lambda m: m.name,
)
def test_momentum_and_a_correction_reach_the_optimum_too(method):
    """Without an ascent: at the optimum the momentum is 0 and c_i, or -h_i / lam, is the client's gradient."""
    problem = Quadratics()
    run = finish(problem.run(method, rounds=100, active=4, steps=10))
    best = problem.optimum()
    assert np.abs(run.x.numpy() - best).max() < 1e-5
    for i in range(problem.clients):
        kept = run.states.get(i)
        variate = kept.c if isinstance(method, FedWMSAM) else -kept.h
        np.testing.assert_allclose(variate.numpy(), problem.gradients(best)[i], atol=1e-4)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_fedgloss_reaches_the_optimum_of_the_weights(weighting):
    """Unequal sizes, half of the clients active: the duals have the weights of the models, so that H is 0."""
    r, d = np.random.default_rng(0), 3
    sizes = np.array([2, 4, 6, 18, 3, 5])
    A = [r.normal(size=(n, d)) + 0.5 for n in sizes]
    b = [a @ r.normal(size=d) for a in A]
    p = sizes / sizes.sum() if weighting == "samples" else np.full(len(sizes), 1 / len(sizes))
    H, g = (sum(w * part for w, part in zip(p / sizes, parts, strict=True)) for parts in (
        [a.T @ a for a in A], [a.T @ y for a, y in zip(A, b, strict=True)]
    ))  # fmt: skip
    rows = np.split(np.arange(sizes.sum()), np.cumsum(sizes)[:-1])
    data = Federated.from_arrays(np.concatenate(A), np.concatenate(b)[:, None], rows)
    run = simulate(
        FedGloSS(lam=1.0, rho=0, rho_l=0), nn.Linear(d, 1, bias=False).double(), data, rounds=150, active=3,
        local_steps=6, batch_size=18, lr=0.1, lr_decay=1.0, weight_decay=0.0, weighting=weighting, engine="loop",
        loss=lambda out, y: 0.5 * (out - y).square().mean(), backend="serial",
    )  # fmt: skip
    finish(run)
    np.testing.assert_allclose(run.x.numpy(), np.linalg.solve(H, g), atol=1e-9)
    kept = np.array([run.states.get(i).h.numpy() for i in range(len(sizes))])
    np.testing.assert_allclose(p @ kept, 0, atol=1e-9)


def test_fedpd_reaches_the_optimum_under_full_participation():
    problem = Quadratics()
    run = finish(problem.run(FedPD(lam=1.0), rounds=100, active=8, steps=10))
    assert np.abs(run.x.numpy() - problem.optimum()).max() < 1e-10


@pytest.mark.parametrize("mu", [0.0, 0.5, 2.0])
def test_fedavg_and_fedprox_stop_at_their_own_fixed_point(mu):
    """x_iK - x = -[I - (I - eta H')^K] H'^-1 (H_i x - g_i) with H' = H_i + mu I; its mean is 0 at the fixed point."""
    problem, eta, K = Quadratics(), 0.1, 10
    H, g = problem.hessians()
    eye = np.eye(problem.d)
    M = np.array(
        [(eye - np.linalg.matrix_power(eye - eta * (h + mu * eye), K)) @ np.linalg.inv(h + mu * eye) for h in H]
    )
    fixed = np.linalg.solve((M @ H).mean(0), np.einsum("ijk,ik->j", M, g) / problem.clients)
    method = FedProx(mu=mu) if mu else FedAvg()
    run = finish(problem.run(method, rounds=80, active=8, steps=K, lr=eta))
    np.testing.assert_allclose(run.x.numpy(), fixed, atol=1e-10)
    assert np.abs(fixed - problem.optimum()).max() > 1e-3  # which is not the optimum


def resting(problem: Quadratics, rates: list[float]) -> np.ndarray:
    """x_iK - x = -[I - prod_k (I - eta_k H_i)] H_i^-1 (H_i x - g_i): where its mean is 0."""
    H, g = problem.hessians()
    eye = np.eye(problem.d)
    M = []
    for h in H:
        left = eye
        for eta in rates:
            left = (eye - eta * h) @ left
        M.append((eye - left) @ np.linalg.inv(h))
    return np.linalg.solve((M @ H).mean(0), np.einsum("ijk,ik->j", M, g) / problem.clients)


def test_fedswa_rests_where_its_rates_say_however_far_the_server_goes():
    problem, K = Quadratics(), 10
    fixed = resting(problem, [0.1 * ((1 - k / K) + 0.1 * k / K) for k in range(K)])
    for alpha in (1.0, 1.5):
        run = finish(problem.run(FedSWA(rho=0.1, alpha=alpha), rounds=80, active=8, steps=K))
        np.testing.assert_allclose(run.x.numpy(), fixed, atol=1e-10)
    assert np.abs(fixed - resting(problem, [0.1] * K)).max() > 1e-3  # not where FedAvg does
    assert np.abs(fixed - problem.optimum()).max() > 1e-3


def test_fedexp_rests_where_its_base_does():
    problem = Quadratics()
    run = finish(problem.run(FedExP(eps=1.0), rounds=80, active=8, steps=10))
    np.testing.assert_allclose(run.x.numpy(), resting(problem, [0.1] * 10), atol=1e-10)


@pytest.mark.slow
def test_fedmoswa_reaches_the_optimum_when_all_reply_and_not_when_some_do():
    """Its m is the mean of the variates that were sent, which is 0 at the optimum for all clients alone."""
    problem, best = Quadratics(), Quadratics().optimum()
    method = FedMoSWA(alpha=1.0, gamma=0.5)
    run = finish(problem.run(method, rounds=220, active=8, steps=10))
    assert np.abs(run.x.numpy() - best).max() < 1e-10
    for i, gradient in enumerate(problem.gradients(best)):
        np.testing.assert_allclose(run.states.get(i).c.numpy(), gradient, atol=1e-9)
    some = finish(problem.run(method, rounds=220, active=4, steps=10))
    assert np.abs(some.x.numpy() - best).max() > 1e-4


def test_printed_server_rule_stalls_at_its_predicted_floor():
    """Distance lam sqrt((1 - S/N)/S tr Cov(grad F_i)) within a factor 1.5, where the released rule converges."""
    problem = Quadratics(clients=40, n=8, seed=1)
    best, lam, S = problem.optimum(), 2.0, 8
    gradients = problem.gradients(best)
    floor = lam * np.sqrt((1 - S / 40) / S * np.trace(np.cov(gradients.T)))
    distance = {}
    for rule in ("active", "all"):
        run = problem.run(FedSpeed(lam=lam, rho=0, server=rule), rounds=120, active=S, steps=15)
        far = [float(np.linalg.norm(run.x.numpy() - best)) for _ in run]
        distance[rule] = np.sqrt(np.mean(np.square(far[40:])))
    assert floor / 1.5 < distance["active"] < floor * 1.5
    assert distance["all"] < 0.05 * floor
