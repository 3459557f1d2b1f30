"""Tables of runs: on the terminal, and as files for papers."""

import io
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from forgetless import ConfigError
from forgetless.report import as_csv, as_frame, as_latex, comparison_table, task_table
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


def five(method, shift):
    values = np.array([[[90.0, np.nan], [70.0 + n + shift, 80.0]] for n in (0, 2, 1, 5, 3)])
    settings = {"scenario": "blobs", "method": method, "setting": "class"}
    return Trace("blobs", method, tuple(range(5)), ("a_1", "b"), values, settings, {},
                 {"total": 1.5}, status="complete")  # fmt: skip


RUNS = [five("sgd", 0.0), five("ewc", 4.0), five("joint", 9.0)]


def test_a_comparison_fits_in_eighty_columns():
    console = Console(width=80)
    with console.capture() as capture:
        console.print(comparison_table([five("kfac-laplace", -60.0), *RUNS]))
    row = next(line for line in capture.get().splitlines() if "K-FAC" in line)
    assert row.split() == [
        "K-FAC", "Laplace", "46.10", "±", "1.19", "77.80", "±", "2.39",
        "-32.00", "<0.001", "–", "1.5",
    ]  # fmt: skip


def test_csv_and_a_frame_say_the_same():
    pandas = pytest.importorskip("pandas")
    read = pandas.read_csv(io.StringIO(as_csv(RUNS)))
    frame = as_frame(RUNS)
    assert list(read["method"]) == list(frame["method"]) == ["SGD", "EWC", "joint"]
    for name in ("average_accuracy", "average_accuracy_interval", "difference", "p", "seconds"):
        assert read[name].to_numpy(float) == pytest.approx(frame[name].to_numpy(float), nan_ok=True)
    assert frame["difference"][0] == pytest.approx(-2.0)
    assert frame["against"].unique().tolist() == ["EWC"]
    seeds = as_frame(RUNS, seeds=True)
    means = seeds.groupby("method")["average_accuracy"].mean()
    assert means["SGD"] == pytest.approx(frame["average_accuracy"][0])
    assert len(seeds) == 15


def test_a_frame_needs_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"pip install 'forgetless\[pandas\]'"):
        as_frame(RUNS)


def test_latex_is_a_table_of_booktabs():
    runs = [five("sgd", 0.0), five("ewc", 4.0)]
    lines = as_latex(runs).splitlines()
    assert lines[0] == r"% needs \usepackage{booktabs}"
    body = lines[lines.index(r"    \toprule") + 1 : lines.index(r"    \bottomrule")]
    assert body[1] == r"    \midrule"
    assert {line.count(" & ") for line in body if line != body[1]} == {6}
    assert all(line.endswith(r" \\") for line in body if line != body[1])
    assert body[3].startswith(r"    EWC & {\boldmath $78.10 \pm 1.19$} & $")
    assert r"\boldmath" not in body[2]
    whole = "\n".join(lines)
    assert whole.count("{") == whole.count("}")
    assert whole.count("$") % 2 == 0
    assert r"blobs, class-incremental, 2 tasks, 5 seeds. $A_T$: mean accuracy" in whole
    assert r"\begin{tabular}{lrrrrrr}" in whole


@given(st.text(max_size=30))
def test_any_label_is_text_in_latex(label):
    """No character with a meaning in LaTeX is left as it is."""
    run = five("mine", 0.0)
    run.config["method_label"] = label or "x"
    row = as_latex([run]).splitlines()[8]
    cell = row[4:].split(" & $")[0]
    for known in (r"\textasciitilde{}", r"\textasciicircum{}", r"\textbackslash{}", r"$\pm$",
                  r"$\Delta$", *(rf"\{c}" for c in "&%$#_{}")):  # fmt: skip
        cell = cell.replace(known, "")
    assert not set(cell) & set("&%$#_{}~^\\")
