"""Singular values of the overlap matrix of a run's tasks, as the run's method has it."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from forgetless.paper.replay import Replay
from forgetless.theory import operator_overlap, overlap_spectrum

_RTOL = 1e-4  # of singular values of features in float32
_POINTS = 30  # of a spectrum that are stored


def overlap_with_first(replay: Replay, target: int, samples: int) -> dict[str, Any]:
    """Singular values of O^{1→k} at the present weights, with what the method remembers now.

    Arguments:
        replay: at the weights with which task k starts.
        target: k, from 0.
        samples: of each of the two tasks.

    Returns:
        largest and mean (S,), and the spectrum (S, points) at `points`, its indices from 1.
    """
    purpose = "samples of the overlap matrix"
    pairs = [replay.features(replay.samples(task, samples, purpose)) for task in (0, target)]
    spectra = []
    for source, later, basis in zip(*pairs, replay.directions(), strict=True):
        matrix = operator_overlap(source, later, basis, rtol=_RTOL)
        spectra.append(overlap_spectrum(matrix).cpu().numpy())
    return _stored(spectra, samples)


def _stored(spectra: Sequence[np.ndarray[Any, Any]], samples: int) -> dict[str, Any]:
    # Beyond the numerical rank there is no overlap.
    full = np.stack([np.pad(s, (0, samples - len(s))) for s in spectra])
    points = np.unique(np.geomspace(1, samples, _POINTS).round().astype(int))
    return {
        "largest": full[:, 0],
        "mean": full.mean(1),
        "points": points,
        "spectrum": full[:, points - 1],
    }
