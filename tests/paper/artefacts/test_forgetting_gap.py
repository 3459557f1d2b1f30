"""The readings of the printed F_T."""

import numpy as np
import pytest

from forgetless.paper.artefacts import forgetting_gap
from forgetless.paper.printed import FINAL, TABLE1
from forgetless.trace import forgetting


def gap(reading):
    """Cells whose best accuracies give the printed F_T by a reading, and what is found in them."""
    rng = np.random.default_rng(0)
    cells = {}
    for benchmark in ("permuted", "rotated"):
        for method, printed in TABLE1[benchmark].items():
            final = np.mean(FINAL[benchmark][method][0][:-1])
            best = final + printed.forgetting / forgetting_gap.READINGS[reading].factor(15)
            scatter = rng.normal(size=(2, 5)) * 0.1
            cells.setdefault(benchmark, {})[method] = {
                "tasks": 15,
                "best": best + scatter[0] - scatter[0].mean(),
                "learned": best - 5 + scatter[0],
                "noisy": best + 5 + scatter[0],
                "final": final + scatter[1] - scatter[1].mean(),
            }
    return {"cells": cells, **forgetting_gap.compared(cells)}


@pytest.mark.parametrize("reading", [forgetting_gap.TEXT, forgetting_gap.LIKELY])
def test_the_reading_that_the_numbers_follow_stands_and_its_factor_is_fitted(reading):
    found = gap(reading)
    assert reading in forgetting_gap.standing(found)
    other = {forgetting_gap.TEXT, forgetting_gap.LIKELY} - {reading}
    assert not other & set(forgetting_gap.standing(found))
    for fitted in found["factors"].values():
        assert fitted["factor"] == pytest.approx(forgetting_gap.READINGS[reading].factor(15))


def test_the_texts_reading_is_the_metric():
    rng = np.random.default_rng(1)
    accuracy = np.where(np.tri(4, dtype=bool), rng.uniform(50, 90, (3, 4, 4)), np.nan)
    mean = forgetting_gap._best(accuracy).mean(-1) - accuracy[:, -1, :-1].mean(-1)
    np.testing.assert_allclose(mean, forgetting(accuracy))


def test_too_few_seeds_say_nothing():
    cells = gap(forgetting_gap.TEXT)["cells"]
    few = {
        b: {
            m: {k: v if k == "tasks" else v[:2] for k, v in of.items()} for m, of in methods.items()
        }
        for b, methods in cells.items()
    }
    assert forgetting_gap.compared(few) == {}
