"""Forecast of forgetting by a dry run, before training.

A copy of the network is trained on the new task for a tenth of the steps at ten times the learning
rate, with the same method and optimizer. What was tried, and when not to trust it:
docs/forecast.md.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from forgetless.data import Scenario, Split, Task
from forgetless.methods import SGD, Method
from forgetless.support import progress
from forgetless.support.plugins import load_object
from forgetless.support.streams import stream
from forgetless.support.validation import SHARE, ConfigError, TrainingError, require
from forgetless.theory import Effect, Loss, SourceAndTarget, TangentModel, copied
from forgetless.training.build import make_learner
from forgetless.training.learner import Learner, mean_loss
from forgetless.training.settings import OPTIMIZERS, Training

SHARE_OF_STEPS = 0.1  # that a copy takes; its learning rate is as many times larger
_LEAST_STEPS = 30  # that it takes if training does: fewer and larger ones are too rough
_FEW_STEPS = 300  # up to which it takes more of them, where its rate has to be smaller
_TRIAL = 1 / 16  # share of the copy's steps after which a rate is compared with half of it
_LEAST_TRIAL = 4  # steps
_COMPARED = 256  # samples of the target on which the rates are compared
_EVALUATED = 1000  # samples of the target on which the result is evaluated

Pair = tuple[Tensor, Tensor]
# Trains a module in place on inputs and labels, with learning rates so many times the usual ones.
OwnLoop = Callable[[nn.Module, Tensor, Tensor, float], object]


@final
@dataclass(frozen=True)
class DryRun:
    """A copy's training in place of the real one.

    Arguments:
        weights: of the trained copy, by name.
        rate: its learning rate, as a multiple of the real training's.
        steps: it took; of a loop of your own, samples that it got.
        of: steps (samples) of the real training.
    """

    weights: Mapping[str, Tensor]
    rate: float
    steps: int
    of: int

    @property
    def covered(self) -> float:
        """The share of the real training's steps times learning rate that the copy took."""
        return min(1.0, self.rate * self.steps / self.of)


@final
@dataclass(frozen=True)
class Forecast(Effect):
    """The predicted effect on the source of training on the target, by a dry run.

    Arguments:
        run: the copy's training.
        seconds: computing time, without what a method stores of earlier tasks.
    """

    run: DryRun
    seconds: float

    @property
    def covered(self) -> float:
        """How far the copy got, as a share of the real training; if below 1, expect more change."""
        return self.run.covered

    def summary(self) -> dict[str, Any]:
        """The plain numbers, for JSON."""
        run = {name: getattr(self.run, name) for name in ("rate", "steps", "of", "covered")}
        return Effect.summary(self) | run | {"seconds": self.seconds}


def forecast(
    model: nn.Module,
    source: Pair,
    target: Pair,
    *,
    training: Training | None = None,
    method: Method[Any] | None = None,
    remember: Pair | None = None,
    heads: Sequence[str] | None = None,
    train: OwnLoop | None = None,
    loss: Loss | None = None,
    source_classes: range | None = None,
    target_classes: range | None = None,
    share: float = SHARE_OF_STEPS,
    seed: int = 0,
) -> Forecast:
    """Predict the effect on the source of training on the target, from a copy's short training.

    The model itself is not changed.

    Arguments:
        model: the network after learning the source.
        source: samples to predict for, (n, *) and labels (n,), such as a test set.
        target: the training set of the next task, (m, *) and (m,).
        training: of the target, as `fit` takes it.
        method: against forgetting; by default none. It stores what it needs of the source first.
        remember: the source's samples that it may store; by default the source.
        heads: as for `fit`.
        train: a loop of your own in place of `training` and `method`: a function of a copy of the
            model, inputs, labels and a factor, which trains the copy on these samples with its
            learning rates times the factor. It gets a share of the target's samples.
        loss: mean loss of outputs (b, C) and labels (b,), which is reported; by default
            cross-entropy within a task's classes. Only with `train`, which minimises it.
        source_classes, target_classes: the outputs that compete in a task; by default all.
        share: of the steps.
        seed: of the batches and of the choices of samples.
    """
    SHARE.check("share", share)
    alone = train is None or (training is None and method is None)
    require(alone, "train", train, "None where training or method is given, which it replaces")
    accepted = "None, or given together with train, which minimises it"
    require(loss is None or train is not None, "loss", loss, accepted)
    tangent = TangentModel(copied(model))
    problem = SourceAndTarget(tangent, source, target, loss, source_classes, target_classes)
    if train is not None:
        started = time.perf_counter()
        run = _run_by_own_loop(model, problem, train, share, seed)
        return effect(problem, tangent.module, run, started)
    training = replace(training or Training(), dtype=str(tangent.theta.dtype).split(".")[-1])
    stored = problem.checked(remember, "remembered set") if remember else problem.source
    tasks = _TwoTasks(problem, stored)
    chosen, device = method or SGD(), tangent.theta.device

    def learner(settings: Training) -> Learner:
        return make_learner(tasks, chosen, model, (seed,), settings, heads, device)

    state = None
    if chosen.protects:
        knowing = learner(training)
        knowing.consolidate(Split(*stored), 0)
        state = knowing.state

    def make(settings: Training) -> Learner:
        fresh = learner(settings)
        fresh.state = fresh.state if state is None else state
        return fresh

    started = time.perf_counter()
    with progress.bar_on_terminal("forecast"):
        run = dry_run(make, Split(*problem.target), 1, training, share, seed)
    return effect(problem, tangent.module, run, started)


def effect(problem: SourceAndTarget, module: nn.Module, run: DryRun, started: float) -> Forecast:
    """The forecast from a dry run.

    Arguments:
        problem: the tasks, and the network before it.
        module: a network to load the trained weights into.
        run: the dry run.
        started: `time.perf_counter` when it began.
    """
    x, y = problem.target
    index = evenly(len(y)).to(y.device)
    problem.target = x[index], y[index]
    now = problem.predict(problem.tangent)
    module.load_state_dict(dict(run.weights))
    return Forecast(
        index=problem.index,
        labels=problem.source[1],
        classes=problem.source_classes,
        now=now,
        after=problem.predict(TangentModel(module)),
        run=run,
        seconds=time.perf_counter() - started,
    )


def evenly(n: int, count: int = _EVALUATED) -> Tensor:
    """Some indices below n, spread evenly, (min(count, n),)."""
    return torch.linspace(0, n - 1, min(count, n)).round().long()


def dry_run(
    make: Callable[[Training], Learner],
    split: Split,
    task: int,
    training: Training,
    share: float = SHARE_OF_STEPS,
    seed: int = 0,
) -> DryRun:
    """Train a copy for a share of the steps, at as many times the learning rate.

    While half the rate has a lower loss on the task after a sixteenth of these steps, the rate is
    too large for this network: it is halved, at most to the real one. Where steps are few, more
    of them make up for it.

    Arguments:
        make: a learner with the network's weights and the method's state, from the settings.
        split: the task's training samples.
        task: its number, from 0.
        training: the settings of the real training.
        share: of the steps; more where few would be left.
        seed: of the choice of samples.
    """
    whole_run = training.epochs * math.ceil(len(split) / training.batch_size)
    share = min(1.0, max(share, _LEAST_STEPS / whole_run))
    order = torch.randperm(len(split), generator=stream(seed, "dry run", task))
    order = order.to(split.labels.device)
    few = split.subset(order[:_COMPARED])

    def attempt(rate: float) -> _Attempt:
        steps = max(share * whole_run, min(whole_run / rate, _FEW_STEPS))
        part_of = min(1.0, steps / whole_run)
        epochs = math.ceil(part_of * training.epochs - 1e-9)
        size = max(1, round(part_of * training.epochs / epochs * len(split)))
        part = split if size == len(split) else split.subset(order[:size])
        return _Attempt(make(_faster(training, rate, epochs)), part, task, epochs)

    rate = 1 / share
    best = attempt(rate)
    if rate > 1:
        trial = max(_LEAST_TRIAL, round(_TRIAL * best.steps))
        best.advance(trial)
        least = best.loss(few)
        while rate > 1:
            slower = attempt(max(1.0, rate / 2))
            slower.advance(trial)
            found = slower.loss(few)
            if not found < least and math.isfinite(least):
                break
            best, least, rate = slower, found, max(1.0, rate / 2)
    while not best.advance():
        if rate <= 1:
            best.fail()
        rate = max(1.0, rate / 2)
        best = attempt(rate)
    return DryRun(best.learner.network.state_dict(0), rate, best.steps, whole_run)


def _faster(training: Training, rate: float, epochs: int) -> Training:
    """The same training in fewer epochs, at so many times the learning rate."""
    optimizer = training.optimizer
    if not (isinstance(optimizer, str) and optimizer in OPTIMIZERS):
        optimizer = _with_rate(optimizer, rate)
    return replace(
        training,
        epochs=epochs,
        lr=rate * training.lr,
        least_lr=rate * training.least_lr,
        optimizer=optimizer,
        decay_after=max(1, round(training.decay_after * epochs / training.epochs)),
        evaluate_every=0,
    )


def _with_rate(made: str | Callable[[list[Any]], Any], rate: float) -> Callable[[list[Any]], Any]:
    """A function that makes the same optimizer with its learning rates times `rate`."""
    make: Any = load_object(made, "optimizer") if isinstance(made, str) else made

    def faster(parameters: list[Any]) -> Any:
        optimizer = make(parameters)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["lr"]
        return optimizer

    return faster


@final
class _Attempt:
    """A copy's training at one rate, in two parts; `steps` is how many it takes."""

    def __init__(self, learner: Learner, split: Split, task: int, epochs: int) -> None:
        self.learner = learner
        self.steps = epochs * math.ceil(len(split) / learner.training.batch_size)
        self._task = task
        self._last: float = math.inf  # step before which to pause
        self._first = learner.steps
        theta = learner.network.theta
        on_device = split.to(theta.device, theta.dtype)
        self._course = learner.train(on_device, task, epochs, self._is_due)
        self._error: TrainingError | None = None

    def _is_due(self) -> bool:
        taken = self.learner.steps - self._first
        progress.advance("training a copy", taken, self.steps)
        return taken >= self._last

    def advance(self, steps: float = math.inf) -> bool:
        """Train up to a step, or to the end; whether the weights stay finite."""
        self._last = steps
        try:
            for _ in self._course:
                if self._is_due():
                    break
        except TrainingError as error:
            self._error = error
        return self._error is None

    def loss(self, split: Split) -> float:
        """The loss on samples of the task; infinite where the weights are not finite."""
        network = self.learner.network
        if self._error is not None:
            return math.inf
        found = mean_loss(network, split.to(network.theta.device, network.theta.dtype), self._task)
        return found if math.isfinite(found) else math.inf

    def fail(self) -> None:
        """Raise what ended it."""
        if self._error is not None:
            raise self._error


@final
class _TwoTasks(Scenario):
    """The source and the target of a forecast, with all outputs of the model."""

    def __init__(self, problem: SourceAndTarget, remember: Pair) -> None:
        (x, y), (x_target, y_target) = problem.source, problem.target
        if y.is_floating_point() or y_target.is_floating_point():
            raise ConfigError("labels are numbers, not classes: give your own loop, train and loss")
        outputs = range(problem.tangent.outputs(x[:1]).shape[-1])
        self._classes = problem.source_classes, problem.target_classes
        self.name, self.n_tasks = "forecast", 2
        self.setting = "domain" if self._classes == (outputs, outputs) else "task"
        self.input_shape, self.n_outputs = tuple(x.shape[1:]), len(outputs)
        coming, known = Split(x_target, y_target), Split(x, y)
        self._tasks = Task("source", Split(*remember), known), Task("target", coming, coming)

    def task(self, index: int, seeds: Sequence[int]) -> Task:
        """The source or the target."""
        return self._tasks[index]

    def classes(self, index: int) -> range:
        """Its outputs."""
        return self._classes[index]


def _run_by_own_loop(
    model: nn.Module, problem: SourceAndTarget, train: OwnLoop, share: float, seed: int
) -> DryRun:
    """The user's training of a copy on a share of the samples; slower while it diverges."""
    x, y = problem.target
    count = max(1, round(share * len(y)))
    order = torch.randperm(len(y), generator=stream(seed, "dry run", 1)).to(x.device)[:count]
    rate = len(y) / count
    while True:
        module = copied(model).train()
        train(module, x[order], y[order], rate)
        finite = all(bool(value.isfinite().all()) for value in module.state_dict().values())
        if finite:
            weights = {name: value.detach() for name, value in module.state_dict().items()}
            return DryRun(weights, rate, count, len(y))
        if rate <= 1:
            raise TrainingError("train leaves weights that are NaN or infinite")
        rate = max(1.0, rate / 2)
