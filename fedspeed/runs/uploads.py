"""The file of upload digests: rows of 16 bytes, little-endian: round (1 is the first), client, digest."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..client.upload_digest import Uploads
from ..errors import UserError
from ..utils.files import read_bytes
from .directory import RunDir

ROW = np.dtype([("round", "<u4"), ("client", "<u4"), ("digest", "<u8")])


def add_uploads(run: RunDir, t: int, uploads: Uploads) -> None:
    """Append the digests of a round."""
    rows = np.array([(t, client, value) for client, value in uploads.items()], ROW)
    if len(rows):
        with run.uploads_file.open("ab") as file:
            file.write(rows.tobytes())


def read_uploads(run: RunDir) -> dict[int, Uploads]:
    """Return round -> digest per client, of the rounds that have some; a row that was cut off is left out."""
    path = run.uploads_file
    try:
        content = read_bytes(path) if path.exists() else b""
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error}); put it back") from None
    found: dict[int, Uploads] = {}
    for t, client, value in np.frombuffer(content, ROW, len(content) // ROW.itemsize).tolist():
        found.setdefault(t, {})[client] = value
    return found


def upload_mismatches(before: Uploads | None, again: Iterable[tuple[int, int]], t: int) -> list[str]:
    """Return a line per client whose upload differs in a round that was run again; none if no digest was recorded."""
    return [
        f"round {t}: what client {client} sent is not what it sends in the round run again"
        for client, value in again
        if before is not None and before.get(client, value) != value
    ]


def shown(value: int | None) -> str:
    """Return a digest as text."""
    return "-" if value is None else f"{value:016x}"
