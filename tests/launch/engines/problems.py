"""Small runs for engines, and what it means that two traces are the same."""

import os
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from forgetless import load_trace
from forgetless.launch.engines import Engine, Event, InProcess, Order, train
from forgetless.launch.runs import resolve
from forgetless.support.files import LOCK, _owner

# Long enough for a worker to be killed half way, short enough for two cores.
SETTINGS = {"tasks": 3, "epochs": 2, "train_per_class": 10, "memory": 5, "device": "cpu"}


def order(folder: Path, method: str = "ogd", seeds: str = "2", **settings) -> Order:
    """A run on digits, with a checkpoint after every step."""
    options = {"keep": settings.pop("keep", "all"), "resume": settings.pop("resume", None)}
    config = resolve("rotated-digits", method, seeds=seeds, **SETTINGS | settings)
    name = f"rotated-digits {method}"
    return Order(name, config, folder, checkpoint_every=1e-9, **options)


def trained(orders: list[Order], engine: Engine | None = None, watch=lambda event: None):
    """Train runs; what broke each, by its folder's name."""
    return {o.folder.name: error for o, error in train(orders, engine or InProcess(), watch)}


def assert_alike(found: Path, expected: Path) -> None:
    """Two folders of runs hold the same, bit for bit, apart from how long it took."""
    one, other = load_trace(found), load_trace(expected)
    np.testing.assert_array_equal(one.accuracy, other.accuracy)
    assert (one.seeds, one.tasks, one.config) == (other.seeds, other.tasks, other.config)
    assert (one.status, one.versions) == (other.status, other.versions)
    assert one.timings.keys() == other.timings.keys()
    files = {f.relative_to(expected) for f in expected.rglob("*") if f.is_file()}
    assert {f.relative_to(found) for f in found.rglob("*") if f.is_file()} == files
    for file in (f for f in files if f.suffix == ".safetensors"):
        kept, wanted = load_file(found / file), load_file(expected / file)
        assert kept.keys() == wanted.keys()
        for name, array in wanted.items():
            np.testing.assert_array_equal(kept[name], array, err_msg=f"{file} {name}")


class Pretended:
    """An engine of several workers that does all in this process, for what is not about those."""

    workers = 2
    divides = True
    device = InProcess.device
    execute = InProcess.execute


class Events(list[Event]):
    """All that a watcher was told."""

    def __call__(self, event: Event) -> None:
        self.append(event)

    def kinds(self) -> list[str]:
        return [event.kind for event in self if event.kind != "progress"]


def holder_of(folder: Path, seconds: float = 60.0) -> int:
    """The process that writes a folder, once there is one."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pid, _ = _owner(folder / LOCK)
        if pid is not None and pid != os.getpid():
            return pid
        time.sleep(0.01)
    raise AssertionError(f"nobody writes {folder}")
