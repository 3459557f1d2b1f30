"""Correlations over pairs of tasks."""

import numpy as np
import pytest
from scipy.stats import spearmanr

from forgetless.paper.artefacts.alignment import with_interval

ENDS = np.array([(s, t) for s in range(8) for t in range(8) if s != t])


def test_the_correlation_is_spearmans():
    x, y = np.random.default_rng(0).normal(size=(2, len(ENDS)))
    value, low, high = with_interval(x, y, ENDS)
    assert value == pytest.approx(spearmanr(x, y).statistic)
    assert low < value < high


def test_pairs_that_share_a_source_count_as_little_more_than_one():
    """What depends on the source alone has eight values, however many pairs there are."""
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=8)[ENDS[:, 0]] for _ in range(2))
    shared = with_interval(x, y, ENDS)
    apart = with_interval(*rng.normal(size=(2, len(ENDS))), ENDS)
    assert shared[2] - shared[1] > 1.5 * (apart[2] - apart[1])
