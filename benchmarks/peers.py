"""Other simulators, each installed from its package into an environment of its own in the cache."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from .workloads import cache


@dataclass(frozen=True)
class Peer:
    """A simulator by its packages; `torch`: whether it trains with PyTorch, which is then ours to the version."""

    name: str
    packages: tuple[str, ...]
    torch: bool = True


PEERS = {
    peer.name: peer
    for peer in (
        Peer("pfl", ("pfl==0.6.0",)),
        Peer("flower", ("flwr[simulation]==1.41.0",)),
        Peer("fedjax", ("fedjax==0.0.17", "dm-haiku"), torch=False),
    )
}


def folder(peer: Peer) -> Path:
    """Return the peer's environment."""
    return cache() / f"venv-{peer.name}"


def python(peer: Peer) -> Path:
    """Return the peer's interpreter."""
    return folder(peer) / "bin" / "python"


def install(peer: Peer) -> str:
    """Install the peer if needed; return the reason if that fails, otherwise "". pip's own settings apply."""
    if _installed(peer):
        return ""
    print(f"installing {' '.join(peer.packages)} into {folder(peer).name} ...", file=sys.stderr, flush=True)
    shutil.rmtree(folder(peer), ignore_errors=True)
    folder(peer).parent.mkdir(parents=True, exist_ok=True)
    pip = [str(python(peer)), "-m", "pip", "install", "--quiet"]
    steps = [[sys.executable, "-m", "venv", str(folder(peer))]]
    if peer.torch:  # first and pinned: a peer's own choice of torch may be gigabytes of CUDA
        steps.append([*pip, f"torch=={_torch()}"])
        pip += ["--constraint", str(_constraint(peer))]
    steps.append([*pip, *peer.packages])
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()
            return f"not available: {lines[-1].strip() if lines else 'installation failed'}"
    _stamp(peer).write_text(_wanted(peer))
    return ""


NAMED = ("torch", "numpy", "pfl", "flwr", "ray", "fedjax", "jax", "jaxlib", "dm-haiku")
"""Packages whose versions are worth telling."""


def versions(peer: Peer) -> dict[str, str]:
    """Return versions in the peer's environment."""
    command = [str(python(peer)), "-m", "pip", "list", "--format=json"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {entry["name"]: entry["version"] for entry in json.loads(listed) if entry["name"] in NAMED}


def _torch() -> str:
    return version("torch").partition("+")[0]


def _wanted(peer: Peer) -> str:
    """Return a digest of what the environment must hold; another one means that it is made again."""
    parts = [sys.version, *peer.packages, _torch() if peer.torch else ""]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _stamp(peer: Peer) -> Path:
    return folder(peer) / "installed"


def _installed(peer: Peer) -> bool:
    return _stamp(peer).exists() and _stamp(peer).read_text() == _wanted(peer)


def _constraint(peer: Peer) -> Path:
    path = cache() / f"constraint-{peer.name}.txt"
    path.write_text(f"torch=={_torch()}\n")
    return path
