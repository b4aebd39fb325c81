"""The playground's loop computes what the package does, and its page runs the package's own method files."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from browsing import Opened

from fedspeed import Federated, Plan, UserError, simulate
from fedspeed.methods import METHODS
from fedspeed.utils.random import cohort

PLAYGROUND = Path(__file__).parents[2] / "docs" / "playground"


def _module(name: str):
    spec = importlib.util.spec_from_file_location(f"playground_{name}", PLAYGROUND / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


build, federation = _module("build"), _module("federation")
NAMES = [name for name in METHODS if name != "fedgmt"]  # which needs class probabilities
CLIENTS, ROUNDS, K, LR = 5, 8, 6, 0.2
X0 = [2.0, -1.0]


def quadratics() -> list:
    r = np.random.default_rng(0)
    made = []
    for _ in range(CLIENTS):
        angle, (big, small) = r.uniform(0, np.pi), r.uniform([0.6, 0.1], [1.0, 0.4])
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        H = turn @ np.diag([big, small]) @ turn.T
        made.append(federation.Quadratic(tuple(r.normal(size=2) * 2), H[0, 0], H[0, 1], H[1, 1]))
    return made


def simulation(method, clients, active: int):
    """The package's run: two samples a client, the rows of the root of its Hessian."""
    roots = [np.linalg.cholesky([[q.a, q.b], [q.b, q.c]]).T for q in clients]
    targets = [A @ q.optimum for A, q in zip(roots, clients, strict=True)]
    data = Federated.from_arrays(
        np.concatenate(roots), np.concatenate(targets)[:, None], np.arange(2 * CLIENTS).reshape(-1, 2)
    )
    model = torch.nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([X0]))
    plan = Plan(rounds=ROUNDS, active=active, local_steps=K, lr=LR, lr_decay=1.0, weight_decay=0.0)
    return simulate(method, model, data, plan, loss=torch.nn.functional.mse_loss, backend="serial")


@pytest.mark.parametrize("active", [CLIENTS, 2])
@pytest.mark.parametrize("name", NAMES)
def test_the_loop_computes_what_the_package_does(name, active):
    clients = quadratics()
    method = METHODS[name]()
    if (name, active) == ("fedpd", 2):
        for asked in (federation.warned, lambda *_: simulation(method, clients, active)):
            with pytest.raises(UserError, match="FedPD"):
                asked(method, LR, active, CLIENTS)
        return
    federation.warned(method, LR, active, CLIENTS)
    ours = federation.Federation(method, clients, X0, K, LR)
    run = simulation(method, clients, active)
    for t, record in enumerate(run):
        chosen = [int(i) for i in cohort(0, t, CLIENTS, active, "fixed")]
        assert record.cohort == chosen
        ours.round(chosen)
        np.testing.assert_allclose(ours.x, run.x.numpy(), rtol=0, atol=1e-10)
    for i, kept in ours.states.items():
        for name, vector in kept._asdict().items():
            np.testing.assert_allclose(vector.a, getattr(run.client_state(i), name).numpy(), rtol=0, atol=1e-10)
    assert np.linalg.norm(np.subtract(ours.x, X0)) > 0.1


def test_the_page_embeds_the_very_files():
    root = PLAYGROUND.parents[1] / "fedspeed"
    written = (PLAYGROUND / "sources.js").read_text("utf-8")
    assert written == build.sources(), "run python docs/playground/build.py"
    body = written[written.index("{") : written.index("\n});\n") + 2]
    embedded = {name: entry[1] for name, entry in json.loads(body).items()}
    assert {method["name"] for method in build.described()} == {*NAMES}
    methods = {METHODS[name].__module__ for name in NAMES}
    for module in ("fedspeed.methods.base", "fedspeed.utils.checked_fields", "fedspeed.errors", *methods):
        assert embedded[module] == (root.parent / f"{module.replace('.', '/')}.py").read_text("utf-8")


def test_cohorts_are_drawn_fairly():
    counts = np.zeros(6)
    for t in range(3000):
        drawn = federation.cohort(0, t, 6, 2)
        assert len({*drawn}) == 2
        counts[drawn] += 1
    assert np.abs(counts / 1000 - 1).max() < 0.1


def test_where_the_optimum_is():
    clients = quadratics()
    H = np.array([[[q.a, q.b], [q.b, q.c]] for q in clients])
    v = np.einsum("ijk,ik->j", H, [q.optimum for q in clients])
    np.testing.assert_allclose(federation.optimum(clients), np.linalg.solve(H.sum(0), v), atol=1e-12)


@pytest.fixture(scope="module")
def opened(browser):
    return Opened(browser, PLAYGROUND / "playground.html")


def shown(page) -> list[float]:
    return json.loads(page.locator("#server").get_attribute("data-x"))


def choose(page, method: str) -> None:
    page.locator("#method").select_option(method)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_opens_from_disk_in_every_size_and_colour(browser, width, scheme):
    opened = Opened(browser, PLAYGROUND / "playground.html", width, scheme)
    page = opened.page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for _ in range(3):
        page.locator("#step").click()
    assert page.locator("#round").inner_text() == "3"
    assert page.locator("#plane .path").count() == 4
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert opened.wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("active", [4, 2])
def test_the_page_shows_the_numbers_of_the_package(opened, active):
    page = opened.page
    page.locator("#reset").click()
    page.locator("#set-active").fill(str(active))
    for name in NAMES:
        choose(page, name)
        if (name, active) == ("fedpd", 2):
            assert "FedPD" in page.locator("#message").inner_text()
            continue
        asked = page.evaluate("({clients: state.clients, fields: state.fields, x0: state.x0, ...state.values})")
        clients = [federation.Quadratic(tuple(c["optimum"]), c["a"], c["b"], c["c"]) for c in asked["clients"]]
        ours = federation.Federation(METHODS[name](**asked["fields"]), clients, asked["x0"], asked["K"], asked["lr"])
        for t in range(5):
            ours.round(federation.cohort(0, t, len(clients), active))
            page.evaluate("advance()")
        np.testing.assert_allclose(shown(page), ours.x, rtol=0, atol=1e-10)
        u, v = (float(part) for part in page.locator("#server").inner_text().split(", "))
        np.testing.assert_allclose((u, v), ours.x, atol=6e-5)
    page.locator("#set-active").fill("4")
    assert opened.wrong == []


@pytest.mark.slow
def test_optima_are_moved_by_mouse_and_keys(opened):
    page = opened.page
    page.locator("#reset").click()
    choose(page, "fedavg")
    best = page.evaluate("state.best")
    handle = page.locator(".handle").nth(2)
    box, plane = handle.bounding_box(), page.locator("#plane").bounding_box()
    at = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.move(*at)
    page.mouse.down()
    page.mouse.move(at[0] - 60, at[1] + 40, steps=4)
    page.mouse.up()
    scale = 9.2 / plane["width"]
    np.testing.assert_allclose(page.evaluate("state.homes[1]"), (2.2 - 60 * scale, 2.7 - 40 * scale), atol=0.03)
    moved = page.evaluate("state.best")
    assert np.linalg.norm(np.subtract(moved, best)) > 0.02
    before = page.evaluate("[...state.homes[1]]")
    handle.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Shift+ArrowUp")
    np.testing.assert_allclose(page.evaluate("state.homes[1]"), np.add(before, (0.1, 0.5)), atol=0.011)
    assert handle.get_attribute("aria-label").startswith("optimum of client 2 at ")
    assert opened.wrong == []


@pytest.mark.slow
def test_optima_are_moved_by_a_finger(browser):
    opened = Opened(browser, PLAYGROUND / "playground.html", 390)
    page = opened.page
    finger = page.context.new_cdp_session(page)
    box = page.locator(".handle").nth(1).bounding_box()
    u, v = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    finger.send("Emulation.setTouchEmulationEnabled", {"enabled": True})
    finger.send("Input.dispatchTouchEvent", {"type": "touchStart", "touchPoints": [{"x": u, "y": v}]})
    for k in range(1, 6):
        finger.send("Input.dispatchTouchEvent", {"type": "touchMove", "touchPoints": [{"x": u + k, "y": v + 12 * k}]})
    finger.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    assert page.evaluate("state.homes[0][1]") < 0.6  # from 1.6, down: the page did not scroll instead
    assert page.evaluate("window.scrollY") == 0
    assert opened.wrong == []


@pytest.mark.slow
def test_play_goes_on_and_what_is_refused_is_said(opened):
    page = opened.page
    page.locator("#reset").click()
    choose(page, "scaffold")
    page.locator("#play").click()
    opened.until("state.far.length > 5")
    page.locator("#play").click()
    assert page.locator("#play").inner_text() == "Play"
    done = page.evaluate("state.far.length")
    choose(page, "fedspeed")
    assert page.locator("#curve .before").count() == 1
    assert "dashed: Scaffold" in page.locator("#curve").text_content()
    assert page.evaluate("state.before.far.length") == done
    page.locator("#set-lam").fill("-1")  # lam 0.1: lr 0.2 is 2 / (1/lam), where the prox iteration diverges
    assert page.locator("#message").inner_text().startswith("FedSpeed: lr must be < 2 / (1/lam)")
    page.locator("#step").click()
    assert page.locator("#round").inner_text() == "0"
    assert opened.wrong == []


@pytest.mark.slow
def test_what_the_text_proposes_to_try_is_so(opened):
    page, duals = opened.page, {}

    def ends(method: str, rounds: int, **fields: object) -> np.ndarray:
        """The last ten distances."""
        choose(page, method)
        page.evaluate("fields => { Object.assign(state.fields, fields); restart(); }", fields)
        quietly = "rounds => Array.from({length: rounds}, () => JSON.parse(window.python.step()))"
        told = page.evaluate(quietly, rounds)
        duals.update(told[-1]["duals"])
        return np.array([happened["distance"] for happened in told[-10:]])

    page.locator("#reset").click()
    far = []
    for K in (1, 10, 30):
        page.locator("#set-K").fill(str(K))
        far.append(ends("fedavg", 80 // K + 20)[-1])
    assert far == sorted(far)
    assert far[1] > 0.2
    page.locator("#set-K").fill("10")
    page.locator("#own").uncheck()
    assert ends("fedavg", 40)[-1] < 1e-6
    page.locator("#own").check()
    for name in ("fedspeed", "feddyn", "scaffold"):
        assert ends(name, 60)[-1] < 1e-5
        np.testing.assert_allclose([duals[str(i)] for i in range(4)], page.evaluate("state.pulls"), atol=1e-4)
    perturbed = ends("fedspeed", 60, rho=0.3)
    assert perturbed.min() > 0.01
    assert np.ptp(perturbed) < 0.01 * perturbed.min()  # at rest
    page.locator("#set-active").fill("2")
    assert ends("fedspeed", 80, server="active").min() > 0.02
    assert ends("fedspeed", 80, server="all").max() < 0.01
    page.locator("#set-active").fill("4")
    assert opened.wrong == []
