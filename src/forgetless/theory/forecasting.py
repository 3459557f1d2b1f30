"""The effect of training on one task on another: its parts, and a forecast by linearisation.

A copy of the network takes the first steps, then its linearisation takes the others. When to trust
it: docs/forecast.md. `training.forecasting` has the cheaper forecast by a dry run.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from forgetless.linalg import Layout, is_under, orthonormalize
from forgetless.support.progress import advance, bar_on_terminal
from forgetless.support.validation import (
    POSITIVE,
    ConfigError,
    DataError,
    beginnings,
    first_line,
    is_whole,
    require,
    whole,
)
from forgetless.tangent import TangentFeatures, tangent_features, true_class
from forgetless.theory.linearised import (
    Loss,
    SGDRun,
    StepChange,
    TangentModel,
    copied,
    curvature,
    train_by_kernel,
    train_linearised,
    train_network,
)
from forgetless.theory.overlap import (
    FLOAT32_RTOL,
    Protected,
    check_projection,
    operator_overlap,
    overlap_spectrum,
)

# Forecasts of the checked pairs of tasks with less trust were often wrong.
TRUSTED = 0.5
_KERNEL_ROWS = 4096  # largest kernel for training in function space: 128 MB in float64
_WARM_UP = 0.1  # share of the steps that a copy of the network takes
_QUICK_MERGE = 8  # steps that a quick forecast merges into one on a larger batch
_QUICK_SOURCE = 2000  # source samples of a quick forecast
_STRAIGHT = torch.finfo(torch.bfloat16).eps  # largest entry of V Vᵀ − I: rows may be in bfloat16

Pair = tuple[Tensor, Tensor]
Trainer = Callable[[TangentModel, SGDRun], Tensor]


@final
@dataclass(frozen=True)
class Prediction:
    """Predictions for the source and the target after training in one way.

    Arguments:
        outputs: predicted outputs on the source, (n, C).
        source_accuracy, target_accuracy: predicted, in percent; None if labels are not classes.
        source_loss, target_loss: predicted mean losses.
        components: protected directions of the source, 0 for plain training; fewer than asked for
            if the source has no more.
    """

    outputs: Tensor
    source_accuracy: float | None
    target_accuracy: float | None
    source_loss: float
    target_loss: float
    components: int = 0

    def summary(self) -> dict[str, Any]:
        """The plain numbers, for JSON."""
        return {name: value for name, value in vars(self).items() if name != "outputs"}


@dataclass(frozen=True)
class Effect:
    """The outputs on a task's samples, now and after training on another task.

    Arguments:
        index: indices of the source samples used, (n,).
        labels: their labels, (n,).
        classes: the outputs that compete on the source.
        now: the present state of the source and the target, as a prediction.
        after: the prediction for the state after training.
    """

    index: Tensor
    labels: Tensor
    classes: range
    now: Prediction
    after: Prediction

    @property
    def change(self) -> Tensor:
        """The predicted change of every source output, (n, C)."""
        return self.after.outputs - self.now.outputs

    @property
    def accuracy_change(self) -> float | None:
        """The predicted change of the accuracy on the source, in points; None without classes."""
        if self.now.source_accuracy is None or self.after.source_accuracy is None:
            return None
        return self.after.source_accuracy - self.now.source_accuracy

    def endangered(self, count: int = 10) -> Tensor:
        """Indices of the source samples that are right now and predicted wrong, (≤ count,).

        The most negative margins (true-class output minus the largest other one) come first.
        """
        now, then = self._margins()
        worst = newly_wrong(now, then, count)
        return self.index.to(worst.device)[worst]

    def by_class(self) -> dict[int, tuple[float, float]]:
        """Present and predicted accuracy of each class of the source, in percent."""
        shares = {}
        for label in self.labels.unique().tolist():
            right = [margin[self.labels == label] > 0 for margin in self._margins()]
            before, after = (100 * some.double().mean().item() for some in right)
            shares[int(label)] = (before, after)
        return shares

    def summary(self) -> dict[str, Any]:
        """The plain numbers, for JSON."""
        classified = self.now.source_accuracy is not None
        classes = self.by_class() if classified else {}
        return {
            "accuracy_change": self.accuracy_change,
            "now": self.now.summary(),
            "after": self.after.summary(),
            "by_class": {str(c): {"now": b, "predicted": a} for c, (b, a) in classes.items()},
            "endangered": self.endangered().tolist() if classified else [],
        }

    def _margins(self) -> list[Tensor]:
        """Margins now and after training."""
        return [margins(p.outputs, self.labels, self.classes) for p in (self.now, self.after)]


@final
@dataclass(frozen=True)
class LinearisedForecast(Effect):
    """The predicted effect on the source of training on the target by SGD, linearised.

    Arguments:
        protected: the predictions for PCA-OGD, one for each number of components.
        methods: the predictions for other methods, by name.
        overlap: singular values of the NTK overlap matrix between source and target, the cosines
            of the principal angles, decreasing.
        trust: 1 − ‖Δf − Jω‖ / ‖Δf‖ on the source, at least 0: how well the linearisation followed
            the first steps of real training. Below `TRUSTED`, do not rely on the forecast.
        steps: number of steps of training.
        seconds: computing time.
    """

    protected: tuple[Prediction, ...]
    methods: Mapping[str, Prediction]
    overlap: Tensor
    trust: float
    steps: int
    seconds: float

    @property
    def trusted(self) -> bool:
        """Whether the linearisation follows the network well enough to rely on the forecast."""
        return self.trust >= TRUSTED

    @property
    def angles(self) -> Tensor:
        """Principal angles between the tasks' tangent spaces in degrees, increasing."""
        return torch.rad2deg(torch.arccos(self.overlap.clamp(0, 1)))

    def summary(self) -> dict[str, Any]:
        """The plain numbers, for JSON."""
        return Effect.summary(self) | {
            "protected": [o.summary() for o in self.protected],
            "methods": {name: o.summary() for name, o in self.methods.items()},
            "overlap": self.overlap.tolist(),
            "angles": self.angles.tolist(),
            "trust": self.trust,
            "trusted": self.trusted,
            "steps": self.steps,
            "seconds": self.seconds,
        }


def margins(outputs: Tensor, labels: Tensor, classes: range) -> Tensor:
    """True-class output minus the largest other one within the classes: (n, C), (n,) → (n,)."""
    if labels.is_floating_point():
        raise ConfigError("the source's labels are numbers, not classes: there are no margins")
    within = outputs[:, classes.start : classes.stop]
    own = labels - classes.start
    others = within.scatter(1, own.unsqueeze(1), -torch.inf)
    return true_class(within, own) - others.amax(1)


def newly_wrong(before: Tensor, after: Tensor, count: int) -> Tensor:
    """Indices of the samples whose margin was positive and is negative, the worst first."""
    lost = torch.nonzero((before > 0) & (after < 0)).flatten()
    return lost[after[lost].argsort()][:count]


@final
class SourceAndTarget:
    """The samples and losses of a forecast's two tasks, checked."""

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
        n_outputs = self._tried(self._inputs(source, "source")[:1], "source").shape[-1]
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
        """Samples on the model's device, or an error that says what is wrong with them."""
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
        if not bool(self._tried(inputs[:32], what).isfinite().all()):
            raise DataError(f"the model's outputs on the {what} are NaN or infinite")
        return inputs, labels.to(inputs.device)

    def _inputs(self, pair: Pair, what: str) -> Tensor:
        """The inputs of a pair, with the model's device and precision."""
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise ConfigError(f"the {what} must be a pair of inputs and labels")
        inputs = torch.as_tensor(pair[0])
        if inputs.dim() == 0 or len(inputs) == 0:
            raise DataError(f"the {what} has no samples")
        theta = self.tangent.theta
        return inputs.to(theta if inputs.is_floating_point() else theta.device)

    def _tried(self, inputs: Tensor, what: str) -> Tensor:
        """The model's outputs on a few inputs, or an error that names the inputs."""
        try:
            return self.tangent.outputs(inputs)
        except (RuntimeError, ValueError, IndexError) as error:
            reason = first_line(error)
            shape = tuple(inputs.shape[1:])
            raise ConfigError(
                f"the model does not take the inputs of the {what}, of shape {shape}: {reason}"
            ) from error

    def use_fewer(self, count: int, generator: torch.Generator) -> None:
        """Use a random choice of the source's samples."""
        inputs, labels = self.source
        chosen = torch.randperm(len(inputs), generator=generator)[:count].sort().values
        self.source = inputs[chosen.to(inputs.device)], labels[chosen.to(labels.device)]
        self.index = chosen

    def kernel_is_cheaper(self, epochs: int) -> bool:
        """Whether to train in function space: few target samples, each used many times.

        The kernel takes C backward passes per sample, the parameters two or three per epoch.
        """
        n, outputs = len(self.target[1]), self.tangent.outputs(self.target[0][:1]).shape[-1]
        return n * outputs <= _KERNEL_ROWS and epochs > outputs

    def predict(
        self, model: TangentModel, change: Tensor | None = None, components: int = 0
    ) -> Prediction:
        """Predictions of a linearised network after a change of its weights (None: no change)."""
        (x, y), (x_target, y_target) = self.source, self.target
        outputs, on_target = model.outputs(x), model.outputs(x_target)
        if change is not None:
            outputs = outputs + model.push(x, change)
            on_target = on_target + model.push(x_target, change)
        return Prediction(
            components=components,
            outputs=outputs,
            source_accuracy=_accuracy(outputs, y, self.source_classes),
            target_accuracy=_accuracy(on_target, y_target, self.target_classes),
            source_loss=float(self.source_loss(outputs, y)),
            target_loss=float(self.target_loss(on_target, y_target)),
        )

    def followed(self, linear: Tensor, real: Tensor) -> float:
        """The trust: how well J ω agrees with the network's outputs after the same steps."""
        inputs = self.source[0]
        moved = self.tangent.outputs(inputs, real) - self.tangent.outputs(inputs)
        missed = torch.linalg.vector_norm(moved - self.tangent.push(inputs, linear))
        length = torch.linalg.vector_norm(moved)
        if not bool(missed.isfinite() & length.isfinite()):
            return 0.0  # training diverges
        # Constant outputs are followed perfectly.
        share = float(missed / length) if length > 0 else float(missed > 0)
        return max(0.0, 1.0 - share)

    def overlap(self, count: int, generator: torch.Generator) -> Tensor:
        """Singular values of O between source and target, from some samples of each."""
        known, coming = (
            self.features(pair, count, generator) for pair in (self.source, self.target)
        )
        return overlap_spectrum(operator_overlap(known, coming, rtol=FLOAT32_RTOL)).cpu()

    def features(
        self,
        pair: Pair,
        count: int,
        generator: torch.Generator,
        names: Sequence[str] | None = None,
    ) -> TangentFeatures:
        """φ of a random choice of samples: of their classes' outputs, or of all outputs."""
        inputs, labels = pair
        chosen = torch.randperm(len(inputs), generator=generator)[:count].to(inputs.device)
        classes = None if labels.is_floating_point() else labels[chosen]
        return tangent_features(self.tangent.module, inputs[chosen], classes, params=names)

    def top_directions(
        self,
        pair: Pair,
        components: int,
        samples: int,
        generator: torch.Generator,
        names: Sequence[str],
    ) -> Tensor:
        """The top directions of φ in the named parameters, as rows over all trained (K, p)."""
        phi = self.features(pair, samples, generator, names)
        own = Layout({name: self.tangent.layout.shapes[name] for name in names})
        return self.tangent.layout.join(own.split(phi.top(components)[1]))


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


@bar_on_terminal("forecast")
def linearised_forecast(
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
    basis: Protected | None = None,
    exclude: Sequence[str] = (),
    methods: Mapping[str, StepChange] | None = None,
    overlap_samples: int = 250,
    warm_up: bool = True,
    quick: bool = False,
    seed: int = 0,
    on_stage: Callable[[str], None] | None = None,
) -> LinearisedForecast:
    """Predict the effect on the source of training on the target, by a linear model.

    A copy of the network is trained on the target for a tenth of the steps and then linearised; the
    linear model takes the other steps by SGD with the given loss and learning rate, by products
    with its Jacobian. The network itself is not changed; it is used in eval mode, on its own
    device and with its precision.

    Arguments:
        model: the network after learning the source.
        source: samples to predict for, (n, *) and labels (n,), such as a test set.
        target: the training set of the next task, (m, *) and (m,).
        lr, epochs, batch_size: of the training.
        loss: mean loss of outputs (b, C) and labels (b,); by default cross-entropy within a
            task's classes. Labels that are not whole numbers need a loss of their own.
        source_classes, target_classes: the outputs that compete in a task; by default all.
        components: also predict PCA-OGD with this number of the source's directions, or with each
            of several, at most as many as there are.
        remember: samples whose directions PCA-OGD stores; by default the source.
        samples: how many of them it uses.
        basis: directions that every step avoids, such as a method's memory of earlier tasks:
            orthonormal rows (K, p), p all trainable parameters in the model's order. Rows of zeros
            are ignored. Or the orthogonal projection itself, a function of rows (n, p), for which
            no `components` can be added.
        exclude: names, or beginnings of names, of parameters that PCA-OGD does not protect,
            such as heads.
        methods: also predict these methods, by name: functions from a step of SGD and the weights
            before it to the step that is taken, (p,), (p,) → (p,), over all trainable parameters.
            `launch.method_steps` makes one of a method. `basis` does not apply to them.
        overlap_samples: number of samples of each task for the overlap matrix.
        warm_up: linearise after the first tenth of the steps, which is faster and more accurate; if
            false, at the present weights.
        quick: fewer and larger steps, as far as the learning rate allows.
        seed: of the batches and of the choices of samples.
        on_stage: called with a description of each step of the computation.
    """
    started = time.perf_counter()
    POSITIVE.check("lr", lr)
    counts = {"epochs": epochs, "batch_size": batch_size, "samples": samples}
    for name, count in (counts | {"overlap_samples": overlap_samples}).items():
        whole(1).check(name, count)
    components = _counts(components)
    tell = _telling(on_stage)
    generator = torch.Generator().manual_seed(seed)
    tangent = TangentModel(copied(model))
    basis = _avoided(basis, tangent.theta, components)
    problem = SourceAndTarget(tangent, source, target, loss, source_classes, target_classes)
    if quick:
        problem.use_fewer(_QUICK_SOURCE, generator)
    merge = _merged_steps(problem, lr, batch_size) if quick else 1
    n_target = len(problem.target[1])
    steps = list(_batches(n_target, batch_size * merge, epochs, generator))
    tell("following the first steps of real training")
    trial = _TrialTraining(problem, steps, lr, batch_size, epochs, basis, warm_up)
    trust = trial.trust()
    tell("training the linearised network")
    plain = trial.predict(basis)
    protected = []
    if components:
        stored = problem.checked(remember, "remembered set") if remember else problem.source
        names = _without(tangent, exclude)
        directions = problem.top_directions(stored, max(components), samples, generator, names)
        for count in components:
            kept = directions[:count]
            tell(f"the same with {len(kept)} directions protected")
            avoided = kept
            if isinstance(basis, Tensor):
                avoided = torch.cat([basis, orthonormalize(kept, against=basis)])
            protected.append(trial.predict(avoided, len(kept)))
    by_name = {}
    for name, change in (methods or {}).items():
        tell(f"the same with {name}")
        by_name[name] = trial.predict(None, change=change)
    tell("measuring the overlap of the tasks")
    return LinearisedForecast(
        index=problem.index,
        labels=problem.source[1],
        classes=problem.source_classes,
        now=problem.predict(tangent),
        after=plain,
        protected=tuple(protected),
        methods=by_name,
        overlap=problem.overlap(overlap_samples, generator),
        trust=trust,
        steps=epochs * -(-n_target // batch_size),
        seconds=time.perf_counter() - started,
    )


@final
class _TrialTraining:
    """Training on the target in several ways, all with the same steps.

    Arguments:
        problem: the tasks and the network.
        steps: indices of each step's samples.
        lr, batch_size, epochs: of the training.
        basis: what plain training avoids, or None.
        warm_up: linearise after the first steps of real training, not at the present weights.
    """

    def __init__(
        self,
        problem: SourceAndTarget,
        steps: Sequence[Tensor],
        lr: float,
        batch_size: int,
        epochs: int,
        basis: Protected | None,
        warm_up: bool,
    ) -> None:
        self.problem = problem
        self.steps = steps
        self.lr = lr
        self.batch_size = batch_size
        self.basis = basis
        self.warm_up = warm_up
        self.first = max(1, round(_WARM_UP * len(steps)))
        cheaper = problem.kernel_is_cheaper(epochs)
        self.linear: Trainer = train_by_kernel if cheaper else train_linearised
        # The change of the weights in the first steps of plain training.
        self.real = self._early(train_network, basis)

    def trust(self) -> float:
        """How well the linearised network follows these first steps."""
        return self.problem.followed(self._early(train_linearised, self.basis), self.real)

    def predict(
        self, avoided: Protected | None, components: int = 0, change: StepChange | None = None
    ) -> Prediction:
        """The predictions for training that avoids these directions, or changes its steps."""
        how = self.linear if change is None else train_linearised
        at, left = self.problem.tangent, self.steps
        if self.warm_up:
            known = change is None and avoided is self.basis
            start = self.real if known else self._early(train_network, avoided, change)
            at, left = at.moved(start), left[self.first :]
        return self.problem.predict(at, self._train(how, at, left, avoided, change), components)

    def _early(
        self, how: Trainer, avoided: Protected | None, change: StepChange | None = None
    ) -> Tensor:
        """The change of the weights in the first steps."""
        return self._train(how, self.problem.tangent, self.steps[: self.first], avoided, change)

    def _train(
        self,
        how: Trainer,
        at: TangentModel,
        batches: Sequence[Tensor],
        avoided: Protected | None,
        change: StepChange | None,
    ) -> Tensor:
        x, y = self.problem.target
        loss, lr, size = self.problem.target_loss, self.lr, self.batch_size
        return how(at, SGDRun(x, y, loss, batches, lr, size, avoided, change))


def _merged_steps(problem: SourceAndTarget, lr: float, batch_size: int) -> int:
    """How many steps a quick forecast merges into one, as far as the learning rate allows."""
    steepest = curvature(problem.tangent, problem.target[0][: 8 * batch_size])
    merge = _QUICK_MERGE
    while merge > 1 and lr * merge * steepest > 1:
        merge //= 2
    return merge


def _telling(on_stage: Callable[[str], None] | None) -> Callable[[str], None]:
    """Each step is told to whoever asked, and to whoever watches the progress."""

    def tell(what: str) -> None:
        advance(what, 0, 1)
        if on_stage is not None:
            on_stage(what)

    return tell


def _without(tangent: TangentModel, exclude: Sequence[str]) -> list[str]:
    """The trained parameters whose names begin with none of these, in whole parts."""
    starts = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    accepted = "the beginning of a trained parameter's name"
    for start in starts:
        known = isinstance(start, str) and any(is_under(n, [start]) for n in tangent.layout.shapes)
        require(known, "exclude", start, accepted, beginnings(tangent.layout.shapes))
    names = [n for n in tangent.layout.shapes if not is_under(n, starts)]
    require(bool(names), "exclude", exclude, "not all of the model's trained parameters")
    return names


def _counts(components: Any) -> Sequence[int]:
    """Numbers of directions, as a list."""
    counts = [components] if is_whole(components) else components
    valid = isinstance(counts, Sequence) and all(map(whole(1).fits, counts))
    require(valid, "components", components, f"{whole(1).words}, or several of them")
    return list(counts)


def _avoided(basis: Any, theta: Tensor, components: Sequence[int]) -> Protected | None:
    """The directions that every step avoids, checked; or the projection."""
    if basis is None or not callable(basis):
        return None if basis is None else _directions(basis, theta)
    accepted = "none where basis is a function"
    require(not components, "components", list(components), accepted)
    generator = torch.Generator().manual_seed(0)
    check_projection("basis", torch.randn(2, len(theta), generator=generator).to(theta), basis)
    projection: Protected = basis
    return projection


def _directions(basis: Any, theta: Tensor) -> Tensor:
    """Rows (K, p), checked to be orthonormal, with the weights' device and precision."""
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
