"""The report page: one HTML file that holds everything it needs."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from string import Template

from .. import __version__
from .cards import cards
from .comparison import Comparison
from .embed import embed, script
from .markup import Html, element, join
from .runs import Row, seeds_of, setting
from .sections import configs, provenance, sharpness, verdict, warnings

SCRIPTS = ("vendor/uPlot.iife.min.js", "page/base.js", "page/curves.js", "page/forest.js", "page/clients.js",
           "page/main.js")  # fmt: skip
STYLES = ("vendor/uPlot.min.css", "page/page.css")


def page(rows: Sequence[Row], found: Comparison, left_out: Sequence[str] = (), connect: str = "'none'") -> str:
    """The page as text, the same for the same runs.

    Args:
        rows: with all runs, also those that are not done.
        found: the comparison of those that are.
        left_out: why other runs are not on the page.
        connect: where the page may get more data from, as a content security policy says it.
    """
    code = "\n".join(map(_part, SCRIPTS))
    told = warnings(rows, left_out)
    flat = sharpness(found.rows)
    about = "Sharpness and client divergence of the trained models, as `fedspeed inspect` found them."
    title = setting(rows) or "several settings"
    runs = sum(len(row.runs) for row in rows)
    return Template(_part("page/page.html")).substitute(
        policy=_policy(code, connect),
        title=join([title]),
        sub=join([f"{len(rows)} methods, {runs} runs, {seeds_of(rows)} each"]),
        style="\n".join(map(_part, STYLES)),
        warnings=element("div", element("ul", *(element("li", text) for text in told)), class_="warn") if told else "",
        verdict=verdict(found),
        sharpness=_section("sharpness", "Sharpness", element("p", about, class_="note"), flat) if flat else "",
        configs=configs(rows),
        cards=cards(rows),
        provenance=provenance(rows),
        version=__version__,
        licence=join([_part("vendor/uPlot.LICENSE")]),
        data=script(embed(rows, found)),
        script=code,
    )


def _section(name: str, title: str, *children: str) -> Html:
    return element("section", element("h2", title), *children, id=name, data_nav=title)


def _policy(code: str, connect: str) -> str:
    """Nothing is loaded from anywhere, and no script runs but the page's own."""
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def _part(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")
