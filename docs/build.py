"""Build the site: `python docs/build.py [OUT]`, or `make docs`. Offline; a warning is an error.

The sources are put together in OUT/source, the site is OUT/html, by default in docs/_build.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]


def build(out: Path) -> int:
    """Assemble and build; Sphinx's exit code."""
    from assemble import assemble
    from sphinx.cmd.build import main

    os.environ.setdefault("COLUMNS", "100")
    source = out / "source"
    print("docs: pages are put together, then built; the examples of the gallery run (several minutes)", flush=True)
    assemble(source)
    seen = [] if sys.stdout.isatty() else ["-q"]  # Sphinx shows each page only to a person
    how = ["-W", "-n", "--keep-going", *seen, "-b", "html", "-c", str(HERE), "-d", str(out / "doctrees")]
    code: int = main([*how, str(source), str(out / "html")])
    if not code:  # the playground is a page of its own, with its scripts beside it
        parts = shutil.ignore_patterns("*.md", "*.py", "__pycache__")
        shutil.copytree(HERE / "playground", out / "html" / "playground", ignore=parts, dirs_exist_ok=True)
        print(f"site: {out / 'html' / 'index.html'}")
    return code


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1] if len(sys.argv) > 1 else HERE / "_build").resolve()))
