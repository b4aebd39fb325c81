"""The one door to a run directory: nobody else spells its names, and what each reader makes of odd files."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

import fedspeed
from fedspeed.errors import UserError
from fedspeed.record import Record
from fedspeed.report.diff import differences
from fedspeed.report.run_files import RunFiles
from fedspeed.runs.directory import REPORTED, RunDir, line, runs_in
from fedspeed.utils.files import atomic, read_bytes, write

PACKAGE = Path(fedspeed.__file__).parent
SPELLED = re.compile(
    r"config\.toml|rounds\.jsonl|summary\.json|model\.safetensors|client_metrics\.bin|^states$|^checkpoints$|server@|log@"
)
ELSEWHERE = {  # what users read, and a name that is an option of a plan too
    "cli/run.py": "config.toml",
    "cli/check.py": "summary.json",
    "cli/options.py": "states",
    "runs/config_file.py": "states",
}


def spelled(path: Path) -> list[str]:
    """The strings of a module that name a file of a run directory; docstrings are left out."""
    tree = ast.parse(path.read_text("utf-8"))
    plain = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    return [text.value for text in texts if id(text) not in plain and SPELLED.search(text.value)]


MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "runs" / "directory.py"]


def test_nobody_else_spells_the_names():
    for path in MODULES:
        allowed = ELSEWHERE.get(path.relative_to(PACKAGE).as_posix())
        assert [text for text in spelled(path) if allowed is None or allowed not in text] == [], path


def test_the_scan_can_fail(tmp_path):
    (tmp_path / "m.py").write_text('"""Reads config.toml."""\nx = folder / "config.toml"\ny = f"server@{t}"\n')
    assert spelled(tmp_path / "m.py") == ["config.toml", "server@"]


def record(t: int) -> Record:
    return Record(t, [0, 1], 0.1, 1.0, 2.0, 0.5, 0.1, 0.2, 8, 8, 4.0, [], [], 0.1, 0.1)


@pytest.fixture
def run(tmp_path) -> RunDir:
    found = RunDir(tmp_path)
    found.write_tables({"format": 1, "rounds": 2, "method": {"name": "fedavg"}})
    found.write_records([record(1), record(2)])
    scores = {key: 0.5 if key.endswith("accuracy") else 2 for key in REPORTED}
    texts = {"data_fingerprint": "d", "split_fingerprint": "s"}
    rest = {"status": "finished", "seed": 0, "last_test_loss": 1.0, "last_train_loss": 1.0}
    found.write_summary({**scores, **texts, **rest})
    return found


def test_what_is_written_is_read(run):
    assert run.records() == [record(1), record(2)]
    assert run.records(1) == [record(1)]
    assert list(run.lines()) == [record(1).to_dict(), record(2).to_dict()]
    assert run.config()["method"] == {"name": "fedavg"}
    assert run.summary() == run.raw_summary() == run.finished(2) == RunFiles.read(run.path).summary
    assert run.finished(3) is None
    assert run.existing() == ["config.toml", "rounds.jsonl", "summary.json"]
    assert differences(run.path, run.path) == []
    run.remove_results()
    assert run.raw_summary() is None
    assert run.summary() == {}
    assert run.model_digest() is None


@pytest.mark.parametrize(
    ("rest", "lines", "records"),
    [
        (b"", 2, 2),
        (b'{"round": 3, "coh', 2, 2),  # cut off
        (b"\xff\xfe\n", 2, 2),
        (b"7\n", 2, 2),
        (b"[" * 100_000 + b"\n", 2, 2),
        (b'{"round": 3}\n', 3, 2),
        (line(record(4)).encode(), 3, 2),
        (b"7\n" + line(record(3)).encode(), 2, 2),  # nothing after what is no line
    ],
)
def test_rounds_up_to_the_first_that_is_none(run, rest, lines, records):
    with run.rounds_file.open("ab") as file:
        file.write(rest)
    assert len(list(run.lines())) == lines
    assert len(run.records()) == records
    with pytest.raises(UserError, match="expected rounds 1 to 3 of the checkpoint, found 2"):
        run.records(3)
    if rest and lines == 2:
        with pytest.raises(UserError, match="is not a finished run directory"):
            RunFiles.read(run.path)
    else:
        assert len(RunFiles.read(run.path).rounds) == lines


def test_a_run_that_has_not_begun(tmp_path):
    run = RunDir(tmp_path / "none")
    assert list(run.lines()) == run.records() == run.existing() == run.manifests() == []
    with pytest.raises(UserError, match=r"holds no run: expected a config.toml; start one"):
        run.config()
    with pytest.raises(UserError, match=r"rounds.jsonl cannot be read"):
        list(run.lines(whole=True))
    RunDir(tmp_path / "a").path.mkdir()
    RunDir(tmp_path / "a").write_tables({"rounds": 1})
    assert runs_in(tmp_path) == [tmp_path / "a"] == runs_in(tmp_path / "a")
    with pytest.raises(UserError, match="it holds several"):
        RunDir(tmp_path).config()


@pytest.mark.parametrize("text", ["", "[]", "7", "{", '{"a":' * 3000 + "1" + "}" * 3000, '{"a":' * 30 + "1" + "}" * 30])
def test_a_summary_that_cannot_be_read(run, text):
    run.summary_file.write_text(text)
    assert run.raw_summary() == {}
    assert run.finished() is None
    for read in (RunFiles.read, lambda path: differences(path, path)):
        with pytest.raises(UserError, match=r"summary.json .*can"):
            read(run.path)


def test_tables_nested_beyond_use_are_refused_by_every_reader(run):
    """`flat` and others are recursive."""
    run.config_file.write_text(".".join("a" * 3000) + " = 1\n")
    for read in (RunFiles.read, lambda path: differences(path, path)):
        with pytest.raises(UserError, match="tables inside each other"):
            read(run.path)


@pytest.mark.parametrize(
    ("key", "value"),
    [("rounds", "6"), ("seed", "x"), ("seed", None), ("last_accuracy", "0.5"), ("best_accuracy", [1]),
     ("last_accuracy", 10**400), ("seed", float("nan")), ("seconds", True)],
)  # fmt: skip
def test_a_summary_with_something_else_for_a_number(run, key, value):
    told = {**(run.raw_summary() or {}), key: value}
    run.write_summary(told)
    with pytest.raises(UserError, match=f"is not a finished run directory: it lacks a number for {key}"):
        RunFiles.read(run.path)


@pytest.mark.parametrize("tables", [{"method": 5}, {"rounds": 2}])
def test_a_config_without_a_method(run, tables):
    run.write_tables(tables)
    with pytest.raises(UserError, match="is not a finished run directory: it lacks the name of a method"):
        RunFiles.read(run.path)


@pytest.mark.parametrize("durable", [False, True])
def test_a_write_that_fails_leaves_what_was_there(tmp_path, durable):
    """Whatever stops it, also a Ctrl-C; a link under the temporary name is not followed."""
    path, precious = tmp_path / "a", tmp_path / "precious"
    precious.write_text("mine")
    write(path, "before", durable)
    (tmp_path / "a.part").symlink_to(precious)

    def interrupted() -> None:
        with atomic(path, durable) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "precious"]
    write(path, json.dumps([1]), durable)
    assert path.read_text() == "[1]"
    assert precious.read_text() == "mine"


def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path):
    path = tmp_path / "a"
    for mode in (0o600, 0o664):
        write(path, "a")
        path.chmod(mode)
        write(path, "b")
        assert path.stat().st_mode & 0o777 == mode


def test_a_folder_in_a_files_place_is_named(tmp_path):
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        read_bytes(tmp_path)


@pytest.mark.parametrize("header", [b"[1]", b"null", b'"a"', b"{", b"[" * 100_000])
def test_the_digest_of_a_model_that_is_none(run, header):
    """Whatever stands where names and shapes should; other files have other digests."""
    run.model_file.write_bytes(len(header).to_bytes(8, "little") + header + b"1")
    first = run.model_digest()
    run.model_file.write_bytes(len(header).to_bytes(8, "little") + header + b"2")
    assert None not in (first, run.model_digest())
    assert first != run.model_digest()
