"""The theorem, the corollaries and the bounds, checked on small cases in float64."""

from typing import Any

import numpy as np
import torch
from scipy.linalg import subspace_angles
from torch import Tensor, nn

from forgetless.paper.numbers import table
from forgetless.paper.pictures import Pictures
from forgetless.paper.results import Data
from forgetless.paper.workshop import Artefact, Cells, Workshop
from forgetless.support.streams import global_stream
from forgetless.theory import (
    ComponentProjection,
    Descent,
    GradientProjection,
    LinearTask,
    NoProjection,
    Projection,
    SampleProjection,
    bounds,
    decompose,
    factors,
    learn,
    overlap,
    overlap_spectrum,
    remembered,
)

N, P, TASKS, DECAY, MEMORY = 8, 60, 4, 0.1, 4
METHODS: dict[str, Projection] = {
    "SGD": NoProjection(),
    "GEM-NT": GradientProjection(MEMORY),
    "OGD": SampleProjection(MEMORY),
    "PCA-OGD": ComponentProjection(MEMORY),
}
# Those for which the paper prints a bound; each stores one sample or direction of a task.
_BOUNDED: dict[str, Projection] = {
    "SGD": NoProjection(),
    "GEM-NT": GradientProjection([torch.tensor([0])] * 10),
    "PCA-OGD": ComponentProjection(1),
    "PCA-OGD, centred": ComponentProjection(1, centred=True),
}
_CASES = 10
_STEPS = 4000  # of plain descent: far more than it takes to see a difference


def some_tasks(seed: int, count: int = TASKS, decay: float = 0.8) -> list[LinearTask]:
    """Tasks that share directions, the i-th with a weight of decay to the power of i."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    scales = decay ** torch.arange(P, dtype=torch.float64)
    return [LinearTask(normal(N, P) * scales, normal(N), normal(N)) for _ in range(count)]


def measure(workshop: Workshop, cells: Cells) -> dict[str, Any]:
    """Every check's numbers. They need no device and no data."""
    return {
        "exact": {name: _exactness(method) for name, method in METHODS.items()},
        "plain descent": max(_plain_descent(method) for method in METHODS.values()),
        "old residuals": _old_residuals(),
        "anew in every step": max(anew(seed) for seed in range(3)),
        "printed objective": _printed_objective(),
        "angles": _angles(),
        "bounds": {name: _bounds(method) for name, method in _BOUNDED.items()},
        "alignment": _alignment(),
        "cancelling": _cancelling(),
        "null residual": _null_residual(),
        "one sample": one_sample(),
        "well learned": well_learned(),
        "shorter gradient": shorter_gradient(),
        "raw projection": _raw_projection(),
        "algorithm 1": _as_printed(),
        "spectrum": {"steep": _protection(0.5), "flat": _protection(1.0)},
    }


def _exactness(method: Projection) -> dict[str, float]:
    """Largest relative errors against gradient descent: of the weights, and of Δ by formula."""
    weights, forgetting = [], []
    for seed in range(5):
        tasks = some_tasks(seed)
        descended = learn(tasks, method, weight_decay=DECAY, solver=Descent())
        closed = learn(tasks, method, weight_decay=DECAY)
        weights.append(_relative(closed.steps, descended.steps))
        for source in range(TASKS - 1):
            # What the outputs did while descending, against the formula at the closed form.
            outputs = descended.predict(tasks[source].features, tasks[source].outputs)
            measured = float((outputs[-1] - outputs[source + 1]).square().sum())
            formula = decompose(closed, source, TASKS - 1).total
            forgetting.append(abs(formula - measured) / max(measured, 1e-12))
    return {"weights": max(weights), "forgetting": max(forgetting)}


def _plain_descent(method: Projection) -> float:
    """Relative error of the closed form against Corollary 4's descent, without acceleration."""
    tasks = some_tasks(0)
    plain = Descent(accelerated=False, tolerance=1e-11)
    descended = learn(tasks, method, weight_decay=DECAY, solver=plain)
    return _relative(learn(tasks, method, weight_decay=DECAY).steps, descended.steps)


def _old_residuals() -> dict[str, float]:
    """Distance of f_T − y of the first task from ỹ + δ, and from what it is.

    With ỹ = y − f_0 the residual before the task is learned, ỹ − κ (κ + λ I)⁻¹ ỹ is left after it.
    """
    tasks = some_tasks(0)
    learned, first = learn(tasks, NoProjection(), weight_decay=DECAY), tasks[0]
    outputs = learned.predict(first.features, first.outputs)
    drift, residual = outputs[-1] - outputs[1], first.targets - first.outputs
    kernel = first.features @ first.features.T + DECAY * torch.eye(N, dtype=torch.float64)
    left = DECAY * torch.linalg.solve(kernel, residual)
    actual = outputs[-1] - first.targets
    return {
        "printed": _relative(residual + drift, actual),
        "right": _relative(drift - left, actual),
    }


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def _printed_objective() -> dict[str, float]:
    """Distance of the corollary's solution from the minimum, as printed and with ½ on both."""
    task = some_tasks(0)[0]
    phi, residual = task.features, task.targets - task.outputs
    solution = learn([task], NoProjection(), weight_decay=DECAY).steps[0]

    def minimum(decay: float) -> Tensor:
        kernel = phi @ phi.T + decay * torch.eye(N, dtype=torch.float64)
        best: Tensor = phi.T @ torch.linalg.solve(kernel, residual)
        return best

    # ‖φ w − ỹ‖² + ½ λ ‖w‖² has the minimum of ridge regression with λ / 2.
    return {
        "as printed": _relative(solution, minimum(DECAY / 2)),
        "halved": _relative(solution, minimum(DECAY)),
    }


def _angles() -> float:
    """Largest difference of O's singular values from the cosines of SciPy's principal angles."""
    worst = 0.0
    for seed in range(_CASES):
        first, second = (factors(task.features) for task in some_tasks(seed, 2))
        values = overlap_spectrum(overlap(first, second)).numpy()
        cosines = np.cos(subspace_angles(first.v.numpy().T, second.v.numpy().T))
        worst = max(worst, float(np.abs(np.sort(values) - np.sort(cosines)).max()))
    return worst


def _bounds(method: Projection) -> dict[str, float]:
    """Largest ratios of Δ to its bounds: one later task, several, and to the valid bound."""
    found = {"one": 0.0, "several": 0.0, "valid": 0.0}
    cases = [some_tasks(seed) for seed in range(_CASES)]
    cases += [_steady(method, c, count) for c in (0.5, 0.7, 0.9, 1.0) for count in (2, 9)]
    if isinstance(method, ComponentProjection) and method.centred:
        cases.append(_with_mean())
    for tasks in cases:
        learned = learn(tasks, method)
        for target in {1, len(tasks) - 1}:
            forgotten = decompose(learned, 0, target).total
            limit = bounds(learned, 0, target)
            name = "one" if target == 1 else "several"
            found[name] = max(found[name], forgotten / max(limit.printed, 1e-12))
            found["valid"] = max(found["valid"], forgotten / max(limit.valid, 1e-12))
    return found


def _steady(method: Projection, share: float, count: int) -> list[LinearTask]:
    """Later tasks that all push the same unprotected direction of the source the same way.

    The source has one more direction than the method stores. A later task's one feature has a share
    of the last of them and a private rest; it asks for one more than the model gives it by then.
    """
    kept = 0 if isinstance(method, NoProjection) else 1
    identity = torch.eye(kept + 1 + count, dtype=torch.float64)
    source = identity[: kept + 1].clone()
    if isinstance(method, ComponentProjection):
        source[0] *= 2  # the one that is stored
    zero = torch.zeros(1, dtype=torch.float64)
    tasks = [LinearTask(source, zero.expand(kept + 1), zero.expand(kept + 1))]
    for k in range(1, count):
        feature = share * identity[kept] + (1 - share**2) ** 0.5 * identity[kept + k]
        now = learn(tasks, method).predict(feature.unsqueeze(0), zero)[-1]
        tasks.append(LinearTask(feature.unsqueeze(0), now + 1, zero))
    return tasks


def _with_mean() -> list[LinearTask]:
    """A source whose features have a large mean, which centred PCA does not store."""
    generator = torch.Generator().manual_seed(0)
    source = torch.randn(N, P, generator=generator, dtype=torch.float64)
    source[:, 0] += 10.0
    target = torch.eye(P, dtype=torch.float64)[:1]
    zero = torch.zeros(N, dtype=torch.float64)
    return [LinearTask(source, zero, zero), LinearTask(target, zero[:1] + 1, zero[:1])]


def _alignment() -> dict[str, list[float]]:
    """Δ from one source direction to one target direction at growing cosines, residual fixed."""
    cosines = [0.0, 0.25, 0.5, 0.75, 1.0]
    found = []
    for cosine in cosines:
        source = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
        target = torch.tensor([[cosine, (1 - cosine**2) ** 0.5]], dtype=torch.float64)
        zero, one = torch.zeros(1).double(), torch.ones(1).double()
        learned = learn(
            [LinearTask(source, zero, zero), LinearTask(target, one, zero)], NoProjection()
        )
        found.append(decompose(learned, 0, 1).total)
    return {"cosine": cosines, "forgetting": found}


def _null_residual() -> float:
    """Δ, relative to the outputs, by descent on a task that the network predicts already."""
    first, second = some_tasks(0, 2)
    moved = learn([first], NoProjection(), weight_decay=DECAY).predict(
        second.features, second.outputs
    )[-1]
    known = LinearTask(second.features, moved, second.outputs)
    learned = learn([first, known], NoProjection(), weight_decay=DECAY, solver=Descent())
    outputs = learned.predict(first.features, first.outputs)
    return float((outputs[2] - outputs[1]).square().sum() / outputs[1].square().sum())


def _cancelling() -> dict[str, float]:
    """Δ after a task that drifts, and after one that undoes it."""
    source, target = some_tasks(0, 2)
    back = LinearTask(target.features, target.outputs, target.outputs)
    first = LinearTask(source.features, source.outputs, source.outputs)
    learned = learn([first, target, back], NoProjection())
    return {"after": decompose(learned, 0, 1).total, "undone": decompose(learned, 0, 2).total}


def _raw_projection() -> dict[str, float]:
    """‖T² − T‖ / ‖T‖ of T = I − C Cᵀ, with columns as they are and orthonormalised.

    GEM-NT's are gradients; PCA-OGD's the top directions of each task, which are orthonormal within
    a task and not across tasks.
    """
    tasks = some_tasks(0)
    gradients = torch.stack([task.features.mean(0) for task in tasks]).T
    directions = torch.cat([factors(task.features).v[:MEMORY] for task in tasks]).T
    found = {}
    for name, columns in (
        ("raw", gradients),
        ("orthonormal", torch.linalg.qr(gradients)[0]),
        ("PCA-OGD, raw", directions),
        ("PCA-OGD, orthonormal", torch.linalg.qr(directions)[0]),
    ):
        t = torch.eye(P, dtype=torch.float64) - columns @ columns.T
        found[name] = float((t @ t - t).norm() / t.norm())
    return found


def _as_printed() -> dict[str, float]:
    """T = I − Σ v vᵀ / ‖v‖² over what algorithm 1 stores of one task.

    It stores the Gram-Schmidt vectors of all samples and the top directions, which they span.
    """
    phi = some_tasks(0)[0].features
    samples = torch.linalg.qr(phi.T)[0]
    top = torch.linalg.svd(phi, full_matrices=False)[2][:MEMORY].T
    taken = torch.eye(P, dtype=torch.float64) - samples @ samples.T - top @ top.T
    return {
        "least": float(torch.linalg.eigvalsh(taken)[0]),
        "stored": samples.shape[1] + top.shape[1],
        "meant": top.shape[1],
    }


def _protection(decay: float) -> float:
    """Σ Δ of PCA-OGD over that of OGD, same memory, by how fast the features' spectrum falls."""
    totals = {"OGD": 0.0, "PCA-OGD": 0.0}
    for seed in range(_CASES):
        tasks = some_tasks(seed, 2, decay)
        for name in totals:
            learned = learn(tasks, METHODS[name], weight_decay=DECAY)
            totals[name] += decompose(learned, 0, 1).total
    return totals["PCA-OGD"] / totals["OGD"]


# GEM-NT, section 4.3


def anew(seed: int) -> float:
    """Largest relative error of the formula for a GEM-NT that computes T anew in every step.

    That GEM-NT is section 4.3's; the formula takes T as it is when a task starts.
    """
    tasks, weights = some_tasks(seed), [torch.zeros(P, dtype=torch.float64)]
    kept = [remembered(MEMORY, 0, j, N) for j in range(TASKS)]
    for k, task in enumerate(tasks):
        start = w = weights[-1]
        step = 0.99 / (float(torch.linalg.matrix_norm(task.features, 2)) ** 2 + DECAY)
        for _ in range(_STEPS):
            gradient = _loss_gradient(task, w) + DECAY * (w - start)
            if k:
                earlier = [_loss_gradient(t, w, i) for t, i in zip(tasks[:k], kept, strict=False)]
                basis, _ = torch.linalg.qr(torch.stack(earlier, 1))
                gradient = gradient - basis @ (basis.T @ gradient)
            w = w - step * gradient
        weights.append(w)
    closed = learn(tasks, METHODS["GEM-NT"], weight_decay=DECAY)
    errors = []
    for source in range(TASKS - 1):
        moved = tasks[source].features @ (weights[-1] - weights[source + 1])
        measured = float(moved.square().sum())
        errors.append(abs(decompose(closed, source, TASKS - 1).total - measured) / measured)
    return max(errors)


def _loss_gradient(task: LinearTask, w: Tensor, kept: Tensor | None = None) -> Tensor:
    """Of ½ ‖f − y‖², f = f₀ + φ w, over all samples of a task or the stored ones, (p,)."""
    residual = task.outputs + task.features @ w - task.targets
    chosen = slice(None) if kept is None else kept
    gradient: Tensor = residual[chosen] @ task.features[chosen]
    return gradient


def shorter_gradient() -> float:
    """‖T' − T‖ of GEM-NT's projection, one task's gradient a thousand times shorter in T'."""
    gradients = torch.stack([task.features.mean(0) for task in some_tasks(0)], 1)
    shorter = gradients.clone()
    shorter[:, 0] /= 1000
    bases = [torch.linalg.qr(columns)[0] for columns in (gradients, shorter)]
    first, second = (basis @ basis.T for basis in bases)
    return float((first - second).norm())


def one_sample() -> float:
    """Largest angle (1 − |cos|) between ∇ ½(f − y)² and ∇f of a small network, one sample."""
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for case in range(_CASES):
        with global_stream(case, "a small network"):
            network = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        x = torch.randn(1, 5, generator=generator, dtype=torch.float64)
        output = network(x).squeeze()
        loss = 0.5 * (output - 3.0) ** 2
        parameters = list(network.parameters())
        rows = [
            torch.cat([g.flatten() for g in torch.autograd.grad(f, parameters, retain_graph=True)])
            for f in (output, loss)
        ]
        cosine = torch.nn.functional.cosine_similarity(rows[0], rows[1], dim=0)
        worst = max(worst, 1 - abs(float(cosine)))
    return worst


def well_learned() -> dict[str, float]:
    """Δ of a task learned to zero loss, under SGD, GEM-NT and OGD, relative to SGD's."""
    tasks = some_tasks(1, 2)
    found = {
        name: decompose(learn(tasks, METHODS[name]), 0, 1).total
        for name in ("SGD", "GEM-NT", "OGD")
    }
    return {name: value / found["SGD"] for name, value in found.items()}


def show(data: Data, pictures: Pictures) -> list[str]:
    """Errors and ratios by method."""
    errors = [
        [name, *(f"{result[k]:.0e}" for k in result)] for name, result in data["exact"].items()
    ]
    ratios = [
        [name, *(f"{result[k]:.2f}" for k in result)] for name, result in data["bounds"].items()
    ]
    return [
        "Largest relative errors of the closed form and of the formula for Δ, against gradient "
        "descent on small problems:",
        "",
        *table(["", "weights", "Δ"], errors),
        "Largest ratios of Δ to its bounds, as printed (Σ‖v‖²) and in the valid form (Σ‖v‖)². "
        "Above 1 a bound is broken:",
        "",
        *table(["", "printed, one later task", "printed, several", "valid"], ratios),
    ]


THEORY = Artefact(
    "theory",
    "The theory, checked",
    "section 4 and its proofs",
    measure,
    show,
)
