"""A page per method and wrapper, from its class: what `fedspeed methods NAME` prints, its errata, its relatives."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields

import marks

from fedspeed.cli.methods import LEGEND, cost, grouped
from fedspeed.config.presets import paper_decay
from fedspeed.errors import UserError
from fedspeed.methods import METHODS, WRAPPERS, Wrapper
from fedspeed.methods.base import Method
from fedspeed.methods.errata import of_method

EVERY = METHODS | WRAPPERS


def pages() -> Iterator[tuple[str, str]]:
    yield "methods/index.md", index()
    for name, cls in EVERY.items():
        yield f"methods/{name}.md", page(name, cls)


def index() -> str:
    """Return the methods by family, the wrappers, and what the columns mean."""
    lines = []
    for family, name, c in grouped(METHODS):
        lines.append((family, f"[`{name}`]({name}.md)", first(METHODS[name]), kept(c.client),
                      f"{c.down} / {c.up}", f"{c.grads:.3g}"))  # fmt: skip
    around = [(f"[`{name}`]({name}.md)", first(cls)) for name, cls in WRAPPERS.items()]
    header = ("family", "method", "in a line", "a client keeps", "down / up", "gradients")
    return "\n".join([
        "# Methods\n",
        "Every method of the package, by family and then by cost. `fedspeed methods NAME` prints what its page has.\n",
        marks.table(header, lines),
        marks.plain(LEGEND.partition("`fedspeed")[0]) + "\n",
        "## Wrappers\n",
        "They go around any method: `fedspeed+topk:0.01` ([how](../guides/wrappers.md)).\n",
        marks.table(("wrapper", "in a line"), around),
        marks.toctree((name for _, name, _ in grouped(METHODS)), hidden=True),
        marks.toctree(WRAPPERS, hidden=True),
    ])  # fmt: skip


def first(cls: type[Method]) -> str:
    """Return the first sentence of a class, in one line."""
    return marks.cell(marks.sections(cls.__doc__ or "")[""].partition("\n\n")[0])


def page(name: str, cls: type[Method]) -> str:
    """Return the page of one method."""
    said = marks.sections(cls.__doc__ or "")
    lead, _, box = said[""].partition("\n\n")
    parts = [f"# {cls.__name__}\n", f"{marks.plain(lead)}\n", facts(name, cls)]
    parts += ["## The algorithm\n", related(marks.paragraphs(box), name)] if box.strip() else []
    parts += ["## Fields\n", field_table(cls, said.get("Args", ""))]
    parts += ["## Use\n", use(name, cls)]
    parts += paper_and_code(name, cls)
    parts += ["## Reference\n", f"{marks.plain(' '.join(said.get('Reference', '').split()))}\n"] * ("Reference" in said)
    parts += [
        "## In Python\n",
        marks.block(f".. autoclass:: fedspeed.{cls.__name__}\n   :no-index-entry:\n", "{eval-rst}"),
    ]
    return "\n".join(parts)


def facts(name: str, cls: type[Method]) -> str:
    """Return a method's family, states and costs."""
    method = cls()
    c = cost(method)
    rows = [
        ("on the command line", f"`{name}`"),
        ("family", method.family or "wrapper, around any method"),
        ("the server keeps", kept(c.server)),
        ("a client keeps", kept(c.client)),
        ("vectors per active client and round", f"{c.down} down, {c.up} up"),
        ("gradients per local step", f"{c.grads:.3g}"),
        ("the paper's learning-rate decay", f"{paper_decay(method)}"),
    ]
    return marks.table(("", ""), rows)


def kept(names: str) -> str:
    """Return the vectors, as code; a method that keeps none has "-"."""
    return ", ".join(map(marks.code, names.split(", "))) if names != "-" else "nothing"


def related(text: str, own: str) -> str:
    """Return the names of other methods in sentences, as links; boxes stay as they are."""
    classes = {cls.__name__: name for name, cls in EVERY.items() if name != own}
    known = re.compile(rf"\b({'|'.join(sorted(classes, key=len, reverse=True))})\b")
    pieces = re.split(r"(^```.*?^```$|`[^`\n]+`)", text, flags=re.M | re.S)
    return "".join(
        piece if at % 2 else known.sub(lambda m: f"[{m[1]}]({classes[m[1]]}.md)", piece)
        for at, piece in enumerate(pieces)
    )


def field_table(cls: type[Method], args: str) -> str:
    """Return the table of fields: name, default, range, meaning, warm-up and tuning."""
    texts = {name: text for names, text in marks.items(args) for name in names.split(", ")}
    lines = []
    for field in fields(cls):
        default = getattr(cls(), field.name)
        allowed = field.metadata.get("allowed", "")
        allowed = (
            " | ".join(allowed)
            if isinstance(allowed, tuple)
            else "true | false"
            if isinstance(default, bool)
            else allowed
        )
        about = [texts.get(field.name) or field.metadata.get("about", "")]
        about += [f"`--warmup {field.name}=N` schedules it"] * bool(field.metadata.get("schedulable"))
        about += [f"`tune` tries `{field.metadata.get('tune')}`"] * bool(field.metadata.get("tune"))
        shown = (
            default.name
            if isinstance(default, Method)
            else str(default).lower()
            if isinstance(default, bool)
            else default
        )
        lines.append((marks.code(field.name), marks.code(shown), marks.code(allowed or ""),
                      marks.cell("; ".join(part.rstrip(".") for part in about))))  # fmt: skip
    return marks.table(("field", "default", "allowed", "it is"), lines) if lines else "It has none.\n"


def use(name: str, cls: type[Method]) -> str:
    """Return how a method is named on the command line and in Python."""
    text, inside = name, ""
    if issubclass(cls, Wrapper):
        base = next(one for one in ("fedspeed", "fedavg") if fits(cls, one))
        text, inside = f"{base}+{name}", f"fedspeed.{METHODS[base].__name__}()"
    shell = f"fedspeed run --method {text} --data digits --split dirichlet:0.3 --clients 50 --active 5"
    python = f"import fedspeed\n\nmethod = fedspeed.{cls.__name__}({inside})"
    return marks.block(shell, "sh") + "\n" + marks.block(python, "python")


def fits(cls: type[Wrapper], base: str) -> bool:
    """Return whether a wrapper goes around a method."""
    try:
        cls(METHODS[base]())
    except UserError:
        return False
    return True


def paper_and_code(name: str, cls: type[Method]) -> list[str]:
    """Return the errata of a method, and what `--preset released` sets."""
    found = of_method(name)
    sets = ", ".join(f"`{key} = {value}`" for key, value in cls.released.items())
    parts = ["## Paper and code\n"] * bool(found or sets)
    parts += [
        f"The authors' code sets {sets}; so does `--preset released` ([more](../explanation/authors-code.md)).\n"
    ] * bool(sets)
    for entry in found:
        parts += [f"### {marks.plain(entry.title)}\n"]
        parts += ["".join(f"- **{about}**: {marks.plain(said)}\n" for about, said in entry.rows)]
    parts += ["All entries: [errata](../explanation/errata.md).\n"] * bool(found)
    return parts
