"""Results as JSON."""

import numpy as np

from forgetless.paper.results import rounded


def test_results_are_rounded_and_have_no_nan():
    value = {"a": np.array([1 / 3, np.nan]), 2: (1, 1e-9 / 3)}
    assert rounded(value) == {"a": [0.333333, None], "2": [1, 3.33333e-10]}
