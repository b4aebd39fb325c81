"""A client's state on its device, file by file: what is lost, killed or asked for again changes no state."""

from __future__ import annotations

import os

import pytest
import torch

from fedspeed.errors import UserError
from fedspeed.flower.states import NEVER, CountedRounds, DeviceStates
from fedspeed.methods.base import Nothing
from fedspeed.methods.scaffold import Client

LIKE = Client(torch.empty(3))
RUN = "ab" * 16


def state(value: float) -> Client:
    return Client(torch.full((3,), value))


@pytest.fixture
def kept(tmp_path):
    return DeviceStates(tmp_path, RUN, client=7)


def value(kept, counted):
    found = kept.read(counted, LIKE)
    return None if found is None else float(found.c[0])


def test_a_reply_that_is_not_counted_changes_nothing(kept):
    kept.write(0, state(1.0))
    kept.write(4, state(2.0))  # its reply is lost: the next message says that round 0 was counted last
    assert value(kept, 0) == 1.0
    kept.write(9, state(3.0))
    assert [value(kept, t) for t in (0, 4, 9)] == [1.0, 2.0, 3.0]


def test_a_late_message_does_not_take_the_newer_state_away(kept):
    """A message of round 3 is worked off after that of round 5; the server counts round 5."""
    kept.write(1, state(1.0))
    kept.write(5, state(5.0))
    kept.drop(before=NEVER)
    kept.write(3, state(3.0))
    kept.drop(before=NEVER)
    assert value(kept, 5) == 5.0


def test_a_crash_while_writing_leaves_the_state_of_before(kept, monkeypatch):
    kept.write(0, state(1.0))

    def crash(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", crash)
    with pytest.raises(UserError, match="No space left"):
        kept.write(1, state(2.0))
    assert value(kept, 0) == 1.0
    assert value(kept, 1) is None
    assert [path.name for path in kept.folder.iterdir()] == ["7@0"]


@pytest.mark.parametrize("damage", ["gone", "short", "long name", "another method's"])
def test_what_cannot_be_read_is_lost(kept, damage):
    kept.write(2, state(1.0))
    path = kept.folder / "7@2"
    if damage == "gone":
        path.unlink()
    elif damage == "short":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "long name":
        path.write_bytes(b"[" * 10_000)
    else:
        path.write_bytes(path.read_bytes().replace(b'"c"', b'"h"'))
    assert value(kept, 2) is None


def test_what_cannot_be_read_just_now_is_not_lost(kept):
    """A folder in its place stands for a disk that answers with an error: the turn fails, no state is made anew."""
    kept.write(2, state(1.0))
    path = kept.folder / "7@2"
    path.rename(kept.folder / "aside")
    path.mkdir()
    with pytest.raises(UserError, match="IsADirectoryError"):
        value(kept, 2)
    path.rmdir()
    (kept.folder / "aside").rename(path)
    assert value(kept, 2) == 1.0


def test_two_processes_that_write_the_same_state(kept, monkeypatch):
    """A message that was sent again: the second writes all of its file just before the first gives its own its name."""
    replace, inside = os.replace, []

    def slow(part, path):
        if not inside:
            inside.append(part)
            kept.write(4, state(1.0))
        replace(part, path)

    monkeypatch.setattr("os.replace", slow)
    kept.write(4, state(1.0))
    assert value(kept, 4) == 1.0
    assert [path.name for path in kept.folder.iterdir()] == ["7@4"]


def test_what_a_kill_left_is_removed(kept):
    kept.write(4, state(1.0))
    for name in (f"7@2.{'ab' * 8}", f"7@2.{'ab' * 8}.part", f"7@4.{'cd' * 8}.part"):
        (kept.folder / name).write_bytes(b"half")
    kept.drop(before=4)
    assert sorted(path.name for path in kept.folder.iterdir()) == ["7@4", f"7@4.{'cd' * 8}.part"]


def test_only_what_nobody_can_ask_for_is_removed(kept, tmp_path):
    other = DeviceStates(tmp_path, RUN, client=77)
    other.write(0, state(0.0))
    for t in range(5):
        kept.write(t, state(t))
    kept.drop(before=3)
    assert sorted(path.name for path in kept.folder.iterdir()) == ["77@0", "7@3", "7@4"]


@pytest.mark.parametrize("run", ["", "../../etc", "AB" * 16, "ab" * 15, "ab" * 16 + "/x"])
def test_a_run_is_no_path(tmp_path, run):
    with pytest.raises(UserError, match="expected a run of 32 hexadecimal digits"):
        DeviceStates(tmp_path, run, client=0)


def test_the_server_knows_what_was_counted_and_what_may_be_asked_for():
    counted = CountedRounds(stateful=True)
    assert counted.of(7) == (NEVER, NEVER)
    counted.stage(7, Nothing(), 2)
    counted.discard()  # the round failed
    assert counted.of(7) == (NEVER, NEVER)
    for t in (3, 5):
        counted.stage(7, Nothing(), t)
        counted.commit()
    assert counted.of(7) == (5, 3)
    assert counted.take_unsaved() == [(7, 5, Nothing())]
    assert counted.get(7) is None


def test_a_method_without_states_has_nothing_to_count():
    counted = CountedRounds(stateful=False)
    counted.stage(7, Nothing(), 2)
    counted.commit()
    assert list(counted) == []
