"""Which of many directions are worth keeping, by their Gram matrix, and how well they stand."""

import numpy as np
import torch
from scipy.linalg.lapack import dpstrf
from torch import Tensor
from torch.linalg import solve_triangular

# What is left of a direction's squared length when it is dropped as dependent on the others.
# Coefficients grow as the inverse of that: with less, their rounding costs more than it helps.
_DEPENDENT = 1e-9
# Steps of the power method: the first ones find what is far too large, the others how large it is.
_POWERS = 12


def independent(rest: Tensor, lengths: Tensor) -> Tensor:
    """Indices of the directions that add more than rounding, by Cholesky with pivots.

    Arguments:
        rest: (k, k), the Gram matrix without the part that earlier directions explain.
        lengths: (k,), the squared lengths with it.
    """
    if len(rest) == 0:
        return torch.arange(0)
    scale = lengths.clamp_min(torch.finfo(lengths.dtype).tiny).rsqrt()
    unit = scale.unsqueeze(1) * rest * scale
    factor, order, rank, _ = dpstrf(unit.cpu().numpy(), tol=0.0, lower=1)
    left = np.square(np.diag(factor))
    left[rank:] = 0.0
    chosen = order[left > _DEPENDENT].astype(np.int64) - 1
    return torch.from_numpy(np.sort(chosen))


def inverse_norm(factor: Tensor, lengths: Tensor) -> tuple[float, Tensor]:
    """‖Ĝ⁻¹‖ of Ĝ = D⁻¹ L Lᵀ D⁻¹, and the unit vector (K,) where it is reached.

    By the power method, to a few percent: a bound from the trace would be too high where many
    directions are a little dependent.

    Arguments:
        factor: L, (K, K), lower triangular.
        lengths: the squares of D, (K,).
    """
    scale = lengths.sqrt().unsqueeze(1)
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(len(factor), 1, generator=generator, dtype=torch.float64).to(factor)
    for _ in range(_POWERS):
        vector = vector / vector.norm()
        half = solve_triangular(factor, scale * vector, upper=False)
        vector = scale * solve_triangular(factor.mT, half, upper=True)
    size = vector.norm()
    return float(size), (vector / size)[:, 0]


def best_rows(vectors: Tensor, moments: Tensor, limit: int) -> Tensor:
    """The rows whose span explains most: greedily the row r with the largest gain r M rᵀ / ‖r‖².

    Arguments:
        vectors: (n, K).
        moments: M, (K, K): what is to be explained is tr M.

    Returns:
        indices, increasing; at most `limit`.
    """
    rest, m = vectors.cpu().numpy().copy(), moments.cpu().numpy()
    seen = rest @ m
    lengths = np.square(rest).sum(1)
    least = _DEPENDENT * lengths
    chosen: list[int] = []
    while len(chosen) < limit:
        left = np.square(rest).sum(1)
        gains = np.where(left > least, (seen * rest).sum(1) / np.maximum(left, 1e-300), -1.0)
        gains[chosen] = -1.0
        best = int(gains.argmax())
        if gains[best] < 0:
            break
        chosen.append(best)
        direction = rest[best] / np.sqrt(left[best])
        along = rest @ direction
        rest -= np.outer(along, direction)
        seen -= np.outer(along, direction @ m)
    return torch.from_numpy(np.sort(np.array(chosen, dtype=np.int64)))
