"""Errata: where papers, public code and this package differ. The entries are in `errata.toml`."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import NamedTuple

HOW = {
    "run": "the effect was measured by us",
    "read": "the code was read, not run",
    "said": "an author said so, here in our words; no code shows it",
    "paper": "the paper was read against itself",
}
"""The kinds of evidence for an entry."""


class Entry(NamedTuple):
    """One difference: what is printed, what code does and where, what this package does, the effect on results.

    An entry on what an author said has an issue's number in place of commit and file; one on the paper alone has a
    place in it, and no repository.
    """

    method: str
    title: str
    paper: str
    code: str
    repository: str
    commit: str
    file: str
    at: str
    here: str
    effect: str
    how: str  # a key of HOW
    command: str = ""

    @property
    def place(self) -> str:
        """Place of the code, the statement or the number."""
        if self.how in ("said", "paper"):
            return ", ".join(part for part in (self.repository, self.at) if part)
        return f"{self.repository}@{self.commit}, {self.file}: {self.at}"

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Lines of the entry, each as a label and a text."""
        other = {"said": "author", "paper": "found"}.get(self.how, "code")
        again = [("again", self.command)] if self.command else []
        return [("paper", self.paper), (other, f"{self.code} ({self.place})"), ("here", self.here),
                ("effect", self.effect), ("how", f"{self.how}: {HOW[self.how]}"), *again]  # fmt: skip


@cache
def errata() -> tuple[Entry, ...]:
    """Return all entries.

    Example:
        >>> [entry.title for entry in errata() if entry.how == "run"]
        ["The server's rule under partial participation"]
    """
    text = files(__package__).joinpath("errata.toml").read_text("utf-8")
    return tuple(Entry(**table) for table in tomllib.loads(text)["entry"])


def of_method(name: str) -> list[Entry]:
    """Return the entries of one method."""
    return [entry for entry in errata() if entry.method == name]


HEAD = """\
# Errata: where papers and code differ

Per method what its paper prints, what public code does, with repository, commit and place, what this package does, and
what the difference does to results. Every entry says whether it was **run** (the effect was measured by us), **read**
in code, **said** by an author (in our words, with the issue), or found in the **paper** alone. An entry does not assign
blame: published numbers may come from other versions of the code than the one that was read, code may have been
corrected since, and we misread things too. Report a mistake, and the entry changes.

`fedspeed methods fedspeed --errata` prints one method's entries. [Audit](../guides/audit.md) finds such differences in
your code. The errata of the FedSpeed paper's analysis are in [theory](theory.md).
This page is built from `fedspeed/methods/errata.toml`.
"""


def page() -> str:
    """Return the site's page of all entries, explanation/errata.md, in Markdown."""
    text = [HEAD]
    for name in dict.fromkeys(entry.method for entry in errata()):
        text.append(f"## {name}\n")
        for entry in of_method(name):
            text.append(f"### {entry.title}\n")
            text += [f"- **{about}**: {said}" for about, said in entry.rows]
            text.append("")
    return "\n".join(text)
