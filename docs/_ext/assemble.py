"""Assemble the site's sources in one folder: documents as they are, pages made from the code, stored results.

Documents keep the links that a checkout needs. Here a link is looked up as a path of the repository and rewritten: to
the page that the file became, or to a copy of the file where it is not a page. A link that leads nowhere is an error.
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

from fedspeed.methods import errata

ROOT = Path(__file__).resolve().parents[2]
TOP = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
HOMES = ("README.md", "docs/README.md")
MADE = {
    "fedspeed/methods/errata.toml": "explanation/errata.md",
    "docs/reference/run-directory.md": "reference/run-directory.md",
}
"""Files of the repository that are the source of a page made by the code, and its name on the site."""
LEFT = ("docs/_", "docs/gallery/")  # not pages: what makes them, what was built, examples that sphinx-gallery reads
LINK = re.compile(
    r"(?P<code>^(?P<fence>```+|~~~+).*?^(?P=fence)[^\n]*$)"
    r"|(?P<text>!?\[(?:[^\[\]`]|`[^`\n]*`)*\]\()(?P<to>[^)#:\s]*)(?P<at>#[^)\s]*)?\)"
    r"|(?P<inline>``[^`\n]+``|`[^`\n]+`)",
    re.M | re.S,
)
"""A link; or code, in which nothing is one."""
NOT_SEARCHED = ("results/", "changelog.md")
"""Pages that a search leaves out: they hold every word many times, and answer no question."""
KEYWORDS = {
    "guides/data.md": "custom dataset, memory map, mmap, larger than memory, non-iid, noniid, partition",
    "guides/models.md": "custom model, custom loss, loss function, criterion, regression, multi-label, fine-tune",
    "guides/methods.md": "custom algorithm, custom method, strategy, aggregation",
    "guides/participation.md": "client sampling, client selection, sampler, partial participation, availability",
    "guides/schedules.md": "learning rate schedule, lr schedule, scheduler, cosine, warmup, warm-up",
    "guides/local-optimizer.md": "optimizer, local optimizer, momentum, adam, adamw, nesterov",
    "guides/per-client.md": "fairness, per-client accuracy, client metrics, personalization, personalisation",
    "guides/trackers.md": "wandb, weights and biases, tensorboard, mlflow, logging, notebook, jupyter, dataframe",
    "guides/resume-and-verify.md": "checkpoint, --allow-code, restart, preemption, crash",
    "guides/sweep-and-tune.md": "hyperparameter, hyper-parameter search, grid search, optuna, early stopping",
    "guides/report.md": "latex table, figure, plot, significance, t-test",
    "guides/slurm.md": "cluster, distributed, multiprocessing",
}
"""What users search for, by the page that answers it: main entries of the index, which a search lists first."""
TUTORIAL = re.compile(r"/tutorials/\d+-[^/]*\.md$")
HEADING = re.compile(r"^## (.+)$", re.M)


def place(path: str) -> str:
    """Return where a file of the repository is on the site.

    Example:
        >>> place("docs/guides/data.md"), place("CHANGELOG.md"), place("results/iclr2023/cnn/table7.md")
        ('guides/data.md', 'changelog.md', 'results/cnn/table7.md')
        >>> place("fedspeed/methods/errata.toml"), place("Makefile")
        ('explanation/errata.md', 'files/Makefile')
    """
    if path in MADE:
        return MADE[path]
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
    """A folder to fill; a file whose content has not changed is not written, so that a second build is short."""

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
        """Add a document of the repository with its links rewritten, and copies of linked files that are not pages."""
        here = source.relative_to(ROOT).as_posix()
        name = place(here)
        body = self.linked(source.read_text("utf-8") if text is None else text, here, name)
        self.write(name, searched(name) + body)

    def linked(self, text: str, here: str, to: str) -> str:
        """Rewrite the links of a text, which are relative to a file of the repository, for a page of the site."""

        def rewritten(link: re.Match[str]) -> str:
            if not link["to"]:
                return link[0]
            target = os.path.normpath(os.path.join(os.path.dirname(here), link["to"]))
            found = ROOT / target
            if found.is_dir() and (found / "README.md").exists():
                found = found / "README.md"
            if not found.is_file():
                raise SystemExit(f"docs: {here} links to {link['to']}, which is not a file of the repository")
            name = place(found.relative_to(ROOT).as_posix())
            if not name.endswith(".md") or name.startswith("files/"):
                self.write(name, found.read_bytes())
            return f"{link['text']}{os.path.relpath(name, os.path.dirname(to) or '.')}{link['at'] or ''})"

        return LINK.sub(rewritten, text)

    def sweep(self) -> None:
        """Remove files that an earlier build wrote and this one did not, except those of sphinx-gallery."""
        for path in sorted(self.folder.rglob("*"), reverse=True):
            if path.relative_to(self.folder).parts[0] in ("gallery", "sg_execution_times.rst"):
                continue
            if path.is_file() and path not in self.kept:
                path.unlink()
            elif path.is_dir() and not any(path.iterdir()):
                path.rmdir()


def searched(name: str) -> str:
    """Return the lines before a page that tell the site's search how to find it."""
    if name.startswith(NOT_SEARCHED):
        return "---\nnosearch: true\n---\n"
    words = KEYWORDS.get(name)
    return marks.block("", f"{{index}} !{words.replace(', ', ', !')}") if words else ""


def documents() -> list[Path]:
    """Return the Markdown files of docs/ that become pages as they are."""
    found = (ROOT / "docs").rglob("*.md")
    paths = {path.relative_to(ROOT).as_posix(): path for path in found}
    made = (*HOMES, *MADE, "docs/index.md", "docs/tutorials/index.md")  # the last two by `contents`
    return [path for name, path in sorted(paths.items()) if not name.startswith(LEFT) and name not in made]


def parts() -> tuple[str, dict[str, str]]:
    """Return what docs/index.md, the list of documents, begins with, and its sections: their title, their text."""
    first, *found = HEADING.split((ROOT / "docs" / "index.md").read_text("utf-8"))
    return first, {title.strip(): text.strip() for title, text in zip(found[::2], found[1::2], strict=True)}


def slug(title: str) -> str:
    """Return the page of a part.

    Example:
        >>> slug("How-to guides")
        'how-to-guides'
    """
    return re.sub(r"[^\w-]+", "-", title.lower()).strip("-")


def listed(text: str) -> list[str]:
    """Return the pages that a part lists, in its order."""
    names = (os.path.normpath(os.path.join("docs", link["to"])) for link in LINK.finditer(text) if link["to"])
    pages = (place(name) for name in names if name not in HOMES)
    return [page.removesuffix(".md") for page in pages if page.endswith(".md")]


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
    """Add a tutorial as a page and, from the same source, as a notebook to download."""
    here = path.relative_to(ROOT).as_posix()
    notebook = Path(place(here)).with_suffix(".ipynb")
    stage.write(notebook.as_posix(), json.dumps(notebooks.convert(path), indent=1) + "\n")
    text = stage.linked(path.read_text("utf-8"), here, place(here))
    stage.write(place(here), f"{text}\n[This page as a notebook]({notebook.name})\n")


def contents(stage: Stage) -> None:
    """Add a page per part of docs/index.md, with the pages that are made from the code, and the home with its tree.

    Tutorials have an `index.md` in their folder, which is their page.
    """
    first, found = parts()
    seen = set[str]()
    pages = {}
    for title, text in found.items():
        name = slug(title)
        own = ROOT / "docs" / name / "index.md"
        pages[title] = f"{name}/index" if own.exists() else name
        below = [entry for folder in FOLDERS.get(name, ()) for entry in found_in(folder)]
        inside = [entry for entry in below if entry.startswith(f"{name}/")]
        made = [*referencepages.PARTS] if name == "reference" else []
        wanted = dict.fromkeys([*made, *inside, *listed(text), *below])
        entries = [one for one in wanted if one not in seen | {pages[title]}]
        seen.update(entries)
        tree = marks.toctree((f"/{entry}" for entry in entries), hidden=True)
        if own.exists():
            stage.page(own, f"{own.read_text('utf-8')}\n{tree}")
        else:
            extra = referencepages.CONTENTS if name == "reference" else ""
            body = stage.linked(text, "docs/index.md", f"{name}.md")
            stage.write(f"{name}.md", f"# {title}\n\n{body}\n\n{extra}{tree}")
    gallery = ["gallery/index"] if (ROOT / "docs" / "gallery").is_dir() else []
    tutorials, *rest = pages.values()
    tree = marks.toctree([tutorials, *gallery, *rest], depth=2, hidden=True)
    home = f"{stage.linked(first, 'docs/index.md', 'index.md')}{cards(found, pages)}\n{tree}"
    stage.write("index.md", home)


def cards(found: dict[str, str], pages: dict[str, str]) -> str:
    """Return the home's cards: each part that begins with a sentence, which is its card's text."""
    text = ["::::{grid} 1 2 2 2", ":gutter: 3", ""]
    for title, body in found.items():
        about = body.partition("\n\n")[0]
        if not about.startswith("- "):
            text += [f":::{{grid-item-card}} {title}", f":link: {pages[title]}", ":link-type: doc", about, ":::", ""]
    return "\n".join([*text, "::::", ""])


FOLDERS = {"tutorials": ("tutorials", "coming-from", "playground")}
"""Folders of docs/ whose pages belong to a part, listed there or not."""


def found_in(folder: str) -> list[str]:
    return sorted(f"{folder}/{path.stem}" for path in (ROOT / "docs" / folder).glob("*.md"))


def generated() -> Iterator[tuple[str, str]]:
    """Yield every page that is made from the code: its name, its Markdown."""
    yield MADE["fedspeed/methods/errata.toml"], errata.page()
    for module in (methodpages, clipages, apipages, referencepages, recipepages):
        yield from module.pages()
