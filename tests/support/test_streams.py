"""Random choices are fair."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from forgetless.support.streams import random_subset, undisturbed


@pytest.mark.parametrize(("count", "available"), [(2, 4), (2, 3)])  # drawn one by one, shuffled
def test_every_choice_is_as_likely_as_any_other(count, available):
    generator = torch.Generator().manual_seed(5)
    draws = [tuple(random_subset(count, available, generator).tolist()) for _ in range(6000)]
    assert all(len(set(draw)) == count for draw in draws)
    counts = Counter(draws)
    assert len(counts) == available * (available - 1)
    assert chisquare(list(counts.values())).pvalue > 0.01


def test_a_block_draws_the_same_numbers_every_time_and_leaves_no_trace():
    def draw():
        return torch.rand(()).item(), random.random(), np.random.rand()  # noqa: NPY002

    draw()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    found = []
    for _ in range(2):
        with undisturbed(torch.device("cpu")):
            found.append(draw())
    with pytest.raises(ZeroDivisionError), undisturbed(torch.device("cpu")):
        draw()[0] / 0
    assert found[0] == found[1]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # noqa: NPY002
