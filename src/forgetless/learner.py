"""One group of seeds learning task after task: the training step, and nothing around it."""

from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from forgetless.data import Scenario, Split
from forgetless.driver import LearnedTask, MemoryGradient, batch_of, choose
from forgetless.errors import TrainingError
from forgetless.methods import Method, State
from forgetless.network import Network
from forgetless.streams import stream

# Test samples of all seeds together that go through the network at once.
_EVALUATION_CHUNK = 8192


@final
class Learner:
    """A network with S sets of weights, and a method that watches over them.

    Arguments:
        network: the network.
        method: what is done against forgetting.
        scenario: where the tasks come from.
        seeds: the S seeds.
        batch_size: samples in a step.
        lr: learning rate.
        eval_mode_after: the step of the whole run from which on the network is in eval mode while
            it trains, so that batch norm stays fixed; 0 for never.
    """

    def __init__(
        self,
        network: Network,
        method: Method[Any],
        scenario: Scenario,
        seeds: Sequence[int],
        *,
        batch_size: int,
        lr: float,
        eval_mode_after: int,
    ) -> None:
        self.network = network
        self.method = method
        self.seeds = tuple(seeds)
        self.batch_size = batch_size
        self.lr = lr
        self.eval_mode_after = eval_mode_after
        self.state: State = method.init(self._protected())
        self.steps = 0
        self._needs_neighbours = any(isinstance(m, _BatchNorm) for m in network.module.modules())
        self._batches = [stream(s, "batches") for s in seeds]
        self._choices = [stream(s, "remembered samples") for s in seeds]
        self._loss_grad = MemoryGradient(
            network,
            [scenario.classes(t) for t in range(scenario.n_tasks)],
            [stream(s, "memory batches") for s in seeds],
        )

    def train(self, split: Split, task: int, epochs: int) -> Iterator[int]:
        """Learn a task; yields the number of each epoch, from 1, when it is done."""
        first_step = self.steps
        for epoch in range(1, epochs + 1):
            order = choose(len(split), len(split), self._batches).to(self.network.theta.device)
            finite = []
            for index in self._epoch(order):
                finite.append(self._step(split, index, task))
            # Looking at every step's result at once keeps a GPU from waiting for each.
            self._check_finite(torch.stack(finite), task, first_step)
            yield epoch

    def _epoch(self, order: Tensor) -> tuple[Tensor, ...]:
        batches: tuple[Tensor, ...] = order.split(self.batch_size, dim=1)
        # Batch norm cannot train on one sample: a last batch of one waits for the next epoch.
        if self._needs_neighbours and len(batches) > 1 and batches[-1].shape[1] == 1:
            batches = batches[:-1]
        return batches

    def _step(self, split: Split, index: Tensor, task: int) -> Tensor:
        """θ ← θ − lr · g̃; returns whether the weights are finite after it, (S,)."""
        network = self.network
        training = not self.eval_mode_after or self.steps < self.eval_mode_after
        if network.module.training != training:
            network.module.train(training)
        gradient = network.gradient(batch_of(split, index, task), remember=True)
        size = network.protected_size
        update = self.method.update(
            gradient[:, :size], self.state, self._protected(), self._loss_grad
        )
        network.theta[:, :size].sub_(update, alpha=self.lr)
        if self.method.trains_heads(self.state):
            network.theta[:, size:].sub_(gradient[:, size:], alpha=self.lr)
        self.steps += 1
        return network.theta.isfinite().all(1)

    def _check_finite(self, finite: Tensor, task: int, first_step: int) -> None:
        broken = (~finite).nonzero()
        if len(broken):
            row, seed = broken[0].tolist()
            step = self.steps - len(finite) + row - first_step + 1
            raise TrainingError(
                f"the gradient is NaN or infinite at step {step} of task {task + 1}, "
                f"seed {self.seeds[seed]}; a smaller learning rate than {self.lr:g} may help"
            )

    def consolidate(self, split: Split, task: int) -> None:
        """Let the method remember the task that was learned."""
        learned = LearnedTask(self.network, split, task, self._choices)
        self.state = self.method.consolidate(self.state, self._protected(), learned)

    def accuracy(self, split: Split, classes: range) -> Tensor:
        """Share of the samples that are classified right, in percent, (S,)."""
        self.network.module.eval()
        device = self.network.theta.device
        correct = torch.zeros(len(self.seeds), dtype=torch.long, device=device)
        chunk = max(1, _EVALUATION_CHUNK // len(self.seeds))
        for index in torch.arange(len(split), device=device).split(chunk):
            inputs, labels = split.take(index.expand(len(self.seeds), -1))
            correct += self.network.correct(inputs, labels, classes)
        return 100.0 * correct.double().cpu() / len(split)

    def _protected(self) -> Tensor:
        return self.network.theta[:, : self.network.protected_size]
