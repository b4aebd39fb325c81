"""Every command and every Python example of the documents runs as printed, in order, in one folder per document.

Commands are only made shorter: fewer rounds, the recipes' smallest preset, and a few made-up pictures or plays where
data would be fetched. A Python block that begins with `# NAME.py` is also a file for all commands; one that says
`needs: THING` runs where there is such a module or name. What must not run inside of a test (`make`, `pytest`, `pip`)
is tried without effect. Links lead somewhere, and every page can be reached from README.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from glob import glob
from pathlib import Path
from pydoc import locate
from typing import Any

import pytest
from layouts import TEN, binary, plays, records, tar

from fedspeed.cli import main
from fedspeed.report.export import TRACKERS

ROOT = Path(__file__).parents[2]
TOP = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"]
FOLDERS = ("guides", "reference", "explanation", "project")  # tests/docs/test_tutorials.py runs the other folders
DOCUMENTS = [
    *(ROOT / name for name in TOP),
    *sorted((ROOT / "docs").glob("*.md")),
    *(path for folder in FOLDERS for path in sorted((ROOT / "docs" / folder).glob("*.md"))),
]
PAGES = sorted({*DOCUMENTS, *(ROOT / "docs").glob("*/*.md")})
ELSEWHERE_RUN = {"docs/guides/diagnose.md"}  # and this one, which shows what commands print
NEEDS = re.compile(r"^# .*\bneeds: ([\w.]+)")
FILE = re.compile(r"^# (\w+\.py)\b")
LINK = re.compile(r"\]\(([^)#:\s]*)(#[^)]*)?\)")

RIDDLES = re.compile(
    r"\b(?:told|anew|somebody|nobody|everybody|anybody|whoever|goes on|go on|under way)\b"
    r"|(?<!there )\b(?:is|are|was|were) no (?!longer|more)\w+",
    re.I,
)
"""Words that CONTRIBUTING.md, section Style, asks to avoid; "there is no X" is one that may stay."""

STEP = re.compile(r"```(?P<language>\w*)\n(?P<block>.*?)```|`(?P<inline>fedspeed [^`]+)`", re.DOTALL)
NO_COMMAND = re.compile(
    r"\b(?:RUNS?|METHOD)\b|--help|^fedspeed \w+( show)?$|^fedspeed run config.toml$"
)  # spoken of, not given
ELSEWHERE = (
    "deploy check",  # needs flwr, tests/flower/test_deploy.py has it
    "--data huggingface",  # needs the network
    "--backend ray",  # tests/backends/test_ray.py has these
    *(f"{option} {name}" for option in ("--to", "--log") for name in TRACKERS),  # tests/report has these
)
LONGER = {
    "docs/guides/sweep-and-tune.md",
    "docs/guides/faq.md",
    "docs/guides/models.md",
    "docs/explanation/paper-scale.md",
    "docs/explanation/theory.md",
    "docs/explanation/reproduction.md",
    "docs/guides/resume-and-verify.md",
    "docs/guides/install.md",
    "docs/reference/cli.md",
}

APP = (ROOT / "fedspeed" / "flower" / "template" / "README.md").read_text("utf-8")
APP_COMMANDS = {  # of the app that `fedspeed deploy flower` writes; tests/flower/test_federation.py runs them
    shlex.join(shlex.split(line, comments=True))
    for block in re.findall(r"```sh\n(.*?)```", APP, re.DOTALL)
    for line in block.splitlines()
}

QUICK = ["--rounds", "2"]
SHORTER: list[tuple[str, list[str]]] = [  # for commands that match: what is appended
    (r"^run ", QUICK),
    (r"^run .*--patience", ["--patience", "1"]),
    (r"^compare (?!runs/)", [*QUICK, "--seeds", "1"]),
    (r"^sweep ", [*QUICK, "--seeds", "1", "--jobs", "1"]),
    (r"^tune ", [*QUICK, "--seeds", "1", "--jobs", "1", "--local-epochs", "1", "--budget", "130"]),
    (r"^(run|compare) .*--data cifar10", ["--data-dir", "cifar.tar.gz", "--set", "data.part=true"]),
    (r"^data \w+ cifar10", ["--data-dir", "cifar.tar.gz", "--set", "part=true"]),
    (r"^(run|compare) .*--data shakespeare", ["--data-dir", "plays.tar.gz", "--set", "data.part=true"]),
    (r"^(run|compare) .*--data shakespeare", ["--set", "data.least=405", "--set", "model.hidden=2"]),
    (r"^(run|compare) .*--data shakespeare", ["--active", "2"]),
    (r"^data \w+ shakespeare", ["--data-dir", "plays.tar.gz", "--set", "part=true", "--set", "least=405"]),
    (r"^theory rate( |$)", ["--rounds", "4,8", "--seeds", "2", "--m", "2"]),
    (r"^reproduce (?!list)", ["--preset", "smoke", "--seeds", "1", "--set", "rounds=2", "--set", "device=cpu"]),
    (r"^inspect (?!.*--noise)", ["--samples", "50"]),
    (r"^watch ", ["--terminal"]),  # the page is there until Ctrl-C, tests/report/test_watch.py has it
]


def steps(path: Path) -> list[tuple[str, str]]:
    """What a document tells to do, in its order: ("python", code) or ("command", text)."""
    found = []
    for match in STEP.finditer(path.read_text("utf-8")):
        if match["language"] == "python":
            found.append(("python", match["block"]))
        elif match["inline"]:
            text = " ".join(match["inline"].split())
            if not NO_COMMAND.search(text):
                found.append(("command", text))
        elif match["language"] in ("sh", ""):
            lines = [line.strip() for line in match["block"].replace("\\\n", " ").splitlines()]
            found += [("command", line) for line in lines if line.startswith("fedspeed ")]
    return found


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def other_commands() -> list[tuple[str, str]]:
    """What the documents' shell blocks have beside `fedspeed ...`, once each."""
    found = {}
    for path in DOCUMENTS:
        for match in STEP.finditer(path.read_text("utf-8")):
            if match["language"] == "sh":
                for line in match["block"].replace("\\\n", " ").splitlines():
                    if line.strip() and not line.startswith("fedspeed "):
                        found.setdefault(shlex.join(shlex.split(line, comments=True)), name(path))
    return [(place, command) for command, place in found.items()]


def words(command: str) -> list[str]:
    """The arguments as a shell would give them, and what makes them shorter."""
    given = [part for word in shlex.split(command, comments=True)[1:] for part in sorted(glob(word)) or [word]]
    given = ["table7" if given[0] == "reproduce" and word == "all" else word for word in given]
    return given + [more for pattern, extra in SHORTER if re.search(pattern, " ".join(given)) for more in extra]


@pytest.fixture(scope="module")
def given_runs(tmp_path_factory) -> Path:
    """Run directories that the documents take as given: NAME (stopped), A and B."""
    out = tmp_path_factory.mktemp("given")
    assert main(["run", "--quiet", "--out", str(out / "A"), *QUICK]) == 0
    for name in ("NAME", "B"):
        shutil.copytree(out / "A", out / name)
    (out / "NAME" / "summary.json").unlink()
    return out


@pytest.fixture
def folder(tmp_path, monkeypatch, given_runs) -> Path:
    """What the documents take as given: run directories, files they show, a cifar10."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDSPEED_CACHE", str(tmp_path / "cache"))
    shutil.copytree(given_runs, "runs")
    tar(binary(records(TEN, n=40)), tmp_path / "cifar.tar.gz")
    tar(plays(10), tmp_path / "plays.tar.gz")
    for path in DOCUMENTS:
        for file, code in ((FILE.match(code), code) for kind, code in steps(path) if kind == "python"):
            if file:
                Path(file[1]).write_text(code)
    with Path("my_method.py").open("a") as method:
        method.write("\n\nMyMethod = FedAvgM\n")
    monkeypatch.syspath_prepend(tmp_path)  # as in a session of Python that was started there
    monkeypatch.delitem(sys.modules, "my_method", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(p, marks=pytest.mark.slow if name(p) in LONGER else (), id=name(p))
        for p in DOCUMENTS
        if steps(p) and name(p) not in ELSEWHERE_RUN
    ],
)
@pytest.mark.filterwarnings("ignore:lr_schedule")  # commands run for two rounds here, in which a schedule is idle
def test_everything_runs_as_printed(path, folder, capsys):
    names: dict[str, Any] = {"__name__": "documentation"}
    failed = []
    skipped = [*ELSEWHERE]
    for kind, text in steps(path):
        if kind == "command" and not any(part in text for part in skipped):
            code = main(words(text))
            err = capsys.readouterr().err
            if code:
                failed.append(f"{text}\n    exit code {code}: {err.splitlines()[-1] if err else ''}")
        elif kind == "python":
            file, needs = FILE.match(text), NEEDS.match(text)
            if needs and locate(needs[1]) is None:
                skipped += [file[1]] if file else []
                continue
            if file:
                Path(file[1]).write_text(text)
            exec(compile(text.replace("rounds=60", "rounds=2"), path.name, "exec", dont_inherit=True), names)
    assert failed == []


@pytest.mark.parametrize(
    ("document", "command"),
    [
        pytest.param(place, command, marks=pytest.mark.slow if "pytest" in command else (), id=command)
        for place, command in other_commands()
    ],
)
def test_other_commands_are_ones_their_program_takes(document, command):
    """make tries without doing, pytest collects without running, pip's files are there."""
    given = shlex.split(command)
    if given[0] == "make":
        assert shutil.which("make")
        free = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
        tried = subprocess.run([*given, "--dry-run"], cwd=ROOT, env=free, capture_output=True, text=True)
    elif given[:3] == [".venv/bin/python", "-m", "pytest"]:
        run = [sys.executable, *given[1:], "--collect-only", "-p", "no:cacheprovider"]
        tried = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
    elif document == "docs/guides/flower.md" and given[0] != "pip":
        assert command in APP_COMMANDS, f"{document}: tests/flower runs what the app's README says, not {command}"
        return
    else:
        assert given[:3] == ["pip", "install", "-c"], f"{document}: how is this tested? {command}"
        assert given[3] in ("constraints.txt", "constraints-flower.txt")
        assert (ROOT / given[3]).exists()
        place, extra = re.fullmatch(r"([^[]*)(?:\[(\w+)\])?", given[4]).groups()
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert place in (".", "dist/*.whl")
        assert extra is None or extra in extras
        assert len(given) == 5
        return
    assert tried.returncode == 0, tried.stdout + tried.stderr


def test_nothing_is_left_out():
    """The documents' commands are found: the fenced ones, and those inside of sentences."""
    found = [text for path in DOCUMENTS for kind, text in steps(path) if kind == "command"]
    fenced = [
        line.strip()
        for path in DOCUMENTS
        if name(path) not in ELSEWHERE_RUN  # which has tables that begin with a method of that name
        for line in path.read_text("utf-8").replace("\\\n", " ").splitlines()
        if line.startswith("fedspeed ")
    ]
    assert set(fenced) <= set(found)
    assert "fedspeed compare fedspeed fedspeed+dp:noise=1 fedspeed+topk:0.01" in found
    assert len(found) > len(fenced) + 4


def anchors(path: Path) -> set[str]:
    """The fragments of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.M)
    return {"#" + re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def links(path: Path) -> list[tuple[Path, str]]:
    """What a page links to of ours: a file, and the fragment in it."""
    found = LINK.findall(re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.S))
    return [((path.parent / target).resolve() if target else path, fragment) for target, fragment in found]


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_lead_somewhere(path):
    for target, fragment in links(path):
        assert target.exists(), target
        assert not fragment or fragment in anchors(target), f"{target.name}{fragment}"


def test_every_page_can_be_reached_from_readme():
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page not in reached:
            reached.add(page)
            todo += [target for target, _ in links(page) if target.suffix == ".md"]
    assert {name(path) for path in PAGES} <= {name(path) for path in reached}
    home = ROOT / "docs" / "index.md"
    assert {target for target, _ in links(ROOT / "docs" / "README.md")} == {home}
    assert {path for path in DOCUMENTS if path.parent.name in FOLDERS} <= {target for target, _ in links(home)}


def test_every_figure_is_shown_and_small():
    shown = {target for path in PAGES for target, _ in links(path)}
    for figure in (ROOT / "docs" / "figures").iterdir():
        assert figure in shown
        assert figure.stat().st_size < 150_000


@pytest.mark.parametrize("path", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=name)
def test_sentences_name_the_actor_and_the_thing(path):
    """What programs print and code are as they are."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text("utf-8"), flags=re.S)
    found = [text[max(0, word.start() - 40) : word.end() + 20] for word in RIDDLES.finditer(text)]
    assert found == []
