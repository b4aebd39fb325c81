"""A page in a real browser, the one that the fixture `browser` starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Opened:
    """A page, and what went wrong on it."""

    def __init__(self, browser: Any, path: Path | str, width: int = 1280, scheme: str = "light") -> None:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, accept_downloads=True
        )
        self.page, self.wrong = context.new_page(), []
        self.page.on("console", lambda message: self.wrong.append(message.text))
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", self._asked)
        self.url = path if isinstance(path, str) else path.as_uri()
        self.page.goto(self.url)
        self.page.wait_for_selector("html[data-ready]", timeout=60_000)

    def _asked(self, request: Any) -> None:
        known = ("file:", "data:", "blob:", self.url)
        if not request.url.startswith(known) or request.url.endswith(".ico"):
            self.wrong.append(request.url)

    def drawn(self, panel: str = "test_accuracy") -> str:
        """What a panel shows, as a picture."""
        self.page.wait_for_timeout(150)
        return self.page.locator(f'[data-panel="{panel}"] canvas').evaluate("canvas => canvas.toDataURL()")

    def until(self, truth: str) -> None:
        """Wait; `wait_for_function` would need a page that lets other scripts run."""
        for _ in range(200):
            if self.page.evaluate(truth):
                return
            self.page.wait_for_timeout(100)
        raise AssertionError(truth)
