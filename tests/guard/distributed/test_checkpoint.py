"""A process that dies ends the others with a clear error, and the last checkpoint is good."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.nn.functional import cross_entropy

from forgetless import DataError
from forgetless.guard.distributed.checkpoint import load_guard, save_guard

from .cases import CASES, loader, started, steps, task, weights
from .works import continued, first_half, second_half
from .worlds import ended, processes

LIMIT = timedelta(seconds=20)
BY_NAME = {case.name: case for case in CASES}


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _two_tasks(rank, folder, case):
    """Learned, and the guard's memory and the weights written."""
    model, optimizer, guard = started(case, alone=False)
    for number in (0, 1):
        steps(case, model, optimizer, number, 3, alone=False)
        guard.end_task(loader(case, number, alone=False))
    save_guard(guard, folder / "guard")
    half = weights(model)
    if rank == 0:
        save_file({"half": half}, folder / "half.safetensors")
    return model, optimizer, guard


def dies_before_a_step(rank, folder, name):
    case = BY_NAME[name]
    model, optimizer, _ = _two_tasks(rank, folder, case)
    x, y = task(case, 2).tensors
    cross_entropy(model(x), y).backward()
    if rank == 1:
        _die()
    (folder / "waiting-since").write_text(str(time.time()))
    optimizer.step()


def dies_while_saving(rank, folder, name):
    case = BY_NAME[name]
    _, _, guard = _two_tasks(rank, folder, case)
    if rank == 1:
        HuggingFaceStorageWriter.write_data = lambda *args: _die()
    (folder / "waiting-since").write_text(str(time.time()))
    save_guard(guard, folder / "guard")


def test_the_others_end_and_the_checkpoint_is_good(tmp_path):
    works = {"step": dies_before_a_step, "save": dies_while_saving}
    name = "fsdp-pca-sgd"
    worlds = {
        what: processes(2, tmp_path / what, work, name, limit=LIMIT) for what, work in works.items()
    }
    for what, world in worlds.items():
        folder = tmp_path / what
        codes = ended(world)
        over = time.time()
        assert codes == [1, -signal.SIGKILL], (what, codes)
        since = float((folder / "waiting-since").read_text())
        waited = (folder / "failed-0").stat().st_mtime - since
        assert waited < LIMIT.total_seconds() + 5, (what, waited, over)
        last = (folder / "failed-0").read_text().strip().splitlines()[-1]
        assert last.startswith("forgetless.support.validation.RankError: "), last
        assert "rank 0 of 2 has lost the others" in last or "cannot be written" in last
    case = BY_NAME[name]
    model, guard = first_half(case, alone=True)
    expected = second_half(case, model, guard, alone=True)
    for what in works:
        half = load_file(tmp_path / what / "half.safetensors")["half"]
        _, found = continued(case, tmp_path / what / "guard", half, alone=True)
        assert float((found - expected).abs().max()) <= 1e-11, what


def test_a_checkpoint_that_is_no_checkpoint_is_refused(tmp_path):
    case = BY_NAME["ddp-ogd"]
    _, guard = first_half(case, alone=True, save=tmp_path / "guard")
    before = guard.state_dict()
    with pytest.raises(DataError, match="there is no checkpoint"):
        load_guard(guard, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="there is no checkpoint"):
        load_guard(guard, tmp_path / "empty")
    (file,) = (tmp_path / "guard").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"guard cannot be read: .+"):
        load_guard(guard, tmp_path / "guard")
    for name, tensor in guard.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_an_interrupted_replacement_leaves_the_older_one(tmp_path):
    case = BY_NAME["ddp-ogd"]
    _, guard = first_half(case, alone=True, save=tmp_path / "guard")
    (tmp_path / "guard").rename(tmp_path / "guard.before")
    load_guard(guard, tmp_path / "guard")
    assert guard.tasks == 2
