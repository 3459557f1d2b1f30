"""From a configuration to a trace: the flow behind `forgetless run` and `forgetless compare`."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import torch

from forgetless.data import Scenario, build_scenario
from forgetless.launch.config import Config, resolve
from forgetless.support.files import LOCK, FolderLock, is_locked
from forgetless.support.validation import ForgetlessWarning, TraceError
from forgetless.trace import Keep, RunStatus, Trace, is_trace, run_status
from forgetless.training.build import ModelFactory, make_learner
from forgetless.training.fit import fit
from forgetless.training.settings import Observer

COMPARISON = "comparison.json"


def scenario(name: str, *, data: str | Path | None = None, **options: Any) -> Scenario:
    """A benchmark by its name, such as "rotated-mnist", with its preset."""
    config = resolve(name, "sgd", **options)
    return build_scenario(name, config, None if data is None else Path(data))


def run(
    config: Config,
    *,
    seeds: tuple[int, ...] | None = None,
    data: Path | None = None,
    out: Path | None = None,
    overwrite: bool = False,
    keep: Keep = "all",
    checkpoint_every: float = 5.0,
    on_checkpoint: Callable[[], None] | None = None,
    observer: Observer | None = None,
) -> Trace:
    """Train as the configuration says, or resume the unfinished run in `out`.

    Arguments:
        seeds: those of the configuration's seeds to train; all by default.
    """
    tasks = build_scenario(config.scenario, config, data)
    return fit(
        tasks,
        config.build_method(),
        ModelFactory(config, tasks.input_shape, tasks.n_outputs),
        seeds=config.seed_list() if seeds is None else seeds,
        training=config,
        device=config.device,
        heads=config.head_list(),
        out=out,
        overwrite=overwrite,
        keep=keep,
        checkpoint_every=checkpoint_every,
        on_checkpoint=on_checkpoint,
        observer=observer,
    )


def check_names(configs: Sequence[Config], data: Path | None) -> None:
    """Reject names of parameters that the model does not have, before any run begins."""
    for config in configs:
        if config.freeze or config.unprotected or config.heads:
            tasks = build_scenario(config.scenario, config, data)
            model = ModelFactory(config, tasks.input_shape, tasks.n_outputs)
            method, first = config.build_method(), config.seed_list()[:1]
            device = torch.device("cpu")
            make_learner(tasks, method, model, first, config, config.head_list(), device)


def status_of(folder: Path, config: Config, keep: Keep | None = None) -> RunStatus:
    """What a folder holds of the run with these settings; see `run_status`."""
    return run_status(folder, config.as_dict(), config.seed_list(), keep)


@contextmanager
def output_folder(
    out: Path | None, name: str, parts: Mapping[str, Config], *, overwrite: bool, resume: bool
) -> Iterator[tuple[Path, Mapping[str, RunStatus]]]:
    """A folder for results, and the state of the runs in it; made at once, to be found taken.

    Without `out` it is the latest of runs/NAME, runs/NAME-2, … that holds the same runs unfinished,
    or else a new one. An `out` that holds other runs needs `overwrite`, one that holds the same
    runs complete needs `overwrite` or `resume`, and one that holds other files is rejected. The
    folder is removed if it stays empty.

    Arguments:
        parts: the configuration of each run, by the name of its folder in this one.
    """
    created: list[Path] = []
    states: Mapping[str, RunStatus] = dict.fromkeys(parts, RunStatus("nothing"))
    try:
        if out is not None:
            folder, states = out, _accepted_states(out, parts, overwrite, resume)
            _make(out, created)
        else:
            found = _unfinished(Path("runs"), name, parts)
            folder, states = found or (_make_new(Path("runs"), name, created), states)
        # A single run locks its folder by itself.
        with FolderLock(folder) if len(parts) > 1 else nullcontext():
            yield folder, states
    finally:
        for empty in (f for f in reversed(created) if not any(f.iterdir())):
            empty.rmdir()


def _accepted_states(
    folder: Path, parts: Mapping[str, Config], overwrite: bool, resume: bool
) -> Mapping[str, RunStatus]:
    """The states of the runs in a folder, unless it must not be used."""
    nothing: Mapping[str, RunStatus] = dict.fromkeys(parts, RunStatus("nothing"))
    if folder.exists() and not folder.is_dir():
        raise TraceError(f"--out {folder} cannot be a folder: it is a file")
    # A run that was killed early leaves folders with nothing but locks in them.
    if not any(f.is_file() and f.name != LOCK for f in folder.rglob("*")):
        return nothing
    of_runs = is_trace(folder) or (folder / COMPARISON).is_file()
    if overwrite and of_runs:
        return nothing
    try:
        states = {part: status_of(folder / part, config) for part, config in parts.items()}
    except TraceError as error:
        raise TraceError(f"{error}; choose another folder or add --overwrite") from error
    found = {status.kind for status in states.values()}
    if found == {"nothing"} and not of_runs:
        raise TraceError(f"--out {folder} holds files that are not a run's; choose another folder")
    if overwrite:
        return nothing
    if "other" in found or (found == {"nothing"} and is_trace(folder)):
        differences = [f": {s.difference}" for s in states.values() if s.difference] or [""]
        raise TraceError(
            f"--out {folder} holds another run{differences[0]}; choose another folder or add "
            "--overwrite"
        )
    if found == {"complete"} and not resume:
        raise TraceError(
            f"--out {folder} holds this run, complete; --resume shows its results, --overwrite "
            "runs it again"
        )
    return states


def _unfinished(
    root: Path, name: str, parts: Mapping[str, Config]
) -> tuple[Path, Mapping[str, RunStatus]] | None:
    """The latest folder with the same runs unfinished, if no process is writing it."""
    latest = None
    for n in count(1):
        folder = _numbered(root, name, n)
        if not folder.is_dir():
            return latest
        # Locks first: a run that is completed in the meantime must not be found unfinished.
        if any(is_locked(f) for f in (folder, *(folder / part for part in parts))):
            continue
        try:
            states = {part: status_of(folder / part, config) for part, config in parts.items()}
        except TraceError as error:
            warnings.warn(f"{error}; it is left as it is", ForgetlessWarning, stacklevel=2)
            continue
        found = {status.kind for status in states.values()}
        begun = "unfinished" in found or found == {"complete", "nothing"}
        if begun and "other" not in found:
            latest = folder, states
    return latest


def _numbered(root: Path, name: str, n: int) -> Path:
    return root / (name if n == 1 else f"{name}-{n}")


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
        folder = _numbered(root, name, n)
        try:
            folder.mkdir()  # atomic: of two runs that start together, one gets it
        except FileExistsError:
            continue
        created.append(folder)
        return folder
    raise TraceError(f"no new folder can be made in {root}")
