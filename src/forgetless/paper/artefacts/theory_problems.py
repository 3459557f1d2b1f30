"""Small sequences of linear tasks on which the theory is checked."""

import torch
from torch import Tensor

from forgetless.theory import (
    ComponentProjection,
    GradientProjection,
    LinearTask,
    NoProjection,
    Projection,
    SampleProjection,
)

N, P, TASKS, DECAY, MEMORY = 8, 60, 4, 0.1, 4
METHODS: dict[str, Projection] = {
    "SGD": NoProjection(),
    "GEM-NT": GradientProjection(MEMORY),
    "OGD": SampleProjection(MEMORY),
    "PCA-OGD": ComponentProjection(MEMORY),
}


def some_tasks(seed: int, count: int = TASKS, decay: float = 0.8) -> list[LinearTask]:
    """Tasks that share directions, the i-th with a weight of decay to the power of i."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    scales = decay ** torch.arange(P, dtype=torch.float64)
    return [LinearTask(normal(N, P) * scales, normal(N), normal(N)) for _ in range(count)]
