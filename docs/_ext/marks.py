"""Plain text as Markdown, for pages made from the program's own texts."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from textwrap import dedent

SPECIAL = re.compile(r"([\\*_\[\]<>$|#~])")
CODE = re.compile(r"(``?)(.+?)\1", re.S)
SECTION = re.compile(r"^(Args|Example|Examples|Returns|Raises|Yields|Reference):\s*(.*)$")


def plain(text: str) -> str:
    """Return text in which only `code` means something: everything else that Markdown would read is escaped.

    Example:
        >>> plain("x_i0 of `x_i0`, ||g||")
        'x\\\\_i0 of `x_i0`, \\\\|\\\\|g\\\\|\\\\|'
    """
    parts, end = [], 0
    for code in CODE.finditer(text):
        parts += [SPECIAL.sub(r"\\\1", text[end : code.start()]), f"`{code[2]}`"]
        end = code.end()
    return "".join([*parts, SPECIAL.sub(r"\\\1", text[end:])])


def cell(text: str) -> str:
    """Return plain text in one cell of a table; a bar is escaped in code, too."""
    one = " ".join(plain(str(text)).split())
    return CODE.sub(lambda code: code[0].replace("|", r"\|"), one)


def code(value: object) -> str:
    """Return a value as code, in a cell; nothing for an empty one."""
    text = " ".join(str(value).split())
    return f"`{text}`".replace("|", r"\|") if text else ""


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table of cells that are Markdown already."""
    rows = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([f"| {' | '.join(header)} |", "|" + "---|" * len(header), *rows]) + "\n"


def block(text: str, language: str = "text") -> str:
    """Return a fenced block."""
    return f"```{language}\n{text.strip(chr(10))}\n```\n"


def toctree(entries: Iterable[str], depth: int = 1, hidden: bool = False, caption: str = "") -> str:
    """Return a table of contents."""
    options = [f":maxdepth: {depth}"] + [":hidden:"] * hidden + [f":caption: {caption}"] * bool(caption)
    return "\n".join(["```{toctree}", *options, "", *entries, "```", ""])


def sections(docstring: str) -> dict[str, str]:
    """Return a docstring by its sections; what comes first is "". Each is dedented."""
    found: dict[str, list[str]] = {"": []}
    now = ""
    for line in inspect.cleandoc(docstring).splitlines():
        heading = SECTION.match(line)
        if heading:
            now = heading[1]
            found[now] = [heading[2]] if heading[2] else []
        elif now and line and not line.startswith(" ") and now != "Reference":
            now = ""
            found[now].append(line)
        else:
            found[now].append(line)
    return {name: dedent("\n".join(lines)).strip("\n") for name, lines in found.items()}


def paragraphs(text: str) -> str:
    """Return the text of a docstring as Markdown: what is indented is a box, kept as it is drawn."""
    found = []
    for part in boxed(text):
        found.append(block(part[1]) if part[0] else f"{plain(part[1])}\n")
    return "\n".join(found)


def boxed(text: str) -> list[tuple[bool, str]]:
    """Return paragraphs of a text: (it is a box, its lines). A box may have empty lines; a list is not a box."""
    found: list[tuple[bool, str]] = []
    for part in re.split(r"\n\s*\n", text.strip("\n")):
        box = all(line.startswith("  ") for line in part.splitlines())
        if box and found and found[-1][0]:
            found[-1] = (True, f"{found[-1][1]}\n\n{part}")
        else:
            found.append((box, part))
    return [(box, dedent(part) if box else part) for box, part in found if part.strip()]


def items(text: str) -> list[tuple[str, str]]:
    """Return the entries of `Args:`: a name, and what is said of it, in one line."""
    found: list[tuple[str, str]] = []
    for line in text.splitlines():
        entry = re.match(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \([^)]*\))?: (.*)$", line)
        if entry:
            found.append((entry[1], entry[2]))
        elif found:
            found[-1] = (found[-1][0], f"{found[-1][1]} {line.strip()}")
    return found
