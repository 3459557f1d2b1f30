"""The answers follow from the numbers."""

import pytest

from forgetless.paper.answers import answers
from forgetless.paper.artefacts import forgetting_gap
from forgetless.paper.printed import TABLE1
from tests.paper.artefacts.test_same_bytes import kept


def answered(words, **data):
    """The answer to the one question that has these words."""
    records = {name.replace("_", "-"): {"data": of} for name, of in data.items()}
    found = [line for line in answers(records) if words in line]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize(("factored", "word"), [(85.0, "no"), (81.0, "yes")])
def test_rows_in_bfloat16_are_answered_with_their_bytes(factored, word):
    data = kept(ogd=(factored, 99), pca=(82.0, 100), half=(86.0, 107), joint=(90.0, 80))
    text = answered("still win", same_bytes=data)
    assert text.endswith("The best in no more bytes is joint training on all images, 90.0.")
    assert f"rows of PCA-OGD take, {word}: 82.0 ± 0.0 with PCA-OGD, 5 directions" in text
    assert "In bfloat16, 86.0 ± 0.0 with PCA-OGD, 10 directions (7 % more bytes)." in text


@pytest.mark.parametrize(
    ("noises", "words"),
    [
        ((1.0, 2.0, 3.0, 4.0, 5.0), "may explain some of it: that would raise F_T most where most"),
        ((2.0, 1.0, 3.0, 1.0, 2.0), "does not explain it: what that would add to F_T is unrelated"),
        ((5.0, 4.0, 3.0, 2.0, 1.0), "does not explain it: that would raise F_T most where least"),
    ],
)
def test_what_noise_would_explain_follows_from_the_correlation(noises, words):
    gaps = (1.0, 2.0, 3.0, 4.0, 5.0)
    cells = {
        method: {
            "best": forgetting_gap.implied_best("rotated", method) - gap,
            "best ever": 100.0,
            "forgetting": [1.0],
            "noisy": 1.0 + noise,
        }
        for method, gap, noise in zip(TABLE1["rotated"], gaps, noises, strict=True)
    }
    assert words in answered("difference in F_T", forgetting_gap={"rotated": cells})
