"""Aborts a run at its k-th file operation, for every k, resumes it, and compares it with an uninterrupted one.

A program of its own, not a test: `python crashing.py FOLDER METHOD STATES STRIDE [again] [compact]` forks one process
for every k (1, 1 + STRIDE, ...), which ends itself by `os._exit` in the middle of the k-th operation (a write is cut
in half), as a kill would. With `again`, a resume is aborted at every k instead; with `compact`, the log of client
states begins anew as soon as any of it is superseded. Prints `OPERATIONS CRASHES` and exits 0 if every
resumed run ended with the same bits.
"""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from watching import Rounds

from fedspeed.config.config import Config
from fedspeed.record import PLACED
from fedspeed.runs import launch, state_log
from fedspeed.runs.checkpoint import Checkpoints
from fedspeed.runs.directory import RunDir

CRASH = 77


class Counter:
    """Counts file operations and ends the process in the middle of the k-th; k = 0 only counts."""

    def __init__(self, k: int = 0) -> None:
        self.k, self.count = k, 0

    def step(self) -> bool:
        """One more operation; whether it is the last."""
        self.count += 1
        return self.count == self.k

    def install(self) -> None:
        """Watch renames, removals, new folders, flushes, and every write to a file."""
        for name in ("replace", "unlink", "mkdir", "fsync", "rmdir", "truncate"):
            setattr(os, name, self.watch(getattr(os, name)))
        real = io.open

        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not set(mode) & set("wax+"):
                return real(file, mode, *args, **kwargs)
            if self.step():
                os._exit(CRASH)
            return Watched(real(file, mode, *args, **kwargs), self)

        io.open = opened

    def watch(self, f: Any) -> Any:
        """The function, or the end just before it."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self.step():
                os._exit(CRASH)
            return f(*args, **kwargs)

        return watched


class Watched:
    """A file whose writes are operations."""

    def __init__(self, file: Any, counter: Counter) -> None:
        self.file, self.counter = file, counter

    def write(self, data: Any) -> Any:
        if self.counter.step():
            self.file.write(data[: len(data) // 2])
            self.file.flush()
            os._exit(CRASH)
        return self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def outcome(out: Path) -> tuple[Any, ...]:
    """Everything of a run but the times."""
    rounds = [json.loads(text) for text in (out / "rounds.jsonl").read_text().splitlines()]
    timeless = [{k: v for k, v in r.items() if not k.endswith("seconds")} for r in rounds]
    checkpoints = Checkpoints(out)
    manifests, named = {}, set()
    for path in checkpoints.manifests():
        manifest = checkpoints.read(path).manifest  # every file has its digest
        named |= {
            found.relative_to(out).as_posix() for found in checkpoints._named(manifest, manifest.entries(RunDir(out)))
        }
        manifests[path.name] = {
            **json.loads(path.read_text()),
            "rounds": None,
            "waited": None,
            "seal": None,
        }  # there are times in them
    files = {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*@*")}
    measured = RunDir(out).client_metrics_file
    assert named == {*files, *(f"checkpoints/{name}" for name in manifests)}, "a file too many, or a missing one"
    assert not list(out.rglob("*.part")), "a half-written file"
    summary = json.loads((out / "summary.json").read_text())
    told = {
        key: value for key, value in summary.items() if not key.endswith("seconds") and key not in (*PLACED, "seal")
    }
    scores = (measured.read_bytes() if measured.exists() else b"") + RunDir(out).uploads_file.read_bytes()
    return timeless, told, (out / "model.safetensors").read_bytes(), manifests, files, scores


def child(out: Path, config: Config, k: int, rounds: int = 0) -> tuple[int, int]:
    """Run or resume in a process of its own; its exit code and the operations it did."""
    back, out_of = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            counter = Counter(k)
            counter.install()

            def stop(record: Any) -> None:
                if record.round == rounds:
                    for thread in set(threading.enumerate()) - {threading.main_thread()}:
                        thread.join()  # the checkpoint in flight: every resume begins at the same one
                    os._exit(0)

            if (out / "config.toml").exists():
                launch.resume(out, observers=[Rounds(stop)])
            else:
                launch.run_config(config, out, observers=[Rounds(stop)])
            os.write(out_of, str(counter.count).encode())
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(out_of)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    told = os.read(back, 20)
    os.close(back)
    return code, int(told or 0)


def main(folder: Path, method: str, states: str, stride: int, again: bool, compact: bool) -> int:
    """The sweep."""
    torch.set_num_threads(1)
    if compact:
        state_log.GROWTH, state_log.SLACK = 1, 0
    config = Config.from_dict(
        {"rounds": 3, "clients": 4, "active": 2, "local_steps": 1, "batch_size": 5, "engine": "loop", "model": "linear",
         "backend": "serial", "method": method, "states": states, "client_test": 0.2,
         "client_metrics": "every=2,own,personalised=1"}
    )  # fmt: skip
    launch.run_config(config, folder / "whole")
    expected = outcome(folder / "whole")
    operations, crashes, k = 0, 0, 1 - stride
    while True:
        k += stride
        out = folder / f"{k}"
        if again:  # stopped after round 2, in the middle of the next record and line; resumed, and the resume crashes
            assert child(out, config, 0, rounds=2)[0] == 0
            growing = (RunDir(out).client_metrics_file, RunDir(out).uploads_file)
            for path in (*out.glob("states/log@*"), out / "rounds.jsonl", *growing):
                with path.open("ab") as file:
                    file.write(b'{"client": 1, "rou')
        code, operations = child(out, config, k)
        if code == 0:  # fewer than k operations
            break
        assert code == CRASH, f"operation {k}: exit code {code}"
        crashes += 1
        code, _ = child(out, config, 0)
        assert code == 0, f"operation {k}: the resumed run failed"
        assert outcome(out) == expected, f"operation {k}: other bits"
    sys.stdout.write(f"{operations} {crashes}\n")
    return 0


if __name__ == "__main__":
    sys.exit(
        main(
            Path(sys.argv[1]),
            sys.argv[2],
            sys.argv[3],
            int(sys.argv[4]),
            "again" in sys.argv[5:],
            "compact" in sys.argv[5:],
        )
    )
