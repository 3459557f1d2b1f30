"""Memory that does not suffice: said with numbers, or seen to beforehand."""

import json
import re

import pytest
import torch
from torch import nn

from forgetless import AGEM, OGD, PCAOGD, ConfigError, Training, fit
from forgetless.cli import main
from forgetless.launch.runs import resolve
from forgetless.subspace import DENSE, FACTORED, STORAGES
from forgetless.subspace.storage import Footprint
from forgetless.support.validation import MemoryShortageError
from forgetless.training.fit import few_features
from forgetless.training.learner import Learner
from tests.conftest import blobs

CPU = torch.device("cpu")


def network() -> nn.Module:
    first, second = nn.Linear(6, 40), nn.Linear(40, 40)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(40, 3))


def test_what_is_foretold_is_what_is_kept(monkeypatch):
    sizes, plain = [], Learner.consolidate

    def consolidate(self, split, task):
        plain(self, split, task)
        sizes.append(self.state.nbytes)

    monkeypatch.setattr(Learner, "consolidate", consolidate)
    for method in (OGD(6), PCAOGD(5, 12)):
        for name in ("dense", "bfloat16", "factored"):
            sizes.clear()
            training = Training(lr=0.05, epochs=1, storage=name)
            fit(blobs(tasks=3), method, network, training=training)
            learner_needs = _footprint(method)
            assert sizes[-1] <= learner_needs.bytes(STORAGES[name])
            assert sizes[-1] >= 0.5 * learner_needs.bytes(STORAGES[name])


def _footprint(method) -> Footprint:
    from forgetless.training.build import make_learner

    tasks = blobs(tasks=3)
    learner = make_learner(tasks, method, network, (0,), Training(), None, CPU)
    split = tasks.task(0, [0]).train
    return Footprint.of(few_features(learner, split), method.demand(len(split)), tasks=3)


@pytest.mark.parametrize("together", [1, 2])
def test_a_run_keeps_as_many_samples_as_fit(together):
    training = Training(lr=0.05, epochs=1, budget="5kB", seeds_together=together)
    trace = fit(blobs(tasks=3), OGD(6), network, seeds=2, training=training)
    chosen = trace.outcome["storage"]
    found = re.fullmatch(r"factored samples, (\d+) of 18 directions", chosen)
    assert found, chosen
    assert 1 < int(found[1]) < 18
    for seed in (0, 1):
        assert len(trace.state(seed)["factor"]) == int(found[1])


def test_a_budget_chooses_for_a_run_and_a_run_that_goes_on_keeps_to_it(tmp_path, monkeypatch):
    tasks, training = blobs(tasks=3), Training(lr=0.05, epochs=1, budget="25kB")
    trace = fit(tasks, OGD(6), network, training=training, out=tmp_path / "a")
    assert trace.outcome["storage"] == "factored samples"
    assert "features.layout" in trace.state(0)
    few = Training(lr=0.05, epochs=1, budget="5kB")
    trace = fit(tasks, PCAOGD(6, 20), network, training=few)
    assert trace.outcome["storage"] == "dense rows in bfloat16, 1 of 18 directions"
    assert trace.state(0)["directions"].shape[0] == 1
    calls, plain = [0], Learner.consolidate

    def fail(self, *args):
        calls[0] += 1
        if calls[0] == 2:
            raise RuntimeError("pulled")
        plain(self, *args)

    monkeypatch.setattr(Learner, "consolidate", fail)
    auto = Training(lr=0.05, epochs=1, budget="auto")
    with pytest.raises(RuntimeError, match="pulled"):
        fit(tasks, OGD(6), network, training=auto, out=tmp_path / "b")
    # There is less room now, and still the run goes on as it began.
    monkeypatch.setattr("forgetless.training.fit.budget_of", lambda *_: 6000.0)
    trace = fit(tasks, OGD(6), network, training=auto, out=tmp_path / "b")
    assert "directions" in trace.state(0)


def test_methods_without_directions_need_no_budget():
    trace = fit(blobs(), AGEM(4, 2), training=Training(epochs=1, budget="1kB"))
    assert trace.outcome == {}


@pytest.mark.parametrize("method", [OGD(6), AGEM(4, 2)], ids=lambda m: m.name)
def test_out_of_memory_is_one_sentence_with_numbers(method, monkeypatch):
    def full(self, *args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.\nMore.")

    monkeypatch.setattr(Learner, "consolidate", full)
    with pytest.raises(
        MemoryShortageError, match="not enough memory in task 1: CUDA out"
    ) as caught:
        fit(blobs(), method, network, training=Training(epochs=1))
    text = str(caught.value)
    assert "\n" not in text
    if isinstance(method, OGD):
        assert "12 directions take 99.2 kB as dense rows" in text
        assert "storage factored" in text
        assert "storage bfloat16" in text
        assert "budget auto picks a storage" in text
    else:
        assert "batch_size" in text


def test_other_errors_stay_what_they_are(monkeypatch):
    def wrong(self, *args):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(Learner, "consolidate", wrong)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        fit(blobs(), OGD(6), network, training=Training(epochs=1))


def test_a_budget_on_the_command_line_is_a_size_or_auto(capsys, tmp_path, monkeypatch):
    for text in ("auto", "4GB"):
        config = resolve("rotated-digits", "ogd", budget=text)
        assert (config.options["memory"], config.budget) == (100, text)
    for count in ("7", "4GB", 1.5, -3):
        with pytest.raises(ConfigError, match="--memory must be a whole number of at least 1"):
            resolve("rotated-digits", "ogd", memory=count)
    monkeypatch.chdir(tmp_path)
    quick = ["--tasks", "2", "--epochs", "1", "--train-per-class", "10", "--json"]
    with pytest.raises(SystemExit) as stopped:
        main(["run", "rotated-digits", "--method", "ogd", "--budget", "auto", *quick])
    assert stopped.value.code == 0
    assert json.loads(capsys.readouterr().out)["outcome"]["storage"] == "dense rows"


def test_the_guard_chooses_by_the_same_estimate():
    from forgetless.guard.state import chosen_storage

    for method in (OGD(5), PCAOGD(3, 500)):
        phi = _phi()
        found = Footprint.of(phi, method.demand())
        smaller = FACTORED if found.bytes(FACTORED) < found.bytes(DENSE) else DENSE
        assert chosen_storage(phi, method) == smaller


def _phi():
    from forgetless import tangent_features

    return tangent_features(network(), torch.randn(4, 6), torch.arange(4) % 3)
