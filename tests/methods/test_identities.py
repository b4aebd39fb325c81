"""The identities of the specification, on recorded gradients and on whole runs; those that must fail, fail."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from federations import Softmax, package
from sequences import EQUAL, FULL, PLAN, Recorded, sequences, weights

from fedspeed import simulate
from fedspeed.config.plan import Plan
from fedspeed.data.federated import Federated
from fedspeed.methods import (
    METHODS,
    AFedPD,
    AFedPDSAM,
    FedACG,
    FedAdagrad,
    FedAdam,
    FedADMM,
    FedAvg,
    FedCM,
    FedDyn,
    FedExP,
    FedGamma,
    FedGloSS,
    FedGMT,
    FedInit,
    FedLESAM,
    FedLESAMD,
    FedLESAMS,
    FedMoSWA,
    FedNova,
    FedNSAM,
    FedPD,
    FedProx,
    FedSAM,
    FedSMOO,
    FedSpeed,
    FedSWA,
    FedTOGA,
    FedWMSAM,
    MoFedSAM,
    Scaffold,
)
from fedspeed.methods.base import Local, Round


@pytest.mark.parametrize("hyper", [{}, {"alpha": 0.4, "lam": 0.7}, {"normalise": False, "rho": 0.3}], ids=str)
def test_equations_2_and_3_hold_on_recorded_gradients(hyper):
    """Partial participation, decay and unequal K, each client with its own gamma; any alpha and rho."""
    method = Recorded(**hyper)
    for _ in package(Softmax(), method, PLAN):
        pass
    assert len(method.log) == 15
    for g, h_old, h_new, D, run, _ in method.log:
        gamma_k, gamma = weights(run, method.lam)
        G = gamma_k @ g / gamma
        ghat_old, ghat_new = -h_old / method.lam, -h_new / method.lam
        np.testing.assert_allclose(D, -method.lam * gamma * G + method.lam * gamma * ghat_old, atol=1e-13)  # (2)
        np.testing.assert_allclose(ghat_new, (1 - gamma) * ghat_old + gamma * G, atol=1e-13)  # (3)


def residuals(plan: Plan, problem: Softmax) -> dict[str, float]:
    """Largest residual of each identity of the u and z sequences."""
    lam, x, u, z, ghat, G, gamma = sequences(plan, problem)
    rounds = range(plan.rounds)
    lag = lam * (1 - 2 * gamma) / gamma
    return {
        "4": max(abs(u[t + 1] - u[t] + lam * ghat[t]).max() for t in rounds),
        "5": max(abs(z[t + 1] - z[t] + lam * G[t]).max() for t in rounds),
        "x": max(abs(x[t + 1] - 2 * u[t + 1] + u[t]).max() for t in rounds),
        "lag": max(abs(x[t] - z[t] - lag * ghat[t - 1]).max() for t in rounds if t),
    }


def test_equations_4_and_5_hold_under_full_participation():
    assert max(residuals(FULL, EQUAL).values()) < 1e-12


def test_equations_4_and_5_fail_where_they_should():
    """(4) and (5) under partial participation; (5) under decay, where (4) still holds."""
    partial = residuals(Plan.from_fields({**FULL.fields(), "active": 3}), EQUAL)
    assert partial["4"] > 1e-2
    assert partial["5"] > 1e-2
    decay = residuals(Plan.from_fields({**FULL.fields(), "lr_decay": 0.7}), EQUAL)
    assert decay["4"] < 1e-12
    assert decay["5"] > 1e-2


def final(method, plan=PLAN, problem=None) -> np.ndarray:
    run = package(problem or Softmax(), method, plan)
    for _ in run:
        pass
    return run.x.numpy()


def gap(a, b, plan=PLAN, problem=None) -> float:
    return float(np.abs(final(a, plan, problem) - final(b, plan, problem)).max())


ONE = Plan.from_fields({**PLAN.fields(), "rounds": 1})
SLOW = Plan.from_fields({**ONE.fields(), "lr": 0.4 * PLAN.lr})


def x0() -> np.ndarray:
    return torch.cat([p.detach().reshape(-1) for p in Softmax().model().parameters()]).numpy()


@dataclass(frozen=True)
class NoProx(FedDyn):
    """FedDyn with its dual and without its prox term."""

    def direction(self, x, grad, down, client):
        return grad(x) + self.alpha * client.h


EQUALITIES = [  # id, one method, the other, the plan under which they are the same to rounding
    ("I1", FedSpeed(lam=2, rho=0, correction=False), FedProx(mu=0.5), PLAN),
    ("I2", FedProx(mu=0), FedAvg(), PLAN),
    ("I3", FedSpeed(rho=0, correction=False, prox=False), FedAvg(), PLAN),
    ("I4", FedSpeed(alpha=0, rho=0.3), FedSpeed(alpha=0, rho=0.1), PLAN),
    ("I5", FedSpeed(alpha=0, rho=0.3), FedSpeed(rho=0), PLAN),
    ("I6", FedCM(alpha=1), FedAvg(), PLAN),
    ("I8", Scaffold(), FedAvg(), ONE),
    ("I10", FedAdam(beta1=0, beta2=1, v0=1, tau=0, eta_g=1), FedAvg(), PLAN),
    ("I15", FedSAM(rho=0), FedAvg(), PLAN),
    ("I16", MoFedSAM(alpha=1), FedSAM(), PLAN),
    ("I17", MoFedSAM(rho=0), FedCM(), PLAN),
    ("I18", FedGamma(rho=0), Scaffold(), PLAN),
    ("I19", FedGamma(rho=0.1), FedSAM(rho=0.1), ONE),
    ("I20", FedInit(FedDyn(), beta=0), FedDyn(), PLAN),
    ("I21", FedLESAM(rho=0), FedAvg(), PLAN),
    ("I21 first round", FedLESAM(), FedAvg(), ONE),
    ("FedSAM", FedSpeed(prox=False, correction=False), FedSAM(), PLAN),
    ("I22", FedSpeed(lam=2, rho=0), FedDyn(alpha=0.5), PLAN),
    ("I22 full", FedSpeed(lam=2, rho=0), FedDyn(alpha=0.5), FULL),
    ("I22 weight decay", FedSpeed(lam=2, rho=0), FedDyn(alpha=0.5), replace(PLAN, weight_decay=0.1)),
    ("I25", FedSpeed(lam=2, rho=0, server="active"), FedDyn(alpha=0.5), FULL),
    ("I26", FedADMM(lam=2), FedDyn(alpha=0.5), FULL),
    ("I26 active", FedADMM(lam=2, variant="active"), FedADMM(lam=2), FULL),
    ("agg=", FedSpeed(server="all"), FedSpeed(server="active"), FULL),
    ("active", FedADMM(lam=2, variant="active"), FedSpeed(lam=2, rho=0, server="active"), PLAN),
    ("afedpd full", AFedPD(lam=2), FedDyn(alpha=0.5), FULL),
    ("afedpdsam full", AFedPDSAM(lam=2), FedSpeed(lam=2), FULL),
    ("afedpdsam rho", AFedPDSAM(rho=0), AFedPD(), PLAN),
    ("fedgloss rho", FedGloSS(lam=2, rho=0, rho_l=0.3), FedSpeed(lam=2, rho=0.3), PLAN),
    ("fedgloss 0", FedGloSS(lam=2, rho=0, rho_l=0), FedDyn(alpha=0.5), PLAN),
    ("fedgloss first round", FedGloSS(lam=2, rho_l=0), FedDyn(alpha=0.5), ONE),
    ("fedacg gamma", FedACG(gamma=0, beta=0.5), FedProx(mu=0.5), PLAN),
    ("fedacg first round", FedACG(beta=0), FedAvg(), ONE),
    ("fednsam gamma", FedNSAM(gamma=0, rho=0.1), FedSAM(), PLAN),
    ("fednsam rho", FedNSAM(rho=0), FedACG(beta=0), PLAN),
    ("fednsam momentum", FedNSAM(ascent="momentum"), FedAvg(), ONE),
    ("fedwmsam first round", FedWMSAM(rho=0, alpha=0.3), FedCM(alpha=0.3), ONE),
    ("fedtoga 0", FedTOGA(lam=2, kappa=0, beta=0), FedSpeed(lam=2), PLAN),
    ("fedtoga first round", FedTOGA(lam=2), FedSpeed(lam=2), ONE),
    ("fedtoga rho", FedTOGA(lam=2, rho=0, beta=0), FedDyn(alpha=0.5), PLAN),
    ("FedLESAM-D", FedLESAMD(rho=0, lam=2), FedDyn(alpha=0.5), PLAN),
    ("FedLESAM-D first round", FedLESAMD(lam=2), FedDyn(alpha=0.5), ONE),
    ("FedLESAM-S", FedLESAMS(rho=0), Scaffold(), PLAN),
    ("FedSWA", FedSWA(rho=1, alpha=1), FedAvg(), PLAN),
    ("FedMoSWA first round", FedMoSWA(), FedSWA(), ONE),
    ("FedGMT without a teacher", FedGMT(gamma=0, lam=2), NoProx(alpha=0.5), PLAN),
    ("FedGMT first step", FedGMT(), FedGMT(gamma=0), Plan.from_fields({**ONE.fields(), "local_steps": 1})),
]

INEQUALITIES = [  # must differ by a margin
    ("I9", Scaffold(), FedAvg(), PLAN),
    ("I14", FedNova(), FedAvg(), PLAN),
    ("I23", FedSpeed(lam=2, rho=0, server="active"), FedDyn(alpha=0.5), PLAN),
    ("I24", FedSpeed(lam=2, rho=0, server="active"), FedADMM(lam=2), PLAN),
    ("wang", FedADMM(lam=2), FedDyn(alpha=0.5), PLAN),
    ("agg!", FedSpeed(server="all"), FedSpeed(server="active"), PLAN),
    ("rho", FedSpeed(rho=0.3), FedSpeed(rho=0), PLAN),
    ("prox", FedProx(mu=0.5), FedAvg(), PLAN),
    ("momentum", FedCM(), FedAvg(), PLAN),
    ("sam", FedSAM(), FedAvg(), PLAN),
    ("fedlesam", FedLESAM(), FedAvg(), PLAN),
    ("fedinit", FedInit(FedAvg()), FedAvg(), PLAN),
    ("fedsmoo", FedSMOO(), FedSpeed(), PLAN),
    ("fedpd", FedPD(lam=2), FedADMM(lam=2), FULL),
    ("afedpd partial", AFedPD(lam=2), FedDyn(alpha=0.5), PLAN),
    ("afedpdsam partial", AFedPDSAM(lam=2), FedSpeed(lam=2), PLAN),
    ("fedgloss", FedGloSS(lam=2, rho_l=0), FedDyn(alpha=0.5), PLAN),
    ("fedacg", FedACG(beta=0), FedAvg(), PLAN),
    ("fednsam", FedNSAM(ascent="momentum"), FedNSAM(), PLAN),
    ("fedwmsam", FedWMSAM(rho=0, alpha=0.3), FedCM(alpha=0.3), PLAN),
    ("fedwmsam rho", FedWMSAM(rho=0.3), FedWMSAM(rho=0), PLAN),
    ("fedtoga kappa", FedTOGA(beta=0, kappa=9), FedSpeed(), PLAN),
    ("fedtoga beta", FedTOGA(rho=0), FedDyn(), PLAN),
    ("fedlesamd", FedLESAMD(lam=2), FedDyn(alpha=0.5), PLAN),
    ("fedlesams", FedLESAMS(), Scaffold(), PLAN),
    ("fedswa", FedSWA(rho=1), FedAvg(), PLAN),
    ("fedswa rate", FedSWA(alpha=1), FedAvg(), PLAN),
    ("fedmoswa is not scaffold", FedMoSWA(rho=1, alpha=1, gamma=3 / 7), Scaffold(), PLAN),
    ("fedmoswa is not scaffold, full", FedMoSWA(rho=1, alpha=1, gamma=1), Scaffold(), PLAN),
    ("fedgmt", FedGMT(), FedGMT(gamma=0), PLAN),
    ("fedgmt prox", FedGMT(gamma=0, lam=2), FedDyn(alpha=0.5), PLAN),
    ("fedexp", FedExP(eps=0), FedAvg(), PLAN),
]


@pytest.mark.parametrize(("a", "b", "plan"), [c[1:] for c in EQUALITIES], ids=[c[0] for c in EQUALITIES])
def test_identity_holds(a, b, plan):
    assert gap(a, b, plan) < 1e-12


@pytest.mark.parametrize(("a", "b", "plan"), [c[1:] for c in INEQUALITIES], ids=[c[0] for c in INEQUALITIES])
def test_identity_fails_where_it_must(a, b, plan):
    assert gap(a, b, plan) > 1e-3


def test_alpha_0_is_exactly_independent_of_rho():
    assert gap(FedSpeed(alpha=0, rho=0.3), FedSpeed(rho=0)) == 0


def test_I7_first_round_of_fedcm_is_fedavg_at_rate_alpha_eta():
    np.testing.assert_allclose(final(FedCM(alpha=0.4), ONE), final(FedAvg(), SLOW), atol=1e-14)


def test_fedwmsam_with_fixed_alpha_is_fedcm_with_scaffolds_correction():
    """rho = 0: the direction is alpha (g + c - c_i) + (1 - alpha) Delta, from any state."""
    g, x, Delta, c, c_i = (torch.from_numpy(np.random.default_rng(n).normal(size=6)) for n in range(5))
    method = FedWMSAM(rho=0, alpha=0.3)
    down = method.broadcast(method.init_server(x)._replace(Delta=Delta, c=c))
    found = method.direction(x + 1, lambda at: g.clone(), down, method.init_client(x)._replace(c=c_i))
    torch.testing.assert_close(found, 0.3 * (g + c - c_i) + 0.7 * Delta, rtol=0, atol=1e-14)


def test_fedwmsam_with_one_client_is_fedcm_as_long_as_alpha_stays():
    """c_i = c; alpha = 0.1 stays at the lower end of its clip while the client goes along with the momentum."""
    one, plan = Softmax(clients=1, equal=12), Plan.from_fields({**FULL.fields(), "active": 1, "lr": 0.01})
    run = package(one, FedWMSAM(rho=0), plan)
    for _ in run:
        pass
    assert run.server.alpha.item() == pytest.approx(0.1, abs=1e-15)
    np.testing.assert_allclose(run.x.numpy(), final(FedCM(alpha=0.1), plan, one), atol=1e-13)


def test_fedacg_s_server_is_nesterov_s():
    """Clients that answer with a constant gradient g: m_t = -eta K g (1 - gamma^t) / (1 - gamma), x_t the sum."""
    method, x, g = (
        FedACG(gamma=0.5, beta=0),
        torch.zeros(3, dtype=torch.float64),
        torch.tensor([1.0, -2.0, 0.5]).double(),
    )
    server, told = method.init_server(x), Round(0, 1, 1, 1, 1.0)
    for _ in range(3):
        down = method.broadcast(server)
        up, _ = method.upload(down.x - g, down, None, Local(1, 1.0, 1))
        server = method.update(server, up, told)
    torch.testing.assert_close(server.m, -1.75 * g)
    torch.testing.assert_close(server.x, -(1 + 1.5 + 1.75) * g)


def test_I11_first_step_of_fedadam():
    """From a zero state: eta_g (1 - b1) Dbar / (sqrt(1 - b2) |Dbar| + tau)."""
    D = final(FedAvg(), ONE) - x0()
    step = 0.1 * 0.1 * D / (np.sqrt(0.01) * np.abs(D) + 1e-3)
    np.testing.assert_allclose(final(FedAdam(), ONE) - x0(), step, atol=1e-14)


def test_I12_first_step_of_fedadagrad_is_a_sign():
    D = final(FedAvg(), ONE) - x0()
    np.testing.assert_allclose(final(FedAdagrad(tau=0), ONE) - x0(), 0.1 * np.sign(D), atol=1e-14)


@pytest.mark.parametrize("base", [FedAvg(), FedProx(mu=0.5), Scaffold()], ids=lambda base: base.name)
def test_fedexp_without_room_to_extrapolate_sends_what_its_base_does(base):
    """eps -> inf: y is the base's x, and what is evaluated lags by half a round."""
    plain, wrapped = package(Softmax(), base, PLAN), package(Softmax(), FedExP(base, eps=1e12), PLAN)
    before = plain.x
    for _ in zip(plain, wrapped, strict=True):
        np.testing.assert_allclose(wrapped.server.base.x.numpy(), plain.x.numpy(), atol=1e-13)
        np.testing.assert_allclose(wrapped.x.numpy(), (plain.x + before).numpy() / 2, atol=1e-13)
        before = plain.x


def test_first_round_of_fedgmt_is_a_longer_step_of_fedavg():
    """h = 0 and e = x^0: without a pull D is FedAvg's, and H adds S/N of it."""
    D = final(FedAvg(), ONE) - x0()
    np.testing.assert_allclose(final(FedGMT(gamma=0), ONE) - x0(), (1 + 3 / 7) * D, atol=1e-14)


def test_I13_fednova_is_fedavg_for_equal_steps():
    assert gap(FedNova(), FedAvg(), PLAN, EQUAL) < 1e-13


def test_first_round_steps():
    """Round 1 from the same local models: `active` moves 2 Dbar, `all` (1 + S/N) Dbar, no correction Dbar."""
    D = final(FedSpeed(correction=False), ONE) - x0()
    np.testing.assert_allclose(final(FedSpeed(server="active"), ONE) - x0(), 2 * D, atol=1e-14)
    np.testing.assert_allclose(final(FedSpeed(server="all"), ONE) - x0(), (1 + 3 / 7) * D, atol=1e-14)


def test_the_two_server_rules_differ_by_the_predicted_vector():
    """From the same state: active - all = [mean_S h - mean_all h] of before + (1 - S/N) Dbar."""
    run = package(Softmax(), FedSpeed(), PLAN)
    for _ in range(3):
        run.step()
    h = {i: run.client_state(i).h for i in range(7)}
    x, H, server = run.x, run.server.H, run.server
    record = run.step()
    S = record.cohort
    D = sum(run.states.get(i).h - h[i] for i in S) / len(S)
    active = x + D + sum(run.states.get(i).h for i in S) / len(S)  # mean_S (x_iK + h_i)
    predicted = sum(h[i] for i in S) / len(S) - H + (1 - len(S) / 7) * D
    np.testing.assert_allclose((active - run.x).numpy(), predicted.numpy(), atol=1e-13)
    assert server is not run.server


def test_I27_infinite_lam_takes_a_doubled_fedavg_step():
    speed = FedSpeed(lam=1e12, rho=0, server="active")
    np.testing.assert_allclose(final(speed, ONE) - x0(), 2 * (final(FedAvg(), ONE) - x0()), atol=1e-10)


def test_I28_one_step_with_eta_equal_lam_keeps_the_last_gradient():
    method = Recorded(lam=0.1, rho=0)
    plan = Plan.from_fields({**FULL.fields(), "local_steps": 1})
    for _ in package(Softmax(), method, plan):
        pass
    for g, _, h_new, *_ in method.log:
        np.testing.assert_allclose(-h_new / method.lam, g[0], atol=1e-12)


def test_one_prox_step_has_no_effect():
    one_step = Plan.from_fields({**PLAN.fields(), "local_steps": 1})
    assert gap(FedProx(mu=5), FedAvg(), one_step) < 1e-15


def test_identical_clients_make_scaffold_and_fedavg_coincide():
    """Every client holds the same data, full batches, full participation."""
    x, y, rows = EQUAL.arrays()
    same = Federated.from_arrays(x, y, [rows[0]] * 4, classes=3)
    plan = Plan.from_fields({**FULL.fields(), "active": 4, "batch_size": 100})
    runs = [simulate(m, Softmax().model(), same, plan) for m in (Scaffold(), FedAvg())]
    for _ in zip(*runs, strict=True):
        np.testing.assert_allclose(runs[0].x.numpy(), runs[1].x.numpy(), atol=1e-12)


def permuted(problem: Softmax):
    """The same federation with client ids reversed."""
    federated = problem.federated()
    rows = [federated.rows(i) for i in reversed(range(federated.clients))]
    x, y, _ = problem.arrays()
    return type(federated).from_arrays(x, y, rows, classes=problem.classes)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_permuting_clients_leaves_the_server_model(name):
    """Full batches, full participation: only the order of a sum changes."""
    plan = Plan.from_fields({**FULL.fields(), "batch_size": 100})
    a = package(Softmax(), METHODS[name](), plan)
    b = simulate(METHODS[name](), Softmax().model(), permuted(Softmax()), plan)
    for _ in zip(a, b, strict=True):
        np.testing.assert_allclose(a.x.numpy(), b.x.numpy(), atol=1e-12)
