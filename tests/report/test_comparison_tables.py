"""Tables for the terminal: what they are called, and what they show."""

import numpy as np
import pytest
from rich.console import Console

from forgetless.report import comparison_table, task_table
from forgetless.trace import Trace


def trace(method="sgd", **config):
    values = np.array([[[90.0, np.nan], [70.0, 80.0]]])
    settings = {"scenario": "blobs", "method": method, **config}
    return Trace("blobs", method, (0,), ("a", "b"), values, settings, status="complete")


def text(table) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"setting": "task"}, "blobs, task-incremental: 2 tasks, 1 seed"),
        ({"setting": "domain"}, "blobs, domain-incremental: 2 tasks, 1 seed"),
        ({"setting": "class"}, "blobs, class-incremental: 2 tasks, 1 seed"),
        ({}, "blobs: 2 tasks, 1 seed"),
    ],
)
def test_the_title_says_which_classes_compete(setting, words):
    shown = text(comparison_table([trace(**setting), trace("pca-ogd", **setting)]))
    assert words in shown
    assert "PCA-OGD" in shown
    assert words.split(":")[0] in text(task_table(trace(**setting)))


def test_validation_accuracy_is_called_so():
    held_out = trace(setting="domain", validation_per_class=5)
    assert "mean validation accuracy on all tasks" in text(comparison_table([held_out]))
    assert "validation accuracy, %" in text(task_table(held_out))
    assert "validation" not in text(comparison_table([trace()])) + text(task_table(trace()))


def test_accuracies_before_and_after_are_shown():
    row = next(line for line in text(task_table(trace())).splitlines() if " a " in line)
    assert [cell for cell in row.replace("│", " ").split() if cell[-1].isdigit()] == [
        "90.0", "70.0", "-20.0",
    ]  # fmt: skip
