"""A guard's view for methods: the user's model, and the task just learned."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Never, final

import torch
from torch import Tensor
from torch.optim import Optimizer

from forgetless.guard.batches.loading import TaskData
from forgetless.guard.batches.outputs import logits_of, require_labels
from forgetless.guard.batches.samples import Part, StoredSamples
from forgetless.guard.distributed.loading import SharedTaskData
from forgetless.guard.model import GuardedModel
from forgetless.linalg import Layout
from forgetless.methods.base import FeatureOutputs, LossFunction, MomentOutputs, seed_losses
from forgetless.subspace import Storage
from forgetless.support.progress import advance
from forgetless.support.streams import random_subset
from forgetless.support.validation import ConfigError, DataError, NoSamplesError, whole
from forgetless.tangent import InputMoments, Moments, TangentFeatures

# Samples whose per-sample gradients are in memory at once when only their sum is wanted.
_FISHER_CHUNK = 1024


@final
class GuardView:
    """`View` of a user's model; S is 1.

    Arguments:
        model: the model.
        generator: of random choices.
        storage: how directions are stored.
        task: the task that is being learned, from 0.
        step: steps taken before this one.
        optimizers: those that take the step, which have the learning rate.
        theta: the weights, (1, p); None for the present ones.
        movable: mask (p,) of the parameters that can move; None for all.
        batch: the present batch, if it is known.
    """

    def __init__(
        self,
        model: GuardedModel,
        generator: torch.Generator,
        storage: Storage,
        *,
        task: int,
        step: int,
        optimizers: Sequence[Optimizer],
        theta: Tensor | None = None,
        movable: Tensor | None = None,
        batch: StoredSamples | None = None,
    ) -> None:
        self.model = model
        self.storage = storage
        self.task = task
        self._generator = generator
        self._step = step
        self._optimizers = optimizers
        self._theta = theta
        self._movable = movable
        self._batch = batch
        self.by_inputs: set[str] = set()  # protected whatever their gradients are

    @property
    def theta(self) -> Tensor:
        """The protected weights, (1, p)."""
        # A copy: a method may store them, and the guard uses their memory again.
        return self.model.parameters.read() if self._theta is None else self._theta.clone()

    @property
    def layout(self) -> Layout:
        """The columns of theta that belong to each parameter."""
        return self.model.parameters.layout

    @property
    def step(self) -> int:
        """Steps taken before this one."""
        self._require_unrecorded()
        return self._step

    @property
    def lr(self) -> float:
        """The learning rate of the stepping optimizer's first group with protected parameters."""
        self._require_unrecorded()
        return self.model.parameters.learning_rate(self._optimizers)

    @property
    def batch(self) -> StoredSamples:
        """The samples of this step."""
        if self._batch is None:
            raise ConfigError(
                "the method needs the present batch: call guard.observe(batch) before every "
                "optimizer.step(), with a method that says needs_batch = True"
            )
        return self._batch

    @property
    def starts(self) -> Never:
        """Unknown to a guard."""
        raise ConfigError(
            "a guard does not know which outputs belong to which task: a method that asks for "
            "that, such as AGEM(heads='released'), is for `fit` alone"
        )

    def outputs(self, samples: StoredSamples, theta: Tensor | None = None) -> Tensor:
        """The model's outputs on samples of one shape, (1, n, C)."""
        self._require_whole()
        theta = self._theta if theta is None else theta
        return logits_of(self.model.outputs(_only(samples), theta)).unsqueeze(0)

    def losses(self, outputs: Tensor, samples: StoredSamples) -> Tensor:
        """The loss of each sample, (1, n)."""
        target = self.model.placed(_only(samples)).target
        return self.model.loss.of_each(outputs[0], target).unsqueeze(0)

    def labels(self, samples: StoredSamples) -> Tensor:
        """The class of each sample, (1, n)."""
        target = self.model.placed(_only(samples)).target
        found = "none" if target is None else f"{target.dtype} of shape {tuple(target.shape)}"
        classes = target is not None and not target.is_floating_point() and target.dim() == 1
        if target is None or not classes:
            raise ConfigError(
                f"the method needs the class of every sample, integers (n,), and labels are {found}"
            )
        return target.long().unsqueeze(0)

    def competing(self, outputs: Tensor, samples: StoredSamples) -> Tensor:
        """All outputs, (1, n, C): a guard knows of no tasks that have some each."""
        return torch.ones_like(outputs, dtype=torch.bool)

    def gradient(
        self,
        samples: StoredSamples,
        loss: LossFunction | None = None,
        *,
        theta: Tensor | None = None,
    ) -> Tensor:
        """The gradient of the mean training loss or of another loss, (1, p)."""
        self._require_whole()

        def other(outputs: Any, part: Part) -> Tensor:
            logits = logits_of(outputs).unsqueeze(0)
            return seed_losses(chosen(logits, StoredSamples((part,))), logits).squeeze(0)

        chosen: Any = loss
        theta = self.theta if theta is None else theta
        gradient = self.model.gradient(samples, theta, None if loss is None else other)
        return gradient if self._movable is None else gradient * self._movable

    def gradients(self, several: Sequence[StoredSamples]) -> Tensor:
        """The gradients on K sets of samples, (1, K, p)."""
        return torch.stack([self.gradient(samples) for samples in several], dim=1)

    def features(
        self, samples: StoredSamples, outputs: FeatureOutputs = "class"
    ) -> Sequence[TangentFeatures]:
        """φ of the samples' protected scalars, or of all logits (n, C) in their place."""
        phi = self.model.features(samples, outputs)
        require_labels(self.model.output, self.model.label_count(samples.parts))
        return [phi]

    def moments(self, samples: StoredSamples, outputs: MomentOutputs = "all") -> Moments:
        """The Kronecker moments of the samples' gradients."""
        found = self.model.moments(samples, outputs, lambda count: self.random(count)[0])
        require_labels(self.model.output, self.model.label_count(samples.parts))
        found, blind = _protecting_blind_by_inputs(found)
        self.by_inputs.update(blind, (found.biases[n] for n in blind if n in found.biases))
        return Moments.of_seeds([found])

    def input_moments(self, samples: StoredSamples) -> InputMoments:
        """The second moments of the layers' inputs."""
        self.by_inputs.update(self.layout.columns)
        return InputMoments.of_seeds([self.model.input_moments(samples)])

    def layer_inputs(self, samples: StoredSamples) -> dict[str, Tensor]:
        """Weight of a layer → its inputs on samples, (1, N, d)."""
        self.by_inputs.update(self.layout.columns)
        return {name: x.unsqueeze(0) for name, x in self.model.layer_inputs(samples).items()}

    def choice(self, count: int, available: int) -> Tensor:
        """Random indices without replacement, (1, min(count, available))."""
        self._require_unrecorded()
        return random_subset(count, available, self._generator).unsqueeze(0)

    def random(self, count: int) -> Tensor:
        """Random numbers in [0, 1), (1, count)."""
        self._require_unrecorded()
        drawn = torch.rand(1, count, dtype=torch.float64, generator=self._generator)
        return drawn.to(self.model.parameters.device)

    def _require_whole(self) -> None:
        if self.model.parameters.slices is not None:
            raise ConfigError(
                "a model sharded by fully_shard gives a method features, layer inputs and squared "
                "loss gradients, but no outputs and no other gradients: use "
                "DistributedDataParallel"
            )

    def _require_unrecorded(self) -> None:
        """Stop the recording of a step whose values a CUDA graph would only repeat."""
        if self.model.parameters.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a step that is not the same every time cannot be recorded")


def _only(samples: StoredSamples) -> Part:
    if len(samples.parts) != 1:
        raise ConfigError(
            f"the samples have {len(samples.parts)} shapes, and outputs of several shapes are no "
            "one tensor: ask for them shape by shape"
        )
    return samples.parts[0]


def _protecting_blind_by_inputs(moments: Moments) -> tuple[Moments, list[str]]:
    """With G = γ I for the weights that have inputs and no gradient, and their names.

    Such as the first factor of a fresh LoRA adapter, whose second factor is zero. Its gradient will
    come, and nothing tells which outputs will matter; γ gives it the mean energy of the others.
    """
    inputs = {name: _trace(moments.inputs[moments.source[name]]) for name in moments.outputs}
    energies = {name: _trace(g) * inputs[name] for name, g in moments.outputs.items()}
    seeing = [energy for energy in energies.values() if energy > 0]
    blind = [name for name, energy in energies.items() if not energy and inputs[name] > 0]
    if not seeing:
        return moments, []
    mean = sum(seeing) / len(seeing)
    outputs = dict(moments.outputs)
    for name in blind:
        g = outputs[name]
        diagonal = g.new_full((len(g),), mean / inputs[name] / len(g))
        outputs[name] = diagonal.diag() if g.dim() == 2 else diagonal
    return replace(moments, outputs=outputs), blind


def _trace(moment: Tensor) -> float:
    """Of a moment, or of its diagonal."""
    return float((moment if moment.dim() == 1 else moment.diagonal()).sum())


@final
class GuardedTask:
    """`FinishedTask` at the present weights.

    Arguments:
        model: the model.
        data: the task's training samples.
    """

    def __init__(self, model: GuardedModel, data: TaskData | SharedTaskData) -> None:
        self.model = replace(model)  # with a gathered copy of its own, if that is needed
        self.data = data
        self._drawn: StoredSamples | None = None
        self._used: StoredSamples | None = None  # for features or gradients

    @property
    def size(self) -> int:
        """How many training samples the task has."""
        return self.data.size

    def draw(self, count: int) -> StoredSamples:
        """A random choice of its training samples."""
        whole(1).check("draw's count", count)
        self._drawn = self._used = self.data.draw(count)
        return self._drawn

    def batches(self, size: int) -> Iterator[StoredSamples]:
        """All of its training samples, `size` of one shape at a time where there are as many."""
        whole(1).check("batches' size", size)
        waiting: list[Part] = []
        for part in self.data.all_parts():
            alike = StoredSamples.stacked([*waiting, part]).parts
            waiting = []
            for some in alike:
                *full, rest = torch.arange(len(some)).split(int(size))
                yield from (StoredSamples((some.select(index),)) for index in full)
                waiting.append(some.select(rest))
        yield from (StoredSamples((part,)) for part in waiting)

    def check(self) -> None:
        """Reject samples that were drawn for their loss and have none."""
        if self._drawn is not None:
            self.model.require_losses(self._drawn)

    def blind(self, *, of_loss: bool) -> list[str]:
        """The protected parameters of which no sample that was used has a gradient."""
        return [] if self._used is None else self.model.blind(self._used, of_loss=of_loss)

    def squared_loss_gradients(self) -> Tensor:
        """Σ over the training samples of the squared gradient of a sample's loss, (1, p)."""
        parameters = self.model.parameters
        width = sum(prod(shape) for shape in parameters.shapes.values())
        total = parameters.empty().new_zeros(1, width)
        waiting: list[Part] = []
        seen = labels = 0
        size = self.data.known_size if isinstance(self.data, TaskData) else None
        for part in self.data.batches():
            if self._used is None:
                self._used = StoredSamples((part,))
            waiting.append(part)
            seen += len(part)
            advance("squared gradients", seen, max(seen, size or 0))
            labels += self.model.label_count([part])
            if sum(map(len, waiting)) >= _FISHER_CHUNK:
                total += self.model.loss_features(StoredSamples.stacked(waiting)).squared_sum()
                waiting = []
        if not int(self.data.summed(torch.tensor(seen))):
            raise NoSamplesError("the loader has no samples")
        if waiting:
            total += self.model.loss_features(StoredSamples.stacked(waiting)).squared_sum()
        self.model.loss.require_labels(int(self.data.summed(torch.tensor(labels))))
        total = self.data.summed(total)
        if not bool(total.isfinite().all()):
            raise DataError("the loss of the task's samples has a NaN or infinite gradient")
        return parameters.local_part(total)
