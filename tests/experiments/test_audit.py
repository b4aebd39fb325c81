"""`fedspeed audit`: right toys pass, planted mistakes are found where they begin, bad input is one line."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest
import toys
from faults import KINDS, Faulty, explain, faults, finite
from toys import planted

import fedspeed
from fedspeed.cli import main
from fedspeed.experiments.audit import Reference, Setting, first_difference
from fedspeed.methods import METHODS, FedAvg, FedInit, FedSpeed, Scaffold

SHORT = {"rounds": 3}
RIGHT = [
    (toys.FedAvg, FedAvg()),
    (toys.Scaffold, Scaffold()),
    (toys.FedSpeed, FedSpeed()),
    (toys.FedSpeed, FedSpeed(lam=2.0, rho=0.3)),
]


@pytest.mark.parametrize(("toy", "method"), RIGHT, ids=lambda v: getattr(v, "__name__", str(v))[:40])
def test_right_implementations_conform(toy, method):
    found = fedspeed.audit(toy, method)
    assert found.conforms, str(found)
    assert found.lines == []
    assert found.compared >= 6
    assert "conforms" in str(found)


class InPlace(toys.FedAvg):
    """Right numbers, and it scales the gradient that it was handed."""

    def client(self, i, x, grad, t):
        def scaled(y):
            g = grad(y)
            step = g.copy()
            g *= 0.5
            return step

        return super().client(i, x, scaled, t)


def test_a_gradient_that_is_changed_in_place_is_told():
    found = fedspeed.audit(InPlace, "fedavg", **SHORT)
    assert found.conforms
    assert "note: round 1, client 0: it changes the gradient it is handed in place" in str(found)
    assert found.to_dict()["gradient_changed_in_place"] == "round 1, client 0"
    clean = fedspeed.audit(toys.FedAvg, "fedavg", **SHORT)
    assert "note:" not in str(clean)
    assert clean.to_dict()["gradient_changed_in_place"] is None


PLANTED = [  # the toy, its mistake, the method, the kind and a part of what is said, where it shows first
    (toys.FedAvg, "divided by N", "fedavg", "denominator", "all N clients", "round 1, server, x"),
    (toys.FedAvg, "sign", "fedavg", "sign", "up the gradient", "round 1, client 0, x_K"),
    (toys.FedAvg, "no decay", "fedavg", "learning rate", "does not decay", "round 2, client 0, x_K"),
    (toys.FedAvg, "one step too few", "fedavg", "local steps", "K - 1", "round 1, client 0, x_K"),
    (toys.Scaffold, "divided by S", "scaffold", "denominator", "without S/N", "round 1, server, state c"),
    (toys.Scaffold, "sign", "scaffold", "sign", "corrections", "round 2, client 0, x_K"),
    (toys.Scaffold, "no gradient", "scaffold", "missing term", "", "round 2, client 0, x_K"),
    (toys.Scaffold, "lost state", "scaffold", "state", "lost between rounds", "round 1, client 0, state c"),
    (toys.Scaffold, "shared state", "scaffold", "state", "one state is shared", "round 1, client 1, x_K"),
    (toys.Scaffold, "K is 1", "scaffold", "local steps", "1 in place of K", "round 1, client 0, state c"),
    (toys.FedSpeed, "active", "fedspeed", "field", "server were 'active'", "round 1, server, x"),
    (toys.FedSpeed, "sign", "fedspeed", "sign", "rho has the wrong sign", "round 1, client 0, x_K"),
    (toys.FedSpeed, "inverse", "fedspeed", "field", "lam is used as its inverse", "round 1, client 0, x_K"),
    (toys.FedSpeed, "no gradient", "fedspeed", "missing term", "h has no effect", ""),
    (toys.FedSpeed, "shared state", "fedspeed", "state", "one state is shared", ""),
    (toys.FedSpeed, "no decay", "fedspeed", "learning rate", "does not decay", "round 2, client 0, x_K"),
]


@pytest.mark.parametrize(("toy", "wrong", "method", "kind", "says", "where"), PLANTED, ids=lambda v: str(v)[:30])
def test_planted_mistakes_are_found_where_they_begin(toy, wrong, method, kind, says, where):
    found = fedspeed.audit(planted(toy, wrong), method, **SHORT)
    assert not found.conforms
    assert where in str(found.first.key)
    assert f"DIFFERS first in {found.first.key}" in str(found)
    assert found.lines
    assert all(line in str(found) for line in found.lines)
    causes, _ = explain(planted(toy, wrong), method, **SHORT)
    assert causes[0].kind == kind, causes
    assert says in causes[0].says


def test_the_lines_of_the_box_are_named():
    """The local step, the server's step and a state each have theirs."""
    lines = {
        wrong: fedspeed.audit(planted(toys.Scaffold, wrong), "scaffold", **SHORT).lines
        for wrong in ("sign", "K is 1", "divided by S")
    }
    assert len(lines["sign"]) == 1
    assert lines["sign"][0].startswith("2  client i")
    assert any(line.startswith("3  c_i^+") for line in lines["K is 1"])
    assert any(line.startswith("5            c = c") for line in lines["divided by S"])
    server = fedspeed.audit(planted(toys.FedAvg, "divided by N"), "fedavg", **SHORT)
    assert [line for line in server.lines if "x^{t+1}" in line] == server.lines


@pytest.mark.parametrize("method", [name for name in METHODS if name != "fedgmt"])
def test_every_fault_of_the_catalogue_is_found(method):
    """A fault whose numbers are not the method's own differs in a vector that is named; without a fault, none does."""
    setting, made = Setting(rounds=3), METHODS[method]()
    right = Reference(made, setting).run()
    assert first_difference(Faulty(made, setting).run(), right, 0.0) is None
    found = set()
    for fault in faults(made, setting):
        try:
            with np.errstate(all="ignore"):
                run = Faulty(fault.method, setting, fault.seams).run()
        except Exception:  # a mistake that this method cannot make
            continue
        if finite(run) and (first := first_difference(run, right, setting.tolerance)):
            assert first.error > setting.tolerance
            found.add(fault.kind)
    assert found >= {"sign", "local steps", "learning rate"}


def test_what_cannot_be_told_apart_is_all_named():
    """Without its states, a correction that has no gradient looks like one that is forgotten."""
    causes, _ = explain(toys.silent(planted(toys.FedSpeed, "no gradient")), "fedspeed", **SHORT)
    assert {cause.kind for cause in causes} == {"missing term", "state"}


def test_a_wrapper_can_be_what_it_should_be():
    wrapped = FedInit(FedAvg(), beta=0.5)
    assert not fedspeed.audit(toys.FedAvg, wrapped, **SHORT).conforms
    causes, _ = explain(toys.FedAvg, wrapped, **SHORT)
    assert causes[0].kind == "missing term"
    assert "this is FedAvg" in causes[0].says


def test_two_mistakes_at_once_are_not_explained_away():
    class Both(planted(toys.Scaffold, "K is 1")):
        def lr(self, t):
            return self.lr0

    assert not fedspeed.audit(Both, "scaffold", **SHORT).conforms
    assert explain(Both, "scaffold", **SHORT)[0] == ()


def test_the_step_that_differs_is_named():
    class Late(toys.FedAvg):
        def client(self, i, x, grad, t):
            y = super().client(i, x, grad, t)
            return y + 1 if (i, t) == (3, 1) else y

    found = fedspeed.audit(Late, "fedavg", **SHORT)
    assert str(found.first.key) == "round 2, client 3, x_K"
    assert found.first.error == pytest.approx(1 / max(1, np.abs(found.first.expected).max()))
    assert "the last step differs" in str(found)
    few = fedspeed.audit(planted(toys.FedAvg, "one step too few"), "fedavg", **SHORT)
    assert few.first.calls == (3, 4)


def test_no_two_kinds_of_mistakes_give_the_same_numbers_for_scaffold():
    """The setting is generic: what can be told apart in theory is told apart in it."""
    setting, method = Setting(), Scaffold()
    right = Reference(method, setting).run()
    runs = {}
    for fault in faults(method, setting):
        assert fault.kind in KINDS
        if fault.kind in ("denominator", "learning rate", "state"):
            made = Faulty(fault.method, setting, fault.seams).run()
            if first_difference(made, right, setting.tolerance):
                runs[fault.says] = made
    says = list(runs)
    assert len(says) >= 12
    for a, b in itertools.combinations(says, 2):
        assert first_difference(runs[a], runs[b], setting.tolerance), (a, b)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_can_be_audited(name):
    setting = Setting(rounds=2)
    if name == "fedgmt":
        with pytest.raises(fedspeed.UserError, match="teacher"):
            Reference(METHODS[name](), setting).run()
        return
    run = Reference(METHODS[name](), setting).run()
    assert finite(run)
    assert {key.client for key in run.vectors} >= {None, *setting.cohorts[0]}


# ---- the command line, and bad input

FILE = """\
import numpy as np
from toys import *

Wrong = planted(FedAvg, "divided by N")

class NoServer:
    def client(self, i, x, grad, t): return x

class Raises(FedAvg):
    def client(self, i, x, grad, t):
        return 1 / 0

class Short(FedAvg):
    def server(self, x, replies, t): return x[:2]

class NotFinite(FedAvg):
    def client(self, i, x, grad, t): return x * np.nan

class Unknown:
    def __init__(self, temperature): pass

class Text(FedAvg):
    def client(self, i, x, grad, t): return "no"

class States(FedAvg):
    def client_state(self, i): return {"z": self.c}

class BadPoint(FedAvg):
    def client(self, i, x, grad, t): return grad(x[:1])

class Loud(FedAvg):
    def server(self, x, replies, t):
        print("loud")
        return super().server(x, replies, t)

def nothing(): return None
"""


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(FILE)
    return Path("mine.py")


def test_exit_codes_and_json(file, capsys):
    assert main(["audit", "mine.py:FedSpeed", "--method", "fedspeed", "--set", "lam=5", "--set", "method.rho=0.2"]) == 0
    assert "lam 5" in capsys.readouterr().out
    assert main(["audit", "mine.py:Wrong", "--method", "fedavg", "--json", "--rounds", "2", "--clients", "7"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["conforms"]
    assert told["setting"]["clients"] == 7
    assert told["first_difference"]["what"] == "x"
    assert "x^{t+1}" in told["first_difference"]["lines"][0]
    assert main(["audit", "mine.py:Loud", "--method", "fedavg", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["conforms"]
    assert "loud" in err


def test_the_template_conforms_and_the_list_names_every_hook(own_folder, capsys):
    assert main(["audit", "--template"]) == 0
    Path("t.py").write_text(capsys.readouterr().out)
    assert main(["audit", "t.py:Mine", "--method", "fedavg"]) == 0
    assert main(["audit", "--list"]) == 0
    out = capsys.readouterr().out
    for word in ("client(", "server(", "client_state(", "server_state("):
        assert word in out


BAD = [
    (["mine.py:NoServer", "--method", "fedavg"], r"NoServer: it needs server\(\.\.\.\)"),
    (
        ["mine.py:Raises", "--method", "fedavg"],
        r"round 1, client 0: client raised ZeroDivisionError.*mine\.py, line 11",
    ),
    (["mine.py:Short", "--method", "fedavg"], r"round 1: server returned: expected a vector of shape \(6,\).*\(2,\)"),
    (["mine.py:NotFinite", "--method", "fedavg"], r"round 1, client 0: client returned x_K: NaN or Inf"),
    (["mine.py:Unknown", "--method", "fedavg"], "asks for temperature, which is unknown"),
    (["mine.py:Text", "--method", "fedavg"], "expected a vector of 6 numbers, found str"),
    (["mine.py:States", "--method", "scaffold"], "no state is called 'z'; this method has c"),
    (["mine.py:BadPoint", "--method", "fedavg"], r"the point of grad\(x\): expected a vector of shape"),
    (["mine.py:FedAvg,Short", "--method", "fedavg"], "unknown class in .*mine.py 'FedAvg,Short'"),
    (["mine.py:nothing", "--method", "fedavg"], "expected an adapter, found NoneType"),
    (["mine.py:FedAvg", "--method", "fedsped"], "unknown method 'fedsped'; did you mean 'fedspeed'"),
    (["mine.py:Raise", "--method", "fedavg"], "unknown class in .*mine.py 'Raise'; did you mean 'Raises'"),
    (["mine.py:FedAvg", "--method", "fedavg", "--set", "lam=1"], "unknown field of FedAvg 'lam'"),
    (["mine.py:FedAvg", "--method", "fedavg", "--set", "lam"], "expected FIELD=VALUE"),
    (["mine.py:FedAvg", "--method", "fedavg", "--active", "9"], "active must be at most clients"),
    (["mine.py:FedAvg", "--method", "fedavg", "--lr", "1e100"], "diverges in this setting|NaN or Inf"),
    (["mine.py", "--method", "fedavg"], "which class of mine.py is it"),
    (["fedavg", "--method", "fedavg"], "expected path/to/file.py:Class"),
    (["none.py:A", "--method", "fedavg"], "there is no file"),
    (["mine.py:FedAvg"], "expected --method NAME"),
    ([], "expected an adapter"),
]


@pytest.mark.parametrize(("words", "told"), BAD, ids=lambda v: str(v)[:40])
def test_bad_input_is_one_line(file, capsys, words, told):
    assert main(["audit", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert re.search(told, err), err
