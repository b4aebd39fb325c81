"""The command line: one-line errors, help, JSON, quiet, live and plain progress, and what it does not import."""

from __future__ import annotations

import ast
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import tomli_w
from quick_runs import MODULE, QUICK

from fedspeed import Config, FedAvg, __version__, cli
from fedspeed.cli import ANSWERS, COMMANDS, GROUPS, MODULES, main, options

pytestmark = pytest.mark.usefixtures("own_folder")


def refused(capsys, *argv: str) -> str:
    """The one line that a bad command prints."""
    code = main(list(argv))
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.startswith("fedspeed: error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err


BAD = [
    ("run --method fedsped", "unknown method 'fedsped'; did you mean 'fedspeed'?"),
    ("run --model mpl", "unknown model 'mpl'; did you mean 'mlp'?"),
    ("run --data digit", "unknown data set 'digit'; did you mean 'digits'?"),
    ("run --split dirichlett:1", "unknown split 'dirichlett'; did you mean 'dirichlet'?"),
    ("run --set method.roh=1", "unknown field of FedSpeed 'roh'; did you mean 'rho'?"),
    ("run --set metod.rho=1", "unknown --set target 'metod'; did you mean 'method'?"),
    ("run --set roh=1", "unknown field in --set 'roh'; did you mean 'rho'?"),
    ("run --set lr=fast", "lr must be a number, got 'fast'"),
    ("run --set method.rho", "--set: expected FIELD=VALUE such as lr=0.5"),
    ("compare fedavg fedspeed --set rho=0.3", "--set: compare has several methods, got 'rho=0.3'"),
    ("run nosuch", "run nosuch: expected a config file (.toml) or a method, found neither"),
    ("run fedavgg", "found neither; did you mean fedavg?"),
    ("run fedavg --method fedprox", "run: expected one method, found fedavg and --method fedprox; leave one out"),
    (
        "compare fedavg,fedprox",
        "method 'fedavg,fedprox': expected one method, found a comma; separate methods by blanks",
    ),
    ("run --split noniid", "unknown split 'noniid'; did you mean 'dirichlet'?"),
    ("run --model resnet", "unknown model 'resnet'; did you mean 'resnet18_gn'?"),
    ("run --active 0.1", "--active: expected a whole number, got '0.1'; it is a count, not a share"),
    ("run --method fedspeed+topkk:0.1", "unknown method or wrapper 'topkk'; did you mean 'topk'?"),
    ("data show digits --seed -1", "--seed: expected a whole number from 0 to 1e18, got '-1'"),
    ("theory rate --seed 1e5", "--seed: expected a whole number, got '1e5'"),
    ("theory rate --seed 9999999999999999999", "--seed: expected a whole number from 0 to 1e18"),
    ("run --ray-gpus 1", "--ray-gpus: expected --backend ray beside it; add --backend ray"),
    ("run --weight_decay 0.1", "unrecognized arguments: --weight_decay; did you mean --weight-decay?"),
    ("run --local-ep 3", "did you mean --local-epochs?"),
    ("run --lr-schedule linear", "did you mean 'polynomial'?"),
    ("sweep --grid roh=1,2", "unknown field 'roh'; did you mean 'rho'?"),
    ("eval", "invalid choice: 'eval'; expected one that its help lists; see `fedspeed --help`"),
    ("train", "invalid choice: 'train'; did you mean 'run'?"),
    ("list", "invalid choice: 'list'; did you mean 'runs'?"),
    ("runs nowhere", "nowhere: expected run directories below it, found none; `fedspeed run` makes one"),
    *((f"run --{name.replace('_', '-')} 1", answer) for name, answer in ANSWERS.items()),
    ("run --set method.rho=", "rho must be a number, got ''"),
    ("run --set method.rho=big", "rho must be a number, got 'big'"),
    ("run --set model.hidden=32", "hidden must be a list of whole numbers"),
    ("run --set model.seed=32", "model.seed is not an option of the model"),
    ("run --set data.clients=3", "data.clients is not an option of the data"),
    ("run --lr -0.1", "lr must be in (0, inf), got -0.1"),
    ("run --lr nan", "lr must be in (0, inf), got nan"),
    ("run --lr 1e999", "lr must be in (0, inf), got inf"),
    ("run --lr fast", "--lr: expected a number, got 'fast'"),
    ("run --weight-decay -1", "weight_decay must be in [0, inf), got -1.0"),
    ("run --rounds 1.5", "--rounds: expected a whole number, got '1.5'"),
    ("run --rounds 0", "rounds must be in [1, 1e7], got 0"),
    ("run --seed 99999999999999999999", "seed must be in [0, 1e18]"),
    ("run --cohort some", "unknown cohort 'some'"),
    ("run --targets high", "--targets: expected numbers such as 0.8,0.85, got 'high'"),
    ("run --targets 85", "targets must be accuracies in (0, 1), got 85.0"),
    ("run --clients 10 --active 11", "active must be at most the number of clients, got 11 active of 10"),
    ("run --clients 2000", "2000 clients but only 1437 samples"),
    ("run --set method.lam=0", "lam must be in (0, inf), got 0.0"),
    ("run --set method.prox=false", "correction=true needs prox=true, got prox=false"),
    ("run --set method.lam=0.05", "lr must be < 2"),
    ("run --set method.lam=0.01", "lr must be < 2"),
    ("run --model cnn --data synthetic", "found inputs of shape (60,); use linear or mlp"),
    ("run --model lenet", "expected pictures of at least 16x16, found 8x8"),
    ("run --local-epochs 2 --local-steps 3", "--local-epochs and --local-steps: expected one of them, got both"),
    ("run --device cuda:99", "device 'cuda:99' cannot be used here"),
    ("run none.toml", "cannot read none.toml: No such file or directory; expected a TOML file"),
    ("run .", "cannot read .: Is a directory; expected a TOML file"),
    ("run empty.toml", "empty.toml is empty; expected keys such as rounds = 100"),
    ("run broken.toml", "broken.toml is not valid TOML"),
    ("run binary.toml", "binary.toml is not valid TOML"),
    ("run key.toml", "unknown config key 'round'; did you mean 'rounds'?"),
    ("run type.toml", "rounds must be a whole number, got 'three'"),
    ("run number.toml --set data.x=1", "data must be a name or a table, got 5; correct it in number.toml"),
    ("run --out held", "held already holds a run; choose another --out, or --overwrite it"),
    ("run --out empty.toml", "cannot make the output folder empty.toml"),
    ("run --rnds 3", "unrecognized arguments: --rnds; did you mean --rounds? see `fedspeed run --help`"),
    ("run --xyzzy", "unrecognized arguments: --xyzzy; see `fedspeed run --help`"),
    ("run --learning-rate 0.1", "--learning-rate; did you mean --lr? see"),
    ("run --epochs=3", "did you mean --local-epochs? see"),
    ("run --K 5", "did you mean --local-steps? see"),
    ("run --num-clients 5", "did you mean --clients? see"),
    ("run --participation 5", "did you mean --active? see"),
    ("run --batch 5", "did you mean --batch-size? see"),
    ("run --output x", "did you mean --out? see"),
    ("run --rho 0.1", "--rho; it is a field of a method: --set rho=VALUE; see"),
    ("run --momentum 0.9", "it is a local optimiser: --local-optimizer momentum:0.9; see"),
    ("run --device gpu", "error: device: expected auto, cpu, cuda, cuda:N or mps, found 'gpu'\n"),
    (
        "compare fedavg --seed 3",
        "unrecognized arguments: --seed 3; did you mean --seeds? see `fedspeed compare --help`",
    ),
    ("verify held --rounds 3", "unrecognized arguments: --rounds 3; see `fedspeed verify --help`"),
    ("data show digits --cliens 3", "did you mean --clients? see `fedspeed data show --help`"),
    ("rum", "invalid choice: 'rum'"),
    ("rum", "did you mean 'run'? see `fedspeed --help`"),
    ("data lst", "did you mean 'list'? see `fedspeed data --help`"),
    ("methods fedsped", "unknown method 'fedsped'; did you mean 'fedspeed'?"),
    ("compare", "the following arguments are required: METHOD; see `fedspeed compare --help`"),
    ("compare fedsped", "unknown method 'fedsped'; did you mean 'fedspeed'?"),
    ("compare fedspeed:rho", "expected NAME:field=value,..., found 'rho'"),
    ("compare fedspeed:roh=1", "unknown field of FedSpeed 'roh'; did you mean 'rho'?"),
    ("compare fedavg fedavg", "expected different methods and seeds, got fedavg-s0 twice"),
    ("compare fedavg --seeds 1,1", "expected different methods and seeds, got fedavg-s1 twice"),
    ("compare fedavg --seeds none", "--seeds: expected how many, such as 3, or which, such as 5,7; got 'none'"),
    ("compare fedavg --seeds 0", "--seeds: expected how many"),
    ("compare fedavg --seeds=-1", "--seeds: expected how many"),
    ("compare fedspeed --set method.rho=0", "compare has several methods, got 'method.rho=0'; write fedspeed:rho=0.05"),
    ("compare fedavg --paper-decay --lr-decay 0.9", "--paper-decay and --lr-decay: expected one of them, got both"),
    ("compare fedavg --seeds 2 --out compared", "compared/fedavg-s1 holds a run of another config (it differs in"),
    ("compare fedavg --jobs -1", "--jobs: expected a whole number >= 0, got -1"),
    ("compare fedavg fedspeed --baseline fedsped", "--baseline: expected one of fedavg, fedspeed, got 'fedsped'"),
    ("compare nowhere/runs", "there is no folder nowhere/runs; expected methods, or folders of runs"),
    ("compare compared fedavg", "expected methods to run or folders of runs, got both (fedavg, compared)"),
    ("compare compared", "compared: expected finished runs, found none; compared/fedavg-s1: not finished"),
    ("compare compared --targets 85", "targets must be accuracies in (0, 1), got 85.0; 0.85 is 85%"),
    ("report compared --targets=-1", "targets must be accuracies in (0, 1), got -1.0; 0.85 is 85%"),
    ("compare compared --lr 1", "with folders nothing is run, so --lr has no use"),
    ("compare compared --seeds 3", "with folders nothing is run, so --seeds has no use"),
]


@pytest.mark.parametrize("command", ["data show nothing", "theory --K 0", "theory rate --problem cubic"])
def test_every_action_takes_traceback(capsys, command):
    assert main([*command.split(), "--traceback"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("Traceback")
    assert "unrecognized" not in err


@pytest.mark.parametrize(("command", "message"), BAD, ids=[command for command, _ in BAD])
def test_bad_input_is_one_line_and_code_2(capsys, command, message):
    Path("empty.toml").write_text("")
    Path("broken.toml").write_text("rounds =")
    Path("binary.toml").write_bytes(b"\xff\x00")
    Path("key.toml").write_text("round = 3")
    Path("type.toml").write_text('rounds = "three"')
    Path("number.toml").write_text("data = 5")
    for held in ("held", "compared/fedavg-s1"):
        Path(held).mkdir(parents=True)
        Path(held, "config.toml").write_text(Config().to_toml())
    before = sorted(str(path) for path in Path().rglob("*"))
    assert message in refused(capsys, *command.split())
    assert sorted(str(path) for path in Path().rglob("*")) == before  # nothing was made


@pytest.mark.parametrize("command", ["run --method fedsped", "run --model cnn --data synthetic"])
def test_bad_input_in_a_real_process(command):
    done = subprocess.run([*MODULE, *command.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(r"fedspeed: error: .+\n", done.stderr)


def test_a_python_without_the_dependencies_says_what_to_install():
    """It is the first thing that a checkout shows somebody who did not install it; -S leaves out installed packages."""
    ran = subprocess.run(
        [sys.executable, "-S", "-m", "fedspeed", "run", "--rounds", "1"],
        cwd=Path(__file__).parents[2], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 3
    assert re.fullmatch(r"fedspeed: error: \w+ is not installed for .*; run `make setup`, or .*\n", ran.stderr)


def test_the_script_is_installed():
    script = Path(sys.executable).with_name("fedspeed")
    assert subprocess.run([script, "--version"], capture_output=True, text=True, check=True).stdout == (
        f"fedspeed {__version__}\n"
    )


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=str)
def test_help_teaches(capsys, command):
    with pytest.raises(SystemExit) as left:
        main([*command, "--help"])
    out, err = capsys.readouterr()
    assert (left.value.code, err) == (0, "")
    assert out.startswith("usage: fedspeed")
    assert "examples:" in out or command == ["data"]  # whose own commands have them


def test_help_shows_every_option_of_a_config(capsys):
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    shown = capsys.readouterr().out
    for name in Config().fields().keys() - {"until"}:  # a table that `fedspeed fork` writes
        assert f"--{name.replace('_', '-')}" in shown
    for group in options.GROUPS:
        assert f"{group}:" in shown
    assert re.search(r"--clip X\s.*default 0\.0", shown)
    assert re.search(r"--rounds N\s.*default 100", shown)


def test_no_command_prints_the_help(capsys):
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("usage: fedspeed")


@pytest.mark.parametrize(
    "code",
    [
        "import fedspeed",
        "import fedspeed.cli",
        "import fedspeed.runs.launch",
        "from fedspeed import FedSpeed; FedSpeed()",
    ],
)
def test_importing_does_not_import_torch(code):
    check = f"{code}; import sys; assert 'torch' not in sys.modules; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)


@pytest.mark.parametrize("command", ["--help", "run --help", "compare --help", "--version", "run --lr -1"])
def test_what_needs_no_torch_does_not_import_it(command):
    code = f"""
import sys
from fedspeed.cli import main
from fedspeed.runs.launch import run_config
try:
    main({command.split()!r})
except SystemExit:
    pass
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


def test_a_run_prints_plain_lines_when_nobody_watches(capsys):
    assert main(["run", *QUICK, "--out", "a"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "\x1b" not in out
    for t in (1, 2, 3):
        assert re.search(
            rf"^fedspeed: round {t}/3  accuracy \d+\.\d\d%  test loss \d\.\d{{4}}  \d+\.\d\d s$", out, re.M
        )
    assert re.search(r"^fedspeed: accuracy last \d+\.\d\d%, best .*mean of last 5", out, re.M)
    assert "run directory: a\n" in out
    assert "next: fedspeed compare" in out


def test_a_long_run_prints_few_lines(capsys):
    assert main(["run", *QUICK, "--rounds", "100", "--out", "a", "--eval-every", "50"]) == 0
    assert 15 <= capsys.readouterr().out.count(": round ") <= 25


def test_quiet_prints_nothing(capsys):
    assert main(["run", *QUICK, "--quiet", "--out", "a"]) == 0
    assert main(["compare", "fedavg", *QUICK, "--seeds", "1", "--quiet", "--out", "b"]) == 0
    assert capsys.readouterr() == ("", "")


def test_json_is_json_and_nothing_else(capsys):
    assert main(["run", *QUICK, "--json", "--out", "a", "--targets", "0.05,0.999"]) == 0
    printed = json.loads(capsys.readouterr().out)
    written = json.loads(Path("a/summary.json").read_text())
    assert written.pop("seal")
    assert printed == {"out": "a", **written}
    assert printed["targets"]["0.999"] is None


def test_lr_above_lam_warns_once_and_runs(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main(["run", *QUICK, "--set", "method.lam=0.09", "--quiet", "--out", "a"]) == 0
    assert re.fullmatch(r"fedspeed: warning: FedSpeed: lr 0\.1 > .*0\.09.*\n", capsys.readouterr().err)


def test_a_file_with_options_on_top(capsys):
    Path("run.toml").write_text(Config.from_dict({"method": {"name": "fedspeed", "rho": 0.3}, "local_steps": 7,
                                                  "data": {"name": "synthetic", "alpha": 0.5}}).to_toml())  # fmt: skip

    def given(*argv: str) -> Config:
        Path("x").mkdir(exist_ok=True)
        assert main(["run", "run.toml", *QUICK, "--quiet", "--out", "x", "--overwrite", *argv]) == 0
        return Config.from_toml(Path("x/config.toml"))

    same = given()
    assert (same.method.rho, same.data.options, same.rounds) == (0.3, {"alpha": 0.5}, 3)
    assert given("--set", "method.rho=0.1").method.rho == 0.1
    assert given("--method", "fedspeed").method.rho == 0.3
    assert given("--method", "fedavg", "--set", "method.eta_g=0.5").method == FedAvg(eta_g=0.5)
    assert given("--data", "digits").data.options == {}
    epochs = [a for a in QUICK if a not in ("--local-steps", "1")]
    assert main(["run", "run.toml", *epochs, "--local-epochs", "1", "--quiet", "--out", "y"]) == 0
    assert Config.from_toml(Path("y/config.toml")).local_steps == 0  # the option wins over the file
    assert capsys.readouterr().err == ""


def test_a_run_can_be_repeated_from_its_folder():
    assert main(["run", *QUICK, "--quiet", "--out", "a"]) == 0
    assert main(["run", "a/config.toml", "--quiet", "--out", "again"]) == 0
    assert Path("a/model.safetensors").read_bytes() == Path("again/model.safetensors").read_bytes()
    assert main(["run", *QUICK, "--quiet", "--out", "a", "--overwrite", "--rounds", "1"]) == 0
    assert len(Path("a/rounds.jsonl").read_text().splitlines()) == 1


def test_without_out_a_new_folder_under_runs():
    assert main(["run", *QUICK, "--quiet"]) == 0
    (folder,) = Path("runs").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}-fedspeed-digits-s0", folder.name)


def test_names_are_printed_as_they_are(capsys):
    """No markup, no emoji: a folder may be called [red] or :smile:."""
    assert main(["run", *QUICK, "--out", "[red] :smile:"]) == 0
    assert "run directory: [red] :smile:\n" in capsys.readouterr().out


def test_a_run_that_diverges_ends_with_code_1_and_one_line(capsys):
    assert main(["run", *QUICK, "--method", "fedavg", "--lr", "1e30", "--local-steps", "9", "--out", "a"]) == 1
    err = capsys.readouterr().err
    assert re.fullmatch(r"fedspeed: FedAvg: client \d+ diverged \(NaN or Inf\) in round 1; try a lower --lr .*\n", err)
    assert json.loads(Path("a/summary.json").read_text())["status"].startswith("diverged")


def test_an_interrupted_run_ends_with_130(capsys, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedspeed.cli.run.run_config", interrupt)
    assert main(["run", *QUICK]) == 130
    err = capsys.readouterr().err
    assert err == "fedspeed: interrupted; what was done is kept, `fedspeed resume RUN` continues it\n"


@pytest.mark.parametrize("columns", [80, 120])
def test_the_lists_cut_no_name(columns, capsys, monkeypatch):
    """In a terminal of 80 columns nothing is wider, and every field of every method stands there in full."""
    from fedspeed.methods import METHODS

    monkeypatch.setattr("fedspeed.cli._width", lambda: columns)
    assert main(["methods"]) == 0
    out = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in out.splitlines()) <= columns
    for cls in METHODS.values():
        for key, value in cls().fields().items():
            assert f"{key}={value}" in out
    assert "…" not in out


def test_a_full_disk_is_one_line(capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedspeed.cli.run.run_config", full)
    assert "No space left on device" in refused(capsys, "run", *QUICK)


@pytest.mark.parametrize(("waited", "told"), [(0.4, False), (0.6, True)])
def test_waiting_for_checkpoints_is_told_where_it_counts(capsys, monkeypatch, waited, told):
    """Above 5% of 10 seconds."""
    from fedspeed.runs.launch import run_config as real

    def measured(*args, **kwargs):
        times = {"seconds": 9.0, "eval_seconds": 1.0 - waited, "checkpoint_seconds": waited}
        return real(*args, **kwargs) | times

    monkeypatch.setattr("fedspeed.cli.run.run_config", measured)
    assert main(["run", *QUICK, "--out", "a"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (f"+ {waited} s waiting for checkpoints" in out) == told


def test_control_c_keeps_what_was_done():
    argv = [*MODULE, "run", *QUICK, "--rounds", "1000000", "--out", "a", "--quiet"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        rounds, deadline = Path("a/rounds.jsonl"), time.monotonic() + 60
        while not (rounds.exists() and rounds.read_text().count("\n") > 3):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (
        130,
        "",
        "fedspeed: interrupted; what was done is kept, `fedspeed resume RUN` continues it\n",
    )
    summary = json.loads(Path("a/summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert summary["rounds"] == len(rounds.read_text().splitlines())


def in_a_terminal(argv: list[str], size: tuple[int, int]) -> tuple[int, str]:
    """Exit code and output of a process whose terminal has so many rows and columns."""
    import fcntl
    import struct
    import termios

    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    with subprocess.Popen(
        argv, stdin=child, stdout=child, stderr=child, env={**environment, "TERM": "xterm"}, close_fds=True
    ) as process:
        os.close(child)
        output = b""
        while True:
            ready, _, _ = select.select([parent], [], [], 60)
            assert ready
            try:
                chunk = os.read(parent, 65536)
            except OSError:  # the other side is closed
                break
            if not chunk:
                break
            output += chunk
    os.close(parent)
    return process.returncode, output.decode()


def test_a_live_display_in_a_terminal():
    code, shown = in_a_terminal([*MODULE, "run", *QUICK, "--out", "a"], (24, 100))
    assert code == 0, shown
    assert "\x1b[" in shown  # it draws
    assert "3/3" in shown
    assert re.search(r"accuracy \d+\.\d\d%", shown)
    assert "Traceback" not in shown
    assert not re.search(r"round \d/3", shown)  # the bar replaces the plain lines


def test_a_comparison_in_a_terminal_of_unknown_size():
    code, shown = in_a_terminal([*MODULE, "compare", "fedavg", *QUICK, "--seeds", "1", "--out", "c"], (0, 0))
    assert code == 0, shown
    assert "Traceback" not in shown
    code, shown = in_a_terminal([*MODULE, "run", "--help"], (0, 0))
    assert code == 0
    assert "usage: fedspeed run" in shown


@pytest.mark.parametrize("argv", [["methods"], ["models"], ["methods", "fedspeed"], ["methods", "fedavg"]], ids=str)
def test_lists(capsys, argv):
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    if argv == ["methods"]:
        line = next(line for line in out.splitlines() if line.startswith("fedspeed "))
        assert re.search(r"x, H +h +1 / 1 +2 +0\.9995", line)  # server, client, down, up, gradients, decay
    elif argv[0] == "models":
        assert "widths=[16, 32, 64]" in out
        words = " ".join(next(line for line in out.splitlines() if "resnet18_gn" in line).split())
        assert "groups=2, init=usual, trim=false, 11,181,642, 4,234,826 live" in words  # keep_norm=false follows
        assert "145,834" in next(line for line in out.splitlines() if line.startswith("cnn "))
    else:
        assert "Reference:" in out
        assert "(0, inf)" in out


def test_every_method_can_be_explained(capsys):
    from fedspeed.methods import METHODS, WRAPPERS

    for name in METHODS | WRAPPERS:
        assert main(["methods", name]) == 0
        out = capsys.readouterr().out
        assert "Reference:" in out
        assert "server keeps x" in out


def test_parsing_of_set():
    assert options.parse_set("method.rho=0.05") == ("method", "rho", 0.05)
    assert options.parse_set("model.hidden=[32,16]") == ("model", "hidden", [32, 16])
    assert options.parse_set("method.server=active") == ("method", "server", "active")
    assert options.parse_set("method.prox=false") == ("method", "prox", False)
    assert options.parse_set("data.path=a=b.c") == ("data", "path", "a=b.c")


def test_a_reader_that_stops_reading_is_no_error():
    argv = " ".join([f"'{sys.executable}'", "-c", "'from fedspeed.cli import main; main()'", "methods fedspeed"])
    done = subprocess.run(f"{argv} | head -1", shell=True, capture_output=True, text=True, check=True)
    assert "Traceback" not in done.stderr


def imported(*words: str) -> set[str]:
    """The modules that a command line has loaded when it ends."""
    code = f"import sys\nfrom fedspeed.cli import main\ntry: main({list(words)!r})\nfinally: print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return set(ast.literal_eval(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("words", [["--version"], ["--help"], []], ids=str)
def test_neither_numpy_nor_a_command_is_imported_before_one_is_chosen(words):
    found = imported(*words)
    assert not found & {"numpy", "torch", "rich"}
    assert {name for name in found if name.startswith("fedspeed.cli")} == {"fedspeed.cli", "fedspeed.cli.output"}


SLOW = {
    *("sklearn", "scipy", "pandas", "matplotlib", "PIL", "ray", "flwr", "tensorboard", "urllib.request"),
    *("sympy", "torch._dynamo", "torch._inductor", "torch.testing", "torch.utils.flop_counter", "numpy.ma"),
    *("fedspeed.backends.process", "fedspeed.theory", "fedspeed.flower", "fedspeed.reproduce", "fedspeed.report.page"),
}
"""Modules that a plain run has no use for; those that torch itself imports are not counted."""


def test_a_plain_run_imports_nothing_that_it_does_not_use(tmp_path):
    code = "import sys, torch; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    with_torch = set(ast.literal_eval(done.stdout))
    found = imported("run", "--rounds", "1", "--clients", "8", "--active", "4", "--quiet", "--out", str(tmp_path / "a"))
    assert {"torch", "fedspeed.backends.serial"} <= found
    assert not (found - with_torch) & SLOW


def test_a_report_imports_numpy_only_for_scores_of_clients(tmp_path):
    given = ["run", "--rounds", "1", "--clients", "8", "--active", "4", "--quiet", "--out"]
    for name, more in (("plain", []), ("scored", ["--client-metrics", "every=1"])):
        assert main([*given, str(tmp_path / name), *more]) == 0
        found = imported("report", str(tmp_path / name), "--out", str(tmp_path / "page.html"))
        assert "torch" not in found
        assert ("numpy" in found) == (name == "scored")


def test_only_the_module_of_the_chosen_command_is_imported():
    found = {name for name in imported("diff", "--help") if name.startswith("fedspeed.cli")}
    assert found == {"fedspeed.cli", "fedspeed.cli.output", "fedspeed.cli.look"}


def test_help_shows_five_groups_with_all_commands(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert list(GROUPS) == ["run", "compare", "look", "paper", "scale"]
    assert re.findall(r"^(\w+):$", shown, re.MULTILINE) == [*GROUPS, "options", "examples"]
    parts = re.split(r"^(\w+):$", shown, flags=re.MULTILINE)
    for group, part in zip(parts[1::2], parts[2::2], strict=True):
        if group in GROUPS:
            assert re.findall(r"^  (\w+) +(.+)$", part, re.MULTILINE) == list(GROUPS[group].items())
    files = {path.stem for path in Path(cli.__file__).parent.glob("*.py")} | set(MODULES)
    assert set(COMMANDS) < files  # every command has a module
    assert not {about.split()[0] for about in COMMANDS.values()} & {"what", "a", "an", "the", "how", "which", "whether"}


def test_methods_may_be_written_as_in_their_papers_and_without_an_option(capsys):
    for words in (["--method", "FedAvg"], ["FedAvg"], ["fedavg"]):
        assert main(["run", *words, *QUICK, "--out", "-".join(["r", *words])]) == 0
    found = [options.read_tables(path) for path in sorted(Path().glob("r-*/config.toml"))]
    assert len(found) == 3
    assert all(tables["method"] == {"name": "fedavg", "eta_g": 1.0} for tables in found)
    assert main(["run", "FedSpeed:rho=0.2+TopK:0.1", *QUICK, "--out", "wrapped", "--set", "lr=0.05"]) == 0
    wrapped = options.read_tables(Path("wrapped/config.toml"))
    assert wrapped["method"]["name"] == "topk"
    assert wrapped["method"]["base"]["rho"] == 0.2
    assert wrapped["lr"] == 0.05


OWN = """
from fedspeed.methods import FedAvg


class Mine(FedAvg):
    pass


def helper():
    return 1
"""


def test_a_file_without_a_class_is_answered_with_those_it_has(capsys):
    Path("mine.py").write_text(OWN)
    says = refused(capsys, "run", "--method", "mine.py")
    assert "expected path/to/file.py:Class; which class of mine.py is it? It has Mine, helper" in says


@pytest.mark.filterwarnings("default")
def test_a_schedule_that_changes_nothing_is_noticed(capsys):
    assert main(["run", "fedavg", *QUICK, "--out", "idle", "--lr-schedule", "step:30,60:0.1"]) == 0
    assert "lr_schedule: step:30,60:0.1 changes nothing within 3 rounds" in capsys.readouterr().err
    assert main(["run", "fedavg", *QUICK, "--out", "busy", "--lr-schedule", "step:2:0.1"]) == 0
    assert "changes nothing" not in capsys.readouterr().err


def test_runs_are_listed_newest_first_damaged_ones_too(capsys):
    Path("mine.py").write_text(OWN)
    assert main(["run", "fedavg", *QUICK, "--out", "runs/a"]) == 0
    assert main(["run", "mine.py:Mine", *QUICK, "--out", "own/x"]) == 0
    assert main(["runs", "own"]) == 0
    assert "mine.py:Mine" in capsys.readouterr().out
    assert main(["run", "scaffold", *QUICK, "--out", "runs/deep/b"]) == 0
    for file in Path("runs/a").iterdir():
        os.utime(file, (1e9, 1e9))
    Path("runs/c").mkdir()
    Path("runs/c/config.toml").write_text("method = 3\n")
    capsys.readouterr()
    assert main(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "method", "data", "rounds", "score", "state", "written"]
    assert sorted(line.split()[0] for line in lines[1:3]) == ["runs/c", "runs/deep/b"]
    assert lines[3].split()[:3] == ["runs/a", "fedavg", "digits"]
    assert "3/3" in lines[3]
    assert "finished" in lines[3]
    assert any("damaged" in line for line in lines)


@pytest.mark.parametrize(
    ("line", "wanted"),
    [("fedspeed ru", "run"), ("fedspeed run --meth", "--method"), ("fedspeed compare scaff", "scaffold")],
)
def test_a_shell_completes_commands_options_and_methods(line, wanted, tmp_path):
    env = {**os.environ, "_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9",
           "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "found")}  # fmt: skip
    subprocess.run([sys.executable, "-m", "fedspeed"], env=env, check=False)
    found = (tmp_path / "found").read_text().split("\x0b")
    assert wanted in [word.strip() for word in found]


def test_a_schedule_that_a_changed_config_names_is_not_executed(capsys):
    """Its table has the digest of a file that the user does name."""
    Path("own.py").write_text("def sample(round, rng, clients, active, history):\n    return [0, 1]\n")
    Path("evil.py").write_text("open('executed', 'w')\n\n\ndef f(t):\n    return 1.0\n")
    given = ["fedavg", *QUICK, "--cohort", "own.py:sample", "--quiet"]
    assert main(["compare", *given, "--seeds", "1", "--out", "c"]) == 0
    assert main(["run", *given, "--out", "r"]) == 0
    for run in ("c/fedavg-s0", "r"):
        tables = options.read_tables(Path(run, "config.toml"))
        code = tables["cohort"]["code"]
        tables["lr_schedule"] = {"name": f"{Path('evil.py').resolve()}:f", "code": code, "origin": "evil.py"}
        Path(run, "config.toml").write_text(tomli_w.dumps(tables))
    assert main(["compare", *given, "--seeds", "1", "--out", "c"]) == 2
    assert main(["run", *given, "--out", "r", "--resume"]) == 2
    assert not Path("executed").exists()
