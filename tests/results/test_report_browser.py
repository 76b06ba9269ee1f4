"""The report in a real browser: Chromium where it is installed, driven by Playwright, without a network."""

import io
import os
import re
import shutil
import time

import numpy as np
import pytest
from PIL import Image
from report_reading import report_of
from test_results import write_policies

from synergy_runs.outputs.history import history_of
from synergy_runs.outputs.report.figures import DARK_PAGE, LIGHT_PAGE, looks
from synergy_runs.outputs.report.write import write_comparison
from synergy_runs.outputs.stored import find_runs, in_order

playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")

POLICIES = ["fifo", "sjf", "round_robin", "small"]
# Nothing here is timed: on a busy machine a browser takes its time.
PATIENCE_MS = 60_000


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = write_policies(tmp_path_factory.mktemp("results"), jobs=150)
    return write_comparison(in_order(find_runs(folder), POLICIES), folder, command="python -m …")


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


class Visit:
    """A page that is open and whole, with all that it asked for and complained of."""

    def __init__(self, browser, report, *, width=1280, colours="light", **more):
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=colours, offline=True, **more
        )
        self.context.set_default_timeout(PATIENCE_MS)
        self.page = self.context.new_page()
        self.asked, self.said = [], []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("console", lambda line: self.said.append(line.text) if line.type in ("error", "warning") else None)
        self.page.goto(report.as_uri())
        self.page.wait_for_function("document.documentElement.dataset.whole")

    def close(self):
        self.context.close()

    def until(self, holds):
        """Looks again and again: a browser draws when it gets to it."""
        end_s = time.monotonic() + PATIENCE_MS / 1000
        while not holds():
            assert time.monotonic() < end_s
            self.page.wait_for_timeout(100)

    def pixels(self, selector):
        self.page.locator(selector).scroll_into_view_if_needed()
        self.page.mouse.move(0, 0)
        picture = Image.open(io.BytesIO(self.page.locator(selector).screenshot()))
        return np.asarray(picture.convert("RGB")).reshape(-1, 3)

    def column(self, selector, number):
        table = self.page.locator(selector).first
        return table.locator(f"tbody tr > :nth-child({number + 1})").all_inner_texts()


@pytest.fixture(scope="module")
def desk(browser, report):
    visit = Visit(browser, report)
    yield visit
    visit.close()


def has_colour(pixels, colour):
    wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return int((np.abs(pixels.astype(int) - wanted).max(axis=1) <= 3).sum())


def test_page_asks_for_nothing_and_complains_of_nothing(desk, report):
    assert desk.asked == [report.as_uri()]
    assert desk.said == []
    assert report.stat().st_size < 1_500_000


def test_pointing_at_a_chart_tells_the_values_there(desk, report):
    place = desk.page.locator("#plot-completion")
    place.scroll_into_view_if_needed()
    box = place.bounding_box()
    tip = desk.page.locator(".tip-in")

    def pointed():
        for share in (0.5, 0.52):  # a move, not a jump, as a hand makes it
            desk.page.mouse.move(box["x"] + share * box["width"], box["y"] + 150)
        return tip.is_visible()

    desk.until(pointed)
    head, *lines = tip.inner_text().splitlines()
    chart = next(each for each in report_of(report)["charts"] if each["id"] == "completion")
    told = {name: float(share) for name, share in re.findall(r"■ (\S+): ([\d.]+) %", "\n".join(lines))}
    assert told.keys() == {"fifo", "sjf*", "round_robin", "small"}
    value, unit = head.split()
    at_s = float(value) * {"s": 1, "min": 60, "h": 3600, "d": 86400}[unit]
    nearest = int(np.argmin(np.abs(np.array(chart["at"]) - at_s)))
    near = [chart["panels"][0]["lines"][0]["y"][at] for at in range(nearest - 1, nearest + 2)]
    assert told["fifo"] == pytest.approx(min(near, key=lambda y: abs(y - told["fifo"])), abs=0.06)


def test_a_policy_that_is_switched_off_leaves_charts_and_tables(desk):
    page = desk.page
    colour = looks(POLICIES)["fifo"].tone.light
    chip = page.locator("#policies button[data-policy=fifo]")
    assert chip.get_attribute("aria-pressed") == "true"
    desk.until(lambda: has_colour(desk.pixels("#plot-completion"), colour) > 100)
    heads = "#breakdown thead th"
    assert "fifo" in page.locator(heads).all_inner_texts()
    chip.focus()
    page.keyboard.press("Enter")
    assert chip.get_attribute("aria-pressed") == "false"
    assert "fifo" not in page.locator(heads).all_inner_texts()
    desk.until(lambda: has_colour(desk.pixels("#plot-completion"), colour) == 0)
    page.get_by_role("button", name="all", exact=True).click()
    desk.until(lambda: has_colour(desk.pixels("#plot-completion"), colour) > 100)


def test_comparison_sorts_by_any_column(desk):
    before = desk.column("table.sorts", 0)
    assert [name.strip() for name in before] == ["fifo", "sjf*", "round_robin", "small"]
    head = desk.page.locator("table.sorts").first.locator("thead th").nth(1)
    for direction in ("ascending", "descending"):
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == direction
        values = [float(text.replace(",", "")) for text in desk.column("table.sorts", 1)]
        assert values == sorted(values, reverse=direction == "descending")


def test_jobs_are_searched_and_sorted(desk):
    page = desk.page
    page.locator("#job-list table").wait_for()
    search = page.get_by_label("search the jobs")
    search.fill("job-14")
    assert set(desk.column("#job-list table", 0)) == {"job-14", *(f"job-{number}" for number in range(140, 150))}
    assert "11 of 150 jobs" in page.locator("#job-list").inner_text()
    page.locator("#job-list thead button", has_text="job").first.click()
    assert desk.column("#job-list table", 0)[:2] == ["job-14", "job-140"]
    search.fill("job-14 vc2")
    assert 0 < len(desk.column("#job-list table", 0)) < 11
    search.fill("")
    page.locator("#job-list").get_by_role("button", name="next").click()
    assert "51–100 of 150" in page.locator("#job-list").inner_text()


def test_a_job_that_is_clicked_is_shown_under_every_policy_that_is_shown(desk, report):
    page = desk.page
    page.get_by_label("search the jobs").fill("job-14")
    page.locator("#job-list").get_by_role("button", name="job-14", exact=True).click()
    cards = page.locator("#one-job .card")
    page.wait_for_function("document.querySelector('#one-job h3').textContent.startsWith('job-14 ')")
    assert [each.strip() for each in cards.locator("h4").all_inner_texts()] == ["fifo", "sjf*", "round_robin", "small"]
    for number, policy in enumerate(("fifo", "sjf", "round_robin", "small")):
        history = history_of(report.parent / f"{policy}-0", "job-14")
        told = cards.nth(number).locator("tbody td:last-child").all_inner_texts()
        assert len(told) == len(history.stretches)
        for text, stretch in zip(told, history.stretches, strict=True):
            assert text.startswith(stretch.words or "waited")
            assert ("then" in text) == (stretch.reason is not None)
        hours = cards.nth(number).locator("tbody td:nth-child(2)").all_inner_texts()
        assert [float(each) for each in hours] == pytest.approx([s.end_s / 3600 for s in history.stretches], abs=6e-3)
    page.locator("#policies button[data-policy=fifo]").click()
    desk.until(lambda: cards.count() == 3)
    page.locator("#policies button[data-policy=fifo]").click()
    page.get_by_label("search the jobs").fill("")


def test_table_wider_than_its_box_says_so(desk):
    page, said = desk.page, desk.page.locator(".more").first
    desk.until(lambda: "columns are further right" in said.inner_text())
    page.locator(".wide").first.evaluate("box => { box.scrollLeft = box.scrollWidth; }")
    desk.until(lambda: "columns are further right" not in said.inner_text())
    page.set_viewport_size({"width": 2600, "height": 900})
    desk.until(lambda: not said.is_visible())
    assert page.locator("body").bounding_box()["width"] > 2500
    page.set_viewport_size({"width": 1280, "height": 900})


def test_breakdown_turns_and_filters(desk):
    page = desk.page
    assert desk.column("#breakdown table", 0) == ["1", "2–4", "5–8", ">8"]
    page.locator("#breakdown select").nth(0).select_option(label="tenant")
    page.locator("#breakdown select").nth(1).select_option(label="p99 wait")
    assert sorted(desk.column("#breakdown table", 0)) == ["vc1", "vc2", "vc3"]
    assert "p99 wait by tenant" in page.locator("#breakdown").inner_text()
    page.get_by_label("filter the classes").fill("vc2")
    assert desk.column("#breakdown table", 0) == ["vc2"]


def test_gantt_tells_who_held_what_and_moves_by_keys(desk):
    page, canvas = desk.page, desk.page.locator("#gantt-canvas")
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 120, box["y"] + 5)
    tip = page.locator("#gantt .tip")
    tip.wait_for()
    assert re.search(r"node 0 \(v100\), GPU \d.*(idle|job-\d+)", tip.inner_text(), re.DOTALL)
    canvas.focus()
    told = [canvas.get_attribute("aria-label")]
    assert re.search(r"fifo, all 4 nodes|fifo, nodes 0–3", told[0])
    for key in ("+", "ArrowRight", "-", "Home"):
        page.keyboard.press(key)
        told.append(canvas.get_attribute("aria-label"))
        assert told[-1] != told[-2]
    page.locator("#gantt").get_by_label("under").select_option(label="small")
    page.wait_for_function("document.getElementById('gantt-canvas').getAttribute('aria-label').startsWith('small,')")


def test_buttons_zoom_and_values_stand_in_a_table(desk):
    page = desk.page
    before = desk.pixels("#plot-completion")
    page.locator("#tools-completion").get_by_label("zoom in").click()
    desk.until(lambda: not np.array_equal(desk.pixels("#plot-completion"), before))
    page.locator("#tools-completion").get_by_label("all of it").click()
    page.locator("#values-completion summary").click()
    values = page.locator("#values-completion tbody tr")
    values.first.wait_for()
    assert values.count() >= 20
    assert values.last.locator("td").all_inner_texts() == ["100 %"] * 4


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_phone_shows_all_without_scrolling_sideways(browser, report, colours):
    visit = Visit(browser, report, width=390, colours=colours, is_mobile=True, has_touch=True)
    page = visit.page
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    background = LIGHT_PAGE if colours == "light" else DARK_PAGE
    fifo = looks(POLICIES)["fifo"].tone
    visit.until(lambda: has_colour(visit.pixels("#plot-completion"), background) > 10_000)
    visit.until(lambda: has_colour(visit.pixels("#plot-completion"), getattr(fifo, colours)) > 50)
    page.locator("#theme").tap()
    other = "dark" if colours == "light" else "light"
    visit.until(lambda: has_colour(visit.pixels("#plot-completion"), getattr(fifo, other)) > 50)
    visit.until(lambda: has_colour(visit.pixels("#gantt-canvas"), background) < 5_000)
    assert visit.said == []
    visit.close()


def test_paper_is_light_and_has_no_controls(browser, report):
    visit = Visit(browser, report, colours="dark")
    assert len(visit.page.pdf()) > 50_000
    visit.page.emulate_media(media="print", color_scheme="dark")
    visit.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert not visit.page.locator(".controls, .all").filter(visible=True).count()
    # At once: paper does not wait.
    pixels = visit.pixels("#plot-completion")
    fifo = looks(POLICIES)["fifo"].tone
    assert has_colour(pixels, LIGHT_PAGE) > 100_000
    assert has_colour(pixels, fifo.light) > 100 > has_colour(pixels, fifo.dark)
    visit.close()


def test_tables_stand_without_javascript(browser, report):
    context = browser.new_context(java_script_enabled=False, offline=True)
    page = context.new_page()
    page.goto(report.as_uri())
    heads = [each.inner_text() for each in page.locator("h3").filter(visible=True).all()]
    assert {"mean JCT by size", "mean wait by size"} <= {head.partition(",")[0] for head in heads}
    # The comparison, two tables by size, where it came from.
    assert page.locator("table").filter(visible=True).count() >= 5
    assert not page.locator("figure, #gantt, #job-list").filter(visible=True).count()
    context.close()


def test_paper_has_all_tables_and_cuts_none(browser, report):
    visit = Visit(browser, report, width=1047)  # A4 across, less its margins
    visit.page.evaluate("dispatchEvent(new Event('beforeprint'))")
    visit.page.emulate_media(media="print")
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= 1047
    wide = "[...document.querySelectorAll('table')].filter((each) => each.getBoundingClientRect().right > 1047).length"
    assert visit.page.evaluate(wide) == 0
    assert not visit.page.locator("details:not([open])").filter(visible=True).count()
    assert visit.page.get_by_text("mean wait by size").is_visible()
    visit.page.evaluate("dispatchEvent(new Event('afterprint'))")
    visit.page.emulate_media(media="screen")
    assert not visit.page.locator("details[open]").count()
    visit.close()
