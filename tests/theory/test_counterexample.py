"""The counterexample to the printed theorem: its conditions hold, its bound does not, and the run is the real one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from gallery import gallery_names
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspeed.theory import Setting, form_at

EXAMPLE = gallery_names("counterexample")
local_steps, potential, wave = EXAMPLE["local_steps"], EXAMPLE["potential"], EXAMPLE["wave"]
break_printed_bound = EXAMPLE["break_printed_bound"]


def plain_steps(x, ghat, a, s):
    """Line 11 of Algorithm 1, one step at a time."""
    y = x
    for _ in range(s.K):
        y -= s.eta * (a * wave(y) - ghat + (y - x) / s.lam)
    return y


@given(st.floats(-5, 5), st.floats(-1, 1), st.sampled_from([1.0, -0.3, -0.9]), st.floats(0.3, 8), st.integers(1, 400))
@settings(max_examples=100, deadline=None)
def test_powers_are_the_steps(x, ghat, a, lam, K):
    s = Setting(eta=min(2 * lam / K, 0.05, lam), lam=lam, K=K)
    assert math.isclose(local_steps(x, ghat, a, s), plain_steps(x, ghat, a, s), rel_tol=1e-7, abs_tol=1e-9)


@given(st.floats(-20, 20), st.floats(-20, 20))
def test_the_wave_is_smooth_bounded_and_the_derivative_of_its_potential(x, y):
    assert abs(wave(x) - wave(y)) <= abs(x - y) + 1e-12  # L = 1
    assert abs(wave(x)) <= 1  # so mean_i |F_i' - F'|^2 <= ((1+b)/2)^2
    assert 0 <= potential(x) <= 1
    step = 1e-5
    assert math.isclose((potential(x + step) - potential(x - step)) / (2 * step), wave(x), abs_tol=1e-4)


def test_the_printed_theorem_is_broken():
    found = break_printed_bound()
    assert all(condition.holds for condition in found.conditions)
    assert all(condition.slack > 0 for condition in found.conditions)
    assert found.setting.sigma_g == pytest.approx(0.65)
    assert found.average > 2 * found.bound.total
    assert found.violated
    assert not form_at(found.setting, "consistent").holds  # the missing conditions on lam L exclude it
    assert not form_at(found.setting, "tracking").holds
    excluded = {c.name: c.holds for c in form_at(found.setting, "consistent").conditions}
    assert not excluded["8 L^2 r^2 + lam L <= 1"]


def test_a_smaller_lam_converges():
    found = break_printed_bound(lam=1.0, T=2000)
    assert not found.violated
    assert found.squares[-1] < 1e-20


def test_it_does_not_converge_step_by_step_either():
    """A few rounds with plain loops, K = 2000: the gradient at z stays large, as with ten million steps."""
    s = Setting(eta=2 * 4.0 / 2000, lam=4.0, K=2000)
    x, ghat, u, late = 0.5, [0.0, 0.0], 0.5, []
    for t in range(60):
        y = [plain_steps(x, g, a, s) for a, g in zip((1.0, -0.3), ghat, strict=True)]
        ghat = [g - (end - x) / s.lam for g, end in zip(ghat, y, strict=True)]
        x = float(np.mean([end - s.lam * g for g, end in zip(ghat, y, strict=True)]))
        z = np.mean(y) + (1 - s.gamma) / s.gamma * (np.mean(y) - u)
        u = float(np.mean(y))
        if t >= 30:
            late.append((0.35 * wave(float(z))) ** 2)
    assert np.mean(late) > 0.02
