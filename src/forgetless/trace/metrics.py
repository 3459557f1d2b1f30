"""Metrics of forgetting: functions of the accuracy matrix alone.

`accuracy` is (*, T, T): accuracy[..., t, s] on task s after learning task t, NaN if not measured. A
run that stopped early counts up to the last task that it learned.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def average_accuracy(accuracy: ArrayLike) -> Array:
    """A_T = 1/T Σ_s a[T, s], over the tasks learned so far: (*, T, T) → (*)."""
    a = _learned(accuracy)
    return np.asarray(a[..., -1, :].mean(-1))


def forgetting(accuracy: ArrayLike) -> Array:
    """F_T = 1/(T−1) Σ_{s<T} (max_{l≥s} a[l, s] − a[T, s]); 0 for a single task."""
    a = _learned(accuracy)
    if a.shape[-1] == 1:
        return np.zeros(a.shape[:-2])
    best = np.stack([a[..., s:, s].max(-1) for s in range(a.shape[-1] - 1)], -1)
    return np.asarray((best - a[..., -1, :-1]).mean(-1))


def backward_transfer(accuracy: ArrayLike) -> Array:
    """BWT = 1/(T−1) Σ_{s<T} (a[T, s] − a[s, s]) (Lopez-Paz and Ranzato 2017); 0 for one task."""
    a = _learned(accuracy)
    if a.shape[-1] == 1:
        return np.zeros(a.shape[:-2])
    learned = np.diagonal(a, axis1=-2, axis2=-1)[..., :-1]
    return np.asarray((a[..., -1, :-1] - learned).mean(-1))


def forward_transfer(accuracy: ArrayLike, baseline: ArrayLike = 0.0) -> Array:
    """FWT = 1/(T−1) Σ_{s>1} (a[s−1, s] − b[s]); NaN without `evaluate="all"`.

    Arguments:
        accuracy: (*, T, T).
        baseline: b, the accuracy on each task without any training, (T,) or one number.
    """
    a = _learned(accuracy)
    if a.shape[-1] == 1:
        return np.zeros(a.shape[:-2])
    beforehand = np.diagonal(a, offset=1, axis1=-2, axis2=-1)
    chance = np.broadcast_to(np.asarray(baseline, float), (np.shape(accuracy)[-1],))
    return np.asarray((beforehand - chance[1 : a.shape[-1]]).mean(-1))


def tasks_learned(accuracy: ArrayLike) -> int:
    """The number of tasks, from the first on, that every run in (*, T, T) has learned."""
    own = np.isfinite(np.diagonal(np.asarray(accuracy, float), axis1=-2, axis2=-1))
    learned_by_all = own.reshape(-1, own.shape[-1]).all(0)
    return int(np.argmin(np.append(learned_by_all, False)))


def _learned(accuracy: ArrayLike) -> Array:
    """The leading square of the matrix: the tasks that every run in it has learned."""
    a = np.asarray(accuracy, float)
    if a.ndim < 2 or a.shape[-1] != a.shape[-2] or a.shape[-1] == 0:
        raise ValueError(f"an accuracy matrix is (*, T, T) with T at least 1, not {a.shape}")
    tasks = tasks_learned(a)
    if tasks == 0:
        return np.full((*a.shape[:-2], 1, 1), np.nan)
    return a[..., :tasks, :tasks]
