"""A method's view of the network and its training in `fit`, and of the task just learned."""

from collections.abc import Iterator, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from forgetless.data import Split
from forgetless.methods import Samples
from forgetless.methods.view import FeatureOutputs, LossFunction, MomentOutputs, seed_losses
from forgetless.subspace import Storage
from forgetless.support.errors import ConfigError
from forgetless.support.layout import Layout
from forgetless.support.options import whole
from forgetless.tangent import InputMoments, Moments, TangentFeatures
from forgetless.training.network import Network
from forgetless.training.sampling import Sampler, batch_of, choose_indices

# Samples whose per-sample gradients are computed at once when only their sum is wanted: those that
# stay in a CPU's cache, and that keep a GPU busy.
_FISHER_CHUNK = {"cpu": 1024, "cuda": 16384}


@final
class FitView:
    """`View` by the network at its present weights, over the protected parameters.

    Arguments:
        network: the network.
        starts: the first output of each task, (T,).
        sampler: random choices of stored samples.
        storage: how directions are stored.
        lr: learning rate.
        recordable: whether the method says so.
    """

    def __init__(
        self,
        network: Network,
        starts: Tensor,
        sampler: Sampler,
        storage: Storage,
        lr: float,
        *,
        recordable: bool = False,
    ) -> None:
        self.network = network
        self.starts = starts.to(network.theta.device)
        self.sampler = sampler
        self.storage = storage
        self.lr = lr
        self.recordable = recordable
        self.task = 0
        self.step = 0
        self.layout = Layout({n: tuple(network.shapes[n]) for n in network.protected_names})
        self._batch: Samples | None = None

    @property
    def theta(self) -> Tensor:
        """The protected weights, (S, p)."""
        # A method may store them, and then they must not follow the network's; in recorded steps
        # it stores nothing.
        live = self.network.protected
        return live if self.recordable and self._batch is not None else live.clone()

    @property
    def batch(self) -> Samples:
        """The samples of this step."""
        if self._batch is None:
            raise ConfigError("the present batch is known in `update` only")
        return self._batch

    def at(self, batch: Samples | None, step: int) -> None:
        """Show the samples and the number of a step; None outside of one."""
        self._batch, self.step = batch, step

    def outputs(self, samples: Samples, theta: Tensor | None = None) -> Tensor:
        """The network's outputs on samples, (S, n, C)."""
        theta = self.network.protected if theta is None else theta
        heads = self.network.theta[:, self.network.protected_size :]
        return self.network.logits(torch.cat([theta, heads], 1), samples.inputs)

    def losses(self, outputs: Tensor, samples: Samples) -> Tensor:
        """The cross-entropy of each sample within its task's outputs, (S, n)."""
        return self.network.losses(outputs, samples.labels, samples.tasks)

    def gradient(
        self,
        samples: Samples,
        loss: LossFunction | None = None,
        *,
        theta: Tensor | None = None,
    ) -> Tensor:
        """The gradient of the mean training loss or of another loss, (S, p)."""
        if loss is None and theta is None:
            return self.network.gradient(samples)[:, : self.network.protected_size]
        with torch.enable_grad():
            theta = (self.network.protected if theta is None else theta).detach().clone()
            theta.requires_grad_()
            outputs = self.outputs(samples, theta)
            each = (loss or self.losses)(outputs, samples)
            return torch.autograd.grad(seed_losses(each, outputs).sum(), theta)[0]

    def gradients(self, several: Sequence[Samples]) -> Tensor:
        """The mean loss gradients on K sets of samples, (S, K, p)."""
        return self.network.gradients(several)[..., : self.network.protected_size]

    def features(
        self, samples: Samples, outputs: FeatureOutputs = "class"
    ) -> Sequence[TangentFeatures]:
        """φ of the samples' outputs, one operator a seed."""
        return [self.network.features(samples, s, outputs) for s in range(self.network.seeds)]

    def moments(self, samples: Samples, outputs: MomentOutputs = "all") -> Moments:
        """The Kronecker moments of the samples' gradients."""
        seeds, n = range(self.network.seeds), len(samples)
        each = {"all": self.network.n_outputs, "class": 0, "fisher": 1}[outputs]
        random = self.random(n * each).view(len(seeds), n, each)
        return Moments.of_seeds(
            [self.network.moments(samples, s, outputs, random[s]) for s in seeds]
        )

    def input_moments(self, samples: Samples) -> InputMoments:
        """The second moments of the layers' inputs."""
        seeds = range(self.network.seeds)
        return InputMoments.of_seeds([self.network.input_moments(samples, s) for s in seeds])

    def layer_inputs(self, samples: Samples) -> Mapping[str, Tensor]:
        """Weight of a layer → its inputs on samples, (S, N, d)."""
        of_seeds = [self.network.layer_inputs(samples, s) for s in range(self.network.seeds)]
        return {name: torch.stack([inputs[name] for inputs in of_seeds]) for name in of_seeds[0]}

    def choice(self, count: int, available: int) -> Tensor:
        """Random indices without replacement for each seed, (S, min(count, available))."""
        return self.sampler(count, available)

    def random(self, count: int) -> Tensor:
        """Random numbers in [0, 1) for each seed, (S, count)."""
        generators = self.sampler.generators
        drawn = [torch.rand(count, dtype=torch.float64, generator=g) for g in generators]
        return torch.stack(drawn).to(self.network.theta.device)


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
        """The number of the task's training samples."""
        return len(self.split)

    def draw(self, count: int) -> Samples:
        """A random choice of its training samples."""
        whole(1).check("draw's count", count)
        return self._samples(choose_indices(count, self.size, self.generators))

    def batches(self, size: int) -> Iterator[Samples]:
        """All of its training samples in order, so many at a time."""
        whole(1).check("batches' size", size)
        for index in torch.arange(self.size).split(int(size)):  # torch rejects NumPy integers
            yield self._samples(index.expand(self.network.seeds, -1))

    def squared_loss_gradients(self) -> Tensor:
        """Σ over the training samples of the squared gradient of a sample's loss, (S, p)."""
        total = torch.zeros_like(self.network.theta[:, : self.network.protected_size])
        chunk = _FISHER_CHUNK.get(total.device.type, _FISHER_CHUNK["cpu"])
        for samples in self.batches(chunk):
            for s in range(self.network.seeds):
                total[s] += self.network.loss_features(samples, s).squared_sum()
        return total

    def _samples(self, index: Tensor) -> Samples:
        return batch_of(self.split, index.to(self.split.labels.device), self.index)
