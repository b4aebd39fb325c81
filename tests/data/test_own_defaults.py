"""No door augments data of the user's unless asked; what is done is said; stored configs keep their meaning."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedspeed import Federated, build_model, simulate
from fedspeed.cli import main
from fedspeed.config.config import OWN_DATA, Config, Spec
from fedspeed.data import CARDS, Samples, federate, from_arrays, from_torch, load
from fedspeed.data.augment import Augmentation, Pipeline
from fedspeed.experiments.grid import apply
from fedspeed.runs.config_file import read_config
from fedspeed.runs.directory import RunDir
from fedspeed.runs.launch import load_federation, prepare, resume, run_config

RNG = np.random.default_rng(0)
X, Y = RNG.integers(0, 256, (60, 8, 8), dtype=np.uint8), np.arange(60) % 3
SPLIT: dict[str, Any] = {"split": "iid", "clients": 4}
PLAN: dict[str, Any] = {"rounds": 2, "active": 2, "local_epochs": 1, "batch_size": 10}
FILE = """import numpy as np
from fedspeed.data import from_arrays
def load(seed=0):
    return from_arrays(*np.load({path!r}).values())
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    np.savez(tmp_path / "mine.npz", x=X, y=Y)
    (tmp_path / "mine.py").write_text(FILE.format(path=str(tmp_path / "mine.npz")))
    return tmp_path


def by_config(tmp: Path, **given: Any) -> Federated:
    tables = {"data": "arrays", "data_dir": str(tmp / "mine.npz"), "model": "linear", **SPLIT, **PLAN, **given}
    return load_federation(Config.from_dict(tables))[1]


def from_pairs(_: Path, augment: str = "") -> Federated:
    pairs = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    return federate(from_torch(pairs), **SPLIT, augment=augment)


def from_folder(tmp: Path, augment: str = "") -> Federated:
    from PIL import Image

    for i in range(12):
        (tmp / f"pets/{i % 2}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(X[i]).save(tmp / f"pets/{i % 2}/{i}.png")
    return load("images", data_dir=tmp / "pets", split="iid", clients=2, augment=augment)


DOORS = {
    "from_arrays": lambda tmp, **how: federate(from_arrays(X, Y), **SPLIT, **how),
    "load": lambda tmp, **how: load("arrays", data_dir=tmp / "mine.npz", **SPLIT, **how),
    "load a file": lambda tmp, **how: load(f"{tmp / 'mine.py'}:load", **SPLIT, **how),
    "from_torch": from_pairs,
    "images": from_folder,
    "shrunk": lambda tmp, **how: load("arrays", data_dir=tmp / "mine.npz", shrink=2, **SPLIT, **how),
    "config": by_config,
    "config of a file": lambda tmp, **how: by_config(tmp, data=f"{tmp / 'mine.py'}:load", data_dir="", **how),
}


@pytest.mark.parametrize("door", DOORS)
def test_own_data_are_augmented_only_if_asked(door: str, mine: Path) -> None:
    plain, asked = DOORS[door](mine), DOORS[door](mine, augment="paper")
    assert not plain.pipeline.random, "nothing is drawn"
    assert asked.pipeline.random
    assert "augmentation none" in repr(plain)
    assert "augmentation flip and crop by 1" in repr(asked)


def test_the_other_ways_to_the_same_data_do_not_augment_either(mine: Path) -> None:
    assert not Federated.from_arrays(X, Y, np.arange(60) % 4).pipeline.random
    (mine / "named.toml").write_text(Config().to_toml())
    command = ["run", str(mine / "named.toml"), "--data", "arrays", "--data-dir", str(mine / "mine.npz"), "--quiet"]
    few = ["--rounds", "1", "--clients", "4", "--active", "2", "--split", "iid"]
    assert main([*command, *few, "--out", str(mine / "run")]) == 0
    assert RunDir(mine / "run").config()["augment"] == "none", "digits' own augmentation is not taken over"
    swept = apply(Config().to_dict(), {"data": "arrays"})
    assert Config.from_dict(swept).augment == "none"
    assert Config.from_dict(apply(Config().to_dict(), {"data": "arrays", "augment": "flip"})).augment == "flip"


def test_sets_of_this_package_and_augmentation_of_the_users_own_stay() -> None:
    assert [Config(data=Spec(name)).augment for name in ("digits", "cifar10", "arrays")] == ["paper", "paper", "none"]
    mirrored = Samples("mirrored", X[:, None], Y, classes=3, augmentation=Augmentation(flip=True))
    assert federate(mirrored, **SPLIT).pipeline.flip == 0.5, "who writes an Augmentation asks for it"
    assert Config.from_dict({"data": "arrays", "preset": "released"}).augment == "none"


def test_the_command_line_and_python_make_the_same_run(mine: Path) -> None:
    command = "run --method fedavg --model linear --data arrays --split iid --clients 4 --active 2 --rounds 2 --quiet"
    where = ["--data-dir", str(mine / "mine.npz"), "--out", str(mine / "cli")]
    assert main([*command.split(), "--local-epochs", "1", "--batch-size", "10", *where]) == 0
    data = federate(from_arrays(X, Y), **SPLIT)
    run = simulate("fedavg", build_model("linear", data, seed=0), data, **PLAN)
    again = [(r.train_loss, r.test_loss, r.update_norm) for r in run]
    assert again == [(r.train_loss, r.test_loss, r.update_norm) for r in RunDir(mine / "cli").records(2)]


def test_a_stored_config_keeps_its_meaning(mine: Path) -> None:
    tables = {"data": "arrays", "data_dir": str(mine / "mine.npz"), "model": "linear", **SPLIT, **PLAN}
    old = Config.from_dict(tables | {"augment": "paper"})  # what every config of own data said before
    whole = run_config(old, mine / "whole")
    run_config(replace(old, rounds=1), mine / "part")
    read = read_config(mine / "part")
    with prepare(read) as simulation:
        half = (0.5,)
        assert simulation.data.pipeline == Pipeline(mean=half, std=half, flip=0.5, padding=1)
    assert resume(mine / "part", rounds=2)["digests"]["model"] == whole["digests"]["model"]
    assert run_config(Config.from_dict(tables), mine / "new")["digests"]["model"] != whole["digests"]["model"]


def test_a_file_of_the_users_says_itself_and_its_run_stores_what_was_done(mine: Path) -> None:
    tables = {"data": f"{mine / 'mine.py'}:load", "model": "linear", **SPLIT, **PLAN}
    run_config(Config.from_dict(tables), mine / "run")
    assert RunDir(mine / "run").config()["augment"] == "none"
    again = [str(mine / "run" / "config.toml"), "--out", str(mine / "again"), "--quiet"]
    assert main(["run", *again]) == 0
    assert RunDir(mine / "again").summary()["digests"] == RunDir(mine / "run").summary()["digests"]


def test_data_show_says_it(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["data", "show", "arrays", "--data-dir", str(mine / "mine.npz"), "--split", "iid", "--clients", "4"]
    assert main([*command, "--no-figures"]) == 0
    assert "augmentation  none\n" in capsys.readouterr().out
    assert main([*command, "--no-figures", "--json", "--augment", "paper"]) == 0
    assert json.loads(capsys.readouterr().out)["augmentation"] == "flip and crop by 1"


def test_the_names_of_own_data():
    assert [*OWN_DATA] == [name for name, card in CARDS.items() if card.size == "yours"]
