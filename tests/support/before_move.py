"""Run directories of every kind, as the version before modules moved wrote them, and what each ends with.

`python tests/support/before_move.py` wrote `tests/fixtures/run-before-move` with the code of that version. Do not write
it anew after a module has moved: the directories show that older ones can still be continued. A run of objects is bound
to the bits of its model and its data, so these are multiples of 1/64, which every processor computes alike. Each run is
stopped before its last round; `expected.json` holds what the same run ends with if nothing stops it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from watching import Clients, Stop, stop_after

from fedspeed import Federated, simulate
from fedspeed.cli import main
from fedspeed.config.config import Config
from fedspeed.models import MODELS
from fedspeed.models.resnet import resnet18_gn
from fedspeed.runs.directory import RunDir
from fedspeed.runs.fork import branch, read_parent, write_parent
from fedspeed.runs.launch import resume, run_config
from fedspeed.runs.simulate import module_digest

FOLDER = Path(__file__).parents[1] / "fixtures" / "run-before-move"
EXPECTED = FOLDER / "expected.json"
ROUNDS, STOPPED = 3, 2
PLAN: dict[str, Any] = {
    "rounds": ROUNDS, "active": 2, "local_steps": 2, "batch_size": 4, "lr": 0.05, "checkpoint_every": 1, "seed": 3,
    "engine": "loop", "backend": "serial", "device": "cpu",
}  # fmt: skip


def exact(model: nn.Module) -> nn.Module:
    """Set all floating parameters of a model to multiples of 1/64 that depend on nothing but their order."""
    draw = np.random.default_rng(7)
    for parameter in model.parameters():
        values = draw.integers(-16, 17, parameter.shape) / 64
        parameter.data.copy_(torch.from_numpy(values))
    return model


def federation(shape: tuple[int, ...], classes: int = 3, tokens: int = 0) -> Federated:
    """Return data of 4 clients with 8 rows each: multiples of 1/64, or ids of tokens."""
    draw = np.random.default_rng(5)
    rows = draw.integers(0, tokens, (40, *shape)) if tokens else draw.integers(-64, 65, (40, *shape)) / 64
    x = rows if tokens else rows.astype(np.float32)
    y = np.arange(40) % classes
    return Federated.from_arrays(x[:32], y[:32], np.arange(32) // 8, (x[32:], y[32:]), classes=classes)


def narrow_resnet(trim: bool = False) -> nn.Module:
    """Build ResNet-18's layers with 4 to 8 channels: the classes of `resnet18_gn`, without its 45 MB."""
    from fedspeed.models.fast_conv import Layout
    from fedspeed.models.resnet import Block
    from fedspeed.models.trim import trimmed

    net = nn.Sequential(
        Layout(),
        nn.Conv2d(1, 4, 7, 2, 3, bias=False),
        nn.GroupNorm(2, 4),
        nn.MaxPool2d(3, 2, 1),
        nn.ReLU(),
        Layout(),
        Block(4, 4, 1, 2),
        Block(4, 8, 2, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    return trimmed(net, (1, 8, 8), keep_norm=True) if trim else net


def batch_norm() -> nn.Module:
    """Build a network with batch norm, whose statistics are averaged."""
    layers = [nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3)]
    return nn.Sequential(*layers)


def lora() -> nn.Module:
    """Build a frozen network with adapters, which needs peft."""
    from peft import LoraConfig, get_peft_model

    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3))
    return get_peft_model(net, LoraConfig(r=2, lora_alpha=2, target_modules=["1", "3"]))


PICTURES = (1, 8, 8)
OBJECTS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Federated], dict[str, Any]]] = {
    "objects-cnn": (lambda: MODELS["cnn"](PICTURES, 3, widths=(2, 4)), lambda: federation(PICTURES), {}),
    "objects-lenet": (lambda: MODELS["lenet"]((1, 16, 16), 3), lambda: federation((1, 16, 16)), {}),
    "objects-vector": (lambda: MODELS["vector"]((3, 5), 3), lambda: federation((3, 5)), {}),
    "objects-resnet": (narrow_resnet, lambda: federation(PICTURES), {}),
    "objects-trimmed": (
        partial(narrow_resnet, trim=True), lambda: federation(PICTURES), {"clip_mode": "released", "clip": 1.0},
    ),
    "objects-resnet18_gn": (lambda: resnet18_gn(PICTURES, 3), lambda: federation(PICTURES), {}),
    "objects-batch-norm": (batch_norm, lambda: federation(PICTURES), {"batch_norm": "average"}),
    "objects-charlstm": (
        lambda: MODELS["charlstm"]((6,), 3, embedding=2, hidden=4, tokens=5), lambda: federation((6,), tokens=5), {},
    ),
    "objects-lora": (lora, lambda: federation(PICTURES), {}),
}  # fmt: skip
NO_CHECKPOINT = ("objects-lenet", "objects-resnet18_gn")
"""Runs of large models, killed before their first checkpoint: their directories hold little more than a config."""

CONFIGS: dict[str, dict[str, Any]] = {
    "config": {"method": "fedspeed", "model": {"name": "mlp", "hidden": [4]}, "clients": 4},
    "config-killed": {"method": "scaffold", "model": "linear", "clients": 4},
    "config-charlstm": {
        "method": "fedspeed", "model": {"name": "charlstm", "embedding": 2, "hidden": 4, "tokens": 5}, "data": "arrays",
        "split": "iid", "clients": 4,
    },
    "config-whole-numbers": {
        "method": "fedavg", "model": {"name": "mlp", "hidden": [4]}, "data": "arrays", "split": "iid", "clients": 4,
    },
}  # fmt: skip
ARRAYS = "arrays.npz"
"""Whole numbers, int64: ids of tokens for one model, numbers to compute with for another."""

SHARED = [
    "--rounds=3", "--clients=4", "--active=2", "--local-steps=1", "--batch-size=4", "--model=linear", "--seeds=1",
    "--set=data.train_size=40", "--set=data.test_size=20",
    "--checkpoint-every=1", "--engine=loop", "--backend=serial", "--device=cpu", "--quiet",
]  # fmt: skip
COMMANDS = {
    "sweep": ["sweep", "--method=fedavg", "--grid=lr=0.05,0.1", *SHARED],
    "compare": ["compare", "fedavg", "fedspeed", *SHARED],
    "tune": ["tune", "fedavg", "--budget=12", "--strategy=grid", "--space=lr=0.05,0.1", "--validation=0.2", *SHARED],
}


def config(name: str) -> Config:
    """Return the config of one of `CONFIGS`; data of one's own lie in the current folder."""
    tables = {**PLAN, **CONFIGS[name]}
    return Config.from_dict({**tables, **({"data_dir": ARRAYS} if "data" in tables else {})})


def given(name: str, out: Path, observers: tuple[Any, ...] = (), **changes: Any) -> None:
    """Run one of `OBJECTS` in a directory, or continue it there."""
    model, data, settings = OBJECTS[name]
    every = {"checkpoint_every": ROUNDS} if name in NO_CHECKPOINT else {}
    plan = {**PLAN, **settings, **every, **changes}
    method = "fedavg" if name in NO_CHECKPOINT else "fedspeed"
    list(simulate(method, exact(model()), data(), out=out, resume=True, observers=observers, **plan))


def outcome(out: Path) -> dict[str, Any]:
    """What a finished run ended with: the digest of its model, and its last losses for other processors."""
    summary = RunDir(out).summary()
    assert summary["status"] == "finished", summary
    losses = [summary["last_train_loss"], summary["last_test_loss"] or 0.0]
    return {"model": summary["digests"]["model"], "losses": losses}


def runs_in(out: Path) -> list[Path]:
    """The run directories below a folder."""
    return sorted(path.parent for path in out.rglob("config.toml"))


def digests(digest: Callable[[nn.Module], str] = module_digest) -> dict[str, str]:
    """Digests of whole models, by name: they stand in the config of a run of objects."""
    built: dict[str, nn.Module] = {
        "linear": MODELS["linear"](PICTURES, 3),
        "vector": MODELS["vector"]((3, 5), 3),
        "mlp": MODELS["mlp"](PICTURES, 3),
        "cnn": MODELS["cnn"](PICTURES, 3),
        "lenet": MODELS["lenet"]((1, 16, 16), 3),
        "resnet18_gn": resnet18_gn((3, 32, 32), 3),
        "resnet18_gn trimmed": resnet18_gn((3, 32, 32), 3, trim=True),
        "charlstm": MODELS["charlstm"]((6,), 5),
    }
    return {name: digest(exact(model)) for name, model in built.items()}


def _kill(out: Path, done: int, total: int, *_: Any) -> None:
    if len(RunDir(out).records()) == STOPPED and done == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def _killed(name: str) -> None:
    """Run in a process that is killed when the first client of the last round has answered."""
    process = multiprocessing.get_context("spawn").Process(target=_run_until_killed, args=(name,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def _run_until_killed(name: str) -> None:
    out = FOLDER / name
    observer = Clients(partial(_kill, out))
    if name in OBJECTS:
        given(name, out, (observer,))
    else:
        run_config(config(name), out, observers=[observer])


def _write_configs(work: Path) -> dict[str, Any]:
    expected = {}
    for name in CONFIGS:
        run_config(config(name), work / name)
        expected[name] = outcome(work / name)
        if name == "config-killed":
            _killed(name)
        else:
            with suppress(Stop):
                run_config(config(name), FOLDER / name, observers=[stop_after(STOPPED)])
        stored = FOLDER / name / "config.toml"
        stored.write_text(stored.read_text().replace(str(FOLDER / ARRAYS), ARRAYS))  # where data lie may change
    for out in (work / "fork", FOLDER / "fork"):
        branch(work / "config", 1, out, {"lr": 0.02})
        parent = read_parent(RunDir(out))
        assert parent is not None
        write_parent(RunDir(out), parent._replace(folder="runs/config"))
    expected["fork"] = {"model": resume(work / "fork")["digests"]["model"], "losses": outcome(work / "fork")["losses"]}
    with suppress(Stop):
        resume(FOLDER / "fork", observers=[stop_after(STOPPED)])
    return expected


def _write_objects(work: Path) -> dict[str, Any]:
    expected = {}
    for name in OBJECTS:
        given(name, work / name)
        expected[name] = outcome(work / name)
        if name in NO_CHECKPOINT:
            _killed(name)
            continue
        with suppress(Stop):
            given(name, FOLDER / name, (stop_after(STOPPED),))
    return expected


def _write_commands(work: Path) -> dict[str, Any]:
    expected = {}
    for name, words in COMMANDS.items():
        assert main([*words, "--out", str(work / name)]) == 0
        for run in runs_in(work / name):
            expected[f"{name}/{run.relative_to(work / name)}"] = outcome(run)
        last = runs_in(work / name)[-1]
        stored = Config.from_toml(last / "config.toml")
        shutil.rmtree(last)
        with suppress(Stop):
            run_config(stored, last, observers=[stop_after(STOPPED)])
        pages = shutil.ignore_patterns("*.html", "*.png", "*.pdf", "*.svg")
        shutil.copytree(work / name, FOLDER / name, ignore=pages)
    return expected


def _write() -> None:
    if FOLDER.exists():
        sys.exit(f"{FOLDER} is there: it is what an older version wrote, and stays as it is")
    FOLDER.mkdir()
    os.chdir(FOLDER)
    draw = np.random.default_rng(5)
    np.savez(FOLDER / ARRAYS, x=draw.integers(0, 5, (40, 6)), y=np.arange(40) % 3)
    with tempfile.TemporaryDirectory() as work:
        parts = (_write_configs, _write_objects, _write_commands)
        expected = {name: found for part in parts for name, found in part(Path(work)).items()}
    EXPECTED.write_text(json.dumps({"models": digests(), "runs": expected}, indent=1) + "\n")


if __name__ == "__main__":
    _write()
