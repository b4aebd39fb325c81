"""docs/reproduction.md walks through the stored results as they are.

`python tests/test_reproduction_page.py` writes that part of the page anew.
"""

from __future__ import annotations

from pathlib import Path

from fedspeed.reproduce.render import WALK

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reproduction.md"
FOLDER = "results/iclr2023/cnn"


def walk() -> str:
    """The generated part of the results' own page, with links from docs/."""
    page = (ROOT / FOLDER / "README.md").read_text("utf-8")
    return page[page.index(WALK) :].replace("](", f"](../{FOLDER}/")


def test_the_page_shows_the_stored_results():
    page = PAGE.read_text("utf-8")
    assert page[page.index(WALK) :] == walk(), "results changed: run `python tests/test_reproduction_page.py`"


if __name__ == "__main__":
    page = PAGE.read_text("utf-8")
    PAGE.write_text(page[: page.index(WALK)] + walk(), "utf-8")
