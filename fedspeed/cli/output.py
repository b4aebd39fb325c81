"""Standard streams that never raise, and SIGTERM as an exception: neither can lose a run."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

from ..errors import Terminated
from ..utils.processes import in_main_thread

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Column

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def visible(text: str) -> str:
    r"""Return text with control characters escaped, so that they cannot control a terminal; lines and tabs stay.

    Example:
        >>> print(visible("red \x1b[31m"))
        red \x1b[31m
    """
    return CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def width(console: Console) -> int:
    """Return the width for tables and text: that of a terminal, else no limit."""
    return console.width if console.is_terminal else 10_000


def show_table(
    console: Console, titles: Iterable[Column | str], rows: Iterable[Iterable[RenderableType]], **style: Any
) -> None:
    """Print a table without lines."""
    from rich.table import Table

    table = Table(*titles, box=None, pad_edge=False, **style)
    for row in rows:
        table.add_row(*row)
    console.print(table, soft_wrap=False)


class Outlet:
    """A standard stream that never raises: after a failed write it writes to the null device.

    A pipe whose reader has left (`fedspeed run | head -1`) is not an error; any other failure is kept in `error`.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        """Write text; characters that the encoding lacks become `?`."""
        try:
            return self.stream.write(text)
        except UnicodeEncodeError:
            known = self.stream.encoding or "ascii"
            return self.write(text.encode(known, "replace").decode(known))
        except OSError as error:
            self._lost(error)
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        try:
            self.stream.flush()
        except OSError as error:
            self._lost(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def _lost(self, error: OSError) -> None:
        if error.errno != errno.EPIPE and self.error is None:
            self.error = error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, self.stream.fileno())  # the rest of its buffer goes there too
        except (OSError, ValueError):
            self.stream = _nowhere()
        finally:
            os.close(nowhere)


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")


@contextmanager
def outlets() -> Iterator[Outlet]:
    """Replace standard output and error by outlets; yield that of the output. Closed ones (`>&-`) write nowhere."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes this number, which a file of ours would get otherwise
    before = sys.stdout, sys.stderr
    out, err = (Outlet(stream or _nowhere()) for stream in before)
    sys.stdout, sys.stderr = cast(TextIO, out), cast(TextIO, err)
    try:
        yield out
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = before


@contextmanager
def terminable() -> Iterator[list[int]]:
    """Raise `Terminated` on SIGTERM; yield a list that then holds the signal."""
    came: list[int] = []

    def stop(number: int, _: object) -> None:
        came.append(number)
        raise Terminated

    if not in_main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield came
        return
    signal.signal(signal.SIGTERM, stop)
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
