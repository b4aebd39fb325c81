"""The errata book: page and data are equal, every entry can be followed, the command prints it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from fedspeed.cli import main
from fedspeed.errata import errata, of_method, page
from fedspeed.methods import METHODS, WRAPPERS

ROOT = Path(__file__).parents[1]
KNOWN = METHODS | WRAPPERS


def test_the_page_is_made_from_the_data():
    """python -c 'from fedspeed.errata import page; print(page(), end="")' > docs/errata.md"""
    assert (ROOT / "docs" / "errata.md").read_text("utf-8") == page()


@pytest.mark.parametrize("entry", errata(), ids=lambda entry: f"{entry.method}: {entry.title}")
def test_every_entry_can_be_followed(entry):
    assert entry.method in KNOWN
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", entry.repository)
    assert re.fullmatch(r"[0-9a-f]{7,40}", entry.commit)
    assert re.fullmatch(r"[\w./-]+\.\w+", entry.file)
    assert entry.how in ("read", "run")
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


def test_the_command_prints_it(capsys):
    assert main(["methods", "fedspeed", "--errata"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"{len(of_method('fedspeed'))} entries" in out
    for entry in of_method("fedspeed"):
        assert " ".join(f"{entry.repository}@{entry.commit}, {entry.file}".split()) in out
    assert main(["methods", "--errata"]) == 0
    assert f"{len(errata())} entries" in capsys.readouterr().out
    assert main(["methods", "fedavg", "--errata"]) == 0
    assert "nothing is known to differ" in capsys.readouterr().out
    assert main(["methods", "fedsped", "--errata"]) == 2
    assert "did you mean 'fedspeed'" in capsys.readouterr().err
