"""What trackers hold, read back by the trackers' own means: {run name: Held}."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, NamedTuple


class Held(NamedTuple):
    """A run: its rounds, each a list of what was written as one number (more than one is too many), and what it is."""

    rounds: dict[int, dict[str, list[float]]]
    parameters: dict[str, Any]
    tags: dict[str, str]


def put(rounds: dict, step: int, name: str, value: float) -> None:
    rounds.setdefault(step, {}).setdefault(name, []).append(value)


def tensorboard(folder: Path) -> dict[str, Held]:
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
    from tensorboard.plugins.hparams import metadata

    events = EventMultiplexer(size_guidance={"scalars": 0}).AddRunsFromDirectory(str(folder)).Reload()
    found = {}
    for name, tags in events.Runs().items():
        rounds: dict = {}
        for tag in tags["scalars"]:
            for event in events.Scalars(name, tag):
                put(rounds, event.step, tag, event.value)
        start = events.SummaryMetadata(name, metadata.SESSION_START_INFO_TAG).plugin_data.content
        given = metadata.parse_session_start_info_plugin_data(start)
        values = {key: getattr(value, value.WhichOneof("kind")) for key, value in given.hparams.items()}
        about = {key: values[f"{key}.name"] for key in ("method", "data")} | {"seed": f"{values['seed']:g}"}
        found[given.group_name or name] = Held(rounds, values, about)
    return found


def mlflow(uri: str) -> dict[str, Held]:
    from mlflow import MlflowClient

    client, found = MlflowClient(tracking_uri=uri), {}
    (experiment,) = [e for e in client.search_experiments() if e.name == "fedspeed"]
    for run in client.search_runs([experiment.experiment_id]):
        rounds: dict = {}
        for name in run.data.metrics:
            for metric in client.get_metric_history(run.info.run_id, name):
                put(rounds, metric.step, name, metric.value)
        tags = {key: run.data.tags[key] for key in ("method", "data", "seed")}
        assert run.info.run_name not in found
        assert run.info.status == "FINISHED"
        found[run.info.run_name] = Held(rounds, run.data.params, tags)
    return found


def wandb(folder: Path) -> dict[str, Held]:
    """Offline runs: a log in LevelDB's format of wandb's own messages, for which wandb has no reader in Python."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its process writes behind our back, and ends with ours
    found = {}
    for path in folder.glob("wandb/offline-run-*/run-*.wandb"):
        rounds: dict = {}
        about, config, ended = None, {}, None
        for message in _messages(path.read_bytes()):
            record = Record.FromString(message)
            if record.HasField("run"):
                about = record.run
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.HasField("exit"):
                ended = record.exit.exit_code
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                if not name.startswith("_") and name != "time":
                    put(rounds, record.history.step.num, name, json.loads(item.value_json))
        assert ended == 0
        assert about.display_name not in found
        tags = dict(tag.split(":", 1) for tag in about.tags)
        found[about.display_name] = Held(rounds, flat(config), tags)
    return found


def _messages(data: bytes) -> list[bytes]:
    """The entries of a LevelDB log of 32 kB blocks, behind a head of seven bytes."""
    assert data[:4] == b":W&B"
    found, at, part = [], 7, b""
    while at < len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        if kind == 0:  # the rest of a block
            at += left
            continue
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            found.append(part)
            part = b""
    return found


def flat(tables: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Tables in tables as one."""
    found: dict[str, Any] = {}
    for key, value in tables.items():
        found |= flat(value, f"{before}{key}.") if isinstance(value, dict) else {before + key: value}
    return found
