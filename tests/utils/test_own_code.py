"""Code of several files: what is found, that reading executes nothing, and who sees which module."""

from __future__ import annotations

import hashlib
import pickle
import sys
from pathlib import Path

import pytest

from fedspeed.errors import UserError
from fedspeed.utils import own_code
from fedspeed.utils.own_code import find_code
from fedspeed.utils.registry import load_code, read_code


def lay(folder: Path, **files: str) -> Path:
    """Write files, `tools__norms` as tools/norms.py; return main.py."""
    for name, text in files.items():
        path = folder / (name.replace("__init__", "@").replace("__", "/").replace("@", "__init__") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "main.py"


def names(path: Path) -> list[str]:
    return [name for name, _ in find_code(path.resolve()).beside]


def value(path: Path, name: str = "value") -> object:
    return load_code("model", f"{path}:{name}")


def test_a_file_alone_has_the_digest_it_always_had(tmp_path):
    text = "import os, torch, fedspeed, not_here\nfrom . import nothing\nvalue = 1\n"
    path = lay(tmp_path, main=text, other="")
    code = find_code(path)
    assert code.beside == ()
    assert code.digest == hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@pytest.mark.parametrize(
    ("main", "found"),
    [
        ("import a", ["a.py"]),
        ("import a as z, b", ["a.py", "b.py"]),
        ("from a import thing", ["a.py"]),
        ("from b import *", ["b.py"]),
        ("def f():\n    if 0:\n        import a", ["a.py"]),
        ("import tools", ["tools/__init__.py"]),
        ("import tools.norms", ["tools/__init__.py", "tools/deep/__init__.py", "tools/deep/x.py", "tools/norms.py"]),
        ("from tools import deep", ["tools/__init__.py", "tools/deep/__init__.py"]),
        ("from tools.deep import x", ["tools/__init__.py", "tools/deep/__init__.py", "tools/deep/x.py"]),
        ("from tools import *", ["tools/__init__.py", "tools/deep/__init__.py", "tools/deep/x.py", "tools/norms.py"]),
        ("from . import a", ["a.py"]),
        ("from .tools import deep", ["tools/__init__.py", "tools/deep/__init__.py"]),
        ("from .. import a", []),
        ("import flat.y", ["flat/y.py"]),
        ("import flat", []),
        ("import chain", ["a.py", "chain.py"]),
        ("import main", []),
        ("import random, torch, json, fedspeed", []),
        ("import a.b.c", ["a.py"]),
        ("import importlib; importlib.import_module('a')", []),
        ("import a +", []),
    ],
)
def test_files_are_found_by_their_import_statements_and_not_executed(tmp_path, main, found):
    stop = "raise SystemExit('executed')\n"
    path = lay(
        tmp_path, main=stop + main, a=stop, b=stop, chain=stop + "import a, chain, main", tools____init__=stop,
        tools__norms=stop + "from .deep import x", tools__deep____init__=stop, tools__deep__x=stop, flat__y=stop,
        random=stop, torch=stop, json=stop, fedspeed____init__=stop,
    )  # fmt: skip
    assert names(path) == found


def test_the_folder_on_the_path_of_python_changes_nothing(tmp_path, monkeypatch):
    """As with PYTHONPATH=., and in a script that lies there: what is imported is still a part of the run."""
    path = lay(tmp_path, main="import beside_me", beside_me="")
    monkeypatch.syspath_prepend(tmp_path)
    assert names(path) == ["beside_me.py"]
    (tmp_path / "installed").mkdir()
    lay(tmp_path / "installed", beside_me="")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    assert names(path) == []


def test_an_installed_module_is_not_replaced_by_a_file_of_its_name(tmp_path):
    stop = "raise SystemExit('executed')"
    path = lay(tmp_path, main="import random, torch, helper\nvalue = helper.value", random=stop, torch=stop,
               helper="import random, torch\nvalue = random.Random, torch.nn")  # fmt: skip
    import random

    import torch

    assert value(path) == (random.Random, torch.nn)
    assert "helper" not in sys.modules


def test_two_versions_in_one_process_do_not_meet(tmp_path):
    """Not when a function imports late, either: the main files are equal, their neighbours are not."""
    main = "import helper\nfrom tools import norms\ndef value():\n    import late\n    return helper.v, norms.v, late.v"
    paths, before = [], list(sys.path)
    for i in (1, 2):
        (tmp_path / str(i)).mkdir()
        files = {"helper": f"v = {i}", "tools__norms": f"v = {10 * i}", "late": f"v = {100 * i}"}
        paths.append(lay(tmp_path / str(i), main=main, **files))
    first, second = value(paths[0]), value(paths[1])
    assert (first(), second(), first()) == ((1, 10, 100), (2, 20, 200), (1, 10, 100))
    assert sys.path == before
    assert not {"helper", "tools", "late"} & set(sys.modules)
    one, two = (read_code("model", f"{path}:value")[2] for path in paths)
    assert one != two
    assert one.endswith("+3")


def test_imports_mean_what_they_mean_in_python(tmp_path):
    path = lay(
        tmp_path,
        main="import tools.deep.x as x\nimport tools.norms\nfrom tools import *\nfrom tools.deep import x as again\n"
        "from . import helper\nvalue = x.v, tools.norms.v, second.v, again is x, helper.Own().own(), __name__",
        tools____init__="__all__ = ['second']",
        tools__second="v = 2",
        tools__norms="from .deep import x\nfrom ..helper import three as v",
        tools__deep____init__="",
        tools__deep__x="v = 1",
        helper="three = 3\nclass Own:\n    def own(self):\n        from main import value_of_main\n"
        "        return value_of_main",
    )
    path.write_text("value_of_main = 4\n" + path.read_text())
    *found, name = value(path)
    assert found == [1, 3, 2, True, 4]
    assert name.startswith("fedspeed_user_main_")


def test_files_share_pythons_names_with_the_main_file(tmp_path):
    path = lay(tmp_path, main="__builtins__['flag'] = 1\nimport helper\nvalue = helper.seen", helper="seen = flag")
    assert value(path) == 1


def test_classes_of_files_beside_can_be_pickled(tmp_path):
    path = lay(
        tmp_path, main="def value():\n    from net.parts import Part\n    return Part()", net__parts="class Part: pass"
    )
    part = value(path)()
    assert type(pickle.loads(pickle.dumps(part))) is type(part)


def test_links_that_lead_out_are_refused_and_others_are_read(tmp_path):
    (tmp_path / "own").mkdir()
    lay(tmp_path, secret="value = 'outside'")
    path = lay(tmp_path / "own", main="import a", b="")
    (tmp_path / "own" / "a.py").symlink_to("b.py")
    assert names(path) == ["a.py"]
    (tmp_path / "own" / "a.py").unlink()
    (tmp_path / "own" / "a.py").symlink_to("../secret.py")
    with pytest.raises(UserError, match=r"a\.py is a link to .*secret\.py: expected a file below .*own"):
        read_code("model", f"{path}:value")


def test_many_or_large_files_are_refused(tmp_path, monkeypatch):
    path = lay(tmp_path, main="import a, b", a="import c", b="x = 1", c="")
    assert len(names(path)) == 3
    monkeypatch.setattr(own_code, "MOST_FILES", 3)
    with pytest.raises(UserError, match=r"expected at most 3 files .* found 4 files"):
        find_code(path)
    monkeypatch.setattr(own_code, "MOST_FILES", 4)
    monkeypatch.setattr(own_code, "MOST_BYTES", 9)
    with pytest.raises(UserError, match=r"at most .* 9 bytes .* found \d files and 13 bytes"):
        find_code(path)


def test_a_pipe_in_place_of_a_file_is_refused(tmp_path):
    import os

    path = lay(tmp_path, main="import a")
    os.mkfifo(tmp_path / "a.py")
    assert names(path) == []  # not a file
    with pytest.raises(UserError, match="No module named 'a'"):
        value(path)


@pytest.mark.parametrize(
    ("main", "says"),
    [
        (
            "import nowhere_to_be",
            r"No module named 'nowhere_to_be' .*install it, or put it beside main\.py as nowhere_",
        ),
        ("import helper\nimport importlib\nimportlib.import_module('late')", r"late\.py is a part of the run if a sta"),
        ("from struct import nothing", r"struct\.py is not used, since an installed module has its name: rename it"),
        ("from ..above import x", r"in its own folder and in folders below"),
        ("import broken", r"SyntaxError: .*\(.*broken\.py, line 2\)"),
        ("import fails", r"KeyError: 'x' \(.*fails\.py, line 3\)"),
        ("import helper.sub", r"No module named 'helper\.sub'; 'helper' is not a package"),
    ],
)
def test_what_is_not_found_says_what_to_do(tmp_path, main, says):
    path = lay(tmp_path, main=main, helper="", late="", struct="", broken="\nx = (", fails="\n\n{}['x']")
    with pytest.raises(UserError, match=says) as caught:
        value(path)
    assert "fedspeed_user" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_failed_import_leaves_nothing_and_can_be_repeated(tmp_path):
    path = lay(
        tmp_path, main="import helper\nvalue = helper.value", helper="import os\nvalue = os.environ['NOT_SET_YET']"
    )
    before = set(sys.modules)
    with pytest.raises(UserError, match="NOT_SET_YET"):
        value(path)
    assert set(sys.modules) == before


def test_a_copy_is_the_whole_folder_whatever_is_installed(tmp_path, monkeypatch):
    path = lay(tmp_path, main="import utils_of_mine", utils_of_mine="")
    code = find_code(path)
    copy = tmp_path / own_code.copy_name("main.py", code.digest)
    copy.parent.mkdir()
    copy.write_bytes(code.text)
    (copy.parent / "utils_of_mine.py").touch()
    (tmp_path / "site").mkdir()
    lay(tmp_path / "site", utils_of_mine="raise SystemExit('installed')")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert find_code(copy) == code
    (copy.parent / "planted.py").touch()
    assert find_code(copy) != code
