"""The matrix: every pair of what a run can be made of is the plain loop's, or refused. The table: `support/matrix.py`.

The loop (`support/plain.py`) knows nothing of the engine. A new method, wrapper or setting gets a value in the table,
and what cannot be combined with it a rule in `REFUSED`.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import matrix
import plainmethods
import pytest
import torch

from fedspeed.methods import METHODS, WRAPPERS

PROCESS = ("back end", "process")
QUICK = [pair for pair in matrix.pairs() if PROCESS not in pair]
SAMPLE = random.Random(20).sample(QUICK, 40)


@pytest.fixture(autouse=True)
def one_thread():
    """Vectors are short: a second thread would only wait."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check(pair: matrix.Pair, folder: Path) -> str:
    """What is wrong with a pair; one that is known to be wrong must be."""
    found, known = matrix.fault(pair, folder), matrix.of(matrix.KNOWN, pair)
    if known:
        return "" if found.startswith("round") else f"no longer differs ({known}): take it out of KNOWN; {found}"
    return found


@pytest.mark.parametrize("pair", SAMPLE, ids=matrix.described)
def test_a_sampled_pair_is_the_plain_loops_or_refused(pair, tmp_path):
    assert check(pair, tmp_path) == ""


@pytest.mark.slow
@pytest.mark.parametrize("dimensions", list(itertools.combinations(matrix.DIMENSIONS, 2)), ids=" and ".join)
def test_every_pair_is_the_plain_loops_or_refused(dimensions, tmp_path):
    wrong = {}
    for number, pair in enumerate(pair for pair in matrix.pairs() if tuple(name for name, _ in pair) == dimensions):
        if found := check(pair, tmp_path / str(number)):
            wrong[matrix.described(pair)] = found
    assert wrong == {}


@pytest.mark.slow
@pytest.mark.parametrize("dimension", list(matrix.DIMENSIONS))
def test_every_value_alone_is_the_plain_loops(dimension, tmp_path):
    values = matrix.DIMENSIONS[dimension]
    assert {name: found for name in values if (found := check(((dimension, name),), tmp_path / name))} == {}


def test_the_table_has_every_method_and_wrapper_and_every_rule_is_of_a_pair():
    assert plainmethods.METHODS.keys() == METHODS.keys()
    cases = [matrix.combined(((dimension, name),)) for dimension, of in matrix.DIMENSIONS.items() for name in of]
    tables = [matrix.method_table(*case) for case in cases]
    assert {table["name"] for table in tables} == METHODS.keys() | WRAPPERS.keys()
    names = [name for values in matrix.DIMENSIONS.values() for name in values]
    assert len(set(names)) == len(names)
    pairs = {frozenset(name for _, name in pair) for pair in matrix.pairs()}
    ruled = [frozenset((a, b)) for left, right, _ in matrix.REFUSED + matrix.KNOWN for a in left for b in right]
    assert set(ruled) <= pairs
    assert len(set(ruled)) == len(ruled)
