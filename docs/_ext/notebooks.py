"""Notebooks made from the pages: one source, two forms.

    python docs/_ext/notebooks.py docs/tutorials build/notebooks        # every NN-*.md of a folder -> NN-*.ipynb

A page is Markdown. Its ```python blocks become code cells, its ```sh blocks cells of the shell that stop at the first
command that fails, and all else, expected output included, stays Markdown. A Python block whose first line is
`# NAME.py` is a file that later blocks import or name: its cell writes it. Notebooks are made when they are needed and
are not committed; the site has each tutorial's beside it (`assemble.tutorial`).
`tests/docs/test_tutorials.py` runs the pages with `blocks`, and so runs what a notebook holds.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

FENCE = re.compile(r"^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```[ \t]*$\n?", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"^# (\w+\.py)\b")
NEEDS = re.compile(r"^# .*\bneeds: ([\w.]+)", re.MULTILINE)


class Block(NamedTuple):
    """A piece of a page: prose (language "markdown"), or what a fence holds."""

    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The file that a Python block is, if its first line names one."""
        found = FILE.match(self.text) if self.language == "python" else None
        return found[1] if found else None

    @property
    def needs(self) -> str | None:
        """The module without which the block cannot run (`# needs: ray`)."""
        found = NEEDS.match(self.text)
        return found[1] if found else None


def blocks(page: str) -> list[Block]:
    """Return a page in pieces, in order.

    Example:
        >>> [block.language for block in blocks("Do:\\n\\n```sh\\nls\\n```\\n")]
        ['markdown', 'sh']
    """
    found, end = [], 0
    for fence in FENCE.finditer(page):
        found += [Block("markdown", page[end : fence.start()]), Block(fence["language"], fence["text"])]
        end = fence.end()
    return [block for block in [*found, Block("markdown", page[end:])] if block.text.strip()]


def convert(path: Path) -> dict[str, Any]:
    """Return a page as a notebook (nbformat 4.5), ready for `json.dump`."""
    cells: list[dict[str, Any]] = []
    for block in blocks(path.read_text("utf-8")):
        if block.language == "python":
            cells.append(_cell("code", f"%%writefile {block.file}\n{block.text}" if block.file else block.text))
        elif block.language == "sh":
            cells.append(_cell("code", f"%%sh\nset -e\n{block.text}"))
        else:
            fenced = block.text if block.language == "markdown" else f"```{block.language}\n{block.text}```"
            cells.append(_cell("markdown", fenced))
    for i, cell in enumerate(cells):
        cell["id"] = hashlib.blake2b(f"{i} {''.join(cell['source'])}".encode(), digest_size=4).hexdigest()
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _cell(kind: str, text: str) -> dict[str, Any]:
    more = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "metadata": {}, "source": text.strip().splitlines(keepends=True), **more}


def main(folder: str, out: str) -> None:
    """Write a notebook per numbered page of a folder."""
    Path(out).mkdir(parents=True, exist_ok=True)
    for page in sorted(Path(folder).glob("[0-9]*.md")):
        notebook = Path(out, page.stem + ".ipynb")
        notebook.write_text(json.dumps(convert(page), indent=1) + "\n", "utf-8")
        print(notebook)


if __name__ == "__main__":
    main(*sys.argv[1:])
