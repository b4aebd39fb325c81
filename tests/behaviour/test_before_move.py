"""Run directories that were written before modules of the package moved are continued, verified, shown and forked.

Names of layers' classes are hashed into a run of objects, and where a builder was written once decided what its inputs
are: a file that moves must change neither. `support/before_move.py` wrote the directories.
"""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path

import before_move
import pytest
from processor import SAME_BITS
from torch import nn

from fedspeed.cli import main
from fedspeed.client.losses import STORED_NAMES, place
from fedspeed.errors import UserError
from fedspeed.methods import METHODS, WRAPPERS
from fedspeed.methods.source import PACKAGE, packaged
from fedspeed.models import MODELS, takes_numbers
from fedspeed.models.resnet import choose_layers, resnet18_gn
from fedspeed.runs.directory import RunDir
from fedspeed.runs.fork import fork
from fedspeed.runs.launch import resume
from fedspeed.runs.simulate import _layers_digest
from fedspeed.runs.verify import verify

pytestmark = pytest.mark.filterwarnings("ignore:environment variables that change the last bits differ")
EXPECTED = json.loads(before_move.EXPECTED.read_text())
FORK_OF = "config"
SLOW = {"objects-lora": [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning")]}
OBJECTS = [pytest.param(name, marks=SLOW.get(name, [])) for name in before_move.OBJECTS]


def copied(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(before_move.FOLDER / name, tmp_path / name))


def require_expected(name: str, out: Path) -> None:
    """Check what a run ended with: every bit where bits are the same, else the losses but for rounding."""
    found, expected = before_move.outcome(out), EXPECTED["runs"][name]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-3)
    if SAME_BITS:
        assert found["model"] == expected["model"]


def require_verified(out: Path) -> None:
    """Check digests and running sums, which hold anywhere, and bits where they are the same."""
    assert [text for text in verify(out).broken if SAME_BITS or "run again" not in text] == []
    assert main(["verify", str(out)]) == 0 or not SAME_BITS


def require_readable(out: Path, tmp_path: Path) -> None:
    assert main(["show", str(out)]) == 0
    assert main(["report", str(out), "-o", str(tmp_path / "report.html")]) == 0
    assert (tmp_path / "report.html").stat().st_size > 1000


def test_every_directory_is_tried():
    stored = {path.name for path in before_move.FOLDER.iterdir() if path.is_dir()}
    assert stored == {*before_move.CONFIGS, *before_move.OBJECTS, *before_move.COMMANDS, "fork"}


@pytest.mark.parametrize("name", [*before_move.CONFIGS, "fork"])
def test_a_run_of_a_config(name, tmp_path):
    out = copied(name, tmp_path)
    require_readable(out, tmp_path)
    data_dir = str(before_move.FOLDER / before_move.ARRAYS) if "data" in before_move.CONFIGS.get(name, {}) else ""
    resume(out, data_dir=data_dir)
    require_expected(name, out)
    require_verified(out)
    require_readable(out, tmp_path)


@pytest.mark.parametrize("name", OBJECTS)
def test_a_run_of_objects(name, tmp_path):
    if name == "objects-lora":
        pytest.importorskip("peft")
    out = copied(name, tmp_path)
    require_readable(out, tmp_path)
    before = RunDir(out).records()
    before_move.given(name, out)
    assert len(before) == before_move.STOPPED
    require_expected(name, out)
    with pytest.raises(UserError, match="continue such a run from Python"):  # which nothing else can run again
        verify(out)
    require_readable(out, tmp_path)


@pytest.mark.parametrize("name", ["sweep", "compare"])
def test_a_folder_of_a_command(name, tmp_path):
    """The run that was stopped is continued; the others are kept as they are."""
    out = copied(name, tmp_path)
    kept = {p: p.read_bytes() for run in before_move.runs_in(out)[:-1] for p in run.rglob("*") if p.is_file()}
    assert main([*before_move.COMMANDS[name], "--out", str(out)]) == 0
    assert all(path.read_bytes() == data for path, data in kept.items())
    for run in before_move.runs_in(out):
        require_expected(f"{name}/{run.relative_to(out)}", run)
        require_verified(run)
    assert main(["report", str(out), "-o", str(tmp_path / "report.html")]) == 0


def test_a_folder_of_a_strategy_that_is_gone(tmp_path, capsys):
    """The command names what to use instead; the runs of the folder are as good as any."""
    out = copied("tune", tmp_path)
    assert main([*before_move.COMMANDS["tune"], "--out", str(out)]) == 2
    assert "fedspeed sweep" in capsys.readouterr().err
    for run in before_move.runs_in(out):
        resume(run)
        require_expected(f"tune/{run.relative_to(out)}", run)
        require_verified(run)
    assert main(["report", str(out / "judged"), "-o", str(tmp_path / "report.html")]) == 0


def test_a_run_is_forked(tmp_path):
    """A fork made now ends as the fork that was made then."""
    fork(copied(FORK_OF, tmp_path), 1, tmp_path / "forked", {"lr": 0.02})
    require_expected("fork", tmp_path / "forked")


def test_digests_of_whole_models():
    assert before_move.digests() == EXPECTED["models"]


LAYERS_BEFORE = {
    "linear": "57b3c3036c97a5f9f904090004492ee9",
    "vector": "2afb9b83f9314e5d029766197f539792",
    "mlp": "b488e015869831f65e14de4d8e6c0694",
    "cnn": "174eff587a665bd7572d9d2d48f6c0e0",
    "lenet": "c1cf7dd11eeee2ed56190a177026316b",
    "resnet18_gn": "a811a9c37c7e57cfd6b298384b324c2e",
    "resnet18_gn trimmed": "a811a9c37c7e57cfd6b298384b324c2e",
    "charlstm": "e11926af67939b9bf80842c9ffa1eb1f",
}
"""Digests of the settings of layers, as the version before compiled layers (commit 2382fd7) wrote them into configs."""


def test_digests_of_the_settings_of_layers():
    """Also of a model that has been run, whose blocks know then how they are computed."""
    assert before_move.digests(_layers_digest) == LAYERS_BEFORE
    net = resnet18_gn((3, 32, 32), 3)
    choose_layers(net, "compiled")
    assert _layers_digest(net) == LAYERS_BEFORE["resnet18_gn"]


def layers_of_the_package() -> list[type[nn.Module]]:
    """All classes of layers in the package, after all files that may define some were imported."""
    for file in PACKAGE.rglob("*.py"):
        if "(nn." in file.read_text() and "auditing" not in file.parts:  # whose model is part of a test, in no run
            parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
            importlib.import_module(".".join(parts).removesuffix(".__init__"))
    found, left = [], [nn.Module]
    while left:
        below = left.pop().__subclasses__()
        left += below
        found += [cls for cls in below if cls.__module__.startswith("fedspeed.")]
    return [cls for cls in found if not cls.__module__.startswith("fedspeed.experiments.audit.")]


def test_every_layer_has_a_stored_name():
    """One that is new is entered in the table as `module:name` of where it is first defined; no entry ever changes."""
    assert sorted(cls.__qualname__ for cls in layers_of_the_package()) == sorted(STORED_NAMES)
    assert all(place(cls) == STORED_NAMES[cls.__qualname__] for cls in layers_of_the_package())


@pytest.mark.parametrize("module", ["fedspeed.models.fast_conv", "fedspeed"])
def test_a_layer_that_moves_keeps_its_stored_name(module, monkeypatch):
    before = before_move.digests()
    for cls in layers_of_the_package():
        monkeypatch.setattr(cls, "__module__", module)
    assert before_move.digests() == before


def test_a_class_of_somebody_else_has_its_own_name():
    for module in ("mine", "fedspeed_user_mine_12345678", "fedspeeder.layers"):
        assert place(type("Conv", (nn.Conv2d,), {"__module__": module})) == f"{module}:Conv"


def test_what_becomes_of_inputs_does_not_depend_on_where_a_builder_is_defined(monkeypatch):
    numbers = {"linear", "vector", "mlp", "cnn", "lenet", "resnet18_gn"}
    assert {name for name, builder in MODELS.items() if takes_numbers(builder)} == numbers
    for builder in MODELS.values():
        monkeypatch.setattr(builder, "__module__", "fedspeed.models.elsewhere")
    assert {name for name, builder in MODELS.items() if takes_numbers(builder)} == numbers
    assert not takes_numbers(before_move.narrow_resnet)  # a builder of the user's


def test_methods_of_the_package_are_known_as_such():
    assert all(packaged(cls.from_fields({})) for cls in {**METHODS, **WRAPPERS}.values())
