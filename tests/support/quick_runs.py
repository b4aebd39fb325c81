"""Options of runs that take a moment, and the bits of the runs in a folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

QUICK = "--clients 10 --active 2 --rounds 3 --local-steps 1 --model linear --backend serial".split()  # noqa: SIM905
MODULE = [sys.executable, "-c", "import sys; from fedspeed.cli import main; sys.exit(main())"]


def bits(folder: str) -> dict[str, tuple[bytes, list]]:
    """Model and rounds without times of every run in a folder."""
    found = {}
    for path in sorted(Path(folder).glob("*/config.toml")):
        rounds = [json.loads(line) for line in (path.parent / "rounds.jsonl").read_text().splitlines()]
        timeless = [{k: v for k, v in r.items() if "seconds" not in k} for r in rounds]
        found[path.parent.name] = ((path.parent / "model.safetensors").read_bytes(), timeless)
    return found
