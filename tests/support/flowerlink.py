"""A Flower federation on loopback, made by the commands of the README that `fedspeed deploy flower` writes.

Every process is ours: it has FLWR_HOME of this federation in its environment, and `close` ends all that have.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from fedspeed.flower.deploy import write_app

BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def until(what, seconds=120.0, every=0.2, told=""):
    """Wait for a condition; fail if it does not come."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = what()
        if found:
            return found
        time.sleep(every)
    raise AssertionError(f"{told or what} did not come within {seconds:g} s")


class Federation:
    """SuperLink and SuperNodes as processes.

    Args:
        folder: a new one; the app is written into `app` in it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.app = folder, folder / "app"
        self.home = folder / "home"
        write_app(self.app)
        self.original = (self.app / "app.py").read_text()
        self.readme = (self.app / "README.md").read_text()
        self.port = free_port()
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("FLWR", "PYTEST"))} | {
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_HOME": str(self.home),
            "HOME": str(folder),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        self.processes: dict[str, subprocess.Popen] = {}

    def _here(self, text: str) -> str:
        text = text.replace("127.0.0.1:9092", f"127.0.0.1:{self.port}").replace("--port 9092", f"--port {self.port}")
        return text.replace("/var/lib/fedspeed", str(self.app / "states"))

    def commands(self, start: str | tuple[str, ...]) -> list[str]:
        """The README's commands that begin so."""
        lines = [line for block in re.findall(r"```sh\n(.*?)```", self.readme, re.S) for line in block.splitlines()]
        return [self._here(line) for line in lines if line.startswith(start)]

    def shell(self, command: str, check: bool = True, timeout: float = 120) -> subprocess.CompletedProcess:
        how = {"cwd": self.app, "env": self.env, "capture_output": True, "text": True, "timeout": timeout}
        done = subprocess.run(command, shell=True, **how)
        assert not check or done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done

    def start(self, name: str, command: str) -> subprocess.Popen:
        how = {"cwd": self.app, "env": self.env, "stderr": subprocess.STDOUT, "start_new_session": True}
        with (self.folder / f"{name}.log").open("a") as log:
            process = subprocess.Popen(shlex.split(command), stdout=log, **how)
        self.processes[name] = process
        return process

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def make_keys(self) -> None:
        for command in self.commands(("mkdir", "openssl", "echo", "ssh-keygen", "printf")):
            self.shell(command)

    def link(self) -> None:
        """Start the SuperLink."""
        self.start("superlink", self.commands("flower-superlink")[0])
        until(self._listens, told="the SuperLink")

    def _listens(self) -> bool:
        with socket.socket() as s:
            return s.connect_ex(("127.0.0.1", self.port)) == 0

    def register(self) -> None:
        for command in self.commands("flwr supernode register"):
            self.shell(command)

    def node(
        self, i: int, key: str | None = None, client: int | None = None, name: str | None = None, more: str = ""
    ) -> str:
        """Start a SuperNode as the README says, with another key or index if given."""
        command = self.node_command(i)
        if key is not None:
            command = command.replace(f"keys/device-{i}", key)
        if client is not None:
            command = command.replace(f"fedspeed-client={i}", f"fedspeed-client={client}")
        command = command.replace("fedspeed-states=", f"{more} fedspeed-states=".lstrip())
        name = name or f"node-{i}"
        self.start(name, command)
        return name

    def node_command(self, i: int) -> str:
        return re.sub(r"--port \d+", f"--port {free_port()}", self.commands("flower-supernode")[i])

    def revive(self, i: int, seconds: float = 150.0) -> None:
        """Start a SuperNode that was killed until it stays, as systemd would: it is let in when it has missed two
        heartbeats."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            before = len(self.log(f"node-{i}"))
            process = self.start(f"node-{i}", self.node_command(i))
            until(
                lambda: process.poll() is not None or "SuperNode ID" in self.log(f"node-{i}")[before:],  # noqa: B023
                60,
                told=f"SuperNode {i}",
            )
            if process.poll() is None:
                return
            time.sleep(2)
        raise AssertionError(f"SuperNode {i} was not let in again within {seconds:g} s")

    def begin(self, config: str) -> str:
        """`flwr run`; the run's id."""
        done = self.shell(f"flwr run . fedspeed --run-config {shlex.quote(config)} --format json")
        told = json.loads(done.stdout[done.stdout.index("{") :])
        assert told["success"], told
        return str(told["run-id"])

    def told(self, run: str, until_it_says: str) -> str:
        """What Flower's log says of a run, once it says something."""

        def log() -> str:
            text = self.shell(f"flwr log {run} fedspeed --show", check=False).stdout
            return text if until_it_says in text else ""

        return until(log, 240, every=3.0, told=f"{until_it_says!r} in the log of run {run}")

    def ended(self, out: str) -> str:
        """How a run ended, by its summary; "" while it goes on."""
        path = self.app / out / "summary.json"
        try:
            return str(json.loads(path.read_text())["status"])
        except (OSError, ValueError, KeyError):
            return ""

    def rounds(self, out: str = "runs/flower") -> int:
        path = self.app / out / "rounds.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def refused(self, out: str = "runs/flower") -> list[dict]:
        path = self.app / out / "refused.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def kill(self, name: str, how: int = signal.SIGKILL) -> None:
        process = self.processes.pop(name)
        process.send_signal(how)
        process.wait(30)

    def own(self) -> list[int]:
        """Processes whose environment has this federation's home."""
        mark = f"FLWR_HOME={self.home}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def close(self) -> None:
        for process in self.processes.values():
            process.terminate()
        end = time.monotonic() + 10
        while self.own() and time.monotonic() < end:
            for process in self.processes.values():
                process.poll()
            time.sleep(0.2)
        for pid in self.own():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self.processes.values():
            process.wait(10)
        until(lambda: not self.own(), 20, told="the end of all processes")

    def __enter__(self) -> Federation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
