"""What methods, settings and data sets say of themselves is complete and true."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import pytest
import torch
from federations import Softmax, package

from fedspeed import (
    METHODS,
    Config,
    FedAvg,
    FedExP,
    FedInit,
    FedSpeed,
    Method,
    Plan,
    Scaffold,
    UserError,
    Wrapper,
    load_data,
)
from fedspeed.cli import options
from fedspeed.client.trees import named, tree_leaves
from fedspeed.config.plan import PLACEMENT
from fedspeed.config.presets import paper_decay
from fedspeed.data import CARDS
from fedspeed.methods import FedADMM, FedDyn, FedPD, FedSMOO
from fedspeed.methods.base import Local, Round
from fedspeed.runs.config_file import as_stored

PLAN = Plan(rounds=4, active=3, local_steps=2, batch_size=4, lr=0.1, engine="loop", backend="serial")


def variants(cls: type[Method]) -> list[Method]:
    """A method with its defaults, and with every other choice of each of its words and switches."""
    found = [cls()]
    for field in fields(cls):
        allowed = field.metadata["allowed"]
        choices = (True, False) if isinstance(field.default, bool) else allowed if isinstance(allowed, tuple) else ()
        for value in choices:
            try:
                found.append(cls(**{field.name: value}))
            except UserError:  # not by itself
                continue
    return found


EVERY = list(dict.fromkeys(method for cls in METHODS.values() for method in variants(cls)))
WRAPPED = [wrap(method) for method in EVERY if method.running_mean for wrap in (FedInit, Wrapper)] + [
    FedExP(Scaffold())
]


def trained(method: Method):
    plan = Plan.from_fields({**PLAN.fields(), "active": 7 if isinstance(method, FedPD) else 3})
    run = package(Softmax(), method, plan)
    list(run)
    return run


def means(method: Method) -> set[tuple[str, str]]:
    """Which fields of the server are, after some rounds, the mean over all clients of which of their fields."""
    run = trained(method)
    clients = [dict(named("", run.client_state(i))) for i in range(7)]
    server = dict(named("", run.server))
    found = set()
    for field in clients[0]:
        mean = torch.stack([client[field] for client in clients]).mean(0)
        for name, value in server.items():
            if mean.norm() > 1e-6 and mean.shape == value.shape and (mean - value).abs().max() < 1e-12:
                found.add((field, name))
    return found


def reads_gradient(method: Method) -> bool:
    """Whether what is sent or kept depends on K and lr as facts, the vectors being the same."""
    run = trained(method)
    client, down = run.client_state(0), run.work.hooks.broadcast(run.server)
    ends = []
    for K, lr in ((2, 0.1), (3, 0.05)):
        up, kept = method.upload(run.x + 1.0, down, client, Local(K, lr, 5))
        server = method.update(run.server, up, Round(4, 3.0, 7.0, float(K), lr))
        ends.append([*tree_leaves(up), *tree_leaves(kept), *tree_leaves(server)])
    return not all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("method", [*EVERY, *WRAPPED], ids=str)
def test_a_mean_over_all_clients_is_declared_and_nothing_else_is(method):
    assert means(method) == ({method.running_mean} if method.running_mean else set())


@pytest.mark.parametrize("method", EVERY, ids=str)
def test_who_reads_a_gradient_from_d_says_so(method):
    assert reads_gradient(method) == bool(method.reads_gradient_from_D)


def test_a_forgotten_declaration_is_found():
    """The two tests above can fail."""

    @dataclass(frozen=True)
    class Forgetful(Scaffold):
        running_mean = None
        reads_gradient_from_D = ""

    assert means(Forgetful()) == {("c", "c")}
    assert reads_gradient(Forgetful())
    assert len(WRAPPED) >= 12


@pytest.mark.parametrize("declared", [("h", "H"), ("c", "nothing"), ("c",), "cc", 3], ids=str)
def test_a_mean_of_fields_that_are_not_there_is_refused_before_round_1(declared):
    @dataclass(frozen=True)
    class Wrong(Scaffold):
        running_mean = declared

    with pytest.raises(UserError, match=r"^Wrong\.running_mean must be None or a pair .*test_descriptions\.py, line"):
        package(Softmax(), Wrong(), PLAN)


@pytest.mark.parametrize("cls", METHODS.values(), ids=lambda cls: cls.__name__)
def test_what_the_authors_code_does_is_a_setting(cls):
    method = cls(**cls.released)
    if cls.released:
        assert Config.from_dict({"preset": "released", "method": cls.__name__.lower()}).method == method


def test_a_users_class_may_say_what_its_authors_released(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "from dataclasses import dataclass\nfrom fedspeed import FedProx\n\n\n@dataclass(frozen=True)\n"
        "class Mine(FedProx):\n    released = {'mu': 0.7}\n"
    )
    for table, mu in (({"name": f"{path}:Mine"}, 0.7), ({"name": f"{path}:Mine", "mu": 0.3}, 0.3)):
        assert Config.from_dict({"preset": "released", "method": table}).method.mu == mu
        assert Config.from_dict({"method": f"{path}:Mine"}).method.mu == 0.1


# The paper's learning-rate decays

SLOWER = {
    "feddyn",
    "fedadmm",
    "fedspeed",
    "fedpd",
    "fedsmoo",
    "afedpd",
    "afedpdsam",
    "fedgloss",
    "fedtoga",
    "fedlesamd",
}


@pytest.mark.parametrize("name", METHODS)
def test_the_papers_decay(name):
    assert paper_decay(METHODS[name]()) == (0.9995 if name in SLOWER else 0.998)
    assert not hasattr(METHODS[name](), "lr_decay")


@pytest.mark.parametrize("cls", METHODS.values(), ids=lambda cls: cls.__name__)
def test_a_method_with_a_prox_term_and_a_dual_states_the_slower_decay(cls):
    """A new one that forgets to state it is found; the others inherit the usual decay knowingly."""
    x0, inherited = torch.zeros(3), Method.paper_decay
    with_dual = cls().shrink > 0 and len(cls().init_client(x0)) > 0
    assert inherited == 0.998
    assert cls.paper_decay == (0.9995 if with_dual else inherited)


@dataclass(frozen=True)
class Attribute(FedAvg):
    lr_decay = 0.9


@dataclass(frozen=True)
class Property(FedAvg):
    @property
    def lr_decay(self):
        return 0.8


@dataclass(frozen=True)
class Asks(FedAvg):
    """A wrapper from when a method had to hand everything on by itself."""

    base: Method = FedSpeed()  # noqa: RUF009

    @property
    def lr_decay(self):
        return self.base.lr_decay


@dataclass(frozen=True)
class AsksNot(FedAvg):
    base: Method = FedSpeed()  # noqa: RUF009


@dataclass(frozen=True)
class Heir(FedDyn):
    pass


@pytest.mark.parametrize(
    ("method", "decay"),
    [
        (Attribute(), 0.9),
        (Property(), 0.8),
        (Asks(), 0.9995),
        (Asks(base=FedAvg()), 0.998),
        (Asks(base=Attribute()), 0.9),
        (AsksNot(), 0.998),
        (Heir(), 0.9995),
        (FedInit(Heir()), 0.9995),
        (FedInit(Property()), 0.8),
        (Wrapper(FedInit(FedSMOO())), 0.9995),
        (Wrapper(FedADMM(variant="active")), 0.9995),
    ],
    ids=str,
)
def test_a_users_class_keeps_its_decay(method, decay):
    assert paper_decay(method) == decay
    with package(Softmax(), method, Plan.from_fields({**PLAN.fields(), "lr_decay": 0.0, "rounds": 2})) as run:
        assert [record.lr for record in run] == [0.1, 0.1 * decay]
    assert as_stored(Config(method=FedInit(FedDyn()), lr_decay=0.0))["lr_decay"] == 0.9995


# Settings and data sets


def test_every_setting_is_an_option_of_one_group():
    named = [name for names in options.GROUPS.values() for name in names]
    assert sorted(named) == sorted([*(set(Config().fields()) - {"method", "until"}), "preset"])
    assert all(options.GROUPS)


def test_where_a_run_is_computed():
    ray = {"ray_address", "ray_cpus", "ray_gpus", "allow_mixed"}
    assert set(PLACEMENT) == {
        "device",
        "backend",
        "workers",
        "states",
        "checkpoint_every",
        "keep_every",
        "max_time",
        *ray,
    }


@pytest.mark.parametrize(("name", "given"), [("digits", {}), ("synthetic", {"split": "natural", "clients": 5})])
def test_a_card_is_true(name, given):
    data, card = load_data(name, **given), CARDS[name]
    assert " x ".join(map(str, data.shape)) == card.shape
    assert str(data.classes) == card.classes
    assert card.here
    if name == "digits":
        assert f"{int(np.sum(data.sizes)):,} + {len(data.y_test)}" == card.size
