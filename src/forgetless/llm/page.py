"""The comparison of language models as one HTML page: answers side by side, what changed marked."""

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from functools import partial
from typing import Any

from forgetless.report.document import asset, build_document
from forgetless.report.looks import DISTINCT

_ours = partial(asset, package="forgetless.llm")
_BASE = 1  # place in the palette of the base model, grey
_MUCH = 0.8  # of what the best model learned
_NUMBERS = (
    "kl", "error", "text", "task", "tasks", "scores", "share", "each", "right", "family"
)  # fmt: skip
Piece = tuple[str, str]  # "same", "gone" or "new", and the words


def build_page(content: Mapping[str, Any]) -> str:
    """The text of the page.

    Arguments:
        content: the prompts; the questions with the accepted answers; the models' numbers and
            answers, the base model's first.
    """
    base = content["models"][0]
    families = list(dict.fromkeys(one["family"] for one in content["models"][1:]))
    colours = {family: DISTINCT[n % len(DISTINCT)] for n, family in enumerate(families)}
    places = [_BASE, *(colours[one["family"]] for one in content["models"][1:])]
    entries = [
        {
            **{key: one[key] for key in _NUMBERS},
            "label": one["name"],
            "colour": place,
            "answers": _marked(base["answers"], one["answers"]),
            "replies": _marked(base["replies"], one["replies"]),
        }
        for place, one in zip(places, content["models"], strict=True)
    ]
    group = {
        "entries": entries,
        "headline": headline(content["models"]),
        "prompts": content["prompts"],
        "questions": content["questions"],
    }
    return build_document(
        "What fine-tuning changed",
        _ours("assets/compare.html"),
        {"groups": [group]},
        [_ours("assets/compare.js")],
        _ours("assets/compare.css"),
    )


def headline(models: Sequence[Mapping[str, Any]]) -> str:
    """A sentence: which model moved least, and what it learned.

    Of more than two, those are compared that learned about as much as the best one.
    """
    base, *others = models
    if len(others) > 2 and base["task"] is not None:
        fell = [base["task"] - one["task"] for one in others]
        able = [one for one, far in zip(others, fell, strict=True) if far >= _MUCH * max(fell)]
        others = able if len(able) > 1 else others
    least, most = (f(others, key=lambda one: one["kl"]) for f in (min, max))
    if least is most or not least["kl"] > 0:
        only = most
        return (
            f"KL from the base model's answers to those of {only['name']} is {only['kl']:.2g} nats "
            f"per token{_learned(base, only)}."
        )
    times = most["kl"] / least["kl"]
    rounded = f"{times:.1f}" if times < 10 else f"{times:.0f}"
    name = f"{most['name'][:1].upper()}{most['name'][1:]}"
    return (
        f"{name} moved the base model's answers {rounded} times as far as {least['name']} "
        f"(KL {most['kl']:.2g} and {least['kl']:.2g} nats per token){_compared(base, most, least)}."
    )


def _learned(base: Mapping[str, Any], one: Mapping[str, Any]) -> str:
    if one["task"] is None:
        return ""
    return f"; its loss on the {_tasks(base)} went from {base['task']:.2f} to {one['task']:.2f}"


def _compared(base: Mapping[str, Any], most: Mapping[str, Any], least: Mapping[str, Any]) -> str:
    if least["task"] is None:
        return ""
    return (
        f"; the loss on the {_tasks(base)} went from {base['task']:.2f} to {most['task']:.2f} and "
        f"{least['task']:.2f}"
    )


def _tasks(base: Mapping[str, Any]) -> str:
    return "new task" if len(base["tasks"]) == 1 else f"{len(base['tasks'])} new tasks"


def _marked(before: Sequence[str], after: Sequence[str]) -> list[list[Piece]]:
    return [list(changes(old, new)) for old, new in zip(before, after, strict=True)]


def changes(old: str, new: str) -> Iterator[Piece]:
    """The words of two texts: those of both, those that are gone, those that are new."""
    one, other = (re.findall(r"\s+|\w+|[^\w\s]", text) for text in (old, new))
    gone = came = ""
    for kind, start, stop, first, last in SequenceMatcher(None, one, other, False).get_opcodes():
        before, after = "".join(one[start:stop]), "".join(other[first:last])
        # A space between two changes is part of one change.
        if kind == "equal" and not (before.isspace() and (gone or came)):
            yield from _changed(gone, came)
            gone = came = ""
            yield "same", before
        else:
            gone, came = gone + before, came + after
    yield from _changed(gone, came)


def _changed(gone: str, came: str) -> Iterator[Piece]:
    if gone:
        yield "gone", gone
    if came:
        yield "new", came
