"""Ctrl-C works in processes that tests start, also where the suite itself began in the background; a browser."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forked import forked

# Threads of torch that have nothing to do wait asleep: with as many test processes as cores, those that spin take the
# time of the others. torch reads this when it is imported, which is later. It changes no bit.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # children would ignore it too
    signal.signal(signal.SIGINT, signal.default_int_handler)

SMOKE = (
    "methods/test_contract.py",
    "methods/test_transcription.py",
    "reproduce/test_results_version.py",
    "behaviour/test_before_move.py",
    "behaviour/test_format.py",
    "behaviour/test_resume.py",
)
"""The modules of `make smoke`: what a change of the arithmetic, or of files, breaks first."""

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of `SMOKE`."""
    for item in items:
        if item.path.as_posix().endswith(SMOKE):
            item.add_marker(pytest.mark.smoke)


@pytest.fixture(scope="session", autouse=True)
def state(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The user's key is one of the tests, for the processes that they start too."""
    os.environ["FEDSPEED_STATE"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test runs in a folder of its own, which is `tmp_path`; with `usefixtures`, all tests of a module do."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def quick_workers() -> Iterator[None]:
    """Workers of a test are forked: for tests that do not look at how they start and end."""
    with forked():
        yield


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A real one: Debian's chromium, driven by Playwright."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install fedspeed[dev]")
    if CHROMIUM is None:
        pytest.skip("no chromium found: apt-get install chromium")
    with api.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()
