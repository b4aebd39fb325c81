"""The report page of runs that go on, served to this machine only; it can be read and nothing else."""

from __future__ import annotations

import hashlib
import json
import socketserver
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from ..errors import UserError, one_line
from .collect import finished
from .comparison import Comparison, targets_of
from .embed import embed
from .page import page, parts
from .standing import live, standings
from .watched import Watched

LOOPBACK = "127.0.0.1"
SHARE = 10
"""Making answers anew takes at most one of so many seconds of a core: runs need them more."""
HEADERS = {
    "Cache-Control": "no-cache",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Answers:
    """Page and data of a folder as it stands; an unchanged one is not made again."""

    def __init__(self, folder: Path) -> None:
        self.watched = Watched(folder)
        self.made = 0
        self._turn = threading.Lock()
        self._stale = True
        self._next = 0.0
        self._data, self._tag = b"", ""

    def page(self) -> bytes:
        """The page, complete also before its first question."""
        with self._turn:
            self._stale |= self.watched.look()
            return page(*self._now()).encode()

    def data(self) -> tuple[bytes, str]:
        """All that the page draws, and a tag that is another whenever that is."""
        with self._turn:
            if time.monotonic() < self._next:
                return self._data, self._tag
            began = time.thread_time()
            self._stale |= self.watched.look()
            if self._stale:
                rows, found, left_out, text = self._now()
                told = {"data": embed(rows, found), "parts": parts(rows, found, left_out, text)}
                self._data = json.dumps(told, separators=(",", ":"), allow_nan=False).encode()
                self._tag = f'"{hashlib.blake2b(self._data, digest_size=16).hexdigest()}"'
                self._stale, self.made = False, self.made + 1
                self._next = time.monotonic() + SHARE * (time.thread_time() - began)
            return self._data, self._tag

    def _now(self) -> tuple[Any, Comparison, list[str], str]:
        rows = self.watched.rows
        done = finished(rows)
        found = Comparison(done, targets_of(done) if rows else ())
        return rows, found, self.watched.left_out, live(standings(rows))


class Server(ThreadingHTTPServer):
    """Answers GET for `/` and `/data` to this machine.

    Args:
        port: 0 for any that is free.

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
            raise UserError(f"--port {port} cannot be had ({why}); choose another, 0 takes any that is free") from None

    def server_bind(self) -> None:
        """Bind without asking a name server who we are."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = LOOPBACK, int(self.server_address[1])

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{LOOPBACK}:{self.server_port}/"

    @property
    def hosts(self) -> set[str]:
        """What a request may call us: another name is another site's, led here by a name server of its own."""
        names = {LOOPBACK, "localhost"}
        return {f"{name}:{self.server_port}" for name in names} | (names if self.server_port == 80 else set())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader that has left is no error."""


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server
    server_version, sys_version = "fedspeed", ""
    timeout = 10
    error_message_format, error_content_type = "%(code)d %(explain)s\n", "text/plain; charset=utf-8"

    def do_GET(self) -> None:
        """The page, its data, or a refusal."""
        host, *more = self.headers.get_all("Host", [""])
        if more or host not in self.server.hosts:
            return self.send_error(403, None, f"ask for {self.server.url}")
        if self.path not in ("/", "/data"):
            return self.send_error(404, None, "there is / and /data, nothing else")
        try:
            if self.path == "/":
                return self._send(self.server.answers.page(), "text/html; charset=utf-8")
            body, tag = self.server.answers.data()
        except Exception as error:  # files that change as they are read: the page asks again
            return self.send_error(503, None, one_line(error))
        if self.headers.get("If-None-Match") == tag:
            return self._send(b"", "application/json", tag, 304)
        return self._send(body, "application/json", tag)

    def refuse(self) -> None:
        """There is nothing to do here but to look."""
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
        """Every answer, also a refusal, is for this page only."""
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nobody is told."""
