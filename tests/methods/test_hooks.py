"""A mistake in a method from a user's file gives one clear line, with the file and its line."""

from __future__ import annotations

import re
import textwrap

import pytest

from fedspeed.cli import main
from fedspeed.methods import find_method

METHOD = '''
from dataclasses import dataclass
from typing import NamedTuple
import torch
from fedspeed import Method, param


class Server(NamedTuple):
    x: torch.Tensor
    v: torch.Tensor


class Down(NamedTuple):
    x: torch.Tensor


class Client(NamedTuple):
    m: torch.Tensor
    n: torch.Tensor


class Up(NamedTuple):
    D: torch.Tensor


@dataclass(frozen=True)
class Mine(Method):
    """FedProx with momentum at the client."""

    mu: float = param(0.1, "[0, inf)", "mu")

    def init_server(self, x0):
        return Server(x0, torch.zeros_like(x0))  # A

    def init_client(self, x0):
        return Client(torch.zeros_like(x0), x0.new_zeros(1))  # B

    def broadcast(self, server):
        return Down(server.x)  # C

    def start(self, down, client):
        return down.x  # D

    def direction(self, x, grad, down, client):
        client.m.mul_(0.9).add_(grad(x))  # E
        return client.m + self.mu * (x - down.x)  # F

    def upload(self, xK, down, client, run):
        return Up(xK - down.x), Client(client.m, client.n + 1)  # G

    def update(self, server, mean, round):
        return Server(server.x + mean.D, server.v)  # H
'''

MUTANTS = {  # the line, what stands there instead, and what is said
    "server is a tensor": ("A", "return x0", "init_server must return a NamedTuple, found a tensor"),
    "server is a tuple": ("A", "return (x0, x0)", "init_server must return a NamedTuple, found a tuple"),
    "server is a dict": ("A", "return {'x': x0}", "init_server must return a NamedTuple, found a dict"),
    "server without x": ("A", "return Up(x0)", "init_server must return a NamedTuple with a field x, found D"),
    "server of another length": (
        "A",
        "return Server(x0[:3], x0)",
        r"init_server must return x of shape \(\d+\), found",
    ),
    "server lacks a field": ("A", "return Server(x0)", r"init_server: before round 1: TypeError.*'v'"),
    "a number at the server": ("A", "return Server(x0, 0.0)", "init_server must return tensors, found Server.v = 0.0"),
    "a scalar at the server": (
        "A",
        "return Server(x0, torch.tensor(0.0, dtype=x0.dtype))",
        r"init_server must return vectors \(one axis\), found Server.v of shape \(\)",
    ),
    "x0 in place": ("A", "return Server(x0.zero_(), x0)", "init_server must not change x0 in place"),
    "client is None": ("B", "pass", "init_client must return a NamedTuple, found None; is there a return"),
    "client lacks a field": ("B", "return Client(x0)", "init_client: before round 1: TypeError.*'n'"),
    "client in float64": (
        "B",
        "return Client(x0.double(), x0.new_zeros(1))",
        "init_client must return Client.m of torch.float32",
    ),
    "down is a tensor": ("C", "return server.x", "broadcast must return a NamedTuple, found a tensor"),
    "down is None": ("C", "pass", "broadcast must return a NamedTuple, found None"),
    "down without x": ("C", "return Up(server.x)", "broadcast must return a NamedTuple with a field x, found D"),
    "server in place": ("C", "return Down(server.x.mul_(0.9))", "broadcast must not change server.x in place"),
    "start is None": ("D", "pass", "start must return a vector, found None"),
    "start is a number": ("D", "return 0.0", "start must return a vector, found 0.0"),
    "start too short": ("D", "return down.x[:4]", r"start must return a vector of shape \(\d+\), found \(4\)"),
    "start in place": ("D", "return down.x.add_(1)", "start must not change down.x in place"),
    "no such field": (
        "E",
        "client.mm.add_(grad(x))",
        r"step 1 of \d+: AttributeError: 'Client' object has no attribute 'mm'",
    ),
    "gradient elsewhere": ("E", "grad(x[:3])", r"step 1 of \d+: RuntimeError"),
    "grad without x": ("E", "grad()", r"step 1 of \d+: TypeError"),
    "x in place": ("E", "x.sub_(grad(x))", "direction must not change x in place"),
    "down in place": ("E", "down.x.add_(grad(x))", "direction must not change down.x in place"),
    "no return": ("F", "pass", "direction must return a vector, found None; is there a return"),
    "direction 0.0": ("F", "return 0.0", "direction must return a vector, found 0.0"),
    "direction a scalar": ("F", "return grad(x).sum()", r"direction must return a vector of shape \(\d+\), found \(\)"),
    "direction of one element": ("F", "return x[:1]", r"direction must return a vector of shape \(\d+\), found \(1\)"),
    "direction a matrix": ("F", "return x[None]", r"direction must return a vector of shape \(\d+\), found \(1, \d+\)"),
    "direction in float64": (
        "F",
        "return x.double()",
        "direction must return a vector of torch.float32, found torch.float64",
    ),
    "direction is a tuple": ("F", "return x, x", "direction must return a vector, found a tuple"),
    "direction with a graph": (
        "F",
        "return torch.nn.Parameter(x)",
        "direction must return a vector without a graph behind it",
    ),
    "direction ends the program": ("F", "raise SystemExit(0)", "direction must not end the program"),
    "update ends the program": ("H", "raise SystemExit(0)", "update must not end the program"),
    "direction NaN": ("F", "return x * float('nan')", r"Mine.direction made NaN or Inf of finite values in round 1"),
    "upload NaN": ("G", "return Up(xK / 0), client", "Mine.upload made NaN or Inf of finite values in round 1"),
    "update NaN": ("H", "return Server(server.x / 0, server.v)", "Mine.update made NaN or Inf of finite values in r"),
    "upload is a dict": ("G", "return {'D': xK}", r"upload must return a pair \(Up, Client\), found a dict"),
    "upload is a tensor": ("G", "return xK", r"upload must return a pair \(Up, Client\), found a tensor"),
    "upload is Up alone": ("G", "return Up(xK)", r"upload must return a pair \(Up, Client\), found an? Up"),
    "upload of a tensor": ("G", "return xK, client", "upload must return a NamedTuple as Up, found a tensor"),
    "upload a number": ("G", "return Up(1.0), client", "upload must return tensors, found Up.D = 1.0"),
    "upload client None": ("G", "return Up(xK), None", "upload must return a NamedTuple as Client, found None"),
    "state of another shape": (
        "G",
        "return Up(xK), Client(client.m[:5], client.n)",
        r"upload must return a Client with m \(\d+\), n \(1\), as before the round; found m \(5\)",
    ),
    "state of another type": ("G", "return Up(xK), Up(client.m)", "upload must return a Client with m .* found D"),
    "state of another dtype": (
        "G",
        "return Up(xK), Client(client.m.double(), client.n)",
        "upload must return Client.m of torch.float32, found torch.float64",
    ),
    "message in place": ("G", "down.x.zero_(); return Up(xK), client", "upload must not change down.x in place"),
    "divides by zero": ("G", "return Up(xK / (run.K // 10**9 and 1) + 1 // 0), client", "ZeroDivisionError"),
    "update is None": ("H", "pass", "update must return a NamedTuple, found None; is there a return"),
    "update is a tensor": ("H", "return server.x + mean.D", "update must return a NamedTuple, found a tensor"),
    "update of the wrong shape": (
        "H",
        "return Server(server.x[:3], server.v)",
        r"update must return x of shape \(\d+\), found \(3\)",
    ),
    "update loses precision": (
        "H",
        "return Server(server.x.float(), server.v)",
        "update must return Server.x of torch.float64",
    ),
    "update of another kind": (
        "H",
        "return Down(server.x)",
        r"update must return a Server with x \(\d+\), v \(\d+\).*found x",
    ),
    "update in place": ("H", "server.x.add_(mean.D); return server", "update must not change server.x in place"),
    "update: no such field": ("H", "return Server(server.x + mean.d, server.v)", "update: round 1: AttributeError"),
    "update: no such fact": ("H", "return Server(server.x * round.k, server.v)", "update: round 1: AttributeError"),
}
MISSING = ("init_server", "broadcast", "direction", "upload", "update")
RUN = ["--rounds", "2", "--clients", "6", "--active", "3", "--local-epochs", "1", "--model", "linear"]


def mutant(tmp_path, mark: str, code: str):
    """The file with one line changed, and that line's number."""
    lines = METHOD.splitlines()
    number = next(i for i, line in enumerate(lines) if line.endswith(f"# {mark}"))
    lines[number] = " " * 8 + code
    path = tmp_path / "mine.py"
    path.write_text("\n".join(lines) + "\n")
    return path, number + 1


def fails(tmp_path, path, *more: str, code: int = 2) -> None:
    assert main(["run", "--method", f"{path}:Mine", *RUN, "--out", str(tmp_path / "run"), "--quiet", *more]) == code


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_in_a_method_gives_one_line_with_its_place(name, tmp_path, capsys):
    mark, code, says = MUTANTS[name]
    path, number = mutant(tmp_path, mark, code)
    fails(tmp_path, path, code=1 if "NaN" in says else 2)
    err = capsys.readouterr().err
    assert re.search(says, err), err
    assert err.count("\n") == 1, err
    place = re.search(r"mine\.py, line (\d+)", err)
    assert place, err
    assert abs(int(place[1]) - number) <= 2  # the line itself, or the `def` above it


def test_explain_offers_no_rate_for_a_mistake_in_a_hook(tmp_path, capsys):
    path, _ = mutant(tmp_path, "F", "return grad(x) / 0")
    fails(tmp_path, path, code=1)
    assert main(["explain", str(tmp_path / "run")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Mine.direction made NaN or Inf of finite values" in out
    assert "what to try" not in out


@pytest.mark.parametrize("hook", MISSING)
def test_a_hook_that_is_missing_is_named(hook, tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text(re.sub(rf"def {hook}\(", f"def other_{hook}(", METHOD))
    fails(tmp_path, path)
    err = capsys.readouterr().err
    assert f"Mine has no hook `{hook}`; write `def {hook}(self" in err
    assert err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["no such field", "direction 0.0", "state of another shape", "x in place"])
def test_the_place_comes_from_workers_too(name, tmp_path, capsys):
    mark, code, says = MUTANTS[name]
    path, number = mutant(tmp_path, mark, code)
    fails(tmp_path, path, "--backend", "process", "--workers", "2")
    err = capsys.readouterr().err
    assert re.search(says, err), err
    assert re.search(rf"mine\.py, line ({number}|{number - 1}|{number - 2})\D", err), err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_the_traceback_of_a_worker_is_shown_on_request(tmp_path, capsys):
    path, number = mutant(tmp_path, "E", "client.mm.add_(grad(x))")
    fails(tmp_path, path, "--backend", "process", "--workers", "2", "--traceback")
    err = capsys.readouterr().err
    assert "In the worker process:" in err
    assert f'mine.py", line {number}, in direction' in err


def test_the_traceback_is_shown_on_request(tmp_path, capsys):
    path, number = mutant(tmp_path, "H", "return Server(server.x + mean.d, server.v)")
    fails(tmp_path, path, "--traceback")
    err = capsys.readouterr().err
    assert f'mine.py", line {number}, in update' in err
    assert err.splitlines()[-1].startswith("fedspeed: error: Mine.update: round 1: AttributeError")


def test_the_file_without_a_mistake_runs(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(METHOD))
    fails(tmp_path, path, code=0)
    momentum = find_method(f"{path}:Mine")
    assert momentum().mu == 0.1
