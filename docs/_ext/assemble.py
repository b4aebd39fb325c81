"""The site's sources, put together in one folder: documents as they are, pages made from the code, stored results.

Documents keep the links that a checkout needs. Here a link is looked up as a path of the repository and written anew:
to the page that the file became, or to a copy of the file where it is none. A link that leads nowhere is an error.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import apipages
import clipages
import marks
import methodpages
import notebooks
import recipepages
import referencepages

ROOT = Path(__file__).resolve().parents[2]
TOP = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
HOMES = ("README.md", "docs/README.md")
LEFT = ("docs/_", "docs/gallery/")  # not pages: what makes them, what was built, examples that sphinx-gallery reads
LINK = re.compile(
    r"(?P<code>^(?P<fence>```+|~~~+).*?^(?P=fence)[^\n]*$)"
    r"|(?P<text>!?\[(?:[^\[\]`]|`[^`\n]*`)*\]\()(?P<to>[^)#:\s]*)(?P<at>#[^)\s]*)?\)"
    r"|(?P<inline>``[^`\n]+``|`[^`\n]+`)",
    re.M | re.S,
)
"""A link; or code, in which nothing is one."""
TUTORIAL = re.compile(r"/tutorials/\d+-[^/]*\.md$")
HEADING = re.compile(r"^## (.+)$", re.M)


def place(path: str) -> str:
    """Where a file of the repository is on the site.

    Example:
        >>> place("docs/data.md"), place("CHANGELOG.md"), place("results/iclr2023/cnn/table7.md"), place("Makefile")
        ('data.md', 'changelog.md', 'results/cnn/table7.md', 'files/Makefile')
    """
    if path in HOMES:
        return "index.md"
    if path in TOP:
        return path.lower()
    if path.startswith("docs/") and not path.startswith(LEFT):
        return path.removeprefix("docs/")
    if path.startswith(f"results/{recipepages.SUITE}/"):
        return path.replace(f"{recipepages.SUITE}/", "").replace("README.md", "index.md")
    return f"files/{path}"


class Stage:
    """A folder that is filled; a file that says the same as before is left alone, so that a second build is short."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.kept = folder, set[Path]()

    def write(self, name: str, content: str | bytes) -> None:
        path = self.folder / name
        self.kept.add(path)
        plain = content.encode() if isinstance(content, str) else content
        if not path.exists() or path.read_bytes() != plain:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(plain)

    def page(self, source: Path, text: str | None = None) -> None:
        """A document of the repository, its links written anew; what it links to and is no page comes along."""
        here = source.relative_to(ROOT).as_posix()
        self.write(place(here), self.linked(source.read_text("utf-8") if text is None else text, here, place(here)))

    def linked(self, text: str, here: str, to: str) -> str:
        """A text whose links are relative to a file of the repository, for a page of the site."""

        def rewritten(link: re.Match[str]) -> str:
            if not link["to"]:
                return link[0]
            target = os.path.normpath(os.path.join(os.path.dirname(here), link["to"]))
            found = ROOT / target
            if found.is_dir() and (found / "README.md").exists():
                found = found / "README.md"
            if not found.is_file():
                raise SystemExit(f"docs: {here} links to {link['to']}, which is no file of the repository")
            name = place(found.relative_to(ROOT).as_posix())
            if found.suffix != ".md" or name.startswith("files/"):
                self.write(name, found.read_bytes())
            return f"{link['text']}{os.path.relpath(name, os.path.dirname(to) or '.')}{link['at'] or ''})"

        return LINK.sub(rewritten, text)

    def sweep(self) -> None:
        """Remove what an earlier build had and this one has not; sphinx-gallery keeps its own."""
        for path in sorted(self.folder.rglob("*"), reverse=True):
            if path.relative_to(self.folder).parts[0] in ("gallery", "sg_execution_times.rst"):
                continue
            if path.is_file() and path not in self.kept:
                path.unlink()
            elif path.is_dir() and not any(path.iterdir()):
                path.rmdir()


def documents() -> list[Path]:
    """The Markdown files of docs/ that become pages."""
    found = (ROOT / "docs").rglob("*.md")
    paths = {path.relative_to(ROOT).as_posix(): path for path in found}
    made = (*HOMES, "docs/index.md", *(f"docs/{slug(title)}/index.md" for title in parts()))  # by `contents`
    return [path for name, path in sorted(paths.items()) if not name.startswith(LEFT) and name not in made]


def parts() -> dict[str, str]:
    """The sections of docs/README.md, the list of documents: their title, their text."""
    found = HEADING.split((ROOT / "docs" / "README.md").read_text("utf-8"))
    return {title.strip(): text.strip() for title, text in zip(found[1::2], found[2::2], strict=True)}


def slug(title: str) -> str:
    """The page of a part.

    Example:
        >>> slug("How-to guides")
        'how-to-guides'
    """
    return re.sub(r"[^\w-]+", "-", title.lower()).strip("-")


def listed(text: str) -> list[str]:
    """The pages that a part lists, in its order."""
    names = (os.path.normpath(os.path.join("docs", link["to"])) for link in LINK.finditer(text) if link["to"])
    return [place(name).removesuffix(".md") for name in names if name.endswith(".md") and name not in HOMES]


def assemble(folder: Path) -> None:
    """Fill a folder with everything that Sphinx reads."""
    stage = Stage(folder)
    for name in TOP:
        stage.page(ROOT / name)
    for path in documents():
        tutorial(stage, path) if TUTORIAL.search(path.as_posix()) else stage.page(path)
    for name, content in generated():
        stage.write(name, content)
    for source, text in recipepages.stored():
        stage.page(source, text)
    contents(stage)
    stage.sweep()


def tutorial(stage: Stage, path: Path) -> None:
    """A page that is a notebook, too: the same source, to be downloaded."""
    here = path.relative_to(ROOT).as_posix()
    notebook = Path(place(here)).with_suffix(".ipynb")
    stage.write(notebook.as_posix(), json.dumps(notebooks.convert(path), indent=1) + "\n")
    text = stage.linked(path.read_text("utf-8"), here, place(here))
    stage.write(place(here), f"{text}\n[This page as a notebook]({notebook.name})\n")


def contents(stage: Stage) -> None:
    """A page for each part of docs/README.md, with what belongs to it and is made from the code; the home's tree.

    A part that has a folder with an `index.md`, as tutorials have, has that for its page.
    """
    seen = set[str]()
    pages = {}
    for title, text in parts().items():
        name = slug(title)
        own = ROOT / "docs" / name / "index.md"
        pages[name] = f"{name}/index" if own.exists() else name
        below = [entry for folder in FOLDERS.get(name, ()) for entry in found_in(folder)]
        first = [entry for entry in below if entry.startswith(f"{name}/")]
        made = [*referencepages.PARTS] if name == "reference" else []
        entries = [
            one for one in dict.fromkeys([*made, *first, *listed(text), *below]) if one not in seen | {pages[name]}
        ]
        seen.update(entries)
        tree = marks.toctree((f"/{entry}" for entry in entries), hidden=True)
        if own.exists():
            stage.page(own, f"{own.read_text('utf-8')}\n{tree}")
        else:
            extra = referencepages.CONTENTS if name == "reference" else ""
            body = stage.linked(text, "docs/README.md", f"{name}.md")
            stage.write(f"{name}.md", f"# {title}\n\n{extra}{body}\n\n{tree}")
    gallery = ["gallery/index"] if (ROOT / "docs" / "gallery").is_dir() else []
    first, *rest = pages.values()
    home = (ROOT / "docs" / "index.md").read_text("utf-8")
    for name, page in pages.items():
        home = home.replace(f":link: {name}\n", f":link: {page}\n")
    tree = marks.toctree([first, *gallery, *rest], depth=2, hidden=True)
    stage.write("index.md", stage.linked(home, "docs/index.md", "index.md") + "\n" + tree)


FOLDERS = {"tutorials": ("tutorials", "coming-from", "playground")}
"""Folders of docs/ whose pages belong to a part, listed there or not."""


def found_in(folder: str) -> list[str]:
    return sorted(f"{folder}/{path.stem}" for path in (ROOT / "docs" / folder).glob("*.md"))


def generated() -> Iterator[tuple[str, str]]:
    """Every page that is made from the code: its name, its Markdown."""
    for module in (methodpages, clipages, apipages, referencepages, recipepages):
        yield from module.pages()
