"""Train a model on a sequence of tasks: scenario × model × method × seeds → trace."""

import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forgetless.data import Scenario
from forgetless.methods import Method
from forgetless.subspace import Storage
from forgetless.subspace.footprint import is_shortage
from forgetless.support import signals
from forgetless.support.errors import ConfigError, TraceError, require
from forgetless.support.provenance import versions
from forgetless.support.streams import global_stream
from forgetless.support.validation import real
from forgetless.trace import Trace, make_room, remove_unfinished
from forgetless.trace.checkpoint import FolderLock
from forgetless.training.build import ModelSource, make_learner, make_model, seed_groups
from forgetless.training.learner import Learner
from forgetless.training.loop import Course, Keep
from forgetless.training.resume.saving import Saver
from forgetless.training.settings import Observer, Training

__all__ = ["Keep", "ModelSource", "fit", "make_learner", "resolve_device"]


def fit(
    scenario: Scenario,
    method: Method[Any],
    model: ModelSource | None = None,
    *,
    seeds: int | Sequence[int] = 1,
    training: Training | None = None,
    device: str | torch.device = "auto",
    heads: Sequence[str] | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    keep: Keep = "all",
    checkpoint_every: float = 5.0,
    on_checkpoint: Callable[[], None] | None = None,
    config: Mapping[str, Any] | None = None,
    observer: Observer | None = None,
) -> Trace:
    """Learn the tasks of a scenario one after another and measure what was forgotten.

    Arguments:
        scenario: the tasks.
        method: what is done against forgetting.
        model: a function that makes a fresh network (called once for each seed), or a network
            whose weights all seeds start from; by default an MLP with 100 hidden units.
        seeds: how many (0, 1, …), or which ones. A seed decides initial weights, batches, samples
            that are remembered and pixel orders; its result does not depend on the others.
        training: epochs, batch size, learning rate, …
        device: "cpu", "cuda", …; "auto" takes a GPU if there is one.
        heads: where tasks have outputs of their own, what the names of the last layer's parameters
            start with; by default "head", or else the last layer that has parameters.
        out: folder for the trace, written after every task; None keeps it in memory. If it holds
            an unfinished run with the same settings, that run goes on.
        overwrite: replace a trace that `out` holds already; otherwise it is refused.
        keep: "all" (weights after each task and the method's memory), "weights", or "nothing".
        checkpoint_every: minutes after which all that is needed to go on is saved within a task,
            besides after each task; 0 for never.
        on_checkpoint: called when that is written, to copy it elsewhere.
        config: settings to note in the trace instead of those given here.
        observer: called with the progress.

    Returns:
        the trace, complete. When interrupted, the trace in `out` holds what was finished, and the
        same call goes on from the latest checkpoint to the very result it would have had.
    """
    _check_kinds(scenario, method, training)
    training = training or Training()
    try:
        chosen = tuple(map(index, seeds if isinstance(seeds, Iterable) else range(index(seeds))))
    except TypeError:
        raise ConfigError(
            f"seeds must be a count or a list of whole numbers, not {seeds!r}"
        ) from None
    distinct = bool(chosen) and len(set(chosen)) == len(chosen) and min(chosen) >= 0
    require(distinct, "seeds", seeds, "at least one, distinct, none negative")
    minutes = real(0).fits(checkpoint_every)
    require(minutes, "checkpoint_every", checkpoint_every, "a number of minutes, 0 for never")
    require(keep in ("all", "weights", "nothing"), "keep", keep, "all, weights or nothing")
    where = resolve_device(device)
    shape = (len(chosen), scenario.n_tasks, scenario.n_tasks)
    trace = Trace(
        scenario=scenario.name,
        method=method.name,
        seeds=chosen,
        tasks=tuple(f"task {t + 1}" for t in range(scenario.n_tasks)),
        accuracy=np.full(shape, np.nan),
        config=dict(config) if config is not None else _describe(method, training),
        versions=versions(where),
        timings=dict.fromkeys(("total", "training", "consolidation", "evaluation"), 0.0),
        path=None if out is None else Path(out),
    )
    groups = seed_groups(chosen, training, where, make_model(model, scenario, chosen[0]))
    settings = {
        "scenario": trace.scenario,
        "method": trace.method,
        "seeds": chosen,
        "tasks": scenario.n_tasks,
        "keep": keep,
        "config": trace.config,
    }
    saver = Saver(trace, method, settings, checkpoint_every, on_checkpoint, groups)
    make = partial(make_learner, scenario, method, model, heads=heads, training=training)
    course = Course(scenario, training, trace, keep, saver, observer)
    with ExitStack() as stack:
        if trace.path is not None:
            stack.enter_context(FolderLock(trace.path))
        if saver.active:
            stack.enter_context(signals.watched(signal.SIGINT))
            stack.enter_context(signals.deferred())
        _follow(
            course, lambda seeds, storage: make(seeds, device=where, storage=storage), overwrite
        )
    return trace


def _follow(
    course: Course,
    make: Callable[[Sequence[int], Storage | None], Learner],
    overwrite: bool,
) -> None:
    """All groups of seeds, from the beginning or from where the run in the folder was stopped."""
    trace, saver = course.trace, course.saver
    saved = None if overwrite else saver.load()
    storage = None if saved is None else saved.storage
    learner: Learner | None = None
    try:
        for number in range(0 if saved is None else saved.position.group, len(course.groups)):
            learner = None  # what it remembered is let go before the next one is made
            learner = make(course.groups[number], storage)
            if saved is None and number == 0:
                storage = course.within_budget(learner)
                if trace.path is not None:
                    make_room(trace.path, overwrite=overwrite)
                    saver.remove()
            elif trace.path is not None:
                remove_unfinished(trace.path)
            with global_stream(learner.seeds[0], "training"):
                course.learn(learner, number, saved)
            saved = None
        trace.status = "complete"
        trace.save_record()
        saver.remove()
    except BaseException as error:
        trace.status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        if np.isfinite(trace.accuracy).any():
            with suppress(TraceError):  # of what stopped the run the first reason is the one
                trace.save_record()
        if is_shortage(error) and learner is not None:
            raise course.shortage(error, learner) from error
        raise


def _check_kinds(scenario: Any, method: Any, training: Any) -> None:
    """Refuse names and classes in the place of what they stand for."""
    tasks = isinstance(scenario, Scenario)
    require(tasks, "scenario", scenario, "a Scenario, such as scenario('rotated-digits')")
    made = isinstance(method, Method)
    require(made, "method", method, "a method with its settings, such as SGD() or PCAOGD()")
    known = training is None or isinstance(training, Training)
    require(known, "training", training, "a Training, such as Training(epochs=5)")


def _describe(method: Method[Any], training: Training) -> dict[str, Any]:
    hyperparameters: dict[str, Any] = asdict(method)  # type: ignore[call-overload]
    return {"method": hyperparameters, "training": asdict(training)}


def resolve_device(device: str | torch.device) -> torch.device:
    """A usable device; "auto" is a GPU if there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        torch.ones(1, device=resolved).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].strip()
        raise ConfigError(f"device {str(device)!r} cannot be used: {reason}") from error
    return resolved
