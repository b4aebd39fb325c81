"""Runs that go on: what is served of them, to whom, and what is read again."""

from __future__ import annotations

import json
import os
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from made_runs import made_run

from fedspeed.cli import main
from fedspeed.cli.look import view
from fedspeed.errors import Terminated
from fedspeed.report import live
from fedspeed.report.live import Server, Watched, standing, standings
from fedspeed.report.run_files import read_any
from fedspeed.runs.directory import RunDir, exclusive
from fedspeed.utils.files import locked


def grow(run: RunDir, rounds: int, text: str = "") -> None:
    """A run that is not over, with so many of the rounds it is to have, and the beginning of another."""
    lines = [json.dumps(plain) for plain in run.lines()]
    more = [json.dumps({**json.loads(lines[-1]), "round": t}) for t in range(len(lines) + 1, rounds + 1)]
    run.rounds_file.write_text("\n".join([*lines, *more][:rounds]) + "\n" + text)
    run.summary_file.unlink(missing_ok=True)


class Asking:
    """A server and what it answers."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def __call__(self, path: str = "/data", method: str = "GET", host: str | None = None, **more: str) -> HTTPResponse:
        wire = HTTPConnection(*self.server.server_address)
        wire.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for one in (f"127.0.0.1:{self.server.server_port}" if host is None else host).split("|"):
            if one:
                wire.putheader("Host", one.replace("PORT", str(self.server.server_port)))
        for name, value in more.items():
            wire.putheader(name.replace("_", "-"), value)
        wire.endheaders()
        answer = wire.getresponse()
        answer.content = answer.read()
        wire.close()
        return answer

    def told(self) -> dict[str, Any]:
        answer = self()
        assert answer.status == 200, answer.content
        return json.loads(answer.content)

    def rounds(self) -> dict[str, tuple[str, int]]:
        runs = [run for row in self.told()["data"]["rows"] for run in row["runs"]]
        return {run["folder"]: (run["status"], run["rounds"]) for run in runs}


@contextmanager
def serving(folder: Path) -> Iterator[Asking]:
    with Server(folder, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.005,))
        thread.start()
        try:
            yield Asking(server)
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    """Two runs that are over."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(live, "SHARE", 0)
    made_run(tmp_path / "runs/a", "fedavg")
    made_run(tmp_path / "runs/b", "fedspeed")
    return tmp_path / "runs"


@pytest.fixture
def ask(runs) -> Iterator[Asking]:
    with serving(runs) as asking:
        yield asking


# --- who may ask for what ---


@pytest.mark.parametrize("host", ["127.0.0.1:PORT", "localhost:PORT"])
def test_this_machine_is_answered(ask, host):
    assert ask.server.socket.getsockname()[0] == "127.0.0.1"
    page = ask("/", host=host)
    assert page.status == 200
    assert b"connect-src 'self'" in page.content
    assert json.loads(ask(host=host).content)["data"]["rows"][1]["label"] == "fedspeed"


@pytest.mark.parametrize(
    "host",
    ["", "evil.example", "evil.example:PORT", "127.0.0.1", "127.0.0.1:1", "[::1]:PORT", "x@127.0.0.1:PORT",
     "127.0.0.1:PORT|evil.example", "evil.example|127.0.0.1:PORT", "127.0.0.1.evil.example:PORT"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/", "/data"])
def test_other_hosts_are_refused(ask, host, path):
    answer = ask(path, host=host)
    assert answer.status == 403
    assert b"fedavg" not in answer.content


@pytest.mark.parametrize("method", ["HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "MKCOL", "get"])
def test_nothing_can_be_done_but_looked(ask, runs, method):
    before = {path: path.stat().st_mtime_ns for path in runs.rglob("*")}
    answer = ask("/", method)
    assert answer.status == (405 if method in "HEAD POST PUT PATCH DELETE OPTIONS" else 501)
    assert b"fedavg" not in answer.content
    assert {path: path.stat().st_mtime_ns for path in runs.rglob("*")} == before


@pytest.mark.parametrize(
    "path",
    ["/..", "/../a/config.toml", "/data/../../../etc/passwd", "/%2e%2e/secret", "/a/config.toml", "/runs", "/data/",
     "/data?x=1", "/.", "/index.html", "/favicon.ico", "http://127.0.0.1/data", "*", "/\\..\\secret"],
)  # fmt: skip
def test_there_is_nothing_else(ask, runs, path):
    (runs.parent / "secret").write_text("SECRET")
    answer = ask(path)
    assert answer.status == 404
    assert answer.content == b"404 there is / and /data, nothing else\n"


def test_no_other_site_can_use_an_answer(ask):
    for path in ("/", "/data", "/none"):
        headers = ask(path, Origin="http://evil.example").headers
        assert "Access-Control-Allow-Origin" not in headers
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert headers["X-Frame-Options"] == "DENY"


@pytest.mark.parametrize("what", ["folder", "rounds.jsonl", "summary.json", "split.json", "config.toml", "code"])
def test_links_that_lead_out_are_not_followed(ask, runs, what):
    outside = made_run(runs.parent / "elsewhere/out", "scaffold", config={"data": {"name": "SECRET"}})
    outside.code.mkdir()
    if what == "folder":
        (runs / "c").symlink_to(outside.path, target_is_directory=True)
    else:
        (made_run(runs / "c", "scaffold").path / what).unlink(missing_ok=True)
        (runs / "c" / what).symlink_to(outside.path / what)
    told = ask.told()
    assert [row["label"] for row in told["data"]["rows"]] == ["fedavg", "fedspeed"]
    link = "c" if what == "folder" else what
    assert f"{link} is a link out of" in told["parts"]["warnings"]
    assert "SECRET" not in json.dumps(told)


def test_links_within_are_followed(ask, runs):
    RunDir(runs / "b").rounds_file.rename(runs / "rounds-of-b")
    RunDir(runs / "b").rounds_file.symlink_to("../rounds-of-b")
    assert ask.rounds() == {"a": ("finished", 10), "b": ("finished", 10)}


# --- what is new ---


def test_only_runs_that_changed_are_read_again(ask, runs, monkeypatch):
    read: list[str] = []
    monkeypatch.setattr(live, "read_any", lambda path: (read.append(path.name), read_any(path))[1])
    first = ask()
    assert sorted(read) == ["a", "b"]
    again = ask(If_None_Match=first.headers["ETag"])
    assert (again.status, again.content, len(read), ask.server.answers.made) == (304, b"", 2, 1)
    grow(RunDir(runs / "b"), 11)
    later = ask(If_None_Match=first.headers["ETag"])
    assert later.status == 200
    assert later.headers["ETag"] != first.headers["ETag"]
    assert read[2:] == ["b"]
    assert ask.rounds() == {"a": ("finished", 10), "b": ("interrupted after 11 rounds", 11)}
    made_run(runs / "c", "scaffold")
    assert ask.rounds()["c"] == ("finished", 10)
    assert read[3:] == ["c"]


def test_answers_take_a_share_of_the_machine(ask, runs, monkeypatch):
    monkeypatch.setattr(live, "SHARE", 1e6)
    ask()
    made_run(runs / "c", "scaffold")
    assert sorted(ask.rounds()) == ["a", "b"]


def test_page_and_data_are_the_same(ask):
    page, told = ask("/").content.decode(), ask.told()
    start = page.index('application/json">') + len('application/json">')
    assert json.loads(page[start : page.index("</script>", start)]) == told["data"]
    for part in told["parts"].values():
        assert part in page


def test_an_empty_folder_that_fills(runs, tmp_path):
    (tmp_path / "new").mkdir()
    with serving(tmp_path / "new") as ask:
        assert b"No runs yet" in ask("/").content
        assert ask.rounds() == {}
        (tmp_path / "new/x").mkdir()
        assert ask.rounds() == {}
        with exclusive(tmp_path / "new/x"):
            run = made_run(tmp_path / "new/x")
            grow(run, 0)
            assert ask.rounds() == {"x": ("running", 0)}
            told = ask.told()
            assert "1 running" in told["parts"]["live"]
            assert told["data"]["gaps"] == {}
            assert "standard deviation" not in told["parts"]["verdict"]
        made_run(tmp_path / "new/x")
        assert ask.rounds() == {"x": ("finished", 10)}


def test_a_line_that_is_being_written(ask, runs):
    run = RunDir(runs / "b")
    with exclusive(run.path):
        grow(run, 4, '{"round": 5, "cohort": [1, 2')
        assert ask.rounds()["b"] == ("running", 4)
        grow(run, 5)
        assert ask.rounds()["b"] == ("running", 5)
        grow(run, 5, "garbage\n")
        assert ask.rounds()["b"] == ("running", 5)
    status, rounds = ask.rounds()["b"]  # its process has gone without a word; no file has changed
    assert status.startswith("damaged: line 6 of rounds.jsonl")
    assert rounds == 5
    run.config_file.write_text("a = ")
    told = ask.told()
    assert "not valid TOML" in told["parts"]["warnings"]
    assert [row["label"] for row in told["data"]["rows"]] == ["fedavg"]


def test_a_run_that_is_killed_is_interrupted(ask, runs):
    grow(RunDir(runs / "b"), 4)
    with exclusive(runs / "b"):
        assert ask.rounds()["b"] == ("running", 4)
    assert ask.rounds()["b"] == ("interrupted after 4 rounds", 4)


def test_whoever_looks_does_not_keep_a_run_from_beginning(tmp_path):
    begun = threading.Event()

    def look() -> None:
        with locked(tmp_path, shared=True):
            begun.set()
            threading.Event().wait(0.01)

    thread = threading.Thread(target=look)
    thread.start()
    begun.wait()
    with exclusive(tmp_path):
        thread.join()


# --- how runs stand ---


def steady(fields: dict[str, Any]) -> dict[str, Any]:
    """Rounds of 9 s up to the tenth, then of 2 s with an evaluation of 0.5 s."""
    return {**fields, "seconds": 9.0 if fields["round"] <= 10 else 2.0, "eval_seconds": 0.5}


def test_time_left_is_by_the_last_rounds(tmp_path):
    run = made_run(tmp_path / "a", rounds=30, config={"rounds": 50}, record=steady)
    grow(run, 30)
    with exclusive(run.path):
        found = standing(read_any(run.path), "fedavg")
    assert (found.state, found.rounds, found.of) == ("running", 30, 50)
    assert found.left == pytest.approx(20 * 2.5)


@pytest.mark.parametrize(
    ("status", "state", "about"),
    [
        ("finished", "finished", ""),
        ("diverged: NaN at round 3\nmore", "diverged", "NaN at round 3"),
        ("failed: no more disk", "failed", "no more disk"),
        ("interrupted", "interrupted", ""),
        ("terminated", "interrupted", ""),
        ("stopped: accuracy 0.81 >= 0.8 in round 3", "stopped", "accuracy 0.81 >= 0.8 in round 3"),
        ("something else", "interrupted", ""),
    ],
)
def test_states(tmp_path, status, state, about):
    found = standing(read_any(made_run(tmp_path / "a", status=status).path), "fedavg")
    assert (found.state, found.about, found.left) == (state, about, None)


@pytest.mark.parametrize("over", [True, False])
def test_ill_runs_are_told(tmp_path, over):
    ills = {"illnesses": {"dead layer": {"since": 3}}}
    run = made_run(tmp_path / "a", summary=ills, record=lambda f: {**f, "signs": {"spread of outputs": 0.0}})
    if not over:
        run.summary_file.unlink()
    found = standing(read_any(run.path), "fedavg")
    assert found.about == ("unhealthy: dead layer" if over else "unhealthy: constant outputs")


def test_names_cannot_break_out(ask, runs):
    hostile = "</script><img src=x onerror=alert(1)>"
    made_run(runs / "<b>c", "scaffold", status=f"failed: {hostile}", config={"method": {"name": hostile}})
    parts = ask.told()["parts"]
    assert "<img" not in "".join(parts.values())
    assert "&lt;img" in parts["live"]


def test_the_terminal(runs, capsys):
    made_run(runs / "c\x1b[31m", "scaffold", status="failed: no more disk")
    grow(RunDir(runs / "b"), 4)
    with exclusive(runs / "b"):
        assert main(["watch", "runs", "--terminal"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].startswith("1 running, 1 failed, 1 finished; about ")
    assert [line.split()[0] for line in lines[2:]] == ["b", "c\\x1b[31m", "a"]
    assert "failed no more disk" in lines[3]
    for line, rounds in zip(lines[2:], ("4 of 10", "10 of 10", "10 of 10"), strict=True):
        assert rounds in line
    assert f"{100 * RunDir(runs / 'a').raw_summary()['last_accuracy']:.2f}%" in lines[4]
    assert "\x1b" not in out


def test_the_terminal_shows_what_there_is_room_for(runs):
    from rich.console import Console

    seen = Watched(runs)
    seen.look()
    for width in (120, 80):
        console = Console(width=width)
        with console.capture() as shown:
            console.print(view(standings(seen.rows), ["x: no"], width, 2))
        lines = shown.get().splitlines()
        assert lines[-2:] == ["and 1 more", "left out: x: no"]
        for cell in (
            "finished",
            "10 of 10",
            "fedavg",
            f"{100 * RunDir(runs / 'a').raw_summary()['last_accuracy']:.2f}%",
        ):
            assert cell in lines[2]
        assert ("━" in lines[2]) is (width == 120)


# --- bad input, and the end ---


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["nowhere"], "nowhere: expected a folder of runs, found none"),
        (["nowhere", "--terminal"], "nowhere: expected a folder of runs, found none"),
        (["runs", "--port", "70000"], "--port 70000 cannot be used (expected 0 to 65535)"),
        (["runs", "--port", "-1"], "--port -1 cannot be used"),
        (["runs", "--port", "x"], "invalid int value"),
    ],
)
def test_bad_input_is_one_line(runs, capsys, given, told):
    assert main(["watch", *given]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_a_port_that_is_taken(ask, capsys):
    assert main(["watch", "runs", "--port", str(ask.server.server_port)]) == 2
    assert "Address already in use" in capsys.readouterr().err


@pytest.mark.parametrize(("stopped", "code"), [(KeyboardInterrupt, 0), (Terminated, 130)])
def test_ctrl_c_is_the_usual_end(runs, monkeypatch, capsys, stopped: Callable[[], BaseException], code):
    def forever(self: Server) -> None:
        raise stopped()

    monkeypatch.setattr(Server, "serve_forever", forever)
    assert main(["watch", "runs"]) == code
    out, err = capsys.readouterr()
    assert out.startswith("watching runs: http://127.0.0.1:")
    assert err == ""


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_run_that_may_not_be_read(ask, runs):
    RunDir(runs / "b").config_file.chmod(0)
    assert "Permission denied" in ask.told()["parts"]["warnings"]


def mangled(draw: random.Random, request: bytes) -> bytes:
    """A request with bytes changed, cut out, doubled or put in."""
    for _ in range(draw.randrange(1, 4)):
        a, b = sorted(draw.randrange(len(request) + 1) for _ in range(2))
        junk = draw.choice([b"", b"\0", b"\r\n", b" ", b"\xff" * 9, b"../" * 3, b"A" * 70_000, draw.randbytes(20)])
        request = request[:a] + draw.choice([junk, request[a:b] * 2, bytes(reversed(request[a:b]))]) + request[b:]
    return request


def test_mangled_requests_change_nothing(ask, runs, capfd):
    """What is answered with 200 is the page or its data, asked for by our own name; the next reader is served."""
    before = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()}
    page, data = ask("/").content, ask("/data").content
    draw, port = random.Random(0), ask.server.server_port
    for _ in range(60):
        path = draw.choice(["/", "/data", "/../a/config.toml", "//data", "/data?x=1"])
        whole = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode()
        with socket.create_connection(("127.0.0.1", port), timeout=20) as wire, suppress(ConnectionError):
            wire.sendall(mangled(draw, whole))
            with suppress(OSError):  # it has refused and closed already
                wire.shutdown(socket.SHUT_WR)
            answer = b"".join(iter(lambda wire=wire: wire.recv(2**16), b""))
            head, _, body = answer.partition(b"\r\n\r\n")
            assert b" 200 " not in head.split(b"\r\n")[0] or body in (page, data)
    assert ask("/").content == page
    assert {path: path.read_bytes() for path in runs.rglob("*") if path.is_file()} == before
    assert "".join(capfd.readouterr()) == ""
