"""A user's code: a Python file with the files beside it that it imports, as a value; and digests of objects' code.

The files are found by reading import statements, and nothing is executed for that: only files in the folder of the
first file and in folders below it count, and a module of Python or of an installed package is never replaced by a file
of its name. Modules made of these files have names of their own, which contain the digest of the code, and only this
code finds them by their short names: `sys.path` is not changed, and two versions in one process do not meet.

`code_digest` is for objects that have no file, so that an edited class or function is not taken for the one before. The
instructions count, and the numbers and texts they use: defaults, closures, globals, attributes of classes. Own
functions and classes that the code names are followed. Line numbers, files, comments and docstrings do not count, so a
cell may move in a notebook. What is installed counts by its name, and so does what has no code.
"""

from __future__ import annotations

import ast
import builtins
import dis
import hashlib
import inspect
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from ..errors import UserError
from .files import read_bytes

MOST_FILES = 200
"""Files that code may consist of."""
MOST_BYTES = 5_000_000
"""Bytes of all files beside the first one."""
Parts = tuple[str, ...]


class Code(NamedTuple):
    """The bytes of a Python file, and of the files beside it that it needs."""

    text: bytes
    beside: tuple[tuple[str, bytes], ...] = ()  # sorted by name, which is relative to the file's folder: tools/norms.py

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
    """Return the code of a file, an absolute path without links, and of files that it imports; nothing is executed."""
    if path.suffix != ".py":  # data that a setting names
        return Code(read_bytes(path))
    copy = read_copy(path)
    if copy is not None:
        return copy
    root, found, waiting = path.parent, {path: read_bytes(path)}, [path]
    while waiting:
        at = waiting.pop()
        for file in _imported_files(root, at, found[at]):
            if file in found:
                continue
            if not file.resolve().is_relative_to(root):
                raise UserError(f"{file} is a link to {file.resolve()}: expected a file below {root}; put a copy there")
            found[file] = read_bytes(file, MOST_BYTES)
            _require_small(path, found)
            waiting.append(file)
    text = found.pop(path)
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


def _require_small(path: Path, found: dict[Path, bytes]) -> None:
    """Raise if code has too many files or bytes to be a part of every run."""
    count, size = len(found), sum(map(len, found.values())) - len(found[path])
    if count > MOST_FILES or size > MOST_BYTES:
        raise UserError(
            f"{path}: expected at most {MOST_FILES} files and {MOST_BYTES} bytes of code that it imports from its "
            f"folder, found {count} files and {size} bytes so far; install what does not change, and import that"
        )


def _imported_files(root: Path, path: Path, text: bytes) -> Iterator[Path]:
    """Yield the files below `root` that the import statements of a file name."""
    for parts, absolute in _imports(path.parent.relative_to(root).parts, text):
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
            yield from sorted([*folder.glob("*.py"), *folder.glob("*/__init__.py")])
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


UNITS: dict[str, dict[str, tuple[str, bytes, bool]]] = {}
"""Modules of files beside a user's file: package that holds them (`package_of`) -> short name -> (file, bytes, whether
it is a package)."""
BUILTINS: dict[str, dict[str, Any]] = {}
"""Python's names for the modules of such a package, which share them with the user's file."""


class _Finder(MetaPathFinder, Loader):
    """Finder and loader of the modules of `UNITS`, and of no others."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        package, _, name = fullname.partition(".")
        if name not in UNITS.get(package, {}):
            return None
        file, _, is_package = UNITS[package][name]
        spec = ModuleSpec(fullname, self, origin=file, is_package=is_package)
        spec.has_location = not is_package or file.endswith(".py")
        return spec

    def exec_module(self, module: ModuleType) -> None:
        package, _, name = module.__name__.partition(".")
        file, text, _ = UNITS[package][name]
        module.__dict__["__builtins__"] = BUILTINS[package]
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
    BUILTINS.pop(package, None)
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]


def _enter(package: str, module: ModuleType, path: Path, code: Code) -> None:
    """Let the modules beside a file be found by it, by each other, and by pickle under their full names."""
    modules = UNITS[package] = {}
    for name, text in code.beside:
        parts = name.removesuffix(".py").split("/")
        is_package = parts[-1] == "__init__"
        parts = parts[:-1] if is_package else parts
        modules[".".join(parts)] = (str(path.parent / name), text, is_package)
        for i in range(1, len(parts)):  # A folder without `__init__.py` is a package too.
            folder = path.parent.joinpath(*parts[:i])
            modules.setdefault(".".join(parts[:i]), (str(folder), b"", True))
    parent = ModuleType(package)
    parent.__path__ = []
    sys.modules[package] = parent
    if not is_installed(path.stem, path.parent) and path.stem not in modules:  # A file beside it may import it too.
        sys.modules[f"{package}.{path.stem}"] = module
    BUILTINS[package] = _builtins(package)
    module.__dict__.update(__package__=package, __builtins__=BUILTINS[package])
    if _FINDER not in sys.meta_path:
        sys.meta_path.append(_FINDER)


def _builtins(package: str) -> dict[str, Any]:
    """Return Python's names for the modules of a package: their imports find own short names first, then all others."""
    modules = UNITS[package]

    def import_own(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        top = f"{package}.{name.partition('.')[0]}"
        if level or (name.partition(".")[0] not in modules and top not in sys.modules):
            return __import__(name, globals, locals, fromlist, level)
        found = __import__(f"{package}.{name}", globals, locals, fromlist, 0)
        return found if fromlist else sys.modules[top]

    return vars(builtins) | {"__import__": import_own}


PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
INSTALLED = {"site-packages", "dist-packages"}
KIND = 0x3FF
"""The bits of `co_flags` that say what kind of function it is; others say whether it has a docstring, for example."""
NOT_CODE = {"__annotate__", "__annotate_func__", "__annotations__", "__doc__", "__module__", "__qualname__"}


def code_digest(*things: Any) -> str:
    """Return the digest of the own code of functions, classes and instances; "" if all of it is installed.

    It is the same in every process of one minor version of Python.

    Example:
        >>> code_digest(len, dis.dis), code_digest(partial(max, 3))
        ('', '')
        >>> space = {"__name__": "__main__"}
        >>> exec("def f(x): return 2 * x", space)
        >>> before = code_digest(space["f"])
        >>> exec("def f(x):\\n    'Double.'\\n    return 2 * x", space)
        >>> code_digest(space["f"]) == before
        True
        >>> exec("def f(x): return 3 * x", space)
        >>> code_digest(space["f"]) == before
        False
    """
    walk = _Walk()
    try:
        found = [walk.value(thing, state=True) for thing in things]
        for own in walk.own:  # It grows as code names other code.
            found.append("\n".join(walk.class_parts(own) if isinstance(own, type) else walk.function_parts(own)))
    except Exception:  # An object that cannot be looked at counts by its name.
        return ""
    return hashlib.blake2b("\n\n".join(found).encode(), digest_size=16).hexdigest() if walk.own else ""


def is_own(module: Any) -> bool:
    """Return whether a module, by name, is the user's: a script, a notebook or a file of theirs.

    Example:
        >>> [is_own(name) for name in ("__main__", "json", "fedspeed.methods")]
        [True, False, False]
    """
    name = str(module or "builtins")
    if name == "__main__":
        return True
    if name.partition(".")[0] in {*sys.stdlib_module_names, __name__.partition(".")[0]}:
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    path = Path(file) if isinstance(file, str) else None
    return path is None or not (INSTALLED & set(path.parts) or path.is_relative_to(sysconfig.get_path("stdlib")))


class _Walk:
    """Texts of code; own functions and classes are numbered as they are met, and each is described once."""

    def __init__(self) -> None:
        self.own: list[Any] = []
        self.numbers: dict[int, int] = {}

    def value(self, thing: Any, state: bool = False) -> str:
        """Return the text of a value; `state` counts the plain attributes of an instance, which may change where code
        merely names it."""
        if isinstance(thing, PLAIN):
            return f"{type(thing).__name__} {thing!r}"
        if isinstance(thing, tuple | frozenset):
            parts = [self.value(part) for part in thing]  # Sets have another order in every process.
            return f"{type(thing).__name__} {parts if isinstance(thing, tuple) else sorted(parts)}"
        if isinstance(thing, partial):
            return f"partial {[self.value(a) for a in (thing.func, thing.args, *sorted(thing.keywords.items()))]}"
        if isinstance(thing, MethodType):
            return f"method {self.value(thing.__func__)} of {self.value(type(thing.__self__))}"
        if isinstance(thing, staticmethod | classmethod):
            return f"{type(thing).__name__} {self.value(thing.__func__)}"
        if isinstance(thing, property):
            return f"property {[self.value(part) for part in (thing.fget, thing.fset, thing.fdel)]}"
        inner = inspect.getattr_static(thing, "__wrapped__", None)  # the user's function inside a decorator's
        if inner is not None and inner is not thing:
            return f"wrapped {self.value(inner)}" + (f" {self._named(thing)}" if _has_own_code(thing) else "")
        if isinstance(thing, type | FunctionType):
            return self._named(thing)
        if isinstance(thing, ModuleType) or hasattr(thing, "__qualname__"):
            return str(getattr(thing, "__qualname__", "module"))
        attributes = getattr(thing, "__dict__", {}).items()
        plain = sorted((k, v) for k, v in attributes if not k.startswith("_") and k != "training")
        return f"a {self._named(type(thing))} {[(k, self.value(v)) for k, v in plain if state and _counts(v)]}"

    def _named(self, thing: Any) -> str:
        """Return the number of an own class or function, the name of another."""
        if not (is_own(thing.__module__) if isinstance(thing, type) else _has_own_code(thing)):
            return f"{thing.__module__}:{thing.__qualname__}"
        if id(thing) not in self.numbers:
            self.numbers[id(thing)] = len(self.own)
            self.own.append(thing)
        return f"own {self.numbers[id(thing)]}"

    def class_parts(self, cls: type) -> Iterator[str]:
        """Yield the texts of a class: what it inherits, its functions, and its plain attributes."""
        yield f"class {[self._named(base) for base in cls.__bases__]}"
        for name, part in sorted(vars(cls).items()):
            hidden = name in NOT_CODE or (name.startswith("__") and not callable(part))
            if not hidden and _counts(part):
                yield f"{name} = {self.value(part)}"

    def function_parts(self, function: FunctionType) -> Iterator[str]:
        """Yield the texts of a function: its code, defaults, and closure."""
        yield f"defaults {self.value(function.__defaults__)}"
        yield f"{[(key, self.value(value)) for key, value in sorted((function.__kwdefaults__ or {}).items())]}"
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            yield f"{name}: {self.value(_content(cell))}"
        yield from self.code(function.__code__, function.__globals__)

    def code(self, code: CodeType, names: dict[str, Any]) -> Iterator[str]:
        """Yield the instructions of code, without their lines; then what they use of its globals."""
        counts = (code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount, code.co_flags & KIND)
        yield f"{code.co_varnames} {counts}"
        used, inside = {}, []
        for step in dis.get_instructions(code):
            if isinstance(step.argval, CodeType):
                inside.append(step.argval)
            elif step.opcode in dis.hasconst:
                yield f"{step.opname} {self.value(step.argval)}"
            else:
                yield f"{step.opname} {step.arg if step.opcode not in dis.hasname else step.argval}"
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval in names:
                used[step.argval] = names[step.argval]
            if step.opname == "STORE_GLOBAL":  # It changes as the code runs.
                names = {key: value for key, value in names.items() if key != step.argval}
                used.pop(step.argval, None)
        yield getattr(code, "co_exceptiontable", b"").hex()
        for name, value in used.items():
            yield f"{name}: {self.value(value)}"
            if isinstance(value, ModuleType) and is_own(value.__name__):
                yield from (f"{k}: {self.value(vars(value)[k])}" for k in code.co_names if k in vars(value))
        for each in inside:
            yield from self.code(each, names)


def _has_own_code(thing: Any) -> bool:
    """Return whether a function was written by the user; a decorator's function has the name of the one inside it."""
    return isinstance(thing, FunctionType) and is_own(thing.__globals__.get("__name__"))


def _counts(value: Any) -> bool:
    """Return whether an attribute is plain, or code."""
    if isinstance(value, tuple):
        return all(map(_counts, value))
    kinds = (*PLAIN, FunctionType, type, property, staticmethod, classmethod, partial)
    return isinstance(value, kinds) or hasattr(value, "__wrapped__")


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # It is empty.
        return None
