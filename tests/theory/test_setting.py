"""gamma, gamma_k, P and the shared quantities, against sums and symbolic algebra; bad settings are refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import sympy as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspeed.errors import UserError
from fedspeed.theory import FORMS, P, Setting, form_at, gamma, gamma_k, kappa

RATIOS = st.floats(1e-6, 1.0)
STEPS = st.integers(1, 400)


@given(RATIOS, STEPS)
@settings(max_examples=80, deadline=None)
def test_weights_add_up_to_gamma_and_increase(s, K):
    weights = gamma_k(s, 1.0, K)
    assert len(weights) == K
    assert math.isclose(weights.sum(), gamma(s, 1.0, K), rel_tol=1e-9)
    assert (np.diff(weights) >= 0).all()  # erratum 14: gamma_{k+1}/gamma_k = 1/(1 - s) >= 1
    setting = Setting(eta=s, lam=1.0, K=K)
    normal = weights / weights.sum()
    assert math.isclose(setting.W, np.square(normal).sum(), rel_tol=1e-9)
    assert 1 / K - 1e-12 <= setting.W <= 1 + 1e-12


def test_sum_of_squared_weights_symbolically():
    """W = s (2 - gamma) / ((2 - s) gamma)."""
    s = sp.symbols("s", positive=True)
    for K in (1, 2, 5):
        g = 1 - (1 - s) ** K
        exact = sum((s * (1 - s) ** (K - 1 - k) / g) ** 2 for k in range(K))
        assert sp.simplify(exact - s * (2 - g) / ((2 - s) * g)) == 0


def test_mean_index_under_the_weights_symbolically():
    """sum_k k gamma_k/gamma = K/gamma - 1/s, which `drift_factor` uses."""
    s = sp.symbols("s", positive=True)
    for K in (1, 2, 6):
        g = 1 - (1 - s) ** K
        exact = sum(k * s * (1 - s) ** (K - 1 - k) / g for k in range(K))
        assert sp.simplify(exact - (K / g - 1 / s)) == 0


def test_above_lam_the_weights_alternate_and_gamma_passes_one():
    """Erratum 8: lam < eta < 2 lam is allowed by the printed theorem."""
    weights = gamma_k(1.5, 1.0, 5)
    assert (np.sign(weights) == [1, -1, 1, -1, 1]).all()
    assert gamma(1.5, 1.0, 5) > 1


def test_experiments_of_the_paper_do_not_meet_K_at_least_lam_over_eta():
    """Erratum 18, the settings of the main experiments; Figure 2's E = 10 and 20 meet it."""
    for lam, K in ((10.0, 50), (1000.0, 10), (100.0, 10), (10.0, 20)):
        failed = [c.name for c in form_at(Setting(eta=0.1, lam=lam, K=K), "printed").conditions if not c.holds]
        assert "K >= lam/eta" in failed
    for K in (100, 200):
        conditions = form_at(Setting(eta=0.1, lam=10.0, K=K), "printed").conditions
        assert next(c for c in conditions if c.name == "K >= lam/eta").holds


def test_kappa_is_minus_one_half_at_the_printed_limits():
    """Erratum 7."""
    L, K, alpha = 2.0, 30, 0.7
    setting = Setting(
        eta=1 / (32 * math.sqrt(3 * K) * L), lam=1.0, K=K, L=L, alpha=alpha, rho=1 / (math.sqrt(6) * alpha * L)
    )
    assert math.isclose(kappa(setting), -0.5, rel_tol=1e-12)
    others = {c.name: c.slack for c in form_at(setting, "printed").conditions}
    assert abs(others["rho alpha L <= 1/sqrt(6)"]) < 1e-12
    assert abs(others["eta <= 1/(32 sqrt(3K) L)"]) < 1e-15


def test_P_and_its_slip():
    """Erratum 2: P >= 1 by (1 - 2 gamma)^2 >= 0; the slip gives a P below 1 for gamma > 1/sqrt(2)."""
    setting = Setting(eta=0.05, lam=0.1, K=10)
    r2 = (setting.L * setting.shift) ** 2
    assert math.isclose(1 / P(setting), 1 - 24 * r2, rel_tol=1e-12)
    assert P(setting) >= 1 > P(setting, "slip")
    assert P(setting.but(L=100.0)) == math.inf


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"eta": 2.0, "lam": 1.0}, "erratum 8"),
        ({"K": 0}, r"K must be in \[1, inf\), got 0"),
        ({"L": 0.0}, r"L must be in \(0, inf\), got 0"),
        ({"L": -1.0}, "L must be"),
        ({"rho": -0.1}, r"rho must be in \[0, inf\), got -0.1"),
        ({"alpha": 1.5}, "alpha must be"),
        ({"sigma_g": -1.0}, "sigma_g must be"),
        ({"eta": math.nan}, "eta must be"),
        ({"m": 0}, "m must be"),
        ({"T": 0}, "T must be"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(bad, said):
    with pytest.raises(UserError, match=said):
        Setting(**bad)


def test_bad_gamma_and_form():
    for bad in ((0.0, 1.0, 3), (2.0, 1.0, 3), (-1.0, 1.0, 3), (0.1, 1.0, 0)):
        with pytest.raises(UserError, match="gamma"):
            gamma(*bad)
    with pytest.raises(UserError, match="did you mean 'printed'"):
        form_at(Setting(), "printd")
    assert len(FORMS) == 4
