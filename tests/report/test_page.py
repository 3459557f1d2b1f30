"""The page as text: its size, its numbers, its independence of other files."""

import html
import json
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from forgetless import PCAOGD, SGD, TraceError, Training, fit, scenario
from forgetless.report import plots
from forgetless.report.comparison import find_traces
from forgetless.report.page import build_page, make_report, write_page
from forgetless.trace import Trace
from tests.conftest import blobs, forgetless
from tests.report.conftest import hostile_trace, train

DATA = re.compile(r'<script id="data" type="application/json">(.*?)</script>', re.DOTALL)


def content(page: str) -> dict:
    return json.loads(DATA.search(page).group(1))


def test_twenty_five_runs_take_less_than_five_seconds(mnist_traces, tmp_path):
    runs = [
        Trace(
            t.scenario, t.method, (seed,), t.tasks, t.accuracy[i : i + 1], t.config, t.versions,
            t.timings, "complete",
        )
        for t in mnist_traces
        for i, seed in enumerate(t.seeds)
    ]  # fmt: skip
    for number, one in enumerate(runs):
        one.save(tmp_path / f"run-{number}")
    started = time.perf_counter()
    make_report(runs, tmp_path / "report.html")
    assert time.perf_counter() - started < 5
    page = content((tmp_path / "report.html").read_text("utf-8"))
    (group,) = page["groups"]
    assert [len(e["seeds"]) for e in group["entries"]] == [5] * 5
    assert (tmp_path / "report.html").stat().st_size < 6_000_000


def test_the_numbers_of_the_page_are_those_of_the_traces(mnist_traces):
    (group,) = content(build_page(mnist_traces))["groups"]
    for entry, trace in zip(group["entries"], mnist_traces, strict=True):
        np.testing.assert_array_equal(np.array(entry["accuracy"], float), trace.accuracy)
        summary = trace.summary()
        assert entry["average"][0] == pytest.approx(summary["average_accuracy"]["mean"])
        assert entry["forgetting"][1] == pytest.approx(summary["forgetting"]["std"])
        assert entry["command"].startswith(f"forgetless run rotated-mnist --method {trace.method}")
        assert ("--centred" in entry["command"]) is (trace.method == "pca-ogd")
        assert ("--ewc-fisher released" in entry["command"]) is (trace.method == "ewc")


def test_the_page_says_which_classes_compete_and_on_what_it_was_measured():
    values = np.array([[[90.0, np.nan], [70.0, 80.0]]])
    settings = {"setting": "class", "validation_per_class": 9}
    trace = Trace("split-digits", "sgd", (0,), ("a", "b"), values, settings, status="complete")
    (group,) = content(build_page([trace]))["groups"]
    assert group["scenario"] == "split-digits, class-incremental"
    assert group["setting"].startswith("All classes of the tasks learned so far")
    assert group["measure"] == "validation accuracy"
    assert "validation accuracy" in group["headline"]


def test_a_broken_trace_does_not_refuse_the_others(tmp_path, capsys):
    fit(blobs(), SGD(), training=Training(lr=0.1, epochs=1), out=tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "trace.json").write_text("{}")
    status, out, _ = forgetless(["report", tmp_path], capsys)
    assert status == 0
    assert f"Left out: {tmp_path}/bad/trace.json is not a trace" in out
    page = content((tmp_path / "report.html").read_text("utf-8"))
    assert [e["label"] for e in page["groups"][0]["entries"]] == ["SGD"]
    assert page["broken"] == [next(n for n in out.splitlines() if "Left out" in n)[10:]]


def test_nothing_of_the_page_comes_from_elsewhere(mnist_traces):
    page = build_page(mnist_traces)
    assert not re.search(r"""<(script|img|link|iframe)[^>]+(src|href)=["'](?!data:)""", page)
    assert "default-src 'none'" in page
    assert "Mike Bostock" in page  # the licences travel with the library
    assert "Observable, Inc." in page


def test_names_cannot_leave_the_block_of_numbers():
    page = build_page([hostile_trace()])
    assert page.count("</script>") == 4
    assert "<script>window.hacked" not in page
    assert "\u2028" not in page
    assert content(page)["groups"][0]["tasks"] == list(hostile_trace().tasks)
    assert html.escape("<img") not in page


def test_a_page_needs_a_run(tmp_path):
    with pytest.raises(TraceError, match="there are no runs to compare"):
        write_page([], tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_a_run_from_a_script_has_a_page(tmp_path):
    made = fit(blobs(), SGD(), training=Training(lr=0.1, epochs=1))
    (group,) = content(build_page([made]))["groups"]
    assert group["entries"][0]["command"] is None
    assert group["folders"] == []


@dataclass(frozen=True)
class Weighted(SGD):
    """A method of a script's own."""

    name: ClassVar[str] = "weighted"
    label: ClassVar[str] = "Weighted SGD"
    weight: float = 1.0


def test_a_method_of_a_script_has_its_own_label_and_colour(tmp_path):
    """In a process that has never heard of the method."""
    for method in (SGD(), Weighted(2.0), Weighted(3.0)):
        name = f"{method.name}-{getattr(method, 'weight', '')}"
        fit(blobs(), method, training=Training(lr=0.1, epochs=1), out=tmp_path / name)
    command = [sys.executable, "-m", "forgetless", "report", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    (group,) = content((tmp_path / "report.html").read_text("utf-8"))["groups"]
    labels = [e["label"] for e in group["entries"]]
    assert labels == ["SGD", "Weighted SGD, weight 2.0", "Weighted SGD, weight 3.0"]
    assert len({e["colour"] for e in group["entries"]}) == 3
    figure = plots.final_accuracy(find_traces([tmp_path])[0])
    assert [line.get_text() for line in figure.legends[0].texts] == labels


def test_a_run_of_readmes_python_example_is_analysed_by_the_command(tmp_path, capsys):
    tasks = scenario("rotated-digits", tasks=3, train_per_class=10)
    method = PCAOGD(components=5, samples=50)
    fit(tasks, method, training=Training(lr=0.05, epochs=1), out=tmp_path / "run")
    status, out, _ = forgetless(["report", tmp_path / "run", "--analyse"], capsys)
    assert status == 0
    assert "could not be analysed" not in out
    page = content((tmp_path / "run" / "report.html").read_text("utf-8"))
    (entry,) = page["groups"][0]["entries"]
    assert entry["label"] == "PCA-OGD"
    assert entry["analysis"]["projected"]
    assert entry["command"].startswith("forgetless run rotated-digits --method pca-ogd --tasks 3")


def test_the_command_writes_the_page_and_says_where(tmp_path, capsys, monkeypatch):
    settings = {"tasks": 2, "epochs": 1, "train_per_class": 10, "hidden": 12, "memory": 5}
    for method in ("sgd", "ogd"):
        train(tmp_path / "both" / method, "rotated-digits", method, **settings)
    status, out, _ = forgetless(["report", tmp_path / "both"], capsys)
    assert status == 0
    assert f"The report is {tmp_path}/both/report.html" in out
    page = (tmp_path / "both" / "report.html").read_text("utf-8")
    assert all(e["analysis"] is None for e in content(page)["groups"][0]["entries"])

    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    other = tmp_path / "other.html"
    status, out, _ = forgetless(
        ["report", tmp_path / "both" / "ogd", "--analyse", "--out", other, "--open"], capsys
    )
    assert status == 0
    assert opened == [other.as_uri()]
    (entry,) = content(other.read_text("utf-8"))["groups"][0]["entries"]
    assert entry["analysis"]["learned"] == 2
    assert (tmp_path / "both" / "ogd" / "analysis.json").is_file()
    # What was found out is there the next time, without asking.
    forgetless(["report", tmp_path / "both"], capsys)
    sgd, ogd = content((tmp_path / "both" / "report.html").read_text("utf-8"))["groups"][0][
        "entries"
    ]
    assert sgd["analysis"] is None
    assert ogd["analysis"] == entry["analysis"]


def test_what_cannot_be_analysed_is_said_and_the_page_made(tmp_path, capsys):
    fit(blobs(), SGD(), training=Training(lr=0.1, epochs=1), out=tmp_path / "run")
    status, out, _ = forgetless(["report", tmp_path / "run", "--analyse"], capsys)
    assert status == 0
    assert "SGD could not be analysed" in out
    assert "that returns tasks" in out
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["report", "nowhere"], "nowhere holds no trace"),
        (["report", "RUN", "--out", "RUN"], "must be a file, and is a folder"),
        (["report"], "DIR"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, arguments, sentence, capsys):
    fit(blobs(), SGD(), training=Training(lr=0.1, epochs=1), out=tmp_path / "run")
    filled = [a.replace("RUN", str(tmp_path / "run")) for a in arguments]
    status, out, err = forgetless(filled, capsys)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert sentence in err


def test_compare_writes_the_page_with_the_reasons(tmp_path, capsys):
    quick = ["--tasks", "2", "--epochs", "1", "--train-per-class", "10", "--hidden", "12"]
    command = ["compare", "rotated-digits", "--methods", "sgd,ogd", "--memory", "5", *quick]
    status, out, _ = forgetless([*command, "--out", tmp_path / "both"], capsys)
    assert status == 0
    assert f"The report is {tmp_path}/both/report.html" in out
    page = content((tmp_path / "both" / "report.html").read_text("utf-8"))
    assert [e["label"] for e in page["groups"][0]["entries"]] == ["SGD", "OGD"]
    assert all(e["analysis"] for e in page["groups"][0]["entries"])


def test_the_charting_library_is_the_reviewed_one():
    script = Path(__file__).parents[2] / "scripts" / "fetch_charts.py"
    done = subprocess.run(
        [sys.executable, script, "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
