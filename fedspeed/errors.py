"""What a user can put right: the CLI prints it as one line and exits with 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input. The message says what was expected, what was found and how to fix it."""


class ClientFailed(UserError):
    """One client's local work raised; the message names method, round, client and step."""


class Diverged(RuntimeError):
    """A client or the server produced NaN or Inf; nothing of that round was kept."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does."""


def unknown(kind: str, found: str, known: Iterable[str]) -> UserError:
    """An error for a name that does not exist, with the nearest one that does.

    Example:
        >>> print(unknown("method", "fedsped", ["fedavg", "fedspeed"]))
        unknown method 'fedsped'; did you mean 'fedspeed'? Known: fedavg, fedspeed
    """
    names = sorted(known)
    near = difflib.get_close_matches(found, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UserError(f"unknown {kind} {found!r}; {hint}Known: {', '.join(names)}")
