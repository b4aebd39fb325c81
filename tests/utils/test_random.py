"""Randomness as a function of what it is for: independent streams, fair cohorts, complete epochs."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedspeed.utils.files import key
from fedspeed.utils.random import batch_order, batch_orders, cohort, low_keys, rng, seed_device, torch_seed


def test_a_stream_is_a_function_of_its_name():
    a, b = (rng(3, "batches", 5, 7).random(9) for _ in range(2))
    assert np.array_equal(a, b)


def test_every_part_of_the_name_matters():
    names = [(0, "a"), (1, "a"), (0, "b"), (0, "a", 0), (0, "a", 1), (0, "a", 0, 0), (0, "a", 0, 1), (0, "a", 1, 0)]
    assert len({key(*name) for name in names}) == len(names)
    draws = [rng(*name).random(4).tobytes() for name in names]
    assert len(set(draws)) == len(names)


def test_keys_of_a_long_run_do_not_meet():
    keys = {key(seed, purpose, t, i) for seed, purpose, t, i in product(range(3), ("x", "y"), range(40), range(40))}
    assert len(keys) == 3 * 2 * 40 * 40


@settings(deadline=None)
@given(st.integers(-(2**63), 2**63 - 1), st.text(max_size=20), st.lists(st.integers(0, 2**63 - 1), max_size=3))
def test_keys_have_128_bits(seed, purpose, path):
    assert 0 <= key(seed, purpose, *path) < 2**128


def test_neighbouring_streams_are_not_correlated():
    draws = np.array([rng(0, "batches", t, 0).standard_normal(400) for t in range(20)])
    correlation = np.corrcoef(draws)[~np.eye(20, dtype=bool)]
    assert np.abs(correlation).max() < 5 / np.sqrt(400)


@settings(deadline=None)
@given(st.integers(0, 99), st.integers(1, 40), st.data())
def test_fixed_cohorts_are_sorted_sets_of_the_asked_size(seed, clients, data):
    active = data.draw(st.integers(1, clients))
    chosen = cohort(seed, 0, clients, active)
    assert len(chosen) == len(set(chosen.tolist())) == active
    assert np.array_equal(chosen, np.sort(chosen))
    assert chosen.min() >= 0
    assert chosen.max() < clients


def test_fixed_cohorts_are_fair():
    """Every client is active in S/N of the rounds, every pair in S(S-1)/(N(N-1)) of them: six deviations allowed."""
    rounds, clients, active = 4000, 8, 3
    drawn = [cohort(1, t, clients, active).tolist() for t in range(rounds)]
    one = Counter(i for chosen in drawn for i in chosen)
    two = Counter((a, b) for chosen in drawn for a in chosen for b in chosen if a < b)
    for counts, p in ((one, 3 / 8), (two, 3 * 2 / (8 * 7))):
        allowed = 6 * np.sqrt(rounds * p * (1 - p))
        assert all(abs(count - rounds * p) < allowed for count in counts.values())
    assert len(one) == 8
    assert len(two) == 28


def test_bernoulli_cohorts_are_binomial_given_that_somebody_comes():
    rounds, clients, active = 4000, 6, 1
    p = active / clients
    sizes = Counter(len(cohort(2, t, clients, active, "bernoulli")) for t in range(rounds))
    assert sizes[0] == 0
    nobody = (1 - p) ** clients
    for size, ways in ((1, 6), (2, 15), (3, 20)):
        share = ways * p**size * (1 - p) ** (clients - size) / (1 - nobody)
        assert abs(sizes[size] - rounds * share) < 6 * np.sqrt(rounds * share * (1 - share))


def test_bernoulli_with_everybody_is_everybody():
    assert cohort(0, 0, 5, 5, "bernoulli").tolist() == [0, 1, 2, 3, 4]


def test_a_cohort_of_a_huge_federation_is_cheap():
    chosen = cohort(0, 0, 10**9, 5)
    assert len(set(chosen.tolist())) == 5


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 20))
def test_batches_cover_every_epoch_once(n, size, steps):
    batches = batch_order(n, size, steps, key(0, "batches", 0, 0))
    assert len(batches) == steps
    an_epoch = -(-n // size)
    for start in range(0, steps - an_epoch + 1, an_epoch):
        epoch = batches[start : start + an_epoch]
        assert sorted(np.concatenate(epoch).tolist()) == list(range(n))
        assert [len(batch) for batch in epoch[:-1]] == [size] * (an_epoch - 1)
        assert len(epoch[-1]) == n - size * (an_epoch - 1)


def test_epochs_have_different_orders():
    first, second = batch_order(20, 20, 2, key(0, "batches", 0, 0))
    assert first.tolist() != second.tolist()


def test_more_steps_begin_with_the_same_batches():
    few, many = (batch_order(10, 3, steps, key(0, "batches", 0, 0)) for steps in (3, 9))
    assert all(np.array_equal(a, b) for a, b in zip(few, many, strict=False))


def test_seed_device_seeds_what_dropout_draws_from():
    state = torch.get_rng_state()
    try:
        draws = []
        for seed in (5, 5, 6):
            seed_device(torch.device("cpu"), seed)
            draws.append(torch.nn.functional.dropout(torch.ones(64)))
    finally:
        torch.set_rng_state(state)
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize("fails", [False, True])
def test_torch_seed_puts_the_generator_back(fails):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    draws = []
    for _ in range(2):
        try:
            with torch_seed(0, "init"):
                draws.append(torch.rand(3))
                if fails:
                    raise RuntimeError
        except RuntimeError:
            pass
        assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(*draws)


def test_every_position_is_equally_likely():
    """The chi-square of first positions over many keys stays within five deviations of its mean."""
    n, draws = 8, 8000
    first = batch_orders(n, n, 1, [key(0, "batches", t, i) for t in range(80) for i in range(100)])[0][:, 0]
    counts = np.bincount(first, minlength=n)
    chi2 = ((counts - draws / n) ** 2 / (draws / n)).sum()
    assert abs(chi2 - (n - 1)) < 5 * np.sqrt(2 * (n - 1))


def test_many_clients_at_once_get_what_each_gets_alone():
    keys = [key(3, "batches", 1, i) for i in range(4)]
    for k, together in enumerate(batch_orders(7, 3, 5, keys)):
        for i, own in enumerate(keys):
            assert np.array_equal(together[i], batch_order(7, 3, 5, own)[k])


def test_low_keys_of_many_clients_are_the_low_half_of_each_key():
    clients = [0, 5, 2**31, 7]
    assert low_keys(3, "batches", 9, clients).tolist() == [key(3, "batches", 9, i) % 2**64 for i in clients]
    whole = batch_orders(7, 3, 5, [key(3, "batches", 9, i) for i in clients])
    for a, b in zip(batch_orders(7, 3, 5, low_keys(3, "batches", 9, clients)), whole, strict=True):
        assert np.array_equal(a, b)
