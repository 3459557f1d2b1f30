"""What `fit` hands to a method: gradients on its memory, and the task that was just learned."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from forgetless.data import Split
from forgetless.methods import Samples
from forgetless.network import Network
from forgetless.tangent import TangentFeatures

# Samples whose per-sample gradients are looked at together when only their sum is wanted.
_FISHER_CHUNK = 1024


def choose(count: int, available: int, generators: Sequence[torch.Generator]) -> Tensor:
    """For each seed a random choice without replacement, (S, min(count, available))."""
    draws = [torch.randperm(available, generator=g)[:count] for g in generators]
    return torch.stack(draws)


@final
class MemoryGradient:
    """`LossGrad` by the network at its present weights, over the protected parameters."""

    def __init__(
        self, network: Network, classes: Sequence[range], generators: Sequence[torch.Generator]
    ) -> None:
        self.network = network
        self.generators = generators
        self.starts = torch.tensor([c.start for c in classes], device=network.theta.device)

    def __call__(
        self, samples: Samples, batch_size: int | None = None, *, one_head: bool = False
    ) -> Tensor:
        """The mean loss gradient on the samples or on a random batch of them, (S, p)."""
        if batch_size is not None and batch_size < len(samples):
            index = choose(batch_size, len(samples), self.generators)
            samples = samples.select(index.to(samples.labels.device))
        if one_head:
            samples = self._through_first_head(samples)
        return self.network.gradient(samples)[:, : self.network.protected_size]

    def _through_first_head(self, samples: Samples) -> Samples:
        """The same samples as if all belonged to the task of the first."""
        tasks = samples.tasks[:, :1].expand_as(samples.tasks)
        labels = samples.labels - self.starts[samples.tasks] + self.starts[tasks]
        return Samples(samples.inputs, labels, tasks)


@final
class LearnedTask:
    """`FinishedTask` by the network at the weights that training on the task ended with."""

    def __init__(
        self, network: Network, split: Split, index: int, generators: Sequence[torch.Generator]
    ) -> None:
        self.network = network
        self.split = split
        self.index = index
        self.generators = generators

    @property
    def size(self) -> int:
        """How many training samples the task has."""
        return len(self.split)

    def draw(self, count: int) -> Samples:
        """A random choice of its training samples."""
        return self._samples(choose(count, self.size, self.generators))

    def features(self, samples: Samples) -> Sequence[TangentFeatures]:
        """φ of the samples' true-class outputs, one operator a seed."""
        return [self.network.features(samples, s) for s in range(self.network.seeds)]

    def squared_loss_gradients(self) -> Tensor:
        """Σ over the training samples of the squared gradient of a sample's loss, (S, p)."""
        total = torch.zeros_like(self.network.theta[:, : self.network.protected_size])
        for index in torch.arange(self.size).split(_FISHER_CHUNK):
            samples = self._samples(index.expand(self.network.seeds, -1))
            for s in range(self.network.seeds):
                total[s] += self.network.loss_features(samples, s).squared_sum()
        return total

    def _samples(self, index: Tensor) -> Samples:
        return batch_of(self.split, index.to(self.split.labels.device), self.index)


def batch_of(split: Split, index: Tensor, task: int) -> Samples:
    """The samples of a task at index (S, n)."""
    inputs, labels = split.take(index)
    return Samples(inputs, labels, torch.full_like(labels, task))
