"""Traces: what is written can be read, and what cannot be read is named."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from forgetless import AGEM, EWC, OGD, SGD, TraceError, Training, fit, load_trace
from forgetless.methods import Samples
from forgetless.methods.state import restored_state
from forgetless.subspace import STORAGES
from forgetless.support.files import write_atomically
from forgetless.support.plugins import load_object
from tests.conftest import blobs

TRAINING = Training(lr=0.05, epochs=1, batch_size=8)


def trained(path=None, method=None, **options):
    return fit(
        blobs(), method or OGD(samples=4), seeds=[2, 5], training=TRAINING, out=path, **options
    )


def test_what_is_written_can_be_read(tmp_path):
    written, loaded = trained(tmp_path / "a"), load_trace(tmp_path / "a")
    np.testing.assert_array_equal(loaded.accuracy, written.accuracy)
    for field in (
        "scenario",
        "method",
        "seeds",
        "tasks",
        "config",
        "versions",
        "timings",
        "status",
    ):
        assert getattr(loaded, field) == getattr(written, field), field
    assert loaded.summary() == written.summary()
    for seed in (2, 5):
        for task in (0, 1):
            assert set(loaded.weights(seed, task)) >= {"head.weight", "head.bias"}
        assert loaded.state(seed)["directions"].shape[0] == 8


def test_a_trace_in_memory_has_the_same_parts_and_can_be_saved(tmp_path):
    kept, on_disk = trained(), trained(tmp_path / "a")
    assert kept.path is None
    weights = kept.weights(5, 1)
    kept.save(tmp_path / "b")
    again = load_trace(tmp_path / "b")
    for name, weight in on_disk.weights(5, 1).items():
        assert torch.equal(weights[name], weight)
        assert torch.equal(again.weights(5, 1)[name], weight)
    files = [sorted(p.name for p in (tmp_path / f).rglob("*")) for f in "ab"]
    assert files[0] == files[1]


def test_a_trace_can_move_to_another_folder(tmp_path):
    trained(tmp_path / "a")
    moved = load_trace(tmp_path / "a")
    weights = moved.weights(5, 1)
    moved.save(tmp_path / "b")
    assert all(torch.equal(weights[n], w) for n, w in moved.weights(5, 1).items())
    assert "directions" in load_trace(tmp_path / "b").state(2)


def test_a_trace_is_not_written_over_unless_asked(tmp_path):
    trained(tmp_path / "a")
    with pytest.raises(TraceError, match="holds a trace already"):
        trained(tmp_path / "a")
    replaced = trained(tmp_path / "a", overwrite=True, keep="nothing")
    with pytest.raises(TraceError, match="no seed-2"):
        replaced.weights(2, 0)


def test_numpy_numbers_are_numbers(tmp_path):
    method = OGD(samples=np.int64(4))
    seeds = np.array([1, 2])
    fit(blobs(), method, seeds=seeds, training=TRAINING, out=tmp_path / "a")
    assert load_trace(tmp_path / "a").config["memory"] == 4
    assert fit(blobs(), SGD(), seeds=np.int64(2), training=TRAINING).seeds == (0, 1)


@pytest.mark.parametrize(
    ("method", "parts"),
    [
        (SGD(), set()),
        (EWC(), {"fisher", "anchor"}),
        (AGEM(memory=3), {"inputs", "labels", "tasks"}),
    ],
)
def test_each_methods_memory_is_kept(method, parts, tmp_path):
    trace = trained(tmp_path / "a", method)
    assert set(load_trace(tmp_path / "a").state(2)) == parts | {"structure"}
    assert set(trace.state(2)) == parts | {"structure"}


def test_the_state_of_a_method_of_ones_own_can_be_restored_from_its_trace(tmp_path):
    """A reservoir of samples with their outputs, and a count: a tree, saved without pickle."""
    path = Path(__file__).parents[2] / "examples" / "own_methods.py"
    method = load_object(f"{path}:DERPP", "method")(memory=10)
    trained(tmp_path / "a", method)
    trace = load_trace(tmp_path / "a")
    parts = [trace.state(seed) for seed in trace.seeds]
    theta = torch.zeros(2, 5)
    state = restored_state(parts, method, theta, STORAGES["dense"], Samples.restore)
    assert state.seen == 2 * 24  # all samples of both tasks came by once
    assert len(state.samples) == 10
    assert state.samples.extra["logits"].shape == (2, 10, 3)
    numbers = {n: t for n, t in parts[0].items() if n != "structure"}
    assert trace.memory_bytes(2) == sum(t.nbytes for t in numbers.values())
    assert (trace.config["memory"], trace.config["method_from"]) == (10, "own_methods:DERPP")


def test_keep_decides_what_is_kept(tmp_path):
    weights = trained(tmp_path / "weights", keep="weights")
    assert weights.weights(2, 0)
    with pytest.raises(TraceError, match=r"no seed-2/memory"):
        weights.state(2)
    nothing = trained(tmp_path / "nothing", keep="nothing")
    assert [p.name for p in (tmp_path / "nothing").iterdir()] == ["trace.json"]
    with pytest.raises(TraceError, match=r"no seed-2/task-01"):
        nothing.weights(2, 0)


def test_the_record_is_plain_json_with_null_for_what_was_not_evaluated(tmp_path):
    trained(tmp_path / "a")
    record = json.loads((tmp_path / "a" / "trace.json").read_text())
    assert record["format"] == 1
    assert record["accuracy"][0][0][1] is None
    assert record["seeds"] == [2, 5]
    assert record["average_accuracy"]["per_seed"] == pytest.approx(
        [np.mean(matrix[-1]) for matrix in record["accuracy"]]
    )
    assert {"forgetless", "torch", "python", "code", "device"} <= set(record["versions"])
    assert record["timings"]["total"] >= record["timings"]["training"] > 0


def test_an_interrupted_run_keeps_what_was_finished(tmp_path):
    def stop(progress):
        if progress.seeds == (5,) and progress.task == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "a", observer=stop)
    trace = load_trace(tmp_path / "a")
    assert trace.status == "interrupted"
    assert trace.finished.tolist() == [True, False]
    assert trace.summary()["average_accuracy"]["per_seed"][1] is None
    assert trace.summary()["average_accuracy"]["std"] == 0
    assert trace.weights(5, 0)


def test_an_interruption_before_the_first_task_leaves_nothing(tmp_path):
    def stop(progress):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "a", observer=stop)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a trace"),
        (b"{", "is not a trace"),
        (b"[]", "is not a trace"),
        (b"{}", "is not a trace"),
        (b"\xff\xfe", "cannot be read"),
        (b'{"format": 99}', "has format 99; this version reads 1"),
        (b"[" * 100_000, "cannot be read"),
        (b'{"format": 1, "seeds": [Infinity], "tasks": ["a"]}', "is not a trace"),
    ],
)
def test_what_is_not_a_trace_is_named(tmp_path, content, message):
    (tmp_path / "trace.json").write_bytes(content)
    with pytest.raises(TraceError, match=message) as caught:
        load_trace(tmp_path)
    assert "trace.json" in str(caught.value)


def test_an_accuracy_matrix_of_the_wrong_shape_is_refused(tmp_path):
    trained(tmp_path)
    file = tmp_path / "trace.json"
    record = json.loads(file.read_text())
    record["accuracy"] = record["accuracy"][:1]
    file.write_text(json.dumps(record))
    with pytest.raises(TraceError, match=r"accuracy matrix of shape \(1, 2, 2\)"):
        load_trace(tmp_path)


def test_how_a_state_is_built_is_no_part_of_its_size(tmp_path):
    trace = trained(tmp_path / "a", SGD())
    trace.keep_state(2, {"directions": torch.ones(2, 3), "structure": torch.zeros(50)})
    assert load_trace(tmp_path / "a").memory_bytes(2) == 24
    (tmp_path / "a" / "seed-2" / "memory.safetensors").write_bytes(b"\x00" * 5)
    assert trace.memory_bytes(2) is None


def test_validation_images_are_said_in_the_trace():
    trace = trained()
    assert trace.summary()["measured_on"] == "test"
    trace.config["validation_per_class"] = 100
    assert trace.summary()["measured_on"] == "validation"


def test_damaged_weights_are_named(tmp_path):
    trained(tmp_path)
    (tmp_path / "seed-2" / "task-01.safetensors").write_bytes(b"\x00" * 5)
    with pytest.raises(TraceError, match=r"task-01\.safetensors cannot be read"):
        load_trace(tmp_path).weights(2, 0)


def test_a_folder_without_a_trace_is_named(tmp_path):
    with pytest.raises(TraceError, match="holds no trace"):
        load_trace(tmp_path / "nowhere")


def test_a_failed_write_leaves_the_old_file(tmp_path):
    file = tmp_path / "file"
    file.write_text("old")

    def fail(temporary):
        temporary.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(file, fail)
    assert file.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
