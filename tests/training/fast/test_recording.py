"""Recorded steps do what single steps do: their logic on any machine, the recording on a GPU."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from forgetless import AGEM, EWC, GEM, OGD, PCAOGD, SGD, Joint, Training, fit, scenario
from forgetless.support.validation import TrainingError
from forgetless.training.fast.recording import Recorder, batches_of
from forgetless.training.sampling import batch_of
from tests.conftest import blobs
from tests.faults.problems import Plug, assert_same, small_run, stopped_run

TRAINING = Training(lr=0.05, epochs=3, batch_size=8, seeds_together=3)
METHODS = [SGD(), AGEM(6, 4), Joint(5), EWC(1.0), OGD(5), PCAOGD(4, 12), GEM(4)]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


class OnPaper:
    """A recording without a GPU: the steps are stored and taken when it is replayed."""

    def __init__(self, learner, split, task, batch_size, steps, earlier):
        self.learner, self.split, self.task = learner, split, task
        self.batch_size, self.steps = batch_size, steps
        self.choices = learner.sampler.blank(steps)

    def replay(self, index):
        sampler = self.learner.sampler
        if self.choices.numel():
            self.choices.copy_(sampler.take(self.steps))
        with sampler.handing_out(self.choices):
            for batch in batches_of(batch_of(self.split, index, self.task), self.batch_size):
                self.learner.update(batch)
        return self.learner.network.theta.isfinite().all(1)


class Refused(OnPaper):
    def __init__(self, *args):
        raise RuntimeError("not while recording")


class ShortOfMemory(OnPaper):
    """At first."""

    attempts = 0

    def __init__(self, *args):
        type(self).attempts += 1
        if self.attempts == 1:
            raise torch.OutOfMemoryError("not now")
        super().__init__(*args)


def recorded(monkeypatch, kind: type) -> None:
    """Let learners on a CPU record, in a way that a CPU can."""
    plain = Recorder.__init__

    def init(self, learner):
        plain(self, learner)
        self.active = True

    monkeypatch.setattr(Recorder, "__init__", init)
    monkeypatch.setattr("forgetless.training.fast.recording.Recording", kind)


def weights(trace):
    return [
        value
        for seed in trace.seeds
        for task in range(len(trace.tasks))
        for value in trace.weights(seed, task).values()
    ]


@pytest.mark.parametrize("kind", [OnPaper, Refused])
@pytest.mark.parametrize("samples", [84, 8])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_recorded_steps_are_the_same_steps(method, samples, kind, monkeypatch):
    """Same batches, same memory batches: ten batches of eight and one of four, or a single one."""
    tasks = blobs(tasks=3, n=samples)
    expected = fit(tasks, method, seeds=3, training=TRAINING)
    recorded(monkeypatch, kind)
    found = fit(tasks, method, seeds=3, training=TRAINING)
    assert all(map(torch.equal, weights(found), weights(expected)))


def test_what_is_left_of_an_epoch_is_one_recording(monkeypatch):
    lengths = []

    class Noted(OnPaper):
        def replay(self, index):
            lengths.append(index.shape[1] // TRAINING.batch_size)
            return super().replay(index)

    recorded(monkeypatch, Noted)
    fit(blobs(tasks=1, n=13 * TRAINING.batch_size), SGD(), training=replace(TRAINING, epochs=2))
    assert lengths == [8, 4, 8, 5]  # the first step is done by itself


def test_a_shortage_of_memory_does_not_end_recording(monkeypatch):
    recorded(monkeypatch, ShortOfMemory)
    fit(blobs(tasks=2, n=84), SGD(), training=TRAINING)
    # Of each task: eight steps, the one left in the first epoch, the two in others, the last four.
    assert ShortOfMemory.attempts == 1 + 2 * 4


def test_recordings_take_over_the_memory_of_earlier_ones(monkeypatch):
    made = []

    class Noted(OnPaper):
        def __init__(self, *args):
            super().__init__(*args)
            assert args[-1] is (made[-1] if made else None)
            made.append(self)

    recorded(monkeypatch, Noted)
    fit(blobs(tasks=2, n=84), SGD(), training=TRAINING)
    assert len(made) > 2


def test_weights_that_break_are_noticed_before_the_task_ends(monkeypatch):
    recorded(monkeypatch, OnPaper)
    monkeypatch.setattr("forgetless.training.learner._UNCHECKED", 4)
    wild = replace(TRAINING, lr=1e30, epochs=50)
    epochs = []
    with pytest.raises(TrainingError, match=r"by step \d+ of task 1, seed 3"):
        fit(
            blobs(tasks=2, n=84), SGD(), seeds=[3], training=wild,
            observer=lambda progress: epochs.append(progress.epoch),
        )  # fmt: skip
    assert max(epochs, default=0) < 5


def test_weights_that_broke_are_not_saved(monkeypatch, tmp_path):
    """A save that is due at the end of an epoch looks first."""
    recorded(monkeypatch, OnPaper)
    saved = []
    monkeypatch.setattr("forgetless.training.resume.Saver.due", lambda saver: True)
    monkeypatch.setattr(
        "forgetless.training.resume.Saver.save",
        lambda saver, position, learner: saved.append(learner.network.theta.clone()),
    )
    wild = replace(TRAINING, lr=1e30, epochs=50)
    with pytest.raises(TrainingError):
        fit(blobs(tasks=2, n=8), SGD(), seeds=[3], training=wild, out=tmp_path / "run")
    assert all(bool(theta.isfinite().all()) for theta in saved)


@pytest.mark.parametrize("steps", [4, 13])
def test_a_run_begun_without_recordings_goes_on_with_them(steps, monkeypatch, tmp_path):
    """As one that a CPU began and a GPU goes on with."""
    expected = small_run(None, AGEM(6, 4), device="cpu")
    with monkeypatch.context() as pulled:
        stopped_run(tmp_path / "run", Plug(pulled), steps, method=AGEM(6, 4), device="cpu")
    recorded(monkeypatch, OnPaper)
    assert_same(small_run(tmp_path / "run", AGEM(6, 4), device="cpu"), expected)


def test_recorded_steps_with_batch_norm_that_is_fixed_on_the_way(monkeypatch):
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))

    training = Training(lr=0.05, epochs=3, batch_size=8, seeds_together=2, eval_mode_after=13)
    tasks = blobs(tasks=2, n=81)
    expected = fit(tasks, AGEM(6, 4), network, seeds=2, training=training)
    recorded(monkeypatch, OnPaper)
    found = fit(tasks, AGEM(6, 4), network, seeds=2, training=training)
    assert all(map(torch.equal, weights(found), weights(expected)))


@needs_gpu
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
@pytest.mark.parametrize(
    ("name", "options"),
    [("rotated-digits", {}), ("split-digits", {}), ("split-digits", {"setting": "class"})],
    ids=["rotated", "split", "class-incremental"],
)
def test_a_gpu_that_repeats_recorded_steps_agrees_with_single_ones(
    method, name, options, monkeypatch
):
    tasks = scenario(name, tasks=3, train_per_class=60, **options)
    found = fit(tasks, method, seeds=3, training=TRAINING, device="cuda")
    plain = Recorder.__init__

    def init(self, learner):
        plain(self, learner)
        self.active = False

    monkeypatch.setattr(Recorder, "__init__", init)
    expected = fit(tasks, method, seeds=3, training=TRAINING, device="cuda")
    for ours, theirs in zip(weights(found), weights(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@needs_gpu
def test_convolutions_and_batch_norm_are_recorded():
    def network() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)
        )

    tasks = scenario("rotated-digits", tasks=2, train_per_class=30)
    trace = fit(tasks, OGD(5), network, seeds=2, training=TRAINING, device="cuda")
    batches = 2 * 3 * (300 // 8 + 1)
    assert trace.weights(0, 1)["1.num_batches_tracked"].item() == batches


@needs_gpu
def test_memory_of_recordings_does_not_grow_with_the_tasks():
    def network() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 64, 3, padding=1), nn.Flatten(), nn.Linear(4096, 10))

    peaks = []
    for tasks in (2, 8):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_reserved()
        several = scenario("rotated-digits", tasks=tasks, train_per_class=40)
        fit(several, AGEM(64, 256), network, seeds=3, training=TRAINING, device="cuda")
        peaks.append(torch.cuda.max_memory_reserved() - before)
    assert peaks[1] < 2 * peaks[0]
