"""The loggers write through the real packages, and their files say what the trace says."""

import json
import time

import numpy as np
import pytest

from forgetless import SGD, Progress, Training, average_accuracy, fit, forgetting
from forgetless.report.loggers import (
    MLflowLogger,
    TensorBoardLogger,
    WandbLogger,
    package,
)
from forgetless.support.validation import ConfigError
from forgetless.training.settings import Measurements, several
from tests.conftest import blobs

TASKS, SEEDS = 3, (4, 7)


@pytest.fixture(scope="module")
def tasks():
    return blobs(tasks=TASKS)


def run(tasks, observer):
    training = Training(lr=0.1, epochs=2, batch_size=8)
    return fit(tasks, SGD(), seeds=SEEDS, training=training, observer=observer, keep="nothing")


def expected(trace, seed: int) -> dict[tuple[str, int], float]:
    """Every number that should have been logged of a seed, by its name and task."""
    matrix = trace.accuracy[trace.seeds.index(seed)]
    numbers = {}
    for t in range(TASKS):
        until = np.where(np.arange(TASKS)[:, None] <= t, matrix, np.nan)
        numbers["average accuracy", t + 1] = float(average_accuracy(until))
        numbers["forgetting", t + 1] = float(forgetting(until))
        for s in range(t + 1):
            numbers[f"accuracy/task {s + 1}", t + 1] = matrix[t, s]
    return numbers


def records(content: bytes):
    """The records of a file of wandb: LevelDB's log format after seven bytes of its own."""
    assert content[:4] == b":W&B"
    block, at, pending = 32_768, 7, b""
    while at + 7 <= len(content):
        if block - at % block < 7:  # too little room for a header: filled up
            at += block - at % block
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        pending += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield pending
            pending = b""


def test_tensorboard_reads_back_what_the_trace_has(tasks, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with TensorBoardLogger(tmp_path) as logger:
        trace = run(tasks, logger)
    for seed in SEEDS:
        events = EventAccumulator(str(tmp_path / f"seed-{seed}")).Reload()
        found = {
            (tag, event.step): event.value
            for tag in events.Tags()["scalars"]
            for event in events.Scalars(tag)
        }
        wanted = expected(trace, seed)
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert found[key] == pytest.approx(value, rel=1e-6)  # float32 on disk


def test_mlflow_reads_back_what_the_trace_has(tasks, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tracking = pytest.importorskip("mlflow.tracking")
    place = (tmp_path / "store").as_uri()
    with MLflowLogger("digits", tracking_uri=place, name="one", params={"lr": 0.1}) as logger:
        trace = run(tasks, logger)
    client = tracking.MlflowClient(place)
    kept = client.get_run(logger.run_id)
    assert kept.info.status == "FINISHED"
    assert kept.data.params == {"lr": "0.1"}
    for seed in SEEDS:
        for (name, task), value in expected(trace, seed).items():
            history = client.get_metric_history(logger.run_id, f"seed {seed}/{name}")
            assert {m.step: m.value for m in history}[task] == value
    again = MLflowLogger("digits", tracking_uri=place)  # the experiment is there already
    again.close()


def test_wandb_keeps_what_the_trace_has_offline(tasks, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_SILENT", "true")
    with WandbLogger("digits", folder=tmp_path, config={"lr": 0.1}) as logger:
        trace = run(tasks, logger)
    (file,) = logger.folder.glob("*.wandb")
    kept = []
    for _ in range(100):  # its own process writes the file, to the end a moment after the run
        kept = [wandb_internal_pb2.Record.FromString(d) for d in records(file.read_bytes())]
        if kept and kept[-1].WhichOneof("record_type") == "exit":
            break
        time.sleep(0.1)
    found = {}
    for record in kept:
        items = {
            (item.key or "/".join(item.nested_key)): json.loads(item.value_json)
            for item in record.history.item
        }
        found |= {(name, items["task"]): value for name, value in items.items() if "seed" in name}
    for seed in SEEDS:
        for (name, task), value in expected(trace, seed).items():
            assert found[f"seed {seed}/{name}", task] == pytest.approx(value, abs=1e-12)


def test_several_observers_are_told_in_order():
    told = []
    tell = several(lambda p: told.append(("first", p)), lambda p: told.append(("second", p)))
    progress = Progress((0,), 1, 1, 1, 1, 1.0, None, [[float("nan")]])
    tell(progress)
    assert told == [("first", progress), ("second", progress)]


def test_nothing_is_new_before_a_task_was_evaluated():
    measurements = Measurements()
    nan = float("nan")
    assert list(measurements.new(Progress((0,), 1, 2, 1, 3, 0.1, None, [[nan, nan]]))) == []
    (new,) = measurements.new(Progress((0,), 1, 2, 3, 3, 0.5, 90.0, [[90.0, nan]]))
    assert new == (0, 1, {"accuracy/task 1": 90.0, "average accuracy": 90.0, "forgetting": 0.0})


def test_a_missing_package_is_one_sentence():
    with pytest.raises(ConfigError, match="needs no-such-thing: pip install no-such-thing"):
        package("no_such_thing", "no-such-thing")
