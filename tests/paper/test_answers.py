"""The answers follow from the numbers."""

import pytest

from forgetless.paper.answers import answers
from forgetless.paper.artefacts import forgetting_gap
from tests.paper.artefacts.test_forgetting_gap import gap
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


def test_the_normaliser_is_the_one_that_fits():
    text = answered("difference in F_T", forgetting_gap=gap(forgetting_gap.LIKELY))
    assert "Times T / (T − 1), the printed numbers fit" in text
    text = answered("difference in F_T", forgetting_gap=gap(forgetting_gap.TEXT))
    assert "Times T / (T − 1), the printed numbers do not fit" in text
