"""Runs in progress: an incremental reader of a folder, the state of every run, and a page served to this machine."""

from __future__ import annotations

import hashlib
import json
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from ..errors import UserError, one_line
from ..record import Record, is_number
from ..runs.diagnosis import diagnose
from ..runs.directory import CODE, FILES, INSPECTION, MODEL, is_running
from .comparison import Comparison, targets_of
from .page import Html, element, join, page, parts, table
from .page_data import embed
from .run_files import Row, RunFiles, finished, folders_of_runs, minutes, read_any, rows_of, short

READ = (*(name for name in FILES if name != MODEL), INSPECTION)
"""The files of a run that a page depends on."""
RECENT = 20
"""The number of last rounds whose mean time predicts the remaining time."""
STATES = ("running", "failed", "diverged", "damaged", "interrupted", "stopped", "finished")
"""States of a run, in the order in which they are listed."""
HEADER = ("run", "state", "rounds", "last", "left", "method", "seed")
LOOPBACK = "127.0.0.1"
SHARE = 10
"""Rendering uses at most one second in `SHARE` of a core, so that it does not slow the runs down."""
HEADERS = {
    "Cache-Control": "no-cache",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Seen(NamedTuple):
    """A run as last read: the stamps of its files, and the run or the error of reading it."""

    stamp: tuple[object, ...]
    run: RunFiles | UserError


class Watched:
    """An incremental reader of a folder of runs: `rows`, and why other runs are left out (`left_out`).

    Args:
        folder: a folder of runs, which may still be empty, or a run; links out of it are not followed.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise UserError(f"{folder}: expected a folder of runs, found none; create it, or start a run in it")
        self.folder = folder
        self.rows: list[Row] = []
        self.left_out: list[str] = []
        self._seen: dict[Path, Seen] = {}

    def look(self) -> bool:
        """Read the runs that changed, and return whether any did."""
        try:
            folders = folders_of_runs(self.folder)
        except UserError:  # there are none yet
            folders = []
        before, self._seen = self._seen, {path: self._read(path) for path in folders}
        if before.keys() == self._seen.keys() and all(before[path] is seen for path, seen in self._seen.items()):
            return False
        self.rows, self.left_out = rows_of(folders, self._found, unfinished=True, in_order=True)
        return True

    def _found(self, path: Path) -> RunFiles:
        run = self._seen[path].run
        if isinstance(run, UserError):
            raise run
        return run

    def _read(self, path: Path) -> Seen:
        """Return a run; read it again only if its files changed or its process ended."""
        seen = self._seen.get(path)
        stamp: tuple[object, ...] = tuple(_stamp(path / name) for name in READ)
        if seen and isinstance(seen.run, RunFiles) and seen.run.done and seen.stamp[1:] == stamp:
            return seen
        with is_running(path) as busy:
            stamp = (busy, *stamp)
        if seen and seen.stamp == stamp:
            return seen
        try:
            root = self.folder.resolve()
            for place in (path, *(path / name for name in (*READ, CODE))):
                if not place.resolve().is_relative_to(root):
                    raise UserError(f"{place.name} is a link out of {self.folder}; copy its target instead")
            return Seen(stamp, read_any(path))
        except UserError as error:
            return Seen(stamp, error)


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino


@dataclass(frozen=True)
class Standing:
    """The state of a run, in progress or not.

    Args:
        state: one of `STATES`.
        about: the error and the health findings; "" without any.
        of: the planned rounds; 0 if the config does not say.
        left: the remaining seconds of a run in progress; None before its first round.
        curve: the test accuracies, or the losses without them.
    """

    run: str
    method: str
    seed: int
    state: str
    about: str
    rounds: int
    of: int
    left: float | None
    score: str
    curve: list[float]


def standings(rows: Sequence[Row]) -> list[Standing]:
    """Return the states of all runs, those in progress first."""
    found = [standing(run, row.label) for row in rows for run in row.runs]
    return sorted(found, key=lambda one: STATES.index(one.state))


def standing(run: RunFiles, method: str) -> Standing:
    """Return the state of one run from its files."""
    status, _, why = str(run.summary["status"]).partition(":")
    state = next((word for word in STATES if status.startswith(word)), "interrupted")  # terminated
    error, of = why.strip().partition("\n")[0], run.config.get("rounds")
    of = of if type(of) is int and of > 0 else 0
    about = [error] if error else []
    if findings := run.findings or _findings(run):
        about.append(f"unhealthy: {', '.join(findings)}")
    curve, score = [value for _, value in run.curve()], "-"
    if curve:
        score = f"{100 * curve[-1]:.2f}%"
    elif curve := [value for _, value in run.curve("test_loss") or run.curve("train_loss")]:
        score = f"loss {short(curve[-1])}"
    recent = [plain["seconds"] + plain["eval_seconds"] for plain in run.rounds[-RECENT:]]
    left = fmean(recent) * max(0, of - len(run.rounds)) if state == "running" and recent and of else None
    return Standing(
        run.path.name, method, int(run.summary["seed"]), state, "; ".join(about), len(run.rounds), of, left, score,
        [value for value in curve if is_number(value)],
    )  # fmt: skip


def _findings(run: RunFiles) -> list[str]:
    """Return the names of the health findings so far of a run in progress."""
    if run.done or not any(plain.get("signs") for plain in run.rounds):
        return []
    return list(dict.fromkeys(one.name for one in diagnose([Record.from_dict(plain) for plain in run.rounds])))


def headline(found: Sequence[Standing]) -> str:
    """Return the number of runs per state, and the time that those in progress still need.

    Example:
        >>> headline([])
        'no runs yet'
    """
    counts = Counter(one.state for one in found)
    parts = [f"{counts[state]} {state}" for state in STATES if counts[state]]
    left = max((one.left for one in found if one.left is not None), default=None)
    parts = [", ".join(parts) or "no runs yet"]
    return "; ".join(parts if left is None else [*parts, f"about {minutes(left)} left for what is running"])


def progress(one: Standing) -> str:
    """Return the rounds done, and of how many.

    Example:
        >>> progress(Standing("a", "fedavg", 0, "running", "", 3, 10, None, "-", []))
        '3 of 10'
    """
    return f"{one.rounds} of {one.of}" if one.of else str(one.rounds)


def time_left(one: Standing) -> str:
    """Return the remaining time in words; "" if it is not known."""
    return "" if one.left is None else minutes(one.left)


def live_section(found: Sequence[Standing]) -> Html:
    """Return the section of the page about the runs in progress."""
    text = headline(found)
    lead = element("p", f"{text[0].upper()}{text[1:]}.", class_="lead")
    if not found:
        return join([lead, element("p", "They show here as soon as they begin.", class_="note")])
    lines = []
    for one in found:
        state = join([element("span", one.state, class_=f"state {one.state}"), f" {one.about}" if one.about else ""])
        done, name = str(min(one.rounds, one.of)), f"{one.run}: {progress(one)} rounds"
        bar = element("progress", value=done, max=str(one.of), aria_label=name) if one.of else ""
        rounds = join([bar, f" {progress(one)}"])
        lines.append((one.run, state, rounds, one.score, time_left(one), one.method, str(one.seed)))
    return join([lead, table(HEADER, lines, "plain runs", label="runs", tall=True, id="live-table")])


class Answers:
    """The page and the data of a folder, rendered again only if the folder changed."""

    def __init__(self, folder: Path) -> None:
        self.watched = Watched(folder)
        self.made = 0
        self._turn = threading.Lock()
        self._stale = True
        self._next = 0.0
        self._data, self._tag = b"", ""

    def page(self) -> bytes:
        """Return the page; it is complete before its first request for data."""
        with self._turn:
            self._stale |= self.watched.look()
            return page(*self._now()).encode()

    def data(self) -> tuple[bytes, str]:
        """Return the page's data, and an ETag that changes with it."""
        with self._turn:
            if time.monotonic() < self._next:
                return self._data, self._tag
            began = time.thread_time()
            self._stale |= self.watched.look()
            if self._stale:
                rows, found, left_out, text = self._now()
                news = {"data": embed(rows, found), "parts": parts(rows, found, left_out, text)}
                self._data = json.dumps(news, separators=(",", ":"), allow_nan=False).encode()
                self._tag = f'"{hashlib.blake2b(self._data, digest_size=16).hexdigest()}"'
                self._stale, self.made = False, self.made + 1
                self._next = time.monotonic() + SHARE * (time.thread_time() - began)
            return self._data, self._tag

    def _now(self) -> tuple[Any, Comparison, list[str], str]:
        rows = self.watched.rows
        done = finished(rows)
        found = Comparison(done, targets_of(done) if rows else ())
        return rows, found, self.watched.left_out, live_section(standings(rows))


class Server(ThreadingHTTPServer):
    """A server of GET `/` and `/data` that listens on this machine only.

    Args:
        port: 0 takes any free port.

    Example:
        >>> with Server(Path("."), 0) as server:
        ...     server.url.startswith("http://127.0.0.1:")
        True
    """

    daemon_threads = True

    def __init__(self, folder: Path, port: int) -> None:
        self.answers = Answers(folder)
        try:
            super().__init__((LOOPBACK, port), Handler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or "expected 0 to 65535"
            raise UserError(f"--port {port} cannot be used ({why}); choose another, 0 takes any free port") from None

    def server_bind(self) -> None:
        """Bind without a reverse name lookup, which can take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = LOOPBACK, int(self.server_address[1])

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{LOOPBACK}:{self.server_port}/"

    @property
    def hosts(self) -> set[str]:
        """The host names that a request may use; another name may be a foreign site that resolves to this machine."""
        names = {LOOPBACK, "localhost"}
        return {f"{name}:{self.server_port}" for name in names} | (names if self.server_port == 80 else set())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that closed the connection."""


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server
    server_version, sys_version = "fedspeed", ""
    timeout = 10
    error_message_format, error_content_type = "%(code)d %(explain)s\n", "text/plain; charset=utf-8"

    def do_GET(self) -> None:
        """Answer with the page, its data, or a refusal."""
        host, *more = self.headers.get_all("Host", [""])
        if more or host not in self.server.hosts:
            return self.send_error(403, None, f"ask for {self.server.url}")
        if self.path not in ("/", "/data"):
            return self.send_error(404, None, "there is / and /data, nothing else")
        try:
            if self.path == "/":
                return self._send(self.server.answers.page(), "text/html; charset=utf-8")
            body, tag = self.server.answers.data()
        except Exception as error:  # files can change while they are read; the page asks again
            return self.send_error(503, None, one_line(error))
        if self.headers.get("If-None-Match") == tag:
            return self._send(b"", "application/json", tag, 304)
        return self._send(body, "application/json", tag)

    def refuse(self) -> None:
        """Refuse everything but GET."""
        self.send_error(405, None, "GET only")

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = refuse

    def _send(self, body: bytes, kind: str, tag: str = "", code: int = 200) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if tag:
            self.send_header("ETag", tag)
        self.end_headers()
        self.wfile.write(body)

    def end_headers(self) -> None:
        """Add the security headers to every answer, errors included."""
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Silence the default request log."""
