"""The corrected constants, re-derived by symbolic algebra and held against the code."""

from __future__ import annotations

import math

import pytest
import sympy as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspeed.theory import P, Setting, Start, bound, form_at, kappa, phi, schedule
from fedspeed.theory.forms import drift_factor


def test_coefficients_of_the_drift_recursion():
    """Erratum 12. Into (3 + 16 L^2 r^2) mean||g_hat||^2 goes lemma "bounded local update"; 24 L^2 r^2 = 1 - 1/P."""
    p, c, D, sg, sl, tele, L = sp.symbols("P c D sigma_g2 sigma_l2 tele L")
    lemma = p * tele + 24 * p * L**2 * c + 12 * p * D + p * (12 * sg + sl)
    expanded = sp.expand(sp.simplify((3 + sp.Rational(16, 24) * (1 - 1 / p)) * lemma))
    assert sp.simplify(expanded.coeff(tele) - (11 * p - 2) / 3) == 0  # printed: 2(P-1)/3
    assert sp.simplify(expanded.coeff(sl) - (11 * p - 2) / 3) == 0  # printed: 2(P-1)/3
    assert sp.simplify(expanded.coeff(sg) - 12 * (11 * p - 2) / 3) == 0
    assert sp.simplify(expanded.coeff(c) - (88 * p - 16) * L**2) == 0  # printed so, and right
    assert sp.simplify(expanded.coeff(D) - (44 * p - 8)) == 0  # printed so, and right
    assert ((11 * p - 2) / 3).subs(p, 2) == sp.Rational(20, 3)


def test_printed_kappa_follows_from_the_printed_drift():
    """At P = 2, a = 1, c <= 4 * 2 eta^2 K {.. 48 ||grad F||^2}: kappa = 1/2 - 3q - 4 L^2 * 8 * 48 eta^2 K."""
    p1 = sp.Rational(11 * 2 - 2, 3)
    theta = 2 * 2  # Theta' L^2 / (eta^2 L^2 K): (1 + 1/a) = 2, and 1/(1 - 1/2) = 2
    assert 4 * theta * (16 + 12 * p1) == 1536


def test_erratum_7_share_of_each_limit():
    q, x = sp.Rational(1, 6), sp.Rational(1, 3 * 32**2)  # rho and eta at their limits
    assert sp.Rational(1, 2) - 3 * q - 1536 * x == -sp.Rational(1, 2)


def test_a_equal_to_one_needs_eta_at_least_half_of_lam():
    """Erratum 13: 2(1-s)^2 <= 1-s exactly for s >= 1/2; and convexity, a = s/(1-s), gives 1-s for every s."""
    s = sp.symbols("s", positive=True)
    solution = sp.solve_univariate_inequality(2 * (1 - s) ** 2 <= 1 - s, s, relational=False)
    assert sp.Interval(sp.Rational(1, 2), 1).is_subset(solution)
    assert sp.Rational(49, 100) not in solution
    a = s / (1 - s)
    assert sp.simplify((1 + a) * (1 - s) ** 2 - (1 - s)) == 0
    assert sp.simplify((1 + 1 / a) - 1 / s) == 0  # so eta^2 becomes eta^2/s = eta lam: the constants grow by lam/eta


def test_noise_of_the_same_minibatch_twice():
    """Erratum 15 on a quadratic with additive noise: g_tilde = (1 + alpha rho L) g1, so its noise grows like that."""
    x, xi, L, alpha, rho = sp.symbols("x xi L alpha rho")
    g1 = L * x + xi
    g2 = L * (x + rho * g1) + xi
    quasi = sp.expand((1 - alpha) * g1 + alpha * g2)
    assert sp.simplify(quasi - (1 + alpha * rho * L) * g1) == 0
    assert sp.simplify(quasi.coeff(xi) ** 2 - (1 + alpha * rho * L) ** 2) == 0


def test_tracking_constants_from_the_lyapunov_function():
    """F + lam b delta: with b gamma = omega mu^2/(1 - 2 g omega mu^2) delta vanishes, and kappa is what D is left."""
    lam, gam, mu2, tau2, om, q, b, g = sp.symbols("lam gamma mu2 tau2 omega q b g", positive=True)
    D, delta, V, sg, sl, s, W, L, n, m = sp.symbols("D delta V sigma_g2 sigma_l2 s W L n m", positive=True)
    psi = 2 * q * (2 * sg + 2 * D + sl)
    R = (1 + om * gam**2) * psi + 2 * om * mu2 * delta + 2 * om * tau2 * D + om * sl * s / (2 - s)
    G = n * V + n * W * sl / m
    descent = -lam / 2 * D - lam / 2 * V + lam / 2 * R + lam**2 * L / 2 * G
    step = descent + lam * b * (-gam * delta + g * gam * (R + W * sl) + g * lam**2 * L**2 / gam * G)
    step = sp.expand(step)
    weight = om * mu2 / (1 - 2 * g * om * mu2) / gam
    assert sp.simplify(step.coeff(delta).subs(b, weight)) == 0
    h = sp.Rational(1, 2) + g * b * gam
    assert (
        sp.simplify(-step.coeff(D) / lam - (sp.Rational(1, 2) - 2 * h * om * tau2 - 4 * q * h * (1 + om * gam**2))) == 0
    )
    absorbed = n * (lam * L + 2 * g * b * lam**2 * L**2 / gam)
    assert sp.simplify(step.coeff(V) - lam / 2 * (absorbed - 1)) == 0
    floor = step.subs({D: 0, delta: 0, V: 0}) / lam
    named = (
        h * (1 + om * gam**2) * 2 * q * (2 * sg + sl) + h * om * sl * s / (2 - s)
        + (g * b * gam + absorbed / 2 / m) * W * sl
    )  # fmt: skip
    assert sp.simplify(floor - named) == 0


@given(st.floats(0.01, 0.15), st.integers(2, 200), st.floats(0, 0.05), st.booleans(), st.floats(1, 20))
@settings(max_examples=60, deadline=None)
def test_tracking_in_code_is_the_derived_one(lL, K, rho, noisy, c):
    """The code against the derivation's formulas, written out once more from docs/explanation/theory.md."""
    lam, L = lL / 2, 2.0
    s = Setting(eta=min(c * lam / K, lam), lam=lam, K=K, L=L, rho=rho / L, m=3, sigma_l=1.5 * noisy, sigma_g=0.7)
    g, n = (3, 2) if noisy else (2, 1)
    ell = 1 if s.q == 0 else 2 + 4 * s.q
    mu = max(s.gamma, abs(s.tau), abs(s.gamma + s.tau))
    omega = ell * g * lL**2 / (1 - g * ell * s.gamma**2 * lL**2)
    found = form_at(s, "tracking")
    if g * ell * s.gamma**2 * lL**2 >= 1 or 2 * g * omega * mu**2 >= 1:
        assert not found.holds
        return
    b = omega * mu**2 / (1 - 2 * g * omega * mu**2) / s.gamma
    h = 0.5 + g * b * s.gamma
    k = 0.5 - 2 * h * omega * s.tau**2 - 4 * s.q * h * (1 + omega * s.gamma**2)
    assert math.isclose(found.kappa, k, rel_tol=1e-9)
    assert found.holds == (k > 0 and n * (lL + 2 * g * b * lL**2 / s.gamma) <= 1)
    if k > 0:
        assert math.isclose(found.gap, 1 / (lam * k), rel_tol=1e-9)
        assert math.isclose(found.tracking, b / k, rel_tol=1e-9)


@given(st.floats(0.001, 1.0), st.integers(1, 300), st.floats(0.001, 0.2))
@settings(max_examples=60, deadline=None)
def test_drift_factor_bounds_the_recursion(share, K, lL):
    """Run c_{k+1} = beta c_k + (1+1/a) eta^2 for many a: none has a smaller weighted mean than a hundredth off."""
    s = Setting(eta=share * lL, lam=lL, K=K, L=1.0)
    theta = drift_factor(s)
    weights = [s.s * (1 - s.s) ** (K - 1 - k) / s.gamma for k in range(K)]
    best = math.inf
    for j in range(-30, 31):
        a = 10 ** (j / 6)
        beta = (1 + a) * (1 - s.s) ** 2 + 16 * (1 + 1 / a) * s.eta**2
        if beta > 1:
            continue
        c, mean = 0.0, 0.0
        for w in weights:
            mean += w * c
            c = beta * c + (1 + 1 / a) * s.eta**2
        best = min(best, mean)
    assert theta <= 4 * lL**2 or not math.isfinite(best)  # of order lam^2, erratum 13
    if math.isfinite(best):
        # an upper bound of its own a's recursion, and never far above the best recursion
        assert best <= 2.5 * theta + 1e-15
        assert theta <= 4 * best + 1e-12


def test_consistent_form_differs_from_the_printed_one_as_the_errata_say():
    s = Setting(eta=0.001, lam=0.1, K=200, L=1.0, rho=0.1, sigma_g=1.0, sigma_l=0.5, T=50)
    a, b = form_at(s, "printed"), form_at(s, "consistent")
    assert math.isclose(phi(s, "printed"), s.lam * phi(s, "consistent"), rel_tol=1e-12)  # 4
    assert math.isclose(a.gap, 2 * b.gap, rel_tol=1e-12)  # 6
    assert math.isclose(a.ghat / b.ghat, 2 * s.gamma / s.eta, rel_tol=1e-12)  # 5, and 1/gamma <= 2 left exact
    assert a.ghat_mean >= b.ghat_mean  # 4 (1-2 gamma)^2/gamma^3 <= 32 for gamma >= 1 - 1/e


def test_corrected_form_at_the_papers_own_point():
    """s >= 1/2, P <= 2: the paper's a = 1 is admissible, and the best a is no worse than it."""
    s = Setting(eta=0.004, lam=0.005, K=5, L=1.0)
    assert P(s) < 2
    assert drift_factor(s) <= 2 * s.eta**2 * s.K * (1 + 1e-9)
    assert 0 < kappa(s, "corrected") < 0.5


def test_rates_of_the_bounds():
    """Under the corollary's schedule: printed and tracking O(1/T), corrected O(T^{-2/3})."""
    slopes = {}
    for form in ("printed", "tracking", "corrected"):
        totals = []
        for T in (10**6, 10**8):
            s = schedule(Setting(T=T, rho=0.1, sigma_g=1.0, sigma_l=1.0), form, base=10**4)
            assert form_at(s, form).holds
            totals.append(bound(s, Start(1.0, 1.0, 1.0, 2.0), form).total)
        slopes[form] = math.log(totals[1] / totals[0]) / math.log(100)
    assert slopes["printed"] == pytest.approx(-1, abs=0.02)
    assert slopes["tracking"] == pytest.approx(-1, abs=0.02)
    assert slopes["corrected"] == pytest.approx(-2 / 3, abs=0.05)


def test_tracking_needs_no_heterogeneity_bound_without_perturbation():
    s = Setting(eta=0.001, lam=0.1, K=200, sigma_l=1.0)
    assert bound(s, Start(1.0, tracking=3.0), "tracking") == bound(
        s.but(sigma_g=1e6), Start(1.0, tracking=3.0), "tracking"
    )


def test_normalised_rho_is_covered_by_tracking_only():
    s = Setting(eta=0.001, lam=0.1, K=200, rho=0.05, normalise=True)
    assert [form for form in ("printed", "consistent", "corrected", "tracking") if form_at(s, form).holds] == [
        "tracking"
    ]
