"""A forecast of forgetting: what training on one task will do to another, before it is done.

The engine is the network linearised after a short warm-up and trained on the target as the network
would be. When to trust it: docs/forecast.md.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from forgetless.linalg import orthonormalize
from forgetless.support.errors import ConfigError, DataError, require
from forgetless.support.validation import POSITIVE, is_whole, whole
from forgetless.tangent import tangent_features, true_class
from forgetless.theory.grams import gram_grid, gram_overlap
from forgetless.theory.linearised import (
    Loss,
    SGDRun,
    TangentModel,
    copied,
    curvature,
    train_by_kernel,
    train_linearised,
    train_network,
    widened,
)
from forgetless.theory.overlap import overlap_spectrum

# Below this, pairs of tasks on which forecasts were checked often came out wrong.
TRUSTED = 0.5
# Most rows of a kernel that training in function space is worth it for: 128 MB in float64.
_KERNEL_ROWS = 4096
# Singular values of float32 features below this share of the largest are noise.
_OVERLAP_RTOL = 3e-4

Pair = tuple[Tensor, Tensor]
# A quick forecast does the work of up to this many steps in one, on as much larger a batch, and
# looks at up to this many samples of the source.
_QUICK_MERGE = 8
_QUICK_SOURCE = 2000
# Share of the training that is done for real, on a copy.
_WARM_UP = 0.1
# How far V Vᵀ of orthonormal rows may be from I: a memory kept in bfloat16 comes in any precision.
_STRAIGHT = torch.finfo(torch.bfloat16).eps
Avoided = Tensor | None  # directions that no step goes along
Trainer = Callable[[TangentModel, SGDRun], Tensor]


@final
@dataclass(frozen=True)
class Outlook:
    """What is predicted for the source and the target under one way to train.

    Arguments:
        components: directions of the source that are protected, 0 for plain training; fewer than
            were asked for where the source has no more.
        outputs: predicted outputs on the source, (n, C).
        source_accuracy, target_accuracy: predicted, in percent; None if labels are not classes.
        source_loss, target_loss: predicted mean losses.
    """

    components: int
    outputs: Tensor
    source_accuracy: float | None
    target_accuracy: float | None
    source_loss: float
    target_loss: float

    def summary(self) -> dict[str, Any]:
        """The plain numbers, for JSON."""
        return {
            "components": self.components,
            "source_accuracy": self.source_accuracy,
            "source_loss": self.source_loss,
            "target_accuracy": self.target_accuracy,
            "target_loss": self.target_loss,
        }


@final
@dataclass(frozen=True)
class Forecast:
    """What training on the target will do to the source.

    Arguments:
        index: which of the given source samples were looked at, (n,); all, unless quick.
        labels: their labels, (n,).
        classes: the outputs that the source chooses among.
        now: the present state of the source and the target, in the form of an outlook.
        plain: the outlook for plain SGD.
        protected: the outlooks for PCA-OGD, one for each number of components asked for.
        overlap: singular values of the NTK overlap matrix between source and target, the cosines
            of the principal angles, decreasing.
        trust: 1 − ‖Δf − Jω‖ / ‖Δf‖ on the source, not below 0: how well the linearisation
            followed the first steps of real training. Below `TRUSTED`, do not rely on the forecast.
        steps: how many steps of training were forecast.
        seconds: what the forecast took.
    """

    index: Tensor
    labels: Tensor
    classes: range
    now: Outlook
    plain: Outlook
    protected: tuple[Outlook, ...]
    overlap: Tensor
    trust: float
    steps: int
    seconds: float

    @property
    def trusted(self) -> bool:
        """Whether the linearisation follows the network well enough to be relied on."""
        return self.trust >= TRUSTED

    @property
    def change(self) -> Tensor:
        """The predicted change of every source output, (n, C)."""
        return self.plain.outputs - self.now.outputs

    @property
    def accuracy_change(self) -> float | None:
        """The predicted change of the accuracy on the source, in points; None without classes."""
        if self.now.source_accuracy is None or self.plain.source_accuracy is None:
            return None
        return self.plain.source_accuracy - self.now.source_accuracy

    @property
    def angles(self) -> Tensor:
        """Principal angles between the tasks' tangent spaces in degrees, increasing."""
        return torch.rad2deg(torch.arccos(self.overlap.clamp(0, 1)))

    def endangered(self, count: int = 10) -> Tensor:
        """The source samples that are right now and predicted to be wrong, (≤ count,).

        Their places in the source as it was given, those with the most negative margin first:
        true-class output minus the largest other one.
        """
        now, then = (margins(o, self.labels, self.classes) for o in self._outputs())
        lost = torch.nonzero((now > 0) & (then < 0)).flatten()
        worst = lost[then[lost].argsort()][:count]
        return self.index.to(worst.device)[worst]

    def by_class(self) -> dict[int, tuple[float, float]]:
        """Present and predicted accuracy of each class of the source, in percent."""
        now, then = (margins(o, self.labels, self.classes) > 0 for o in self._outputs())
        shares = {}
        for label in self.labels.unique().tolist():
            of_class = self.labels == label
            before, after = (100 * right[of_class].double().mean().item() for right in (now, then))
            shares[int(label)] = (before, after)
        return shares

    def summary(self) -> dict[str, Any]:
        """The forecast as plain numbers, for JSON."""
        classified = self.now.source_accuracy is not None
        classes = self.by_class() if classified else {}
        return {
            "accuracy_change": self.accuracy_change,
            "now": self.now.summary(),
            "plain": self.plain.summary(),
            "protected": [o.summary() for o in self.protected],
            "by_class": {str(c): {"now": b, "predicted": a} for c, (b, a) in classes.items()},
            "endangered": self.endangered().tolist() if classified else [],
            "overlap": self.overlap.tolist(),
            "angles": self.angles.tolist(),
            "trust": self.trust,
            "trusted": self.trusted,
            "steps": self.steps,
            "seconds": self.seconds,
        }

    def _outputs(self) -> tuple[Tensor, Tensor]:
        return self.now.outputs, self.plain.outputs


def margins(outputs: Tensor, labels: Tensor, classes: range) -> Tensor:
    """True-class output minus the largest other one within the classes: (n, C), (n,) → (n,)."""
    if labels.is_floating_point():
        raise ConfigError("the source's labels are numbers, not classes: there are no margins")
    within = outputs[:, classes.start : classes.stop]
    own = labels - classes.start
    others = within.scatter(1, own.unsqueeze(1), -torch.inf)
    return true_class(within, own) - others.amax(1)


@final
class SourceAndTarget:
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
    components: int | Sequence[int] = (),
    remember: Pair | None = None,
    samples: int = 1000,
    basis: Tensor | None = None,
    exclude: Sequence[str] = (),
    overlap_samples: int = 250,
    warm_up: bool = True,
    quick: bool = False,
    seed: int = 0,
    observer: Callable[[str], None] | None = None,
) -> Forecast:
    """Predict, before training on the target, what will happen to the source.

    A copy of the network is trained on the target for a tenth of the steps, linearised where it
    then is, all its outputs, and the linear model trained for the other steps by SGD with the given
    loss and learning rate, by products with its Jacobian. The network itself is not changed; it is
    taken in eval mode, on its own device. Inputs are brought there, in the network's precision.

    Arguments:
        model: the network as it is after learning the source.
        source: samples whose fate is asked for, (n, *) and labels (n,): best, a test set.
        target: the training set of the task to come, (m, *) and (m,).
        lr, epochs, batch_size: how it will be trained.
        loss: mean loss of outputs (b, C) and labels (b,); by default cross-entropy within a
            task's classes. Labels that are not whole numbers need a loss of their own.
        source_classes, target_classes: the outputs that a task chooses among, where tasks have
            heads; by default all.
        components: predict PCA-OGD with this number of the source's directions as well, or with
            each of several; with all that there are where there are fewer.
        remember: samples whose directions PCA-OGD keeps; by default the source.
        samples: how many of them it looks at.
        basis: directions that every step avoids, such as a method's memory of earlier tasks:
            orthonormal rows (K, p), p all trainable parameters in the model's order. A row of zeros
            is no direction.
        exclude: prefixes of the names of parameters that PCA-OGD does not protect, such as heads.
        overlap_samples: how many samples of each task the overlap matrix is made from.
        warm_up: linearise after the first tenth of the steps, which costs less and says more; if
            false, at the present weights.
        quick: fewer and larger steps, as far as the learning rate allows.
        seed: of the batches and of the choices of samples.
        observer: told in words what is being done.
    """
    started = time.perf_counter()
    POSITIVE.check("lr", lr)
    counts = {"epochs": epochs, "batch_size": batch_size, "samples": samples}
    for name, count in (counts | {"overlap_samples": overlap_samples}).items():
        whole(1).check(name, count)
    components = _counts(components)
    tell = observer or (lambda what: None)
    generator = torch.Generator().manual_seed(seed)
    model = copied(model)
    tangent = TangentModel(model)
    basis = None if basis is None else _directions(basis, tangent.theta)
    problem = SourceAndTarget(tangent, source, target, loss, source_classes, target_classes)
    if quick:
        problem.look_at_fewer(_QUICK_SOURCE, generator)
    merge = _QUICK_MERGE if quick else 1
    x, y = problem.target
    while merge > 1 and lr * merge * curvature(tangent, x[: 8 * batch_size]) > 1:
        merge //= 2
    steps = list(_batches(len(x), batch_size * merge, epochs, generator))
    first = max(1, round(_WARM_UP * len(steps)))
    early, late = steps[:first], steps[first:]
    linear = train_by_kernel if problem.kernel_is_cheaper(epochs) else train_linearised

    def train(
        how: Trainer, at: TangentModel, batches: Sequence[Tensor], avoided: Avoided
    ) -> Tensor:
        return how(at, SGDRun(x, y, problem.target_loss, batches, lr, batch_size, avoided))

    def outlook(avoided: Avoided, components: int) -> Outlook:
        if not warm_up:
            return problem.outlook(tangent, train(linear, tangent, steps, avoided), components)
        start = real if avoided is basis else train(train_network, tangent, early, avoided)
        moved = tangent.moved(start)
        return problem.outlook(moved, train(linear, moved, late, avoided), components)

    tell("following the first steps of real training")
    real = train(train_network, tangent, early, basis)
    trust = problem.followed(train(train_linearised, tangent, early, basis), real)
    tell("training the linearised network")
    plain = outlook(basis, 0)
    protected = []
    if components:
        x_kept, y_kept = problem.checked(remember, "remember") if remember else problem.source
        chosen = torch.randperm(len(x_kept), generator=generator)[:samples].to(x.device)
        names = _without(tangent, exclude)
        # Of the outputs of their classes, or of all outputs.
        labels = None if y_kept.is_floating_point() else y_kept[chosen]
        phi = tangent_features(model, x_kept[chosen], labels, params=names)
        sizes = {n: shape.numel() for n, shape in tangent.shapes.items()}
        directions = widened(phi.top(max(components))[1], names, sizes)
        for count in components:
            kept = directions[:count]  # all of them, where there are no more
            tell(f"the same with {len(kept)} directions protected")
            avoided = kept if basis is None else _joined(basis, kept)
            protected.append(outlook(avoided, len(kept)))
    tell("measuring the overlap of the tasks")
    return Forecast(
        index=problem.index,
        labels=problem.source[1],
        classes=problem.source_classes,
        now=problem.outlook(tangent, None, 0),
        plain=plain,
        protected=tuple(protected),
        overlap=problem.overlap(overlap_samples, generator),
        trust=trust,
        steps=epochs * -(-len(x) // batch_size),
        seconds=time.perf_counter() - started,
    )


def _without(tangent: TangentModel, exclude: Sequence[str]) -> list[str]:
    """The trained parameters whose names start with none of these."""
    beginnings = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    for start in beginnings:
        known = isinstance(start, str) and any(n.startswith(start) for n in tangent.shapes)
        require(known, "exclude", start, "the beginning of a trained parameter's name")
    names = [n for n in tangent.shapes if not n.startswith(beginnings)]
    require(bool(names), "exclude", exclude, "not all of the model's trained parameters")
    return names


def _counts(components: Any) -> Sequence[int]:
    """Numbers of directions; one alone is a list of one."""
    counts = [components] if is_whole(components) else components
    valid = isinstance(counts, Sequence) and all(map(whole(1).fits, counts))
    require(valid, "components", components, f"{whole(1).words}, or several of them")
    return list(counts)


def _directions(basis: Any, theta: Tensor) -> Tensor:
    """Rows (K, p) that were found to be orthonormal, where the weights are and as precise."""
    wanted = f"orthonormal rows (K, {theta.numel()})"
    usable = isinstance(basis, Tensor) and basis.is_floating_point()
    require(usable, "basis", getattr(basis, "dtype", type(basis).__name__), f"a tensor of {wanted}")
    fits = basis.dim() == 2 and basis.shape[1] == theta.numel()
    require(fits, "basis", tuple(basis.shape), wanted)
    rows: Tensor = basis.detach().to(theta)
    rows = rows[rows.any(dim=1)]
    exact = rows.to(torch.promote_types(rows.dtype, torch.float32))
    off = exact @ exact.T - torch.eye(len(rows)).to(exact)
    largest = float(off.abs().max()) if len(rows) else 0.0
    require(largest <= _STRAIGHT, "basis", f"rows that are off by {largest:.2g}", wanted)
    return rows


def _batches(n: int, size: int, epochs: int, generator: torch.Generator) -> Iterator[Tensor]:
    for _ in range(epochs):
        yield from torch.randperm(n, generator=generator).split(int(size))


def _joined(basis: Tensor, directions: Tensor) -> Tensor:
    return torch.cat([basis, orthonormalize(directions, against=basis)])
