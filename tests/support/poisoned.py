"""Runs commands in a folder full of traps: Python files with the names of modules, each of which leaves a mark if run.

A program of its own, not a test, so that the built wheel can be tried as well:
`python poisoned.py FOLDER COMMAND...`, where COMMAND is `fedspeed` or `python -m fedspeed`. Exits 0 if every command
did its work and no trap was sprung.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ["signal", "json", "selectors", "torch", "numpy", "random", "pickle", "typing", "__future__", "argparse",
         "rich", "socket", "tempfile", "multiprocessing", "safetensors", "matplotlib", "tomllib", "tomli_w", "fcntl",
         "queue", "sitecustomize", "usercustomize", "psutil", "PIL", "importlib_metadata"]  # fmt: skip
"""Modules that a command, its workers or their resource tracker import, or look for in vain."""
RUN = "run --rounds 2 --clients 6 --active 2 --local-steps 1 --engine loop --backend process --workers 2 --quiet --out"


def poison(folder: Path) -> Path:
    """Lay the traps; the file they would write."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / "PWNED"
    for name in NAMES:
        told = f"{name} in {{__import__('sys').orig_argv}}"
        (folder / f"{name}.py").write_text(
            f"with open({str(mark)!r}, 'a') as mark:\n    mark.write(f{told!r} + '\\n')\n"
        )
    (folder / "matplotlibrc").write_text("lines.linewidth: 99\n")
    metadata = folder / "evil-1.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[fedspeed.methods]\nevil = signal:Evil\n")
    return mark


def commands(folder: Path) -> list[str]:
    """What is tried in the folder, which is a run directory by then."""
    return [
        f"{RUN} elsewhere",
        "resume .",
        "verify . --all",
        "diff . elsewhere",
        "inspect .",
        "theory --from .",
        "run config.toml --method evil --out evil",
        "data show digits --clients 5 --out figures",
        "compare fedavg fedspeed --rounds 1 --clients 6 --active 2 --seeds 1 --quiet --out compared",
        "reproduce table7 --preset smoke --jobs 1 --seeds 1 --set rounds=1 --quiet --out tables",
    ]


ENDS = {"run config.toml --method evil --out evil": 2}
"""Commands that must be refused."""


def trip(folder: Path, command: list[str], chosen: list[str] | None = None) -> list[str]:
    """What went wrong: commands that failed, traps that were sprung."""
    wrong, aside = [], folder.parent / "aside"
    aside.mkdir(parents=True)
    made = subprocess.run([*command, *RUN.split(), str(folder)], cwd=aside, capture_output=True, text=True, check=False)
    if made.returncode:
        return [f"the run that was to be poisoned failed: {made.stderr}"]
    (folder / "summary.json").unlink()  # so that there is something to resume
    lines = (folder / "rounds.jsonl").read_text().splitlines(keepends=True)
    (folder / "rounds.jsonl").write_text("".join(lines[:1]))
    shutil.rmtree(folder / "checkpoints")
    mark = poison(folder)
    for given in chosen or commands(folder):
        done = subprocess.run([*command, *given.split()], cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode != ENDS.get(given, 0):
            wrong.append(f"{given}: exit code {done.returncode}: {done.stderr.strip()[-500:]}")
        if mark.exists():
            wrong.append(f"{given}: executed {mark.read_text()}")
            mark.unlink()
    return wrong


if __name__ == "__main__":
    found = trip(Path(sys.argv[1]), sys.argv[2:])
    sys.stdout.write("".join(f"{line}\n" for line in found) or "no trap was sprung\n")
    sys.exit(bool(found))
