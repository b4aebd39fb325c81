"""The Sphinx extension of this site: docstrings as this package writes them, types, mathematics without a script."""

from __future__ import annotations

import re
from typing import Any

import marks
from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx

SPECIAL = re.compile(r"([\\*`|]|_(?!\w))")
INLINE = re.compile(r"(``?)(.+?)\1", re.S)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", docstring)
    app.connect("missing-reference", named)
    app.connect("doctree-read", dashes)
    app.add_html_math_renderer("mathml", (mathml, None), (mathml_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def docstring(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Rewrite a docstring as reStructuredText: boxes stay boxes, `x` is code, all else is plain text."""
    if what == "class" and options.get("no-index-entry"):  # a method's page has its text already
        lines[:] = []
        return
    said = marks.sections("\n".join(lines))
    found = [text for box, part in marks.boxed(said[""]) for text in (*(drawn(part) if box else listed(part)), "")]
    for names, text in marks.items(said.get("Args", "")):
        for one in names.split(", "):
            found.append(f":param {rst(one)}: {rst(text)}")
    found.append("")
    for title in ("Returns", "Yields", "Raises"):
        if title in said:
            found += [f"**{title}**: {rst(' '.join(said[title].split()))}", ""]
    if "Example" in said:
        found += [".. code-block:: pycon", "", *(f"   {line}" for line in said["Example"].splitlines()), ""]
    if "Reference" in said:
        found += [f"Reference: {rst(' '.join(said['Reference'].split()))}", ""]
    lines[:] = found


def drawn(box: str) -> list[str]:
    return [".. code-block:: text", "", *(f"   {line}" for line in box.splitlines())]


def listed(text: str) -> list[str]:
    """Return a paragraph in one line, or a list with a line per entry."""
    entries = re.split(r"\n(?=- |\d+\. )", text)
    return [rst(" ".join(entry.split())) for entry in entries] if len(entries) > 1 else [rst(" ".join(text.split()))]


def rst(text: str) -> str:
    """Return text in which only `code` means something.

    Example:
        >>> rst("ascend_ takes `x`, **more")
        'ascend\\\\_ takes ``x``, \\\\*\\\\*more'
    """
    parts, end = [], 0
    for code in INLINE.finditer(text):
        before, after = text[end : code.start()], text[code.end() : code.end() + 1]
        glue = r"\ " if after.isalnum() else ""
        parts += [SPECIAL.sub(r"\\\1", before), f"``{code[2]}``{glue}"]
        end = code.end()
    return "".join([*parts, SPECIAL.sub(r"\\\1", text[end:])])


def named(app: Sphinx, env: Any, node: Any, content: Any) -> Any:
    """Return a type in a signature: the page of the public name if it is one of ours, else its name as it stands."""
    if node.get("refdomain") != "py" or node.get("reftype") not in ("class", "obj", "data", "exc", "func"):
        return None
    last = node["reftarget"].rpartition(".")[2]
    domain = env.get_domain("py")
    for place in (f"fedspeed.{last}", f"fedspeed.data.{last}", f"fedspeed.theory.{last}"):
        if place in domain.objects:
            found = domain.objects[place]
            return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", place, node, content) if found else None
    return content


def dashes(app: Sphinx, tree: nodes.document) -> None:
    """Put a dash between a parameter and its text; smartquotes would, but they spoil --options."""
    for text in [text for text in tree.findall(nodes.Text) if text.astext() == " -- "]:
        text.parent.replace(text, nodes.Text(" – "))


def mathml(self: Any, node: nodes.math) -> None:
    """Write a formula inside of a line."""
    self.body.append(convert(node.astext(), display="inline"))
    raise nodes.SkipNode


def mathml_block(self: Any, node: nodes.math_block) -> None:
    """Write a formula on separate lines."""
    self.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode
