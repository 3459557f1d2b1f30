"""Runs divided into jobs and put together again, whoever carries them out."""

from dataclasses import replace
from pathlib import Path

import pytest

from forgetless import load_trace
from forgetless.launch.engines import InProcess, Processes, train
from forgetless.launch.engines.jobs import divide, execute_job
from forgetless.support.files import FolderLock
from forgetless.support.validation import ConfigError, TraceError, TrainingError

from .problems import Events, Pretended, assert_alike, order, trained


def test_finished_jobs_are_not_trained_again(tmp_path):
    """Stopped while traces were put together: some of the weights are moved already."""
    first, _ = divided_run(tmp_path / "ogd")
    (first / "seed-0").rename(tmp_path / "ogd" / "seed-0")
    events = Events()
    assert trained([order(tmp_path / "ogd")], Pretended(), events) == {"ogd": None}
    assert not [e for e in events if e.progress]
    assert trained([order(tmp_path / "whole")]) == {"whole": None}
    assert_alike(tmp_path / "ogd", tmp_path / "whole")


def divided_run(folder: Path) -> list[Path]:
    """A run whose jobs are all finished and not put together."""
    jobs = divide(order(folder), Pretended())
    for job in jobs:
        execute_job(job)
    return [job.folder for job in jobs]


def test_a_run_that_diverges_ends_as_in_one_process(tmp_path):
    settings = {"ewc_strength": 1e30, "epochs": 3, "seeds": "2"}
    (here,) = trained([order(tmp_path / "a", "ewc", **settings)]).values()
    (there,) = trained([order(tmp_path / "b", "ewc", **settings)], Pretended()).values()
    assert type(here) is type(there) is TrainingError
    assert str(here) == str(there)
    found, wanted = load_trace(tmp_path / "b"), load_trace(tmp_path / "a")
    assert found.status == wanted.status == "failed"
    assert found.summary()["accuracy"] == wanted.summary()["accuracy"]
    assert not (tmp_path / "b" / "jobs").exists()


def test_replacing_waits_until_the_settings_are_known_to_be_good(tmp_path):
    assert trained([order(tmp_path / "a")], Pretended()) == {"a": None}
    before = {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()}
    bad = order(tmp_path / "a", resume=False, freeze="zzz")
    assert isinstance(trained([bad], Pretended())["a"], ConfigError)
    assert {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()} == before
    other = order(tmp_path / "a", resume=False, epochs=1)
    assert trained([other], Pretended()) == {"a": None}
    assert load_trace(tmp_path / "a").config["epochs"] == 1
    assert not (tmp_path / "a" / "jobs").exists()


def test_two_commands_on_one_folder_the_second_is_refused(tmp_path):
    with FolderLock(tmp_path / "a"), pytest.raises(TraceError, match="is being written by process"):
        trained([order(tmp_path / "a")], Pretended())
    assert not (tmp_path / "a").exists()


def test_a_budget_by_what_is_free_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--budget auto takes a share"):
        trained([order(tmp_path / "a", budget="auto")], Pretended())


def test_a_budget_is_decided_once_for_all_seeds(tmp_path):
    events, wanted = Events(), order(tmp_path / "a", budget="200kB", seeds_together=2, seeds="3")
    assert trained([wanted], Pretended(), events) == {"a": None}
    assert events.kinds() == ["queued", "begun", "finished"]


def test_the_longest_begin_first(tmp_path):
    events = Events()
    sizes = {"a": 1.0, "b": 3.0, "c": 2.0}
    runs = [
        replace(order(tmp_path / n, "sgd", "1", epochs=1, tasks=2), size=s)
        for n, s in sizes.items()
    ]
    assert len(trained(runs, Pretended(), events)) == 3
    begun = [e.job.folder.name for e in events if e.kind == "begun"]
    assert begun == ["b", "c", "a"]


def test_no_runs_are_no_work():
    assert list(train([], Processes(4), lambda event: None)) == []
    with pytest.raises(ConfigError, match="--jobs must be a number of jobs at a time"):
        Processes(0)


def test_groups_of_seeds_are_those_that_train_together(tmp_path):
    def seeds(**settings):
        return [job.seeds for job in divide(order(tmp_path, **settings), Pretended())]

    assert seeds(seeds="3") == [(0,), (1,), (2,)]
    assert seeds(seeds="3,5,9,4,1", seeds_together=2) == [(3, 5), (9, 4), (1,)]
    assert seeds(seeds="3", seeds_together=3) == [(0, 1, 2)]
    jobs = divide(order(tmp_path, seeds="3", seeds_together=2), Pretended())
    assert [job.size for job in jobs] == pytest.approx([2 / 3, 1 / 3])
    assert [job.name for job in jobs] == [
        "rotated-digits ogd seed 0,1",
        "rotated-digits ogd seed 2",
    ]
    assert len(divide(order(tmp_path, seeds="3"), InProcess())) == 1


def test_seeds_in_groups_of_two_are_the_same_apart(tmp_path):
    settings = {"seeds": "3", "seeds_together": 2}
    assert trained([order(tmp_path / "a", **settings)]) == {"a": None}
    assert trained([order(tmp_path / "b", **settings)], Pretended()) == {"b": None}
    assert_alike(tmp_path / "b", tmp_path / "a")


def test_of_weights_that_are_wanted_now_and_were_not_kept_the_run_is_trained(tmp_path):
    whole = order(tmp_path / "a", "sgd", "1", keep="nothing")
    assert trained([whole]) == {"a": None}
    events = Events()
    assert trained([replace(whole, keep="weights")], InProcess(), events) == {"a": None}
    assert [e for e in events if e.progress]
    assert (tmp_path / "a/seed-0/task-03.safetensors").is_file()
