"""Whatever a config or a run directory holds: an error message or a valid run, never anything else."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import tomllib
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sealing import seal
from watching import Rounds

from fedspeed.config.config import Config
from fedspeed.errors import Diverged, UserError
from fedspeed.runs.launch import resume, run_config
from fedspeed.utils.files import read_toml

MORE = int(os.environ.get("FEDSPEED_FUZZ", "1"))
"""2,120 cases in all, times this; `make soak` takes more."""
quick = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None)

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
keys = st.sampled_from([*Config().to_dict(), "preset", "lrr", ""])
names = st.sampled_from(["fedavg", "fedspeed", "fedinit", "fedadmm", "none.py:X", "x:", ":", "fedsped", ""])
fields = st.dictionaries(st.sampled_from(["lam", "rho", "base", "server", "?"]), plain | names, max_size=3)
methods = names | fields | st.builds(lambda name, own: {**own, "name": name}, names, fields)
wrapped = st.builds(lambda base: {"name": "fedinit", "base": base}, methods | plain)
tables = st.dictionaries(keys, plain, max_size=5) | st.builds(
    lambda table, method: {**table, "method": method}, st.dictionaries(keys, plain, max_size=3), methods | wrapped
)


def accepted(make) -> Config | None:
    """The config, or None where the error says why not."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make()
    except UserError:
        return None


@settings(quick, max_examples=1100 * MORE)
@given(tables)
def test_configs_as_tables(given_tables):
    config = accepted(lambda: Config.from_dict(given_tables))
    if config is not None:
        again = accepted(lambda: Config.from_dict(tomllib.loads(config.to_toml())))
        assert again == config


@settings(quick, max_examples=700 * MORE)
@given(text=st.text(max_size=60) | st.binary(max_size=60), at=st.integers(0, 700), cut=st.integers(0, 40))
def test_configs_as_text(text, at, cut):
    """A good file with a part replaced."""
    good = Config().to_toml().encode()
    piece = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "c.toml")
        path.write_bytes(good[:at] + piece + good[at + cut :])
        accepted(lambda: Config.from_dict(read_toml(path)))


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 20000, "a." * 3000 + "b = 1", "method.base." + "base." * 3000 + "b = 1"]
)
def test_deep_nesting(tmp_path, text):
    (tmp_path / "c.toml").write_text(text)
    assert accepted(lambda: Config.from_toml(tmp_path / "c.toml")) is None


class Enough(BaseException):
    """The run goes on; that is all one wants to know."""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A run of 3 rounds, stopped after the second."""
    out = tmp_path_factory.mktemp("fuzz") / "run"

    def stop(record):
        if record.round == 2:
            raise Enough

    tiny = {"rounds": 3, "clients": 4, "active": 2, "local_steps": 1, "batch_size": 2, "engine": "loop",
            "backend": "serial", "method": "fedspeed", "model": "vector", "split": "natural",
            "data": {"name": "quadratic", "d": 3, "n": 2}}  # fmt: skip
    with pytest.raises(Enough):
        run_config(Config.from_dict(tiny), out, observers=[Rounds(stop)])
    for name in ("summary.json", "model.safetensors"):
        (out / name).unlink()
    return out


def survives(out: Path) -> None:
    """Resume: a finished run or an error that says something, and no half-written file."""

    def enough(record):
        if record.round > 5:
            raise Enough

    with suppress(UserError, Diverged, Enough), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        summary = resume(out, observers=[Rounds(enough)])
        assert summary["status"] == "finished"
        lines = (out / "rounds.jsonl").read_text().splitlines()
        assert [json.loads(text)["round"] for text in lines] == list(range(1, summary["rounds"] + 1))
    assert not list(out.rglob("*.part"))


def copied(stopped: Path, change) -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(shutil.copytree(stopped, Path(folder, "run")))
        change(out)
        survives(out)


WHICH = ["checkpoints/2.json", "checkpoints/1.json", "checkpoints/server@2", "states", "rounds.jsonl", "summary.json"]


@settings(quick, max_examples=120 * MORE)
@given(
    which=st.sampled_from(WHICH),
    at=st.integers(0, 400),
    cut=st.integers(0, 400),
    piece=st.binary(max_size=20),
    sealed=st.booleans(),
)
def test_run_directories_with_other_bytes(stopped, which, at, cut, piece, sealed):
    def change(out: Path) -> None:
        path = next((out / "states").iterdir()) if which == "states" else out / which
        data = path.read_bytes() if path.exists() else b'{"status": "finished", "rounds": 3}'
        path.write_bytes(data[:at] + piece + data[at + cut :])
        if sealed and path.suffix != ".json":
            seal(out)

    copied(stopped, change)


values = plain | st.sampled_from([
    1, 2, 3, 0, -1, True, 10**20, 10**400, "server@2", {}, {"checkpoints/server@2": "0"}, {"states/0@0": "0"},
    {"states/../../x@0": "0"}, {"states/²@0": "0"}, {"states/0@00": "0"}, [["states/0@0"]], {"config": 1},
    {"file": "states/log@1", "bytes": -1, "digest": "0"}, {"file": "states/log@²", "bytes": 0, "digest": "0"},
    {"file": "states/log@1", "bytes": 0, "digest": "cae66941d9efbd404e4d88758ea67670"}, {"file": 1, "digest": "0"},
])  # fmt: skip


@settings(quick, max_examples=100 * MORE)
@given(
    which=st.sampled_from(
        ["checkpoints/2.json", "rounds.jsonl", "summary.json", "checkpoints/server@2", "checkpoints/9.json"]
    ),
    key=st.sampled_from(
        [
            "format",
            "round",
            "files",
            "server",
            "log",
            "rounds",
            "bound",
            "waited",
            "cohort",
            "lr",
            "seconds",
            "bytes_up",
            "status",
            "dropped",
            "?",
        ]
    ),
    value=values,
    whole=st.booleans(),
)
def test_run_directories_with_other_json(stopped, which, key, value, whole):
    """One key, or all of a file, replaced by some other JSON."""

    def change(out: Path) -> None:
        path = out / which
        if which == "rounds.jsonl":
            lines = path.read_text().splitlines()
            changed = value if whole else {**json.loads(lines[1]), key: value}
            path.write_text(lines[0] + "\n" + json.dumps(changed) + "\n")
        elif which.endswith("server@2"):
            header, _, rest = path.read_bytes().partition(b"\n")
            changed = value if whole else [[value, *json.loads(header)[0][1:]], *json.loads(header)[1:]]
            path.write_bytes(json.dumps(changed).encode() + b"\n" + rest)
            seal(out)
        else:
            before = json.loads(path.read_text()) if path.exists() else {"status": "finished", "rounds": 3}
            path.write_text(json.dumps(value if whole else {**before, key: value}))

    copied(stopped, change)


@settings(quick, max_examples=60 * MORE)
@given(
    changes=st.fixed_dictionaries({}, optional={
        "rounds": st.integers(1, 5), "clients": st.integers(1, 6), "seed": st.integers(0, 3),
        "active": st.integers(1, 4),
        "states": st.sampled_from(["memory", "disk"]), "state_dtype": st.sampled_from(["float16", "same"]),
        "method": st.sampled_from(["fedavg", "scaffold", "fedsmoo", "fedlesam", "none.py:X", "none"]),
        "data": st.builds(lambda d: {"name": "quadratic", "d": d, "n": 2}, st.integers(1, 4)),
        "model": st.sampled_from(["linear", "vector", "mlp", "none"]), "format": st.integers(0, 2),
        "split": st.sampled_from(["natural", "iid", "dirichlet:0.1", "none"]),
    })
)  # fmt: skip
def test_run_directories_with_another_config(stopped, changes):
    def change(out: Path) -> None:
        before = tomllib.loads((out / "config.toml").read_text())
        (out / "config.toml").write_text(tomli_w.dumps({**before, **changes}))

    copied(stopped, change)


@settings(quick, max_examples=40 * MORE)
@given(drop=st.sets(st.sampled_from([*WHICH[:5], "config.toml", "checkpoints"]), max_size=3), folder=st.booleans())
def test_run_directories_with_missing_files(stopped, drop, folder):
    """Missing, or a folder of that name instead."""

    def change(out: Path) -> None:
        for name in sorted(drop, reverse=True):
            path = out / name
            if path.is_dir():
                shutil.rmtree(path)
            elif path.exists():
                path.unlink()
                if folder:
                    path.mkdir()

    copied(stopped, change)
