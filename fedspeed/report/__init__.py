"""Reports of runs: tables, statistics, figures, pages and exports, from the files of run directories. No torch.

`fedspeed.report("runs/first", "table.tex", columns="last5,best")` writes one file about runs, as the command does, and
returns its path: a page (.html), a table (.md, .tex, .csv) or a figure (.png, .svg, .pdf). `write.report` has the
arguments, which are the options of the command.
"""

import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    """The folder as a function, since the command, the function and the folder share a name."""

    def __call__(self, *runs_and_out: Any, **how: Any) -> Path:
        """Write one file about runs; see `write.report`."""
        from .write import report

        return report(*runs_and_out, **how)

    @property
    def __signature__(self) -> inspect.Signature:
        from .write import report

        return inspect.signature(report)


sys.modules[__name__].__class__ = _CallableModule
