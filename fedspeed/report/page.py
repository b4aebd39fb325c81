"""The report page: one HTML file without external resources."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from string import Template

from .. import __version__
from .comparison import Comparison
from .html import Html, element, join
from .page_data import embed, script
from .page_sections import cards, configs, provenance, sharpness, verdict, warnings
from .run_files import Row, seeds_of, setting

SCRIPTS = ("vendor/uPlot.iife.min.js", "page/base.js", "page/curves.js", "page/forest.js", "page/clients.js",
           "page/main.js")  # fmt: skip
LIVE = "page/live.js"
STYLES = ("vendor/uPlot.min.css", "page/page.css")


def page(rows: Sequence[Row], found: Comparison, left_out: Sequence[str] = (), live: str | None = None) -> str:
    """Return the page as text, the same for the same runs.

    Args:
        rows: all runs, also unfinished ones.
        found: the comparison of the finished ones.
        left_out: why other runs are not on the page.
        live: the states of the runs as HTML; a live page asks its server for `/data`, any other makes no request.
    """
    code = "\n".join(map(_part, SCRIPTS if live is None else (*SCRIPTS, LIVE)))
    return Template(_part("page/page.html")).substitute(
        parts(rows, found, left_out, live),
        policy=_policy(code, "'none'" if live is None else "'self'"),
        style="\n".join(map(_part, STYLES)),
        version=__version__,
        licence=join([_part("vendor/uPlot.LICENSE")]),
        data=script(embed(rows, found)),
        script=code,
    )


def parts(
    rows: Sequence[Row], found: Comparison, left_out: Sequence[str] = (), live: str | None = None
) -> dict[str, str]:
    """Return the sections of the page as HTML, by the names of their placeholders."""
    notes = warnings(rows, left_out, statuses=live is None)
    flat = sharpness(found.rows)
    about = "Sharpness and client divergence of the trained models, as `fedspeed inspect` found them."
    runs = sum(len(row.runs) for row in rows)
    return {
        "title": join([found.look.titled(setting(rows) or ("several settings" if rows else "No runs yet"))]),
        "sub": join([f"{_many(len(rows), 'method')}, {_many(runs, 'run')}, {seeds_of(rows)} each"] if rows else []),
        "warnings": element("div", element("ul", *(element("li", text) for text in notes)), class_="warn")
        if notes
        else "",
        "live": _section("live", "Runs", live) if live is not None else "",
        "verdict": verdict(found),
        "sharpness": _section("sharpness", "Sharpness", element("p", about, class_="note"), flat) if flat else "",
        "configs": configs(rows),
        "cards": cards(rows),
        "provenance": provenance(rows),
    }


def _many(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _section(name: str, title: str, *children: str) -> Html:
    return element("section", element("h2", title), *children, id=name, data_nav=title)


def _policy(code: str, connect: str) -> str:
    """Return a content security policy: nothing is loaded, and only the page's own script runs."""
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def _part(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text("utf-8")
