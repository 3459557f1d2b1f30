"""How far a run is: asked of folders in every state that a run can leave."""

import shutil

import pytest

from forgetless import OGD, SGD, Training, fit, load_trace
from forgetless.trace import JOBS, is_complete, run_status
from tests.conftest import blobs

TRAINING = Training(lr=0.05, epochs=1, batch_size=8)


class Stopped(Exception):
    """Ends a run from its observer."""


def ran(out, stop_in_task: int | None = None, **options):
    """A run of two seeds, stopped in the second seed's task if one is given."""

    def stop(progress):
        if progress.seeds == (1,) and progress.task == stop_in_task:
            raise Stopped

    options = {
        "method": SGD(),
        "seeds": 2,
        "training": TRAINING,
        "checkpoint_every": 1e-9,
    } | options
    method = options.pop("method")
    if stop_in_task is None:
        return fit(blobs(), method, out=out, **options)
    with pytest.raises(Stopped):
        fit(blobs(), method, out=out, observer=stop, **options)
    return None


CONFIG = ran(None).config


def test_an_empty_folder_holds_nothing(tmp_path):
    assert run_status(tmp_path / "none", CONFIG, [0, 1]).kind == "nothing"


def test_a_complete_run_and_what_makes_it_another(tmp_path):
    ran(tmp_path)
    assert run_status(tmp_path, CONFIG, [0, 1], "all").kind == "complete"
    other = run_status(tmp_path, CONFIG | {"lr": 0.1}, [0, 1])
    assert (other.kind, other.difference) == ("other", "lr is 0.05 there and 0.1 here")
    assert run_status(tmp_path, CONFIG, [0]).difference == "seeds is [0, 1] there and [0] here"
    ogd = ran(None, method=OGD(samples=3)).config
    assert run_status(tmp_path, ogd, [0, 1]).difference.startswith(
        "method is 'sgd' there and 'ogd'"
    )


def test_weights_that_are_wanted_must_be_there(tmp_path):
    trace = ran(tmp_path, keep="nothing")
    assert run_status(tmp_path, CONFIG, [0, 1]).kind == "complete"
    assert run_status(tmp_path, CONFIG, [0, 1], "nothing").kind == "complete"
    found = run_status(tmp_path, CONFIG, [0, 1], "weights")
    assert (found.kind, found.difference) == ("other", "its weights were not stored")
    assert run_status(tmp_path, CONFIG, [0, 1], "weights", has=lambda name: True).kind == "complete"
    assert is_complete(trace)
    assert not is_complete(trace, "all")
    trace.status = "interrupted"
    assert not is_complete(trace)


def test_an_unfinished_run_is_resumed_only_with_what_it_was_begun_with(tmp_path):
    ran(tmp_path, stop_in_task=2)
    assert run_status(tmp_path, CONFIG, [0, 1]).kind == "unfinished"
    assert run_status(tmp_path, CONFIG, [0, 1], "all").kind == "unfinished"
    found = run_status(tmp_path, CONFIG, [0, 1], "weights")
    assert (found.kind, found.difference) == ("other", "keep is 'all' there and 'weights' here")
    assert run_status(tmp_path, CONFIG | {"epochs": 2}, [0, 1]).kind == "other"
    for manifest in (tmp_path / "checkpoint").glob("manifest*"):
        manifest.write_text("{")
    assert run_status(tmp_path, CONFIG, [0, 1]).kind == "unfinished"  # `fit` says what is wrong
    shutil.rmtree(tmp_path / "checkpoint")
    assert run_status(tmp_path, CONFIG, [0, 1]).difference == "it has no checkpoint to resume from"


def test_seeds_that_train_apart_are_parts_of_their_run(tmp_path):
    ran(tmp_path / JOBS / "seeds-0", seeds=[0])
    assert run_status(tmp_path, CONFIG, [0, 1]).kind == "unfinished"
    assert run_status(tmp_path, CONFIG, [1]).kind == "other"
    assert run_status(tmp_path, CONFIG | {"lr": 1.0}, [0, 1]).kind == "other"
    ran(tmp_path / JOBS / "seeds-1", stop_in_task=2, seeds=[1])
    assert run_status(tmp_path, CONFIG, [0, 1]).kind == "unfinished"
    # A part that was killed before its first checkpoint begins again.
    shutil.rmtree(tmp_path / JOBS / "seeds-1" / "checkpoint")
    assert load_trace(tmp_path / JOBS / "seeds-1").status == "failed"
    assert run_status(tmp_path, CONFIG, [0, 1]).kind == "unfinished"
