"""What this machine has of runs in shared storage, and what it puts there."""

import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from forgetless.launch.engines.job import Order
from forgetless.launch.engines.mirror import SAVED, Mirror
from forgetless.launch.engines.storage import ObjectStore
from forgetless.launch.runs import JOBS
from forgetless.support.errors import TraceError
from forgetless.trace import is_trace
from forgetless.trace.checkpoint import FolderLock

_TRACE = re.compile(r"(jobs/seeds-[0-9a-z-]{1,60}/)?trace\.json")
_KEPT = re.compile(r"seed-\d{1,9}/(task-\d{1,6}|memory)\.safetensors")
_POINTER = re.compile(rf"((?:jobs/seeds-[0-9a-z-]{{1,60}}/)?){SAVED}/pointer-\d{{6,9}}-.*")


def pull(order: Order) -> None:
    """Bring what says how far a run is: its traces, and the manifests of its checkpoints."""
    run = _storage(order)
    names = run.names()
    for name in filter(_TRACE.fullmatch, names):
        run.get(name, order.folder / name)
    for place in {m[1].rstrip("/") for m in map(_POINTER.fullmatch, names) if m}:
        storage = run.within(place) if place else run
        Mirror(order.folder / place, storage, run).fetch(only="checkpoint/manifest")


def collect(order: Order) -> None:
    """Bring all that finished jobs have left."""
    run = _storage(order)
    shutil.rmtree(order.folder, ignore_errors=True)
    for name in run.names():
        if _TRACE.fullmatch(name) or _KEPT.fullmatch(name):
            run.get(name, order.folder / name)


def settle(order: Order) -> None:
    """Put the trace that was made of all jobs there, and remove what it does not need."""
    run, seeds = _storage(order), order.config.seed_list()
    if not is_trace(order.folder):
        return
    run.replace(order.folder / "trace.json", "trace.json")
    own = {f"seed-{seed}" for seed in seeds} | {"trace.json"}
    for name in {name.split("/")[0] for name in run.names()} - own:
        run.remove_folder(name)
    run.remove_folder(JOBS)


@contextmanager
def brought_here(url: str) -> Iterator[Path]:
    """A folder of this machine for what is in shared storage; gone afterwards.

    Where the storage is a file system of this machine it is locked for the time; other kinds have
    no locks. Errors name the storage, not the folder.
    """
    storage = ObjectStore(url)
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="forgetless-"))
        folder = Path(scratch) / "out"
        if storage.path is not None:
            stack.enter_context(FolderLock(storage.path))
        try:
            yield folder
        except TraceError as error:
            if str(folder) not in str(error):
                raise
            raise TraceError(str(error).replace(str(folder), storage.name)) from error


def put_files(folder: Path, url: str, names: Iterable[str]) -> None:
    """Copy files of a folder to shared storage, those that are there."""
    storage = ObjectStore(url)
    for name in names:
        if (folder / name).is_file():
            storage.replace(folder / name, name)


def _storage(order: Order) -> ObjectStore:
    if order.storage is None:
        raise TraceError(f"{order.folder} is not in shared storage")
    return ObjectStore(order.storage)
