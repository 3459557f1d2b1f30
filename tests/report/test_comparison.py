"""Runs side by side: what is one entry, what it is called, and what it shows."""

import numpy as np
import pytest

from forgetless import PCAOGD, SGD, TraceError, Training, fit
from forgetless.report.comparison import compare, find_traces
from forgetless.trace import Trace
from tests.conftest import blobs


def trace(method: str = "sgd", seeds: tuple[int, ...] = (0,), **config) -> Trace:
    values = [[[90.0 + seed, np.nan], [70.0, 80.0 + seed]] for seed in seeds]
    settings = {"method": method, "seeds": str(len(seeds)), **config}
    return Trace(
        "blobs", method, seeds, ("a", "b"), np.array(values), settings,
        timings={"total": 2.0}, status="complete",
    )  # fmt: skip


def test_seeds_from_several_runs_are_one_entry():
    (made,) = compare([trace(seeds=(0, 1)), trace("ogd"), trace(seeds=(5,))])
    sgd, ogd = made.entries
    assert (sgd.label, sgd.trace.seeds, len(sgd.parts)) == ("sgd", (0, 1, 5), 2)
    assert sgd.trace.timings == {"total": 4.0}
    assert sgd.mean[0, 0] == pytest.approx(np.mean([90, 91, 95]))
    assert sgd.std[0, 0] == pytest.approx(np.std([90, 91, 95]))
    assert sgd.learned == ogd.learned == 2


def test_runs_of_one_method_are_told_apart_by_what_differs():
    (made,) = compare([trace("ogd", memory=10), trace("ogd", memory=20), trace("sgd", memory=10)])
    assert [e.label for e in made.entries] == ["ogd, memory 10", "ogd, memory 20", "sgd"]
    (made,) = compare([trace(), trace()])
    assert [e.label for e in made.entries] == ["sgd, run 1", "sgd, run 2"]


def test_settings_that_a_method_has_no_use_for_tell_nothing_apart():
    (made,) = compare([trace(memory=5, seeds=(0,)), trace(memory=100, seeds=(1,))])
    assert [(e.label, e.trace.seeds) for e in made.entries] == [("sgd", (0, 1))]
    (made,) = compare([trace(memory=5, model="mlp"), trace(memory=100, model="lenet")])
    assert [e.label for e in made.entries] == ["sgd, model mlp", "sgd, model lenet"]
    by_count, by_share = {"memory": 10, "variance": None}, {"memory": 100, "variance": 0.9}
    (made,) = compare([trace("pca-ogd", **by_count), trace("pca-ogd", **by_share)])
    assert [e.label for e in made.entries] == ["pca-ogd, memory 10", "pca-ogd, variance 0.9"]
    (made,) = compare([trace(scenario="split-digits", step_degrees=n) for n in (5.0, 9.0)])
    assert [e.label for e in made.entries] == ["sgd, run 1", "sgd, run 2"]


def test_one_trace_is_a_list_of_one():
    (made,) = compare(trace())
    assert [e.label for e in made.entries] == ["sgd"]


def test_scenarios_are_compared_apart():
    other = trace()
    other.scenario = "others"
    assert [c.scenario for c in compare([trace(), other])] == ["blobs", "others"]
    with pytest.raises(TraceError, match="no runs"):
        compare([])


def test_memory_is_what_the_tensors_take(tmp_path):
    tasks, training = blobs(), Training(lr=0.1, epochs=1)
    method = PCAOGD(components=2, samples=10)
    kept = fit(tasks, method, training=training, out=tmp_path / "kept")
    in_memory = fit(tasks, method, training=training)
    tensors = kept.memory(0).values()
    size = sum(t.numel() * t.element_size() for t in tensors)
    assert size > 0
    assert kept.memory_bytes(0) == in_memory.memory_bytes(0) == size
    plain = fit(tasks, SGD(), training=training, out=tmp_path / "plain")
    none = fit(tasks, SGD(), training=training, keep="nothing")
    (made,) = compare([kept, plain])
    assert [e.memory_bytes for e in made.entries] == [size, 0]
    assert none.memory_bytes(0) is None


def test_traces_are_found_below_a_folder_in_the_order_of_the_methods(tmp_path):
    for method in ("pca-ogd", "sgd", "custom", "ewc"):
        trace(method).save(tmp_path / "all" / method)
    found = find_traces([tmp_path / "all", tmp_path / "all" / "sgd"])
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
