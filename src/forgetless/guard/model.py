"""A user's model as a function of chosen weights: the gradients that methods ask for."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from forgetless.guard.batches.losses import Loss
from forgetless.guard.batches.outputs import Named, Output, chosen_output, counted, refuse_none
from forgetless.guard.batches.samples import Part, Remembered
from forgetless.guard.distributed.sharding import plain_copy
from forgetless.guard.parameters import Parameters
from forgetless.support.errors import ConfigError, DataError
from forgetless.support.streams import batch
from forgetless.tangent import Batch, TangentFeatures, features_of, sliced_features
from forgetless.tangent.evaluation import call_with, eval_mode

# Samples that go through the model together to see whether their gradient is finite.
_LOSS_CHUNK = 64


@final
@dataclass(frozen=True)
class GuardedModel:
    """The model, what is protected of it, and how its outputs are read.

    Arguments:
        module: the model itself, not a compiled or otherwise wrapped form of it.
        parameters: the protected parameters.
        output: which scalars of a sample's outputs are protected.
        loss: that methods follow.
    """

    module: nn.Module
    parameters: Parameters
    output: Named | Output | None
    loss: Loss

    def gathered(self) -> Self:
        """The same with all weights here, if they are sharded: gradients are taken of that."""
        sharded = self.parameters.shares is not None
        return replace(self, module=plain_copy(self.module)) if sharded else self

    def values(self, theta: Tensor | None = None) -> dict[str, Tensor]:
        """Parameters and buffers by name, those that are protected taken from theta (1, p)."""
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        values = {name: _full(tensor.detach()) for name, tensor in tensors.items()}
        if theta is not None:
            values |= dict(zip(self.parameters.names, self.parameters.views(theta), strict=True))
        return values

    def features(self, samples: Remembered) -> TangentFeatures:
        """φ of the protected scalars, at the present weights and in eval mode."""
        with eval_mode(self.module):
            scalars = [self._scalar(part) for part in samples.parts]
            phi = self._per_sample(samples, scalars[0])
        shares = self.parameters.shares
        return phi if shares is None else sliced_features(phi, shares)

    def loss_features(self, samples: Remembered) -> TangentFeatures:
        """The gradient of each sample's loss, at the present weights and in eval mode."""
        self.check_loss(samples)
        with eval_mode(self.module):
            return self._per_sample(samples, self._losses)

    def counted(self, parts: Sequence[Part]) -> int:
        """How many of the samples' labels count."""
        return counted(self.output, (part.target for part in parts))

    def refuse_unlabelled(self, count: int) -> None:
        """Refuse samples of which no label counts, if the loss is of labels."""
        if self.loss.function is None:
            refuse_none(self.output, count)

    def _losses(self, outputs: Any, target: Tensor | None = None) -> Tensor:
        return self.loss.of_each(outputs, target)

    def _per_sample(self, samples: Remembered, scalar: Callable[..., Tensor]) -> TangentFeatures:
        batches = [
            Batch(part.args, part.kwargs, () if part.target is None else (part.target,))
            for part in (self._placed(part) for part in samples.parts)
        ]
        return features_of(
            self.module,
            self.values(),
            batches,
            scalar,
            names=self.parameters.names,
            lasting=self.parameters.shares is not None,  # what was gathered for this alone
        )

    def _scalar(self, part: Part) -> Output:
        """The scalars to protect, once model and target are seen to fit."""
        outputs, target = self._tried(part)
        return chosen_output(self.output, outputs, target, part.target)

    def check_loss(self, samples: Remembered) -> None:
        """Refuse samples that the loss cannot be computed on, before it is needed in a step."""
        trained = [m for m in self.module.modules() if isinstance(m, _BatchNorm) and m.training]
        if trained and any(len(part) == 1 for part in samples.parts):
            raise ConfigError(
                "batch norm cannot be trained on one remembered sample alone: remember at least "
                "two of every shape"
            )
        with eval_mode(self.module):
            for part in samples.parts:
                outputs, target = self._tried(part)
                self.loss.check(outputs, target, part.target)

    def check_losses(self, samples: Remembered) -> None:
        """Refuse samples whose loss has no finite gradient, or that have none."""
        self.check_loss(samples)
        self.refuse_unlabelled(self.counted(samples.parts))
        theta = self.parameters.read()
        with eval_mode(self.module):
            for index in torch.arange(len(samples)).split(_LOSS_CHUNK):
                if not bool(self.loss_gradient(samples.select(index), theta).isfinite().all()):
                    raise DataError(
                        "the loss of samples to remember has a NaN or infinite gradient"
                    )

    def _tried(self, part: Part) -> tuple[Any, Tensor | None]:
        """The model's outputs for a few of the samples, and their target."""
        few = self._placed(part.mapped(lambda t: t[:2]))
        with torch.no_grad():
            return self._outputs(few, self.values()), few.target

    def loss_gradient(self, samples: Remembered, theta: Tensor) -> Tensor:
        """The gradient of the samples' mean loss at theta, (1, p); buffers stay as they are."""
        theta = theta.detach().requires_grad_()
        total = theta.new_zeros(())
        with torch.enable_grad(), _dense_gradients(self.module):
            for part in samples.parts:
                placed = self._placed(part)
                values = self.values(theta)
                buffers = dict(self.module.named_buffers())
                values |= {name: values[name].clone() for name in buffers}
                outputs = self._outputs(placed, values)
                share = len(part) / len(samples)
                total = total + share * self.loss.mean(outputs, placed.target)
        if not total.requires_grad:
            return torch.zeros_like(theta)
        return torch.autograd.grad(total, theta)[0]

    def _outputs(self, part: Part, values: dict[str, Tensor]) -> Any:
        try:
            return call_with(self.module, values, part.args, part.kwargs)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if len(part) == 1 and "more than 1 value per channel" in str(error):
                raise ConfigError(
                    "batch norm cannot be trained on one remembered sample at a time: let the "
                    "method look at two or more"
                ) from error
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(
                f"the model does not take a batch's inputs ({reason}); {self._remedy()}"
            ) from error

    def _remedy(self) -> str:
        """What may help where the model cannot be called as the guard does it."""
        dtypes = {str(p.dtype)[6:] for p in self.module.parameters() if p.is_floating_point()}
        if len(dtypes) > 1:
            kinds = " and ".join(sorted(dtypes))
            return f"its parameters are {kinds}, and a guard computes with one precision for all"
        return (
            "say with unpack= which part of a batch the model is called with, and put a single "
            "batch whose inputs are several into a list"
        )

    def _placed(self, part: Part) -> Part:
        """The samples where the model is, and as precise as its gradients are computed."""
        device = self.parameters.device
        return part.mapped(lambda t: _full(t.to(device)))


@contextmanager
def _dense_gradients(module: nn.Module) -> Iterator[None]:
    """Embeddings' gradients as parts of one vector, which cannot be sparse."""
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
    """As if the user's code were not in autocast or inference mode; nothing compiled is run."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        if "torch._dynamo" in sys.modules:  # it takes seconds to import
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@final
class GuardedLossGrad:
    """`LossGrad`: the mean loss gradient on remembered samples at given weights.

    Arguments:
        model: the model.
        theta: the weights, (1, p).
        movable: mask (p,) of the parameters that can move; None for all.
        generator: of random batches.
    """

    def __init__(
        self,
        model: GuardedModel,
        theta: Tensor,
        movable: Tensor | None,
        generator: torch.Generator,
    ) -> None:
        self.model = model
        self.theta = theta
        self.movable = movable
        self.generator = generator

    def __call__(
        self, samples: Remembered, batch_size: int | None = None, *, one_head: bool = False
    ) -> Tensor:
        """The gradient, (1, p)."""
        if one_head:
            raise ConfigError(
                "a guard does not know which outputs belong to which task: heads='released' is "
                "for `fit` alone"
            )
        if batch_size is not None and batch_size < len(samples):
            samples = samples.select(batch(batch_size, len(samples), self.generator))
        gradient = self.model.loss_gradient(samples, self.theta)
        return gradient if self.movable is None else gradient * self.movable

    def of_each(self, several: Sequence[Remembered]) -> Tensor:
        """The gradients on K sets of samples, (1, K, p)."""
        return torch.stack([self(samples) for samples in several], dim=1)


def _full(tensor: Tensor) -> Tensor:
    """Half precision as float32."""
    return tensor.float() if tensor.is_floating_point() and tensor.element_size() < 4 else tensor
