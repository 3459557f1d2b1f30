"""One architecture, S sets of weights, as a function of a flat vector (S, p); a view of it."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import final

import torch
from torch import Size, Tensor, nn
from torch.func import vmap
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from forgetless.data import Split
from forgetless.linalg import Layout
from forgetless.methods import Samples
from forgetless.methods.base import FeatureOutputs, LossFunction, MomentOutputs, seed_losses
from forgetless.subspace import Storage
from forgetless.support.cuda_graphs import run_concurrently
from forgetless.support.validation import ConfigError, DataError, first_line, whole
from forgetless.tangent import (
    Batch,
    InputMoments,
    Known,
    Moments,
    TangentFeatures,
    drawn_likelihood,
    features_of,
    input_moments,
    kronecker_moments,
    layer_inputs,
    mixed_likelihood,
    probed,
)
from forgetless.tangent.evaluation import Scalar, call_with, eval_mode, true_class
from forgetless.training.fast import perceptron_of
from forgetless.training.sampling import Sampler, batch_of, choose_indices

_CACHED = 1 << 24  # bytes of a CPU's cache
Predicate = Callable[[str], bool]
NamedTensors = dict[str, Tensor]


@final
class Network:
    """S copies of a network that differ in their weights, run as one program.

    The trained weights are one flat tensor theta (S, p): first those that a method protects, then
    the free ones (such as heads). Frozen parameters and buffers are `fixed`, by name.

    Arguments:
        modules: the S initialised networks.
        active: the outputs of each task, (T, C) of bool.
        is_free: whether the parameter of that name is trained out of the method's reach.
        is_frozen: whether it is not trained at all.
        device: where to run.
        dtype: floating-point type of weights and inputs.

    Attributes:
        shortcut: logits and gradients by hand, for networks that have them (`training.fast`);
            everything here works without.
        work: multiply-adds of the outputs of one sample.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        active: Tensor,
        *,
        is_free: Predicate,
        is_frozen: Predicate,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.module = copy.deepcopy(modules[0]).to(device, dtype)
        # Where every task has all outputs there is nothing to mask.
        self.active = None if bool(active.all()) else active.to(device)
        self.n_outputs = active.shape[1]
        trained = [
            n for n, p in self.module.named_parameters() if p.requires_grad and not is_frozen(n)
        ]
        self.protected_names = [n for n in trained if not is_free(n)]
        if not self.protected_names:
            raise ConfigError("the model has no trainable parameters that are to be protected")
        tensors = [{**dict(m.named_parameters()), **dict(m.named_buffers())} for m in modules]

        def stacked(name: str) -> Tensor:
            values = torch.stack([t[name].detach() for t in tensors]).to(device)
            return values.to(dtype) if values.is_floating_point() else values

        names = self.protected_names + [n for n in trained if is_free(n)]
        self.shapes = {n: tensors[0][n].shape for n in names}
        self.layout = Layout(self.shapes)
        self.protected_size = sum(self.shapes[n].numel() for n in self.protected_names)
        self.theta = torch.cat([stacked(n).reshape(len(tensors), -1) for n in names], dim=1)
        self.fixed = {n: stacked(n) for n in tensors[0] if n not in self.shapes}
        self.shortcut = perceptron_of(self.module, self.shapes, self.theta)
        # A GPU is slower with the convolutions of several networks at once than one by one.
        convolves = any(isinstance(m, nn.modules.conv._ConvNd) for m in self.module.modules())
        self.by_seed = convolves and device.type == "cuda"
        self.takes_several_sets = True  # until vmap fails on them
        self.work = float(self.theta.shape[1])  # until `check_outputs` counts
        self._known: dict[tuple[str, Size], Known] = {}  # about features, by scalar and shape

    @property
    def seeds(self) -> int:
        """S."""
        return self.theta.shape[0]

    @property
    def protected(self) -> Tensor:
        """The weights that a method protects, a view of theta."""
        return self.theta[:, : self.protected_size]

    def values(self, theta: Tensor) -> NamedTensors:
        """Every parameter and buffer, (S, *shape), as views of theta (S, p) and `fixed`."""
        return self.layout.split(theta) | self.fixed

    def logits(self, theta: Tensor, inputs: Tensor) -> Tensor:
        """All outputs in the module's present mode: (S, p), (S, n, *) → (S, n, C)."""
        if self.shortcut is not None and self.shortcut.takes(inputs) and not theta.requires_grad:
            return self.shortcut.logits(theta, inputs)
        return self._run(theta, self._buffers(update=False), inputs)

    def _buffers(self, *, update: bool) -> NamedTensors:
        """The fixed values; copies of them unless the module may update them (batch norm)."""
        copied = self.module.training and not update
        return {n: v.clone() for n, v in self.fixed.items()} if copied else self.fixed

    def _run(self, theta: Tensor, fixed: NamedTensors, inputs: Tensor) -> Tensor:
        """The module at each seed's values: (S, n, *) → (S, n, C)."""
        values = self.layout.split(theta) | fixed
        if len(theta) == 1:
            return self._call({n: v[0] for n, v in values.items()}, inputs[0]).unsqueeze(0)
        return vmap(self._call, randomness="different")(values, inputs)

    def _call(self, values: NamedTensors, inputs: Tensor) -> Tensor:
        outputs = call_with(self.module, values, (inputs,))
        if not isinstance(outputs, Tensor):
            kind = type(outputs).__name__
            raise ConfigError(f"the model must return one tensor of outputs, not a {kind}")
        return outputs

    def gradient(self, samples: Samples, *, update_buffers: bool = False) -> Tensor:
        """The gradient of the samples' mean cross-entropy at theta, (S, p).

        For K sets of samples a seed, with labels (S · K, n), it is (S · K, p).

        Arguments:
            samples: where to take it.
            update_buffers: let the module update its buffers (batch-norm statistics).
        """
        if self.shortcut is not None and self.shortcut.takes(samples.inputs):
            return self.shortcut.gradient(self.theta, samples, self.active)
        sets = len(samples.labels) // self.seeds
        fixed = self._buffers(update=update_buffers)
        try:
            if self.by_seed and sets == 1:
                works = [
                    partial(self._backward, slice(s, s + 1), fixed, samples)
                    for s in range(self.seeds)
                ]
                return torch.cat(run_concurrently(works, self.theta.device))
            return self._backward(slice(None), fixed, samples, sets)
        except ValueError as error:  # batch norm rejects a single sample
            what = f"the model cannot train on {len(samples)} at a time: {error}"
            raise ConfigError(what) from error

    def _backward(
        self, rows: slice, fixed: NamedTensors, samples: Samples, sets: int = 1
    ) -> Tensor:
        """The gradients of some seeds by one backward pass, (rows · K, p)."""
        theta, fixed = self.theta[rows].detach(), {n: v[rows] for n, v in fixed.items()}
        if sets > 1:
            theta = theta.repeat_interleave(sets, 0)
            fixed = {n: v.repeat_interleave(sets, 0) for n, v in fixed.items()}
        theta.requires_grad_()
        logits = self._run(theta, fixed, samples.inputs[rows])
        losses = self.losses(logits, samples.labels[rows], samples.tasks[rows])
        # Seeds do not interact, so the gradient of the sum of their means holds each seed's own.
        share = torch.full_like(losses, 1 / losses.shape[1])
        return torch.autograd.grad(losses, theta, share)[0]

    def gradients(self, several: Sequence[Samples]) -> Tensor:
        """The gradients of K sets of samples' mean cross-entropy, (S, K, p).

        Sets of one size run at once, as if each had a network of its own; where that copies the
        weights, on a CPU only if all copies fit its cache.
        """
        alike = len({samples.inputs.shape for samples in several}) == 1
        copies = self.shortcut is None or not self.shortcut.takes(several[0].inputs)
        fits = self.theta.is_cuda or len(several) * self.theta.nbytes <= _CACHED or not copies
        if alike and fits and self.takes_several_sets:
            try:
                return self._gradients_at_once(several)
            except (RuntimeError, ValueError, NotImplementedError):
                self.takes_several_sets = False  # vmap cannot run the module, or memory is short
        return torch.stack([self.gradient(samples) for samples in several], dim=1)

    def _gradients_at_once(self, several: Sequence[Samples]) -> Tensor:
        inputs, labels, tasks = (
            torch.stack([getattr(samples, part) for samples in several], dim=1).flatten(0, 1)
            for part in ("inputs", "labels", "tasks")
        )
        return self.gradient(Samples(inputs, labels, tasks)).view(self.seeds, len(several), -1)

    def losses(self, logits: Tensor, labels: Tensor, tasks: Tensor) -> Tensor:
        """Cross-entropy of each sample within its task's outputs: (*, C), (*), (*) → (*)."""
        if self.active is not None:
            logits = logits.masked_fill(~self.active[tasks], -torch.inf)
        losses = cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
        return losses.view_as(labels)

    def correct(self, inputs: Tensor, labels: Tensor, classes: range) -> Tensor:
        """The number of samples classified correctly among the classes, (S,)."""
        with torch.no_grad():
            logits = self.logits(self.theta, inputs)[..., classes.start : classes.stop]
        return (logits.argmax(-1) + classes.start == labels).sum(1)

    def features(
        self, samples: Samples, seed: int, outputs: FeatureOutputs = "class"
    ) -> TangentFeatures:
        """φ of one seed: gradients of the true class's or all outputs, protected parameters."""
        if outputs == "all":
            competing = self._competing(samples, seed)

            def all_outputs(logits: Tensor) -> Tensor:
                return logits[:, competing]

            return self._per_sample(samples, seed, all_outputs)
        return self._per_sample(samples, seed, true_class, samples.labels[seed])

    def moments(
        self, samples: Samples, seed: int, outputs: MomentOutputs, random: Tensor
    ) -> Moments:
        """The Kronecker moments of one seed.

        Arguments:
            samples: the samples.
            seed: the seed.
            outputs: whose gradients, as `View.moments` says.
            random: numbers in [0, 1): for "all" a row of outputs (n, C), for drawn labels (n, 1).
        """
        competing = self._competing(samples, seed)
        scalars: dict[MomentOutputs, tuple[Scalar, Tensor]] = {
            "class": (true_class, samples.labels[seed]),
            "all": (
                lambda logits, signs: probed(logits[:, competing], signs[:, competing]),
                (random >= 0.5).to(self.theta) * 2 - 1,
            ),
            "fisher": (
                lambda logits, uniform: drawn_likelihood(logits[:, competing], uniform[:, 0]),
                random,
            ),
            "mixed": (
                lambda logits, uniform: mixed_likelihood(logits[:, competing], uniform[:, 0]),
                random,
            ),
        }
        scalar, target = scalars[outputs]
        values = {n: v[seed] for n, v in self.values(self.theta).items()}
        batch = Batch((samples.inputs[seed],), {}, (target,))
        with eval_mode(self.module):
            return kronecker_moments(
                self.module, values, [batch], scalar, names=self.protected_names
            )

    def _competing(self, samples: Samples, seed: int) -> Tensor:
        """The outputs that compete for samples of these tasks, (C,) of bool."""
        if self.active is None:
            return torch.ones(self.n_outputs, dtype=torch.bool, device=self.theta.device)
        return self.active[samples.tasks[seed].unique()].any(0)

    def loss_features(self, samples: Samples, seed: int) -> TangentFeatures:
        """Gradients of each sample's loss in the protected parameters, for one seed."""
        return self._per_sample(
            samples, seed, self.losses, samples.labels[seed], samples.tasks[seed]
        )

    def input_moments(self, samples: Samples, seed: int) -> InputMoments:
        """The second moments of the layers' inputs of one seed."""
        values = {n: v[seed] for n, v in self.values(self.theta).items()}
        batch = Batch((samples.inputs[seed],), {})
        return input_moments(self.module, values, [batch], names=self.protected_names)

    def layer_inputs(self, samples: Samples, seed: int) -> dict[str, Tensor]:
        """Protected weight → its inputs on one seed's samples, (N, d), in eval mode."""
        values = {n: v[seed] for n, v in self.values(self.theta).items()}
        batch = Batch((samples.inputs[seed],), {})
        return layer_inputs(self.module, values, [batch], names=self.protected_names)

    def _per_sample(
        self, samples: Samples, seed: int, scalar: Callable[..., Tensor], *targets: Tensor
    ) -> TangentFeatures:
        values = {n: v[seed] for n, v in self.values(self.theta).items()}
        batch = Batch((samples.inputs[seed],), {}, targets)
        key = scalar.__name__, samples.inputs.shape[2:]
        names, known = self.protected_names, self._known.get(key)
        with eval_mode(self.module):
            phi = features_of(self.module, values, [batch], scalar, names=names, known=known)
        if phi.known is not None:
            # Only a plain chain is certain to lay out other samples as it did these.
            layout = phi.known.layout if self.shortcut is not None else None
            self._known[key] = replace(phi.known, layout=layout)
        return phi

    def state_dict(self, seed: int) -> NamedTensors:
        """The weights and buffers of one seed, as the module's `load_state_dict` takes them."""
        values = {n: v[seed].detach().cpu().clone() for n, v in self.values(self.theta).items()}
        # A tied parameter has one value and several names.
        first = {p: n for n, p in reversed(list(self.module.named_parameters()))}
        every = self.module.named_parameters(remove_duplicate=False)
        values |= {n: values[first[p]].clone() for n, p in every if n not in values}
        # A state_dict does not have buffers that are not persistent.
        return {n: values[n] for n in self.module.state_dict() if n in values}

    def load_state_dict(self, seed: int, tensors: Mapping[str, Tensor]) -> None:
        """Load the weights and buffers of one seed from what `state_dict` returned."""
        values = self.values(self.theta)  # views: writing to them changes theta
        for name in tensors.keys() & values.keys():
            values[name][seed].copy_(tensors[name])

    def check_outputs(self, inputs: Tensor) -> None:
        """Reject a model that cannot run inputs (S, n, *) or has the wrong number of outputs."""
        try:
            with eval_mode(self.module), torch.no_grad():
                outputs = self._counted_logits(inputs)
        except ConfigError:
            raise
        except (RuntimeError, ValueError, TypeError) as error:
            shape = tuple(inputs.shape[2:])
            reason = first_line(error)
            what = f"the model does not take inputs of shape {shape}: {reason}"
            raise ConfigError(what) from error
        if tuple(outputs.shape) != (*inputs.shape[:2], self.n_outputs):
            raise ConfigError(
                f"the model must give {self.n_outputs} outputs per sample for this scenario, "
                f"not {tuple(outputs.shape[2:])}"
            )
        if not bool(outputs.isfinite().all()):
            raise DataError("the model's outputs are not finite before any training")

    def _counted_logits(self, inputs: Tensor) -> Tensor:
        """The outputs, on the way to which `work` is counted."""
        try:
            with FlopCounterMode(display=False) as counter:
                outputs = self.logits(self.theta, inputs)
        except Exception:  # the count is not worth an error, which would come again
            return self.logits(self.theta, inputs)
        self.work = counter.get_total_flops() / (2 * self.seeds * inputs.shape[1])
        return outputs


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

    def labels(self, samples: Samples) -> Tensor:
        """The class of each sample, (S, n)."""
        return samples.labels

    def competing(self, outputs: Tensor, samples: Samples) -> Tensor:
        """The outputs of each sample's task, or of all classes seen so far, (S, n, C) of bool."""
        active = self.network.active
        return (
            torch.ones_like(outputs, dtype=torch.bool) if active is None else active[samples.tasks]
        )

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
        chosen, network, by_hand = loss or self.losses, self.network, self.network.shortcut
        if theta is None and by_hand is not None and by_hand.takes(samples.inputs):

            def error(outputs: Tensor) -> Tensor:
                outputs = outputs.detach().requires_grad_()
                with torch.enable_grad():
                    total = seed_losses(chosen(outputs, samples), outputs).sum()
                return torch.autograd.grad(total, outputs)[0]

            found = by_hand.gradient_of(network.theta, samples.inputs, error)
            return found[:, : network.protected_size]
        with torch.enable_grad():
            theta = (network.protected if theta is None else theta).detach().clone()
            theta.requires_grad_()
            outputs = self.outputs(samples, theta)
            each = chosen(outputs, samples)
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
        each = {"all": self.network.n_outputs, "class": 0}.get(outputs, 1)
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
