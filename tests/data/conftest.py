"""Every test here has a cache of its own, except those that ask for real data."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if "slow" not in request.keywords:
        monkeypatch.setenv("FEDSPEED_CACHE", str(tmp_path / "cache"))
