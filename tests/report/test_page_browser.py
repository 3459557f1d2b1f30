"""The page in a real browser, from disk, with the network cut."""

import base64
import csv
import io
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from forgetless.report.analysis import known_analysis
from tests.report import seen

REAL = ("mnist", "digits", "single", "stopped", "long", "cifar")
PANELS = (
    "curves", "matrices", "finals", "spectrum", "variance", "overlaps", "forecast", "kernel",
    "images", "memory", "components",
)  # fmt: skip


@pytest.mark.parametrize("name", [*REAL, "hostile", "several"])
def test_a_page_opens_without_complaint_and_draws_every_panel(browser, pages, name):
    page = pages(name)
    assert page.stat().st_size < 6_000_000
    browser.open(page)
    assert browser.run("return document.documentElement.dataset.ready") == "yes"
    for panel in PANELS:
        marks = ("svg path", "svg rect", "svg circle", "img", "td", "p")
        drawn = browser.find(", ".join(f"#{panel} .drawing {mark}" for mark in marks))
        said = browser.find(f".missing[data-panels~={panel}]")
        assert drawn or (said and len(said[0].text) > 20), f"{panel} is neither drawn nor explained"
        assert not (drawn and said)
    assert browser.complaints() == []
    loaded = browser.run("return performance.getEntriesByType('resource').map((e) => e.name)")
    assert [url for url in loaded if not url.startswith("data:")] == []


@pytest.mark.parametrize("name", ["digits"])
def test_every_panel_of_an_analysed_run_is_drawn(browser, pages, name):
    browser.open(pages(name))
    assert [e.text for e in browser.find(".missing")] == []


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("name", [*REAL, "hostile"])
def test_nothing_overflows(browser, pages, name, width):
    browser.open(pages(name), width=width)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.run(seen.BEYOND) == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["digits", "mnist"])
def test_text_is_legible_in_light_and_dark(browser, pages, name, dark):
    browser.open(pages(name), dark=dark)
    browser.click("#methods button")  # what is switched off must be legible too
    measured = browser.run(seen.CONTRAST)
    assert len(measured) > 80
    assert [found for found in measured if found[0] < 4.5] == []
    paper = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper[4:-1].split(","))) < 200) is dark


def test_a_method_is_hidden_everywhere_and_comes_back(browser, pages):
    browser.open(pages("digits"))
    using = seen.USING_FIRST_COLOUR
    maps = "#matrices .map, #overlaps .map"
    before, count = browser.run(using), len(browser.find(maps))
    assert before >= 7
    browser.click("#methods button")
    assert browser.run(using) == 0
    assert len(browser.find(maps)) == count - 2
    assert [e.text for e in browser.find("#results tr.off td:first-child")] == ["SGD"]
    assert browser.find("#methods button")[0].get_attribute("aria-pressed") == "false"
    assert browser.run("return document.activeElement.dataset.label") == "SGD"
    browser.click("#methods button")
    assert browser.run(using) == before
    for button in range(3):
        browser.find("#methods button")[button].click()
    assert "switched off" in browser.find("#curves")[0].text
    assert browser.complaints() == []


def test_hovering_a_cell_shows_the_traces_own_number(browser, pages, mnist_traces):
    browser.open(pages("mnist"))
    sgd = mnist_traces[0]
    cells = browser.find("#matrices .map:first-child g[aria-label=cell] rect")
    places = [(t, s) for t in range(15) for s in range(t + 1)]
    for t, s in [(14, 0), (7, 3)]:
        said = browser.hover(cells[places.index((t, s))])
        values = sgd.accuracy[:, t, s]
        assert f"{values.mean():.2f} ± {values.std():.2f} %" in said
        assert all(f"seed {seed}: {value:.2f}" in said for seed, value in zip(sgd.seeds, values))
        assert f"task {s + 1}, {sgd.tasks[s]}" in said


def test_hovering_a_line_shows_the_traces_own_number(browser, pages, digits_traces):
    browser.open(pages("digits"))
    dots = browser.find(
        "#finals g[aria-label=dot]:last-of-type use, #finals g[aria-label=dot] path"
    )
    said = browser.hover(dots[0])
    finals = [t.accuracy[:, 2, 0].mean() for t in digits_traces]
    assert any(f"{value:.2f} ±" in said for value in finals)


def test_the_selectors_choose_the_pair_of_tasks(browser, pages, digits_traces):
    browser.open(pages("digits"))
    sgd = known_analysis(digits_traces[0])
    assert sgd is not None
    browser.choose("#choose-earlier-task", 1)
    svg = "#spectrum svg"
    assert "task 2" in browser.find(svg)[0].get_attribute("aria-label")
    assert "task 3" in browser.find(svg)[0].get_attribute("aria-label")
    drawn = browser.find("#spectrum g[aria-label=line] path")[0].get_attribute("d")
    browser.choose("#choose-earlier-task", 0)
    browser.choose("#choose-later-task", 2)
    assert browser.find("#spectrum g[aria-label=line] path")[0].get_attribute("d") != drawn
    cells = "#overlaps .map:first-child g[aria-label=cell] rect"
    largest = browser.hover(browser.find(cells)[0])
    values = sgd.overlap["0-1"]
    assert f"largest {values[0]:.3f}, mean {np.mean(values):.3f}" in largest
    texts = "return document.querySelector('#overlaps .map').textContent"
    before = browser.run(texts)
    browser.choose("#choose-shown", 1)
    assert browser.run(texts) != before
    browser.choose("#choose-method", 1)
    assert browser.find("#images img, #images .row, #images p")
    browser.choose("#choose-share", 2)
    assert "--variance 0.99" in browser.find("#advice pre")[0].text
    assert browser.complaints() == []


def test_the_csv_file_is_the_trace(browser, pages, mnist_traces):
    browser.open(pages("mnist"))
    browser.click("#curves .csv")
    rows = list(csv.DictReader(io.StringIO(browser.saved("curves.csv"), newline="")))
    by_method = {t.method.upper(): t for t in mnist_traces}
    found = {m: np.full_like(t.accuracy, np.nan) for m, t in by_method.items()}
    for row in rows:
        seed = by_method[row["method"]].seeds.index(int(row["seed"]))
        place = seed, int(row["after_task"]) - 1, int(row["on_task"]) - 1
        found[row["method"]][place] = float(row["accuracy"])
    for method, trace in by_method.items():
        np.testing.assert_array_equal(found[method], trace.accuracy)


def test_a_figure_is_saved_as_svg_with_its_colours(browser, pages):
    browser.open(pages("digits"))
    for panel in ("curves", "spectrum"):
        browser.click(f"#{panel} .svg")
        text = browser.saved(f"{panel}.svg")
        root = ET.fromstring(text)
        assert root.tag.endswith("svg")
        assert float(root.get("width")) > 300
        assert "var(" not in text
        assert len([n for n in root.iter() if n.tag.endswith("path")]) >= 3


def test_the_table_is_sorted_by_its_headings(browser, pages, mnist_traces):
    browser.open(pages("mnist"))
    best = sorted(mnist_traces, key=lambda t: -t.summary()["average_accuracy"]["mean"])
    assert browser.run(seen.COLUMN, 0) == [t.method.upper() for t in best]
    browser.find("#results th button")[4].click()
    longest = sorted(mnist_traces, key=lambda t: -t.timings["total"])
    assert browser.run(seen.COLUMN, 0) == [t.method.upper() for t in longest]
    browser.find("#results th button")[4].click()
    assert browser.run(seen.COLUMN, 0) == [t.method.upper() for t in reversed(longest)]
    assert browser.find("#results th")[4].get_attribute("aria-sort") == "ascending"


def test_the_keyboard_is_enough(browser, pages):
    from selenium.webdriver.common.keys import Keys

    browser.open(pages("digits"))
    for _ in range(2):  # past the link that skips to the results
        browser.driver.switch_to.active_element.send_keys(Keys.TAB)
    focused = browser.driver.switch_to.active_element
    assert focused.get_attribute("aria-pressed") == "true"
    assert browser.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    focused.send_keys(Keys.SPACE)
    again = browser.driver.switch_to.active_element
    assert again.get_attribute("aria-pressed") == "false"
    again.send_keys(Keys.ENTER)
    assert browser.driver.switch_to.active_element.get_attribute("aria-pressed") == "true"


def test_what_a_screen_reader_is_told(browser, pages):
    browser.open(pages("digits"))
    assert browser.run(seen.UNNAMED) == 0
    headings = browser.run(seen.HEADINGS)
    assert headings.startswith("H1H2")
    assert "H1" not in headings[2:]
    browser.click("#curves details summary")
    browser.run(seen.PAUSE)
    assert len(browser.find("#curves details tbody tr")) > 10
    browser.click("#methods button")
    assert browser.run("return document.getElementById('said').textContent") == "SGD hidden"


def test_it_prints(browser, pages):
    browser.open(pages("digits"), dark=True)
    browser.emulate(dark=True, media="print")
    style = "return getComputedStyle(document.body)"
    paper, ink = browser.run(f"{style}.backgroundColor"), browser.run(f"{style}.color")
    assert paper in ("rgba(0, 0, 0, 0)", "rgb(255, 255, 255)")
    assert sum(map(int, ink[4:-1].split(","))) < 200
    assert not any(e.is_displayed() for e in browser.find(".tools"))
    assert base64.b64decode(browser.pdf()).count(b"/Type /Page\n") >= 2
    browser.emulate()


def test_a_command_can_be_copied(browser, pages):
    browser.open(pages("digits"))
    browser.click("#advice .copy")
    browser.run(seen.PAUSE)
    assert browser.find("#advice .copy")[0].text == "Copied"


def test_names_that_are_code_show_as_text(browser, pages):
    browser.open(pages("hostile"))
    assert browser.run("return window.hacked") is None
    assert browser.find("h1")[0].text.startswith("<img src=x onerror=alert(1)>")
    assert len(browser.find("script")) == 4  # the numbers, the library's two, the program
    assert browser.find("img, b:not(.missing b), i, main svg[onload]") == []
    browser.click("#curves details summary")
    browser.run(seen.PAUSE)
    cells = browser.run(seen.CELLS, "#curves td")
    assert {"<script>window.hacked = 1</script>", "x" * 300} <= set(cells)
    assert browser.run("return document.querySelector('#curves td bdi').dir") == "auto"
    assert browser.complaints() == []


def test_several_scenarios_are_chosen_among(browser, pages):
    browser.open(pages("several"))
    first = browser.find(".headline")[0].text
    browser.choose("#choose-scenario", 1)
    assert browser.find(".headline")[0].text != first
    assert browser.find("#curves svg")
    assert browser.complaints() == []
