"""HTML elements with escaped text: only `Html` is taken as it is."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence


class Html(str):
    """Text that is already HTML."""

    __slots__ = ()


def element(name: str, *children: str, **attributes: str) -> Html:
    """Return an element with its children; `class_` is the attribute `class`, `data_x` is `data-x`.

    Example:
        >>> element("p", "a < b", element("b", "c"), class_="x")
        '<p class="x">a &lt; b<b>c</b></p>'
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(visible(value))}"' for key, value in attributes.items()
    )
    return Html(f"<{name}{given}>{join(children)}</{name}>")


def join(parts: Iterable[str]) -> Html:
    """Join parts, escaping those that are not HTML."""
    return Html("".join(part if isinstance(part, Html) else html.escape(visible(part), quote=False) for part in parts))


def visible(text: str) -> str:
    """Replace control characters and those that reverse the direction of text."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def table(
    header: Sequence[str],
    lines: Iterable[Sequence[str]],
    class_: str = "",
    label: str = "table",
    tall: bool = False,
    classes: Sequence[str] | None = None,
    **attributes: str,
) -> Html:
    """Return a table in a scrolling box; the first cell of a line is its heading.

    Args:
        label: the name of the box for screen readers.
        tall: also limit the height of the box.
        classes: the CSS classes of the lines.
        attributes: further attributes of the table.
    """
    head = element("tr", *(element("th", title, scope="col") for title in header))
    body = []
    for i, (first, *cells) in enumerate(lines):
        own = {"class_": classes[i]} if classes is not None else {}
        body.append(element("tr", element("th", first, scope="row"), *(element("td", cell) for cell in cells), **own))
    made = element("table", element("thead", head), element("tbody", *body), class_=class_, **attributes)
    box = "scroll tall" if tall else "scroll"
    return element("div", made, class_=box, tabindex="0", role="region", aria_label=label)


def folded(title: str, *children: str, open_: bool = False) -> Html:
    """Return a section that the reader can open; closed unless `open_`."""
    summary = element("summary", title)
    return Html(f"<details{' open' if open_ else ''}>{summary}{join(children)}</details>")
