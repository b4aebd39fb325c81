"""A user's code as a value: a Python file, and the files beside it that it imports.

The files are found by reading import statements, and nothing is executed for that: only files in the folder of the
first file and in folders below it count, and a module of Python or of an installed package is never replaced by a file
of its name. Modules made of these files have names of their own, which contain the digest of the code, and only this
code finds them by their short names: `sys.path` is not changed, and two versions in one process do not meet.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from ..errors import UserError
from .files import read_bytes

MOST_FILES = 200
"""Files that code may consist of."""
MOST_BYTES = 5_000_000
"""Bytes of all files beside the first one."""
Parts = tuple[str, ...]


class Code(NamedTuple):
    """The bytes of a Python file, and of the files beside it that it needs.

    Args:
        text: the file.
        beside: (name, bytes) of the others, sorted; a name is relative to the folder of the file: `tools/norms.py`.
    """

    text: bytes
    beside: tuple[tuple[str, bytes], ...] = ()

    @property
    def digest(self) -> str:
        """Return the digest that identifies the code; that of several files ends with the number of those beside.

        Example:
            >>> Code(b"import a", (("a.py", b""),)).digest
            'a70fad6826e151b93ca76e66e20e145f+1'
        """
        found = hashlib.blake2b(self.packed() if self.beside else self.text, digest_size=16).hexdigest()
        return f"{found}+{len(self.beside)}" if self.beside else found

    def packed(self) -> bytes:
        """Return all names and bytes as one text, which no other code has."""
        files = (("", self.text), *self.beside)
        return b"".join(f"{name}\0{len(content)}\0".encode() + content for name, content in files)


def copy_name(file: str, code: str) -> str:
    """Return the name of a copy of code in a run's folder of code; several files are copied into a folder.

    Example:
        >>> copy_name("own/mine.py", "1a2b3c4d5e6f"), copy_name("own/mine.py", "1a2b3c4d5e6f+2")
        ('mine-1a2b3c4d.py', 'mine-1a2b3c4d/mine.py')
    """
    stem, suffix = Path(file).stem.removesuffix(f"-{code[:8]}"), Path(file).suffix
    return f"{stem}-{code[:8]}/{stem}{suffix}" if "+" in code else f"{stem}-{code[:8]}{suffix}"


# --- files ---


def find_code(path: Path) -> Code:
    """Return the code of a file: its bytes, and those of the files beside it that it imports; nothing is executed.

    Args:
        path: an absolute path without links.
    """
    if path.suffix != ".py":  # data that a setting names
        return Code(read_bytes(path))
    copy = read_copy(path)
    if copy is not None:
        return copy
    root, text = path.parent, read_bytes(path)
    found: dict[Path, bytes] = {path: text}
    waiting: list[tuple[Parts, bytes]] = [((), text)]
    while waiting:
        for file in _imported_files(root, *waiting.pop()):
            if file not in found:
                _require_inside(root, file)
                found[file] = read_bytes(file, MOST_BYTES)
                _require_small(path, found)
                waiting.append((file.parent.relative_to(root).parts, found[file]))
    del found[path]
    return Code(text, tuple(sorted((file.relative_to(root).as_posix(), found[file]) for file in found)))


def read_copy(path: Path) -> Code | None:
    """Return the code in a folder that a run copied it to, `mine-1a2b3c4d/mine.py`: all Python files of the folder,
    whatever is installed here. None if the folder has another name, or its files have another digest."""
    stem, _, start = path.parent.name.rpartition("-")
    if stem != path.stem or not re.fullmatch("[0-9a-f]{8}", start):
        return None
    files: dict[str, bytes] = {}
    for folder, _, names in os.walk(path.parent):
        for file in (Path(folder, name) for name in names if name.endswith(".py")):
            if file.is_symlink() or len(files) > MOST_FILES:
                return None
            files[file.relative_to(path.parent).as_posix()] = read_bytes(file, MOST_BYTES)
    text = files.pop(path.name, b"")
    code = Code(text, tuple(sorted(files.items())))
    return code if files and code.digest.startswith(start) else None


def _require_inside(root: Path, file: Path) -> None:
    if not file.resolve().is_relative_to(root):
        raise UserError(f"{file} is a link to {file.resolve()}: expected a file below {root}; put a copy there")


def _require_small(path: Path, found: dict[Path, bytes]) -> None:
    """Raise if code has too many files or bytes to be a part of every run."""
    count, size = len(found), sum(map(len, found.values())) - len(found[path])
    if count > MOST_FILES or size > MOST_BYTES:
        raise UserError(
            f"{path}: expected at most {MOST_FILES} files and {MOST_BYTES} bytes of code that it imports from its "
            f"folder, found {count} files and {size} bytes so far; install what does not change, and import that"
        )


def _imported_files(root: Path, package: Parts, text: bytes) -> Iterator[Path]:
    """Yield the files below `root` that the import statements of a file name."""
    for parts, absolute in _imports(package, text):
        files = list(_files(root, parts))
        if files and not (absolute and is_installed(parts[0], root)):
            yield from files


def _imports(package: Parts, text: bytes) -> Iterator[tuple[Parts, bool]]:
    """Yield the modules that a file in a package imports, perhaps with a name inside, and whether by absolute names."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # They come when the file is executed.
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return  # Executing it raises the error, with its line.
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((tuple(alias.name.split(".")), True) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level <= len(package) + 1:
            above = package[: len(package) + 1 - node.level] if node.level else ()
            module = (*above, *(node.module.split(".") if node.module else ()))
            yield from (((*module, alias.name), not node.level) for alias in node.names)


def _files(root: Path, parts: Parts) -> Iterator[Path]:
    """Yield the files of a module and of the packages around it; the last part may be a name inside, or `*`."""
    folder = root
    for part in parts:
        if part == "*":
            yield from (file for file in sorted([*folder.glob("*.py"), *folder.glob("*/__init__.py")]))
            return
        if (folder / part / "__init__.py").is_file():
            yield folder / part / "__init__.py"
        elif (folder / f"{part}.py").is_file():
            yield folder / f"{part}.py"
            return
        folder = folder / part


def is_installed(name: str, root: Path) -> bool:
    """Return whether a module is Python's, this package or found on `sys.path` without the folder `root`."""
    if name in sys.stdlib_module_names or name == __name__.partition(".")[0]:
        return True
    found = PathFinder.find_spec(name, [place for place in sys.path if Path(place or ".").resolve() != root])
    return found is not None and found.origin is not None  # Without one it is a folder that holds no such module.


# --- modules ---


class _Unit(NamedTuple):
    """Modules of files beside a user's file, by their short names: (file, bytes, whether it is a package)."""

    modules: dict[str, tuple[str, bytes, bool]]
    names: dict[str, Any]


UNITS: dict[str, _Unit] = {}
"""By the name of the package that holds their modules, see `package_of`."""


class _Finder(MetaPathFinder, Loader):
    """Finder and loader of the modules of `UNITS`, and of no others."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        package, _, name = fullname.partition(".")
        if package not in UNITS or name not in UNITS[package].modules:
            return None
        file, _, is_package = UNITS[package].modules[name]
        spec = ModuleSpec(fullname, self, origin=file, is_package=is_package)
        spec.has_location = not is_package or file.endswith(".py")
        return spec

    def exec_module(self, module: ModuleType) -> None:
        package, _, name = module.__name__.partition(".")
        file, text, _ = UNITS[package].modules[name]
        module.__dict__["__builtins__"] = UNITS[package].names
        exec(compile(text, file, "exec"), module.__dict__)


_FINDER = _Finder()


def package_of(module: str) -> str:
    """Return the name of the package that holds the modules beside a module of a user's file."""
    return re.sub(r"\W", "_", module) + "_beside"


def short_names(text: str) -> str:
    """Return a text with the names that the user gave to modules.

    Example:
        >>> short_names("No module named 'fedspeed_user_mine_1a2b3c4d_beside.tools.norms'")
        "No module named 'tools.norms'"
    """
    return re.sub(r"fedspeed_user_\w+_beside\.", "", text)


def execute(module: ModuleType, path: Path, code: Code) -> None:
    """Execute a user's file as a module that finds the files beside it. If that fails, none of their modules stay."""
    package = package_of(module.__name__)
    forget(package)
    module.__package__ = ""
    if code.beside:
        _enter(package, module, path, code)
    try:
        exec(compile(code.text, str(path), "exec"), module.__dict__)
    except BaseException:
        forget(package)
        raise


def forget(package: str) -> None:
    """Remove the modules beside a user's file."""
    UNITS.pop(package, None)
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]


def _enter(package: str, module: ModuleType, path: Path, code: Code) -> None:
    """Let the modules beside a file be found by it, by each other, and by pickle under their full names."""
    modules: dict[str, tuple[str, bytes, bool]] = {}
    for name, text in code.beside:
        parts = name.removesuffix(".py").split("/")
        is_package = parts[-1] == "__init__"
        parts = parts[:-1] if is_package else parts
        modules[".".join(parts)] = (str(path.parent / name), text, is_package)
        for i in range(1, len(parts)):  # A folder without `__init__.py` is a package too.
            folder = path.parent.joinpath(*parts[:i])
            modules.setdefault(".".join(parts[:i]), (str(folder), b"", True))
    UNITS[package] = _Unit(modules, vars(builtins) | {"__import__": _importer(package, modules)})
    parent = ModuleType(package)
    parent.__path__ = []
    sys.modules[package] = parent
    if not is_installed(path.stem, path.parent) and path.stem not in modules:  # A file beside it may import it too.
        sys.modules[f"{package}.{path.stem}"] = module
    module.__dict__.update(__package__=package, __builtins__=UNITS[package].names)
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)


def _importer(package: str, modules: Mapping[str, Any]) -> Any:
    """Return the function that import statements of the modules call: their own short names first, then all others."""

    def import_own(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        top = f"{package}.{name.partition('.')[0]}"
        if level or (name.partition(".")[0] not in modules and top not in sys.modules):
            return __import__(name, globals, locals, fromlist, level)
        found = __import__(f"{package}.{name}", globals, locals, fromlist, 0)
        return found if fromlist else sys.modules[top]

    return import_own
