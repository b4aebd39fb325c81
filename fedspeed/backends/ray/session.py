"""The connection of this process to Ray: made by the first run that needs it, closed by the last."""

from __future__ import annotations

import logging
import os
import signal
import socket
import tempfile
import threading
import warnings
from typing import Any, NamedTuple

from ...errors import UserError, one_line
from ...utils.processes import safe_path

LOCAL = "local"
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""Ray sends no usage statistics, and does not hide devices from workers that ask for none."""
REACH = 5.0
"""Seconds in which an address must accept a connection."""
_LOCK = threading.Lock()
_users = 0  # runs that use a connection made here; 0 if there is none
_address = ""  # of that connection; LOCAL for a Ray that this process started


class Joined(NamedTuple):
    """Kind of a connection: made here (`ours`) or by the caller's program; to a Ray of this process `alone`."""

    ours: bool
    alone: bool


def import_ray() -> Any:
    """Import and return Ray; raise a UserError if it is not installed."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise UserError(
            f"back end ray: Ray cannot be imported ({one_line(error)}); pip install 'fedspeed[ray]', or use --backend "
            f"process"
        ) from None
    return ray


def join(address: str, gpus: float) -> Joined:
    """Connect this process unless it is connected; `leave` undoes it.

    Args:
        address: `auto`, `HOST:PORT` or `ray://HOST:PORT`; "" for `$RAY_ADDRESS`, or without one a local Ray.
        gpus: of a local Ray. It gets no CPUs, which are not counted there: Ray would start a process for each.
    """
    global _users, _address
    ray = import_ray()
    if address in ("", "auto"):  # as Ray itself takes it
        address = os.environ.get("RAY_ADDRESS") or address or LOCAL
    with _LOCK:
        if not _users and ray.is_initialized():
            return Joined(ours=False, alone=False)
        if not _users:
            require_reachable(address)
            own = {"num_cpus": 0, "num_gpus": gpus, "include_dashboard": False} if address == LOCAL else {}
            _connect(ray, address, own)
            _address = address
        elif address != _address:
            raise UserError(
                f"back end ray: expected one cluster for all runs of a process, got {address} beside {_address}; close "
                f"those runs first, or start another process"
            )
        _users += 1
        return Joined(ours=True, alone=_address == LOCAL)


def leave(joined: Joined) -> None:
    """Disconnect if the connection was made here and no other run uses it; a local Ray ends."""
    global _users
    if not joined.ours:
        return
    with _LOCK:
        _users -= 1
        if not _users:
            import_ray().shutdown()


def _connect(ray: Any, address: str, own: dict[str, Any]) -> None:
    """Join or start Ray. Workers get an empty working directory: Ray would let them import from the current one."""
    logger = logging.getLogger("ray")
    before = logger.level
    logger.setLevel(logging.ERROR)
    ends = signal.getsignal(signal.SIGTERM)  # Ray installs a handler of its own, which is undone below
    try:
        with safe_path(), tempfile.TemporaryDirectory(prefix="fedspeed-ray-") as empty, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            quiet = {"log_to_driver": False, "configure_logging": False}
            ray.init(address=address, runtime_env={"working_dir": empty}, **quiet, **own)
    except Exception as error:
        ray.shutdown()
        why = one_line(error).split("  ")[0][:300]
        if "ersion mismatch" in str(error):
            raise UserError(
                f"back end ray: expected the cluster at {address} to have this Ray and Python, found others ({why}); "
                f"install the same on all nodes"
            ) from None
        if address in (LOCAL, "auto"):
            raise _unreachable(address, why) from None
        raise UserError(
            f"back end ray: expected a Ray cluster at {address}, found another service, or one that wants a token "
            f"({why}); correct --ray-address or $RAY_ADDRESS, or set RAY_AUTH_MODE=token"
        ) from None
    finally:
        logger.setLevel(before)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, ends)


def require_reachable(address: str) -> None:
    """Raise unless the address accepts connections: Ray itself tries for a minute, and may end the process."""
    if address in (LOCAL, "auto"):
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"back end ray: expected auto, HOST:PORT or ray://HOST:PORT as --ray-address, got {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH).close()
    except OSError as error:
        raise _unreachable(address, error.strerror or one_line(error)) from None


def _unreachable(address: str, why: str) -> UserError:
    where = "on this machine" if address in (LOCAL, "auto") else f"at {address}"
    fix = "start one (`ray start --head`), correct --ray-address or $RAY_ADDRESS, or use --backend process"
    return UserError(f"back end ray: expected a Ray cluster {where}, found none ({why}); {fix}")
