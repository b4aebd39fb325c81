"""The mechanical rules of the style guide (CONTRIBUTING.md): first words, and words that are not used."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedspeed

ROOT = Path(fedspeed.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py") if "template" not in path.parts)
FIRST = {"What", "Who", "Whose", "Of", "As", "Those", "That", "Whatever", "Where", "How"}
WORDS = re.compile(
    r"\b((?<!there )is no (?!longer|more)\w+|anew|(some|no|every|any)body('s)?|whoever|(is|are|was) told"
    r"|(goes|go|going) on|ails|illness|cures?|doctor|under way)\b",
    re.IGNORECASE,
)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield node.body[0].lineno, text


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Docstrings, comments and messages: everything between quotes that has a space, and everything behind a #."""
    source = path.read_text("utf-8")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if (
            token.type == tokenize.COMMENT
            or (token.type == tokenize.STRING and " " in token.string)
            or token.type == getattr(tokenize, "FSTRING_MIDDLE", -1)
        ):
            yield token.start[0], token.string


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_begin_with_a_verb_or_a_noun(path):
    wrong = [
        f"{path.name}:{line}: {text.splitlines()[0]}"
        for line, text in docstrings(ast.parse(path.read_text("utf-8")))
        if text.split()[0].strip(",.:`") in FIRST
    ]
    assert wrong == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_words_that_the_style_guide_replaces(path):
    wrong = [f"{path.name}:{line}: {found[0]}" for line, text in prose(path) if (found := WORDS.search(text))]
    assert wrong == []
