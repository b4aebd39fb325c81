"""Run directories whose checkpoints agree with changed files: digests cannot give a change away."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedspeed.client.tree_bytes import write_state
from fedspeed.runs.checkpoint import Checkpoints
from fedspeed.runs.directory import RunDir
from fedspeed.runs.state_log import Change, StateLog
from fedspeed.utils.files import cut, digest, prefix, sealed


def seal(run: Path) -> None:
    """Make every manifest agree with the files as they are now; of files that grow, with all of them."""
    for path in Checkpoints(run).manifests():
        manifest = json.loads(path.read_text())
        if "files" in manifest:
            manifest["files"] = {name: digest(run / name) for name in manifest["files"]}
        with suppress(KeyError, TypeError, OSError):  # of something else than a manifest
            for name in ("server", "log", "rounds", "uploads"):
                part = manifest[name]
                end = min(part.get("bytes", 2**60), (run / part["file"]).stat().st_size)
                hashed = prefix(run / part["file"], end)
                manifest[name] = {**part, "digest": hashed.digest(), **({"bytes": end} if "bytes" in part else {})}
        path.write_text(resealed(manifest))


def resealed(manifest: Any) -> str:
    """Whatever a manifest holds now, with the seal of that if it had one."""
    return sealed(manifest) if isinstance(manifest, dict) and "seal" in manifest else json.dumps(manifest)


def put_state(run: Path, client: int, state: Any) -> None:
    """Another state for a client in the newest checkpoint, and digests that agree."""
    checkpoints = Checkpoints(run)
    newest, *_ = checkpoints.manifests()
    saved = checkpoints.read(newest)
    entry = saved.entries[client]
    own = run / "states" / f"{client}@{entry.generation}"
    if entry.digest:
        write_state(own, state)
    log = StateLog(RunDir(run), saved.log, saved.hashes[0], dict(saved.entries))
    if saved.log:
        cut(saved.log, saved.hashes[0].count)
    log.append([Change(client, entry.generation, state, digest(own) if entry.digest else "")], saved.t)
    manifest = json.loads(newest.read_text())
    manifest["log"] |= {"bytes": log.hash.count, "digest": log.hash.digest()}
    newest.write_text(resealed(manifest))
