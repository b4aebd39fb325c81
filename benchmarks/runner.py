"""A running contender, seen from the harness."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from . import machine
from .contests import Entry
from .workloads import Part

ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 900.0
"""Seconds to wait for an answer: a start with compilation, or a round on a busy machine."""


class Failed(Exception):
    """A contender that ended, or did not answer."""


class Contender:
    """A contender's process; commands in, answers out, everything else it prints into `log`."""

    def __init__(self, entry: Entry, workload: str, part: Part, log: Path) -> None:
        self.entry, self.log = entry, log
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                entry.command(workload, part),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                cwd=ROOT,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the harness, which closes its contenders
            )

    def ready(self) -> dict[str, Any]:
        """Wait until the contender has started; return its description."""
        facts: dict[str, Any] = self._answer("ready")
        return facts

    def rounds(self, count: int) -> list[float]:
        """Run some rounds; return the seconds of each, by the contender's clock."""
        return list(self._ask(f"round {count}", "seconds"))

    def check(self) -> float:
        """Return the contender's accuracy on the test samples."""
        return float(self._ask("check", "accuracy"))

    def close(self) -> None:
        """Stop the contender and all processes that it started."""
        pids = [process.pid for process in machine.tree(self.process.pid)]
        self._thaw()
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # type: ignore[union-attr]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        ours = {process.pid for process in machine.tree(os.getpid())}
        for pid in ours.intersection(pids):  # what is left has become our child
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                if pid != self.process.pid:
                    os.waitpid(pid, 0)
        self.process.wait()
        self.process.stdout.close()  # type: ignore[union-attr]

    def _ask(self, command: str, wanted: str) -> Any:
        self._thaw()
        try:
            self.process.stdin.write(f"{command}\n".encode())  # type: ignore[union-attr]
            return self._answer(wanted)
        except OSError:
            raise Failed(self._reason()) from None
        finally:
            self._freeze()

    def _answer(self, wanted: str) -> Any:
        pipe = self.process.stdout.fileno()  # type: ignore[union-attr]
        deadline = time.monotonic() + PATIENCE
        line = b""
        while not line.endswith(b"\n"):
            if not select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise Failed(f"no answer within {PATIENCE:.0f} s")
            part = os.read(pipe, 65536)
            if not part:
                raise Failed(self._reason())
            line += part
        return json.loads(line)[wanted]

    def _reason(self) -> str:
        """Return why the contender ended: the last line that it printed."""
        self.process.wait()
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"ended with code {self.process.returncode}: {lines[-1][:200] if lines else 'it said nothing'}"

    def _freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def _thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for process in machine.tree(self.process.pid) if self.entry.frozen else ():
            with contextlib.suppress(OSError):
                os.kill(process.pid, number)
