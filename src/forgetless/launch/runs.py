"""From a configuration to a trace: the flow behind `forgetless run` and `forgetless compare`."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch

from forgetless.data import Scenario, build_scenario
from forgetless.launch.config import Config, resolve
from forgetless.support.errors import TraceError
from forgetless.trace import Trace, is_trace, load_trace
from forgetless.trace.checkpoint import CHECKPOINTS, LOCK, FolderLock, Store, is_locked
from forgetless.training.build import make_learner
from forgetless.training.fit import Keep, fit
from forgetless.training.models import build_model
from forgetless.training.settings import Observer

COMPARISON = "comparison.json"
JOBS = "jobs"  # in a run's folder, those of its seeds while they are trained apart
Standing = Literal["nothing", "unfinished", "complete", "other"]


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
    """Train as the configuration says, or go on where the run in `out` was stopped.

    Arguments:
        seeds: those of the configuration's seeds that are trained; all by default.
    """
    tasks = build_scenario(config.scenario, config, data)
    return fit(
        tasks,
        config.build_method(),
        partial(build_model, config, tasks.input_shape, tasks.n_outputs),
        seeds=config.seed_list() if seeds is None else seeds,
        training=config,
        device=config.device,
        out=out,
        overwrite=overwrite,
        keep=keep,
        checkpoint_every=checkpoint_every,
        on_checkpoint=on_checkpoint,
        config=config.as_dict(),
        observer=observer,
    )


def check_names(configs: Sequence[Config], data: Path | None) -> None:
    """Refuse names of parameters with which a run could not begin, before any run does."""
    for config in configs:
        if config.freeze or config.unprotected:
            tasks = build_scenario(config.scenario, config, data)
            model = partial(build_model, config, tasks.input_shape, tasks.n_outputs)
            method, first = config.build_method(), config.seed_list()[:1]
            make_learner(tasks, method, model, first, config, None, torch.device("cpu"))


def standing(folder: Path, config: Config, keep: Keep | None = None) -> Standing:
    """What a folder holds of the run with these settings.

    Arguments:
        keep: what the trace is to keep; a run that goes on must have begun so. None if anything
            will do.
    """
    if is_trace(folder):
        trace = load_trace(folder)
        if trace.status == "complete":
            return "complete" if _same(trace.config, config) else "other"
    store = Store(folder / CHECKPOINTS)
    if store.exists():
        manifest = store.manifest()
        if manifest is None:
            return "unfinished"  # what cannot be read is left to `fit`, which says why
        begun = manifest["settings"]
        fits = _same(begun["config"], config) and keep in (None, begun["keep"])
        return "unfinished" if fits else "other"
    if is_trace(folder):
        return "other"
    return _parts_standing(folder, config, keep)


def _parts_standing(folder: Path, config: Config, keep: Keep | None) -> Standing:
    """What there is of a run whose seeds were being trained apart."""
    found: set[Standing] = set()
    for part in folder.glob(f"{JOBS}/*"):
        one = standing(part, config, keep)
        # A part that was killed before its first checkpoint begins again.
        ours = one == "other" and not Store(part / CHECKPOINTS).exists()
        found.add("unfinished" if ours and _same(load_trace(part).config, config) else one)
    if "other" in found:
        return "other"
    return "unfinished" if found - {"nothing"} else "nothing"


def _same(kept: dict[str, Any], config: Config) -> bool:
    """Whether the settings are these; one that is younger than the run was not set."""
    here: dict[str, Any] = json.loads(json.dumps(config.as_dict()))
    return all(kept[n] == value if n in kept else not value for n, value in here.items())


@contextmanager
def output_folder(
    out: Path | None, name: str, parts: Mapping[str, Config], *, overwrite: bool, resume: bool
) -> Iterator[Path]:
    """A folder for results, there from the start so that no other run takes it.

    Without `out` it is the latest of runs/NAME, runs/NAME-2 and so on if that holds the same run
    unfinished, or else a new one. An `out` that holds another run needs `overwrite`, one that
    holds the same run complete needs `overwrite` or `resume`, one that holds other files is
    refused. If nothing comes to be written in it, it is removed again.

    Arguments:
        parts: the runs that are to be in it, by the name of their folder in it.
    """
    if out is not None:
        _refuse_occupied(out, parts, overwrite, resume)
    created: list[Path] = []
    try:
        folder = out if out is not None else _unfinished(Path("runs"), name, parts)
        if folder is None:
            folder = _make_new(Path("runs"), name, created)
        _make(folder, created)
        # A single run holds its folder by itself.
        with FolderLock(folder) if len(parts) > 1 else nullcontext():
            yield folder
    finally:
        for empty in (f for f in reversed(created) if not any(f.iterdir())):
            empty.rmdir()


def _refuse_occupied(
    folder: Path, parts: Mapping[str, Config], overwrite: bool, resume: bool
) -> None:
    if folder.exists() and not folder.is_dir():
        raise TraceError(f"--out {folder} cannot be a folder: it is a file")
    # A run that was killed early leaves folders with nothing but locks in them.
    if not any(f.is_file() and f.name != LOCK for f in folder.rglob("*")):
        return
    if overwrite and (is_trace(folder) or (folder / COMPARISON).is_file()):
        return
    found = {standing(folder / part, config) for part, config in parts.items()}
    if found == {"nothing"} and not (folder / COMPARISON).is_file():
        if is_trace(folder):  # of a single run, where several are to be
            found = {"other"}
        else:
            raise TraceError(
                f"--out {folder} holds files that are not a run's; choose another folder"
            )
    if overwrite:
        return
    if "other" in found:
        raise TraceError(
            f"--out {folder} holds a run with other settings, or one that cannot go on; choose "
            "another folder or add --overwrite"
        )
    if found == {"complete"} and not resume:
        raise TraceError(
            f"--out {folder} holds this run, complete; --resume shows its results, --overwrite "
            "runs it again"
        )


def _unfinished(root: Path, name: str, parts: Mapping[str, Config]) -> Path | None:
    """The latest folder with the same run unfinished, if no process is writing it."""
    latest = None
    for n in count(1):
        folder = _numbered(root, name, n)
        if not folder.is_dir():
            return latest
        # Looked at first: a run that is completed in the meantime is not to be found unfinished.
        if any(is_locked(f) for f in (folder, *(folder / part for part in parts))):
            continue
        found = [standing(folder / part, config) for part, config in parts.items()]
        begun = "unfinished" in found or ("complete" in found and "nothing" in found)
        if begun and "other" not in found:
            latest = folder
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
