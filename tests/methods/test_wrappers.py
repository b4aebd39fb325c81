"""Methods around a method: everything is handed on, and privacy or compression is one file of the user's."""

from __future__ import annotations

import hashlib
import inspect
import re
import struct
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pytest
import torch
from federations import Softmax, package

from fedspeed import Config, FedAvg, FedInit, FedSpeed, Method, Scaffold, UserError, Wrapper
from fedspeed.cli import main
from fedspeed.client.local_loop import run_client
from fedspeed.client.work import Job
from fedspeed.config.plan import Plan
from fedspeed.methods import find_method
from fedspeed.methods.base import Local, Movement, dense_bytes
from fedspeed.methods.wrapper import OWN
from fedspeed.runs.launch import resume
from fedspeed.runs.verify import verify

ROOT = Path(__file__).parents[2]
DOC = ROOT / "docs" / "guides" / "methods.md"
PLAN = Plan(rounds=3, active=4, local_steps=2, batch_size=4, lr=0.1, weight_decay=0.0, seed=5, backend="serial")
EQUAL = Softmax(equal=8)
CLIP = 0.05
BASES = [FedAvg(), FedSpeed(), Scaffold()]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    """`file.py:Class` of two wrappers outside the package: the documentation's DP, and a quantiser."""
    code = re.search(r"```python\n(# dp.py\n.*?)```", DOC.read_text(), re.DOTALL).group(1)
    path = tmp_path_factory.mktemp("own") / "dp.py"
    path.write_text(code)
    return {"dp": f"{path}:DP", "quantised": f"{ROOT / 'tests' / 'support' / 'quantised.py'}:Quantised"}


def wrap(files, name, base):
    return find_method(files[name])(base, **({"clip": CLIP, "sigma": 0.5} if name == "dp" else {}))


def ended(method, problem=EQUAL, **changes):
    """The last vector and the bytes of every round."""
    with package(problem, method, Plan.from_fields({**PLAN.fields(), **changes})) as run:
        records = list(run)
        return run.x, [(record.bytes_down, record.bytes_up) for record in records]


def test_they_are_short(files):
    for name in files.values():
        assert len(Path(name.rpartition(":")[0]).read_text().splitlines()) < 40


# Handing on


def test_no_hook_or_attribute_is_forgotten():
    """Everything public that `Method` has by now is the base's, but for what a wrapper says for itself."""
    public = {name for name in vars(Method) if not name.startswith("_")}
    assert public >= OWN
    assert OWN.isdisjoint({"init_server", "init_client", "broadcast", "start", "direction", "upload", "sent"})

    own = {
        "source",
        "code",
        "origin",
        "block_safe",
        "bounds_uploads",
        "measures_uploads",
        "hands_on",
        "lasting",
        "released",
        "name",
        "label",
    }
    marked = {name: object() for name in public - own}
    marked["to_dict"] = lambda self: {"name": "marked"}
    marked["something_new"] = object()  # a hook that only the base has
    base = dataclass(frozen=True)(type("Marked", (Method,), marked))()
    wrapper = Wrapper(Wrapper(base))
    for name, value in marked.items():
        if name != "to_dict":
            assert getattr(wrapper, name) is value, name
    assert wrapper.to_dict() == {"name": "wrapper", "base": {"name": "wrapper", "base": {"name": "marked"}}}
    with pytest.raises(AttributeError):
        _ = Wrapper(FedAvg()).something_new


def test_hooks_of_method_are_asked_of_the_base_by_their_own_names():
    hooks = {name for name, value in vars(Method).items() if inspect.isfunction(value) and name[0] != "_"} - {"to_dict"}
    assert {
        "init_server",
        "init_client",
        "broadcast",
        "start",
        "direction",
        "upload",
        "sent",
        "update",
        "check",
    } <= hooks
    for name in hooks:
        assert getattr(Wrapper(FedSpeed()), name).__func__ is getattr(FedSpeed, name)


@pytest.mark.parametrize("base", BASES, ids=lambda base: base.name)
@pytest.mark.parametrize("engine", ["loop", "block"])
def test_a_wrapper_that_writes_nothing_is_its_base_bit_for_bit(base, engine):
    plain, wrapped = (ended(method, engine=engine) for method in (base, Wrapper(Wrapper(base))))
    assert torch.equal(plain[0], wrapped[0])
    assert plain[1] == wrapped[1]


def test_super_is_the_base_and_a_subclass_says_what_it_means():
    @dataclass(frozen=True)
    class Half(Wrapper):
        @property
        def mix(self):
            return 0.5 * super().mix

    assert Half(Half(FedAvg())).mix == 0.25
    assert Half(FedInit(FedSpeed())).lam == FedSpeed().lam
    assert Half(FedSpeed()).running_mean == ("h", "H")  # writes no hook that could end it


def test_a_mean_over_clients_ends_where_the_mean_is_changed():
    noisy = type("Noisy", (Wrapper,), {"received": lambda self, mean, round: mean})
    told = type("Told", (Wrapper,), {"metrics": lambda self, server, mean, round: {}})
    assert [kind(FedSpeed()).running_mean for kind in (noisy, told)] == [None, FedSpeed().running_mean]
    assert FedSpeed().running_mean


def test_a_property_that_fails_is_not_the_bases():
    @dataclass(frozen=True)
    class Misspelt(Wrapper):
        @property
        def mix(self):
            return self.alpa

    with pytest.raises(AttributeError, match="alpa"):
        _ = Misspelt(FedSpeed()).mix


def test_tables_and_back(files):
    table = {"name": files["dp"], "clip": 2.0, "base": {"name": "fedinit", "base": "fedspeed"}}
    method = Config.from_dict({"method": table}).method
    assert isinstance(method.base.base, FedSpeed)
    assert Config.from_dict(Config(method=method).to_dict()).method == method
    assert [field.name for field in fields(method)] == ["base", "clip", "sigma"]


# Privacy and compression


def stream(seed, purpose, *path) -> np.random.Generator:
    """`rng`, written again."""
    name = struct.pack(f"<{1 + len(path)}q", seed, *path) + purpose.encode()
    number = int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "little")
    return np.random.Generator(np.random.Philox(key=number))


def moves(x, t, cohort, problem=EQUAL, plan=PLAN):
    """What FedAvg's clients would send from x in round t, without any wrapper."""
    with package(problem, FedAvg(), plan) as run:
        method, lr = FedAvg(), 0.1 * 0.998**t
        down = method.broadcast(method.init_server(torch.from_numpy(x)))
        return {i: run_client(run.work, Job(i, t, lr), down, method.init_client(None)).up.D.numpy() for i in cohort}


def private(D, t, i):
    noise = stream(PLAN.seed, "dp", t, i).standard_normal(len(D))
    return D * min(1.0, CLIP / np.linalg.norm(D)) + 0.5 * CLIP * noise


def quantised(D, t, i):
    scale = np.abs(D).max() / 4
    return np.floor(D / scale + stream(PLAN.seed, "quantise", t, i, 0).random(len(D))) * scale


@pytest.mark.parametrize("engine", ["loop", "block"])
@pytest.mark.parametrize(("name", "truth"), [("dp", private), ("quantised", quantised)])
def test_a_run_is_what_numpy_says(files, name, truth, engine):
    plan = Plan.from_fields({**PLAN.fields(), "engine": engine})
    with package(EQUAL, wrap(files, name, FedAvg()), plan) as run:
        x = run.x.numpy().copy()
        for t, record in enumerate(run):
            sent = moves(x, t, record.cohort)
            if name == "dp":
                assert any(np.linalg.norm(D) > CLIP for D in sent.values())  # the clipping does something
            x = x + np.mean([truth(D, t, i) for i, D in sent.items()], axis=0)
            np.testing.assert_allclose(run.x.numpy(), x, rtol=1e-9, atol=1e-12)


def test_noise_is_of_its_client_and_round(files):
    method = wrap(files, "dp", FedAvg())
    x = torch.zeros(6, dtype=torch.float64)
    down = FedAvg().broadcast(FedAvg().init_server(x))

    def noise(**facts):
        return method.upload(x, down, method.init_client(x), Local(1, 0.1, 1, **facts))[0].D

    some = [noise(client=i, t=t, seed=s) for i in (0, 1) for t in (0, 1) for s in (0, 1)]
    assert all(not torch.equal(a, b) for n, a in enumerate(some) for b in some[:n])
    assert torch.equal(noise(client=1, t=1), noise(client=1, t=1))
    rows = method.upload(x.expand(2, 6), down, method.init_client(x), Local(1, 0.1, 1, client=(4, 7)))[0].D
    assert torch.equal(rows, torch.stack([noise(client=4), noise(client=7)]))


@pytest.mark.parametrize("base", BASES, ids=lambda base: base.name)
@pytest.mark.parametrize("name", ["dp", "quantised"])
def test_loop_and_block_agree(files, name, base):
    method = wrap(files, name, base)
    loop, block = (ended(method, engine=engine) for engine in ("loop", "block"))
    torch.testing.assert_close(loop[0], block[0], rtol=1e-9, atol=1e-9)
    assert loop[1] == block[1]
    assert not torch.equal(loop[0], ended(base)[0])


FAST = {("dp", "fedspeed", "block")}
PLACES = [
    pytest.param(name, base, engine, marks=() if (name, base.name, engine) in FAST else pytest.mark.slow)
    for name in ("dp", "quantised")
    for base in BASES
    for engine in ("loop", "block")
]


@pytest.mark.parametrize(("name", "base", "engine"), PLACES, ids=str)
def test_worker_processes_give_the_same_bits(files, name, base, engine, quick_workers):
    method = wrap(files, name, base)
    here = ended(method, engine=engine)
    there = ended(method, engine=engine, backend="process", workers=2)
    assert torch.equal(here[0], there[0])
    assert here[1] == there[1]


@pytest.mark.parametrize("base", BASES, ids=lambda base: base.name)
@pytest.mark.parametrize("engine", ["loop", "block"])
def test_bytes_are_what_the_method_says(files, base, engine):
    """4 levels a side are 9 numbers, so 4 bits; 12 parameters are 6 bytes and a scale of 8, per vector that is sent."""
    vectors = 2 if isinstance(base, Scaffold) else 1
    _, told = ended(wrap(files, "quantised", base), engine=engine)
    assert [up for _, up in told] == [4 * vectors * (6 + 8)] * 3
    _, told = ended(wrap(files, "dp", base), engine=engine)
    assert [up for _, up in told] == [4 * vectors * 12 * 8] * 3


def test_bytes_may_depend_on_the_numbers_and_on_who_answers():
    """In a block, too, it is each client's own upload that is asked about, and only those that are counted."""

    @dataclass(frozen=True)
    class Sparse(Wrapper):
        block_safe = True

        def upload(self, xK, down, client, run):
            up, client = super().upload(xK, down, client, run)
            kept = torch.tensor([i + 1 for i in run.clients])[:, None] > torch.arange(up.D.shape[-1])
            return up._replace(D=up.D * kept.view_as(up.D)), client

        def sent(self, up):
            return 12 * int(up.D.count_nonzero())

    for engine in ("loop", "block"):
        plan = Plan.from_fields({**PLAN.fields(), "engine": engine, "dropout": 0.4, "rounds": 6})
        with package(EQUAL, Sparse(FedAvg()), plan) as run:
            records = list(run)
        assert any(record.dropped for record in records)
        for record in records:
            assert record.bytes_up == sum(12 * (i + 1) for i in record.cohort if i not in record.dropped)


def test_dense_bytes_go_into_nested_fields():
    vector = torch.zeros(5, dtype=torch.float32)
    assert FedAvg().sent(Movement(vector)) == 20
    assert dense_bytes(Movement(Movement(vector))) == 20


@pytest.mark.parametrize("name", ["dp", "quantised"])
def test_run_resume_and_verify_from_the_command_line(files, name, tmp_path, capsys):
    words = ["--method", files[name], "--set", "method.base=fedspeed", "--clients", "10", "--active", "3", "--quiet"]
    short = ["--local-epochs", "1", "--split", "iid", "--backend", "serial"]
    assert main(["run", *words, *short, "--rounds", "4", "--out", str(tmp_path / "whole")]) == 0
    assert main(["run", *words, *short, "--rounds", "2", "--out", str(tmp_path / "part")]) == 0
    resume(tmp_path / "part", rounds=4, allow_code=True)
    models = [(tmp_path / run / "model.safetensors").read_bytes() for run in ("whole", "part")]
    assert models[0] == models[1]
    found = verify(tmp_path / "part", every_round=True, allow_code=True)
    assert found.broken == []
    assert any("rounds 1 to 4 run again" in said for said in found.held)
    assert not any("is the mean of all" in said for said in found.held)  # what is sent is not what is kept
    assert capsys.readouterr().err == ""


# One that misbehaves


@pytest.mark.parametrize("base", [3, None, FedAvg, "fedavg"], ids=str)
def test_a_base_that_is_no_method(base):
    with pytest.raises(UserError, match=r"^FedInit: base must be a method such as FedAvg\(\), got"):
        FedInit(base)


@pytest.mark.parametrize(
    ("base", "says"),
    [
        (
            "fedspeed",
            r"whose server adds the mean update, with eta_g = 1 \(one of FedAvg, .*got FedSpeed: FedExP finds",
        ),
        ({"name": "fedavg", "eta_g": 0.5}, "got eta_g = 0.5: FedExP finds the server rate by itself"),
        ({"name": "fedinit", "base": "fedadam"}, "got FedAdam"),
        ({"name": "fedinit", "base": {"name": "fedexp"}}, "base must not be another FedExP"),
        ("fedexp", "base must not be another FedExP"),
    ],
    ids=str,
)
def test_extrapolation_around_a_server_that_takes_no_plain_step(base, says):
    with pytest.raises(UserError, match=f"^FedExP: .*{says}"):
        Config.from_dict({"method": {"name": "fedexp", "base": base}})
    assert (
        Config.from_dict({"method": {"name": "fedexp", "base": {"name": "fedinit", "base": "scaffold"}}}).method.eps
        == 1e-3
    )


@pytest.mark.parametrize("base", [3, ["fedavg"], {"beta": 1}, "fedavgg"], ids=str)
def test_a_base_that_is_no_table(base):
    with pytest.raises(UserError, match="method"):
        Config.from_dict({"method": {"name": "fedinit", "base": base}})


@pytest.mark.parametrize("engine", ["loop", "block"])
@pytest.mark.parametrize("size", ["12", 1.5, True, -1, None, torch.tensor(3)], ids=str)
def test_a_size_that_is_no_number_of_bytes(size, engine):
    @dataclass(frozen=True)
    class Wrong(Wrapper):
        block_safe = True

        def sent(self, up):
            return size

    with pytest.raises(UserError) as told:
        ended(Wrong(FedSpeed()), engine=engine)
    assert re.search(
        r"^Wrong\.sent must return a whole number of bytes >= 0, found .*test_wrappers\.py, line \d+\)$",
        str(told.value),
    )


@pytest.mark.parametrize("engine", ["loop", "block"])
@pytest.mark.parametrize(
    ("do", "says"),
    [(lambda up: up.D.zero_(), r"must not change up\.D in place"), (lambda up: exit(), "must not end the program")],
)
def test_asking_for_the_size_changes_nothing_and_ends_nothing(do, says, engine):
    @dataclass(frozen=True)
    class Bad(Wrapper):
        block_safe = True

        def sent(self, up):
            do(up)
            return 1

    with pytest.raises(UserError, match=rf"Bad\.sent {says}.*test_wrappers.py"):
        ended(Bad(FedAvg()), engine=engine)


@pytest.mark.parametrize("engine", ["loop", "block"])
@pytest.mark.parametrize("hook", ["broadcast", "start", "direction", "upload", "sent", "update"])
def test_a_hook_that_raises_names_wrapper_and_line(hook, engine):
    def fails(self, *given):
        if hook != "upload" or given[-1].t:  # in `upload` not at once: shapes are found by a first call
            raise ValueError(f"no {hook} today")
        return self.base.upload(*given)

    wrong = dataclass(frozen=True)(type("Wrong", (Wrapper,), {hook: fails, "block_safe": True}))
    with pytest.raises(Exception) as told:
        ended(wrong(FedSpeed()), engine=engine)
    line = str(told.value)
    assert line.startswith("Wrong")
    assert re.search(rf"ValueError: no {hook} today \(.*test_wrappers\.py, line \d+, in fails\)", line)
    assert "\n" not in line


def test_an_unsafe_wrapper_is_named_not_its_base():
    @dataclass(frozen=True)
    class Plain(Wrapper):
        def upload(self, xK, down, client, run):
            return super().upload(xK, down, client, run)

    with pytest.raises(UserError, match=r"Plain does not say that its hooks take one.*test_wrappers\.py, line"):
        ended(Plain(FedAvg()), engine="block")
    with package(EQUAL, Plain(FedAvg()), PLAN) as run:
        assert run.plan.engine == "loop"


def test_noise_that_is_not_its_clients_is_refused_in_a_block():
    @dataclass(frozen=True)
    class Shared(Wrapper):
        block_safe = True

        def upload(self, xK, down, client, run):
            up, client = super().upload(xK, down, client, run)
            return up._replace(D=up.D + stream(run.seed, "x", run.t, run.clients[0]).random()), client

    with pytest.raises(
        UserError, match=r"Shared\.upload does on a block .* for i in run\.clients, .*test_wrappers\.py"
    ):
        ended(Shared(FedAvg()), engine="block")


def test_a_hook_missing_inside_is_named():
    @dataclass(frozen=True)
    class Hollow(Method):
        pass

    with pytest.raises(UserError, match="Hollow has no hook `init_server`"):
        ended(Wrapper(Hollow()))


def test_old_style_wrappers_and_facts_still_work():
    """A method around a method as it was written before there was a base class for it."""

    @dataclass(frozen=True)
    class Old(Method):
        base: Method = FedSpeed()  # noqa: RUF009

        @property
        def shrink(self):
            return self.base.shrink

        def init_server(self, x0):
            return self.base.init_server(x0)

        def init_client(self, x0):
            return self.base.init_client(x0)

        def broadcast(self, server):
            return self.base.broadcast(server)

        def direction(self, x, grad, down, client):
            return self.base.direction(x, grad, down, client)

        def upload(self, xK, down, client, run):
            return self.base.upload(xK, down, client, Local(run.K, run.lr, run.n))

        def update(self, server, mean, round):
            return self.base.update(server, mean, round)

    old, new = ended(Old()), ended(FedSpeed(), engine="loop")
    assert torch.equal(old[0], new[0])
    assert old[1] == new[1]
