"""Runs that go on: bit for bit what they would have been, and only where they belong."""

import importlib
import json
import time
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from forgetless import (
    AGEM,
    OGD,
    PCAOGD,
    SGD,
    Joint,
    TensorScenario,
    TraceError,
    fit,
    load_trace,
)
from forgetless.support.validation import ForgetlessWarning
from forgetless.trace.checkpoint import Store
from forgetless.training.learner import Learner
from tests.conftest import blobs
from tests.methods.test_all_methods import TABLE
from tests.methods.test_own_methods import METHODS as OWN

from .problems import (
    TRAINING,
    Plug,
    PulledPlug,
    assert_same,
    small_run,
    stopped_run,
    with_batch_norm,
    with_dropout,
)


@pytest.fixture
def plug(monkeypatch):
    return Plug(monkeypatch)


STOPS = {
    "first step": 1,
    "within an epoch": 4,
    "after an epoch": 3,
    "second task": 13,
    "second seed": 41,
}


@pytest.mark.parametrize("steps", STOPS.values(), ids=STOPS)
@pytest.mark.parametrize("method", TABLE.values(), ids=TABLE)
def test_every_method_goes_on_bit_for_bit(method, steps, plug, tmp_path):
    expected = small_run(None, method)
    stopped_run(tmp_path / "a", plug, steps, method=method)
    assert_same(small_run(tmp_path / "a", method), expected)


@pytest.mark.parametrize("steps", STOPS.values(), ids=STOPS)
@pytest.mark.parametrize("name", OWN)
def test_methods_from_outside_the_package_too(name, steps, plug, tmp_path):
    expected = small_run(None, OWN[name])
    stopped_run(tmp_path / "a", plug, steps, method=OWN[name])
    assert_same(small_run(tmp_path / "a", OWN[name]), expected)


@pytest.mark.parametrize("storage", ["bfloat16", "factored", "cpu"])
@pytest.mark.parametrize(
    "method", [OGD(6), PCAOGD(5, 12), PCAOGD(samples=12, variance=0.9)], ids=lambda m: m.name
)
def test_every_storage_goes_on_bit_for_bit(method, storage, plug, tmp_path):
    options = {"method": method, "training": replace(TRAINING, storage=storage)}
    expected = small_run(None, **options)
    stopped_run(tmp_path / "a", plug, 22, **options)
    assert_same(small_run(tmp_path / "a", **options), expected)


@pytest.mark.parametrize("steps", [4, 41])
def test_a_run_keeps_the_groups_of_seeds_with_which_it_was_begun(
    steps, plug, tmp_path, monkeypatch
):
    """Begun where seeds train one by one, it goes on where all would train together."""
    expected = small_run(None)
    stopped_run(tmp_path / "a", plug, steps)
    together = importlib.import_module("forgetless.training.fit")
    monkeypatch.setattr(together, "seed_groups", lambda seeds, *others: [tuple(seeds)])
    found = small_run(tmp_path / "a")
    assert_same(found, expected)
    assert found.status == "complete"


@pytest.mark.parametrize("model", [with_dropout, with_batch_norm])
def test_what_a_network_draws_and_notes_goes_on_too(model, plug, tmp_path):
    options = {"model": model, "training": replace(TRAINING, eval_mode_after=20)}
    expected = small_run(None, **options)
    stopped_run(tmp_path / "a", plug, 14, **options)
    assert_same(small_run(tmp_path / "a", **options), expected)


@pytest.mark.parametrize("steps", [3, 9, 22])
@pytest.mark.parametrize("method", [AGEM(6, 4), PCAOGD(5, 12)], ids=lambda m: m.name)
def test_a_frozen_start_that_was_cut_off_stays_so(method, steps, plug, tmp_path):
    frozen = replace(TRAINING, eval_mode_after=5, freeze="0.,1.")
    options = {"method": method, "model": with_batch_norm, "training": frozen}
    expected = small_run(None, **options)
    stopped_run(tmp_path / "a", plug, steps, **options)
    assert_same(small_run(tmp_path / "a", **options), expected)


def test_several_seeds_together_and_all_tasks_evaluated(plug, tmp_path):
    training = replace(TRAINING, seeds_together=2, evaluate="all")
    expected = small_run(None, training=training)
    stopped_run(tmp_path / "a", plug, 14, training=training)
    assert_same(small_run(tmp_path / "a", training=training), expected)


@pytest.mark.parametrize("steps", [9, 22])
def test_class_incremental_learning_goes_on(steps, plug, tmp_path):
    pairs = []
    for t in range(3):
        generator = torch.Generator().manual_seed(t)
        pairs.append((torch.randn(24, 6, generator=generator), torch.arange(24) % 2 + 2 * t))
    options = {"method": AGEM(6, 4), "tasks": [(pair, pair) for pair in pairs]}
    options["tasks"] = TensorScenario(options["tasks"], setting="class")
    expected = small_run(None, **options)
    stopped_run(tmp_path / "a", plug, steps, **options)
    assert_same(small_run(tmp_path / "a", **options), expected)


def test_stopped_again_and_again(plug, tmp_path):
    expected = small_run(None)
    for _ in range(7):
        stopped_run(tmp_path / "a", plug, 6)
    assert_same(small_run(tmp_path / "a"), expected)


@pytest.mark.parametrize("part", ["consolidate", "accuracy"])
def test_stopped_between_training_and_the_next_task(part, monkeypatch, tmp_path):
    expected, plain, left = small_run(None), getattr(Learner, part), [2]

    def fail(self, *args):
        left[0] -= 1
        if left[0] == 0:
            raise PulledPlug
        return plain(self, *args)

    monkeypatch.setattr(Learner, part, fail)
    with pytest.raises(PulledPlug):
        small_run(tmp_path / "a")
    assert_same(small_run(tmp_path / "a"), expected)


def test_without_checkpoints_within_tasks_it_goes_on_after_the_last_task(plug, tmp_path):
    expected = small_run(None)
    stopped_run(tmp_path / "a", plug, 13, checkpoint_every=60.0)
    manifest = Store(tmp_path / "a" / "checkpoint").manifest()
    assert manifest["position"] == {"group": 0, "task": 1, "consolidated": False}
    assert manifest["learner"]["steps"] == 9
    assert_same(small_run(tmp_path / "a", checkpoint_every=60.0), expected)


def test_a_finished_run_leaves_no_checkpoints_and_is_not_done_again(tmp_path):
    small_run(tmp_path / "a")
    assert sorted(f.name for f in (tmp_path / "a").iterdir()) == ["seed-0", "seed-1", "trace.json"]
    before = (tmp_path / "a" / "trace.json").read_bytes()
    with pytest.raises(TraceError, match="holds a trace already"):
        small_run(tmp_path / "a")
    assert (tmp_path / "a" / "trace.json").read_bytes() == before


def test_a_run_that_was_killed_just_when_it_was_done_counts_as_done(plug, tmp_path):
    stopped_run(tmp_path / "a", plug, 5)
    record = json.loads((small_run(tmp_path / "b").path / "trace.json").read_text())
    (tmp_path / "a" / "trace.json").write_text(json.dumps(record))
    with pytest.raises(TraceError, match="holds a trace already"):
        small_run(tmp_path / "a")


OTHERS = {
    "training": (
        {"training": replace(TRAINING, lr=0.1)},
        "lr is 0.05 there and 0.1 here",
    ),
    "method": ({"method": SGD()}, "method is 'ogd' there and 'sgd' here"),
    "hyperparameter": ({"method": OGD(samples=5)}, "memory is 4 there and 5 here"),
    "seeds": ({"seeds": 3}, "seeds is"),
    "what is kept": ({"keep": "weights"}, "keep is 'all' there and 'weights' here"),
    "tasks": ({"tasks": blobs(tasks=4)}, "tasks is 3 there and 4 here"),
    "data": ({"tasks": blobs(tasks=3, seed=1)}, "those of task 1 have changed"),
    "model": ({"model": lambda: nn.Linear(6, 3)}, "model is 'mlp' there and 'Linear' here"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_configuration_is_refused_and_nothing_is_lost(other, plug, tmp_path):
    change, message = OTHERS[other]
    expected = small_run(None)
    stopped_run(tmp_path / "a", plug, 14)
    before = {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()}
    with pytest.raises(TraceError, match=message) as caught:
        small_run(tmp_path / "a", **change)
    assert "\n" not in str(caught.value)
    after = {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()}
    changed = {f.name for f in before if after.get(f) != before[f]}
    assert changed <= {"trace.json"}  # says that it was tried
    assert_same(small_run(tmp_path / "a"), expected)


def test_overwriting_begins_anew(plug, tmp_path):
    stopped_run(tmp_path / "a", plug, 14)
    training = replace(TRAINING, lr=0.1)
    expected = small_run(None, training=training)
    assert_same(small_run(tmp_path / "a", training=training, overwrite=True), expected)


def test_a_change_of_versions_is_said_and_does_not_stop_it(plug, tmp_path, monkeypatch):
    stopped_run(tmp_path / "a", plug, 14)
    monkeypatch.setattr("forgetless.support.provenance.code_fingerprint", lambda: "another")
    with pytest.warns(ForgetlessWarning, match="was begun with code .* may differ in rounding"):
        small_run(tmp_path / "a")


def test_checkpoints_can_be_left_out(plug, tmp_path):
    stopped_run(tmp_path / "a", plug, 14, checkpoint_every=0.0)
    assert not (tmp_path / "a" / "checkpoint").exists()


def test_joint_training_does_not_write_all_data_at_every_checkpoint(plug, tmp_path):
    """The memory is written once a task, however many checkpoints there are."""
    stopped_run(tmp_path / "a", plug, 15, method=Joint(4))
    names = [f.name for f in (tmp_path / "a" / "checkpoint").iterdir()]
    progress = sorted(n for n in names if n.endswith("progress.safetensors"))
    memory = sorted(n for n in names if n.endswith("memory.safetensors"))
    assert progress[-1] > "part-000014"
    assert memory[-1] < "part-000012"


def checkpoints_of_a_run(tmp_path, monkeypatch, seconds=0.0):
    """How many checkpoints a run of three tasks writes, each taking that long."""
    written, plain = [], Store.write

    def write(store, body, parts):
        written.append(body["position"])
        plain(store, body, parts)
        time.sleep(seconds)

    monkeypatch.setattr(Store, "write", write)
    small_run(tmp_path / "a", seeds=1, checkpoint_every=60.0)
    return len(written)


def test_a_checkpoint_is_written_after_every_task_but_the_last(tmp_path, monkeypatch):
    assert checkpoints_of_a_run(tmp_path, monkeypatch) == 2


def test_a_large_memory_is_not_written_after_short_tasks(tmp_path, monkeypatch):
    """A checkpoint may take a tenth of the time between two."""
    monkeypatch.setattr("forgetless.training.resume._RATE", 1.0)
    assert checkpoints_of_a_run(tmp_path, monkeypatch) == 0


def test_a_slow_disk_is_noticed(tmp_path, monkeypatch):
    assert checkpoints_of_a_run(tmp_path, monkeypatch, seconds=0.4) == 1


def test_traces_in_memory_are_not_disturbed():
    tasks = TensorScenario([((torch.eye(2), torch.arange(2)),) * 2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fit(tasks, SGD(), nn.Linear(2, 2)).status == "complete"


def test_trace_says_that_it_is_unfinished(plug, tmp_path):
    stopped_run(tmp_path / "a", plug, 14)
    assert load_trace(tmp_path / "a").status == "failed"
