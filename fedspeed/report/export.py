"""Exports of runs to other programs, during a run or after it: trackers, CSV, Parquet, pandas.

`rounds.jsonl` is the source. Trackers are observers (`--log NAME`) that are also targets of `fedspeed export --to
NAME`: when a run begins, continues or is exported, all its rounds so far replace the tracker's copy of it. So no round
is in a tracker twice, and live and later exports are equal. The package of a tracker is imported on demand.
"""

from __future__ import annotations

import importlib
import io
import logging
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError, one_line, unknown
from ..record import Record
from ..runs.directory import RunDir
from ..server.observers import Observer, find_observer
from ..utils.files import atomic, flat, write
from .run_files import LoggedRound, Source, read_runs
from .tables import csv_text

if TYPE_CHECKING:
    from ..server.simulation import Simulation


def need(module: str, package: str = "") -> Any:
    """Import a module of another package; an error names the command that installs it."""
    try:
        found = importlib.import_module(module)
        if getattr(found, "__file__", None) is None:  # a folder of that name; wandb creates one
            raise ModuleNotFoundError(f"No module named {module!r}")
    except Exception as error:
        raise UserError(f"{module} cannot be imported ({one_line(error)}); pip install {package or module}") from None
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the standard output and the warnings of trackers."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


class Tracker(Observer):
    """The base class of trackers, which write to the folder `place` instead of their default."""

    package = ""

    def __init__(self, place: Path | None = None) -> None:
        self.place = place
        with quiet():
            self.module = need(self.package)

    def open(self, run: Source) -> None:
        """Begin a run, and remove an earlier copy of it."""
        raise NotImplementedError

    def log(self, rounds: Sequence[LoggedRound]) -> None:
        """Write rounds; the tracker may write them later."""
        raise NotImplementedError

    def close(self, status: str) -> None:
        """Finish the run: no more rounds follow."""
        raise NotImplementedError

    def look(self) -> str:
        """Return the command that shows the export."""
        raise NotImplementedError

    def started(self, run: Simulation, config: dict[str, Any]) -> None:
        """Log all rounds so far."""
        if run.recorder is None:
            raise UserError("a tracker needs the rounds on disk; give a folder: simulate(..., out=FOLDER)")
        self._run = Source(run.recorder.out, RunDir(run.recorder.out).config(), run.recorder.records)
        with quiet():
            self.open(self._run)
            self.log(self._run.rounds())

    def round(self, record: Record, run: Simulation) -> None:
        """Log the newest round."""
        with quiet():
            self.log(self._run.rounds(last=1))

    def ended(self, status: str, summary: dict[str, Any]) -> None:
        """Close the run with its status."""
        with quiet():
            self.close(status)


class TensorBoard(Tracker):
    """TensorBoard event files, by default in the run's directory; numbers are rounded to single precision."""

    package = "tensorboard"
    suffix = ".fedspeed"

    def open(self, run: Source) -> None:
        """Remove earlier event files of this run, and only those; write the hyper-parameters."""
        folder = run.path / "tensorboard" if self.place is None else self.place / run.name
        if folder.is_symlink():
            raise UserError(f"{folder} is a link: expected a folder or nothing; remove the link")
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(f"events.out.tfevents.*{self.suffix}"):
            old.unlink()
        self.event = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
        self.summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        made = importlib.import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter
        self.writer, self.time = made(str(folder), filename_suffix=self.suffix), run.began
        hparams = importlib.import_module("tensorboard.plugins.hparams.summary_v2")
        self._add(0, hparams.hparams_pb(run.parameters, trial_id=run.name, start_time_secs=run.began))

    def log(self, rounds: Sequence[LoggedRound]) -> None:
        for one in rounds:
            self.time = one.time
            values = [self.summary.Value(tag=name, simple_value=value) for name, value in one.numbers.items()]
            self._add(one.round, self.summary(value=values))
        self.writer.flush()

    def close(self, status: str) -> None:
        self.writer.close()

    def look(self) -> str:
        return f"tensorboard --logdir {self.place}"

    def _add(self, step: int, summary: Any) -> None:
        self.writer.add_event(self.event(step=step, wall_time=self.time, summary=summary))


class Wandb(Tracker):
    """Weights & Biases: offline unless WANDB_MODE is set, in the project WANDB_PROJECT or `fedspeed`."""

    package = "wandb"

    def open(self, run: Source) -> None:
        """Begin a run of the same id; an offline run cannot continue, so its folder is removed first."""
        # Absolute, since the process of wandb may have another current folder.
        folder = Path(self.place or os.environ.get("WANDB_DIR") or ".").resolve()
        (folder / "wandb").mkdir(parents=True, exist_ok=True)  # without it wandb takes a temporary folder
        for old in (folder / "wandb").glob(f"offline-run-*-{run.key}"):
            shutil.rmtree(old)
        own = self.module.Settings(
            console="off", silent=True, x_disable_stats=True, disable_git=True, disable_code=True
        )
        self.run = self.module.init(
            project=os.environ.get("WANDB_PROJECT") or "fedspeed",
            mode=os.environ.get("WANDB_MODE") or "offline",
            dir=str(folder),
            id=run.key,
            name=run.name,
            config=run.config,
            tags=[f"{name}:{value}"[:64] for name, value in run.tags.items()],
            settings=own,
            reinit="create_new",  # the user's program may have a run of its own
        )

    def log(self, rounds: Sequence[LoggedRound]) -> None:
        for one in rounds:
            self.run.log({**one.numbers, "time": one.time}, step=one.round)

    def close(self, status: str) -> None:
        """Finish the run; an incomplete run is marked as failed."""
        self.run.summary["status"] = status
        self.run.finish(exit_code=0 if status.startswith(("finished", "stopped: ", "running")) else 1)

    def look(self) -> str:
        """Return the command that uploads an offline run."""
        return f"wandb sync {Path(self.place or os.environ.get('WANDB_DIR') or '.') / 'wandb'}/offline-run-*"


class MLflow(Tracker):
    """MLflow: in MLFLOW_TRACKING_URI or `mlflow.db`, in the experiment MLFLOW_EXPERIMENT_NAME or `fedspeed`."""

    package = "mlflow"

    def __init__(self, place: Path | None = None) -> None:
        # By default MLflow retries a server that is down for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        super().__init__(place)
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        own = self.module.get_tracking_uri()
        self.uri = own if place is None else f"sqlite:///{place.resolve() / 'mlflow.db'}"
        if self.uri.startswith("sqlite"):  # only one process may create the tables, and several runs may begin together
            with suppress(Exception), quiet():  # the error is raised again when a run begins
                self._experiment()

    def _experiment(self) -> str:
        """Return the id of the experiment; create it if there is none."""
        if self.place is not None:
            self.place.mkdir(parents=True, exist_ok=True)
        self.store = self.module.MlflowClient(tracking_uri=self.uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "fedspeed"
        found = self.store.get_experiment_by_name(name)
        return str(found.experiment_id if found else self.store.create_experiment(name))

    def open(self, run: Source) -> None:
        """Delete an earlier run of the same key, and create it again with tags and parameters."""
        within = self._experiment()
        for old in self.store.search_runs([within], f"tags.`fedspeed.run` = '{run.key}'"):
            self.store.delete_run(old.info.run_id)
        tags = {"fedspeed.run": run.key, **run.tags}
        made = self.store.create_run(within, start_time=int(1000 * run.began), tags=tags, run_name=run.name)
        self.id, self.time = made.info.run_id, run.began
        entities = self.module.entities
        self.metric = entities.Metric
        parameters = [entities.Param(key, str(value)) for key, value in run.parameters.items()]
        for at in range(0, len(parameters), 100):  # the largest batch that MLflow accepts
            self.store.log_batch(self.id, params=parameters[at : at + 100])

    def log(self, rounds: Sequence[LoggedRound]) -> None:
        found = [
            self.metric(name, value, int(1000 * t.time), t.round) for t in rounds for name, value in t.numbers.items()
        ]
        for at in range(0, len(found), 1000):  # the largest batch that MLflow accepts
            self.store.log_batch(self.id, metrics=found[at : at + 1000])
        self.time = rounds[-1].time if rounds else self.time

    def close(self, status: str) -> None:
        """Set MLflow's status, and ours as a tag."""
        self.store.set_tag(self.id, "status", status[:500])
        if status != "running":
            words = {"finished": "FINISHED", "stopped": "FINISHED", "interrupted": "KILLED", "terminated": "KILLED"}
            self.store.set_terminated(self.id, words.get(status.partition(":")[0], "FAILED"), int(1000 * self.time))

    def look(self) -> str:
        return f"mlflow ui --backend-store-uri {self.uri}"


TRACKERS = ("tensorboard", "wandb", "mlflow")


def require_target(target: str) -> None:
    """Raise UserError unless a target has this name."""
    if target not in TABLES and target not in TRACKERS:
        raise unknown("target", target, [*TABLES, *TRACKERS])


def export(runs: Sequence[Source], target: str, place: Path | None = None, overwrite: bool = False) -> str:
    """Write runs to a target of `TABLES` or `TRACKERS`, replacing earlier exports; return how to open the result.

    Args:
        place: the file of a table or the folder of a tracker; None for `rounds.csv`, `tensorboard/` or its default.
        overwrite: allow a table to replace a file.
    """
    require_target(target)
    if target in TABLES:
        file = place or Path(f"rounds.{target}")
        if file.exists() and not overwrite:
            raise UserError(f"{file} exists; choose another -o, or --overwrite it")
        with _reported(target):
            TABLES[target](runs, file)
        return str(file)
    tracker = find_observer(target)(place or (Path("tensorboard") if target == "tensorboard" else None))
    with _reported(target), quiet():
        for run in runs:
            tracker.open(run)
            tracker.log(run.rounds())
            tracker.close(run.status)
    return str(tracker.look())


@contextmanager
def _reported(target: str) -> Iterator[None]:
    """Turn an exception of a target into a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{target} could not be written ({one_line(error)}); check its place") from error


def rows(runs: Sequence[Source]) -> list[dict[str, Any]]:
    """Return one row per round: run, method, data, seed, the config keys that differ (`config.KEY`), and the record's
    fields, with metrics as `metrics.NAME`."""
    tables = [run.parameters for run in runs]
    keys = dict.fromkeys(key for table in tables for key in table)
    differ = [key for key in keys if any(table.get(key) != tables[0].get(key) for table in tables)]
    found = []
    for run, table in zip(runs, tables, strict=True):
        about = {"run": run.name, **run.tags, "seed": run.config.get("seed", 0)}
        about |= {f"config.{key}": table.get(key) for key in differ if key not in ("seed", "method.name", "data.name")}
        found += [{**about, **flat(record.to_dict())} for record in run.records]
    return found


def frame(runs: Sequence[Source]) -> Any:
    """Return runs as a pandas frame, one row per round."""
    return need("pandas").DataFrame(rows(runs))


def write_csv(runs: Sequence[Source], file: Path) -> None:
    """Write one table of all runs as CSV."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write(file, csv_text(rows(runs)))


def write_parquet(runs: Sequence[Source], file: Path) -> None:
    """Write one table of all runs as Parquet."""
    need("pyarrow")
    found = frame(runs)
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic(file) as out:
        found.to_parquet(out, engine="pyarrow", index=False)


TABLES = {"csv": write_csv, "parquet": write_parquet}


def load_runs(*given: Path | str | Iterable[Path | str]) -> Any:
    """Load run directories, or folders of them, as one pandas frame: a row per round. Needs pandas.

    Runs that cannot be read are left out with a warning.

    Args:
        given: a path, for example "runs/demo", or several.
    """
    paths = [Path(p) for each in given for p in ([each] if isinstance(each, str | Path) else each)]
    need("pandas")
    runs, out = read_runs(paths)
    for reason in out:
        warnings.warn(f"left out: {reason}", stacklevel=2)
    return frame(runs)


class Csv(Observer):
    """An observer that writes all rounds to `rounds.csv` in the run's directory when a run ends."""

    def started(self, run: Simulation, config: dict[str, Any]) -> None:
        """Keep the recorder, whose directory receives the table."""
        if run.recorder is None:
            raise UserError("there is no directory to write to; give one: simulate(..., out=FOLDER)")
        self.recorder = run.recorder

    def ended(self, status: str, summary: dict[str, Any]) -> None:
        """Write all rounds; the columns are the fields of a record, then its metrics and signs."""
        if summary:  # empty if the folder was moved: another run may be in its place
            table = [flat(record.to_dict()) for record in self.recorder.records]
            write(self.recorder.out / "rounds.csv", csv_text(table))
