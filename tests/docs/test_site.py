"""The site as `make docs` builds it: without a warning, without a network, no dead link, and in a real browser."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

import fedspeed

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
NOWHERE = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
FETCHED = ("src", "srcset", "data-src", "poster")
REMOTE = re.compile(r"(https?:)?//")
IN_STYLE = re.compile(r"(?:url\(|@import)\s*[\"']?\s*(?:https?:)?//")
IN_SCRIPT = re.compile(r"(?:fetch|import|importScripts|sendBeacon|Worker|WebSocket)\s*\(\s*[\"'`](?:https?|wss?):"
                       r"|\.src\s*=\s*[\"'`](?:https?:)?//")  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Built once, whoever of several test processes comes first; FEDSPEED_SITE names one that was built before."""
    if "FEDSPEED_SITE" in os.environ:
        return Path(os.environ["FEDSPEED_SITE"]).resolve()
    pytest.importorskip("sphinx", reason="Sphinx is not installed: pip install fedspeed[docs]")
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "site"
    shared.mkdir(exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "html" / "index.html").exists():
            cut_off = ["unshare", "--map-root-user", "--net"]  # no network at all, where one may do that
            alone = cut_off if shutil.which("unshare") and not subprocess.run([*cut_off, "true"]).returncode else []
            command = [*alone, sys.executable, str(ROOT / "docs" / "build.py"), str(shared)]
            done = subprocess.run(command, env={**os.environ, **NOWHERE}, cwd=shared, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            assert "WARNING" not in done.stderr
    return shared / "html"


class Read(HTMLParser):
    """What a page asks for, where it leads, and where it can be led to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.assets, self.links, self.places, self.styles = list[str](), list[str](), set[str](), ""
        self._style = False
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attributes}
        self.places |= {given[key] for key in ("id", "name") if key in given}
        self.assets += [given[key] for key in FETCHED if key in given]
        if "href" in given:
            (self.assets if tag == "link" else self.links).append(given["href"])
        self.styles += given.get("style", "")
        self._style = tag == "style"

    def handle_data(self, data: str) -> None:
        self.styles += data * self._style
        self._style = False


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Read]:
    return {path: Read(path) for path in sorted(site.rglob("*.html"))}


def test_no_asset_is_remote(site, pages):
    for path, page in pages.items():
        assert not [asset for asset in page.assets if REMOTE.match(asset)], path
        assert not IN_STYLE.search(page.styles), path
    for path in site.rglob("*.css"):
        assert not IN_STYLE.search(path.read_text("utf-8")), path
    scripts = [*site.rglob("*.js")]
    assert scripts
    for path in [*scripts, *pages]:
        assert not IN_SCRIPT.search(path.read_text("utf-8", errors="replace")), path


def test_the_search_for_remote_assets_finds_one(tmp_path):
    page = tmp_path / "page.html"
    page.write_text(
        '<script src="https://a.b/c.js"></script><style>p {background: url(//a.b/c)}</style><a href="x">y</a>'
    )
    found = Read(page)
    assert (found.assets, found.links) == (["https://a.b/c.js"], ["x"])
    assert REMOTE.match(found.assets[0])
    assert IN_STYLE.search(found.styles)
    assert IN_SCRIPT.search('await fetch("https://a.b")')
    assert not IN_SCRIPT.search('x.setAttribute("xmlns", "http://www.w3.org/2000/svg")')


def test_every_tutorial_can_be_had_as_a_notebook(site, pages):
    tutorials = [path.stem for path in (ROOT / "docs" / "tutorials").glob("[0-9]*.md")]
    assert len(tutorials) == 8
    for name in tutorials:
        path = site / "tutorials" / f"{name}.html"
        (link,) = [link for link in pages[path].links if link.endswith(f"/{name}.ipynb")]
        assert json.loads((path.parent / link).read_text())["nbformat"] == 4


def test_no_internal_link_or_anchor_is_dead(site, pages):
    dead, followed = [], 0
    for path, page in pages.items():
        for link in {*page.links, *page.assets}:
            if re.match(r"[a-z]+:|//|#?$", link):
                continue
            name, _, fragment = unquote(link).partition("#")
            target = (path.parent / name.partition("?")[0]).resolve() if name else path
            followed += 1
            if not target.is_file() or (fragment and target in pages and fragment not in pages[target].places):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert dead == []
    assert followed > 10_000


def test_every_public_name_can_be_linked_to(site, pages):
    """autodoc has found them all, and wrote what they say."""
    places = set().union(*(page.places for page in pages.values()))
    assert {f"fedspeed.{name}" for name in fedspeed.__all__} <= places
    assert "fedspeed.Federated.from_arrays" in places
    assert "cmdoption-fedspeed-run-local-epochs" in places
    text = (site / "api" / "simulate.html").read_text("utf-8")
    assert "<strong>no_decay</strong>" in text


def test_formulas_need_no_script(site):
    """They are MathML, which browsers draw by themselves."""
    text = (site / "reference" / "notation.html").read_text("utf-8")
    assert text.count("<math") > 20
    assert "<mfrac>" in text
    assert "MathJax" not in text


class Opened:
    """A page of the site from the disk, and what went wrong on it."""

    def __init__(self, browser: Any, path: Path, width: int = 1280, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page, self.wrong = self.context.new_page(), list[str]()
        self.page.on("console", lambda message: self.wrong.append(message.text))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("requestfailed", self.failed)
        self.page.on(
            "request", lambda request: request.url.startswith(("file:", "data:")) or self.wrong.append(request.url)
        )
        self.page.goto(path.as_uri())

    def failed(self, request: Any) -> None:
        """Note it, unless the next page was opened first, which aborts requests (often the icon's)."""
        if request.failure != "net::ERR_ABORTED":
            self.wrong.append(f"{request.failure} {request.url}")

    def luminance(self) -> float:
        """Of the background, 0 (black) to 255."""
        colour = self.page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(float(part) for part in re.findall(r"[\d.]+", colour)[:3]) / 3

    def fits(self) -> bool:
        """Whether nothing is wider than the window; boxes and tables scroll inside of themselves."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))


@pytest.fixture
def opened(browser, site, tmp_path) -> Iterator[Any]:
    """Opens pages; at the end nothing may have gone wrong on them. Pictures of them stay in the temporary folder."""
    found: list[Opened] = []

    def open_page(name: str, **how: Any) -> Opened:
        found.append(Opened(browser, site / name, **how))
        return found[-1]

    yield open_page
    for number, each in enumerate(found):
        each.page.screenshot(path=tmp_path / f"{number}.png")
        assert each.wrong == []
        each.context.close()


def test_the_home_leads_to_the_four_parts(opened):
    home = opened("index.html").page
    assert home.locator("img[src*=demo]").evaluate("picture => picture.complete && picture.naturalWidth > 300")
    assert home.locator("pre", has_text="fedspeed compare").is_visible()
    cards = home.locator(".sd-card")
    assert cards.count() == 4
    for title in ("Tutorials", "How-to guides", "Explanation", "Reference"):
        home.goto(home.url)
        cards.filter(has_text=title).click()
        home.wait_for_url(re.compile(r"(?<!index)\.html|tutorials/index\.html"))
        assert home.locator("h1").inner_text().startswith(title)
        home.go_back()


def test_a_method_s_page_has_its_box_and_leads_to_its_relatives(opened):
    page = opened("methods/fedspeed.html").page
    assert page.locator("h1").inner_text().startswith("FedSpeed")
    assert "g_tilde = (1 - alpha) g1 + alpha g2" in page.locator("pre").first.inner_text()
    page.locator("article a", has_text="FedDyn").first.click()
    assert page.url.endswith("methods/feddyn.html")


def test_the_search_works_from_the_disk(opened):
    page = opened("index.html").page
    page.locator("input[name=q]").first.fill("dirichlet-refill")
    page.keyboard.press("Enter")
    results = page.locator("#search-results li a")
    results.first.wait_for()
    results.filter(has_text=re.compile("^Data$")).click()
    assert page.url.partition("?")[0].endswith("/guides/data.html")
    assert "dirichlet-refill" in page.locator("article").inner_text()


@pytest.mark.parametrize(
    ("query", "guide"),
    [
        ("wandb", "trackers"),
        ("allow-code", "resume-and-verify"),
        ("client sampling", "participation"),
        ("learning rate schedule", "schedules"),
        ("adam", "local-optimizer"),
        ("fairness", "per-client"),
    ],
)
def test_a_search_finds_the_guide_first(opened, query, guide):
    page = opened("index.html").page
    page.locator("input[name=q]").first.fill(query)
    page.keyboard.press("Enter")
    first = page.locator("#search-results li a").first
    first.wait_for()
    assert f"guides/{guide}.html" in str(first.get_attribute("href"))


@pytest.mark.parametrize(
    "name", ["index.html", "methods/fedspeed.html", "cli/run.html", "results/cnn/table7.html", "guides/install.html"]
)
def test_a_phone_s_width_is_enough(opened, name):
    phone = opened(name, width=390)
    assert phone.fits()
    assert not phone.page.locator(".sidebar-drawer").evaluate("bar => bar.getBoundingClientRect().right > 0")
    phone.page.locator("header label[for=__navigation]").click()
    phone.page.wait_for_function("document.querySelector('.sidebar-drawer').getBoundingClientRect().left >= 0")
    assert phone.page.locator(".sidebar-drawer input[name=q]").is_visible()


@pytest.mark.parametrize("name", ["index.html", "methods/fedspeed.html", "api/simulate.html"])
def test_dark_mode_is_dark(opened, name):
    assert opened(name, scheme="light").luminance() > 200
    dark = opened(name, scheme="dark")
    assert dark.luminance() < 60
    colour = dark.page.locator("article p").first.evaluate("element => getComputedStyle(element).color")
    assert sum(float(part) for part in re.findall(r"[\d.]+", colour)[:3]) / 3 > 150
