"""A run divided into jobs, and their traces put together into the run's."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch

from forgetless.data import ScenarioOptions, build_scenario
from forgetless.launch.engines.job import Engine, Job, Order, Outcome
from forgetless.launch.runs import JOBS
from forgetless.support.errors import ForgetlessError, TrainingError
from forgetless.trace import is_trace, load_trace, make_room, merged_seeds
from forgetless.trace.checkpoint import CHECKPOINTS, Store
from forgetless.training.build import seed_groups
from forgetless.training.models import build_model


def divided(order: Order, engine: Engine) -> list[Job]:
    """The jobs of a run: one for each group of seeds that trains together.

    A run that was begun as a whole goes on as one, and one that was begun in parts in parts. One
    with a budget for its memory is a whole, since what it keeps is decided by its first group.
    """
    every = order.config.seed_list()
    whole = [Job(order, every, order.folder, order.fresh)]
    began_whole = Store(order.folder / CHECKPOINTS).exists() and not order.fresh
    began_divided = (order.folder / JOBS).is_dir() and not order.fresh
    if began_whole or order.config.budget or not (engine.divides or began_divided):
        return whole
    groups = _groups(order, engine.device(order.config.device))
    if len(groups) == 1:
        return whole
    parts = order.folder / JOBS
    return [Job(order, group, parts / _named(group), order.fresh) for group in groups]


def put_together(order: Order, outcomes: Sequence[Outcome]) -> ForgetlessError | None:
    """From the jobs of a run the trace that the run would have had as one.

    Arguments:
        outcomes: of its jobs, in the order of their seeds.

    Returns:
        what broke the run; seeds after one that diverged are left out, as they would have been
        by a run that trains them one after another.
    """
    failed = next((outcome for outcome in outcomes if outcome.error), None)
    if failed and not isinstance(failed.error, TrainingError):
        return failed.error  # nothing is lost: the jobs go on from where they are
    until = outcomes.index(failed) + 1 if failed else len(outcomes)
    jobs = [outcome.job for outcome in outcomes[:until] if is_trace(outcome.job.folder)]
    if jobs and not jobs[0].whole:
        _join(order, jobs)
    shutil.rmtree(order.folder / JOBS, ignore_errors=True)
    return failed.error if failed else None


def clear(order: Order) -> None:
    """Remove the trace and the checkpoints of a whole run that others replace, under its lock."""
    make_room(order.folder, overwrite=True)
    Store(order.folder / CHECKPOINTS).remove()


def _join(order: Order, jobs: Sequence[Job]) -> None:
    parts = [load_trace(job.folder) for job in jobs]
    furthest = max(parts, key=lambda part: int(np.isfinite(part.accuracy).sum()))
    found = merged_seeds(parts)
    seeds, known = order.config.seed_list(), list(found.seeds)
    accuracy = np.full((len(seeds), *found.accuracy.shape[1:]), np.nan)
    accuracy[[seeds.index(seed) for seed in known]] = found.accuracy
    for job in jobs:
        for seed in job.seeds:
            kept = job.folder / f"seed-{seed}"
            if kept.is_dir():
                kept.replace(order.folder / kept.name)
    # Last, so that who finds it finds all of the run.
    replace(
        found, seeds=seeds, accuracy=accuracy, tasks=furthest.tasks, path=order.folder
    ).save_record()


def _groups(order: Order, device: torch.device) -> list[tuple[int, ...]]:
    config = order.config
    names = ScenarioOptions.__dataclass_fields__
    options = ScenarioOptions(**{name: getattr(config, name) for name in names})
    shape, outputs = _shapes(config.scenario, options, order.data)
    with torch.device("meta"):  # only what it is made of matters
        module = build_model(config, shape, outputs)
    return seed_groups(config.seed_list(), config, device, module)


@cache
def _shapes(name: str, options: ScenarioOptions, data: Path | None) -> tuple[tuple[int, ...], int]:
    """Of a scenario's inputs, and its number of outputs; the images themselves are let go."""
    scenario = build_scenario(name, options, data)
    return tuple(scenario.input_shape), scenario.n_outputs


def _named(group: tuple[int, ...]) -> str:
    return "seeds-" + (f"{group[0]}" if len(group) == 1 else f"{group[0]}-to-{group[-1]}")
