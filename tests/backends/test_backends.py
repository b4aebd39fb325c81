"""Every back end gives the same bits, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from same_bits import SETTINGS, assert_same_bits, digits, outcome
from torch import nn

from fedspeed import simulate
from fedspeed.backends import shared_memory, worth_processes
from fedspeed.backends.common import as_error, failed_job, remote_error
from fedspeed.backends.process import Processes
from fedspeed.client.work import Job
from fedspeed.config.plan import Plan
from fedspeed.errors import ClientFailed, Diverged, UserError
from fedspeed.methods import METHODS, FedExP, FedInit, FedSpeed
from fedspeed.server.round import broadcast, make_jobs


@pytest.mark.parametrize(
    "name", ["fedspeed", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedavg", "fedsmoo"))]
)
def test_two_workers_give_the_bits_of_serial(name):
    serial = outcome(METHODS[name]())
    assert_same_bits(serial, outcome(METHODS[name](), backend="process", workers=2))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize(
    "method", [*(cls() for cls in METHODS.values()), FedInit(FedSpeed()), FedExP()], ids=lambda m: m.name
)
def test_every_method_on_every_number_of_workers(method, workers):
    assert_same_bits(outcome(method), outcome(method, backend="process", workers=workers))


def children() -> set[int]:
    tasks = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    names = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in tasks.read_text().split()}
    return {pid for pid, command in names.items() if b"spawn_main" in command}


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
def test_nothing_outlives_a_run():
    before = set(Path("/dev/shm").glob("fedspeed-*"))
    data, model = digits()
    run = simulate(METHODS["fedavg"](), model, data, backend="process", workers=2, **SETTINGS)
    assert len(children()) >= 2
    assert set(Path("/dev/shm").glob("fedspeed-*")) == before  # nothing has a name, even while it runs
    for _ in run:
        pass
    assert not children()
    abandoned = simulate(METHODS["fedavg"](), model, data, backend="process", workers=1, **SETTINGS)
    abandoned.step()
    del abandoned
    deadline = time.monotonic() + 10
    while children() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not children()


class Explodes(nn.Module):
    """Gives NaN for one client's inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 10)

    def forward(self, x):
        return self.inner(x.flatten(1)) * float("nan")


def test_errors_of_a_worker_are_the_same_as_here(quick_workers):
    data, _ = digits()
    messages = []
    for backend in ("serial", "process"):
        with (
            simulate(METHODS["fedavg"](), Explodes(), data, backend=backend, workers=2, **SETTINGS) as run,
            pytest.raises(Diverged) as caught,
        ):
            run.step()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


class Counts(nn.Module):
    """Changes a buffer in training, which is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 10)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += 1
        return self.inner(x.flatten(1))


def test_an_error_that_is_nobody_s_update_stops_the_round_and_leaves_the_workers_usable(monkeypatch, quick_workers):
    """It is raised, not waited for: in a worker, and in the parent where a client's state cannot be read."""
    data, model = digits()
    with simulate(METHODS["fedavg"](), Counts(), data, backend="process", workers=2, **SETTINGS) as run:
        for _ in range(2):
            with pytest.raises(UserError, match="buffer 'seen'"):
                run.step()
    with simulate(METHODS["fedspeed"](), model, data, backend="process", workers=2, **SETTINGS) as run:
        run.step()

        def unreadable(client):
            raise UserError("no such state")

        monkeypatch.setattr(run.states, "get", unreadable)
        run.backend.touched = range(data.clients)
        with pytest.raises(UserError, match="no such state"):
            run.step()
        monkeypatch.undo()
        run.backend.touched = run.states
        assert run.step().round == 2


class Sometimes(nn.Module):
    """Gives NaN while one of its parameters is above 50."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 10)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        y = self.inner(x.flatten(1)) * self.scale
        return y * float("nan") if self.scale > 50 else y


def test_a_worker_has_its_next_client_before_a_reply_is_looked_at(monkeypatch, quick_workers):
    data, model = digits()
    with simulate(METHODS["fedspeed"](), model, data, backend="process", workers=1, **SETTINGS) as run:
        sent = []
        send = Processes._send
        monkeypatch.setattr(
            Processes, "_send", lambda self, w, chunk, *rest: (sent.extend(chunk), send(self, w, chunk, *rest))
        )
        jobs = make_jobs(run.work, [3, 5, 7], 0, 0.1)
        replies = run.backend.run(jobs, broadcast(run, run.work), run.client_state)
        assert next(replies).job == jobs[0]
        assert sent == jobs[:2]  # two slots: one is being read, one is worked on
        assert [reply.job for reply in replies] == jobs[1:]


def test_a_round_can_be_run_again_after_it_failed(quick_workers):
    """No worker's late answer is taken for one of the next round."""
    (data, _), model = digits(), Sometimes()
    with (
        simulate(METHODS["fedavg"](), model, data, backend="process", workers=2, **SETTINGS) as run,
        simulate(METHODS["fedavg"](), model, data, **SETTINGS) as serial,
    ):
        good = run.server
        broken = good.x.clone()
        broken[[i for i, name in enumerate(_owners(run)) if name == "scale"]] = 100.0
        run.server = good._replace(x=broken)
        with pytest.raises(Diverged):
            run.step()
        run.server = good
        for _ in zip(run, serial, strict=True):
            assert torch.equal(run.x, serial.x)


def _owners(run):
    flat = run.work.flat
    return [name for name, size in zip(flat.names, flat.sizes, strict=True) for _ in range(size)]


def test_what_cannot_be_sent_is_named():
    data, model = digits()
    with pytest.raises(UserError, match="the loss cannot be sent to worker processes"):
        simulate(METHODS["fedavg"](), model, data, loss=lambda a, b: a.mean(), backend="process", **SETTINGS)
    model.extra = lambda: None
    with pytest.raises(UserError, match="the model cannot be sent to worker processes"):
        simulate(METHODS["fedavg"](), model, data, backend="process", **SETTINGS)


SCRIPT = """
import fedspeed, torch
data = fedspeed.load_data('digits', clients=10)
{model}
run = fedspeed.simulate(fedspeed.FedAvg(), model, data, rounds=1, local_steps=1, engine='loop', backend={backend!r},
                        workers=1, active=2)
with run:
    list(run)
print(type(run.backend).__name__)
"""
OWN = """
class Net(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x.flatten(1))
model = Net(64, 10)
"""


@pytest.mark.parametrize(
    ("model", "backend", "says"),
    [
        pytest.param(
            "model = fedspeed.build_model('linear', data)", "process", "Processes", marks=pytest.mark.slow
        ),  # needs nothing of it
        pytest.param(OWN, "auto", "Serial", marks=pytest.mark.slow),
        (OWN, "process", "a script must start runs inside `if __name__ == '__main__':`"),
    ],
    ids=["nothing of the script", "its class, auto", "its class"],
)
def test_a_script_that_does_not_guard_its_main(tmp_path, model, backend, says):
    script = tmp_path / "unguarded.py"
    script.write_text(SCRIPT.format(model=model, backend=backend))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == ("a script" in says), done.stderr
    assert says in (done.stderr if done.returncode else done.stdout).splitlines()[-1]


IPYTHON = """import sys, types
text = sys.stdin.read()
sys.modules["__main__"] = types.ModuleType("__main__")
exec(compile(text, "<ipython-input-1>", "exec"), vars(sys.modules["__main__"]))
"""


@pytest.mark.parametrize(
    "how",
    [["-c", None], *(pytest.param(how, marks=pytest.mark.slow) for how in (["-"], ["-c", IPYTHON]))],
    ids=["-c", "stdin", "IPython"],
)
def test_a_class_of_a_notebook_cannot_be_sent(how):
    """A session without a file: nobody else can find what is defined there."""
    script = SCRIPT.format(model=OWN, backend="process")
    command = [sys.executable, *(script if part is None else part for part in how)]
    done = subprocess.run(command, input=script, capture_output=True, text=True, timeout=300, check=False)
    told = done.stderr.splitlines()[-1]
    assert "Net (model) is defined in this notebook or session" in told
    assert "backend='serial'" in told
    assert done.returncode == 1


def test_auto_takes_processes_for_long_runs_only():
    data, _ = digits()

    def worth(d, device="cpu", **settings):
        flat = SimpleNamespace(d=d, device=torch.device(device))
        plan = Plan(**{"rounds": 10, "active": 10, "engine": "loop", **settings})
        return worth_processes(SimpleNamespace(plan=plan, data=data, flat=flat))

    assert not worth(5_000)
    assert worth(5_000, rounds=10_000)
    assert worth(11_000_000)
    assert not worth(11_000_000, engine="block")
    assert not worth(11_000_000, device="meta")


@pytest.mark.parametrize("passed_on", [True, False], ids=["as a file", "mapped"])
def test_segments_give_back_what_was_written(passed_on, monkeypatch):
    """Scalars, columns of a matrix, other dtypes; mapped pages see the same."""
    if passed_on and not shared_memory.PASSED_ON:
        pytest.skip("reads and writes agree with mapped pages on Linux")
    monkeypatch.setattr(shared_memory, "PASSED_ON", passed_on)
    tensors = [torch.arange(6.0).reshape(2, 3), torch.tensor(2.5, dtype=torch.float64)]
    places, size = shared_memory.lay_out(tensors)
    segment = shared_memory.Segment.create(size)
    for place, a in zip(places, tensors, strict=True):
        segment.write(place, a)
    segment.write(places[0], torch.arange(6, dtype=torch.float64).reshape(3, 2).T)
    tensors[0] = torch.tensor([[0.0, 2, 4], [1, 3, 5]])
    for place, a in zip(places, tensors, strict=True):
        found = segment.read(place)
        assert found.dtype == a.dtype
        assert torch.equal(found, a)
        assert torch.equal(segment.tensor(place), a)
    segment.read(places[0]).zero_()  # a copy
    assert torch.equal(segment.read(places[0]), tensors[0])
    segment.unlink()


def test_a_worker_handles_signals_before_it_imports_torch():
    """The entry point is imported first, and Ctrl-C during the seconds that torch takes must not end a worker."""
    program = "import sys, fedspeed.backends.process_start; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (UserError("a"), UserError, "a"),
        (ClientFailed("b"), ClientFailed, "b"),
        (Diverged("c"), Diverged, "c"),
        (type("Other", (UserError,), {})("d"), UserError, "d"),
        (ValueError("e"), UserError, "ValueError: e"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_errors_of_workers_keep_kind_and_message(error, kind, text):
    again = as_error(remote_error(error))
    assert (type(again), str(again)) == (kind, text)
    assert again.__notes__[0].startswith("In the worker process:")
    job = Job(3, 0, 0.1)
    if kind is UserError:
        with pytest.raises(UserError, match=text):
            failed_job(job, remote_error(error))
    else:
        assert failed_job(job, remote_error(error)).job == job
