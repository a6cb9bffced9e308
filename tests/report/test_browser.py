"""The page in a browser: readouts, legends, a closer look, and saving a figure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paceline.cli import main
from paceline.report.build import write_report
from tests.support.calibrations import calibration
from tests.support.records import FakeRun, write_run

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The report of two cells, open in a window of a headless browser."""
    from selenium import webdriver

    folder = tmp_path_factory.mktemp("runs")
    write_run(folder, FakeRun("a", {"lr": 0.01}, iterations=100))
    write_run(folder, FakeRun("b", {"lr": 0.02}, [{"forward": 0.03}], iterations=100))
    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,1000",
                 "--no-first-run", "--disable-background-networking", "--disable-sync",
                 "--disable-component-update"):  # fmt: skip
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path="/usr/bin/chromedriver")
    driver = webdriver.Chrome(options=options, service=service)
    try:
        driver.get(f"file://{write_report(folder).page}")
        yield driver
    finally:
        driver.quit()


FIND = "const svg = document.querySelector('#iteration-time-curve svg');"
TICKS = f"{FIND} return [...svg.querySelectorAll('.x-axis text')].map((t) => t.textContent);"


def drag(page: Any, *shares: float) -> None:
    """Press at the first of these places across the plot, and let go at the last."""
    page.execute_script(
        f"""{FIND}
        const plot = svg.querySelector('.plot'), box = plot.getBoundingClientRect();
        const send = (kind, share) => plot.dispatchEvent(new PointerEvent(kind, {{button: 0,
          bubbles: true, pointerType: 'mouse', clientX: box.left + share * box.width,
          clientY: box.top + box.height / 2}}));
        const [from, to] = arguments;
        send('pointerdown', from); send('pointermove', to); send('pointerup', to);""",
        *shares,
    )


def readout_amid(page: Any, figure: str) -> str:
    """What is read at iteration 51 of 100, just right of the middle of a plot."""
    text = page.execute_script(
        """const figure = document.getElementById(arguments[0]);
        const plot = figure.querySelector('.plot'), box = plot.getBoundingClientRect();
        plot.dispatchEvent(new PointerEvent('pointermove', {bubbles: true,
          clientX: box.left + 0.5025 * box.width, clientY: box.top + 20}));
        return figure.querySelector('.readout').innerText;""",
        figure,
    )
    return str(text)


def test_nothing_went_wrong_and_nothing_was_fetched(page: Any) -> None:
    assert page.get_log("browser") == []
    assert page.execute_script("return performance.getEntriesByType('resource').length") == 0


def test_resting_on_a_curve_reads_its_values(page: Any) -> None:
    text = readout_amid(page, "iteration-time-curve")
    assert "iteration 51" in text
    assert "lr 0.01: 20 ms" in text
    assert "lr 0.02: 30 ms" in text


def test_dragging_looks_closer_and_a_double_click_goes_back(page: Any) -> None:
    before = page.execute_script(TICKS)
    drag(page, 0.5, 0.7)
    closer = [float(text) for text in page.execute_script(TICKS)]
    assert min(closer) >= 50
    assert max(closer) <= 72
    page.execute_script(
        f"{FIND} svg.querySelector('.plot').dispatchEvent(new MouseEvent('dblclick'))"
    )
    assert page.execute_script(TICKS) == before


def test_a_closer_look_has_no_readout_over_it_and_a_way_back(page: Any) -> None:
    before = page.execute_script(TICKS)
    part = "return document.querySelector('#iteration-time-curve .{}').hidden"
    assert page.execute_script(part.format("reset"))
    drag(page, 0.5, 0.7)
    assert page.execute_script(part.format("readout"))
    assert not page.execute_script(part.format("reset"))
    page.execute_script("document.querySelector('#iteration-time-curve .reset').click()")
    assert page.execute_script(TICKS) == before
    assert page.execute_script(part.format("reset"))


def test_a_readout_has_one_digit_more_than_the_axis(page: Any) -> None:
    """The loss of iteration 51 is 2 / 3.5 = 0.5714..., and its axis has a tick at every 0.5."""
    text = readout_amid(page, "curves-train-loss-iteration")
    assert "iteration 51" in text
    assert "lr 0.01: 0.57 " in text.replace("\n", " ")


def test_a_name_in_the_legend_hides_and_shows_its_curve(page: Any) -> None:
    flip = f"""{FIND}
        svg.querySelectorAll('.key')[1].dispatchEvent(new MouseEvent('click'));
        const mark = svg.querySelectorAll('.series')[1];
        return getComputedStyle(mark).display;"""
    assert page.execute_script(flip) == "none"
    assert page.execute_script(flip) != "none"


def test_a_saved_figure_is_whole_by_itself(page: Any) -> None:
    link = page.execute_script(
        """const link = document.querySelector('#iteration-time-means .download');
        link.addEventListener('click', (event) => event.preventDefault());
        link.click();
        return decodeURIComponent(link.href);"""
    )
    assert link.startswith("data:image/svg+xml")
    assert "<style" in link
    assert 'data-value="0.02"' in link


def test_a_phone_has_no_sideways_scrolling(page: Any) -> None:
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True},
    )
    try:
        assert page.execute_script("return document.documentElement.scrollWidth") <= 390
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_closer_look_keeps_logarithmic_axes(
    page: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("plan")
    calibration().write(folder / "calibration.json")
    arguments = ["--workers", "1,2,4,8,16,64", "--strategy", "ring,ddp", "--html"]
    assert main(["plan", str(folder / "calibration.json"), *arguments, f"{folder}/plan.html"]) == 0
    page.get(f"file://{folder}/plan.html")
    places = page.execute_script(
        """const svg = document.querySelector('figure[id$=throughput] svg');
        const plot = svg.querySelector('.plot'), box = plot.getBoundingClientRect();
        const send = (kind, share) => plot.dispatchEvent(new PointerEvent(kind, {button: 0,
          bubbles: true, pointerType: 'mouse', clientX: box.left + share * box.width,
          clientY: box.top + box.height / 2}));
        send('pointerdown', 0.25); send('pointermove', 0.85); send('pointerup', 0.85);
        return [...svg.querySelectorAll('.x-axis text')].map((t) => [Number(t.textContent),
          Number(t.getAttribute('x'))]);"""
    )
    assert page.get_log("browser") == []
    # Equal factors are equally far apart.
    assert [count for count, _ in places] == [5, 10, 20]
    (_, five), (_, ten), (_, twenty) = places
    assert ten - five == pytest.approx(twenty - ten)
