"""Random choices are fair."""

from collections import Counter

import pytest
import torch
from scipy.stats import chisquare

from forgetless.support.streams import random_subset


@pytest.mark.parametrize(("count", "available"), [(2, 4), (2, 3)])  # drawn one by one, shuffled
def test_every_choice_is_as_likely_as_any_other(count, available):
    generator = torch.Generator().manual_seed(5)
    draws = [tuple(random_subset(count, available, generator).tolist()) for _ in range(6000)]
    assert all(len(set(draw)) == count for draw in draws)
    counts = Counter(draws)
    assert len(counts) == available * (available - 1)
    assert chisquare(list(counts.values())).pvalue > 0.01
