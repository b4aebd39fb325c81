"""The config of a run directory: written so that it means the same from every folder, read back, and digested.

A method, a model, data or a setting from a user's file are a part of the run: the file is copied beside the config,
and named by its digest. A run directory may come from another user: one that names code is refused unless the user
allows it, or made it with this very config and code (`signature.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.config import FILED, NAMED, Config, rename_code, resolved
from ..config.plan import COMMAND_LINE_ONLY, PLACEMENT
from ..config.presets import paper_decay
from ..config.spec import SETTINGS
from ..config.stopping import RULES
from ..errors import UserError
from ..utils.files import write
from ..utils.own_code import Code, copy_name, find_code
from ..utils.processes import bits_environment
from ..utils.registry import code_of, file_of, named_file, read_code
from .directory import CODE, CONFIG, RunDir
from .signature import refusal, sign

if TYPE_CHECKING:
    from ..server.simulation import Simulation


def read_config(out: Path, allow_code: bool = False) -> Config:
    """Read the config of a run directory.

    Args:
        allow_code: also if it names Python files, which are then executed; a run that the user signed needs no leave.
    """
    run = RunDir(out)
    run.refuse_links()
    stored = run.config()
    tables = {key: value for key, value in resolved(dict(stored), out).items() if key not in COMMAND_LINE_ONLY}
    code = named_code(tables)
    if code and not allow_code and (why := _refusal(run, stored, tables)) is not None:
        raise UserError(
            f"{run.config_file} names {sorted(code)[0]}, whose code would be executed; a run directory is only "
            f"data unless you trust it: add --allow-code if you do{why and f' ({why})'}"
        )
    _warn_of_changes(tables)
    return Config.from_dict({"layers": layers_of(run, stored)} | tables)


WITHOUT_BLOCKS = ("linear", "mlp", "cnn", "lenet", "vector", "charlstm")
"""Models of this package that have no residual blocks, so that nothing is to be known of them."""


def layers_of(run: RunDir, stored: dict[str, Any]) -> str:
    """Return how a run computes residual blocks; one that has rounds and does not say was made layer by layer."""
    model = stored.get("model")
    blocks = not isinstance(model, dict) or model.get("name") not in WITHOUT_BLOCKS
    return str(stored.get("layers", "plain" if blocks and run.rounds_file.exists() else "auto"))


def _refusal(run: RunDir, stored: dict[str, Any], tables: dict[str, Any]) -> str | None:
    """Return why the code of a run may not be executed without asking, "" without a reason of its own; None if it may.

    What is signed is what `Config.from_dict` then executes: the tables hold the digests of the code that is read here.
    """
    if "data huggingface" in named_code(tables):  # Its code is not here to be signed.
        return ""
    read = (read_code(kind, table["name"], str(table.get("code", "")))[1] for kind, table in _coded(tables))
    return refusal(run, stored, read)


def named_code(tables: dict[str, Any]) -> set[str]:
    """Return the code that a config would execute and that is not installed: users' files, remote data sets.

    Example:
        >>> named_code({"method": {"name": "fedinit", "base": "own.py:Mine"}})
        {'method own.py:Mine'}
    """
    found = {f"{kind} {table['name']}" for kind, table in _coded(tables) if file_of(table["name"])}
    data = tables.get("data")
    if (data.get("name") if isinstance(data, dict) else data) == "huggingface" and not tables.get("data_dir"):
        found.add("data huggingface")
    return found


def trusted(tables: dict[str, Any], config: Config) -> bool:
    """Return whether the user's own config names all code that a stored config would execute.

    A run keeps the numbers of a schedule, so that a stored one never names a file: such a config was changed.
    """
    given = config.to_dict()
    if any(file_of(table["name"]) for _, table in _coded(tables, ("lr_schedule",))):
        return False
    codes = [table.get("code") for _, table in _coded(given)]
    return all(table.get("code") in codes for _, table in _coded(tables)) and (
        "data huggingface" not in named_code(tables) or "data huggingface" in named_code(given)
    )


def _coded(tables: dict[str, Any], kinds: Iterable[str] = FILED) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the tables that name a file, each with its kind: method, model, data or a setting; also those of a fork's
    first rounds."""
    for kind in kinds:
        yield from ((kind, table) for table in _chain(tables.get(kind)) if named_file(table.get("name"))[1])
    first = tables.get("until")
    for over in first.values() if isinstance(first, dict) else ():
        yield from _coded(over, SETTINGS) if isinstance(over, dict) else ()


def _chain(method: Any) -> Iterator[dict[str, Any]]:
    """Yield a table, and those of the methods inside it."""
    while method is not None:
        table = method if isinstance(method, dict) else {"name": method}
        yield table
        method = table.get("base")


def _warn_of_changes(tables: dict[str, Any]) -> None:
    """Warn if a file was changed after the run copied it."""
    warned = set()
    for _, table in _coded(tables):
        copy, origin = named_file(table.get("name"))[1], table.get("origin")
        if isinstance(origin, str) and Path(origin).resolve() != Path(copy).resolve():
            try:
                code = find_code(Path(origin).resolve())
            except (OSError, ValueError, UserError):
                continue
            changed = table.get("code") not in (code.digest, Code(code.text).digest)  # Older runs kept one file.
            if changed and origin not in warned:
                warned.add(origin)
                what = f"{origin} or a file beside it" if "+" in str(table.get("code")) else origin
                text = f"{what} was changed since the run began; its own copy of the code is used, {copy}"
                warnings.warn(text, stacklevel=3)


def as_stored(config: Config) -> dict[str, Any]:
    """Return a config's tables as stored in its run directory: they mean the same from every folder, and every default
    is resolved."""
    tables = {key: value for key, value in config.to_dict().items() if key not in COMMAND_LINE_ONLY}
    tables["lr_decay"] = config.lr_decay or paper_decay(config.method)
    tables["data_dir"] = config.data_dir and os.path.abspath(Path(config.data_dir).expanduser())
    return rename_code(tables, lambda file, code: f"{CODE}/{copy_name(file, code)}")


def write_config(out: Path, config: Config, name: str = CONFIG) -> None:
    """Write `config.toml`, or another name, after copies of the files of its method, model, data and settings.

    Copies come first, each on the disk, so that a config that exists can always be read back. Its user has executed
    the code, or asks for that: the config is signed.
    """
    codes = []
    for kind, table in _coded(config.to_dict()):
        copy = out / CODE / copy_name(named_file(table["name"])[1], table["code"])
        codes.append(code := code_of(kind, table["name"], table["code"]))
        for part, text in ((copy.name, code.text), *code.beside):
            (copy.parent / part).parent.mkdir(parents=True, exist_ok=True)
            write(copy.parent / part, text, durable=True)
    tables = as_stored(config)
    try:
        RunDir(out).write_tables(tables, name)
    except TypeError as error:  # raised by tomli_w for a field of a user's method
        what = "a config in TOML holds numbers, texts, lists and tables"
        raise UserError(f"config: {what}, found others ({error})") from None
    if name == CONFIG and any(file_of(table["name"]) for _, table in _coded(tables)):
        sign(RunDir(out), codes)


def store_layers(out: Path, config: Config, layers: str) -> None:
    """Store how a run that begins computes residual blocks; it may have been killed before its config said so."""
    tables = RunDir(out).config()
    if layers != tables.get("layers", "auto"):
        _rewrite(out, tables, tables | {"layers": layers}, config)


def amend(out: Path, config: Config, data_dir: str) -> None:
    """Change rounds, stopping rules and the place of the data in a run's config, and nothing else."""
    run = RunDir(out)
    tables = run.config()
    moved = {"data_dir": os.path.abspath(Path(data_dir).expanduser())} if data_dir else {}
    rules = {name: value for name in RULES if (value := getattr(config, name))}
    new = {**{k: v for k, v in tables.items() if k not in RULES}, "rounds": config.rounds, **rules, **moved}
    if new != tables:
        _rewrite(out, tables, new, config)


def _rewrite(out: Path, tables: dict[str, Any], new: dict[str, Any], config: Config) -> None:
    """Write a run's config again, and sign it if it was signed; a run that was allowed but not signed stays so."""
    run = RunDir(out)
    codes = [code_of(kind, table["name"], table["code"]) for kind, table in _coded(config.to_dict())]
    signed = bool(codes) and refusal(run, tables, codes) is None
    run.write_tables(new)
    if signed:
        sign(run, codes)


def bound_to(out: Path, simulation: Simulation) -> dict[str, str]:
    """Return the digests that bind a run: a checkpoint with other digests is not resumed.

    The config is digested as it is in its file: a later version may have more fields.
    """
    from ..models.compiled_kernels import VERSION as KERNELS_VERSION
    from .binary_files import frozen_digest

    data = simulation.data
    layouts = {str(module.stored_as) for module in simulation.model.modules() if hasattr(module, "stored_as")}
    return {
        **({"layout": ", ".join(sorted(layouts))} if layouts else {}),
        **({"kernels": str(KERNELS_VERSION)} if simulation.plan.layers == "compiled" else {}),
        "config": config_digest(RunDir(out).config() | {"engine": simulation.plan.engine}),
        **frozen_digest(simulation.work.flat),
        "data": data.fingerprint,
        "split": data.split_fingerprint,
        "variables": json.dumps(bits_environment()),
    }


def config_digest(tables: dict[str, Any]) -> str:
    """Return the digest of a run's tables, without the keys that `resume` may change; data count, not their place."""
    loose = (*PLACEMENT, *RULES, "rounds", "targets", "data_dir")
    bound = {key: value for key, value in tables.items() if key not in loose}
    return hashlib.blake2b(json.dumps(bound, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


def same_run(stored: Config, given: Config) -> bool:
    """Return whether two configs are of one run: equal except for placement, more rounds, and unresolved defaults."""
    given = replace(
        given,
        engine=stored.engine if given.engine == "auto" else given.engine,
        layers=stored.layers if given.layers == "auto" else given.layers,
        clients=given.clients or stored.clients,
        active=given.active or stored.active,
        augment=given.augment or stored.augment,
        data_dir=stored.data_dir,  # The data count, not their place; `resume` checks them.
        rounds=min(given.rounds, stored.rounds),
        **{name: getattr(stored, name) for name in PLACEMENT},
    )
    return _timeless(as_stored(given)) == _timeless(as_stored(stored))


def placement(config: Config) -> dict[str, Any]:
    """Return the settings of a config that say where a run is computed."""
    return {name: getattr(config, name) for name in PLACEMENT if name not in RULES}


def _timeless(tables: dict[str, Any]) -> dict[str, Any]:
    """Return a run's tables without the places of the user's code."""
    found = dict(tables)
    for kind in [kind for kind in NAMED if kind in tables]:
        chain = enumerate(_chain(tables[kind]))
        found[kind] = {str(i): {k: v for k, v in table.items() if k not in ("origin", "base")} for i, table in chain}
    return found
