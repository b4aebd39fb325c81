"""Recipes, their runs and what becomes of them: real processes, real kills; the arithmetic of verdicts is elsewhere."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from forked import CONTEXT, forked

from fedspeed.cli import main
from fedspeed.config.config import Config
from fedspeed.data import load
from fedspeed.errors import UserError
from fedspeed.experiments.tune.tuner import gradients
from fedspeed.reproduce import Reproduction, data_digest
from fedspeed.reproduce import recipes as recipe_files
from fedspeed.reproduce.recipes import find_recipe, merge, papers_scale, recipes, run_key, settings
from fedspeed.reproduce.runs import Run, Store, apart, commit, make

PRESETS = [(recipe, preset) for recipe in recipes().values() for preset in recipe.presets]
IDS = [f"{recipe.name}-{preset}" for recipe, preset in PRESETS]
ROOT = Path(__file__).parents[2]
STORED = ROOT / "results" / "iclr2023" / "cnn"
PAPERS = {f"table{i}" for i in range(1, 9)} | {f"fig{i}" for i in range(1, 6)}


def runs(count: int = 3, **changes) -> list[Run]:
    tables = merge(settings("smoke")["base"], {"rounds": 4, "method": {"name": "fedspeed"}, **changes})
    configs = [Config.from_dict({**tables, "seed": seed}) for seed in range(count)]
    return [Run(run_key(config, "digits"), f"seed {config.seed}", config) for config in configs]


def made(given: list[Run], out: Path, jobs: int = 2) -> list[dict]:
    store, done = Store(out), []
    with forked():
        make(given, store, jobs, lambda run, part, note: None, done.append)
    assert {run.key for run in done} == {run.key for run in given}
    return [Store(out).get(run.key) for run in given]


# --- recipes ---


def test_every_table_and_figure_of_the_paper_has_a_recipe():
    assert set(recipes()) >= PAPERS | {"serverrule", "cheap-perturbation", "mechanism", "fair", "tuned"}
    for name in PAPERS:
        assert {"paper", "cnn", "smoke"} <= set(find_recipe(name).presets), name


@pytest.mark.parametrize(("recipe", "preset"), PRESETS, ids=IDS)
def test_every_cell_is_a_valid_config_and_claims_name_cells(recipe, preset):
    cells = recipe.cells(preset)
    assert len({(cell.row, cell.column) for cell in cells}) == len(cells)
    if recipe.kind == "runs":
        configs = [cell.config(0) for cell in cells]
        assert all(config.rounds % config.eval_every == 0 for config in configs), "the last round is not evaluated"
    names = recipe.cell_names(preset)
    for claim in recipe.claims:
        if preset in claim.presets:
            assert claim.cells() <= names, claim.text


def test_full_presets_have_the_papers_federations():
    """They differ from it in network, pictures and rounds: K, and so gamma, is the paper's."""
    same = ("clients", "active", "batch_size", "local_epochs", "lr", "weight_decay")
    for preset, own, papers in (
        ("mlp-full", "base", "C10-100"),
        ("cnn-full", "base", "C10-100"),
        ("mlp-full", "lowpart", "C10-500-appendix"),
    ):
        a, b = settings(preset)[own], settings("paper")[papers]
        assert {k: a[k] for k in same} == {k: b[k] for k in same}
        assert "train_size" not in a["data"]
    assert settings("mlp-full")["lowpart"]["rounds"] == settings("paper")["C10-500-appendix"]["rounds"]


def test_every_method_is_tuned_with_the_same_number_of_gradients():
    """And every method that has a prox weight with several."""
    recipe = find_recipe("tuned")
    for cell in recipe.cells("mlp-full"):
        config = cell.config(0)
        points = recipe.tune.grid[config.method.name]
        assert len(points) * gradients(config.method, config, np.array([500] * 100))[0] == 6 * 10 * 50
        prox = {"fedprox": "mu", "feddyn": "alpha", "fedadmm": "lam", "fedspeed": "lam"}.get(config.method.name)
        assert prox is None or len({point["method"][prox] for point in points}) > 1


@pytest.mark.parametrize("recipe", recipes().values(), ids=list(recipes()))
def test_every_claim_is_asked_somewhere_and_none_of_the_papers_twice(recipe):
    """A misspelt cell would never be asked; a claim that is part of another would count double."""
    asked = {
        preset: [c for c in recipe.claims if c.asked(preset, recipe.cell_names(preset), papers_scale(preset))]
        for preset in recipe.presets
    }
    assert {claim.text for claim in recipe.claims} == {claim.text for claims in asked.values() for claim in claims}
    for preset, claims in asked.items():
        said = [(c.metric, {e.text for e in c.expressions(papers_scale(preset))}) for c in claims if c.source != "ours"]
        for (metric, one), (other, two) in permutations(said, 2):
            assert metric != other or not one <= two, (preset, sorted(one))


def test_presets_of_the_papers_scale_say_so():
    assert {preset for recipe in recipes().values() for preset in recipe.presets if papers_scale(preset)} >= {"paper"}
    assert not any(papers_scale(preset) for preset in ("cnn", "mlp", "smoke"))


def test_a_column_may_name_its_own_setting():
    """Table 4's 2% block has the runs of table1."""
    cells = {(c.row, c.column): c.config(0) for c in find_recipe("table4").cells("cnn")}
    ours = {(c.row, c.column): c.config(0) for c in find_recipe("table1").cells("cnn")}
    assert cells["FedSpeed", "C10-500 Dir-0.6"] == ours["FedSpeed", "CIFAR-10 Dir-0.6"]
    assert cells["FedSpeed", "Dir-0.6"].clients == 100


def test_the_loss_of_the_servers_model_is_recorded_where_it_is_asked(tmp_path):
    """At every evaluated round, on all clients' data; the last is the final training loss."""
    (run,) = runs(1)
    plain, (found,) = made([run], tmp_path / "a")[0], made([replace(run, measure=("server_loss",))], tmp_path / "b")
    assert apart(plain, found) == 0, "it has measured more"
    assert apart(found, plain) == math.inf, "it lacks what was measured"
    losses = found["rounds"]["server_loss"]
    assert len(losses) == len(found["rounds"]["round"]) > 1
    assert losses[-1] == pytest.approx(found["final"]["train_loss"], rel=1e-6)
    assert losses[-1] != found["rounds"]["train_loss"][-1]
    assert found["measures"]["server_loss"] == len(losses)


@pytest.mark.parametrize("name", sorted(PAPERS))
def test_the_papers_numbers_belong_to_cells_of_the_paper_preset(name):
    recipe = find_recipe(name)
    known = set().union(*(recipe.cell_names(preset) for preset in recipe.presets if preset.startswith("paper")))
    assert set(recipe.values) <= known


def test_runs_that_recipes_share_have_one_key(tmp_path):
    work = Reproduction("smoke", tmp_path)
    keys = [{run.key for run in work.runs(find_recipe(name))} for name in ("fig1", "table5")]
    assert keys[0] & keys[1]


def test_a_key_names_what_decides_the_numbers_and_nothing_else(monkeypatch):
    config = Config.from_dict({"method": "fedspeed"})
    key = run_key(config, "data")
    assert run_key(replace(config, backend="process", workers=2, targets=(0.5,)), "data") == key
    assert run_key(replace(config, seed=1), "data") != key
    assert run_key(replace(config, lr=0.2), "data") != key
    assert run_key(config, "other data") != key
    monkeypatch.setattr(recipe_files, "RESULTS_VERSION", recipe_files.RESULTS_VERSION + 1)
    assert run_key(config, "data") != key


def test_tables_are_merged_key_by_key_and_another_name_starts_afresh():
    under = {"lr": 1, "method": {"name": "fedspeed", "rho": 0.1}}
    assert merge(under, {"method": {"rho": 0.2}})["method"] == {"name": "fedspeed", "rho": 0.2}
    assert merge(under, {"method": {"name": "fedavg"}})["method"] == {"name": "fedavg"}
    assert under["method"]["rho"] == 0.1


def test_a_recipe_with_an_unknown_key_is_refused(tmp_path):
    path = tmp_path / "wrong.toml"
    path.write_text('title = "a"\nclaim = "b"\nabout = "c"\nmetrik = "final"\n')
    with pytest.raises(UserError, match=r"metrik.*did you mean 'metric'"):
        recipe_files.read(path)


# --- data ---


def test_absent_data_are_said_to_be_and_nothing_is_fetched(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FEDSPEED_CACHE", str(tmp_path / "empty"))
    digest, there = data_digest("cifar10")
    assert not there
    assert digest  # the published digest is known, so stored results are still found
    work = Reproduction("cnn", tmp_path / "out")
    assert work.runs(find_recipe("table7")) == []
    assert {cell.note for cell in work.sheet(find_recipe("table7")).cells.values()} == {"0 of 3 seeds run"}
    given = ["reproduce", "table7", "--preset", "cnn", "--out", str(tmp_path / "out")]
    assert main(given) == 0
    assert "not run: cifar10 is not on this machine; `fedspeed data fetch cifar10` gets it" in capsys.readouterr().out


def test_another_copy_of_the_data_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSPEED_CACHE", str(tmp_path))
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "about.json").write_text('{"sha256": "0123456789abcdef"}')
    with pytest.raises(UserError, match="expected the published set"):
        data_digest("cifar10")


def test_held_out_clients_do_not_train_and_the_test_set_is_not_touched():
    data = load("digits", split="dirichlet:0.6", clients=15, held_out=5, seed=3)
    whole = load("digits", split="dirichlet:0.6", clients=20, seed=3)
    assert data.clients == 15
    assert data.split_fingerprint != whole.split_fingerprint
    owned = np.concatenate([whole.rows(i) for i in range(15, 20)])
    assert np.array_equal(data.indices, whole.indices[: whole.offsets[15]])
    assert np.array_equal(data.x_test.numpy(), whole.x.numpy()[np.sort(owned)])
    assert not set(owned) & set(data.indices)


def test_held_out_must_be_a_number_of_clients():
    with pytest.raises(UserError, match="held_out"):
        load("digits", clients=5, held_out=-1)


# --- runs ---


def test_runs_side_by_side_are_those_made_one_by_one(tmp_path):
    given = runs()
    first, second = made(given, tmp_path / "a", jobs=2), made(given, tmp_path / "b", jobs=1)
    assert all(apart(a, b) == 0 for a, b in zip(first, second, strict=True))
    assert first[0]["final"] != first[1]["final"]
    assert [path.name for path in (tmp_path / "a" / "work").iterdir()] == [".runs.lock"]


def test_a_process_that_dies_is_replaced_and_its_run_goes_on(tmp_path):
    given, killed = runs(2, rounds=6), []

    def kill(run, part, note):
        if part == 0.5 and not killed:
            killed.append(run.key)
            children = subprocess.run(
                ["pgrep", "-P", str(os.getpid()), "-f", "spawn_main"], capture_output=True, text=True
            )
            for pid in children.stdout.split():
                os.kill(int(pid), signal.SIGKILL)

    store = Store(tmp_path / "a")
    make(given, store, 1, kill, lambda run: None)
    assert killed
    undisturbed = made(given, tmp_path / "b", jobs=1)
    assert all(apart(store.get(run.key), other) == 0 for run, other in zip(given, undisturbed, strict=True))


def test_a_run_with_bad_input_stops_with_its_name(tmp_path, quick_workers):
    given = runs(1)
    bad = replace(
        given[0], config=replace(given[0].config, data=replace(given[0].config.data, options={"train_size": 10**9}))
    )
    with pytest.raises(UserError, match=r"seed 0: .*train_size"):
        make([bad], Store(tmp_path), 1, lambda run, part, note: None, lambda run: None)


@pytest.mark.slow
def test_a_killed_reproduce_goes_on_where_it_was(tmp_path):
    command = [sys.executable, "-m", "fedspeed", "reproduce", "table2", "--preset", "smoke", "--quiet", "--out"]
    process = subprocess.Popen([*command, str(tmp_path / "a")], start_new_session=True)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "a" / "runs").glob("*.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = dict(Store(tmp_path / "a").results())
    assert 0 < len(before) < len(Reproduction("smoke", tmp_path).runs(find_recipe("table2")))
    for folder in "ab":
        subprocess.run([*command, str(tmp_path / folder)], check=True)
    after, undisturbed = (Store(tmp_path / folder).results() for folder in "ab")
    assert {key: after[key] for key in before} == before, "made again: another time would be there"
    assert set(after) == set(undisturbed)
    assert all(apart(after[key], undisturbed[key]) == 0 for key in after)


# --- results as files ---


def numbered(*numbers: int, **more) -> list[dict]:
    return [{"key": f"k{i}", "measures": {}, "n": i / 7, **more} for i in numbers]


def test_new_results_are_single_files_until_they_are_packed_into_the_same_bytes(tmp_path):
    given = numbered(2, 0, 1)
    for order, folder in ((given, "a"), (given[::-1], "b")):
        store = Store(tmp_path / folder)
        for result in order:
            store.put(result)
            assert Store(tmp_path / folder).get(result["key"]) == result, "it is there at once, for everybody"
            store.pack() if result["key"] == "k0" else None
        store.pack()
        assert not (tmp_path / folder / "runs").exists()
        assert list(Store(tmp_path / folder).results().values()) == sorted(given, key=lambda result: result["key"])
    first, second = ((tmp_path / folder / "runs.jsonl.gz").read_bytes() for folder in "ab")
    assert first == second
    assert [json.loads(line) for line in gzip.decompress(first).splitlines()] == numbered(0, 1, 2)


def test_a_new_result_replaces_a_packed_one(tmp_path):
    Store(tmp_path).put(numbered(0)[0])
    Store(tmp_path).pack()
    measured = numbered(0, measures={"sharpness": 1.0})[0]
    assert Store(tmp_path).get("k0", ["sharpness"]) is None
    Store(tmp_path).put(measured)
    for _ in range(2):
        assert Store(tmp_path).get("k0", ["sharpness"]) == measured
        Store(tmp_path).pack()


def test_a_store_killed_while_it_packs_loses_nothing(tmp_path, monkeypatch):
    for result in numbered(0, 1):
        Store(tmp_path).put(result)
    store = Store(tmp_path)
    unlink = Path.unlink

    def dies(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".json":
            raise KeyboardInterrupt
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", dies)
        with pytest.raises(KeyboardInterrupt):
            store.pack()
    assert store.packed.exists()
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["k0.json", "k1.json"]
    assert list(Store(tmp_path).results().values()) == numbered(0, 1)
    Store(tmp_path).pack()
    assert list(Store(tmp_path).results().values()) == numbered(0, 1)


def put_and_pack(folder: Path, first: int) -> None:
    store = Store(folder)
    for i in range(first, 30, 3):
        store.put({"key": f"k{i}", "measures": {}, "n": i / 7})
        store.pack()


def test_processes_that_put_and_pack_at_once_lose_nothing(tmp_path):
    started = [CONTEXT.Process(target=put_and_pack, args=(tmp_path, i)) for i in range(3)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0, 0, 0]
    assert dict(Store(tmp_path).results()) == {result["key"]: result for result in numbered(*range(30))}


DAMAGES = {
    "cut": lambda data: data[:-9],
    "another": lambda data: b"no gzip",
    "no result": lambda data: gzip.compress(b"[1]\n"),
    "emptied": lambda data: b"",
    "no lines": lambda data: gzip.compress(b""),
    "deep": lambda data: gzip.compress(b"[" * 100_000 + b"\n"),
    "a key alone": lambda data: gzip.compress(b'{"key": "k0"}\n'),
    "no time": lambda data: gzip.compress(b'{"key": "k0", "measures": {}, "wall_seconds": "1"}\n'),
    "a byte": lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_named(tmp_path, damage):
    for result in numbered(0, 1, 2):
        Store(tmp_path).put(result)
    Store(tmp_path).pack()
    path = tmp_path / "runs.jsonl.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=r"runs.jsonl.gz: expected results of runs, found a damaged file .* delete it"):
        Store(tmp_path).results()
    Store(tmp_path).packed.unlink()
    assert not Store(tmp_path).results()


# --- the commit ---


def git(*words: str) -> str:
    return subprocess.run(["git", *words], check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_is_that_of_the_checkout_around_the_package(tmp_path):
    package = tmp_path / "fedspeed"
    package.mkdir()
    (package / "a.py").write_text("1")
    assert commit(package) == "", "installed: no checkout"
    commit.cache_clear()
    git("init", "-q", str(tmp_path))
    git("-C", str(tmp_path), "add", ".")
    git("-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "a")
    head = git("-C", str(tmp_path), "rev-parse", "HEAD")
    (tmp_path / "results.md").write_text("not of the package")
    assert commit(package) == head[:12]
    commit.cache_clear()
    (package / "a.py").write_text("2")
    assert commit(package) == f"{head[:12]}-dirty"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_a_result_says_which_commit_made_it(tmp_path):
    (result,) = made(runs(1), tmp_path)
    assert result["commit"].removesuffix("-dirty") == git("-C", str(ROOT), "rev-parse", "HEAD")[:12]


# --- the command ---


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    out = tmp_path_factory.mktemp("reproduce") / "smoke"
    with forked():
        assert main(["reproduce", "table7", "--preset", "smoke", "--quiet", "--out", str(out)]) == 0
    return out


def test_table7_smoke_renders_everything(smoke):
    page = (smoke / "table7.md").read_text()
    assert "85.7" in page
    assert "**Claim.**" in page
    assert "## Verdicts" in page
    assert all((smoke / f"table7.{kind}").stat().st_size for kind in ("csv", "tex", "png", "svg"))
    assert "table7.md" in (smoke / "README.md").read_text()


def test_what_is_done_is_not_made_again_and_renders_the_same_bytes(smoke, monkeypatch):
    before = {path.name: path.read_bytes() for path in smoke.iterdir() if path.is_file()}
    monkeypatch.setattr("fedspeed.reproduce.runs.make", None)
    assert main(["reproduce", "table7", "--preset", "smoke", "--quiet", "--out", str(smoke)]) == 0
    assert {path.name: path.read_bytes() for path in smoke.iterdir() if path.is_file()} == before


def test_how_far_a_run_made_again_is_from_the_stored_one():
    stored = {
        "status": "finished",
        "final": {"loss": 2.0},
        "rounds": {"round": [1, 2], "loss": [4.0, None], "seconds": [1]},
    }
    assert apart(stored, {**stored, "rounds": {**stored["rounds"], "seconds": [9]}}) == 0
    assert apart(stored, {**stored, "final": {"loss": 2.5}}) == 0.25
    assert apart(stored, {**stored, "rounds": {**stored["rounds"], "loss": [3.0, None]}}) == 0.25
    for other in ({"status": "diverged"}, {"final": {}}, {"rounds": {"round": [1, 2]}}, {"final": {"loss": math.nan}}):
        assert apart(stored, {**stored, **other}) == math.inf


def test_render_packs_what_a_stopped_command_left(smoke, tmp_path):
    for result in Store(smoke).results().values():
        Store(tmp_path).put(result)
    assert main(["reproduce", "table7", "--preset", "smoke", "--render", "--quiet", "--out", str(tmp_path)]) == 0
    assert not (tmp_path / "runs").exists()
    assert Store(tmp_path).packed.read_bytes() == Store(smoke).packed.read_bytes()


@pytest.mark.slow
def test_again_compares_and_finds_a_number_that_was_changed(smoke, capsys, tmp_path, quick_workers):
    given = ["reproduce", "table7", "--preset", "smoke", "--seeds", "1", "--out", str(smoke), "--again", "--quiet"]
    assert main(given) == 0
    assert "0 do not" in capsys.readouterr().out
    other = tmp_path / "other"
    for result in Store(smoke).results().values():
        Store(other).put({**result, "final": {**result["final"], "accuracy": result["final"]["accuracy"] + 1e-9}})
    assert main([str(other) if word == str(smoke) else word for word in given]) == 1
    told = capsys.readouterr().out
    assert "the numbers differ (stored by commit: " in told
    assert re.search(r"relatively by at most \d\.\de-09", told), "1e-9 of an accuracy"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["tabel7"], "did you mean 'table7'"),
        (["table7", "--preset", "cnnn"], "cnn"),
        (["table7", "--seeds", "0"], "--seeds"),
        (["table7", "--set", "rounds"], "KEY=VALUE"),
        (["table4-low", "--preset", "released-c10-100", "--set", "layers=auto"], "expected layers plain or compiled"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(given, told, capsys, tmp_path):
    assert main(["reproduce", *given, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert "Traceback" not in error


def test_layers_left_open_are_plain_and_keyed_so(tmp_path):
    """Another network in a preset that names no layers: one key, one arithmetic, whatever the machine has."""
    cell = find_recipe("table7").cells("smoke")[0]
    open_, plain = (
        Reproduction("smoke", tmp_path, overrides={"model": {"name": "resnet18_gn"}} | more)._keyed(cell, 0)
        for more in ({}, {"layers": "plain"})
    )
    assert open_ == plain
    assert open_[1].layers == "plain"


def test_a_damaged_new_result_is_named(capsys, tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "0123.json").write_text('{"key": "0123", "measures": {}, ')
    assert main(["reproduce", "table7", "--preset", "smoke", "--render", "--out", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert "0123.json: expected results of runs, found a damaged file" in told
    assert len(told.splitlines()) == 1


def test_pages_are_written_by_one_process_at_a_time(smoke, monkeypatch):
    """Two that write one file at once would take each other's half away."""
    fcntl = pytest.importorskip("fcntl")
    written = []

    def locked_write(path: Path, content: str) -> None:
        with (smoke / "work" / ".runs.lock").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        written.append(path.name)

    monkeypatch.setattr("fedspeed.reproduce.page.write", locked_write)
    assert main(["reproduce", "table7", "--preset", "smoke", "--render", "--quiet", "--out", str(smoke)]) == 0
    assert written == ["table7.md", "table7.csv", "table7.tex", "README.md"]


def test_the_terminal_shows_the_table_and_the_verdicts_and_no_markdown(smoke, capsys):
    assert main(["reproduce", "table7", "--preset", "smoke", "--render", "--out", str(smoke)]) == 0
    told = capsys.readouterr().out
    rows = [line.split()[0] for line in told.splitlines() if " +- " in line and "mean" not in line]
    assert rows == ["none", "prox", "prox+correction", "prox+perturbation", "all"]
    assert "mean +- standard deviation over seeds" in told
    assert "undecided: " in told
    assert f"page: {smoke / 'table7.md'}" in told
    assert "|" not in told
    assert "**" not in told


def test_pages_with_numbers_of_data_that_are_not_here_stay_as_they_are(tmp_path, monkeypatch, capsys):
    """Table 3 counts pictures of CIFAR-10: nothing of it is stored but the page."""
    shutil.copytree(STORED, tmp_path / "cnn", ignore=shutil.ignore_patterns("*.png", "*.svg", "work"))
    monkeypatch.setenv("FEDSPEED_CACHE", str(tmp_path / "empty"))
    before = {path.name: path.read_bytes() for path in (tmp_path / "cnn").iterdir()}
    for name in ("table3", "fig3"):
        assert main(["reproduce", name, "--preset", "cnn", "--out", str(tmp_path / "cnn")]) == 0
        told = capsys.readouterr().out
        assert f"{name}.md is left as it is: cifar10" in told
        assert "README.md is left as it is" in told
    assert {path.name: path.read_bytes() for path in (tmp_path / "cnn").iterdir() if path.name != "work"} == before


def test_the_list_names_every_recipe(capsys):
    assert main(["reproduce", "list"]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in recipes())


@pytest.mark.slow
def test_every_recipe_runs_at_the_smallest_scale(tmp_path, capsys):
    assert main(["reproduce", "all", "--preset", "smoke", "--quiet", "--out", str(tmp_path)]) == 0
    pages = {path.stem: path.read_text() for path in tmp_path.glob("*.md")}
    assert set(pages) == {"README", *(name for name, recipe in recipes().items() if "smoke" in recipe.presets)}
    for name, page in pages.items():
        assert "not run" not in page or name in ("README", "table3", "fig3"), name
