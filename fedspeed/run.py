"""A run: `Config` (a value, to and from TOML) -> `simulate` -> a run directory."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from . import __version__
from .errors import Diverged, UserError, unknown
from .method import Method
from .methods import FedSpeed, build
from .params import param
from .plan import Plan

if TYPE_CHECKING:
    from .server import Record, Simulation

FORMAT = 1
"""Version of the run directory's layout, written as `format` in `config.toml`."""

FILES = ("config.toml", "rounds.jsonl", "summary.json", "model.safetensors")


RELEASED: dict[str, Any] = {
    "cohort": "bernoulli",
    "clip": 10.0,
    "clip_mode": "released",
    "decay_outside_mix": True,
    "augment": "released",
    "lr_decay": 0.998,
}
RELEASED_METHODS: dict[str, dict[str, Any]] = {
    "fedadam": {"tau": 0.01},
    "fedspeed": {"alpha": 1.0, "normalise": True, "server": "all"},
}
PRESETS = ("released",)
"""Named settings; `released` is what the authors' code does where it differs (docs/released.md)."""


def apply_preset(given: dict[str, Any]) -> dict[str, Any]:
    """Put a preset's values under what was given explicitly; `preset` itself is not a part of a config."""
    given = dict(given)
    preset = given.pop("preset", None)
    if preset is None:
        return given
    if preset not in PRESETS:
        raise unknown("preset", str(preset), PRESETS)
    method = _table(given.get("method", "fedspeed"), "method")
    split = given.get("split", Config.split)
    if isinstance(split, str) and split.startswith("dirichlet:"):
        split = split.replace("dirichlet:", "dirichlet-refill:")
    given["method"] = {**RELEASED_METHODS.get(method["name"], {}), **method}
    return {**RELEASED, **given, "split": split}


@dataclass(frozen=True)
class Spec:
    """A named thing and its own options: a data set or a model."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """`{"name": ..., option: value}`, the form in which it stands in TOML."""
        return {"name": self.name, **self.options}


@dataclass(frozen=True)
class Config(Plan):
    """A complete run: a `Plan` plus method, model, data and split. Equal configs give equal bits.

    Example:
        >>> config = Config.from_dict({"rounds": 3, "method": {"name": "fedspeed", "rho": 0.05}})
        >>> Config.from_dict(config.to_dict()) == config
        True
    """

    method: Method = field(default_factory=FedSpeed)
    model: Spec = Spec("mlp")
    data: Spec = Spec("digits")
    engine: str = param(
        "auto", ("auto", "loop", "block"), "the arithmetic: client by client, small models in a block, or `auto`"
    )
    backend: str = param(
        "auto", ("auto", "serial", "process"), "where clients run: here, in worker processes, or `auto`; same bits"
    )
    split: str = param("dirichlet:0.6", about="who owns what: iid, dirichlet:0.6, natural, ...")
    clients: int = param(100, "[1, inf)", "the number of clients, m")
    augment: str = param("paper", about="the augmentation of pictures: paper, released, flip or none")
    data_dir: str = param("", about="the folder or archive of a copy of the data you already have")
    targets: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, kind in (("method", Method), ("model", Spec), ("data", Spec)):
            if not isinstance(getattr(self, key), kind):
                raise UserError(
                    f"Config: {key} must be a {kind.__name__}, got {getattr(self, key)!r}; "
                    f"Config.from_dict takes names and tables"
                )
        bad = [a for a in self.targets if not 0 < a < 1]
        if bad:
            raise UserError(f"Config: targets must be accuracies in (0, 1), got {bad[0]}; 0.85 is 85%")
        if self.active > self.clients:
            raise UserError(
                f"active must be at most the number of clients, got {self.active} active of {self.clients}; "
                f"lower --active or raise --clients"
            )
        self.method.check(self.lr, self.active if self.cohort == "fixed" else 1, self.clients)

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> Config:
        """From plain tables; unknown keys and wrong types are errors that name the nearest key."""
        given = apply_preset(given)
        version = given.pop("format", FORMAT)
        if version != FORMAT:
            raise UserError(f"config: expected format {FORMAT}, found {version!r}; use the fedspeed that wrote it")
        known = {f.name for f in fields(cls)}
        for key in given:
            if key not in known:
                raise unknown("config key", key, known)
        if "method" in given:
            given["method"] = build(_table(given["method"], "method"))
        for key in ("model", "data"):
            if key in given:
                table = _table(given[key], key)
                given[key] = Spec(table.pop("name"), table)
        if "targets" in given:
            if not isinstance(given["targets"], list | tuple):
                raise UserError(f"config: targets must be a list of accuracies, got {given['targets']!r}")
            given["targets"] = tuple(_number(a, "targets") for a in given["targets"])
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """Plain tables, complete: every default is written out."""
        plain = self.fields()
        plain["targets"] = list(self.targets)
        for key in ("method", "model", "data"):
            plain[key] = plain.pop(key).to_dict()
        return {"format": FORMAT, **plain}

    @classmethod
    def from_toml(cls, path: Path) -> Config:
        """Read a TOML file."""
        return cls.from_dict(read_toml(path))

    def to_toml(self) -> str:
        """The file's text."""
        return tomli_w.dumps(self.to_dict())


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file, with errors one can act on."""
    try:
        tables = tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; expected a TOML file") from None
    except ValueError as error:  # not UTF-8, not TOML, or a number of thousands of digits
        raise UserError(f"{path} is not valid TOML: {error}") from None
    if not tables:
        raise UserError(f"{path} is empty; expected keys such as rounds = 100 (`fedspeed run --help` lists them)")
    return tables


def _table(value: Any, key: str) -> dict[str, Any]:
    """`"mlp"` and `{name = "mlp"}` are the same."""
    table = {"name": value} if isinstance(value, str) else value
    if not isinstance(table, dict) or not isinstance(table.get("name"), str):
        raise UserError(
            f'config: {key} must be a name or a table with a name, such as {key} = {{name = "..."}}, got {value!r}'
        )
    return dict(table)


def _number(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
        raise UserError(f"config: {key} must be numbers, got {value!r}")
    return float(value)


def prepare(
    config: Config, progress: Callable[[str, int, int], None] | None = None, folder: Path | None = None
) -> Simulation:
    """Load the data, build the model, and stand at round 0."""
    from torch.nn.functional import cross_entropy, mse_loss

    from .data import load
    from .models import MODELS, build_model
    from .server import Simulation

    given: dict[str, Any] = {
        "split": config.split,
        "clients": config.clients,
        "seed": config.seed,
        "augment": config.augment,
        "data_dir": config.data_dir or None,
    }
    for spec, kind in ((config.data, "data"), (config.model, "model")):
        for key in spec.options:
            if key in given or key in ("progress", "data"):
                raise UserError(f"config: {kind}.{key} is no option of the {kind}; set the config's own key instead")
    if config.model.name not in MODELS:  # before the data, which may be a download away
        raise unknown("model", config.model.name, MODELS)
    data = load(config.data.name, **given, progress=progress, **config.data.options)
    model = build_model(config.model.name, data, seed=config.seed, **config.model.options)
    loss = mse_loss if data.classes is None else cross_entropy
    return Simulation(config.method, model, data, config, loss, folder=folder)


def run_config(
    config: Config,
    out: Path,
    *,
    overwrite: bool = False,
    on_round: Callable[[Record], None] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Run a config into a directory and return its summary.

    The directory gets `config.toml` first, a line of `rounds.jsonl` a round, and at the end `model.safetensors` and
    `summary.json`. A run that diverges keeps what it had and says so in the summary. Nothing is made, and nothing
    overwritten, before data and model stand.
    """
    refuse_a_run(out, overwrite)
    simulation = prepare(config, progress, out / "states")
    if simulation.plan.engine != config.engine:  # `auto` is resolved: the engine decides the last bits
        config = replace(config, engine=simulation.plan.engine)
    claim(out)
    write(out / "config.toml", config.to_toml())
    records: list[Record] = []
    status = "running"
    try:
        with (out / "rounds.jsonl").open("w", encoding="utf-8") as lines:
            for record in simulation:
                records.append(record)
                lines.write(json.dumps(record.to_dict()) + "\n")
                lines.flush()
                if on_round:
                    on_round(record)
        status = "finished"
    except Diverged as error:
        status = f"diverged: {error}"
        raise
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    except Exception as error:
        status = f"failed: {error}"
        raise
    finally:
        if status != "running":
            save_model(simulation, out / "model.safetensors")
            summary = summarise(config, simulation, records, status)
            write(out / "summary.json", json.dumps(summary, indent=1) + "\n")
    return summary


def refuse_a_run(out: Path, overwrite: bool) -> None:
    """Raise if a directory already holds a run, or a part of one, that may not be overwritten."""
    if not overwrite and any((out / name).exists() for name in FILES):
        raise UserError(f"{out} already holds a run; choose another --out, or --overwrite it")


def claim(out: Path) -> None:
    """Make the run directory, without the files of an earlier run."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            (out / name).unlink(missing_ok=True)
        shutil.rmtree(out / "states", ignore_errors=True)
    except OSError as error:
        raise UserError(f"cannot make the output folder {out}: {error.strerror}; choose another --out") from None


def write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def save_model(simulation: Simulation, path: Path) -> None:
    """The server's model by parameter names, as safetensors."""
    from safetensors.torch import save_file

    model = simulation.model
    tensors = {name: p.detach().cpu().clone().contiguous() for name, p in model.named_parameters()}
    tensors |= {name: b.detach().cpu().clone().contiguous() for name, b in model.named_buffers()}
    part = path.with_name(path.name + ".part")
    save_file(tensors, part, metadata={"fedspeed": f"{__version__}, round {simulation.t}"})
    os.replace(part, path)


def summarise(config: Config, simulation: Simulation, records: list[Record], status: str) -> dict[str, Any]:
    """What a run came to: accuracies, totals, cost to the targets, and where it was made."""
    scored = [r for r in records if r.test_accuracy is not None]
    accuracies = [r.test_accuracy for r in scored if r.test_accuracy is not None]
    last5 = accuracies[-5:]
    reached: dict[str, Any] = {}
    for target in config.targets:
        first = next((r for r in scored if r.test_accuracy is not None and r.test_accuracy >= target), None)
        upto = [r for r in records if first and r.round <= first.round]
        reached[str(target)] = first and {
            "round": first.round,
            "bytes": sum(r.bytes_down + r.bytes_up for r in upto),
        }
    tested = [r.test_loss for r in records if r.test_loss is not None]
    data = simulation.data
    return {
        "status": status,
        "rounds": len(records),
        "last_accuracy": accuracies[-1] if accuracies else None,
        "best_accuracy": max(accuracies, default=None),
        "mean_last5_accuracy": math.fsum(last5) / len(last5) if last5 else None,
        "last_test_loss": tested[-1] if tested and math.isfinite(tested[-1]) else None,
        "last_train_loss": records[-1].train_loss if records else None,
        "targets": reached,
        "bytes_down": sum(r.bytes_down for r in records),
        "bytes_up": sum(r.bytes_up for r in records),
        "grad_evals": sum(r.grad_evals for r in records),
        "seconds": sum(r.seconds for r in records),
        "eval_seconds": sum(r.eval_seconds for r in records),
        "seed": config.seed,
        "parameters": simulation.work.flat.d,
        "data_fingerprint": data.fingerprint,
        "split_fingerprint": data.split_fingerprint,
        "environment": environment(simulation.work.flat.device.type),
    }


def environment(device: str) -> dict[str, Any]:
    """Versions and hardware: equal bits are promised for equal ones."""
    import numpy
    import torch

    return {
        "fedspeed": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
    }
