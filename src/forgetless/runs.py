"""From a configuration to a trace: the flow behind `forgetless run` and `forgetless compare`."""

import shutil
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
        keep=keep,
        config=config.as_dict(),
        observer=observer,
    )


def free_folder(name: str, root: Path = Path("runs")) -> Path:
    """A folder under `root` that does not exist yet: NAME, NAME-2 and so on."""
    candidates = (root / (name if n == 1 else f"{name}-{n}") for n in count(1))
    return next(folder for folder in candidates if not folder.exists())


def claim_folder(folder: Path, *, overwrite: bool) -> None:
    """See that a folder can be written to and holds nothing that would be lost.

    With `overwrite`, results of an earlier run in it are removed; other files never are.
    """
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not existing.is_dir():
        raise TraceError(f"--out {folder} cannot be a folder: {existing} is a file")
    if existing != folder or not any(folder.iterdir()):
        return
    if not (is_trace(folder) or (folder / COMPARISON).is_file()):
        raise TraceError(f"--out {folder} holds files that are not a run's; choose another folder")
    if not overwrite:
        raise TraceError(f"--out {folder} holds a run; choose another folder or add --overwrite")
    shutil.rmtree(folder)
