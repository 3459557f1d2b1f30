"""Train a model on a sequence of tasks: scenario × model × method × seeds → trace."""

import signal
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forgetless.data import Scenario
from forgetless.methods import Method
from forgetless.subspace import Storage
from forgetless.support import signals
from forgetless.support.errors import ConfigError, first_line, require
from forgetless.support.options import real
from forgetless.support.provenance import versions
from forgetless.trace import KEEPS, Keep, Trace
from forgetless.trace.lock import FolderLock
from forgetless.training.build import ModelSource, make_learner, make_model, seed_groups
from forgetless.training.description import describe
from forgetless.training.learner import Learner
from forgetless.training.loop import TrainingRun
from forgetless.training.models import ModelFactory, ModelOptions
from forgetless.training.resume.saving import Saver
from forgetless.training.settings import Observer, Training
from forgetless.training.threads import Threads

__all__ = ["ModelSource", "fit", "make_learner", "resolve_device"]


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
    observer: Observer | None = None,
    threads: int | None = None,
) -> Trace:
    """Train on the tasks of a scenario one after another and measure forgetting.

    Arguments:
        scenario: the tasks.
        method: the method against forgetting.
        model: a function that makes a fresh network (called once for each seed), or a network
            whose weights all seeds start from; by default an MLP with 100 hidden units.
        seeds: how many (0, 1, …), or which ones. A seed decides initial weights, batches, stored
            samples and pixel orders; its result does not depend on the others.
        training: epochs, batch size, learning rate, …
        device: "cpu", "cuda", …; "auto" uses a GPU if there is one.
        heads: where tasks have outputs of their own, beginnings of the names of the last layer's
            parameters, in whole parts ("fc1" is not of "fc10.weight"); by default "head", or else
            the last layer that has parameters.
        out: folder for the trace, written after every task; None keeps it in memory. An unfinished
            run with the same settings in it is resumed.
        overwrite: replace a trace in `out`; otherwise it is rejected.
        keep: "all" (weights after each task and the method's memory), "weights", or "nothing".
        checkpoint_every: minutes between checkpoints within a task, besides those after each task;
            0 for never.
        on_checkpoint: called when a checkpoint is written, to copy it elsewhere.
        observer: called with the progress.
        threads: of torch on a CPU, which gets its own number back; by default what the environment
            variable FORGETLESS_THREADS says, or as few as the network is small.

    Returns:
        the complete trace. After an interruption the trace in `out` holds the finished tasks, and
        the same call resumes from the latest checkpoint, to the same result bit for bit.
    """
    _check_kinds(scenario, method, training)
    scenario.check()
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
    KEEPS.check("keep", keep)
    where = resolve_device(device)
    workers = Threads(where, threads)
    shape = (len(chosen), scenario.n_tasks, scenario.n_tasks)
    if model is None:
        model = ModelFactory(ModelOptions(), scenario.input_shape, scenario.n_outputs)
    module = make_model(model, chosen[0])
    described, fingerprint = describe(scenario, method, model, module, training, heads)
    trace = Trace(
        scenario=scenario.name,
        method=method.name,
        seeds=chosen,
        tasks=tuple(f"task {t + 1}" for t in range(scenario.n_tasks)),
        accuracy=np.full(shape, np.nan),
        config=described,
        fingerprint=fingerprint,
        versions=versions(where),
        timings=dict.fromkeys(("total", "training", "consolidation", "evaluation"), 0.0),
        path=None if out is None else Path(out),
    )
    groups = seed_groups(chosen, training, where, module)
    settings = {**trace.config, "seeds": chosen, "keep": keep}
    saver = Saver(trace, settings, checkpoint_every, on_checkpoint, groups)

    def make(seeds: Sequence[int], storage: Storage | None) -> Learner:
        return make_learner(scenario, method, model, seeds, training, heads, where, storage)

    with ExitStack() as stack:
        if trace.path is not None:
            stack.enter_context(FolderLock(trace.path))
        if saver.active:
            stack.enter_context(signals.watched(signal.SIGINT))
            stack.enter_context(signals.deferred())
        stack.enter_context(workers.use())
        run = TrainingRun(scenario, training, trace, keep, saver, observer, make, workers)
        run.start(overwrite=overwrite)
    return trace


def _check_kinds(scenario: Any, method: Any, training: Any) -> None:
    """Reject names and classes given instead of objects."""
    tasks = isinstance(scenario, Scenario)
    require(tasks, "scenario", scenario, "a Scenario, such as scenario('rotated-digits')")
    made = isinstance(method, Method)
    require(made, "method", method, "a method with its settings, such as SGD() or PCAOGD()")
    known = training is None or isinstance(training, Training)
    require(known, "training", training, "a Training, such as Training(epochs=5)")


def resolve_device(device: str | torch.device) -> torch.device:
    """A usable device; "auto" is a GPU if there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        torch.ones(1, device=resolved).item()
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error)
        raise ConfigError(f"device {str(device)!r} cannot be used: {reason}") from error
    return resolved
