"""Problems that the tests of the theory share: real networks' features, and random ones."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from forgetless.theory import (
    ComponentProjection,
    GradientProjection,
    LinearTask,
    NoProjection,
    Projection,
    SampleProjection,
)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2),
        nn.Conv2d(3, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A network with the same initial weights every time, in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build().double()


NETWORKS = {"mlp": (mlp, (5,)), "cnn": (cnn, (1, 6, 6))}


def autograd_features(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """φ(X) by one autograd call a sample: the reference for all features."""
    rows = []
    for one, label in zip(x, y, strict=True):
        output = model(one.unsqueeze(0))[0, int(label)]
        gradients = torch.autograd.grad(output, list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in gradients]))
    return torch.stack(rows)


def network_tasks(
    kind: str, sizes: Sequence[int] = (9, 7, 8, 6), seed: int = 0
) -> list[LinearTask]:
    """Tasks of random inputs and labels for a small network, in float64."""
    build, shape = NETWORKS[kind]
    model = seeded(build, seed)
    tasks = []
    for task, n in enumerate(sizes):
        g = generator(100 * seed + task)
        x = torch.randn(n, *shape, generator=g, dtype=torch.float64)
        y = torch.randint(3, (n,), generator=g)
        targets = 1 + 0.3 * torch.randn(n, generator=g, dtype=torch.float64)
        outputs = model(x).detach()[torch.arange(n), y]
        tasks.append(LinearTask(autograd_features(model, x, y), targets, outputs))
    return tasks


def random_tasks(
    seed: int, sizes: Sequence[int], p: int, *, whole: bool = False, scale: float = 1.0
) -> list[LinearTask]:
    """Random features; whole numbers from -1 to 1 are often dependent, zero, or the same twice."""
    g = generator(seed)
    tasks = []
    for n in sizes:
        parts = [torch.randn(shape, generator=g, dtype=torch.float64) for shape in ((n, p), n, n)]
        if whole:
            parts[0] = parts[0].round().clamp(-1, 1)
        parts[0] = parts[0] * scale
        tasks.append(LinearTask(*parts))
    return tasks


# Finite memories, for tasks of five samples or more.
METHODS: dict[str, Projection] = {
    "sgd": NoProjection(),
    "ogd": SampleProjection(memory=3, seed=1),
    "pca-ogd": ComponentProjection(components=2),
    "centred pca-ogd": ComponentProjection(components=2, centred=True),
    "gem-nt": GradientProjection(memory=4, seed=2),
}


def pairs(tasks: int) -> list[tuple[int, int]]:
    """All source < target."""
    return [(s, t) for t in range(tasks) for s in range(t)]


def dense_projection(basis: Tensor) -> Tensor:
    """T = I − Bᵀ B as a matrix (p, p)."""
    return torch.eye(basis.shape[1], dtype=basis.dtype) - basis.T @ basis
