"""The page of a guard, read as text and, where there is a browser, seen."""

import json
import re

import pytest

from forgetless.report.guard_page import build_guard_page, headline
from tests.guard.problems import task
from tests.guard.test_history import trained
from tests.report.chromium import Browser, missing


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    guard = trained()
    return guard.report(
        tmp_path_factory.mktemp("page") / "guard.html", held_out=[task(0, 40), task(1, 40)]
    )


def data(text: str):
    (found,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)
    return json.loads(found)["groups"][0]


def test_the_page_holds_the_numbers_and_needs_nothing_else(page):
    text = page.read_text("utf-8")
    found = data(text)
    assert [entry["label"] for entry in found["entries"]] == ["task 1", "task 2"]
    assert len({entry["colour"] for entry in found["entries"]}) == 2
    assert found["moments"][-1]["numbers"]["removed"] > 0
    assert not re.search(r'(?:src|href)="https?:', text)


def test_headlines_say_how_well_tasks_are_kept():
    one = {"number": 1, "is_forgotten": False, "drift": {"drift": 0.1}}
    lost, unknown = one | {"number": 2, "is_forgotten": True}, one | {"drift": None}
    content = {"memory": {"bytes": 2e6}}
    assert headline(content | {"tasks": []}) == "No task is stored yet, so nothing is protected."
    assert headline(content | {"tasks": [one]}) == (
        "One task is stored in 2 MB, and none is being forgotten."
    )
    assert headline(content | {"tasks": [one, lost]}).endswith("task 2 is being forgotten.")
    assert headline(content | {"tasks": [lost, lost]}).endswith("2 of them are being forgotten.")
    assert headline(content | {"tasks": [unknown]}).endswith("was not measured.")


def test_many_tasks_have_looks_of_their_own(page):
    found = data(page.read_text("utf-8"))
    many = found | {"tasks": [found["tasks"][0] | {"number": n} for n in range(1, 31)]}
    entries = data(build_guard_page(many))["entries"]
    assert len({(entry["colour"], entry["dash"]) for entry in entries}) == 30


def test_names_become_text_only(page):
    found = data(page.read_text("utf-8"))
    mean = "</script><script>alert(1)</script>"
    text = build_guard_page(found | {"model": mean, "warnings": [{"step": 1, "text": mean}]})
    assert mean not in text
    assert data(text)["model"] == mean


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_the_page_is_drawn_on_every_width_without_a_complaint(page, tmp_path):
    browser = Browser(tmp_path)
    try:
        for width in (390, 1440):
            for dark in (False, True):
                browser.open(page, width=width, dark=dark)
                wide = "const d = document.documentElement; return d.scrollWidth - d.clientWidth"
                assert browser.run(wide) == 0
                assert browser.run("return document.querySelectorAll('.drawing svg').length") >= 3
                assert browser.driver.get_log("browser") == []
        said = browser.run("return document.body.innerText")
    finally:
        browser.driver.quit()
    for words in ("What to do", "The tasks", "What was measured", "0.weight", "of 40"):
        assert words in said
