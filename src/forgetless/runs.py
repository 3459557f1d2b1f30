"""From a configuration to a trace: the flow behind `forgetless run` and `forgetless compare`."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from forgetless.config import Config, resolve
from forgetless.data import Scenario, build_scenario
from forgetless.errors import TraceError
from forgetless.fit import Keep, fit
from forgetless.methods import build_method
from forgetless.models import build_model
from forgetless.trace import Trace, is_trace
from forgetless.training import Observer

COMPARISON = "comparison.json"


def scenario(name: str, *, data: str | Path | None = None, **options: Any) -> Scenario:
    """A benchmark by its name, such as "rotated-mnist", with its preset."""
    config = resolve(name, "sgd", **options)
    return build_scenario(name, config, None if data is None else Path(data))


def run(
    config: Config,
    *,
    data: Path | None = None,
    out: Path | None = None,
    overwrite: bool = False,
    keep: Keep = "all",
    observer: Observer | None = None,
) -> Trace:
    """Train as the configuration says."""
    tasks = build_scenario(config.scenario, config, data)
    return fit(
        tasks,
        build_method(config.method, config),
        partial(build_model, config, tasks.input_shape, tasks.n_outputs),
        seeds=config.seed_list(),
        training=config,
        device=config.device,
        out=out,
        overwrite=overwrite,
        keep=keep,
        config=config.as_dict(),
        observer=observer,
    )


@contextmanager
def output_folder(out: Path | None, name: str, *, overwrite: bool) -> Iterator[Path]:
    """A folder for results, there from the start so that no other run takes it.

    Without `out` it is a new one, runs/NAME, runs/NAME-2 and so on. An `out` that holds an earlier
    run needs `overwrite`, one that holds other files is refused. If nothing comes to be written in
    it, it is removed again.
    """
    if out is not None:
        _refuse_occupied(out, overwrite)
    created: list[Path] = []
    try:
        folder = _make(out, created) if out is not None else _make_new(Path("runs"), name, created)
        yield folder
    finally:
        for empty in (f for f in reversed(created) if not any(f.iterdir())):
            empty.rmdir()


def _refuse_occupied(folder: Path, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise TraceError(f"--out {folder} cannot be a folder: it is a file")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (is_trace(folder) or (folder / COMPARISON).is_file()):
        raise TraceError(f"--out {folder} holds files that are not a run's; choose another folder")
    if not overwrite:
        raise TraceError(f"--out {folder} holds a run; choose another folder or add --overwrite")


def _make(folder: Path, created: list[Path]) -> Path:
    """Make a folder and those above it, noting which are new."""
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        for path in reversed(missing):
            path.mkdir()
            created.append(path)
    except OSError as error:
        raise TraceError(f"--out {folder} cannot be made: {error.strerror}") from error
    return folder


def _make_new(root: Path, name: str, created: list[Path]) -> Path:
    _make(root, created)
    for n in count(1):
        folder = root / (name if n == 1 else f"{name}-{n}")
        try:
            folder.mkdir()  # atomic: of two runs that start together, one gets it
        except FileExistsError:
            continue
        created.append(folder)
        return folder
    raise TraceError(f"no new folder can be made in {root}")
