"""The division of a run into jobs."""

from functools import cache
from pathlib import Path

import torch

from forgetless.data import ScenarioOptions, build_scenario
from forgetless.launch.engines.engine import Engine
from forgetless.launch.engines.jobs import Job, Order
from forgetless.support.options import select_options
from forgetless.trace import JOBS
from forgetless.trace.checkpoint import CHECKPOINTS, Store
from forgetless.training.build import seed_groups
from forgetless.training.models import build_model


def divide(order: Order, engine: Engine) -> list[Job]:
    """The jobs of a run: one for each group of seeds that train together.

    A run that was begun as a whole resumes as one, and one that was begun in parts in parts. A run
    with a budget is one job, since its first group of seeds decides the storage.
    """
    config, parts = order.config, order.folder / JOBS
    whole = [Job(order, config.seed_list(), order.folder, order.resume)]
    resumes = order.resume is not False
    divides = engine.divides or (resumes and parts.is_dir())
    if not divides or config.budget or (resumes and Store(order.folder / CHECKPOINTS).exists()):
        return whole
    options = select_options(ScenarioOptions, vars(config))
    shape, outputs = _shapes(config.scenario, options, order.data)
    with torch.device("meta"):  # the weights do not matter
        module = build_model(config, shape, outputs)
    groups = seed_groups(config.seed_list(), config, engine.device(config.device), module)
    if len(groups) == 1:
        return whole
    resume = False if order.resume is False else None
    return [Job(order, group, parts / _folder_name(group), resume) for group in groups]


@cache
def _shapes(name: str, options: ScenarioOptions, data: Path | None) -> tuple[tuple[int, ...], int]:
    """The shape of a scenario's inputs and its number of outputs, without keeping the images."""
    scenario = build_scenario(name, options, data)
    return tuple(scenario.input_shape), scenario.n_outputs


def _folder_name(group: tuple[int, ...]) -> str:
    return "seeds-" + (f"{group[0]}" if len(group) == 1 else f"{group[0]}-to-{group[-1]}")
