"""The signature of a run directory whose code the user executed: `resume` and others then need not ask again.

A key in the user's own state folder signs the config and the code of a run when the run is made. A run directory of
another user or machine has no signature of this key, and neither has one whose config or code was changed afterwards:
those are only data, as before. A program that reads the key can sign, so a key that other users can read is not used.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..utils.files import read_json, read_text, seal_holds, sealed, write
from ..utils.own_code import Code
from .directory import SIGNATURE, RunDir

KEY = "key"
"""The name of the key in the state folder."""
SIZE = 32
"""Bytes of a key."""
MOST = 10_000
"""Bytes of the file of a signature."""


def state_folder() -> Path:
    """Return `$FEDSPEED_STATE`, or `fedspeed` in the user's state folder (`$XDG_STATE_HOME`, `~/.local/state`).

    Raises:
        UserError: if there is none. A relative one does not count: it could lie in a stranger's run directory.
    """
    for variable, inner in (("FEDSPEED_STATE", ""), ("XDG_STATE_HOME", "fedspeed")):
        if chosen := os.environ.get(variable):
            if not os.path.isabs(chosen):
                raise UserError(f"{variable}: expected an absolute path, found {chosen}")
            return Path(chosen, inner)
    try:
        return Path.home() / ".local" / "state" / "fedspeed"
    except RuntimeError:
        raise UserError("there is no home folder for a key; set FEDSPEED_STATE") from None


def read_key() -> bytes | None:
    """Return the user's key, None if there is none; raise UserError if it is not this user's alone, or is damaged."""
    path = state_folder() / KEY
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"the key {path} cannot be read ({error.strerror})") from None
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise UserError(
                f"the key {path} is not used: expected a file of yours that no other user can read; delete it, and "
                f"the next run makes another"
            )
        key = os.read(file, SIZE + 1)
    finally:
        os.close(file)
    if len(key) != SIZE:
        raise UserError(f"the key {path} is damaged: expected {SIZE} bytes, found another number; delete it")
    return key


def make_key() -> bytes | None:
    """Return the user's key, which is made if there is none; of processes that make one at once, all get the same."""
    folder = state_folder()
    path, part = folder / KEY, folder / f".{KEY}-{secrets.token_hex(8)}"
    if not os.path.lexists(path):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            try:
                os.write(file, secrets.token_bytes(SIZE))
                os.fsync(file)
            finally:
                os.close(file)
            with suppress(FileExistsError):  # Another process was first: its key is taken.
                os.link(part, path)  # The name appears with all bytes, and never replaces a key.
        except OSError as error:
            raise UserError(f"no key can be made in {folder} ({error.strerror})") from None
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)
    return read_key()


def sign(run: RunDir, codes: Iterable[Code]) -> None:
    """Sign the config of a run and all code that it names; a user without a key, in a home that cannot be written for
    example, has no signature, and is asked as for a run of another user."""
    try:
        key = make_key()
    except (UserError, AttributeError):  # Windows has no such permissions.
        run.signature_file.unlink(missing_ok=True)
        return
    if key is None:  # Another process has deleted it.
        return
    signature = {"key": _name(key), "signature": _signature(key, run.config(), codes)}
    write(run.signature_file, sealed(signature, indent=1) + "\n")


def refusal(run: RunDir, tables: dict[str, Any], codes: Iterable[Code]) -> str | None:
    """Return why a run directory's signature does not count, "" if it has none; None if the user's key signed these
    tables and this code.

    Args:
        tables: the config that is to be used, as it is in its file.
        codes: all code that it names, as it is to be executed; read only if the key is right.
    """
    found = read_json(run.signature_file, MOST) if not run.signature_file.is_symlink() else {}
    if not found:
        return ""
    try:
        key = read_key()
    except (UserError, AttributeError) as error:
        return str(error)
    if key is None or found.get("key") != _name(key):
        return "it was signed with another key, by another user or on another machine"
    claimed = str(found.get("signature")).encode(errors="replace")
    if not hmac.compare_digest(claimed, _signature(key, tables, codes).encode()):
        return "its config or code was changed after it was signed"
    return None


def damage(run: RunDir) -> list[str]:
    """Return how the file of a signature is damaged, of any key: it holds its own digest."""
    try:
        whole = seal_holds(read_text(run.signature_file, MOST).removesuffix("\n"), indent=1)
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, RecursionError):
        whole = False
    return [] if whole else [f"{SIGNATURE} is damaged; delete it, and the run asks before its code is executed"]


def _name(key: bytes) -> str:
    """Return a name of a key, which says nothing about its bytes."""
    return hmac.new(key, b"name", hashlib.sha256).hexdigest()[:16]


def _signature(key: bytes, tables: dict[str, Any], codes: Iterable[Code]) -> str:
    """Return the signature of a config and its code. The config counts as a whole: which function is called, and with
    what, is as much a part of what is executed as the code."""
    config = json.dumps(tables, sort_keys=True, default=str).encode()
    parts = [config, *sorted({code.packed() for code in codes})]
    return hmac.new(key, b"".join(b"%d\0%s" % (len(part), part) for part in parts), hashlib.sha256).hexdigest()
