"""Digests of code: every edit that can change a number counts, and nothing else does."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from fedspeed.utils.own_code import code_digest

BEFORE = """
import functools
import torch
RATE = 0.5
SEEN = 0
def helper(x):
    return x + 1
def keep(function):
    @functools.wraps(function)
    def inner(*args):
        return function(*args)
    return inner
def make(power):
    def raised(x):
        return x ** power
    return raised
cube = make(3)
class Base:
    def base(self, x):
        return x
class Thing(Base):
    '''A thing.'''
    scale = 2.0
    def __init__(self, width=4):
        self.width = width
    def call(self, x, *, shift=1):
        # a comment
        global SEEN
        SEEN += 1
        return [cube(helper(a)) * RATE + self.scale for a in x if a in {"a", "b", "c"}]
    @property
    def size(self):
        return 10
    @staticmethod
    def fixed():
        return 20
    @keep
    def decorated(self):
        return 30
    @torch.no_grad()
    def silent(self):
        return 40
    def inherited(self):
        return super().base(1)
"""
EDITS = {
    "constant": ("x + 1", "x + 2"),
    "operator": ("x + 1", "x - 1"),
    "global": ("RATE = 0.5", "RATE = 0.6"),
    "closure": ("make(3)", "make(4)"),
    "attribute": ("scale = 2.0", "scale = 3.0"),
    "default": ("width=4", "width=5"),
    "keyword": ("shift=1", "shift=2"),
    "set": ('"c"}', '"d"}'),
    "property": ("return 10", "return 11"),
    "static": ("return 20", "return 21"),
    "decorated": ("return 30", "return 31"),
    "decorator": ("return function(*args)", "return -function(*args)"),
    "decorated by torch": ("return 40", "return 41"),
    "base": ("return x\n", "return -x\n"),
    "name": ("cube(helper(a))", "helper(cube(a))"),
}
SAME = {
    "lines": ("RATE = 0.5", "\n\n\nRATE = 0.5"),
    "comment": ("# a comment", "# another one"),
    "docstring": ("'''A thing.'''", "'''Another.'''"),
    "new docstring": ("    return x + 1", "    'Add one.'\n    return x + 1"),
    "what the code itself counts": ("SEEN = 0", "SEEN = 9"),
    "code that is not used": ("RATE = 0.5", "RATE = 0.5\ndef other(): return 3"),
}


def digest(text: str, name: str = "Thing", file: str = "<cell>") -> str:
    space = {"__name__": "__main__"}
    exec(compile(text, file, "exec"), space)
    return code_digest(space[name])


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_counts(edit):
    assert BEFORE.count(EDITS[edit][0]) >= 1
    assert digest(BEFORE.replace(*EDITS[edit])) != digest(BEFORE)


@pytest.mark.parametrize("edit", SAME)
def test_what_changes_no_number_does_not_count(edit):
    assert BEFORE.count(SAME[edit][0]) == 1
    assert digest(BEFORE.replace(*SAME[edit]), file="another file") == digest(BEFORE)


def test_every_process_finds_the_same():
    """Sets of texts have another order in every process."""
    code = f"from fedspeed.utils.own_code import code_digest\n{BEFORE}\nprint(code_digest(Thing))"
    found = [
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert found[0] == found[1] == digest(BEFORE) + "\n"


def test_own_modules_are_followed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for factor in (2, 3, 2):
        (tmp_path / "beside_me.py").write_text(f"def double(x):\n    return {factor} * x\n")
        sys.modules.pop("beside_me", None)
        (tmp_path / "__pycache__").exists() and [p.unlink() for p in (tmp_path / "__pycache__").iterdir()]
        found.append(digest("import beside_me\ndef f(x):\n    return beside_me.double(x)", "f"))
    monkeypatch.delitem(sys.modules, "beside_me")
    assert found[0] == found[2] != found[1]


def test_functions_that_call_each_other_and_objects_that_cannot_be_looked_at():
    loop = "def f(x):\n    return g(x)\ndef g(x):\n    return f(x) if x else 1"
    assert digest(loop, "f")
    assert digest(loop, "f") != digest(loop.replace("else 1", "else 2"), "f")

    class Odd:
        def __getattribute__(self, name):
            raise RuntimeError(name)

    assert code_digest(Odd()) == ""
    assert code_digest(3, None, len, sys, textwrap.dedent) == ""
