"""One group of seeds learning task after task: the training step, its watch, held-out samples."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from forgetless.data import Scenario, Split
from forgetless.methods import Method, Samples
from forgetless.methods.base import FOLLOWED, is_look
from forgetless.methods.state import check_state, check_storage, consolidated, take_step
from forgetless.subspace import DENSE, Storage
from forgetless.support.streams import stream
from forgetless.support.validation import ConfigError, TrainingError, warn_caller
from forgetless.tangent.evaluation import eval_mode
from forgetless.training.fast import Recorder
from forgetless.training.network import FitView, LearnedTask, Network
from forgetless.training.optimizers import TorchOptimizer
from forgetless.training.sampling import Sampler, augmented, batch_of, choose_indices, to_device
from forgetless.training.settings import Training

_CHUNK = 4096  # samples that go through the network at once
# Test samples, over all seeds, evaluated at once on a CPU; on a GPU, input numbers evaluated at
# once.
_EVALUATION_CHUNK = 8192
_EVALUATION_NUMBERS = 1 << 26
# Unchecked finiteness notes that may accumulate before a check.
_UNCHECKED = 256


@final
class FiniteWatch:
    """Whether weights stay finite: noted after every few steps, checked now and then.

    At every check a GPU waits for Python, so there are few.

    Arguments:
        seeds: the S seeds.
        remedies: what may help if they are not, for the message.
    """

    def __init__(self, seeds: Sequence[int], remedies: Sequence[str]) -> None:
        self._seeds = seeds
        self._remedies = remedies
        self._task = self._first = 0
        self._notes: list[tuple[int, Tensor]] = []

    def __len__(self) -> int:
        """The number of notes that are not checked yet."""
        return len(self._notes)

    def begin(self, task: int, first_step: int) -> None:
        """Start watching a task whose first step is `first_step`."""
        self._task, self._first = task, first_step
        self._notes.clear()

    def note(self, step: int, finite: Tensor) -> None:
        """Note whether the weights are finite after a step, (S,)."""
        self._notes.append((step, finite))

    def check(self) -> None:
        """Raise if any of the weights were not finite."""
        if not self._notes:
            return
        broken = (~torch.stack([finite for _, finite in self._notes])).nonzero()
        steps = [step for step, _ in self._notes]
        self._notes.clear()
        if len(broken):
            row, seed = broken[0].tolist()
            raise TrainingError(
                f"the weights are NaN or infinite by step {steps[row] - self._first} of task "
                f"{self._task + 1}, seed {self._seeds[seed]}; {' or '.join(self._remedies)} "
                "may help"
            )


@final
@dataclass
class HeldOut:
    """The loss on held-out samples after each epoch, and its consequences.

    Arguments:
        best: weights and buffers at the least loss so far, by name.
        least: that loss; None before the first epoch ends.
        waited: epochs since then.
        decays: how often a plateau decayed the learning rate.
        ended: whether the training on the task is to end.
    """

    best: dict[str, Tensor] = field(default_factory=dict)
    least: float | None = None
    waited: int = 0
    decays: int = 0
    ended: bool = False

    def numbers(self) -> dict[str, Any]:
        """All but the weights, as plain values."""
        return {name: value for name, value in vars(self).items() if name != "best"}

    def judge(
        self, network: Network, split: Split, task: int, training: Training, lr: float
    ) -> None:
        """Note the loss on held-out samples at the end of an epoch with that learning rate."""
        loss = mean_loss(network, split, task, training.evaluation_batch)
        if math.isfinite(loss) and (self.least is None or loss < self.least):
            self.least, self.waited = loss, 0
            self.best = {n: t.clone() for n, t in _weights(network).items()}
            return
        self.waited += 1
        if training.schedule == "plateau" and self.waited % training.decay_after == 0:
            self.decays += 1
            self.ended |= lr * training.decay < training.least_lr
        self.ended |= 0 < training.early_stopping <= self.waited

    def restore_best(self, network: Network) -> None:
        """Go back to the weights with the least loss."""
        weights = _weights(network)
        for name, value in self.best.items():
            weights[name].copy_(value)


def part_held_out(split: Split, share: float, seed: int, task: int) -> tuple[Split, Split]:
    """A seed's random choice of training samples, and the share of held-out ones."""
    count = max(1, round(share * len(split)))
    if count >= len(split):
        raise ConfigError(
            f"held_out={share:g} leaves no training samples of the {len(split)} of task {task + 1}"
        )
    order = torch.randperm(len(split), generator=stream(seed, "held-out samples", task))
    parts = (order[count:].sort().values, order[:count].sort().values)
    train, held_out = (index.to(split.labels.device) for index in parts)
    return split.subset(train), split.subset(held_out)


def mean_loss(network: Network, split: Split, task: int, together: int = 0) -> float:
    """The mean training loss of a single seed on samples of a task, in eval mode.

    Arguments:
        together: samples that go through the network at once at most; 0 for many.
    """
    total = torch.zeros((), dtype=torch.float64)
    with eval_mode(network.module), torch.no_grad():
        for index in _parts(len(split), together or _CHUNK, split.labels.device):
            samples = batch_of(split, index.unsqueeze(0), task)
            logits = network.logits(network.theta, samples.inputs)
            total += network.losses(logits, samples.labels, samples.tasks).double().sum().cpu()
    return float(total) / len(split)


def _parts(samples: int, most: int, device: torch.device) -> tuple[Tensor, ...]:
    """Indices of all samples, in parts of nearly equal size with at most so many each."""
    return torch.arange(samples, device=device).tensor_split(math.ceil(samples / most))


def _weights(network: Network) -> dict[str, Tensor]:
    return {"theta": network.theta} | {f"fixed.{n}": t for n, t in network.fixed.items()}


@final
@dataclass
class TaskProgress:
    """How much of the training on a task is done.

    Arguments:
        first_step: of the task, counted over the whole run.
        epochs: finished epochs.
        batches: finished batches of the epoch after them.
        order: of that epoch's samples, (S, n); None until it is drawn.
        held_out: the loss on held-out samples, where training depends on it.
    """

    first_step: int
    epochs: int = 0
    batches: int = 0
    order: Tensor | None = None
    held_out: HeldOut = field(default_factory=HeldOut)


@final
class Learner:
    """A network with S sets of weights, and the method that trains it.

    Arguments:
        network: the network.
        method: the method against forgetting.
        scenario: where the tasks come from.
        seeds: the S seeds.
        training: batch size, learning rate, optimizer, …
        storage: how the method stores directions.
        budget: the most bytes of directions whose need is not known beforehand; None for any.

    Attributes:
        optimizer: the present task's; None for plain SGD.
        followed: samples of the earlier tasks, for a method that adapts.
    """

    def __init__(
        self,
        network: Network,
        method: Method[Any],
        scenario: Scenario,
        seeds: Sequence[int],
        training: Training,
        storage: Storage = DENSE,
        budget: int | None = None,
    ) -> None:
        self.network = network
        self.method = method
        self.seeds = tuple(seeds)
        self.training = training
        self.budget = budget
        self.steps = 0  # of the whole run
        self.progress: TaskProgress | None = None
        self.optimizer: TorchOptimizer | None = None
        self.followed: Samples | None = None
        remedies = [f"a smaller learning rate than {training.lr:g}", method.steadied_by]
        self.watch = FiniteWatch(self.seeds, [remedy for remedy in remedies if remedy])
        self._has_batch_norm = any(isinstance(m, _BatchNorm) for m in network.module.modules())
        uses = ("batches", "remembered samples", "augmentation")
        self._streams = {use: [stream(s, use) for s in seeds] for use in uses}
        generators = [stream(s, "memory batches") for s in seeds]
        self.sampler = Sampler(generators, network.theta.device)
        starts = torch.tensor([scenario.classes(t).start for t in range(scenario.n_tasks)])
        # In the setting "class", stored samples too choose among all classes seen so far.
        active = network.active if scenario.setting == "class" else None
        self._seen = None if active is None else active.clone()
        self.view = FitView(
            network, starts, self.sampler, storage, training.lr, recordable=method.recordable
        )
        self.state: Any
        self.use_storage(storage)
        self.recorder = Recorder(self)

    def train(
        self, split: Split, task: int, epochs: int, pause: Callable[[], bool] = lambda: False
    ) -> Iterator[int]:
        """Learn a task; yields the number of finished epochs, after each and at every pause.

        At a yield the learner is between two steps, which `progress` tells. On a GPU the weights
        are not checked after every step; `watch` checks them, at the latest at the end.
        """
        if self.progress is None:
            self.progress, self.optimizer = TaskProgress(self.steps), self.new_optimizer()
        progress, judged = self.progress, self.training.watches_held_out
        split, held_out = self._parted(split, task)
        self.view.task = task
        self.watch.begin(task, progress.first_step)
        self.recorder.begin_task()
        if self._seen is not None and self.network.active is not None:
            self.network.active.copy_(self._seen[task].expand_as(self._seen))
        while progress.epochs < epochs and not progress.held_out.ended:
            if progress.order is None:
                progress.order = to_device(self._order(len(split)), self.network.theta.device)
            batches = self._split(progress.order)
            in_epoch = len(batches)
            del batches[: progress.batches]
            while batches:
                self._set_mode()
                self._set_lr(progress.epochs + progress.batches / in_epoch)
                recorded = self.recorder.advance(split, task, batches)
                steps, finite = recorded or (1, self._step(split, batches[0], task))
                self.steps += steps
                self._follow()
                del batches[:steps]
                self.watch.note(self.steps, finite)
                self.recorder.draw_ahead(len(batches))
                progress.batches += steps
                if batches and pause():
                    self.watch.check()
                    yield progress.epochs
            progress.epochs, progress.batches, progress.order = progress.epochs + 1, 0, None
            if judged:
                progress.held_out.judge(self.network, held_out, task, self.training, self.view.lr)
            ended = progress.epochs == epochs or progress.held_out.ended
            if ended and judged:
                progress.held_out.restore_best(self.network)
            if not ended:
                self.recorder.draw_ahead(in_epoch)
            if ended or not self.recorder.active or len(self.watch) >= _UNCHECKED:
                self.watch.check()
            yield progress.epochs

    def _order(self, samples: int) -> Tensor:
        """The order of the next epoch's samples, (S, n)."""
        if self.training.shuffle:
            return choose_indices(samples, samples, self._streams["batches"])
        return torch.arange(samples).repeat(len(self.seeds), 1)

    def _split(self, order: Tensor) -> list[Tensor]:
        """The batches of an epoch, (S, n) each."""
        # torch rejects NumPy integers.
        batches = list(order.split(int(self.training.batch_size), dim=1))
        # Batch norm cannot train on one sample, so a last batch of one is left out.
        if self._has_batch_norm and len(batches) > 1 and batches[-1].shape[1] == 1:
            del batches[-1]
        return batches

    def new_optimizer(self) -> TorchOptimizer | None:
        """A fresh optimizer, None for plain SGD."""
        return None if self.training.is_plain_sgd else TorchOptimizer(self.training, self.network)

    def _parted(self, split: Split, task: int) -> tuple[Split, Split]:
        """The samples to train on, and those that are held out."""
        if not self.training.watches_held_out:
            return split, split
        return part_held_out(split, self.training.held_out, self.seeds[0], task)

    def _set_lr(self, done: float) -> None:
        """The learning rate at a point of the task, in epochs."""
        decays = self.progress.held_out.decays if self.progress else 0
        factor = self.training.lr_factor(done, decays)
        if self.optimizer is None:
            self.view.lr = factor * self.training.lr
        else:
            self.view.lr = self.optimizer.set_factor(factor)

    def _step(self, split: Split, index: Tensor, task: int) -> Tensor:
        """One step by itself; returns whether the weights are finite after it, (S,)."""
        samples = batch_of(split, index, task)
        if self.training.augmentation:
            inputs = augmented(
                samples.inputs, self.training.augmentation, self._streams["augmentation"]
            )
            samples = replace(samples, inputs=inputs)
        with self.sampler.step():
            self.update(samples)
        self.recorder.rehearsed(index.shape[1])
        return self.network.theta.isfinite().all(1)

    def update(self, samples: Samples) -> None:
        """One step on a batch: θ ← θ − lr · g̃, or what another optimizer makes of it."""
        network, method, view, optimizer = self.network, self.method, self.view, self.optimizer
        size, free = network.protected_size, method.trains_heads(self.state)
        g = network.gradient(samples, update_buffers=True)
        view.at(samples, self.steps)
        # A recordable projection is linear in g, so lr may come after it.
        if optimizer is None and (method.acts_on == "gradient" or method.recordable):
            g_tilde, self.state = take_step(method, g[:, :size], self.state, view)
            network.protected.sub_(g_tilde, alpha=view.lr)
            if free:
                network.theta[:, size:].sub_(g[:, size:], alpha=view.lr)
        elif optimizer is not None and method.acts_on == "gradient":
            g_tilde, self.state = take_step(method, g[:, :size], self.state, view)
            optimizer.step(torch.cat([g_tilde, g[:, size:]], 1), free=free)
        else:
            update = view.lr * g if optimizer is None else optimizer.update(g, free=free)
            step, self.state = take_step(method, update[:, :size], self.state, view)
            network.protected.sub_(step)
            if free:
                network.theta[:, size:].sub_(update[:, size:])
        view.at(None, self.steps)

    def _follow(self) -> None:
        """Let a method that adapts see how well the earlier tasks are kept, if it is time."""
        kept = self.followed
        if kept is None:
            return
        sizes = kept.tasks[0].unique_consecutive(return_counts=True)[1].tolist()
        if not is_look(self.steps, len(sizes)):
            return

        def losses(theta: Tensor | None) -> Tensor:
            each = self.view.losses(self.view.outputs(kept, theta), kept)
            return torch.stack([of_task.mean(1) for of_task in each.split(sizes, 1)], 1)

        with eval_mode(self.network.module), torch.no_grad():
            self.state = self.method.adapted(self.state, lambda theta: losses(None) - losses(theta))

    @property
    def at_start(self) -> bool:
        """Whether no step was taken yet on the present task."""
        return self.progress is None or self.steps == self.progress.first_step

    def trains_at(self, step: int) -> bool:
        """Whether the network is in training mode at a step of the run."""
        after = self.training.eval_mode_after
        return not after or bool(step < after)

    def _set_mode(self) -> None:
        training = self.trains_at(self.steps)
        if self.network.module.training != training:
            self.network.module.train(training)

    def consolidate(self, split: Split, task: int) -> None:
        """Let the method store what it needs of the task that was learned."""
        learned = LearnedTask(
            self.network, self._parted(split, task)[0], task, self._streams["remembered samples"]
        )
        self.view.task, self.view.step = task, self.steps
        with eval_mode(self.network.module):
            state = consolidated(self.method, self.state, self.view, learned, len(self.seeds))
        if self.budget is not None:
            state, note = state.within(self.budget)
            if note is not None:
                warn_caller(f"task {task + 1}: {note}")
        self.state = state
        if self.method.adapts:
            generators = [stream(seed, "followed samples", task) for seed in self.seeds]
            index = choose_indices(FOLLOWED, learned.size, generators)
            new = batch_of(learned.split, index.to(split.labels.device), task)
            self.followed = new if self.followed is None else self.followed + new
        self.progress = self.optimizer = None

    def use_storage(self, storage: Storage) -> None:
        """Store directions in another way, from before the first task on."""
        self.view.storage = storage
        self.state = check_state(self.method, self.method.init(self.view), len(self.seeds))
        check_storage(self.method, self.state, storage)

    def generators(self) -> list[torch.Generator]:
        """All random streams: batches, stored samples, memory batches, augmentation."""
        return [
            *self._streams["batches"],
            *self._streams["remembered samples"],
            *self.sampler.generators,
            *self._streams["augmentation"],
        ]

    def accuracy(self, split: Split, classes: range) -> Tensor:
        """Share of the samples that are classified correctly, in percent, (S,)."""
        self.network.module.eval()
        device = self.network.theta.device
        correct = torch.zeros(len(self.seeds), dtype=torch.long, device=device)
        chunk = _EVALUATION_CHUNK
        if device.type == "cuda":
            chunk = _EVALUATION_NUMBERS // split.inputs[0].numel()
        chunk = self.training.evaluation_batch or max(1, chunk // len(self.seeds))
        for index in _parts(len(split), chunk, device):
            inputs, labels = split.take(index.expand(len(self.seeds), -1))
            correct += self.network.correct(inputs, labels, classes)
        return 100.0 * correct.double().cpu() / len(split)
