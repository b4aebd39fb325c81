"""Jobs for Slurm: an sbatch script that starts or resumes runs, also after preemption; its shell is `job.sh`.

    job = Job(out=Path("runs/lr"), names=["lr=0.05-s0", "lr=0.1-s0"], time="2:00:00", cpus=4)
    script(job)            # an array of two tasks; job.nodes > 1: a Ray cluster over the nodes of every task

A task is `fedspeed run OUT/slurm/NAME.toml --out OUT/NAME --resume auto`, so it may be stopped at any instant and
queued again: by Slurm (a node that failed, a preemption), or by itself when its time is nearly up. No torch here.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from ..config.config import Config
from ..config.plan import PLACEMENT
from ..errors import UserError
from ..runs.config_file import as_stored, write_config
from ..utils.files import read_toml, write

FOLDER = "slurm"
"""Beside the runs: the script `job.sh`, a config per run, logs."""
SCRIPT = "job.sh"
TEMPLATE = Path(__file__).with_name("job.sh")
MOST_TASKS = 1000
"""Tasks of an array; Slurm's own limit (MaxArraySize) is 1001 unless a site sets another."""
TIME = r"((\d+-)?\d+(:\d{1,2}){0,2})?"
MEMORY = r"(?i:\d+[KMGT]?)?"
LINE = r"[^\x00-\x1f\x7f]+"
NAME = r"[\w.,@+-]*"


@dataclass(frozen=True)
class Job:
    """Description of a job, from which its script is written.

    Args:
        out: the folder of the runs; absolute.
        names: the folders of the runs, one task each; configs are `out/slurm/NAME.toml`.
        nodes: nodes per task; more than one form a Ray cluster.
        cpus, gpus: cores and GPUs per node.
        mem, time, partition, account: as sbatch takes them; "" for the site's default.
        grace: seconds before the end of the time limit at which a run is stopped and queued again.
        at_once: the largest number of tasks side by side; 0 for no limit.
        more: other options of sbatch, such as `--qos=long`.
        setup: lines of shell that come first, such as `module load python`.
        python: the interpreter that has fedspeed.
        options: further options of `fedspeed run`.
        workers: whether the number of workers is taken from the allocation.
    """

    out: Path
    names: Sequence[str]
    nodes: int = 1
    cpus: int = 1
    gpus: int = 0
    mem: str = ""
    time: str = ""
    partition: str = ""
    account: str = ""
    grace: int = 120
    at_once: int = 0
    more: Sequence[str] = ()
    setup: Sequence[str] = ()
    python: str = "python"
    options: Sequence[str] = ()
    workers: bool = True

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("--nodes", self.nodes, 1),
            ("--cpus", self.cpus, 1),
            ("--gpus", self.gpus, 0),
            ("--grace", self.grace, 1),
            ("--at-once", self.at_once, 0),
        ):
            if value < least:
                raise UserError(f"{flag}: expected a whole number >= {least}, got {value}")
        if not 0 < len(self.names) <= MOST_TASKS:
            raise UserError(
                f"slurm: expected 1 to {MOST_TASKS} runs in an array, got {len(self.names)}; split them over several "
                f"folders"
            )
        for flag, texts, pattern, expected in (
            ("--time", [self.time], TIME, "minutes, H:MM:SS or D-H:MM such as 4:00:00"),
            ("--mem", [self.mem], MEMORY, "memory per node such as 16G"),
            ("--sbatch", self.more, LINE, "one line of text"),
            ("--setup", self.setup, LINE, "one line of text"),
            ("--python", [self.python], LINE, "one line of text"),
            ("--partition", [self.partition], NAME, "a name"),
            ("--account", [self.account], NAME, "a name"),
            ("--sbatch", self.more, "--?[A-Za-z].*", "an option of sbatch such as --qos=long"),
        ):
            for text in texts:
                if not re.fullmatch(pattern, text):
                    raise UserError(f"{flag}: expected {expected}, got {text!r}")
        if not re.fullmatch(r"[^\x00-\x1f\x7f\"'\\%]+", str(self.out)):
            raise UserError(f"--out: Slurm takes no quotes, backslashes or % in the place of a log, got {self.out}")

    @property
    def folder(self) -> Path:
        """The folder of script, configs and logs."""
        return self.out / FOLDER


def script(job: Job) -> str:
    """Return the whole script: `job.sh` with its @names@ filled in, without the part `ray` for a single node."""
    text = TEMPLATE.read_text(encoding="utf-8")
    text = re.sub(r"# \[ray\n(.*?)# ray\]\n\n?", r"\1\n" if job.nodes > 1 else "", text, flags=re.DOTALL)
    filled = {
        "directives": "\n".join(_directives(job)),
        "setup": "\n".join(job.setup),
        "python": shlex.quote(job.python),
        "out": shlex.quote(str(job.out)),
        "runs": "\n".join(f"  {shlex.quote(name)}" for name in job.names),
        "command": _command(job),
    }
    # One pass, so that an @name@ in the user's text stays text; an empty line is left out.
    return re.sub(r"@(\w+)@(\n?)", lambda at: filled[at[1]] + at[2] * bool(filled[at[1]]), text)


def _directives(job: Job) -> list[str]:
    is_array = len(job.names) > 1
    log = job.folder / ("%A_%a.log" if is_array else "%j.log")
    most = f"%{job.at_once}" if job.at_once else ""
    given = {
        "job-name": f"fedspeed-{re.sub('[^A-Za-z0-9._-]', '_', job.out.name)}",
        "array": f"0-{len(job.names) - 1}{most}" if is_array else "",
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": job.cpus,
        "gpus-per-node": job.gpus or "",
        "mem": job.mem,
        "time": job.time,
        "partition": job.partition,
        "account": job.account,
        "output": f'"{log}"',
        "open-mode": "append",
        "signal": f"B:USR1@{job.grace}",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in given.items() if value != ""]
    return [*lines, "#SBATCH --requeue", *(f"#SBATCH {option}" for option in job.more)]


def _command(job: Job) -> str:
    """Return the command that starts or continues a task's run."""
    words = ['"$python" -m fedspeed run "$out/slurm/$name.toml" --out "$run" --resume auto']
    words += map(shlex.quote, job.options)
    cluster = job.nodes > 1
    if cluster:
        words += ['--backend ray --ray-address "$address"', *(["--ray-gpus 1"] if job.gpus else [])]
    if job.workers:  # one per core, or per GPU of a cluster
        each = str(job.gpus) if cluster and job.gpus else "SRUN_CPUS_PER_TASK"
        words += [f"--workers $((SLURM_JOB_NUM_NODES * {each}))"]
    return " ".join(words)


def prepare(job: Job, configs: Mapping[str, Config]) -> Path:
    """Write the configs of the runs, with copies of the code that they name, and the script; return its path.

    Raise if an existing config would get other results: a waiting job may be about to read it.
    """
    for name in job.names:
        path = job.folder / f"{name}.toml"
        if path.exists() and _bits(read_toml(path)) != _bits(tomllib.loads(tomli_w.dumps(as_stored(configs[name])))):
            raise UserError(
                f"slurm: {path} holds another config, which a job that waits may be about to read; choose another "
                f"--out, or remove it if there is none"
            )
    job.folder.mkdir(parents=True, exist_ok=True)
    for name in job.names:
        write_config(job.folder, configs[name], f"{name}.toml")
    path = job.folder / SCRIPT
    write(path, script(job))
    return path


def _bits(tables: dict[str, Any]) -> dict[str, Any]:
    """Return a config's tables without where it is computed."""
    return {key: value for key, value in tables.items() if key not in PLACEMENT}


def submit(path: Path) -> str:
    """Hand a script to Slurm and return the number of the job."""
    done = subprocess.run([require_sbatch(), "--parsable", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(
            f"sbatch refused {path}: {why}; correct it and submit it with `sbatch {shlex.quote(str(path))}`"
        )
    return done.stdout.strip().partition(";")[0]


def require_sbatch() -> str:
    """Return the path of sbatch; raise if it is not installed."""
    found = shutil.which("sbatch")
    if found is None:
        raise UserError(
            "--submit: expected Slurm's sbatch on this machine, found none; leave --submit out, copy the folder to the "
            "cluster and submit the script there"
        )
    return found
