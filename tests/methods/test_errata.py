"""The errata: the page has all entries, every entry can be followed, the command prints it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from fedspeed.cli import main
from fedspeed.methods import METHODS, WRAPPERS
from fedspeed.methods.errata import HOW, errata, of_method, page
from fedspeed.reproduce.recipes import find_recipe

ROOT = Path(__file__).parents[2]
KNOWN = METHODS | WRAPPERS


def test_the_page_has_every_entry():
    """The site builds it from the data; see docs/_ext/assemble.py."""
    text = page()
    for entry in errata():
        assert f"\n## {entry.method}\n" in text
        assert f"\n### {entry.title}\n" in text
        assert all(f"- **{about}**: {said}\n" in text for about, said in entry.rows)


@pytest.mark.parametrize("entry", errata(), ids=lambda entry: f"{entry.method}: {entry.title}")
def test_every_entry_can_be_followed(entry):
    assert entry.method in KNOWN
    assert entry.how in HOW
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", entry.repository) or entry.how == "paper"
    if entry.how in ("read", "run"):
        assert re.fullmatch(r"[0-9a-f]{7,40}", entry.commit)
        assert re.fullmatch(r"[\w./-]+\.\w+", entry.file)
    else:
        assert (entry.commit, entry.file) == ("", "")
        assert entry.how == "paper" or re.fullmatch(r"issue #\d+, 20\d\d-\d\d-\d\d", entry.at)
    assert all((entry.title, entry.paper, entry.code, entry.at, entry.here, entry.effect))
    assert (entry.how == "run") == bool(entry.command)
    for name, value in re.findall(r"`(\w+)=\\?\"(\w+)\"", entry.here) if entry.method in KNOWN else []:
        assert KNOWN[entry.method].from_fields({name: value})


def test_the_measured_numbers_are_those_that_are_stored():
    (entry,) = [entry for entry in errata() if entry.how == "run"]
    for preset, numbers in (
        ("mlp", ("28.04", "40.32", "41.03", "12.99 [10.11, 15.86]")),
        ("cnn", ("25.33", "43.09", "43.68")),
    ):
        stored = (ROOT / "results" / "iclr2023" / preset / "serverrule.md").read_text("utf-8")
        assert all(number in stored for number in numbers)
        assert f"{preset}/serverrule.md" in entry.effect
        for number in numbers[:3]:
            assert f"{float(number):.1f}%" in entry.effect


def test_what_one_number_per_tensor_does_to_fedlesam():
    sizes = [16 * 32, 32, 32 * 10, 10]

    def compared(seed: int) -> tuple[float, float]:
        update = np.random.default_rng(seed).normal(size=sum(sizes))
        code = np.repeat(-update[:4] / np.abs(update[:4]).sum(), sizes)
        paper = -update / np.linalg.norm(update)
        length = float(np.linalg.norm(code))
        return float(code @ paper) / length, length

    cosine, length = compared(0)
    seeds = np.array([compared(seed) for seed in range(1000)])
    (entry,) = of_method("fedlesam")
    assert f"cosine {cosine:.2f} with the paper's and {length:.1f} times its length" in entry.effect
    assert f"is {np.abs(seeds[:, 0]).mean():.2f} in the mean" in entry.effect
    assert f"{np.median(seeds[:, 1]):.1f} times in the median" in entry.effect


def test_what_the_authors_said_is_in_it_by_issue():
    said = {(entry.method, entry.at) for entry in errata() if entry.how == "said"}
    assert said == {
        ("fedspeed", "issue #6, 2023-10-19"),
        ("fedspeed", "issue #7, 2023-11-09"),
        ("fedspeed", "issue #17, 2025-04-01"),
        ("fedadmm", "issue #8, 2024-01-15"),
    }
    shown = [dict(entry.rows) for entry in errata() if entry.how == "said"]
    assert all("author" in row and "code" not in row for row in shown)
    assert "woodenchild95/FL-Simulator, issue #6, 2023-10-19" in shown[0]["author"]


def test_the_two_rows_of_table_4_that_disagree_with_table_1_are_a_swap():
    """A target is reached in Table 4 if and only if the accuracy of Table 1 is not below it."""
    highest = find_recipe("table1").values
    blocks = {
        "C10-500": ("CIFAR-10", 75, 82.5),
        "C100-500": ("CIFAR-100", 40, 50),
        "Tiny-500": ("TinyImagenet", 33, 40),
    }
    rows = ("FedAvg", "FedProx", "FedAdam", "SCAFFOLD", "FedCM", "FedDyn", "FedADMM", "FedSpeed")
    swap = {"FedDyn": "FedADMM", "FedADMM": "FedDyn"}

    def wrong(row: str, block: str, split: str, table: int, printed: str) -> bool:
        data, *targets = blocks[block]
        reached = not str(find_recipe(("table4-low", "table4")[table]).values[f"{printed}/{block} {split}"]).startswith(
            ">"
        )
        return reached != (highest[f"{row}/{data} {split}"] >= targets[table])

    cells = [
        (row, block, split, table)
        for row in rows
        for block in blocks
        for split in ("IID", "Dir-0.6")
        for table in (0, 1)
    ]
    assert len(cells) == 96
    found = [cell for cell in cells if wrong(*cell, cell[0])]
    assert found == [("FedDyn", "C10-500", "IID", 1), ("FedADMM", "C10-500", "IID", 1)]
    assert not any(wrong(row, "C10-500", "IID", table, swap[row]) for row in swap for table in (0, 1))
    (entry,) = [entry for entry in errata() if entry.how == "paper"]
    low, high = (find_recipe(name).values for name in ("table4-low", "table4"))
    place = "C10-500 IID"
    assert f"FedDyn {low[f'FedADMM/{place}']} and {high[f'FedADMM/{place}']} rounds" in entry.code
    assert f"FedADMM {low[f'FedDyn/{place}']} and never" in entry.code


def test_the_command_prints_it(capsys):
    assert main(["methods", "fedspeed", "--errata"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"{len(of_method('fedspeed'))} entries" in out
    for entry in of_method("fedspeed"):
        assert entry.place in out
    assert main(["methods", "--errata"]) == 0
    assert f"{len(errata())} entries" in capsys.readouterr().out
    assert main(["methods", "fedavg", "--errata"]) == 0
    assert "nothing is known to differ" in capsys.readouterr().out
    assert main(["methods", "fedsped", "--errata"]) == 2
    assert "did you mean 'fedspeed'" in capsys.readouterr().err
