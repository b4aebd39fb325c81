"""The report page in a real browser (Debian's chromium, driven by Playwright)."""

from __future__ import annotations

import csv
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from browsing import Opened
from made_runs import made_run

from fedspeed.cli import main
from fedspeed.report.live import Server
from fedspeed.runs.directory import RunDir, exclusive
from fedspeed.server.client_metrics import ClientMetrics

pytestmark = pytest.mark.slow
HOSTILE = {"environment": {"torch": "</script><img src=x onerror=alert(1)>"}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("home") / "runs"
    for seed in range(3):
        made_run(folder / f"a-s{seed}", "fedavg", seed, 40)
        made_run(folder / f"b-s{seed}", "fedspeed", seed, 40, gain=0.05, summary=HOSTILE)
        made_run(folder / f"c-s{seed}", "scaffold", seed, 40, gain=0.02, record=lambda f: {**f, "bytes_up": 8000})
    made_run(folder / "d-s0", "fedprox", 0, 25, status="diverged: NaN at round 26", config={"rounds": 40})
    assert main(["report", str(folder), "-o", str(folder / "report.html"), "--quiet"]) == 0
    return folder


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_opens_in_every_size_and_colour(browser, runs, width, scheme):
    opened = Opened(browser, runs / "report.html", width, scheme)
    page = opened.page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    for name in ("verdict", "forest", "curves", "motion", "split", "config", "methods", "provenance"):
        assert page.locator(f"#{name}").is_visible()
    assert page.locator("#fairness").is_hidden()
    for details in page.locator("details").all():
        details.evaluate("one => { one.open = true }")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert opened.wrong == []


def test_the_numbers_are_those_of_the_summaries(browser, runs):
    page = Opened(browser, runs / "report.html").page
    titles = page.locator("#verdict-table thead th").all_text_contents()
    for name, letter in (("FedAvg", "a"), ("FedSpeed", "b"), ("SCAFFOLD", "c")):
        line = page.locator("#verdict-table tbody tr").filter(has_text=name)
        cells = [line.locator("th").inner_text(), *line.locator("td").all_text_contents()]
        shown = dict(zip(titles, cells, strict=True))["last-5 mean %"]
        told = [100 * RunDir(runs / f"{letter}-s{seed}").raw_summary()["mean_last5_accuracy"] for seed in range(3)]
        assert float(shown.split(" ± ")[0]) == pytest.approx(sum(told) / 3, abs=0.005)


def test_the_controls_change_what_is_drawn(browser, runs):
    opened = Opened(browser, runs / "report.html")
    page, seen = opened.page, [opened.drawn()]

    def changed() -> None:
        now = opened.drawn()
        assert now != seen[-1]
        seen.append(now)

    for axis in ("bytes", "grads", "seconds"):
        page.locator(f'input[name="axis"][value="{axis}"]').check(force=True)
        changed()
    page.locator('input[name="axis"][value="round"]').check(force=True)
    assert opened.drawn() == seen[0]
    seen.append(seen[0])
    for control in ("#seeds", "#settled"):
        page.locator(control).click()
        changed()
    page.locator("#smooth").fill("10")
    changed()
    button = page.locator("#legend button").filter(has_text="FedSpeed")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    changed()
    button.click()
    assert opened.drawn() == seen[-2]
    before = opened.drawn("test_loss")
    page.locator("#log").click()
    assert opened.drawn("test_loss") != before
    page.locator("#theme").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    changed()
    assert opened.wrong == []


def test_the_curves_are_means_of_the_rounds(browser, runs):
    page = Opened(browser, runs / "report.html").page
    records = [RunDir(runs / f"c-s{seed}").records() for seed in range(3)]
    drawn = page.evaluate("series(report.data, PANELS[0])")
    bold = [line["values"] for line in drawn["lines"] if line["bold"] and line["row"] == 2]  # fedavg, fedprox, scaffold
    assert drawn["xs"] == list(range(1, 41))
    assert bold[0] == pytest.approx([100 * fmean(r.test_accuracy for r in each) for each in zip(*records, strict=True)])
    drawn = page.evaluate("(view.axis = 'bytes', series(report.data, PANELS[0]))")
    sent = [0.012 * t for t in range(1, 41)]  # MB at the end of every round
    for x, found in list(zip(drawn["xs"], drawn["lines"][-2]["values"], strict=True))[::37]:
        own = [np.interp(x, sent, [100 * r.test_accuracy for r in one]) for one in records]
        assert found is None if x < sent[0] or x > sent[-1] else found == pytest.approx(fmean(own))


def test_simulated_seconds_are_an_axis_where_runs_have_them(browser, tmp_path):
    made_run(tmp_path / "a", record=lambda f: {**f, "metrics": {"virtual_seconds": 3.0 * f["round"]}})
    assert main(["report", str(tmp_path / "a"), "-o", str(tmp_path / "r.html"), "--quiet"]) == 0
    opened = Opened(browser, tmp_path / "r.html")
    before = opened.drawn()
    opened.page.locator('input[name="axis"][value="virtual"]').check(force=True)
    assert opened.drawn() != before
    found = opened.page.evaluate("along(report.data, report.data.rows[0].runs[0], 'virtual')")
    assert found == [3.0 * t for t in range(1, 11)]
    assert opened.wrong == []


def test_panels_zoom_and_hover_together_also_by_keyboard(browser, runs):
    opened = Opened(browser, runs / "report.html")
    page, before = opened.page, (opened.drawn(), opened.drawn("drift"))
    plot = page.locator('[data-panel="test_accuracy"] .plot')
    plot.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.wait_for_timeout(100)
    for panel in ("test_accuracy", "drift"):
        assert "round 2" in page.locator(f'[data-panel="{panel}"] .readout').inner_text()
    page.keyboard.press("+")
    after = (opened.drawn(), opened.drawn("drift"))
    assert after[0] != before[0]
    assert after[1] != before[1]
    page.keyboard.press("0")
    assert (opened.drawn(), opened.drawn("drift")) == before
    assert opened.wrong == []


def test_another_baseline_and_the_split(browser, runs):
    page = Opened(browser, runs / "report.html").page
    first = page.locator("#forest-plot").inner_text()
    page.locator("#baseline").select_option("FedSpeed")
    assert page.locator("#forest-plot").inner_text() != first
    assert page.locator("#forest-plot .name").all_text_contents() == ["FedAvg", "FedProx", "SCAFFOLD"]
    cells = page.locator("#split-plot rect.cell title").all_text_contents()
    page.locator("#which-split").select_option(index=1)
    assert page.locator("#split-plot rect.cell title").all_text_contents() != cells


def test_the_csv_has_every_number(browser, runs, tmp_path):
    page = Opened(browser, runs / "report.html").page
    with page.expect_download() as download:
        page.locator("#csv").click()
    download.value.save_as(tmp_path / "rounds.csv")
    lines = list(csv.DictReader((tmp_path / "rounds.csv").read_text().splitlines()))
    assert len(lines) == 9 * 40 + 25
    own = [line for line in lines if line["folder"] == "c-s1"]
    records = RunDir(runs / "c-s1").records()
    for name in ("test_accuracy", "test_loss", "train_loss", "drift", "lr", "bytes_up"):
        assert [float(line[name]) for line in own] == [getattr(record, name) for record in records]


def test_many_runs_open(browser, tmp_path, monkeypatch):
    """Two hundred runs; their data are packed."""
    for i in range(200):
        made_run(tmp_path / f"runs/{i}", "fedavg", i % 4, 100, 0.001 * i, config={"lr": 0.01 * (1 + i // 4)})
    assert main(["report", str(tmp_path / "runs"), "-o", str(tmp_path / "r.html"), "--quiet"]) == 0
    assert "data-packed" in (tmp_path / "r.html").read_text()
    opened = Opened(browser, tmp_path / "r.html", 390)
    assert opened.page.locator("#legend button").count() == 50
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert opened.wrong == []


# --- runs that go on ---


@pytest.fixture
def going(tmp_path) -> Iterator[tuple[RunDir, str]]:
    """A run with 20 of its 40 rounds beside one that is over, and where they are watched."""
    made_run(tmp_path / "runs/a", "fedavg", 0, 40)
    run = made_run(tmp_path / "runs/b", "fedspeed", 0, 20, config={"rounds": 40})
    run.summary_file.unlink()
    command = [sys.executable, "-m", "fedspeed", "watch", str(tmp_path / "runs")]
    with exclusive(run.path), subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        url = re.search(r"http://127\.0\.0\.1:\d+/", server.stdout.readline())[0]
        try:
            yield run, url
        finally:
            server.send_signal(signal.SIGINT)
            assert server.wait(20) == 0


def add_round(run: RunDir) -> None:
    lines = run.rounds_file.read_text().splitlines()
    new = {**json.loads(lines[-1]), "round": len(lines) + 1, "test_accuracy": 0.5 + 0.01 * len(lines)}
    with run.rounds_file.open("a") as file:
        file.write(json.dumps(new) + "\n")


def test_a_new_round_shows_without_reloading_and_all_stays_as_chosen(browser, going):
    run, url = going
    opened = Opened(browser, url)
    page = opened.page
    page.evaluate("window.same = true")
    rounds = page.locator("#live-table tr").filter(has_text="running")
    assert "20 of 40" in rounds.inner_text()
    page.locator("#legend button").filter(has_text="fedavg").click()
    page.locator('input[name="axis"][value="grads"]').check(force=True)
    page.locator("#config details").first.evaluate("one => { one.open = true }")
    plot = page.locator('[data-panel="test_accuracy"] .plot')
    plot.focus()
    page.keyboard.press("+")
    zoom = page.evaluate("zoomed()")
    assert zoom is not None
    page.evaluate("scrollTo(0, 900)")
    place = page.evaluate("scrollY")
    before = opened.drawn()
    add_round(run)
    opened.until("report.data.rows[1].runs[0].rounds === 21")
    assert "21 of 40" in rounds.inner_text()
    assert opened.drawn() != before
    assert page.evaluate("column(report.data, report.data.rows[1].runs[0], 'test_accuracy').at(-1)") == 0.7
    assert page.locator("#config details").first.get_attribute("open") is not None
    assert page.evaluate("zoomed()") == zoom
    assert page.evaluate("scrollY") == place
    assert page.evaluate("document.activeElement.className") == "plot"
    assert page.evaluate("view.axis") == "grads"
    assert page.evaluate("[...view.hidden].map((i) => report.data.rows[i].label)") == ["fedavg"]
    made_run(run.path.parent / "c", "fedprox", 0, 40)  # stands between the two; fedavg stays hidden, all else stays
    opened.until("report.data.rows.length === 3")
    hidden = page.locator('#legend button[aria-pressed="false"]').all_text_contents()
    assert hidden == ["fedavg"]
    assert page.evaluate("zoomed()") == zoom
    page.locator("#reset").click()
    page.locator('input[name="axis"][value="round"]').check(force=True)
    made_run(run.path, "fedspeed", 0, 40, gain=0.05)
    opened.until("report.data.rows.every((row) => row.runs[0].done)")
    assert page.locator("#live .lead").inner_text() == "3 finished."
    assert page.locator("#verdict-table tbody tr").count() == 3
    assert page.evaluate("window.same")
    assert opened.wrong == []


def test_an_empty_folder_fills_on_the_page(browser, tmp_path):
    (tmp_path / "runs").mkdir()
    with Server(tmp_path / "runs", 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        opened = Opened(browser, server.url, 390)
        page = opened.page
        assert page.locator("#verdict").is_hidden()
        made_run(tmp_path / "runs/a")
        page.wait_for_selector("#live-table")
        assert page.locator("#curves").is_visible()
        assert page.locator("h1").inner_text() == "digits, iid, 4 of 12 clients"
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        assert opened.wrong == []
        server.shutdown()
        thread.join()
    page.wait_for_selector("#trouble:not([hidden])")
    assert "does not answer" in page.locator("#trouble").inner_text()
    assert page.locator("#curves").is_visible()


def test_fairness_is_of_the_runs_that_are_over(browser, tmp_path):
    for name, rounds, worst in (("a", 10, 0.5), ("b", 4, 0.1)):
        run = made_run(tmp_path / "runs" / name, seed=rounds, rounds=rounds, config={"rounds": 10})
        scores = np.linspace(worst, 1, 20)[None]
        run.add_client_metrics(ClientMetrics(np.array([rounds]), np.full(20, 9), 1 - scores, scores))
    run.summary_file.unlink()
    for given, note, mean in (("runs", "after round 10.", "75.00"), ("runs/b", "after round 4.", "55.00")):
        assert main(["report", str(tmp_path / given), "-o", str(tmp_path / "r.html"), "--quiet"]) == 0
        page = Opened(browser, tmp_path / "r.html").page
        assert note in page.locator("#fairness-note").inner_text()
        assert "of the server model on their training data, " in page.locator("#fairness-note").inner_text()
        assert page.locator("#fairness-table td").first.inner_text() == mean


def test_fairness_on_test_data_of_three_models(browser, tmp_path):
    """Of 21 clients, the worst and the best tenth are 2; one has no test part."""
    run, scores = made_run(tmp_path / "run"), np.r_[np.linspace(0, 1, 21), np.nan][None]
    found = ClientMetrics(np.array([40]), np.full(22, 9), 1 - scores, scores, on="test")
    own = np.where(np.arange(22) < 3, 0.25, np.nan)[None]
    more = {"own_loss": own, "own_accuracy": own, "personalised_loss": own, "personalised_accuracy": scores / 2}
    run.add_client_metrics(found._replace(**more))
    assert main(["report", str(run.path), "-o", str(tmp_path / "r.html"), "--quiet"]) == 0
    opened = Opened(browser, tmp_path / "r.html")
    page = opened.page
    assert (
        "accuracy of the server model on their own test data, after round 40."
        in page.locator("#fairness-note").inner_text()
    )
    rows = [[*row.inner_text().split("\t")] for row in page.locator("#fairness-table tr").all()]
    sd = 100 * np.linspace(0, 1, 21).std()
    assert [row[1:] for row in rows[1:]] == [
        ["50.00", "2.50", "50.00", "97.50", f"{sd:.2f}"],
        ["25.00", "25.00", "25.00", "25.00", "0.00"],
        ["25.00", "1.25", "25.00", "48.75", f"{sd / 2:.2f}"],
    ]
    assert [row[0].partition(", ")[2] for row in rows[1:]] == [
        "",
        "own models of the clients of that round",
        "personalised by local steps",
    ]
    assert opened.wrong == []
