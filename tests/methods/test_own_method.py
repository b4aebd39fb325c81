"""A method from the documentation's skeleton, used without touching the package."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from federations import Softmax, package

from fedspeed.cli import main
from fedspeed.config.config import Config
from fedspeed.config.plan import Plan
from fedspeed.errors import UserError
from fedspeed.methods import METHODS, FedAvg, FedInit, find_method
from fedspeed.methods.base import Method
from fedspeed.runs.launch import run_config

DOC = Path(__file__).parents[2] / "docs" / "guides" / "methods.md"
SMALL = ["--clients", "10", "--active", "3", "--rounds", "2", "--local-epochs", "1"]


@pytest.fixture
def skeleton(tmp_path) -> Path:
    """The documentation's first code block as a file."""
    code = re.search(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL).group(1)
    path = tmp_path / "my_method.py"
    path.write_text(code)
    return path


def test_skeleton_without_momentum_is_fedavg_and_with_it_is_not(skeleton):
    plan = Plan(rounds=3, active=3, local_steps=2, batch_size=4)
    own, avg = find_method(f"{skeleton}:FedAvgM"), METHODS["fedavg"]

    def final(method):
        run = package(Softmax(), method, plan)
        for _ in run:
            pass
        return run.x

    assert (final(own(beta=0.0)) - final(avg())).abs().max() < 1e-14
    assert (final(own()) - final(avg())).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["Mine", "FedAvg"])
@pytest.mark.parametrize("wrap", [lambda method: method, FedInit])
def test_a_class_that_a_config_cannot_name_is_refused(tmp_path, name, wrap):
    """Its directory could not be read back, or would be read back as another method of the same name."""
    own = type(name, (FedAvg,), {})
    with pytest.raises(UserError, match=f"method {name}: a config names its method.*simulate"):
        run_config(Config(method=wrap(own()), clients=10, active=3, rounds=1), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_from_the_command_line_and_again_from_its_config(skeleton, tmp_path, capsys):
    name = f"{skeleton}:FedAvgM"
    assert (
        main(["run", "--method", name, "--set", "method.beta=0.5", *SMALL, "--out", str(tmp_path / "a"), "--json"]) == 0
    )
    first = json.loads(capsys.readouterr().out)
    config = Config.from_toml(tmp_path / "a" / "config.toml")
    assert config.method.beta == 0.5
    assert main(["run", str(tmp_path / "a" / "config.toml"), "--out", str(tmp_path / "b"), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["last_test_loss"] == first["last_test_loss"]
    model = [(tmp_path / out / "model.safetensors").read_bytes() for out in "ab"]
    assert model[0] == model[1]


def test_compare_takes_it_with_fields(skeleton, tmp_path, capsys):
    name = f"{skeleton}:FedAvgM"
    code = main(
        ["compare", "fedavg", name, f"{name}:beta=0.5", *SMALL, "--seeds", "1", "--out", str(tmp_path / "c"), "--json"]
    )
    assert code == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 3


def test_methods_explains_it(skeleton, capsys):
    assert main(["methods", f"{skeleton}:FedAvgM"]) == 0
    assert "momentum" in capsys.readouterr().out


def test_an_entry_point_makes_it_a_name(skeleton, tmp_path):
    """A real distribution on the path, as pip would leave it."""
    site = tmp_path / "site"
    info = site / "my_package-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "my_package.py").write_text(skeleton.read_text())
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fedspeed.methods]\nfedavgm = my_package:FedAvgM\n")
    given = ["run", "--method", "fedavgm", *SMALL, "--out", str(tmp_path / "o"), "--quiet"]
    script = (
        f"import sys; sys.path.insert(0, {str(site)!r}); from fedspeed.cli import main\n"
        f"sys.exit(main(['methods', 'fedavgm']) or main({given}))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "beta" in result.stdout
    assert 'name = "fedavgm"' in (tmp_path / "o" / "config.toml").read_text()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere.py:X", "there is no file"),
        ("nowhere.py", "which class"),
        ("{file}:FedAvgN", "did you mean 'FedAvgM'"),
        ("{file}:Server", "subclass of fedspeed.Method"),
        ("{broken}:X", "cannot be imported"),
        ("{ends}:X", r"cannot be imported: SystemExit: 0 \(.*ends.py, line 2\)"),
        ("fedspedd", "did you mean 'fedspeed'"),
    ],
)
def test_bad_names(skeleton, tmp_path, name, says):
    broken = tmp_path / "broken.py"
    broken.write_text("import nothing_of_the_kind\n")
    ends = tmp_path / "ends.py"
    ends.write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(UserError, match=says):
        find_method(name.format(file=skeleton, broken=broken, ends=ends))


@pytest.mark.parametrize("base", ["Method", "FedAvg"])
def test_a_class_without_its_decorator_is_refused(tmp_path, base):
    """Its fields would stay what `param` returns, or be lost."""
    text = "from fedspeed import FedAvg, Method\nfrom fedspeed.utils.checked_fields import param\n"
    text += f"class Mine({base}):\n    beta: float = param(0.9, '[0, 1)', 'beta')\n"
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UserError, match=r"expected a dataclass; write @dataclass\(frozen=True\) above Mine"):
        find_method(f"{tmp_path / 'mine.py'}:Mine")


def test_a_class_of_ours_that_a_file_imports_keeps_its_name(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("from fedspeed import FedAvg, FedInit, Method\nMine = FedAvg\n")
    before = FedAvg().to_dict()
    for name in ("FedAvg", "Mine", "FedInit", "Method"):
        find_method(f"{file}:{name}")
    assert find_method(f"{file}:Mine") is FedAvg
    assert FedAvg().to_dict() == before == find_method("fedavg")().to_dict()
    assert (FedInit().name, Method.source) == ("fedinit", "")
