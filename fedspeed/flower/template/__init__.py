"""The app that `fedspeed deploy flower` writes."""

from __future__ import annotations

from pathlib import Path

from ...errors import UserError
from ...utils.files import write

FILES = {"pyproject.toml": "pyproject.toml", "app.py": "app.py.txt", "README.md": "README.md"}
"""Name in an app -> name in this folder."""


def write_app(folder: Path) -> list[Path]:
    """Write the app into a new or empty folder; return its files."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"deploy: expected a new or an empty folder, found {folder} with files in it; choose another")
    folder.mkdir(parents=True, exist_ok=True)
    here = Path(__file__).parent
    for name, source in FILES.items():
        write(folder / name, (here / source).read_bytes())
    write(folder / ".gitignore", "keys/\nruns/\nstates/\n*.db\n")
    return [folder / name for name in FILES]
