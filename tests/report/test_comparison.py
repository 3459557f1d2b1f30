"""Runs side by side: which are one entry, its label, and its numbers."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from torch import nn

from forgetless import PCAOGD, SGD, TraceError, Training, fit
from forgetless.report.comparison import compare, find_traces
from forgetless.trace import Trace
from tests.conftest import blobs, forgetless


@dataclass(frozen=True)
class Weighted(SGD):
    """A method of a script's own."""

    name: ClassVar[str] = "weighted"
    label: ClassVar[str] = "Weighted SGD"
    weight: float = 1.0


def trace(method: str = "sgd", seeds: tuple[int, ...] = (0,), fingerprint=None, **config) -> Trace:
    values = [[[90.0 + seed, np.nan], [70.0, 80.0 + seed]] for seed in seeds]
    settings = {"scenario": "blobs", "method": method, **config}
    return Trace(
        "blobs", method, seeds, ("a", "b"), np.array(values), settings,
        timings={"total": 2.0}, status="complete", fingerprint=fingerprint or {},
    )  # fmt: skip


def test_seeds_from_several_runs_are_one_entry():
    (made,) = compare([trace(seeds=(0, 1)), trace("ogd"), trace(seeds=(5,))])
    sgd, ogd = made.entries
    assert (sgd.label, sgd.trace.seeds, len(sgd.parts)) == ("SGD", (0, 1, 5), 2)
    assert sgd.trace.timings == {"total": 4.0}
    assert sgd.mean[0, 0] == pytest.approx(np.mean([90, 91, 95]))
    assert sgd.std[0, 0] == pytest.approx(np.std([90, 91, 95]))
    assert sgd.learned == ogd.learned == 2


def labels(*traces: Trace) -> list[str]:
    (made,) = compare(traces)
    return [e.label for e in made.entries]


def test_runs_of_one_method_are_told_apart_by_what_differs():
    runs = trace("ogd", memory=10), trace("ogd", memory=20), trace("sgd")
    assert labels(*runs) == ["OGD, memory 10", "OGD, memory 20", "SGD"]
    assert labels(trace(), trace()) == ["SGD, run 1", "SGD, run 2"]
    by_count, by_share = trace("pca-ogd", memory=10), trace("pca-ogd", variance=0.9)
    assert labels(by_count, by_share) == ["PCA-OGD, memory 10", "PCA-OGD, variance 0.9"]
    off, on = trace("pca-ogd", centred=False), trace("pca-ogd", centred=True)
    assert labels(off, on) == ["PCA-OGD, not centred", "PCA-OGD, centred"]
    how = trace(seeds=(0,), seeds_together=1), trace(seeds=(1,), seeds_together=2)
    assert labels(*how) == ["SGD"]


def test_different_experiments_are_not_more_seeds_of_one():
    """Two step sizes, two networks, two data sets: other seeds make them no single entry."""
    slow, fast = trace(seeds=(0,), lr=0.01), trace(seeds=(1,), lr=0.1)
    assert labels(slow, fast) == ["SGD, lr 0.01", "SGD, lr 0.1"]
    for part in ("scenario", "data", "model", "start", "method"):
        one, other = (
            trace(seeds=(n,), fingerprint={part: [name] if part == "data" else name})
            for n, name in enumerate("ab")
        )
        assert labels(one, other) == [f"SGD, {part} 1", f"SGD, {part} 2"]
    # A run that has learned fewer tasks has fewer data to tell.
    whole = trace(seeds=(0,), fingerprint={"data": ["a", "b"]})
    begun = trace(seeds=(1,), fingerprint={"data": ["a"]})
    assert labels(whole, begun) == ["SGD"]
    assert labels(whole, whole) == ["SGD, run 1", "SGD, run 2"]


@pytest.mark.parametrize(
    "second",
    [
        {"training": Training(lr=0.2, epochs=1)},
        {"model": lambda: nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))},
        {"method": Weighted(2.0)},
    ],
)
def test_runs_of_a_script_that_differ_are_two_entries(second):
    first = {"training": Training(lr=0.1, epochs=1), "method": Weighted(1.0)}
    runs = [fit(blobs(), seeds=(n,), **first | more) for n, more in enumerate(({}, second))]
    assert len(set(labels(*runs))) == 2
    same = [fit(blobs(), seeds=(n,), **first) for n in range(2)]
    assert labels(*same) == ["Weighted SGD"]


def test_other_networks_or_data_are_not_more_seeds():
    """Two networks of one class with other widths, and other data under one name."""
    training = Training(lr=0.1, epochs=1)

    def ran(seed, width=8, data=0):
        tasks = blobs(seed=data)

        def model():
            return nn.Sequential(nn.Linear(6, width), nn.Linear(width, 3))

        return fit(tasks, SGD(), model, seeds=[seed], training=training)

    (made,) = compare([ran(0), ran(1), ran(2, width=9), ran(3, data=1)])
    assert [e.trace.seeds for e in made.entries] == [(0, 1), (2,), (3,)]
    assert len({e.label for e in made.entries}) == 3


def test_one_trace_is_a_list_of_one():
    (made,) = compare(trace())
    assert [e.label for e in made.entries] == ["SGD"]


def test_scenarios_are_compared_apart():
    other = trace()
    other.scenario = "others"
    assert [c.scenario for c in compare([trace(), other])] == ["blobs", "others"]
    with pytest.raises(TraceError, match="no runs"):
        compare([])


def test_settings_and_measures_are_compared_apart():
    """An accuracy among a task's own classes is no rival of one among all."""
    runs = [trace(setting=s) for s in ("task", "class")] + [
        trace(setting="class", measured_on="validation")
    ]
    made = compare(runs)
    assert [(c.title, c.measure) for c in made] == [
        ("blobs, task-incremental", "accuracy"),
        ("blobs, class-incremental", "accuracy"),
        ("blobs, class-incremental", "validation accuracy"),
    ]
    assert [len(c.entries) for c in made] == [1, 1, 1]
    assert "class-incremental" in made[1]._repr_html_()


def test_memory_is_what_the_tensors_take(tmp_path):
    tasks, training = blobs(), Training(lr=0.1, epochs=1)
    method = PCAOGD(components=2, samples=10)
    kept = fit(tasks, method, training=training, out=tmp_path / "kept")
    in_memory = fit(tasks, method, training=training)
    tensors = kept.state(0).items()
    size = sum(t.numel() * t.element_size() for name, t in tensors if name != "structure")
    assert size > 0
    assert kept.memory_bytes(0) == in_memory.memory_bytes(0) == size
    plain = fit(tasks, SGD(), training=training, out=tmp_path / "plain")
    none = fit(tasks, SGD(), training=training, keep="nothing")
    (made,) = compare([kept, plain])
    assert [e.memory_bytes for e in made.entries] == [size, 0]
    assert none.memory_bytes(0) is None


def test_a_run_that_cannot_be_read_is_left_out_and_named(tmp_path):
    trace().save(tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "trace.json").write_text("{")
    found, broken = find_traces([tmp_path])
    assert [t.method for t in found] == ["sgd"]
    (sentence,) = broken
    assert str(tmp_path / "bad" / "trace.json") in sentence
    with pytest.raises(TraceError, match="is not a trace"):
        find_traces([tmp_path / "bad"])


def test_a_trace_file_that_is_a_folder_is_named(tmp_path):
    (tmp_path / "odd" / "trace.json").mkdir(parents=True)
    with pytest.raises(TraceError, match=r"odd/trace\.json is not a file"):
        find_traces([tmp_path])
    trace().save(tmp_path / "good")
    found, broken = find_traces([tmp_path, tmp_path / "odd"])
    assert [t.method for t in found] == ["sgd"]
    assert broken == [f"{tmp_path}/odd/trace.json is not a file"]


def test_a_trace_file_stands_for_its_folder(tmp_path, capsys):
    trace().save(tmp_path / "good")
    (found,), broken = find_traces([tmp_path / "good" / "trace.json"])
    assert (found.path, broken) == (tmp_path / "good", [])
    assert forgetless(["report", tmp_path / "good" / "trace.json"], capsys)[0] == 0
    assert (tmp_path / "good" / "report.html").is_file()


def test_traces_are_found_below_a_folder_in_the_order_of_the_methods(tmp_path):
    for method in ("pca-ogd", "sgd", "custom", "ewc"):
        trace(method).save(tmp_path / "all" / method)
    found, broken = find_traces([tmp_path / "all", tmp_path / "all" / "sgd"])
    assert broken == []
    assert [t.method for t in found] == ["sgd", "ewc", "pca-ogd", "custom"]
    with pytest.raises(TraceError, match="holds no trace, and neither"):
        find_traces([tmp_path / "nowhere"])


def test_objects_show_themselves_in_a_notebook():
    hostile = trace("<script>")
    html = hostile._repr_html_()
    assert "&lt;script&gt;" in html
    assert "<script>" not in html
    assert "A_T <b>75.00 ± 0.00</b>" in html
    assert ">70.0</td>" in html
    (made,) = compare([trace(seeds=(0, 1)), hostile])
    html = made._repr_html_()
    assert "<script>" not in html
    assert "75.25 ± 0.25" in html
    assert html.count("<caption") == 2


def test_a_long_run_shows_itself_without_a_wall_of_cells():
    many = Trace("x", "sgd", (0,), ("t",) * 50, np.full((1, 50, 50), np.nan))
    assert "<td" not in many._repr_html_()
