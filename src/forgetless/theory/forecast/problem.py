"""Source and target of a forecast, checked, and what can be asked about them."""

from typing import final

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from forgetless.support.errors import ConfigError, DataError, require
from forgetless.tangent import tangent_features
from forgetless.theory.forecast.model import Loss, TangentModel
from forgetless.theory.forecast.outlook import Outlook
from forgetless.theory.grams import gram_grid, gram_overlap
from forgetless.theory.overlap import overlap_spectrum

# Most rows of a kernel that training in function space is worth it for: 128 MB in float64.
_KERNEL_ROWS = 4096
# Singular values of float32 features below this share of the largest are noise.
_OVERLAP_RTOL = 3e-4

Pair = tuple[Tensor, Tensor]


@final
class Problem:
    """Source and target of a forecast, checked, and what can be asked about them."""

    def __init__(
        self,
        tangent: TangentModel,
        source: Pair,
        target: Pair,
        loss: Loss | None,
        source_classes: range | None,
        target_classes: range | None,
    ) -> None:
        self.tangent = tangent
        n_outputs = self._answered(self._inputs(source, "source")[:1], "source").shape[-1]
        self.source_classes = source_classes or range(n_outputs)
        self.target_classes = target_classes or range(n_outputs)
        for name, classes in (("source", self.source_classes), ("target", self.target_classes)):
            inside = 0 <= classes.start < classes.stop <= n_outputs and classes.step == 1
            require(inside, f"{name}_classes", classes, f"within the model's {n_outputs} outputs")
        self._own_loss = loss is not None
        self.source_loss = loss or _cross_entropy_within(self.source_classes)
        self.target_loss = loss or _cross_entropy_within(self.target_classes)
        self.source = self.checked(source, "source")
        self.target = self.checked(target, "target")
        self.index = torch.arange(len(self.source[1]))
        x, y = (part[:2] for part in self.target)
        found = self.target_loss(self.tangent.outputs(x), y)
        mean = isinstance(found, Tensor) and found.numel() == 1
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        require(
            mean, "loss", f"one that returns {shape}", "a function to one number, the mean loss"
        )

    def checked(self, pair: Pair, what: str) -> Pair:
        """Samples on the model's device that it can be asked about, or one clear error."""
        inputs, labels = self._inputs(pair, what), torch.as_tensor(pair[1])
        classes = self.target_classes if what == "target" else self.source_classes
        if len(labels) != len(inputs):
            raise DataError(f"the {what} has {len(inputs)} inputs and {len(labels)} labels")
        if not labels.is_floating_point():
            if labels.dim() != 1:
                shape = tuple(labels.shape)
                raise DataError(f"the {what} needs one class per input, not labels of {shape}")
            lowest, highest = int(labels.min()), int(labels.max())
            if lowest < classes.start or highest >= classes.stop:
                raise DataError(
                    f"the {what} has labels {lowest} to {highest}, outside of its classes "
                    f"{classes.start} to {classes.stop - 1}"
                )
            labels = labels.long()
        elif not self._own_loss:
            raise ConfigError(f"the {what} has labels that are not classes: say which loss")
        if not bool(self._answered(inputs[:32], what).isfinite().all()):
            raise DataError(f"the model's outputs on the {what} are NaN or infinite")
        return inputs, labels.to(inputs.device)

    def _inputs(self, pair: Pair, what: str) -> Tensor:
        """The inputs of a pair where the model is, and as precise as it is."""
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise ConfigError(f"{what} must be a pair of inputs and labels")
        inputs = torch.as_tensor(pair[0])
        if inputs.dim() == 0 or len(inputs) == 0:
            raise DataError(f"the {what} has no samples")
        theta = self.tangent.theta
        return inputs.to(theta if inputs.is_floating_point() else theta.device)

    def _answered(self, inputs: Tensor, what: str) -> Tensor:
        """The model's outputs on a few inputs, or one clear error."""
        try:
            return self.tangent.outputs(inputs)
        except (RuntimeError, ValueError, IndexError) as error:
            reason = str(error).splitlines()[0]
            shape = tuple(inputs.shape[1:])
            raise ConfigError(
                f"the model does not take the inputs of the {what}, of shape {shape}: {reason}"
            ) from error

    def look_at_fewer(self, count: int, generator: torch.Generator) -> None:
        """Keep a random choice of the source's samples."""
        inputs, labels = self.source
        chosen = torch.randperm(len(inputs), generator=generator)[:count].sort().values
        self.source = inputs[chosen.to(inputs.device)], labels[chosen.to(labels.device)]
        self.index = chosen

    def kernel_is_cheaper(self, epochs: int) -> bool:
        """Whether to train in function space: few target samples, each seen many times.

        The kernel takes C backward passes a sample, the parameters two or three passes an epoch.
        """
        n, outputs = len(self.target[1]), self.tangent.outputs(self.target[0][:1]).shape[-1]
        return n * outputs <= _KERNEL_ROWS and epochs > outputs

    def outlook(self, model: TangentModel, change: Tensor | None, components: int) -> Outlook:
        """What a linearised network says after a change of its weights (None: as it is)."""
        (x, y), (x_target, y_target) = self.source, self.target
        outputs, on_target = model.outputs(x), model.outputs(x_target)
        if change is not None:
            outputs = outputs + model.push(x, change)
            on_target = on_target + model.push(x_target, change)
        return Outlook(
            components=components,
            outputs=outputs,
            source_accuracy=_accuracy(outputs, y, self.source_classes),
            target_accuracy=_accuracy(on_target, y_target, self.target_classes),
            source_loss=float(self.source_loss(outputs, y)),
            target_loss=float(self.target_loss(on_target, y_target)),
        )

    def followed(self, linear: Tensor, real: Tensor) -> float:
        """How well J ω is what the outputs did when the network itself took the same steps."""
        inputs = self.source[0]
        moved = self.tangent.outputs(inputs, real) - self.tangent.outputs(inputs)
        missed = torch.linalg.vector_norm(moved - self.tangent.push(inputs, linear))
        length = torch.linalg.vector_norm(moved)
        if not bool(missed.isfinite() & length.isfinite()):
            return 0.0  # they blow up
        # Outputs that do not move at all are followed perfectly.
        share = float(missed / length) if length > 0 else float(missed > 0)
        return max(0.0, 1.0 - share)

    def overlap(self, count: int, generator: torch.Generator) -> Tensor:
        """Singular values of O between source and target, from some samples of each."""
        features = []
        for inputs, labels in (self.source, self.target):
            chosen = torch.randperm(len(inputs), generator=generator)[:count].to(inputs.device)
            classes = None if labels.is_floating_point() else labels[chosen]
            features.append(tangent_features(self.tangent.module, inputs[chosen], classes))
        grid = gram_grid(features)
        return overlap_spectrum(gram_overlap(grid, 0, 1, rtol=_OVERLAP_RTOL)).cpu()


def _cross_entropy_within(classes: range) -> Loss:
    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        within = outputs[:, classes.start : classes.stop]
        return cross_entropy(within, labels - classes.start)

    return loss


def _accuracy(outputs: Tensor, labels: Tensor, classes: range) -> float | None:
    """In percent, or None where labels are not classes."""
    if labels.is_floating_point():
        return None
    predicted = outputs[:, classes.start : classes.stop].argmax(1) + classes.start
    return 100 * (predicted == labels).double().mean().item()
