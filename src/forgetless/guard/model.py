"""A user's model as a function of chosen weights: the gradients that methods ask for."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from forgetless.guard.batches.outputs import (
    Loss,
    Named,
    Output,
    all_outputs,
    label_count,
    protected_output,
    randomised,
    true_class_output,
)
from forgetless.guard.batches.samples import Part, StoredSamples
from forgetless.guard.distributed.sharding import (
    gathered_copy,
    is_fully_sharded,
    local,
    reshard,
)
from forgetless.guard.parameters import Parameters
from forgetless.methods.base import FeatureOutputs, MomentOutputs
from forgetless.support.collectives import Ranks, is_lost
from forgetless.support.validation import ConfigError, DataError, first_line
from forgetless.tangent import (
    Batch,
    InputMoments,
    Moments,
    TangentFeatures,
    call_with,
    eval_mode,
    features_of,
    input_moments,
    kronecker_moments,
    layer_inputs,
    moment_shape,
    moment_shapes,
    sliced_features,
)

# Samples whose joint loss gradient is tested for infinities at once.
_LOSS_CHUNK = 64
# Samples that are looked at together to see which parameters have a gradient; mostly the first
# will do.
_FEW = 1


@final
@dataclass(frozen=True)
class GuardedModel:
    """A model, its protected parameters, and how its outputs are read.

    Arguments:
        module: the model itself, neither compiled nor wrapped.
        parameters: the protected parameters.
        output: the protected scalars of a sample's outputs.
        loss: the loss that methods follow.
        ranks: the processes that train it together; None if this one is alone.
    """

    module: nn.Module
    parameters: Parameters
    output: Named | Output | None
    loss: Loss
    ranks: Ranks | None = None

    @property
    def gathers(self) -> bool:
        """Whether the module gathers its own weights from several processes when it is run."""
        return self.parameters.slices is not None and is_fully_sharded(self.module)

    @cached_property
    def gathered(self) -> Self:
        """The same with all weights on this process, as the gradients of single samples need."""
        return replace(self, module=gathered_copy(self.module)) if self.gathers else self

    def values(self, theta: Tensor | None = None) -> dict[str, Tensor]:
        """Parameters and buffers by name, the protected ones from theta (1, p) if given.

        None of a module that gathers its own: it runs with those that it has.
        """
        if self.gathers:
            return {}
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        values = {name: _at_least_float32(tensor.detach()) for name, tensor in tensors.items()}
        if theta is not None:
            values |= self.parameters.layout.split(theta[0])
        return values

    def features(
        self, samples: StoredSamples, outputs: FeatureOutputs = "class"
    ) -> TangentFeatures:
        """φ of the protected scalars, at the present weights and in eval mode.

        Arguments:
            samples: the samples.
            outputs: "all" takes all logits (n, C) of a classifier in place of the true class's.
        """
        if self.gathers:
            return self.gathered.features(samples, outputs)
        with eval_mode(self.module):
            scalar = self._protected(samples)
            if outputs == "all" and scalar is true_class_output:
                scalar = all_outputs
            phi = self._per_sample(samples, scalar)
        slices = self.parameters.slices
        return phi if slices is None else sliced_features(phi, slices)

    def blind(self, samples: StoredSamples, *, of_loss: bool) -> list[str]:
        """The protected parameters that the model uses on samples, but with a gradient of zero.

        Such as a low-rank adapter's first factor while its second is zero, or a branch whose last
        layer is. Parameters that the samples do not use are not meant.

        Arguments:
            samples: the samples.
            of_loss: whether the gradient of the loss is meant, or that of the protected scalars.
        """
        with eval_mode(self.module), torch.enable_grad(), _dense_gradients(self.module):
            first = samples.select(torch.arange(1))
            scalar = self.loss.of_each if of_loss else self._protected(first)
            found = list(self.parameters.names)
            seeing = False
            for index in torch.arange(len(samples)).split(_FEW):
                if not found:
                    break
                for part in map(self.placed, samples.select(index).parts):
                    gradients = self._gradients_of(scalar, part)
                    zero = {n for n, any_there in gradients.items() if any_there is False}
                    seeing |= True in gradients.values()
                    found = [name for name in found if name in zero]
        return found if seeing else []

    def _gradients_of(self, scalar: Output, part: Part) -> dict[str, bool | None]:
        """Parameter → whether a mixture of the scalars has a gradient; None if it has no part."""
        if self.gathers:
            return self._gathered_gradients_of(scalar, part)
        values = self.values()
        own = {n: values[n].requires_grad_() for n in self.parameters.names if values[n].numel()}
        values |= {name: values[name].clone() for name in dict(self.module.named_buffers())}
        mixed = self._mixed(scalar, part, values)
        gradients = torch.autograd.grad(mixed, list(own.values()), allow_unused=True)
        found_in = zip(own, gradients, strict=True)
        return {name: None if g is None else bool(g.any()) for name, g in found_in}

    def _gathered_gradients_of(self, scalar: Output, part: Part) -> dict[str, bool | None]:
        """The same of a module that gathers its own weights, and shares out their gradients."""
        before = [(p, p.grad) for p in self.module.parameters()]
        try:
            for parameter, _ in before:
                parameter.grad = None
            self._mixed(scalar, part, {}).backward()
            named = dict(self.module.named_parameters())
            own = [named[name].grad for name in self.parameters.names]
            # A process without any of a parameter's numbers has no gradient of it.
            there = torch.tensor(
                [[g is not None, g is not None and bool(local(g).any())] for g in own]
            )
            there = there if self.ranks is None else self.ranks.sum(there.long()) > 0
            found = zip(self.parameters.names, there.tolist(), strict=True)
            return {name: seen if has else None for name, (has, seen) in found}
        finally:
            for parameter, gradient in before:
                parameter.grad = gradient
            reshard(self.module)

    def _mixed(self, scalar: Output, part: Part, values: dict[str, Tensor]) -> Tensor:
        """A sum of the scalars with different weights, ()."""
        target = () if part.target is None else (part.target,)
        found = scalar(self._outputs(part, values), *target)
        # All of one sample's may have a constant sum, as probabilities have.
        return (found * torch.linspace(1, 2, found.numel()).to(found).view_as(found)).sum()

    def _protected(self, samples: StoredSamples) -> Output:
        """The protected scalars of these samples, checked for each shape."""
        parts = samples.parts
        first, *_ = [protected_output(self.output, *self._try(p), p.target) for p in parts]
        return first

    def moments(
        self, samples: StoredSamples, outputs: MomentOutputs, random: Callable[[int], Tensor]
    ) -> Moments:
        """The Kronecker moments at the present weights and in eval mode.

        Arguments:
            samples: the samples; each of several processes takes some of them.
            outputs: whose gradients, as `View.moments` says.
            random: from a count to so many numbers in [0, 1).
        """
        with eval_mode(self.module):
            protected = self._protected(samples)
            batches = self._batches(samples)
            if outputs != "class":
                protected, shapes = randomised(
                    protected, outputs, [self._try(part) for part in samples.parts]
                )
                sizes = [(len(batch), *shape) for batch, shape in zip(batches, shapes, strict=True)]
                batches = [
                    replace(batch, targets=(random(prod(size)).view(size), *batch.targets))
                    for batch, size in zip(batches, sizes, strict=True)
                ]
            return self._moments(batches, protected)

    def _moments(self, batches: Sequence[Batch], scalar: Output) -> Moments:
        """The moments of a scalar of these samples, of all processes together."""
        names, ranks = self.parameters.names, self.ranks
        if self.gathers:
            own = dict(self.module.named_parameters())
            if all(own[name].requires_grad for name in names):
                found = kronecker_moments(
                    self.module, own, batches, scalar, names=names, ranks=ranks, in_place=True
                )
                reshard(self.module)
                if found.covered.issuperset(names):
                    return found
            return self.gathered._moments(batches, scalar)
        if ranks is not None and sum(map(len, batches)) >= ranks.size:
            batches = [*_share(batches, ranks.rank, ranks.size)]
        else:
            ranks = None  # too few for all: each takes all of them
        return kronecker_moments(
            self.module, self.values(), batches, scalar, names=names, ranks=ranks
        )

    def loss_features(self, samples: StoredSamples) -> TangentFeatures:
        """The gradient of each sample's loss, at the present weights and in eval mode."""

        def losses(outputs: Any, target: Tensor | None = None) -> Tensor:
            return self.loss.of_each(outputs, target)

        if self.gathers:
            return self.gathered.loss_features(samples)
        self._check_losses(samples)
        with eval_mode(self.module):
            return self._per_sample(samples, losses)

    def _per_sample(self, samples: StoredSamples, scalar: Output) -> TangentFeatures:
        return features_of(
            self.module,
            self.values(),
            self._batches(samples),
            scalar,
            names=self.parameters.names,
            lasting=self.parameters.slices is not None,  # gathered for these features alone
        )

    def _batches(self, samples: StoredSamples) -> list[Batch]:
        return [
            Batch(part.args, part.kwargs, () if part.target is None else (part.target,))
            for part in map(self.placed, samples.parts)
        ]

    def label_count(self, parts: Sequence[Part]) -> int:
        """How many of the samples' labels are not ignored."""
        return label_count(self.output, (part.target for part in parts))

    def _check_losses(self, samples: StoredSamples) -> None:
        trained = [m for m in self.module.modules() if isinstance(m, _BatchNorm) and m.training]
        if trained and any(len(part) == 1 for part in samples.parts):
            raise ConfigError(
                "batch norm cannot be trained on one stored sample alone: store at least two of "
                "every shape"
            )
        with eval_mode(self.module):
            for part in samples.parts:
                outputs, target = self._try(part)
                self.loss.check(outputs, target, part.target)

    def require_losses(self, samples: StoredSamples) -> None:
        """Reject samples whose loss does not exist or has no finite gradient."""
        self._check_losses(samples)
        self.loss.require_labels(self.label_count(samples.parts))
        theta = self.parameters.read()
        with eval_mode(self.module):
            for index in torch.arange(len(samples)).split(_LOSS_CHUNK):
                gradient = self.gradient(samples.select(index), theta)
                if not bool(gradient.isfinite().all()):
                    raise DataError("the loss of samples to store has a NaN or infinite gradient")

    def _try(self, part: Part) -> tuple[Any, Tensor | None]:
        """The model's outputs on a few of the samples, and their target."""
        few = self.placed(part.mapped(lambda t: t[:2]))
        with torch.no_grad():
            return self._outputs(few, self.values()), few.target

    def gradient(
        self,
        samples: StoredSamples,
        theta: Tensor,
        loss: Callable[[Any, Part], Tensor] | None = None,
    ) -> Tensor:
        """The gradient at theta of a mean loss, (1, p); buffers are not changed.

        Arguments:
            samples: the samples.
            theta: the weights, (1, p).
            loss: from the outputs and the samples of a part to its mean loss; by default the
                training loss.
        """
        theta = theta.detach().requires_grad_()
        total = theta.new_zeros(())
        with torch.enable_grad(), _dense_gradients(self.module):
            for part in samples.parts:
                outputs, placed = self.outputs(part, theta), self.placed(part)
                mean = (
                    self.loss.mean(outputs, placed.target)
                    if loss is None
                    else loss(outputs, placed)
                )
                total = total + len(part) / len(samples) * mean
        if not total.requires_grad:
            return torch.zeros_like(theta)
        return torch.autograd.grad(total, theta)[0]

    def outputs(self, part: Part, theta: Tensor | None) -> Any:
        """The model's outputs at theta (1, p), or as it is; buffers are not changed."""
        if self.gathers:
            return self._outputs(self.placed(part), {})
        values = self.values(theta)
        values |= {name: values[name].clone() for name in dict(self.module.named_buffers())}
        return self._outputs(self.placed(part), values)

    def moment_shapes(self, samples: StoredSamples | None) -> Moments:
        """The shapes of the Kronecker moments, from the forward pass of a few samples if given."""
        names, values = self.parameters.names, self.values()
        if samples is None:
            return moment_shapes(self.module, values, None, true_class_output, names=names)
        with eval_mode(self.module):
            scalar, batch = self._protected(samples), self._batches(samples)[0]
            return moment_shapes(self.module, values, batch, scalar, names=names)

    def input_shapes(self, samples: StoredSamples) -> InputMoments:
        """The shapes of the layers' input moments."""
        names, batches = self.parameters.names, self._batches(samples)
        return input_moments(self.module, self.values(), batches, names=names, moment=moment_shape)

    def input_moments(self, samples: StoredSamples) -> InputMoments:
        """The second moments of the layers' inputs, in eval mode."""
        if self.gathers:
            return self.gathered.input_moments(samples)
        with eval_mode(self.module):
            for part in samples.parts:
                self._try(part)
        names, batches = self.parameters.names, self._batches(samples)
        return input_moments(self.module, self.values(), batches, names=names)

    def layer_inputs(self, samples: StoredSamples) -> dict[str, Tensor]:
        """Protected weight of a layer → its inputs, (N, d), in eval mode."""
        names = self.parameters.names
        return layer_inputs(self.module, self.values(), self._batches(samples), names=names)

    def _outputs(self, part: Part, values: dict[str, Tensor]) -> Any:
        try:
            return call_with(self.module, values, part.args, part.kwargs)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if len(part) == 1 and "more than 1 value per channel" in str(error):
                raise ConfigError(
                    "batch norm cannot be trained on one stored sample at a time: let the method "
                    "draw two or more"
                ) from error
            if self.gathers and self.ranks is not None and is_lost(error):
                raise self.ranks.lost(error) from error
            reason = first_line(error)
            raise ConfigError(
                f"the model does not take a batch's inputs ({reason}); {self._remedy()}"
            ) from error

    def _remedy(self) -> str:
        dtypes = {str(p.dtype)[6:] for p in self.module.parameters() if p.is_floating_point()}
        if len(dtypes) > 1:
            kinds = " and ".join(sorted(dtypes))
            return f"its parameters are {kinds}, and a guard computes with one precision for all"
        return (
            "say with unpack= which part of a batch the model is called with, and put a single "
            "batch whose inputs are several into a list"
        )

    def placed(self, part: Part) -> Part:
        """The samples on the model's device and in the precision of its gradients."""
        device = self.parameters.device
        if self.gathers:  # it runs in its own precision
            return part.mapped(lambda t: t.to(device))
        return part.mapped(lambda t: _at_least_float32(t.to(device)))


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside `torch.compile` and data-parallel wrappers."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _share(batches: Sequence[Batch], rank: int, ranks: int) -> Iterator[Batch]:
    """The samples of one of the processes: every `ranks`-th."""
    start = rank
    for batch in batches:
        if start < len(batch):
            yield batch.select(slice(start, None, ranks))
        start = (start - len(batch)) % ranks


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor


@contextmanager
def _dense_gradients(module: nn.Module) -> Iterator[None]:
    """Embeddings without sparse gradients, which cannot be parts of one vector."""
    layers = [m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    sparse = [layer for layer in layers if layer.sparse]
    for layer in sparse:
        layer.sparse = False
    try:
        yield
    finally:
        for layer in sparse:
            layer.sparse = True


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Outside of the user's autocast and inference mode, with compiled code run eagerly."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        available = torch.amp.is_autocast_available(device.type)  # not on "meta"
        if available and torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        if "torch._dynamo" in sys.modules:  # it takes seconds to import
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield
