"""A forecast of forgetting: what training on one task will do to another, before it is done.

The engine is the network linearised at its present weights, trained on the target as the network
would be. When to trust it: docs/forecast.md.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from forgetless.errors import ConfigError, DataError, require
from forgetless.linalg import orthonormalize
from forgetless.tangent import tangent_features
from forgetless.theory.forecast_model import (
    Loss,
    TangentModel,
    curvature,
    train_by_kernel,
    train_linearised,
    train_network,
)
from forgetless.theory.grams import gram_grid, gram_overlap
from forgetless.theory.outlook import Forecast, Outlook
from forgetless.theory.overlap import overlap_spectrum

# A quick forecast does the work of up to this many steps in one, on as much larger a batch, and
# looks at up to this many samples of the source.
_QUICK_MERGE = 8
_QUICK_SOURCE = 2000
# Share of the training that is done for real, to see how well the linearisation follows it.
_PROBE = 0.1
# Most rows of a kernel that training in function space is worth it for: 128 MB in float64.
_KERNEL_ROWS = 4096
# Singular values of float32 features below this share of the largest are noise.
_OVERLAP_RTOL = 3e-4

Pair = tuple[Tensor, Tensor]


def forecast(
    model: nn.Module,
    source: Pair,
    target: Pair,
    *,
    lr: float,
    epochs: int = 1,
    batch_size: int = 32,
    loss: Loss | None = None,
    source_classes: range | None = None,
    target_classes: range | None = None,
    components: Sequence[int] = (),
    remember: Pair | None = None,
    samples: int = 1000,
    basis: Tensor | None = None,
    overlap_samples: int = 250,
    quick: bool = False,
    seed: int = 0,
    observer: Callable[[str], None] | None = None,
) -> Forecast:
    """Predict, before training on the target, what will happen to the source.

    The network is linearised at its present weights, all its outputs, and the linear model trained
    on the target by SGD with the given loss, learning rate and number of steps, by products with
    its Jacobian. The network is not changed; it is taken in eval mode, on its own device.

    Arguments:
        model: the network as it is after learning the source.
        source: samples whose fate is asked for, (n, *) and labels (n,): best, a test set.
        target: the training set of the task to come, (m, *) and (m,).
        lr, epochs, batch_size: how it will be trained.
        loss: mean loss of outputs (b, C) and labels (b,); by default cross-entropy within a
            task's classes. Labels that are not whole numbers need a loss of their own.
        source_classes, target_classes: the outputs that a task chooses among, where tasks have
            heads; by default all.
        components: predict PCA-OGD with these numbers of the source's directions as well.
        remember: samples whose directions PCA-OGD keeps; by default the source.
        samples: how many of them it looks at.
        basis: directions that every step avoids, such as a method's memory of earlier tasks:
            orthonormal rows (K, p), p all trainable parameters in the model's order.
        overlap_samples: how many samples of each task the overlap matrix is made from.
        quick: fewer and larger steps, as far as the learning rate allows.
        seed: of the batches and of the choices of samples.
        observer: told in words what is being done.
    """
    started = time.perf_counter()
    require(0 < lr < float("inf"), "lr", lr, "a positive number")
    require(epochs >= 1, "epochs", epochs, "at least 1")
    require(batch_size >= 1, "batch_size", batch_size, "at least 1")
    require(samples >= 1, "samples", samples, "at least 1")
    require(overlap_samples >= 1, "overlap_samples", overlap_samples, "at least 1")
    require(all(d >= 1 for d in components), "components", tuple(components), "at least 1 each")
    tell = observer or (lambda what: None)
    generator = torch.Generator().manual_seed(seed)
    model = copy.deepcopy(model).eval()
    tangent = TangentModel(model)
    if basis is not None:
        fits = basis.dim() == 2 and basis.shape[1] == tangent.size
        require(fits, "basis", tuple(basis.shape), f"orthonormal rows (K, {tangent.size})")
    problem = _Problem(tangent, source, target, loss, source_classes, target_classes)
    if quick:
        problem.look_at_fewer(_QUICK_SOURCE, generator)
    merge = _QUICK_MERGE if quick else 1
    while merge > 1 and lr * merge * curvature(tangent, problem.target[0][: 8 * batch_size]) > 1:
        merge //= 2
    steps = list(_batches(len(problem.target[0]), batch_size * merge, epochs, generator))

    method = train_by_kernel if problem.kernel_is_cheaper(epochs) else train_linearised

    def train(batches: Sequence[Tensor], held: Tensor | None) -> Tensor:
        x, y = problem.target
        return method(tangent, x, y, problem.target_loss, batches, lr * merge, basis=held)

    tell("following the first steps of real training")
    first = max(1, round(_PROBE * len(steps)))
    early = train(steps[:first], basis)
    trust = problem.followed(early, steps[:first], lr * merge, basis)
    tell("training the linearised network")
    plain = problem.outlook(train(steps, basis), 0)
    protected = []
    if components:
        x, y = problem.checked(remember, "remember") if remember else problem.source
        chosen = torch.randperm(len(x), generator=generator)[:samples].to(x.device)
        directions = tangent_features(model, x[chosen], y[chosen]).top(max(components))[1]
        for count in components:
            tell(f"the same with {count} directions protected")
            held = directions[:count] if basis is None else _joined(basis, directions[:count])
            protected.append(problem.outlook(train(steps, held), count))
    tell("measuring the overlap of the tasks")
    return Forecast(
        index=problem.index,
        labels=problem.source[1],
        classes=problem.source_classes,
        now=problem.outlook(None, 0),
        plain=plain,
        protected=tuple(protected),
        overlap=problem.overlap(overlap_samples, generator),
        trust=trust,
        steps=epochs * -(-len(problem.target[0]) // batch_size),
        seconds=time.perf_counter() - started,
    )


@final
class _Problem:
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
        n_outputs = tangent.outputs(_inputs(source, "source")[:1]).shape[-1]
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

    def checked(self, pair: Pair, what: str) -> Pair:
        """Samples on the model's device that it can be asked about, or one clear error."""
        inputs, labels = _inputs(pair, what), torch.as_tensor(pair[1])
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
        theta = self.tangent.theta
        inputs = inputs.to(theta if inputs.is_floating_point() else theta.device)
        if not bool(self.tangent.outputs(inputs[:32]).isfinite().all()):
            raise DataError(f"the model's outputs on the {what} are NaN or infinite")
        return inputs, labels.to(theta.device)

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

    def outlook(self, change: Tensor | None, components: int) -> Outlook:
        """What the linearised network says after a change of its weights (None: as it is now)."""
        (x, y), (x_target, y_target) = self.source, self.target
        outputs, on_target = self.tangent.outputs(x), self.tangent.outputs(x_target)
        if change is not None:
            outputs = outputs + self.tangent.push(x, change)
            on_target = on_target + self.tangent.push(x_target, change)
        return Outlook(
            components=components,
            outputs=outputs,
            source_accuracy=_accuracy(outputs, y, self.source_classes),
            target_accuracy=_accuracy(on_target, y_target, self.target_classes),
            source_loss=float(self.source_loss(outputs, y)),
            target_loss=float(self.target_loss(on_target, y_target)),
        )

    def followed(
        self, change: Tensor, batches: Sequence[Tensor], lr: float, basis: Tensor | None
    ) -> float:
        """How well J ω is what the outputs do when the network itself takes the same steps."""
        x, y = self.target
        real = train_network(self.tangent, x, y, self.target_loss, batches, lr, basis=basis)
        inputs = self.source[0]
        moved = self.tangent.outputs(inputs, real) - self.tangent.outputs(inputs)
        missed = torch.linalg.vector_norm(moved - self.tangent.push(inputs, change))
        length = torch.linalg.vector_norm(moved)
        # Outputs that do not move at all are followed perfectly; those that blow up, not.
        share = float(missed / length) if length > 0 else float(missed > 0)
        return max(0.0, 1.0 - share) if share == share else 0.0

    def overlap(self, count: int, generator: torch.Generator) -> Tensor:
        """Singular values of O between source and target, from some samples of each."""
        features = []
        for inputs, labels in (self.source, self.target):
            chosen = torch.randperm(len(inputs), generator=generator)[:count].to(inputs.device)
            classes = None if labels.is_floating_point() else labels[chosen]
            features.append(tangent_features(self.tangent.module, inputs[chosen], classes))
        grid = gram_grid(features)
        return overlap_spectrum(gram_overlap(grid, 0, 1, rtol=_OVERLAP_RTOL)).cpu()


def _inputs(pair: Pair, what: str) -> Tensor:
    if not (isinstance(pair, tuple | list) and len(pair) == 2):
        raise ConfigError(f"{what} must be a pair of inputs and labels")
    inputs = torch.as_tensor(pair[0])
    if inputs.dim() == 0 or len(inputs) == 0:
        raise DataError(f"the {what} has no samples")
    return inputs


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


def _batches(n: int, size: int, epochs: int, generator: torch.Generator) -> Iterator[Tensor]:
    for _ in range(epochs):
        yield from torch.randperm(n, generator=generator).split(size)


def _joined(basis: Tensor, directions: Tensor) -> Tensor:
    return torch.cat([basis, orthonormalize(directions, against=basis)])
