"""Who owns what as two arrays: the same as lists, however it was given."""

from __future__ import annotations

import numpy as np
import pytest

from fedspeed import Federated, UserError
from fedspeed.data.splits import Rows, by_owner


def test_ids_and_lists_are_one_federation():
    owner = np.random.default_rng(0).integers(0, 300, 1000)
    ids = np.unique(owner)
    lists = [np.flatnonzero(owner == i) for i in ids]
    x, y = np.arange(1000.0, dtype="f4")[:, None], np.arange(1000) % 2
    a, b = Federated.from_arrays(x, y, owner), Federated.from_arrays(x, y, lists)
    assert a.split_fingerprint == b.split_fingerprint
    assert a.clients == len(ids)
    for i in (0, 7, len(ids) - 1):
        assert a.rows(i).tolist() == lists[i].tolist()


def test_rows_are_a_sequence_of_arrays():
    rows = by_owner(np.array([2, 0, 2, 1]))
    assert [own.tolist() for own in rows] == [[1], [3], [0, 2]]
    assert rows[-1].tolist() == [0, 2]
    assert [own.tolist() for own in rows[:2]] == [[1], [3]]
    assert len(Rows.of([])) == 0
    with pytest.raises(IndexError):
        rows[3]


def test_a_client_without_rows_is_still_refused():
    with pytest.raises(UserError, match=r"clients \[1\] have none"):
        Federated.from_arrays(np.zeros((2, 1), "f4"), np.zeros(2, int), [[0, 1], []])
