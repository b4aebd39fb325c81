"""The names of a gallery example, run as a script without a window: its mathematics is tested where it belongs."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt

GALLERY = Path(__file__).parents[2] / "docs" / "gallery"


def gallery_names(example: str) -> dict[str, Any]:
    """Run `plot_EXAMPLE.py` and return its names."""
    mpl.use("agg")
    found = runpy.run_path(str(GALLERY / f"plot_{example}.py"), run_name="__main__")
    plt.close("all")
    return found
