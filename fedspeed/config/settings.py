"""The settings in force, for people: one line per run, and what several runs share. Reports read them from files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .cohort import BIASED, is_biased
from .lr_schedule import shown
from .spec import with_texts

ALWAYS = ("lr", "lr_decay", "weight_decay", "weighting", "augment", "loss", "local_epochs", "batch_size", "active",
          "cohort")  # fmt: skip
"""The settings that are always shown, in this order; `local_steps` replaces `local_epochs` where it is set."""
IF_SET = ("lr_schedule", "warmup", "follow_lr", "clip", "local_optimizer", "accuracy", "client_test", "validation")
UNSET = {"local_optimizer": "sgd"}
"""The values at which these are not set, where that is not none."""
BY_DATA = ("augment", "loss", "accuracy")
"""Settings that the data decide: only a summary holds them, since a config may ask for what its data do not have."""


def in_force(config: Mapping[str, Any], summary: Any = None) -> dict[str, str]:
    """Return the settings that a run trains with, by the names of its config.

    Args:
        config: its tables, or the fields of its plan and `clients`.
        summary: the table `settings` of its summary, with what data decide: loss, augmentation, what an accuracy is of.

    Example:
        >>> in_force({"lr": 0.1, "local_epochs": 5, "local_steps": 3, "active": 10, "clients": 100, "clip": 0.0})
        {'lr': '0.1', 'local_steps': '3', 'active': '10 of 100'}
    """
    by_data = {name: summary[name] for name in BY_DATA if name in summary} if isinstance(summary, Mapping) else {}
    values = {**{name: value for name, value in with_texts(config).items() if name not in BY_DATA}, **by_data}
    names = [*ALWAYS, *(name for name in IF_SET if values.get(name) not in (None, "", 0, UNSET.get(name)))]
    if values.get("local_steps"):
        names[names.index("local_epochs")] = "local_steps"
    if schedule := str(values.get("lr_schedule", "")):
        values["lr_schedule"] = shown(schedule)
        names.remove("lr_decay")
        names.insert(1, names.pop(names.index("lr_schedule")))
    found = {name: _text(values[name]) for name in names if values.get(name) not in (None, "")}
    if "cohort" in found and is_biased(config.get("cohort")):
        found["cohort"] += f" ({BIASED})"
    if "active" in found and values.get("clients"):
        found["active"] += f" of {_text(values['clients'])}"
    return found


def one_line(settings: Mapping[str, str]) -> str:
    """Return settings in one line.

    Example:
        >>> one_line({"lr": "0.1", "augment": "none"})
        'lr 0.1, augment none'
    """
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def compared(settings: Mapping[str, Mapping[str, str]]) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Return the settings that several methods share, and those that differ: by name, the value of each.

    Example:
        >>> compared({"fedavg": {"lr": "0.1", "clip": "1"}, "fedspeed": {"lr": "0.1"}})
        ({'lr': '0.1'}, {'clip': {'fedavg': '1', 'fedspeed': 'none'}})
    """
    known = dict.fromkeys(name for one in settings.values() for name in one)
    names = [name for name in known if name not in BY_DATA or all(name in one for one in settings.values())]
    values = {
        name: {label: one.get(name, UNSET.get(name, "none")) for label, one in settings.items()} for name in names
    }
    same = {name: next(iter(of.values())) for name, of in values.items() if len(set(of.values())) == 1}
    return same, {name: of for name, of in values.items() if name not in same}


def difference(settings: Mapping[str, Mapping[str, str]]) -> str:
    """Return the settings of several methods in a sentence: those they share and those that differ.

    Example:
        >>> difference({"fedavg": {"lr": "0.1", "lr_decay": "0.998"}, "fedspeed": {"lr": "0.1", "lr_decay": "0.9995"}})
        'settings of all: lr 0.1; they differ in lr_decay: 0.998 (fedavg), 0.9995 (fedspeed)'
    """
    same, others = compared(settings)
    if len(settings) < 2:
        return f"settings: {one_line(same)}" if same else ""
    parts = []
    for name, of in others.items():
        whose: dict[str, list[str]] = {}
        for label, value in of.items():
            whose.setdefault(value, []).append(label)
        each = ", ".join(f"{value} ({', '.join(labels)})" for value, labels in whose.items())
        parts.append(f"{name}: {each}")
    return f"settings of all: {one_line(same)}; they differ in {'; '.join(parts) or 'none of them'}"


def _text(value: Any) -> str:
    """Return a value as the command line takes it; at most a line of it, since it may come from an untrusted file."""
    return f"{value:g}" if isinstance(value, float) else str(value)[:200]
