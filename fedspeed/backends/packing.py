"""What worker processes are sent, and what they can find again."""

from __future__ import annotations

import itertools
import pickle
import pickletools
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..client import Work
from ..errors import UserError
from ..method import Method
from ..plan import Plan
from ..usercode import LOADED


def sources(method: Method) -> list[tuple[str, str]]:
    """How to find the classes of a method that come from a user's file, and its digest; a worker loads these first."""
    own = [(method.source, method.code)] if method.source else []
    return own + [pair for value in method.fields().values() if isinstance(value, Method) for pair in sources(value)]


def files(*pickles: bytes) -> list[tuple[str, str]]:
    """The users' files that pickles name, of a model for example, and their digests; a worker loads these first too."""
    return [found for name, found in LOADED.items() if any(name.encode() in each for each in pickles)]


def payload(work: Work, data: Any, module: bytes) -> bytes:
    """Everything a worker needs that is not in shared memory."""
    parts = {"method": work.method, "loss": work.loss, "data": data, "no_decay": work.flat.no_decay}
    common = {name: getattr(work, name) for name in Work.__dataclass_fields__ if name not in {*parts, "flat"}}
    for name, value in parts.items():
        check_picklable(name, value)
    return pickle.dumps({**parts, "module": module, "common": common})


def packed(plan: Plan, module: Any, method: Method, loss: Any) -> bytes | None:
    """The model as workers get it; None where `auto` stays in this process, since something cannot be sent, or only by
    importing the user's script once more."""
    try:
        parts = [check_picklable(*part) for part in (("method", method), ("loss", loss), ("model", module))]
    except UserError:
        if plan.backend == "auto":
            return None
        raise
    return None if plan.backend == "auto" and any(in_main(part) for part in parts) else parts[-1]


def in_main(pickled: bytes) -> str:
    """The first name that a pickle looks for in `__main__`, the script or notebook that runs; "" if there is none."""
    if b"__main__" not in pickled:
        return ""
    words = [str(argument) for opcode, argument, _ in pickletools.genops(pickled) if "UNICODE" in opcode.name]
    return next((b for a, b in itertools.pairwise(words) if a == "__main__"), "")


@contextmanager
def without_main() -> Iterator[None]:
    """Start a process that does not import the user's script again: it needs nothing of it, and need not be guarded."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def check_picklable(name: str, value: Any) -> bytes:
    """Pickle a value, or say that this one cannot be sent to a worker."""
    try:
        pickled = pickle.dumps(value)
    except Exception as error:
        raise UserError(
            f"back end process: the {name} cannot be sent to worker processes ({type(error).__name__}: {error}); "
            f"define it at the top level of a module, or use backend='serial'"
        ) from None
    found, main = in_main(pickled), sys.modules["__main__"]
    file = Path(getattr(main, "__file__", None) or "<none>")  # a program read from stdin is called "<stdin>"
    if found and not file.is_file() and getattr(main, "__spec__", None) is None:
        raise UserError(
            f"back end process: {found} ({name}) is defined in this notebook or session, where worker processes cannot "
            f"find it; write it into a module (a .py file) and import it, or use backend='serial'"
        )
    return pickled
