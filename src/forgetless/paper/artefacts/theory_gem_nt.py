"""What section 4.3 says of GEM-NT, checked on small cases in float64."""

import torch
from torch import Tensor, nn

from forgetless.paper.artefacts.theory_problems import (
    DECAY,
    MEMORY,
    METHODS,
    TASKS,
    N,
    P,
    some_tasks,
)
from forgetless.support.streams import global_stream
from forgetless.theory import LinearTask, decompose, learn, remembered

_CASES = 10
_STEPS = 4000  # of plain descent: far more than it takes to see a difference


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
    """Of ½ ‖f − y‖², f = f₀ + φ w, over all samples of a task or those that are kept, (p,)."""
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
