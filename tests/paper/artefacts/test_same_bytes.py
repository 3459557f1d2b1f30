"""As many samples as fit into the bytes of PCA-OGD."""

from pathlib import Path

import pytest

from forgetless.paper import ARTEFACTS
from forgetless.paper.artefacts import same_bytes
from forgetless.paper.pictures import Pictures
from forgetless.paper.results import load_results

ROOT = Path(__file__).parents[3]


def kept(**rows):
    """Rows of the same bytes, each A_T and bytes; the budget is 100."""
    names = {
        "ogd": "OGD, 9 factored samples",
        "pca": "PCA-OGD, 5 directions",
        "half": "PCA-OGD, 10 directions in bfloat16",
        "joint": "joint training on all images",
    }
    methods = {
        names[row]: {"average": [value], "forgetting": [1.0], "bytes": size}
        for row, (value, size) in rows.items()
    }
    return {"budget": 100, "methods": methods}


def test_what_takes_more_than_the_budget_is_not_the_best_within_it():
    data = kept(ogd=(85.0, 99), pca=(82.0, 100), half=(86.0, 107), joint=(90.0, 80))
    assert same_bytes.best(kept(pca=(82.0, 100), joint=(90.0, 101))) == (
        "PCA-OGD, 5 directions",
        82.0,
    )
    # Factored samples have images in them.
    assert same_bytes.best_without_images(data) == ("PCA-OGD, 5 directions", 82.0)
    text = "\n".join(same_bytes.show(data, Pictures("")))
    assert "Over the budget: PCA-OGD, 10 directions in bfloat16, 86.0 with 7 % more bytes." in text
    within = "\n".join(same_bytes.show(kept(pca=(82.0, 100)), Pictures("")))
    assert "Over the budget" not in within
    assert "In as many bytes or fewer:" in within


def test_the_committed_rows_take_their_rows_and_moments():
    data = load_results(ROOT / "results/paper", list(ARTEFACTS))["same-bytes"]["data"]
    # Bytes of K directions of a perceptron 1024-100-100-10, and of their K × K moments in float64.
    parameters = 1024 * 100 + 100 + 100 * 100 + 100 + 100 * 10 + 10
    for name, memory, size in (
        ("PCA-OGD, 100 directions", 100, 4),
        ("PCA-OGD, 200 directions in bfloat16", 200, 2),
        ("OGD, 200 samples in bfloat16", 200, 2),
    ):
        rows = 14 * memory
        assert data["methods"][name]["bytes"] == rows * parameters * size + 8 * rows**2


@pytest.mark.parametrize("small", [0, 24])
def test_as_many_samples_as_fit_and_no_more(small):
    def needed(n):
        return 100.0 * n * 3 + small * (n * 3) ** 2

    most = same_bytes.samples_that_fit(10_000_000, 100.0, 3, small)
    assert needed(most) <= 10_000_000 < needed(most + 2)
