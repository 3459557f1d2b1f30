"""A guard's memory on disk, written and read by all processes that train a model together.

`torch.distributed.checkpoint` does the work, with safetensors as its format: each process writes
its own part, nothing in the folder can run code, and it can be loaded on any number of processes.
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
from forgetless.support.errors import ConfigError, DataError, ForgetlessError, RankError

_WRITING, _BEFORE = ".writing", ".before"


def save_guard(guard: Guard, folder: str | Path) -> None:
    """Write what a guard remembers; every process that trains the model calls it.

    The folder appears when it is complete. One that was there is replaced, and stays if this
    fails.

    Arguments:
        guard: the guard.
        folder: where to, the same on every process, on a disk that all can reach.
    """
    folder = Path(folder)
    writing, before = (folder.with_name(folder.name + end) for end in (_WRITING, _BEFORE))
    checkpoint, group = _checkpoint(), None if guard.ranks is None else guard.ranks.group
    first = guard.ranks is None or guard.ranks.rank == 0
    if first:
        shutil.rmtree(writing, ignore_errors=True)
    writer = checkpoint.HuggingFaceStorageWriter(str(writing), save_distributed=True)
    try:
        _together(guard)
        with _alone_or_not():
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
        _together(guard)
    except ForgetlessError:
        raise
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error}") from error
    except (RuntimeError, checkpoint.api.CheckpointException) as error:
        raise _lost(guard, folder, "written", error) from error


def load_guard(guard: Guard, folder: str | Path) -> None:
    """Go on from what `save_guard` wrote, with as many processes as there are now.

    Arguments:
        guard: a guard of the same model and method, sharded in any way or not at all.
        folder: where from.
    """
    folder = Path(folder)
    if not folder.exists() and folder.with_name(folder.name + _BEFORE).exists():
        # The process that put the new one in its place ended half way.
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
        with _alone_or_not():
            checkpoint.load(
                tensors, storage_reader=reader, process_group=group, no_dist=group is None
            )
    except ForgetlessError:
        raise
    # Safetensors' errors, the checkpoint's own and the group's have no common base but these.
    except (Exception, checkpoint.api.CheckpointException) as error:
        raise _lost(guard, folder, "read", error) from error
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
def _alone_or_not() -> Iterator[None]:
    """One process alone is meant, and no reason to warn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _together(guard: Guard) -> None:
    """Wait until every process is here."""
    if guard.ranks is not None:
        guard.ranks.sum(torch.zeros(1))


def _lost(guard: Guard, folder: Path, what: str, error: BaseException) -> ForgetlessError:
    """The reason in one sentence, of whichever process failed."""
    several: dict[int, Any] = getattr(error, "failures", {})
    for found, _ in several.values():
        error = found
    alone = guard.ranks is None or not isinstance(error, RuntimeError)
    kind = DataError if alone else RankError
    return kind(f"the checkpoint of a guard at {folder} cannot be {what}: {reason_of(error)}")
