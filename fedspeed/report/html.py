"""HTML that cannot be broken by what stands in it: text is escaped, unless it is HTML already."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


class Html(str):
    """Text that is HTML."""

    __slots__ = ()


def element(name: str, *children: str, **attributes: str) -> Html:
    """An element with its children; `class_` is the attribute `class`, `data_x` is `data-x`.

    Example:
        >>> element("p", "a < b", element("b", "c"), class_="x")
        '<p class="x">a &lt; b<b>c</b></p>'
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(visible(value))}"' for key, value in attributes.items()
    )
    return Html(f"<{name}{given}>{join(children)}</{name}>")


def join(parts: Iterable[str]) -> Html:
    """HTML and text one after the other."""
    return Html("".join(part if isinstance(part, Html) else html.escape(visible(part), quote=False) for part in parts))


def visible(text: str) -> str:
    """Without characters that a page may not hold, or that turn the direction of what follows."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def table(header: Sequence[str], lines: Iterable[Sequence[str]], class_: str = "") -> Html:
    """A table in a box that scrolls by itself; the first cell of a line names it."""
    head = element("tr", *(element("th", title, scope="col") for title in header))
    body = [
        element("tr", element("th", line[0], scope="row"), *(element("td", cell) for cell in line[1:]))
        for line in lines
    ]
    made = element("table", element("thead", head), element("tbody", *body), class_=class_)
    return element("div", made, class_="scroll", tabindex="0", role="region", aria_label="table")


def folded(title: str, *children: str, open_: bool = False) -> Html:
    """What shows when one asks for it."""
    summary = element("summary", title)
    return Html(f"<details{' open' if open_ else ''}>{summary}{join(children)}</details>")
