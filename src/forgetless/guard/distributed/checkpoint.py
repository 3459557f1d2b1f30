"""A guard's state on disk, written and read by all processes that train a model together.

`torch.distributed.checkpoint` writes it in safetensors' format: each process writes its own part,
the folder cannot run code, and any number of processes can load it.
"""

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from forgetless.guard import Guard
from forgetless.support.collectives import reason_of
from forgetless.support.validation import ConfigError, DataError, ForgetlessError, RankError

_WRITING, _BEFORE = ".writing", ".before"


def save_guard(guard: Guard, folder: str | Path) -> None:
    """Write a guard's state; every process that trains the model calls it.

    The folder appears when it is complete, and replaces an earlier one only then.

    Arguments:
        guard: the guard.
        folder: the same on every process, on a disk that all can reach.
    """
    folder = Path(folder)
    writing, before = (folder.with_name(folder.name + end) for end in (_WRITING, _BEFORE))
    checkpoint, group = _checkpoint(), None if guard.ranks is None else guard.ranks.group
    first = guard.ranks is None or guard.ranks.rank == 0
    if first:
        shutil.rmtree(writing, ignore_errors=True)
    writer = checkpoint.HuggingFaceStorageWriter(str(writing), save_distributed=True)
    try:
        _wait_for_all(guard)
        with _without_warning():
            checkpoint.save(
                guard.state_dict(),
                storage_writer=writer,
                process_group=group,
                no_dist=group is None,
            )
        if first:
            shutil.rmtree(before, ignore_errors=True)
            if folder.exists():
                folder.rename(before)
            writing.rename(folder)
            shutil.rmtree(before, ignore_errors=True)
        _wait_for_all(guard)
    except ForgetlessError:
        raise
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error}") from error
    except (RuntimeError, checkpoint.api.CheckpointException) as error:
        raise _failure(guard, folder, "written", error) from error


def load_guard(guard: Guard, folder: str | Path) -> None:
    """Continue from what `save_guard` wrote, with any number of processes.

    Arguments:
        guard: a guard of the same model and method, sharded in any way or not at all.
        folder: the folder.
    """
    folder = Path(folder)
    if not folder.exists() and folder.with_name(folder.name + _BEFORE).exists():
        # The process that replaced it ended half way.
        folder = folder.with_name(folder.name + _BEFORE)
    if not folder.is_dir():
        raise DataError(f"there is no checkpoint of a guard at {folder}")
    checkpoint, group = _checkpoint(), None if guard.ranks is None else guard.ranks.group
    reader = checkpoint.HuggingFaceStorageReader(str(folder))
    try:
        found = reader.read_metadata().state_dict_metadata
        tensors = {
            name: guard.template(name, one.size, one.properties.dtype)
            for name, one in found.items()
        }
        if not tensors:
            raise DataError(f"there is no checkpoint of a guard at {folder}")
        with _without_warning():
            checkpoint.load(
                tensors, storage_reader=reader, process_group=group, no_dist=group is None
            )
    except ForgetlessError:
        raise
    # Errors of safetensors, the checkpoint and the group have no other common base.
    except (Exception, checkpoint.api.CheckpointException) as error:
        raise _failure(guard, folder, "read", error) from error
    guard.load_state_dict(tensors)


def _checkpoint() -> Any:
    import torch.distributed.checkpoint as checkpoint

    if not hasattr(checkpoint, "HuggingFaceStorageWriter"):
        raise ConfigError(
            "checkpoints of a guard need a PyTorch that writes safetensors by "
            f"torch.distributed.checkpoint, which {torch.__version__} does not"
        )
    return checkpoint


@contextmanager
def _without_warning() -> Iterator[None]:
    """Without torch's warning that there is only one process, which may be meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _wait_for_all(guard: Guard) -> None:
    """Wait until every process has come here."""
    if guard.ranks is not None:
        guard.ranks.sum(torch.zeros(1))


def _failure(guard: Guard, folder: Path, what: str, error: BaseException) -> ForgetlessError:
    """The error of the process that failed, in one sentence."""
    several: dict[int, Any] = getattr(error, "failures", {})
    for found, _ in several.values():
        error = found
    alone = guard.ranks is None or not isinstance(error, RuntimeError)
    kind = DataError if alone else RankError
    return kind(f"the checkpoint of a guard at {folder} cannot be {what}: {reason_of(error)}")
