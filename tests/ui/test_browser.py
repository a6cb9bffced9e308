"""The page in a real browser, over a run that goes on while it is watched."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.records import FakeRun, write_run
from tests.support.script_records import BALANCED, FakeScript, write_script
from tests.support.serving import browser, served

LIMIT_SECONDS = 90


@pytest.mark.browser
@pytest.mark.timeout(300)
def test_a_run_shows_up_grows_and_its_report_opens(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    write_run(root, FakeRun(name="before"))
    command = [sys.executable, "-m", "paceline", "train", "--quiet", "--threads", "1"]
    command += ["--model", "softmax", "--iterations", "1000000", "--train-samples", "640"]
    command += ["--test-samples", "64", "--eval-every", "200", "--out", str(root), "--name", "live"]
    with served(root) as address, browser(tmp_path / "profile") as page:
        page.get(f"{address}/")
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait(page, lambda: "running" in row(page, "live"))
            page.find_element("link text", "live").click()
            wait(page, lambda: points(page, "loss") > 2)
            before = points(page, "loss")
            wait(page, lambda: points(page, "loss") > before)
            wait(page, lambda: page.find_element("id", "legend").text != "")
            assert "running" in page.find_element("id", "status").text
            whose = "training, without startup; shares of worker 0"
            assert page.find_element("id", "whose").text == whose
        finally:
            run.terminate()
            run.wait(60)
        wait(page, lambda: page.find_element("id", "status").text == "stopped")
        page.get(f"{address}/")
        wait(page, lambda: "stopped" in row(page, "live"))
        for name in ("before", "live"):
            page.find_element("css selector", f"tr[data-name='{name}'] input").click()
        page.find_element("id", "compare").click()
        wait(page, lambda: "before" in page.find_element("tag name", "main").text)
        page.back()
        wait(page, lambda: page.find_element("id", "compare").text == "Compare 2")
        page.get(f"{address}/report/before")
        wait(page, lambda: bool(page.find_elements("css selector", "svg.chart")))
        complaints = [entry["message"] for entry in page.get_log("browser")]
    assert complaints == []


@pytest.mark.browser
def test_a_profiled_script_has_findings_and_no_test_set(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    report = {"event": "hang", "seconds": 61.0, "first_rank": None, "mismatches": [], "ranks": []}
    slow = [{**BALANCED, "wait": 0.003}, {**BALANCED, "forward": 0.007}]
    write_script(root, FakeScript(slow, more={"post_mortem": [report]}))
    with served(root) as address, browser(tmp_path / "profile") as page:
        page.get(f"{address}/run/profiled")
        wait(page, lambda: "Straggler: rank 1" in page.find_element("id", "findings").text)
        text = page.find_element("id", "post-mortems").text
        assert text == "Why training stopped\nNo rank has made progress for 61.0 s."
        assert not page.find_element("id", "test").is_displayed()
        assert page.get_log("browser") == []


@pytest.mark.browser
def test_more_tabs_than_a_browser_has_connections_show_the_list(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    write_run(root, FakeRun(name="before"))
    with served(root) as address, browser(tmp_path / "profile") as page:
        for _ in range(7):
            page.switch_to.new_window("tab")
            page.get(f"{address}/")
            wait(page, lambda: "finished" in row(page, "before"))


@pytest.mark.browser
def test_figure_of_the_test_set_can_be_chosen(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    write_run(root, FakeRun(name="classes", metrics={"f1": 0.8}))
    write_run(root, FakeRun(name="regression", accuracy=None, loss=0.01234, iterations=40))
    with served(root) as address, browser(tmp_path / "profile") as page:
        page.get(f"{address}/")
        wait(page, lambda: "90.0%" in row(page, "classes"))
        assert "loss 0.0123" in row(page, "regression")
        page.get(f"{address}/run/classes")
        wait(page, lambda: points(page, "test") == 2)
        figure = page.find_element("id", "figure")
        assert figure.text.split() == ["accuracy", "f1", "loss"]
        assert page.find_element("id", "unit").text == "in %"
        assert "80" in page.find_element("id", "test").text.split()
        page.find_element("css selector", "#figure option[value=f1]").click()
        wait(page, lambda: "0.8" in page.find_element("id", "test").text.split())
        assert page.find_element("id", "unit").text == ""
        page.get(f"{address}/run/regression")
        wait(page, lambda: points(page, "test") == 2)
        assert page.find_element("id", "figure").text.split() == ["loss"]
        assert "0.01" in page.find_element("id", "test").text
        complaints = [entry["message"] for entry in page.get_log("browser")]
    assert complaints == []


@pytest.mark.browser
def test_slow_steps_are_shown_in_seconds_with_the_number_averaged(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    # The first of them takes double, so that the mean is 13/12 of this: 2.377 s.
    write_run(root, FakeRun(name="slow", phases=[{"forward": 2.1943}], iterations=12))
    with served(root) as address, browser(tmp_path / "profile") as page:
        page.get(f"{address}/run/slow")
        wait(page, lambda: page.find_element("id", "status").text == "finished")
        standing = page.find_element("id", "standing").text
    assert standing == "iteration 12 of 12 · 2.38 s per step (mean of the last 12)"


@pytest.mark.browser
def test_phases_of_less_than_a_second_fill_the_bar(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs", FakeRun(name="short"))
    blocks = [
        {"event": "iterations", "first": first, "seconds": [0.1], "loss": [1.0], "phases": phases}
        for first, phases in enumerate(({"forward": 0.0}, {"forward": 0.1, "backward": 0.2}))
    ]
    (folder / "events-0.jsonl").write_text("\n".join(map(json.dumps, blocks)) + "\n")
    widths = """const bar = document.querySelector(".bar-of-phases");
        const last = bar && bar.lastElementChild.getBoundingClientRect();
        return bar && [bar.getBoundingClientRect().right, last.right];"""
    with served(tmp_path / "runs") as address, browser(tmp_path / "profile") as page:
        page.get(f"{address}/run/short")
        wait(page, lambda: page.execute_script(widths) is not None)
        end_of_bar, end_of_phases = page.execute_script(widths)
    assert end_of_phases == pytest.approx(end_of_bar, abs=1)


def row(page: Any, name: str) -> str:
    found = page.find_elements("css selector", f"tr[data-name='{name}']")
    return str(found[0].text) if found else ""


def points(page: Any, curve: str) -> int:
    return int(page.find_element("id", curve).get_attribute("data-points") or 0)


def wait(page: Any, until: Callable[[], bool]) -> None:
    from selenium.common.exceptions import StaleElementReferenceException
    from selenium.webdriver.support.ui import WebDriverWait

    patient = WebDriverWait(
        page, LIMIT_SECONDS, 0.2, ignored_exceptions=[StaleElementReferenceException]
    )
    patient.until(lambda _: until())
