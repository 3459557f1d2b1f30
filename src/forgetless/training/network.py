"""One architecture, S sets of weights: a network as a function of a flat vector (S, p)."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import final

import torch
from torch import Size, Tensor, nn
from torch.func import vmap
from torch.nn.functional import cross_entropy

from forgetless.methods import Samples
from forgetless.support.cuda_graphs import side_by_side
from forgetless.support.errors import ConfigError, DataError
from forgetless.tangent import Batch, Known, TangentFeatures, features_of
from forgetless.tangent.evaluation import call_with, eval_mode, true_class
from forgetless.training.fast.batched import BatchedLinear
from forgetless.training.fast.perceptron import Factors, Perceptron, perceptron_of

_CACHED = 1 << 24  # bytes that a CPU's cache holds
Predicate = Callable[[str], bool]


@final
class Network:
    """S copies of a network that differ in their weights, run as one program.

    The trained weights are one flat tensor theta (S, p): first those that a method protects, then
    the free ones (as heads). Everything else (frozen parameters, buffers) is `fixed`, by name.

    Arguments:
        modules: the S networks as they were initialised.
        active: for each task the outputs that belong to it, (T, C) of bool.
        is_free: whether the parameter of that name is trained out of the method's reach.
        is_frozen: whether it is not trained at all.
        device: where to run.
        dtype: floating-point type of weights and inputs.
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
        protected = [n for n in trained if not is_free(n)]
        if not protected:
            raise ConfigError("the model has no trainable parameters that are to be protected")
        self.names = protected + [n for n in trained if is_free(n)]
        tensors = [{**dict(m.named_parameters()), **dict(m.named_buffers())} for m in modules]

        def stacked(name: str) -> Tensor:
            values = torch.stack([t[name].detach() for t in tensors]).to(device)
            return values.to(dtype) if values.is_floating_point() else values

        self.shapes = {n: tensors[0][n].shape for n in self.names}
        rows = [stacked(n).reshape(len(tensors), -1) for n in self.names]
        self.theta = torch.cat(rows, dim=1)
        self.fixed = {n: stacked(n) for n in tensors[0] if n not in self.shapes}
        # On a CPU, where there is no launching of kernels to save, vmap's own products will do.
        self.batches_linear = device.type == "cuda"
        self.perceptron = self.perceptron_in(self.module)
        self.by_seed = self.runs_by_seed(self.module)
        self.runs_several = True  # as far as is known
        self._known: dict[tuple[str, Size], Known] = {}  # of features, by their scalar
        self.protected_names = protected
        self.protected_size = sum(self.shapes[n].numel() for n in protected)

    @property
    def seeds(self) -> int:
        """S."""
        return self.theta.shape[0]

    def runs_by_seed(self, module: nn.Module) -> bool:
        """Whether seeds run one by one: a GPU's convolutions of several networks are slower."""
        layers = module.modules() if self.theta.is_cuda else ()
        return any(isinstance(layer, nn.modules.conv._ConvNd) for layer in layers)

    def perceptron_in(self, module: nn.Module) -> Perceptron | None:
        """The module, or None if it is not a perceptron of all that is trained."""
        return perceptron_of(module, self.shapes, self.fixed, self.theta)

    def _by_hand(self, inputs: Tensor) -> Perceptron | None:
        """The perceptron, if it does what the module does in its present mode with (S, n, *)."""
        found = self.perceptron
        if found is None or (self.module.training and found.has_norms) or not found.takes(inputs):
            return None
        return found

    def values(self, theta: Tensor) -> dict[str, Tensor]:
        """Every parameter and buffer, (S, *shape), as views of theta and of what is fixed.

        Of theta (S · K, p), K sets of weights a seed, also what is fixed is there K times.
        """
        trained = self._trained(theta)
        times = len(theta) // self.seeds
        fixed = self.fixed
        if times > 1:
            fixed = {n: v.repeat_interleave(times, 0) for n, v in fixed.items()}
        return {**trained, **fixed}

    def _trained(self, theta: Tensor) -> dict[str, Tensor]:
        """The trained parameters, (S, *shape), as views of theta (S, p)."""
        parts = theta.split([s.numel() for s in self.shapes.values()], dim=1)
        named = zip(self.shapes.items(), parts, strict=True)
        return {n: part.unflatten(1, s or (1,)).view(-1, *s) for (n, s), part in named}

    def logits(self, theta: Tensor, inputs: Tensor, *, remember: bool = False) -> Tensor:
        """All outputs, in the module's present mode: (S, p), (S, n, *) → (S, n, C).

        With `remember`, what the module notes in its buffers on the way (batch-norm statistics) is
        kept.
        """
        by_hand = self._by_hand(inputs)
        if by_hand is not None and not theta.requires_grad:
            return by_hand.logits(theta, inputs)
        values = self.values(theta)
        if self.module.training and not remember:
            values |= {n: values[n].clone() for n in self.fixed}
        if len(theta) == 1:
            only = {n: v[0] for n, v in values.items()}
            return self._run(only, inputs[0]).unsqueeze(0)
        with BatchedLinear() if self.batches_linear else nullcontext():
            return vmap(self._run, randomness="different")(values, inputs)

    def _run(self, values: dict[str, Tensor], inputs: Tensor) -> Tensor:
        outputs = call_with(self.module, values, (inputs,))
        if not isinstance(outputs, Tensor):
            kind = type(outputs).__name__
            raise ConfigError(f"the model must return one tensor of outputs, not a {kind}")
        return outputs

    def gradient(
        self, samples: Samples, *, remember: bool = False, outers: Factors | None = None
    ) -> Tensor:
        """The gradient of the samples' mean cross-entropy at the present weights, (S, p).

        Of K sets of samples a seed, labels (S · K, n), (S · K, p). `outers` takes what it is of.
        """
        by_hand, rows = self._by_hand(samples.inputs), len(samples.labels)
        if by_hand is not None:
            belongings = samples.labels, samples.tasks, self.active
            return by_hand.gradient(self.theta, samples.inputs, *belongings, outers)
        try:
            if self.by_seed and rows == self.seeds:
                works = [partial(self._gradient_of, s, samples, remember) for s in range(rows)]
                return torch.stack(side_by_side(works, self.theta.device))
            return self._gradient_at_once(samples, remember)
        except ValueError as error:  # batch norm refuses a single sample
            what = f"the model cannot train on {len(samples)} at a time: {error}"
            raise ConfigError(what) from error

    def _gradient_at_once(self, samples: Samples, remember: bool) -> Tensor:
        """All seeds' gradients by one backward pass."""
        theta = self.theta.detach()
        if len(samples.labels) > self.seeds:
            theta = theta.repeat_interleave(len(samples.labels) // self.seeds, 0)
        theta.requires_grad_()
        logits = self.logits(theta, samples.inputs, remember=remember)
        losses = self._losses(logits, samples.labels, samples.tasks)
        # Seeds do not interact, so the gradient of the sum of their means holds each seed's own.
        share = torch.full_like(losses, 1 / losses.shape[1])
        return torch.autograd.grad(losses, theta, share)[0]

    def _gradient_of(self, seed: int, samples: Samples, remember: bool) -> Tensor:
        """One seed's gradient, (p,)."""
        theta = self.theta[seed : seed + 1].detach().requires_grad_()
        values = {n: v[0] for n, v in self._trained(theta).items()}
        fixed = {n: v[seed] for n, v in self.fixed.items()}
        if self.module.training and not remember:
            fixed = {n: v.clone() for n, v in fixed.items()}
        logits = self._run(values | fixed, samples.inputs[seed])
        loss = self._losses(logits, samples.labels[seed], samples.tasks[seed]).mean()
        return torch.autograd.grad(loss, theta)[0][0]

    def gradients(self, several: Sequence[Samples]) -> Tensor:
        """The gradients of K sets of samples' mean cross-entropy, (S, K, p).

        If they are of one size all at once, as if each set had a network of its own; where that
        takes copies of the weights, on a CPU only if all of them stay in its cache.
        """
        alike = len({samples.inputs.shape for samples in several}) == 1
        fits = self.theta.is_cuda or len(several) * self.theta.nbytes <= _CACHED
        fits = fits or self._by_hand(several[0].inputs) is not None
        if alike and fits and self.runs_several:
            try:
                return self._gradients_at_once(several)
            except (RuntimeError, ValueError, NotImplementedError):
                self.runs_several = False  # it does what `vmap` cannot, or memory is short
        return torch.stack([self.gradient(samples) for samples in several], dim=1)

    def _gradients_at_once(self, several: Sequence[Samples]) -> Tensor:
        def together(tensors: list[Tensor]) -> Tensor:
            return torch.stack(tensors, dim=1).flatten(0, 1)

        samples = Samples(
            together([s.inputs for s in several]),
            together([s.labels for s in several]),
            together([s.tasks for s in several]),
        )
        return self.gradient(samples).view(self.seeds, len(several), -1)

    def _losses(self, logits: Tensor, labels: Tensor, tasks: Tensor) -> Tensor:
        """Cross-entropy of each sample within its task's outputs: (*, C), (*), (*) → (*)."""
        if self.active is not None:
            logits = logits.masked_fill(~self.active[tasks], -torch.inf)
        losses = cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
        return losses.view_as(labels)

    def correct(self, inputs: Tensor, labels: Tensor, classes: range) -> Tensor:
        """How many samples are classified right within the classes, (S,)."""
        with torch.no_grad():
            logits = self.logits(self.theta, inputs)[..., classes.start : classes.stop]
        return (logits.argmax(-1) + classes.start == labels).sum(1)

    def features(self, samples: Samples, seed: int) -> TangentFeatures:
        """φ of the true-class outputs with respect to the protected parameters, for one seed."""
        return self._per_sample(samples, seed, true_class, samples.labels[seed])

    def loss_features(self, samples: Samples, seed: int) -> TangentFeatures:
        """Gradients of each sample's loss with respect to the protected parameters, one seed."""
        belongings = samples.labels[seed], samples.tasks[seed]
        return self._per_sample(samples, seed, self._losses, *belongings)

    def _per_sample(
        self, samples: Samples, seed: int, scalar: Callable[..., Tensor], *belongings: Tensor
    ) -> TangentFeatures:
        values = {n: v[seed] for n, v in self.values(self.theta).items()}
        batch = Batch((samples.inputs[seed],), {}, belongings)
        alike = scalar.__name__, samples.inputs.shape[2:]
        names, known = self.protected_names, self._known.get(alike)
        with eval_mode(self.module):
            phi = features_of(self.module, values, [batch], scalar, names=names, known=known)
        if phi.known is not None:  # only a chain is sure to treat others as it did these
            layout = phi.known.layout if self.perceptron is not None else None
            self._known[alike] = replace(phi.known, layout=layout)
        return phi

    def state_dict(self, seed: int) -> dict[str, Tensor]:
        """The weights and buffers of one seed, as its module's `load_state_dict` takes them."""
        values = {n: v[seed].detach().cpu().clone() for n, v in self.values(self.theta).items()}
        # A tied parameter has one value and several names.
        first = {p: n for n, p in reversed(list(self.module.named_parameters()))}
        every = self.module.named_parameters(remove_duplicate=False)
        values |= {n: values[first[p]].clone() for n, p in every if n not in values}
        # Buffers that are not persistent are no part of a state_dict.
        return {n: values[n] for n in self.module.state_dict() if n in values}

    def load_state_dict(self, seed: int, tensors: Mapping[str, Tensor]) -> None:
        """Take on the weights and buffers of one seed, as `state_dict` gave them."""
        values = self.values(self.theta)  # views: what is written there is theta's
        for name in tensors.keys() & values.keys():
            values[name][seed].copy_(tensors[name])

    def check_outputs(self, inputs: Tensor) -> None:
        """Run a few inputs (S, n, *) to see that the model takes them and has enough outputs."""
        wanted = self.n_outputs
        try:
            with eval_mode(self.module), torch.no_grad():
                outputs = self.logits(self.theta, inputs)
        except ConfigError:
            raise
        except (RuntimeError, ValueError, TypeError) as error:
            shape = tuple(inputs.shape[2:])
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            what = f"the model does not take inputs of shape {shape}: {reason}"
            raise ConfigError(what) from error
        expected = (*inputs.shape[:2], wanted)
        if tuple(outputs.shape) != expected:
            raise ConfigError(
                f"the model must give {wanted} outputs per sample for this scenario, "
                f"not {tuple(outputs.shape[2:])}"
            )
        if not bool(outputs.isfinite().all()):
            raise DataError("the model's outputs are not finite before any training")
