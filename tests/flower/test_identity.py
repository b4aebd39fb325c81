"""What a run is called on devices, and who its clients are: bound when the first round begins, and only then."""

from __future__ import annotations

import json
import tracemalloc
from types import SimpleNamespace

import pytest

flwr = pytest.importorskip("flwr", reason="make test-flower has it")

from flowerrun import N, Run, alone  # noqa: E402

import fedspeed  # noqa: E402
from fedspeed.flower.roster import MOST_IN_ALL, MOST_N, ClientsFile  # noqa: E402
from fedspeed.flower.server import remote_data  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:google.*", "ignore::DeprecationWarning:flwr.*")


def test_a_run_without_its_name_is_not_continued(tmp_path, data):
    """With a new name every device would begin anew."""
    run = Run(tmp_path, data, "scaffold").go(rounds=2)
    (run.out / "flower.json").unlink()
    with pytest.raises(fedspeed.UserError, match=r"expected flower.json beside its checkpoints, found none"):
        run.go()
    assert run.refused == []


def test_two_servers_that_begin_in_one_directory(tmp_path, data):
    """The second meets its devices while the first begins: it does not go on under a name of its own."""
    run = Run(tmp_path, data, "scaffold")

    def another(node, message, reply):
        if run.loop.fault is another:
            run.loop.fault = lambda node, message, reply: [reply]
            run.go(rounds=2)
        return [reply]

    run.loop.fault = another
    with pytest.raises(fedspeed.UserError, match="another `flwr run` began here meanwhile"):
        run.go()
    assert len(run.rows) == 2
    assert run.go().equals()
    assert run.refused == []


@pytest.mark.parametrize("known", [{}, {"0": {"n": 3, "key": "a"}}, {"x": {"n": 3, "key": "a"}}, 3])
def test_a_book_that_was_edited_is_one_line(tmp_path, known):
    (tmp_path / "flower.json").write_text(json.dumps({"run": "ab" * 16, "clients": 2, "known": known}))
    with pytest.raises(fedspeed.UserError, match="expected a run of 2 clients, found another"):
        ClientsFile(tmp_path, 2)


def test_a_wrong_index_is_corrected_before_the_run_begins(tmp_path, data):
    """Client 3's device first says that it is client 2, and is started again; nothing is bound to the mistake."""
    run = Run(tmp_path, data, "fedavg")
    del run.loop.nodes[102]
    run.join(2, node=103)
    corrected = []
    nodes = run.loop.get_nodes

    def get_nodes():
        if (103, "query.hello") in run.loop.log and not corrected:
            corrected.append(True)
            run.join(3)
            run.join(2)
        return nodes()

    run.loop.get_nodes = get_nodes
    assert run.go().equals()
    assert run.refused == []


def test_a_first_start_that_failed_binds_nothing(tmp_path, data):
    run = Run(tmp_path, data, "fedavg")
    run.join(2, app=run.app(data=lambda i, _: alone(data, 0)), key=b"another device's")
    del run.loop.nodes[103]
    with pytest.raises(fedspeed.UserError, match="found no SuperNode for 3"):
        run.go()
    run.join(2)
    run.join(3)
    assert run.go().equals()


def test_a_device_that_runs_something_else_binds_no_key(tmp_path, data):
    """It has an index of ours when the run begins, and is refused; the right device, with another key, is let in."""
    run = Run(tmp_path, data, fedspeed.FedSpeed(lam=10), active=4)
    run.join(3, key=b"wrong", app=run.app(method=fedspeed.FedSpeed(lam=20)))
    run.go(timeout=1.0, rounds=1)
    run.join(3)
    run.go(rounds=2)
    run.join(3, node=500, key=b"wrong")
    del run.loop.nodes[103]
    run.go(timeout=1.0, rounds=3)
    assert [(r["kind"], r["client"]) for r in run.refused] == [("terms", 3), ("key", 3)]
    assert [row["dropped"] for row in run.rows] == [[3], [], [3]]


def test_a_key_that_is_bound_to_another_index(tmp_path, data):
    run = Run(tmp_path, data, "fedavg", active=4).go(rounds=1)
    del run.loop.nodes[101]
    run.join(1, node=102)
    run.go(timeout=1.0, rounds=2)
    assert [(r["kind"], r["client"]) for r in run.refused] == [("key", 1)]
    assert "expected fedspeed-client=2" in run.refused[0]["why"]
    assert run.rows[1]["dropped"] == [1, 2]


def test_claimed_samples_cost_no_memory(data):
    sizes = [30, 80, 80, 2**24]
    tracemalloc.start()
    try:
        made = remote_data(SimpleNamespace(sizes=lambda: sizes), data, {})
        assert made.split_fingerprint
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()
    assert made.sizes.tolist() == sizes


def test_too_many_claimed_samples(data):
    sizes = [MOST_N] * (MOST_IN_ALL // MOST_N) + [1]
    with pytest.raises(fedspeed.UserError, match=f"expected at most {MOST_IN_ALL} samples in all"):
        remote_data(SimpleNamespace(sizes=lambda: sizes), data, {})


def test_a_claim_beyond_all_sense_is_refused(tmp_path, data):
    def claim(node, message, reply):
        if node == 103 and "about" in reply.content and "n" in reply.content["about"]:
            reply.content["about"]["n"] = 2**40
        return [reply]

    run = Run(tmp_path, data, "fedavg", claim)
    with pytest.raises(fedspeed.UserError, match=f"expected {N} clients"):
        run.go()
    assert [r["kind"] for r in run.refused] == ["malformed"]
