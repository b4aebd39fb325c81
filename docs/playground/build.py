"""The files that the playground's page embeds: the package's own method files, and the modules that Brython needs.

    python docs/playground/build.py                         # after a method file or a Python file here has changed
    python docs/playground/build.py --stdlib FILE           # after another Brython: its brython_stdlib.js, cut

A page opened from disk may not read files, so the text of each module stands in `sources.js`; a test compares it with
the files. Brython 3.14.3 is npm's package `brython`, `vendor/brython.min.js` as it is there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from fedspeed.methods import FAMILIES, METHODS  # noqa: E402

OWN = ("federation", "bridge")
SHARED = ("errors", "utils/checked_fields", "methods/base", "methods/terms")
PACKAGES = ("fedspeed", "fedspeed.methods", "fedspeed.utils")
LEFT_OUT = ("fedgmt",)  # it needs a model that has class probabilities
ASKED = """
__future__ _ast _collections _collections_abc _contextvars _functools _locale _operator _py_abc _py_warnings _thread
_typing _weakref _weakrefset abc annotationlib ast browser builtins collections collections.abc copy copyreg dataclasses
difflib enum functools heapq itertools keyword math numbers operator python_re re reprlib sys time types typing warnings
weakref
"""
"""What of Python's library is loaded, directly or not."""
INSPECT = '"""Left out: dataclasses imports it for what is not used here."""\n'


def modules() -> dict[str, str]:
    """Return the text of every module of the page, by name; packages are empty."""
    used = dict.fromkeys(cls.__module__ for name, cls in METHODS.items() if name not in LEFT_OUT)
    files = {f"fedspeed.{name.replace('/', '.')}": ROOT / "fedspeed" / f"{name}.py" for name in SHARED}
    files |= {module: ROOT / f"{module.replace('.', '/')}.py" for module in used}
    files |= {name: HERE / f"{name}.py" for name in OWN}
    return (
        dict.fromkeys(PACKAGES, "")
        | {"inspect": INSPECT}
        | {name: path.read_text("utf-8") for name, path in files.items()}
    )


def described() -> list[dict[str, Any]]:
    """Return the methods as the page lists them: family by family, with their fields."""
    ours = [cls for name, cls in METHODS.items() if name not in LEFT_OUT]
    return [
        {
            "name": cls.__name__.lower(),
            "cls": cls.__name__,
            "module": cls.__module__,
            "family": cls.family,
            "about": (cls.__doc__ or "").strip().split("\n", 1)[0],
            "fields": [
                {"name": f.name, "default": f.default, "allowed": f.metadata["allowed"], "about": f.metadata["about"]}
                for f in dataclasses.fields(cls)  # type: ignore[arg-type]
                if f.name != "ascent_fraction"  # gradients are exact here: there is no minibatch to take a part of
            ],
        }
        for cls in sorted(ours, key=lambda cls: FAMILIES.index(cls.family))
    ]


def sources() -> str:
    """Return the text of `sources.js`."""
    entries = {
        name: [".py", text, [], 1] if name in PACKAGES else [".py", text, []] for name, text in modules().items()
    }
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
    methods = ",\n".join(json.dumps(method) for method in described())
    return (
        "// Written by build.py: the package's own files, word for word. Do not edit.\n"
        f"__BRYTHON__.update_VFS({{\n{lines}\n}});\nwindow.METHODS = [\n{methods}\n];\n"
    )


def cut(stdlib: str) -> str:
    """Return Brython's library with only the modules in `ASKED`."""
    text = stdlib[stdlib.index("{") : stdlib.rindex("}") + 1]
    whole = json.loads(text)
    kept = {name: whole[name] for name in ("$timestamp", *ASKED.split()) if name in whole}
    return (
        "// Modules of Brython 3.14.3's brython_stdlib.js, as they are there; chosen by build.py.\n"
        f"__BRYTHON__.use_VFS = true;\n__BRYTHON__.update_VFS({json.dumps(kept)});\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--stdlib", type=Path, help="brython_stdlib.js of another Brython, to cut")
    given = parser.parse_args()
    if given.stdlib:
        (HERE / "vendor" / "brython_stdlib.cut.js").write_text(cut(given.stdlib.read_text("utf-8")), "utf-8")
    (HERE / "sources.js").write_text(sources(), "utf-8")


if __name__ == "__main__":
    main()
