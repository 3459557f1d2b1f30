"""Searches from Python: what is chosen, and that an interrupted one resumes."""

import json

import numpy as np
import pytest
import torch

from forgetless import EWC, SGD, ConfigError, TraceError, fit, scenario
from forgetless.data.held_out import HeldOutTasks
from forgetless.launch.search import SEARCH_FILE, held_out_images, load_search, tune
from forgetless.trace import average_accuracy
from forgetless.training.learner import Learner
from forgetless.training.settings import Training
from tests.conftest import blobs

QUICK = {"tasks": 2, "epochs": 1, "train_per_class": 20, "validation_per_class": 5}
GRID = {"lr": (0.02, 0.1), "ewc_strength": (10.0, 100.0)}


def search(**options):
    return tune("rotated-digits", ["sgd", "ewc"], **{"grid": GRID, **QUICK, **options})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished search, and its file."""
    folder = tmp_path_factory.mktemp("whole")
    return search(out=folder), folder / SEARCH_FILE


def without_seconds(file):
    record = json.loads(file.read_text())
    for trial in record["trials"]:
        del trial["seconds"]
    return record


def test_the_choice_is_the_best_of_runs_by_hand(whole):
    """On the same held-out images, with the same seeds."""
    found, _ = whole
    tasks = scenario("rotated-digits", **{k: v for k, v in QUICK.items() if k != "epochs"})
    assert tasks.measured_on == "validation"
    scores = {}
    for lr in GRID["lr"]:
        for strength in GRID["ewc_strength"]:
            training = Training(lr=lr, epochs=1)
            trace = fit(tasks, EWC(strength=strength), seeds=(100, 101), training=training)
            scores[lr, strength] = average_accuracy(trace.accuracy)
    for trial in (t for t in found.trials if t.method == "ewc"):
        expected = scores[trial.settings["lr"], trial.settings["ewc_strength"]]
        assert trial.average_accuracy == pytest.approx(expected, abs=1e-4)
    best = max(scores, key=lambda settings: scores[settings].mean())
    choice = found.best["ewc"]
    assert (choice.training.lr, choice.method) == (best[0], EWC(strength=best[1]))
    assert choice.training.epochs == 1
    assert choice.score == pytest.approx(np.mean(scores[best]), abs=1e-4)


def test_a_choice_feeds_fit(whole, digits):
    choice = whole[0].best["sgd"]
    trace = fit(digits, choice.method, training=choice.training)
    assert (trace.config["lr"], trace.config["epochs"]) == (choice.settings["lr"], 1)


def test_the_file_says_all_and_is_read_again(whole):
    found, file = whole
    again = load_search(file)
    assert again.as_text() == found.as_text() == file.read_text()
    assert again.best == found.best
    record = json.loads(file.read_text())
    assert record["status"] == "complete"
    assert record["protocol"]["seeds"] == [100, 101]
    assert record["settings"]["validation_per_class"] == 5
    assert record["made_with"][0]["code"]
    assert record["best"]["sgd"]["limits"] == ["lr 0.1 is the largest value tried"]
    assert len(record["trials"]) == 6
    assert sorted(f.name for f in file.parent.iterdir()) == [SEARCH_FILE]


@pytest.mark.parametrize("number", [1, 4])
def test_an_interrupted_search_resumes_to_the_same_file(number, whole, tmp_path, monkeypatch):
    plain, left = Learner.consolidate, [number]

    def consolidate(self, split, task):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        plain(self, split, task)

    monkeypatch.setattr(Learner, "consolidate", consolidate)
    with pytest.raises(KeyboardInterrupt):
        search(out=tmp_path)
    assert load_search(tmp_path).status == "unfinished"
    trained = []
    search(out=tmp_path, on_trial=lambda trial, done, total: trained.append((done, total)))
    assert trained[-1] == (6, 6)
    assert len(trained) == 6 - (number - 1) // 2  # those before it are not trained again
    assert without_seconds(tmp_path / SEARCH_FILE) == without_seconds(whole[1])
    search(out=tmp_path, on_trial=lambda *of: pytest.fail("it is complete"))


def test_another_search_is_not_mixed_in(whole):
    folder = whole[1].parent
    before = whole[1].read_text()
    for other, words in (
        ({"seeds": (1, 2)}, "seeds is .100, 101. there and .1, 2. here"),
        ({"epochs": 2}, "--epochs is 1 there and 2 here"),
        ({"grid": {"lr": (0.1,)}}, "sgd searched is"),
        ({"extend": True}, "extend is False there and True here"),
    ):
        with pytest.raises(TraceError, match=words):
            search(out=folder, **other)
    assert whole[1].read_text() == before


def test_what_diverges_is_noted_and_is_no_choice(tmp_path):
    found = tune("rotated-digits", ["sgd"], grid={"lr": (0.1, 1e30)}, out=tmp_path, **QUICK)
    assert found.best["sgd"].settings == {"lr": 0.1}
    assert "a smaller learning rate than 1e+30" in found.trials[1].error
    again = tune(
        "rotated-digits", ["sgd"], grid={"lr": (0.1, 1e30)}, out=tmp_path, **QUICK,
        on_trial=lambda *of: pytest.fail("known to diverge"),
    )  # fmt: skip
    assert again.best == found.best
    assert tune("rotated-digits", ["sgd"], grid={"lr": (1e30,)}, **QUICK).best == {}


def test_tpe_resumes_to_the_same_file(tmp_path, monkeypatch):
    pytest.importorskip("optuna")
    options = {"sampler": "tpe", "trials": 7, "grid": {"lr": (0.01, 0.2)}}
    search(out=tmp_path / "a", **options)
    count = [0]

    def stop(trial, done, total):
        count[0] += 1
        if done == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(out=tmp_path / "b", on_trial=stop, **options)
    search(out=tmp_path / "b", on_trial=stop, **options)
    assert count[0] == 14
    a, b = (without_seconds(tmp_path / n / SEARCH_FILE) for n in "ab")
    assert a == b
    assert a["protocol"] == {"seeds": [100, 101], "validation_per_class": 5,
                             "sampler": "tpe", "trials": 7}  # fmt: skip


def test_tasks_and_a_model_of_ones_own(tmp_path):
    tasks = blobs(tasks=2, n=30)
    net = lambda: torch.nn.Linear(6, 3)  # noqa: E731
    found = tune(tasks, [SGD(), EWC(strength=5.0)], model=net, epochs=2, out=tmp_path)
    assert list(found.methods["ewc"]["searched"]) == ["lr"]
    assert found.best["ewc"].method == EWC(strength=5.0)
    held_out = HeldOutTasks(tasks, found.protocol["validation_per_class"])
    trace = fit(held_out, SGD(), net, seeds=(100, 101), training=found.best["sgd"].training)
    score = average_accuracy(trace.accuracy)
    assert found.best["sgd"].trial.average_accuracy == pytest.approx(score, abs=1e-4)
    with pytest.raises(TraceError, match="their data differ; choose another folder"):
        tune(blobs(tasks=2, n=30, seed=1), [SGD(), EWC(strength=5.0)], model=net, epochs=2,
             grid={"lr": (0.001, 0.003, 0.01, 0.03, 0.1)}, out=spoiled(tmp_path))  # fmt: skip


def spoiled(folder):
    """The folder, with one trial less."""
    file = folder / SEARCH_FILE
    lines = file.read_text().splitlines()
    del lines[next(n for n, line in enumerate(lines) if '"method": "sgd"' in line)]
    file.write_text("\n".join(lines))
    return folder


def test_held_out_samples_are_training_samples_and_no_others():
    tasks = blobs(tasks=2, n=30)
    held_out = HeldOutTasks(tasks, 3, seed=1)
    assert (held_out.measured_on, tasks.measured_on) == ("validation", "test")
    for t in range(2):
        train, part = tasks.task(t, (0,)).train, held_out.task(t, (0,))
        assert torch.bincount(part.test.labels).tolist() == [3, 3, 3]
        both = torch.cat([part.train.inputs, part.test.inputs])
        assert torch.equal(both.sort(0).values, train.inputs.sort(0).values)
    again = HeldOutTasks(tasks, 3, seed=1).task(0, (0,)).test.inputs
    assert torch.equal(again, held_out.task(0, (0,)).test.inputs)
    assert not torch.equal(again, HeldOutTasks(tasks, 3, seed=2).task(0, (0,)).test.inputs)
    with pytest.raises(ConfigError, match="less than the 10 training samples of class 0 in task 1"):
        HeldOutTasks(tasks, 10).task(0, (0,))


def test_how_many_images_are_held_out():
    assert held_out_images("rotated-mnist", 1000) == 100
    assert held_out_images("split-cifar100", 0) == 50
    assert held_out_images("split-digits", 0) == 20
    assert held_out_images("split-digits", 20) == 4
    assert held_out_images("split-digits", 3) == 1


def test_mistakes_are_one_sentence():
    for call, words in (
        (lambda: search(validation_per_class=0), "a search never measures on the test set"),
        (lambda: search(grid={"gpm:lr": (1,)}), "must be one of sgd, ewc, not 'gpm'"),
        (lambda: search(grid={"nope": (1,)}), "no option that can be searched of sgd, ewc"),
        (lambda: search(grid={"lr": ()}), "one or more values"),
        (lambda: search(seeds=(1, 1)), "distinct seeds"),
        (lambda: search(trials=3), "only for --sampler tpe"),
        (lambda: search(sampler="tpe", extend=True), "only for --sampler grid"),
        (lambda: search(sampler="random"), "grid or tpe"),
        (lambda: tune(blobs(), ["sgd"], jobs=2), "1 for tasks that a script made"),
        (lambda: tune("rotated-digits", []), "one or more different methods"),
    ):
        with pytest.raises(ConfigError, match=words):
            call()
