"""The garbage collector stays out of imports and out of the end of a command."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from fedspeed.utils.collector import paused


def test_the_collector_is_off_inside_and_on_again_afterwards_also_after_an_error():
    assert gc.isenabled()
    with paused(), paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), paused():
        _ = 1 / 0
    assert gc.isenabled()


def test_a_program_without_a_collector_keeps_none():
    gc.disable()
    try:
        with paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_was_made_inside_is_old_and_can_still_be_collected():
    class Cycle:
        def __init__(self) -> None:
            self.me = self

    with paused():
        gc.collect()
        made = [Cycle() for _ in range(1000)]
    assert gc.get_count()[0] < 700  # a collection of the young ones would not see them
    assert any(each is made for each in gc.get_objects(generation=2))
    assert gc.get_freeze_count() == 0
    del made
    assert gc.collect() >= 1000


def test_objects_that_a_program_froze_stay_frozen():
    code = (
        "import gc; from fedspeed.utils.collector import paused\ngc.freeze()\nn = gc.get_freeze_count()\n"
        "with paused():\n    kept = [[] for _ in range(9)]\nprint(n > 0 and gc.get_freeze_count() == n)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"


PROGRAM = """
import gc, sys
seen = []
being_imported = lambda: getattr(getattr(sys.modules.get("torch"), "__spec__", None), "_initializing", False)
gc.callbacks.append(lambda phase, about: seen.append(being_imported()))
from fedspeed.cli import main
main({words!r})
assert "torch" in sys.modules
print(any(seen), gc.isenabled(), gc.get_freeze_count())
import atexit
atexit._run_exitfuncs()
print(gc.get_freeze_count() > 100_000)
"""


def test_a_command_collects_nothing_while_it_imports_torch_and_nothing_as_it_ends(tmp_path):
    words = ["run", "--rounds", "1", "--clients", "5", "--active", "2", "--quiet", "--out", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(words=words)], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["False True 0", "True"], done.stderr
