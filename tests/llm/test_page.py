"""The page of a comparison: its words here, and what a browser shows."""

from dataclasses import replace
from itertools import pairwise

import pytest

from forgetless.llm import Behaviour, ModelComparison
from forgetless.llm.page import changes, headline
from tests.report.chromium import Browser, missing

SAID = "Paris is the capital.", "It is <b>red</b> & blue."


def comparison(names=("plain", "guarded"), task=True, questions=True) -> ModelComparison:
    def one(far: float, loss: float, answers) -> Behaviour:
        right = (far < 0.1,) if questions else ()
        tasks, replies = {"it": loss} if task else {}, right and ("Rome",)
        return Behaviour(answers, (far, 3 * far), (4, 4), 2.0, tasks, replies, right)

    models = {"base": one(0.0, 3.0, SAID)}
    for number, name in enumerate(names):
        new = (f"Rome is the {name} capital.", SAID[1])
        models[name] = one(0.2 / (1 + 9 * number), 2.0 + 0.1 * number, new)
    asked = (("Which city?", ("Rome", "Roma")),) if questions else ()
    return ModelComparison(("What is <i>it</i>?", "And why?"), asked, models)


def test_words_that_changed_are_marked():
    pieces = [*changes("The sky is blue.", "The sea is blue, too.")]
    assert "".join(text for kind, text in pieces if kind != "new") == "The sky is blue."
    assert "".join(text for kind, text in pieces if kind != "gone") == "The sea is blue, too."
    assert pieces[1:3] == [("gone", "sky"), ("new", "sea")]
    assert [*changes("a b c", "x y c")] == [("gone", "a b"), ("new", "x y"), ("same", " c")]
    assert [*changes("same", "same")] == [("same", "same")]
    assert [*changes("", "new")] == [("new", "new")]


@pytest.mark.parametrize(
    ("names", "task", "sentence"),
    [
        (["tuned"], False, "KL from the base model's answers to those of tuned is 0.4 nats per"),
        (["tuned"], True, "; its loss on the new task went from 3.00 to 2.00."),
        (["plain", "guarded"], False, "Plain moved the base model's answers 10 times as far as g"),
        (["plain", "guarded"], True, "(KL 0.4 and 0.04 nats per token); the loss on the new task"),
    ],
)
def test_the_headline(names, task, sentence):
    models = comparison(tuple(names), task)._content()["models"]
    assert sentence in headline(models)


def test_the_headline_compares_models_that_learned_as_much():
    models = comparison(("far", "near", "lazy"))._content()["models"]
    models[3] |= {"kl": 1e-6, "task": 2.9}  # has moved nothing, and learned nothing
    assert "moved the base model's answers 10 times as far as near" in headline(models)


def test_it_is_one_file_that_needs_no_other(tmp_path):
    page = comparison().write(tmp_path / "new" / "page.html")
    text = page.read_text("utf-8")
    assert "src=" not in text.split("<script>")[0]
    assert "<i>it</i>" not in text


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if missing():
        pytest.skip(missing())
    found = Browser(tmp_path_factory.mktemp("downloads"))
    yield found
    found.quit()


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize(
    "made", [comparison(), comparison(("tuned",), task=False, questions=False)], ids=["two", "one"]
)
def test_it_shows_everything_without_scrolling_sideways(tmp_path, browser, made, width):
    browser.open(made.write(tmp_path / "page.html"), width=width)
    assert browser.complaints() == []
    assert browser.run("return document.documentElement.scrollWidth") <= width
    shown = browser.run("return document.body.innerText")
    assert "What is <i>it</i>?" in shown
    assert "It is <b>red</b> & blue." in shown
    drawn = len(browser.find(".drawing svg"))
    assert drawn == (3 if len(made.models) > 2 else 1)
    assert bool(browser.find("#questions .pair")) == bool(made.questions)
    # The answer that moved most comes first.
    assert "And why?" in browser.find("#answers .pair p")[0].text


def settings() -> ModelComparison:
    """Two methods at two learning rates each, two tasks, and a score of the harness."""
    found = comparison(("plain 1", "plain 2", "guarded 1", "guarded 2"))
    models = {
        name: replace(one, tasks={"French": 2.0 + i / 9, "German": 2.5}, scores={"arc, acc": 0.5})
        for i, (name, one) in enumerate(found.models.items())
    }
    families = {name: name.split()[0] for name in models if name != "base"}
    return replace(found, models=models, families=families)


def test_settings_of_a_method_have_one_colour_and_a_line(tmp_path, browser):
    browser.open(settings().write(tmp_path / "page.html"))
    assert browser.complaints() == []
    plane = browser.find("#learning-forgetting svg")[0]
    lines = plane.find_elements("css selector", '[aria-label="line"]')
    dots = plane.find_elements("css selector", '[aria-label="dot"] circle')
    colours = [dot.get_attribute("fill") for dot in dots]
    assert len(lines) == 2
    assert len(dots) == 5
    assert len({*colours}) == 3
    assert [*(line.get_attribute("stroke") for line in lines)] == [*dict.fromkeys(colours[1:])]
    names = {text.text for text in plane.find_elements("css selector", '[aria-label="text"] text')}
    assert names == {"base", "plain", "guarded"}
    heads = [cell.text for cell in browser.find("#summary th")]
    assert heads[-4:] == ["loss on French", "loss on German", "questions right", "arc, acc"]


def test_names_in_the_plane_do_not_overlap(tmp_path, browser):
    found = settings()
    equal = {name: one if name == "base" else found.models["plain 1"] for name, one in
             found.models.items()}  # fmt: skip
    for made in (replace(found, models=equal), replace(found, models=equal, families={})):
        browser.open(made.write(tmp_path / "page.html"), width=390)
        texts = browser.find('#learning-forgetting svg [aria-label="text"] text')
        places = sorted(text.rect["y"] for text in texts)
        assert all(b - a > 10 for a, b in pairwise(places[1:]))


def test_another_model_can_be_chosen(tmp_path, browser):
    browser.open(comparison().write(tmp_path / "page.html"))
    assert (
        "plain" in browser.find("#answers mark.new")[0].text + browser.find("#answers h4")[1].text
    )
    browser.choose("#answers select", 1)
    assert browser.find("#answers h4")[1].text == "guarded"
    assert "guarded" in browser.run("return document.querySelector('#answers').innerText")
    assert "plain capital" not in browser.run("return document.querySelector('#answers').innerText")
