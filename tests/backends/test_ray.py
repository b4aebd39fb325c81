"""The Ray back end: the same bits on a real cluster of three nodes, whoever is lost, and one line for what is wrong.

Tests that are not slow need no Ray.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import poisoned
import pytest
import torch
from same_bits import SETTINGS, assert_same_bits, digits, outcome
from torch import nn

import fedspeed
from fedspeed import simulate
from fedspeed.backends import mixture
from fedspeed.backends.packing import pack_tensors, unpack_tensors
from fedspeed.backends.ray import session
from fedspeed.backends.ray.fingerprint import Fingerprint, admit, bits, differences
from fedspeed.backends.ray.session import require_reachable
from fedspeed.cli import main
from fedspeed.config.config import Config
from fedspeed.data.federated import Federated
from fedspeed.errors import ClientFailed, UserError
from fedspeed.methods import METHODS, FedAvg, FedExP, FedInit, FedSpeed
from fedspeed.runs.config_file import config_digest, read_config
from fedspeed.runs.directory import RunDir
from fedspeed.runs.launch import run_config
from fedspeed.server.observers import Observer

pytestmark = [
    pytest.mark.xdist_group("ray"),  # one cluster
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
FEDSPEED = [sys.executable, "-m", "fedspeed"]
SMALL = ["--clients", "8", "--active", "4", "--local-steps", "400", "--engine", "loop"]


def python(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **variables}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, check=False)


# Without Ray


def test_no_ray_is_one_line():
    program = (
        "import sys; sys.modules['ray'] = None\nfrom fedspeed.cli import main\n"
        "sys.exit(main(['run', '--backend', 'ray', '--rounds', '1', '--quiet', '--out', 'never-made']))"
    )
    done = python(program)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "back end ray: Ray cannot be imported" in done.stderr
    assert "pip install 'fedspeed[ray]'" in done.stderr
    assert not Path("never-made").exists()


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("127.0.0.1:1", "expected a Ray cluster at 127.0.0.1:1, found none .*refused.*ray start --head"),
        ("ray://127.0.0.1:1", "expected a Ray cluster at ray://127.0.0.1:1, found none"),
        ("somewhere", "expected auto, HOST:PORT or ray://HOST:PORT as --ray-address, got 'somewhere'"),
        (":6379", "got ':6379'"),
        ("host:99999", "got 'host:99999'"),
    ],
)
def test_an_address_where_nobody_listens_is_one_line(address, says):
    with pytest.raises(UserError, match=says) as caught:
        require_reachable(address)
    assert "\n" not in str(caught.value)


def test_bits_are_equal_in_another_process_and_not_on_another_cpu():
    """A worker with other instructions is found by what it says, and by what it computes."""
    tell = "from fedspeed.backends.ray.fingerprint import bits; import json; print(json.dumps(bits()))"
    here = bits()
    alike = Fingerprint(*json.loads(python(tell, OMP_NUM_THREADS="3").stdout))
    assert differences(here, alike) == {}
    if os.environ.get("ATEN_CPU_CAPABILITY") == "default":
        pytest.skip("these are the lowest instructions already: no process can have others")
    other = Fingerprint(*json.loads(python(tell, ATEN_CPU_CAPABILITY="default").stdout))
    found = differences(here, other)
    assert {"cpu", "variables", "job"} <= set(found)
    assert other.code == here.code


HERE = Fingerprint("0.1", "c0de", "3.11", "2.13.0", "2.4.6", "AVX512", "none", "d1ge57")


def test_who_may_join():
    assert admit(HERE, "n1", HERE, "", allow_mixed=False) == (True, "")
    slower = HERE._replace(cpu="AVX2", job="0ther")
    assert admit(HERE, "n1", slower, "", False) == (
        False,
        "node n1: cpu AVX2 instead of AVX512, job 0ther instead of d1ge57: its bits are not the driver's; use nodes "
        "that are alike, or --allow-mixed",
    )
    assert admit(HERE, "n1", slower, "", True) == (
        True,
        "node n1: cpu AVX2 instead of AVX512, job 0ther instead of d1ge57",
    )
    newer = HERE._replace(fedspeed="0.2")
    for allow_mixed in (False, True):  # it is another program
        welcome, told = admit(HERE, "n1", newer, "", allow_mixed)
        assert not welcome
        assert told == "node n1: fedspeed 0.2 instead of 0.1; install the same version there as here"
        welcome, _ = admit(HERE, "n1", None, "ModuleNotFoundError: fedspeed", allow_mixed)
        assert not welcome
        built = HERE._replace(kernels="ke12ne1")  # HERE has none: it cannot compute what a driver with kernels sends
        assert admit(built, "n1", HERE, "", allow_mixed) == (
            False,
            "node n1: kernels none instead of ke12ne1; install GCC there, and the package again (pip install .)",
        )
    assert admit(HERE, "n1", built, "", True)[0]


def test_a_node_without_the_package_says_so():
    program = (
        "import sys; from fedspeed.backends.ray.worker import actor_class; made = actor_class()\n"
        "sys.modules['fedspeed.backends.ray.worker'] = None\nprint(made([]).hello()[2:])"
    )
    assert "(None, '', 'ModuleNotFoundError: import of fedspeed.backends.ray.worker halted" in python(program).stdout


def test_the_code_of_a_worker_is_the_whole_package():
    """A node with another `methods/fedavg.py` would compute other results."""
    digest, root = hashlib.blake2b(digest_size=8), Path(fedspeed.__file__).parent
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    assert bits().code == digest.hexdigest()


def test_packed_tensors_are_at_aligned_addresses():
    tensors = [torch.arange(5.0), torch.zeros(0), torch.arange(3), torch.ones(2, 2, dtype=torch.bfloat16)]
    raw = pack_tensors(tensors)
    odd = np.empty(len(raw) + 65, np.uint8)
    start = next(i for i in range(1, 66) if (odd.ctypes.data + i) % 64 == 8)
    odd[start : start + len(raw)] = raw
    for given in (raw, odd[start : start + len(raw)]):
        given.flags.writeable = False
        opened = unpack_tensors(given, tensors)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(tensors, opened, strict=True))
        assert all(a.data_ptr() % 64 == 0 for a in opened)


def test_where_ray_is_does_not_make_another_run(tmp_path):
    plain = Config(rounds=1, clients=4)
    placed = Config(rounds=1, clients=4, ray_address="10.0.0.1:6379", ray_cpus=2.0, allow_mixed=True)
    assert config_digest(plain.to_dict()) == config_digest(placed.to_dict())
    assert not [key for key in plain.to_dict() if "ray" in key or "mixed" in key]


def test_a_run_directory_neither_holds_an_address_nor_decides_one(tmp_path, capsys):
    """Whoever is named there would be sent code, and sends some."""
    run_config(Config(rounds=1, clients=4, ray_address="10.0.0.1:6379", backend="serial"), tmp_path / "run")
    stored = tmp_path / "run" / "config.toml"
    assert "10.0.0.1" not in stored.read_text()
    stored.write_text('ray_address = "10.0.0.1:6379"\n' + stored.read_text())
    assert read_config(tmp_path / "run").ray_address == ""
    again = ["run", str(stored), "--backend", "ray", "--quiet", "--out", str(tmp_path / "again")]
    for given in (again, ["slurm", *again[1:]], ["sweep", *again[1:], "--grid", "lr=0.1"]):  # not as a config either
        assert main(given) == 2
        assert "ray_address: expected on the command line or in $RAY_ADDRESS" in capsys.readouterr().err
        assert not (tmp_path / "again").exists()


def test_shares_of_gpus_fit_the_device():
    data, model = digits()
    with pytest.raises(UserError, match=r"Ray cannot be imported|device cpu expects --ray-gpus 0, got 0.5"):
        simulate(FedAvg(), model, data, backend="ray", ray_gpus=0.5, device="cpu", **SETTINGS)


# On a cluster


@pytest.fixture(scope="module")
def cluster():
    """Three nodes on this machine, with a CPU each."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    memory = 150 * 2**20
    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "object_store_memory": memory, "include_dashboard": False},
    )
    for _ in range(2):
        made.add_node(num_cpus=1, object_store_memory=memory)
    # One connection for all tests: a process that connects and disconnects dozens of times may crash in Ray.
    try:
        joined = session.join(made.address, gpus=0)
        yield made
        session.leave(joined)
    finally:
        made.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [*(cls() for cls in METHODS.values()), FedInit(FedSpeed()), FedExP()], ids=lambda m: m.name
)
def test_every_method_on_three_nodes(method, cluster):
    placed = {"backend": "ray", "workers": 3, "ray_address": cluster.address}
    assert_same_bits(outcome(method), outcome(method, **placed))


WORST = """
import numpy as np


def sample(round, rng, clients, active, history):
    losses = np.where(np.isnan(history.losses), rng.random(clients) + 9, history.losses)
    return np.argsort(-losses, kind="stable")[:active]
"""


@pytest.mark.slow
@pytest.mark.parametrize("cohort", ["cyclic", "weighted:samples", "availability:away.csv", "worst.py:sample"])
def test_every_cohort_on_three_nodes(cohort, cluster, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("worst.py").write_text(WORST)  # the clients with the largest losses
    Path("away.csv").write_text("client,from,to\n" + "".join(f"{i},{1 + i % 2},{9 - i % 3}\n" for i in range(12)))
    placed = {"backend": "ray", "workers": 3, "ray_address": cluster.address}
    here = outcome(FedSpeed(), cohort=cohort, rounds=4)
    assert_same_bits(here, outcome(FedSpeed(), cohort=cohort, rounds=4, **placed))


@pytest.mark.slow
def test_a_loss_of_a_file_on_three_nodes(tmp_path, cluster):
    """Nodes need not have the file."""
    file = tmp_path / "own_loss.py"
    file.write_text("def f(o, t, q=1.0):\n    return (o.logsumexp(1) - o.gather(1, t[:, None])[:, 0]).mean() * q\n")
    placed = {"backend": "ray", "workers": 3, "ray_address": cluster.address}
    for loss in ("cross-entropy:smoothing=0.1", {"name": f"{file}:f", "q": 0.5}):
        assert_same_bits(outcome(FedSpeed(), loss=loss), outcome(FedSpeed(), loss=loss, **placed))


@pytest.mark.slow
def test_own_code_in_several_files_reaches_the_nodes(cluster, tmp_path):
    """They do not have the files: method and model, and a module that is imported late, come with the work."""
    folder = tmp_path / "own"
    (folder / "parts").mkdir(parents=True)
    (folder / "mine.py").write_text(
        "from fedspeed.methods import FedAvg\n\n\nclass Mine(FedAvg):\n"
        "    def direction(self, x, grad, down, client):\n        from parts.numbers import one\n\n"
        "        return one() * grad(x)\n\n\ndef build(shape, outputs):\n    from parts.nets import Net\n\n"
        "    return Net(outputs)\n"
    )
    (folder / "parts" / "numbers.py").write_text("def one():\n    return 1.0\n")
    (folder / "parts" / "nets.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Sequential):\n    def __init__(self, outputs):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(64, outputs))\n"
    )
    given = {"rounds": 2, "clients": 6, "active": 4, "local_steps": 2, "engine": "loop",
             "model": f"{folder / 'mine.py'}:build", "method": f"{folder / 'mine.py'}:Mine"}  # fmt: skip
    placed = {"backend": "ray", "workers": 3, "ray_address": cluster.address}
    config = Config.from_dict({**given, **placed})
    folder.rename(tmp_path / "moved")
    run_config(config, tmp_path / "ray")
    folder = (tmp_path / "moved").rename(folder)
    run_config(Config.from_dict({**given, "method": "fedavg", "backend": "serial"}), tmp_path / "serial")
    assert RunDir(tmp_path / "ray").model_digest() == RunDir(tmp_path / "serial").model_digest()


class Seen(Observer):
    """Calls a function after the first reply of a round."""

    def __init__(self, at, then):
        self.at, self.then, self.done = at, then, 0

    def round(self, record, run):
        self.done = record.round

    def client(self, done, jobs):
        if self.done + 1 == self.at and done == 1:
            self.then()


def told(run):
    records = [{**r.to_dict(), "seconds": 0, "eval_seconds": 0} for r in run]
    return records, run.x, {i: run.states.get(i) for i in run.states}


def lose(cluster, node):
    """Kill a node and the workers on it at once, as the loss of a machine does.

    Workers of a raylet that is killed alone notice it some time later, perhaps when the run is over.
    """
    raylet = node.all_processes["raylet"][0].process.pid
    workers = subprocess.run(["pgrep", "-P", str(raylet)], capture_output=True, text=True, check=True).stdout.split()
    cluster.remove_node(node, allow_graceful=False)
    for pid in map(int, workers):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_node_killed_in_a_round_and_the_bits_stay(cluster):
    settings = {**SETTINGS, "active": 12, "local_epochs": 20}
    data, model = digits()
    extra = cluster.add_node(num_cpus=1, object_store_memory=150 * 2**20)
    kill = Seen(2, lambda: lose(cluster, extra))
    placed = {"backend": "ray", "workers": 4, "ray_address": cluster.address}
    # Its part of round 2 may be done when it is lost; the loss is then noticed in round 3.
    lost = r"a Ray worker on .* was lost \(.*\) while it ran client .* of round [23]"
    with simulate(FedSpeed(), model, data, observers=[kill], **placed, **settings) as run:
        assert run.workers == 4
        with pytest.warns(UserWarning, match=lost):
            found = told(run)
    with simulate(FedSpeed(), model, data, **settings) as serial:
        assert_same_bits(told(serial), found)


@pytest.mark.slow
def test_a_worker_that_always_dies_stops_the_run_with_the_reason(cluster):
    data, _ = digits()
    with (
        simulate(FedAvg(), Deadly(), data, backend="ray", workers=1, ray_address=cluster.address, **SETTINGS) as run,
        pytest.warns(UserWarning, match="was lost"),
        pytest.raises(UserError, match=r"a Ray worker on .* was lost .* while it ran client \d+ of round 1; out of"),
    ):
        run.step()


class Deadly(nn.Module):
    """Kills its process in training, as running out of memory would; the driver only tries it, in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 10)

    def forward(self, x):
        if self.training:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.inner(x)


class Allergic(nn.Module):
    """Raises when it sees a client's data in training, and writes to its inputs in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 3)

    def forward(self, x):
        if self.training and (x == 99.0).any():
            raise RuntimeError("cannot digest this")
        return self.inner(x.mul_(1.0))


@pytest.mark.slow
def test_a_client_that_raises_is_not_run_again(cluster):
    r = np.random.default_rng(0)
    x = r.normal(size=(24, 2)).astype("f4")
    x[8] = 99.0
    test = x[:6].copy(), r.integers(0, 3, 6)
    data = Federated.from_arrays(x, r.integers(0, 3, 24), list(np.arange(24).reshape(6, 4)), test, classes=3)
    common = {"rounds": 2, "active": 6, "local_epochs": 1, "batch_size": 4}
    placed = {"backend": "ray", "workers": 2, "ray_address": cluster.address}
    with (
        simulate(FedSpeed(), Allergic(), data, **common, **placed) as run,
        pytest.raises(ClientFailed, match=r"client 2, step 1 of 1: RuntimeError: cannot digest this"),
    ):
        run.step()
    torch.manual_seed(0)
    model = Allergic()
    runs = [simulate(FedSpeed(), model, data, on_client_error="drop", **common, **how) for how in ({}, placed)]
    for a, b in zip(*runs, strict=True):
        assert a.dropped == b.dropped == [2]
        assert torch.equal(runs[0].x, runs[1].x)


@pytest.mark.slow
def test_states_stay_on_their_node_and_are_sent_if_they_are_gone(cluster, monkeypatch):
    from fedspeed.backends.ray.backend import Ray

    made, real = [], Ray._request
    monkeypatch.setattr(Ray, "_request", lambda self, *args: made.append(real(self, *args)) or made[-1])
    settings = {**SETTINGS, "active": 12, "rounds": 4}
    data, model = digits()
    with (
        simulate(FedSpeed(), model, data, backend="ray", workers=3, ray_address=cluster.address, **settings) as run,
        simulate(FedSpeed(), model, data, **settings) as serial,
    ):
        for t in range(4):
            made.clear()
            a, b = run.step(), serial.step()
            assert a.train_loss == b.train_loss
            assert torch.equal(run.x, serial.x)
            first = list(made)
            held = [file for worker in run.backend.pool.workers for file in Path(worker.folder).iterdir()]
            assert len(held) <= 2 * 12  # of this round, and those of the last that nobody was told to drop yet
            if t == 0:
                assert all(request.fresh and not request.kept for request in first)
            if t == 1:
                assert sum(len(request.kept) for request in first) >= 6
                folders = [Path(worker.folder) for worker in run.backend.pool.workers]
                assert sum(len(list(folder.iterdir())) for folder in folders) >= 12
                for folder in folders:
                    for file in folder.iterdir():
                        file.unlink()
            if t == 2:  # asked for in vain, then sent
                assert any(request.kept for request in first)
                assert sum(len(request.sent) for request in first) >= 12
    assert not any(folder.exists() for folder in folders)


@pytest.mark.slow
def test_workers_whose_bits_differ_are_refused_or_recorded(cluster, monkeypatch, tmp_path):
    """The driver says that it is another; the workers, and what they answer, are real."""
    from fedspeed.backends.ray import pool

    real = bits()
    monkeypatch.setattr(pool, "bits", lambda: real._replace(cpu="ANOTHER"))
    tables = {"rounds": 1, "clients": 8, "active": 4, "local_steps": 1, "backend": "ray", "workers": 2,
              "ray_address": cluster.address}  # fmt: skip
    with (
        pytest.warns(UserWarning, match="this worker is not used"),
        pytest.raises(UserError, match=f"no worker can be used: node .*: cpu {real.cpu} instead of ANOTHER: its bits"),
    ):
        run_config(Config.from_dict(tables), tmp_path / "refused")
    with pytest.warns(UserWarning, match="accepted: the run is mixed"):
        run_config(Config.from_dict({**tables, "allow_mixed": True}), tmp_path / "mixed")
    summary = json.loads((tmp_path / "mixed" / "summary.json").read_text())
    assert summary["environment"]["mixed"].endswith(f"cpu {real.cpu} instead of ANOTHER")
    assert "allow_mixed = true" in (tmp_path / "mixed" / "config.toml").read_text()
    assert mixture(object()) == {}


@pytest.mark.slow
def test_first_rounds_with_other_settings_need_the_cluster_once(cluster, tmp_path):
    """Those who run them, and those who run the rest, take all of it in turn."""
    tables = {"rounds": 3, "clients": 8, "active": 4, "local_steps": 1, "until": {"2": {"lr": 0.05}}}
    placed = {"backend": "ray", "workers": 3, "ray_address": cluster.address}
    found, wanted = (
        run_config(Config.from_dict(tables | how), tmp_path / str(how["backend"]))
        for how in (placed, {"backend": "serial"})
    )
    assert found["digests"] == wanted["digests"]
    assert found["workers"] == 3


def anonymous() -> int:
    """Bytes of this process's own memory: Ray's, which is bounded by itself, aside."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
def test_driver_memory_is_flat_with_a_thousand_clients(cluster, monkeypatch):
    """Replies of one round are 50 x 2 vectors; a few are on their way at a time, and the driver forgets them."""
    from fedspeed.backends.ray.backend import Ray
    from fedspeed.backends.ray.pool import AHEAD

    sent, real = [], Ray._request
    monkeypatch.setattr(Ray, "_request", lambda self, *args: sent.append(1) or real(self, *args))

    class Watch(Observer):
        def client(self, done, jobs):
            ahead.append(len(sent) - done)
            used[-1].append(anonymous())

        def round(self, record, run):
            sent.clear()
            used.append([])

    r = np.random.default_rng(0)
    x, y = r.normal(size=(4000, 64)).astype("f4"), r.integers(0, 10, 4000)
    data = Federated.from_arrays(x, y, list(np.arange(4000).reshape(1000, 4)), classes=10)
    model = nn.Sequential(nn.Linear(64, 2000), nn.ReLU(), nn.Linear(2000, 10))
    vector = 4 * sum(p.numel() for p in model.parameters())
    used, ahead = [[]], []
    settings = {"rounds": 9, "active": 50, "local_epochs": 1, "batch_size": 4, "engine": "loop", "states": "disk"}
    placed = {"backend": "ray", "workers": 3, "ray_address": cluster.address}
    with simulate(FedSpeed(), model, data, observers=[Watch()], **settings, **placed) as run:
        list(run)
        assert len(run.states) > 300
    assert max(ahead) < AHEAD * 3
    peaks = [max(seen) for seen in used[:9]]
    assert max(peaks[2:]) - peaks[1] < 0.2 * 50 * 2 * vector, peaks


def until(what, seconds=240.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_a_driver_killed_and_resumed_ends_with_the_same_bits(cluster, tmp_path):
    given = [*FEDSPEED, "run", *SMALL, "--rounds", "12", "--method", "scaffold", "--checkpoint-every", "1", "--quiet"]
    subprocess.run([*given, "--backend", "serial", "--out", str(tmp_path / "serial")], check=True)
    out = tmp_path / "ray"
    placed = ["--backend", "ray", "--workers", "2", "--ray-address", cluster.address, "--out", str(out)]
    driver = subprocess.Popen([*given, *placed], start_new_session=True)
    lines = out / "rounds.jsonl"
    until(lambda: driver.poll() is not None or (lines.exists() and lines.read_text().count("\n") >= 2))
    assert driver.poll() is None
    driver.kill()
    driver.wait()
    assert not (out / "summary.json").exists()
    env = {**os.environ, "RAY_ADDRESS": cluster.address}
    subprocess.run([*FEDSPEED, "resume", str(out), "--quiet"], check=True, env=env)
    found, wanted = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("ray", "serial"))
    assert found["digests"] == wanted["digests"]
    assert found["backend"] == "ray"
    assert found["workers"] == 2


# A Ray of our own


def offspring(pid: int) -> set[int]:
    """Everybody below a process."""
    found: set[int] = set()
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, tasks.read_text().split()):
            found |= {child} | offspring(child)
    return found


def lives(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
def test_nothing_outlives_a_driver_that_is_killed(tmp_path):
    out = tmp_path / "run"
    given = [*FEDSPEED, "run", *SMALL, "--rounds", "4000", "--backend", "ray", "--workers", "2", "--quiet"]
    driver = subprocess.Popen([*given, "--out", str(out)], start_new_session=True)
    lines = out / "rounds.jsonl"
    until(lambda: driver.poll() is not None or (lines.exists() and lines.read_text()))
    below = offspring(driver.pid)
    ours = {pid for pid in below if b"FedspeedWorker" in Path(f"/proc/{pid}/cmdline").read_bytes()}
    driver.kill()
    driver.wait()
    assert len(ours) == 2
    until(lambda: not any(map(lives, ours)), seconds=60)
    until(lambda: not any(map(lives, below)))  # Ray's own agents take a minute


@pytest.mark.slow
def test_a_driver_that_is_told_to_end_says_so_as_on_every_back_end(tmp_path):
    """Ray has a handler of its own for this signal."""
    out = tmp_path / "run"
    given = [*FEDSPEED, "run", *SMALL, "--rounds", "4000", "--backend", "ray", "--workers", "1", "--quiet"]
    driver = subprocess.Popen([*given, "--out", str(out)], start_new_session=True)
    lines = out / "rounds.jsonl"
    until(lambda: driver.poll() is not None or (lines.exists() and lines.read_text()))
    driver.terminate()
    assert driver.wait(60) == 143
    assert json.loads((out / "summary.json").read_text())["status"] == "terminated"


@pytest.mark.slow
def test_nothing_in_the_current_folder_is_executed(tmp_path):
    script = tmp_path / "bin" / "fedspeed"
    script.parent.mkdir()
    script.write_text("import sys\nfrom fedspeed.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n")
    command = poisoned.RUN.replace("process", "ray") + " elsewhere"
    assert poisoned.trip(tmp_path / "run", [sys.executable, str(script)], [command]) == []
