"""What `fit` hands to a method: gradients on its memory, and the task that was just learned."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from forgetless.data import Split
from forgetless.methods import Samples
from forgetless.support.streams import batch
from forgetless.tangent import TangentFeatures
from forgetless.training.network import Network

# Samples whose per-sample gradients are looked at together when only their sum is wanted: what
# stays in a CPU's cache, and what keeps a GPU busy.
_FISHER_CHUNK = {"cpu": 1024, "cuda": 16384}


def choose(count: int, available: int, generators: Sequence[torch.Generator]) -> Tensor:
    """For each seed a random choice without replacement, (S, min(count, available))."""
    draws = [torch.randperm(available, generator=g)[:count] for g in generators]
    return torch.stack(draws)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on its way to the device, without waiting for what a GPU is doing."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


@final
class Draws:
    """Random choices of remembered samples for each seed, made when asked for or ahead of that.

    Either way a seed's generator draws the same, in the same order.

    Arguments:
        generators: one for each seed.
        device: where the choices are wanted.
    """

    def __init__(self, generators: Sequence[torch.Generator], device: torch.device) -> None:
        self.generators = generators
        self.device = device
        self._asked: list[tuple[int, int]] = []  # by the latest step: count, and among how many
        self._coming = self.blank(0)
        self._handed_out: Iterator[Tensor] | None = None

    def __call__(self, count: int, available: int) -> Tensor:
        """A choice of `count` among those available, for each seed, (S, count)."""
        if self._handed_out is not None:
            return next(self._handed_out)
        self._asked.append((count, available))
        return torch.stack([batch(count, available, g) for g in self.generators]).to(self.device)

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step, with choices that were made ahead or, where there are none, made now."""
        if len(self._coming):
            with self.handing_out(self.take(1)):
                yield
        else:
            self._asked.clear()
            yield

    def ahead(self, steps: int) -> None:
        """Make the choices of coming steps, which will ask for what the latest one did."""
        if not self._asked or not steps:
            return

        def of_seed(generator: torch.Generator) -> Tensor:
            return torch.stack(
                [torch.cat([batch(m, n, generator) for m, n in self._asked]) for _ in range(steps)]
            )

        with ThreadPoolExecutor(len(self.generators)) as pool:
            drawn = torch.stack(list(pool.map(of_seed, self.generators)), dim=1)
        choices = drawn.split([count for count, _ in self._asked], dim=2)  # (steps, S, count) each
        self._coming = sent(torch.cat([c.flatten(1) for c in choices], dim=1), self.device)

    def blank(self, steps: int) -> Tensor:
        """Room for the choices of some steps, (steps, S · Σ count)."""
        numbers = len(self.generators) * sum(count for count, _ in self._asked)
        return torch.zeros(steps, numbers, dtype=torch.long, device=self.device)

    def take(self, steps: int) -> Tensor:
        """The choices of the next steps, made ahead: (steps, S · Σ count)."""
        taken, self._coming = self._coming[:steps], self._coming[steps:]
        return taken

    @property
    def asked(self) -> list[tuple[int, int]]:
        """What the latest step asked for: how many, and among how many."""
        return list(self._asked)

    @property
    def coming(self) -> Tensor:
        """The choices that were made ahead and are still to be taken."""
        return self._coming

    def restore(self, asked: Sequence[Sequence[int]], coming: Tensor) -> None:
        """As it was when `asked` and `coming` gave these."""
        self._asked = [(int(count), int(available)) for count, available in asked]
        self._coming = coming.to(self.device)

    @contextmanager
    def handing_out(self, choices: Tensor) -> Iterator[None]:
        """Who asks gets these, (steps, S · Σ count), one after the other."""
        seeds = len(self.generators)
        lengths = [seeds * count for count, _ in self._asked] * len(choices)
        parts = choices.flatten().split(lengths) if lengths else ()
        self._handed_out = (part.view(seeds, -1) for part in parts)
        try:
            yield
        finally:
            self._handed_out = None


@final
class MemoryGradient:
    """`LossGrad` by the network at its present weights, over the protected parameters."""

    def __init__(self, network: Network, classes: Sequence[range], draws: Draws) -> None:
        self.network = network
        self.draws = draws
        self.starts = torch.tensor([c.start for c in classes], device=network.theta.device)

    def __call__(
        self, samples: Samples, batch_size: int | None = None, *, one_head: bool = False
    ) -> Tensor:
        """The mean loss gradient on the samples or on a random batch of them, (S, p)."""
        if batch_size is not None and batch_size < len(samples):
            samples = samples.select(self.draws(batch_size, len(samples)))
        if one_head:
            samples = self._through_first_head(samples)
        return self.network.gradient(samples)[:, : self.network.protected_size]

    def of_each(self, several: Sequence[Samples]) -> Tensor:
        """The mean loss gradients on K sets of samples, (S, K, p)."""
        return self.network.gradients(several)[..., : self.network.protected_size]

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
        chunk = _FISHER_CHUNK.get(total.device.type, _FISHER_CHUNK["cpu"])
        for index in torch.arange(self.size).split(chunk):
            samples = self._samples(index.expand(self.network.seeds, -1))
            for s in range(self.network.seeds):
                total[s] += self.network.loss_features(samples, s).squared_sum()
        return total

    def _samples(self, index: Tensor) -> Samples:
        return batch_of(self.split, index.to(self.split.labels.device), self.index)


def batches_of(samples: Samples, size: int) -> Iterator[Samples]:
    """Samples in the order in which they come, some at a time."""
    parts = (t.split(size, dim=1) for t in (samples.inputs, samples.labels, samples.tasks))
    return (Samples(*batch) for batch in zip(*parts, strict=True))


def batch_of(split: Split, index: Tensor, task: int) -> Samples:
    """The samples of a task at index (S, n)."""
    inputs, labels = split.take(index)
    return Samples(inputs, labels, torch.full_like(labels, task))
