"""`fedspeed methods [NAME]` and `fedspeed models`."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

from ..config.plan import Plan
from ..config.presets import paper_decay
from ..config.warmup import own_schedulable
from ..errors import UserError, one_line
from ..methods import FAMILIES, METHODS, WRAPPERS, build
from ..methods.base import Local, Method
from ..utils.registry import foreign
from .output import show_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

EPILOG = """\
examples:
  fedspeed methods
  fedspeed methods fedspeed
  fedspeed methods fedspeed --errata
  fedspeed methods --markdown
"""
EPILOG_MODELS = "examples:\n  fedspeed models\n  fedspeed run --model cnn --set model.widths=[8,16,64]\n"
LEGEND = """\
server, client: what each keeps between rounds; down/up: vectors of length d per
active client and round; grads: minibatch gradients per local step (a teacher's
pass forward is a third of one); decay: the paper's lr_decay, which runs take
with --preset paper only. A field with * can rise over the first rounds, as the
rate of every method can: --warmup lr=10,rho=10; or decay with the rate:
--follow-lr rho.
`fedspeed methods NAME` explains one."""


class Cost(NamedTuple):
    """State and cost of a method, in vectors of length d, measured by running its hooks once."""

    server: str
    client: str
    down: int
    up: int
    grads: float


def cost(method: Method) -> Cost:
    """Run the hooks on a small vector and count vectors and gradients."""
    import torch

    from ..experiments.tune.tuner import per_step

    x0 = torch.arange(1.0, 4.0)
    server, client = method.init_server(x0), method.init_client(x0)
    down = method.broadcast(server)
    x = method.start(down, client).clone()
    direction = method.direction(x, lambda x, *_, **__: torch.ones_like(x), down, client)
    up, _ = method.upload(x0 - 0.1 * direction, down, client, Local(1, 0.1, 1))
    kept, own = (", ".join(state._fields) or "-" for state in (server, client))
    return Cost(kept, own, _vectors(down), _vectors(up), per_step(method, 10**6))


def grouped(names: Iterable[str]) -> list[tuple[str, str, Cost]]:
    """Return family, name and cost of methods, sorted by family, gradients per step, and vectors down and up."""
    found = [(method.family, name, cost(method)) for name in names for method in [METHODS[name]()]]
    return sorted(found, key=lambda one: ([*FAMILIES, one[0]].index(one[0]), one[2].grads, one[2].down + one[2].up))


def markdown() -> str:
    """Return the table of docs/reference/method-table.md, made from the classes."""
    lines = [
        "| family | method | client keeps | vectors down / up | gradients per step | fields and defaults |",
        "|---|---|---|---|---|---|",
    ]
    for family, name, c in grouped(METHODS):
        values = METHODS[name]().fields()
        own = ", ".join(f"{key} {str(v).lower() if isinstance(v, bool) else v}" for key, v in values.items())
        lines.append(f"| {family} | `{name}` | {c.client} | {c.down} / {c.up} | {c.grads:.3g} | {own} |")
    return "\n".join(lines)


def _vectors(tree: Any) -> int:
    from ..client.trees import tree_leaves

    return sum(a.numel() == 3 for a in tree_leaves(tree))


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the name and the format."""
    about = "explain this method, or file.py:Class: pseudo-code, maths, fields"
    parser.add_argument("name", nargs="?", metavar="NAME", help=about)
    about = "list where its paper, public code and this package differ; without NAME for all methods"
    parser.add_argument("--errata", action="store_true", help=about)
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/reference/method-table.md")


def main(args: argparse.Namespace, console: Console) -> int:
    """Print the list, or one method."""
    if args.errata:
        _errata(args.name, console)
    elif args.markdown and args.name:
        raise UserError(f"methods: --markdown is for the whole list, got {args.name}; leave one out")
    elif args.markdown:
        console.print(markdown(), markup=False, soft_wrap=True)
    elif args.name:
        _explain(args.name, console)
    else:
        _list(console)
    return 0


def _list(console: Console) -> None:
    """Print a row per method and wrapper."""
    from rich.table import Column

    some = Column("server", max_width=9), Column("client", max_width=11)
    defaults = Column("fields and defaults", overflow="fold")  # at 80 columns no name is cut
    rows = []
    for name, cls in (METHODS | WRAPPERS).items():
        c, own, stars = cost(cls()), cls().fields(), own_schedulable(cls)
        shown = ", ".join(
            f"{key}={value.name if isinstance(value, Method) else value}{'*' * (key in stars)}"
            for key, value in own.items()
        )
        rows.append((name, c.server, c.client, f"{c.down} / {c.up}", f"{c.grads:.3g}", f"{paper_decay(cls())}", shown))
    show_table(console, ("method", *some, "down/up", "grads", "decay", defaults), rows)
    console.print(LEGEND)
    if others := foreign("fedspeed.methods"):
        console.print(f"of other packages: {', '.join(others)}")


def _explain(name: str, console: Console) -> None:
    """Print a method's pseudo-code, cost and fields."""
    method = build({"name": name})
    cls = type(method)
    try:
        c = cost(method)
    except Exception as error:
        if "source" not in vars(cls):
            raise
        raise UserError(f"method {name}: its hooks failed ({one_line(error)}); `fedspeed run` says where") from error
    console.print(inspect.cleandoc(cls.__doc__ or ""), markup=False)
    kind = f"{method.family}: " if method.family else ""
    console.print(f"\n{kind}server keeps {c.server}; client keeps {c.client}; {c.down} vector(s) down, {c.up} up; "
                  f"{c.grads:.3g} gradient(s) per step; the paper's lr_decay {paper_decay(method)} "
                  f"(--preset paper; the default of a run is {Plan.lr_decay:g})")  # fmt: skip
    if why := method.reads_gradient_from_D:
        console.print(f"needs --local-optimizer sgd: {why}")
    rows = []
    for field in fields(cls):
        allowed, default = field.metadata.get("allowed", ""), getattr(method, field.name)
        flag = "true | false" if isinstance(default, bool) else ""
        choice = " | ".join(allowed) if isinstance(allowed, tuple) else allowed or flag
        about = field.metadata.get("about", "")
        about += f"; --warmup {field.name}=N schedules it" if field.metadata.get("schedulable") else ""
        about += f"; tune tries {field.metadata['tune']}" if field.metadata.get("tune") else ""
        rows.append((field.name, str(default), choice, about))
    show_table(console, ("field", "default", "allowed", "it is"), rows)


def _errata(name: str | None, console: Console) -> None:
    """Print the errata of all methods, or of one."""
    from ..methods.errata import errata, of_method

    if name:
        build({"name": name})  # raises for an unknown name
    found = of_method(name) if name else errata()
    for entry in found:
        console.print(f"{entry.method}: {entry.title}")
        for about, said in entry.rows:
            console.print(f"  {about}: {said}")
        console.print("")
    number = "1 entry" if len(found) == 1 else f"{len(found)} entries"
    console.print(number if found else f"{name}: nothing is known to differ")


def configure_models(parser: argparse.ArgumentParser) -> None:
    """Add nothing: there are no options."""


def main_models(args: argparse.Namespace, console: Console) -> int:
    """Print one row per model."""
    from ..models import MODELS

    rows = []
    for name, builder in MODELS.items():
        own = {p.name: p.default for p in list(inspect.signature(builder).parameters.values())[2:]}
        shown = ", ".join(f"{option}={_toml_value(value)}" for option, value in own.items())
        about = (builder.__doc__ or "").splitlines()[0]
        rows.append((name, shown or "-", _parameters(builder, "trim" in own), about))
    show_table(console, ("model", "options (--set model.OPTION=VALUE)", "parameters", "what it is"), rows)
    console.print(
        "Parameters: on pictures of 3x32x32, 10 classes. Live are those that can have a gradient there; "
        "--set model.trim=true stores no others."
    )
    console.print("Your own: any nn.Module works from Python, see `fedspeed.simulate`.")
    return 0


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value) if isinstance(value, tuple) else value)


def _parameters(builder: Callable[..., Any], can_trim: bool) -> str:
    """Return the number of parameters, and of live ones; "-" for a model of other inputs than images."""
    import torch

    def count(**options: Any) -> int:
        with torch.device("meta"):  # shapes only
            return sum(p.numel() for p in builder((3, 32, 32), 10, **options).parameters())

    try:
        return f"{count():,}" + (f", {count(trim=True):,} live" if can_trim else "")
    except UserError:
        return "-"
