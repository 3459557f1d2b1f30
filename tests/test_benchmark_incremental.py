"""The table of all methods, on digits: what it writes and how it is shown."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import tables

TITLE = "Split digits, class-incremental"


@pytest.fixture
def incremental(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(tables.__file__).parent))
    from benchmarks import incremental

    return incremental


def test_a_cell_has_choices_rows_and_their_making(incremental, tmp_path, capsys):
    size = replace(incremental.TINY, runs=tmp_path, seeds="0,1")
    cell = incremental.cell(TITLE, size, ["sgd", "a-gem"], None, 1)
    assert cell["settings"] == {"setting": "class"}
    assert [row["setting"] for row in cell["rows"]] == ["class", "class"]
    assert [row["measured_on"] for row in cell["rows"]] == ["test", "test"]
    assert cell["protocol"]["validation_per_class"] == 4
    assert (cell["seeds"], cell["diverged"]) == ([0, 1], [])
    assert {"code", "torch", "device"} <= cell["versions"].keys()
    for row, chosen in zip(cell["rows"], cell["chosen"].values(), strict=True):
        assert sum(chosen["test"]) / 2 == pytest.approx(row["average_accuracy"])
    text = tables.incremental(json.loads(json.dumps({"cells": [cell]})))
    assert f"| {TITLE} | chosen |" in text
    assert "| A-GEM | lr 0.1 * |" in text
    before = capsys.readouterr().out
    assert before.count(" of 4: ") == 4
    again = incremental.cell(TITLE, size, ["sgd", "a-gem"], None, 1)  # resumed: nothing is trained
    assert again == cell
    assert " of 4: " not in capsys.readouterr().out


def test_the_table_has_every_setting(incremental):
    cells = incremental.FULL.cells
    assert len(cells) == 8
    for source in ("mnist", "cifar100"):
        settings = [of["setting"] for name, of in cells.values() if name == f"split-{source}"]
        assert settings == ["task", "domain", "class"]
