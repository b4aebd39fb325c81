"""`fedspeed theory`: the call of the documentation, runs as source, JSON, figures and refusals."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from fedspeed.cli import main
from fedspeed.errors import UserError
from fedspeed.theory.setting import read_run


def call(text: str, capsys) -> str:
    assert main(["theory", *text.split()]) == 0
    return capsys.readouterr().out


def answer(text: str, capsys):
    return json.loads(call(text + " --json", capsys))


def test_the_documented_call(capsys):
    """`check` is the default action; what it prints fits a small terminal, and --verbose has the rest."""
    out = call("--eta 0.1 --lam 10 --K 50 --L 1", capsys)
    assert out == call("check --eta 0.1 --lam 10 --K 50 --L 1", capsys)
    assert out.startswith("no proof covers this setting: gamma 0.395, lam L 10\n")
    assert "meets `tracking`: --lam" in out
    assert len(out.splitlines()) <= 12
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 80
    assert "raise K to 100" not in out
    full = call("--eta 0.1 --lam 10 --K 50 --L 1 --verbose", capsys)
    assert "raise K to 100" in full
    assert len(full.splitlines()) > 30


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("--json errata", "errata --json"),
        ("--rounds 2,4 --m 2 --seeds 2 --json rate", "rate --rounds 2,4 --m 2 --seeds 2 --json"),
        ("--traceback errata", "errata"),
        ("--verbose --L 2 check", "check --verbose --L 2"),
    ],
)
def test_an_action_may_stand_behind_its_options(text, means, capsys):
    assert call(text, capsys) == call(means, capsys)


def test_a_run_called_like_an_action_is_a_run(capsys):
    assert main(["theory", "--from", "errata"]) == 2
    assert "cannot read errata" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--eta 0.001 --lam 0.1 --K 200 --L 1", "covered by `tracking`: "),
        ("--eta 0.001 --lam 0.1 --K 200 --L 9", "no proof covers this setting: "),
        ("--eta 0.0004 --lam 0.02 --K 200 --L 1", "covered by `corrected` and `tracking`: "),
    ],
)
def test_the_verdict_is_that_of_the_conditions(text, said, capsys):
    assert call(text, capsys).startswith(said)
    forms = answer(text, capsys)["forms"]
    assert [form for form in ("corrected", "tracking") if forms[form]["holds"]] == [
        form for form in ("corrected", "tracking") if f"`{form}`" in said
    ]


def test_the_suggested_setting_meets_its_form(capsys):
    out = call("--eta 0.1 --lam 10 --K 50 --L 1 --rho 0.1 --normalise", capsys)
    line = next(line for line in out.splitlines() if line.startswith("meets `tracking`"))
    options = line.split(": ", 1)[1].split(", bound")[0]
    found = answer(f"{options} --rho 0.1 --normalise --L 1", capsys)
    assert found["forms"]["tracking"]["holds"]


def test_json_has_slack_bound_and_terms(capsys):
    found = answer("--eta 0.001 --lam 0.1 --K 200 --L 1 --sigma-l 1 --sigma-g 1 --T 1000 --rho 0.02", capsys)
    tracking = found["forms"]["tracking"]
    assert tracking["proved"]
    assert tracking["holds"]
    assert all(c["slack"] >= 0 and c["holds"] for c in tracking["conditions"])
    assert math.isclose(tracking["bound"], math.fsum(tracking["terms"].values()))
    assert found["forms"]["corrected"]["bound"] is None  # kappa < 0: infinite, and JSON has no infinity
    assert not found["forms"]["printed"]["proved"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("--eta 11 --lam 10", "eta must be at most lam"),
        ("--K 0", "K must be in"),
        ("--L 0", "L must be in"),
        ("--L -2", "L must be in"),
        ("--rho -0.1", "rho must be in"),
        ("--K 2.5", "see `fedspeed theory check --help`"),
        ("--gap -1", "--gap must be >= 0"),
        ("chek", "did you mean 'check'"),
        ("check --out x", "unrecognized arguments: --out x; see `fedspeed theory check --help`"),
        ("rate --eta 0.1", "unrecognized arguments: --eta 0.1; see `fedspeed theory rate --help`"),
        ("errata --from x", "unrecognized arguments: --from x; see `fedspeed theory errata --help`"),
        ("rate --rounds 8", "two different"),
        ("rate --rounds 8,x", "--rounds: expected whole numbers"),
        ("rate --problem cubic", "logistic or quadratic"),
        ("rate --conditions consistent", "erratum 13"),
        ("--from nowhere", "cannot read"),
        ("--eta 0.1 rate", "unrecognized arguments: --eta 0.1; see `fedspeed theory rate --help`"),
        ("--L 1e200", "theory check: the numbers are too large to compute with"),
        ("rate --m 0", "m must be >= 1"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(text, said, capsys):
    assert main(["theory", *text.split()]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A default-like run, one made for the theorem, and one of another method."""
    folder = tmp_path_factory.mktemp("runs")
    common = "--data digits --split iid --clients 6 --rounds 1 --batch-size 60 --model linear --quiet"
    for name, extra in {
        "usual": "--active 2 --local-epochs 2",
        "full": "--active 6 --lr-decay 1 --weight-decay 0 --local-steps 5 --lr 0.005 --set method.lam=0.025 "
        "--set method.rho=0.01 --set method.normalise=false",
        "feddyn": "--active 6 --method feddyn --local-steps 4",
        "fedavg": "--active 6 --method fedavg --local-steps 4",
        "stopped": "--active 6 --local-steps 4 --rounds 9 --stop-at train_loss=99",
    }.items():
        assert main(["run", *common.split(), *extra.split(), "--out", str(folder / name)]) == 0
    return folder


def facts(path):
    return {fact.name: fact.holds for fact in read_run(path).facts}


def test_a_usual_run_is_read(runs, capsys):
    """K from the gradients that were counted: 2 epochs of 4 batches (239 or 240 samples)."""
    found = read_run(runs / "usual")
    assert found.fields["K"] == 8
    assert found.fields["normalise"]
    assert found.L is None
    assert facts(runs / "usual")["every client in every round"] is False
    assert facts(runs / "usual")["a constant rate"] is False
    out = call(f"--from {runs / 'usual'}", capsys)
    assert "active 2 of 6" in out
    assert "L: unknown" in out
    assert "every client in every round" in out
    assert "uniform averages" not in out
    assert "no proof covers this run" in call(f"--from {runs / 'usual'} --L 0.001", capsys)


def test_a_run_made_for_the_theorem_meets_it(runs, capsys):
    assert not [name for name, holds in facts(runs / "full").items() if holds is False]
    found = answer(f"--from {runs / 'full'} --L 1", capsys)
    assert found["setting"]["eta"] == 0.005
    assert "covered by" in call(f"--from {runs / 'full'} --L 1", capsys)
    assert found["setting"]["K"] == 5
    assert found["forms"]["tracking"]["holds"]
    failed = [c["name"] for c in found["forms"]["printed"]["conditions"] if not c["holds"]]
    assert failed == []


def test_inspection_gives_L_to_the_theory(runs, capsys):
    assert main(["inspect", str(runs / "full"), "--samples", "100"]) == 0
    capsys.readouterr()
    found = answer(f"--from {runs / 'full'}", capsys)
    assert found["L_known"]
    assert found["setting"]["L"] == json.loads((runs / "full" / "inspect.json").read_text())["eigenvalue"]


def test_other_methods(runs):
    assert read_run(runs / "feddyn").fields["lam"] == pytest.approx(10.0)
    assert read_run(runs / "feddyn").fields["rho"] == 0
    with pytest.raises(UserError, match="is a run of fedavg"):
        read_run(runs / "fedavg")


def test_T_is_what_a_stopped_run_has(runs):
    assert [read_run(runs / name).fields["T"] for name in ("usual", "stopped")] == [1, 1]


def test_unreadable_runs(tmp_path, runs):
    (tmp_path / "config.toml").write_text("lr = [")
    with pytest.raises(UserError, match="not valid TOML"):
        read_run(tmp_path)
    (tmp_path / "config.toml").write_text("lr = 0.1\n")
    with pytest.raises(UserError, match="lacks method"):
        read_run(tmp_path)
    (tmp_path / "config.toml").write_text((runs / "usual" / "config.toml").read_text())
    with pytest.raises(UserError, match="give --K"):
        read_run(tmp_path)
    assert read_run(tmp_path, K=7).fields["K"] == 7


def test_rate_draws_its_figure(tmp_path, capsys):
    text = f"rate --rounds 4,8 --seeds 2 --m 2 --conditions tracking,free --out {tmp_path}"
    found = answer(text, capsys)
    assert [r["conditions"] for r in found["rates"]] == ["tracking", "free"]
    assert found["rates"][1]["bound"] == []
    assert (tmp_path / "rate-logistic-1.png").read_bytes()[:4] == b"\x89PNG"
    assert "slope" in call(text + " --problem quadratic --distance 0", capsys)


def test_errata_are_numbered(capsys):
    assert list(answer("errata", capsys)) == [str(n) for n in range(1, 19)]
    assert call("errata", capsys)


def test_theory_needs_no_torch():
    code = (
        "import sys, fedspeed.theory as th, fedspeed.cli.theory, fedspeed.cli.check;"
        "assert 'numpy' not in sys.modules;"
        "[getattr(th, name) for name in th.__all__];"
        "th.rate(th.random_logistic(m=2, d=2), 'tracking', [2, 4], seeds=1);"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
