"""`fedspeed slurm` and `deploy`: runs as jobs of a cluster, and on devices."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.config import Config
from ..errors import UserError
from ..experiments.batch import RunTask, unfinished
from ..experiments.grid import require_few
from ..experiments.slurm import Job, prepare, require_sbatch, submit
from ..experiments.sweep import plan, seed_tasks, tasks_of
from ..server.observers import Observers
from . import options, sweep
from .compare import parse_seeds

if TYPE_CHECKING:
    from rich.console import Console

EPILOG_SLURM = """\
Nothing is run here: --out gets slurm/job.sh, a config per run beside it, and later the runs, laid out as by `sweep`.
Several configs, seeds or points make an array with a task per run; with --nodes 2 or more every task is a Ray cluster
over its nodes. A task that is stopped by its time limit, a preemption or a failed node is queued again and continues
with the same bits. Configs, and the code that they name, are copied, so later edits do not change a waiting job.

examples:
  fedspeed slurm experiment.toml --seeds 5 --time 4:00:00 --cpus 4 --mem 8G --out runs/seeds
  fedspeed slurm experiment.toml --grid lr=0.05,0.1 --grid lam=1,10 --time 2:00:00 --at-once 8 --out runs/lr --submit
  fedspeed slurm fedavg.toml fedspeed.toml --seeds 3 --time 60 --out runs/two
  fedspeed slurm big.toml --nodes 4 --cpus 16 --time 1-0:00 --setup 'module load python' --out runs/big
  sbatch runs/big/slurm/job.sh                             on the cluster; repeat it if tasks failed
  fedspeed compare runs/lr                                 table, figure and differences of the finished runs
"""

OF_JOB = (
    ("nodes", 1, "N", "nodes per task; 2 or more form a Ray cluster; default 1"),
    ("cpus", 1, "N", "cores per node, for worker processes; default 1"),
    ("gpus", 0, "N", "GPUs per node; default none"),
    ("mem", "", "SIZE", "memory per node, 16G; default the site's"),
    ("time", "", "TIME", "time limit of a task, H:MM:SS; default the site's"),
    ("grace", 120, "N", "seconds before that limit at which a run is stopped and queued again; default 120"),
    ("at_once", 0, "N", "most tasks side by side; default all"),
    ("partition", "", "NAME", "partition; default the site's"),
    ("account", "", "NAME", "account to charge; default the site's"),
)
"""Options that are fields of a `Job`: name, default, placeholder, help."""


def configure_slurm(parser: argparse.ArgumentParser) -> None:
    """Add the configs, the points, the job, and an option per config key."""
    about = "configs (FILE.toml); options given here override them"
    parser.add_argument("files", nargs="*", metavar="CONFIG", help=about)
    parser.add_argument("--method", metavar="NAME", help="method, or file.py:Class; default fedspeed")
    about = "number of seeds (0..N-1), or a list; default: each config's own"
    parser.add_argument("--seeds", metavar="N|A,B,..", help=about)
    sweep.points(parser)
    job = parser.add_argument_group("the job")
    for name, default, metavar, about in OF_JOB:
        flag = "--" + name.replace("_", "-")
        job.add_argument(flag, type=type(default), default=default, metavar=metavar, help=about)
    more = "any other option of sbatch, --sbatch=--qos=long; may be repeated"
    job.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help=more)
    setup = "a line of shell to begin with: 'module load python', 'source env/bin/activate'; may be repeated"
    job.add_argument("--setup", action="append", default=[], metavar="LINE", help=setup)
    python = "the interpreter that has fedspeed there; default this one, or `python` where --setup is given"
    job.add_argument("--python", default="", metavar="FILE", help=python)
    job.add_argument("--submit", action="store_true", help="pass the script to sbatch, and print the job's number")
    options.configure(parser, seeds=True)


def main_slurm(args: argparse.Namespace, console: Console) -> int:
    """Write configs and script of the runs that are not done; submit them with --submit."""
    if args.submit:
        require_sbatch()
    if args.overwrite:
        raise UserError(
            "--overwrite: tasks of a job continue the runs in --out; choose another --out, or remove the runs"
        )
    Observers(args.log)  # raises for an unknown observer
    out = options.output_folder(args, "slurm").absolute()
    tasks = _tasks(args, out)
    left = unfinished(tasks)
    if not left:
        raise UserError(f"slurm: all {len(tasks)} runs in {out} are done; there is nothing to submit")
    configs = {task.folder.name: Config.from_dict(task.tables) for task in left}
    for name, config in configs.items():
        if args.nodes > 1 and config.backend not in ("auto", "ray"):
            raise UserError(f"--nodes: {name} has backend {config.backend}, which uses one machine; leave it out")
    job = Job(
        out,
        list(configs),
        **{name: getattr(args, name) for name, *_ in OF_JOB},
        setup=args.setup,
        more=args.sbatch,
        python=args.python or ("python" if args.setup else sys.executable),
        options=[*(f"--log={name}" for name in args.log), "--quiet"],
        workers=not any(config.workers for config in configs.values()),
    )
    path = prepare(job, configs)
    number = submit(path) if args.submit else ""
    if args.json:
        written = {"out": str(out), "script": str(path), "runs": list(configs)}
        console.print_json(json.dumps({**written, "done": len(tasks) - len(left), "job": number}))
    elif not args.quiet:
        done = f", {len(tasks) - len(left)} more are done" if len(left) < len(tasks) else ""
        cluster = f", each on a Ray cluster of {job.nodes} nodes" if job.nodes > 1 else ""
        console.print(f"{len(left)} run{'s' * (len(left) > 1)}{cluster}{done}; into {out}")
        console.print(f"submitted: job {number}" if number else f"next: sbatch {path}")
    return 0


def _tasks(args: argparse.Namespace, out: Path) -> list[RunTask]:
    """Return a task per seed of every config, or of every point of the one config."""
    seeds = parse_seeds(args.seeds) if args.seeds else []
    if args.grid or args.point or args.points:
        if len(args.files) > 1:
            raise UserError(f"slurm: expected one config for --grid, --point and --points, got {len(args.files)}")
        base = _tables(args, args.files[0] if args.files else "")
        seeds = seeds or [Config.from_dict(base).seed]
        return tasks_of(plan(base, sweep.given_points(args, len(seeds)), seeds, out))
    found: dict[str, RunTask] = {}
    require_few(max(1, len(args.files)) * max(1, len(seeds)), args.max_runs)
    for file in args.files or [""]:
        config = Config.from_dict(_tables(args, file))
        label = Path(file).stem or config.method.label
        configs = {seed: replace(config, seed=seed) for seed in seeds or [config.seed]}
        for task in seed_tasks(label, configs, out).values():
            if task.key in found:
                raise UserError(f"slurm: expected configs of different names and seeds, got {task.folder.name} twice")
            found[task.key] = task
    return list(found.values())


def _tables(args: argparse.Namespace, file: str) -> dict[str, Any]:
    return options.tables(argparse.Namespace(**{**vars(args), "file": file}))


EPILOG_DEPLOY = """\
`flower` writes a Flower app that runs any method on SuperNodes: app.py with the method, the model, the plan and a
function for each device's data, a pyproject.toml, and a README.md with every command, also for TLS and for the devices'
keys. As written it trains on digits. `check` executes an app's app.py and prints in one line what is missing: flwr, the
data of a client, the server's address, its certificate, a key. docs/guides/flower.md explains every step.

examples:
  fedspeed deploy flower my_app
  fedspeed deploy check my_app --client 0
  fedspeed deploy check my_app --superlink 127.0.0.1:9092 --root-certificates my_app/keys/ca.crt
  fedspeed deploy check my_app --key my_app/keys/device-0
"""


def configure_deploy(parser: argparse.ArgumentParser) -> None:
    """Add the action, the folder, and what is checked."""
    parser.add_argument("action", choices=("flower", "check"), help="write a Flower app, or check one")
    parser.add_argument("folder", type=Path, metavar="DIR", help="the app's folder; new or empty for `flower`")
    parser.add_argument("--client", type=int, metavar="N", help="check: load the data of this client")
    parser.add_argument("--superlink", metavar="HOST:PORT", help="check: connect to the server")
    about = "check: the authority of its certificate, ca.crt"
    parser.add_argument("--root-certificates", type=Path, metavar="FILE", help=about)
    parser.add_argument("--key", type=Path, metavar="FILE", help="check: the private key of a SuperNode")


def main_deploy(args: argparse.Namespace, console: Console) -> int:
    """Write an app, or check one."""
    if args.action == "check":
        from ..flower.deploy import checks

        for line in checks(args.folder, args.client, args.superlink, args.root_certificates, args.key):
            console.print(line)
        return 0
    from ..flower.deploy import write_app

    for path in write_app(args.folder):
        console.print(f"wrote {path}", soft_wrap=True)
    console.print(f"next: edit {args.folder / 'app.py'}, then follow {args.folder / 'README.md'}", soft_wrap=True)
    return 0
