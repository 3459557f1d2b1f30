"""A forecast of forgetting: what training on one task will do to another, before it is done.

The engine is the network linearised after a short warm-up, trained on the target as the network
would be. When to trust it: docs/forecast.md.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from forgetless.linalg import orthonormalize
from forgetless.support.errors import require
from forgetless.support.validation import POSITIVE, is_whole, whole
from forgetless.tangent import tangent_features
from forgetless.theory.forecast.model import (
    Course,
    Loss,
    TangentModel,
    curvature,
    train_by_kernel,
    train_linearised,
    train_network,
    widened,
)
from forgetless.theory.forecast.modules import copied
from forgetless.theory.forecast.outlook import Forecast, Outlook
from forgetless.theory.forecast.problem import Pair, Problem

# A quick forecast does the work of up to this many steps in one, on as much larger a batch, and
# looks at up to this many samples of the source.
_QUICK_MERGE = 8
_QUICK_SOURCE = 2000
# Share of the training that is done for real, on a copy.
_WARM_UP = 0.1
# How far V Vᵀ of orthonormal rows may be from I: a memory kept in bfloat16 comes in any precision.
_STRAIGHT = torch.finfo(torch.bfloat16).eps
Held = Tensor | None  # directions that are avoided
Trainer = Callable[[TangentModel, Course], Tensor]


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
        exclude: what the names of parameters start with that PCA-OGD leaves alone, such as heads.
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
    problem = Problem(tangent, source, target, loss, source_classes, target_classes)
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

    def train(how: Trainer, at: TangentModel, batches: Sequence[Tensor], held: Held) -> Tensor:
        return how(at, Course(x, y, problem.target_loss, batches, lr, batch_size, held))

    def outlook(held: Held, components: int) -> Outlook:
        if not warm_up:
            return problem.outlook(tangent, train(linear, tangent, steps, held), components)
        start = real if held is basis else train(train_network, tangent, early, held)
        moved = tangent.moved(start)
        return problem.outlook(moved, train(linear, moved, late, held), components)

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
            held = kept if basis is None else _joined(basis, kept)
            protected.append(outlook(held, len(kept)))
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
