"""What is said about the numbers follows from them."""

import json
import re
from pathlib import Path

import pytest

from forgetless.paper import ARTEFACTS
from forgetless.paper.answers import answers
from forgetless.paper.artefacts import forgetting_gap, same_bytes, toy
from forgetless.paper.numbers import mean
from forgetless.paper.pictures import Pictures
from forgetless.paper.printed import TABLE1
from forgetless.paper.store import load_results

ROOT = Path(__file__).parents[2]


def answered(words, **data):
    """The answer to the one question that has these words."""
    records = {name.replace("_", "-"): {"data": of} for name, of in data.items()}
    found = [line for line in answers(records) if words in line]
    assert len(found) == 1
    return found[0]


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


@pytest.mark.parametrize(("factored", "word"), [(85.0, "no"), (81.0, "yes")])
def test_rows_in_bfloat16_are_answered_with_their_bytes(factored, word):
    data = kept(ogd=(factored, 99), pca=(82.0, 100), half=(86.0, 107), joint=(90.0, 80))
    text = answered("still win", same_bytes=data)
    assert text.endswith("The best in no more bytes is joint training on all images, 90.0.")
    assert f"rows of PCA-OGD take, {word}: 82.0 ± 0.0 with PCA-OGD, 5 directions" in text
    assert "In bfloat16, 86.0 ± 0.0 with PCA-OGD, 10 directions (7 % more bytes)." in text


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


def test_all_directions_are_taken_when_the_last_of_them_is():
    (line, _) = toy._full({f"500 {p}": {} for p in (200, 215, 500)})
    assert line.endswith("p = 200 after task 8, p = 215 after task 9.")


def test_the_docs_have_the_largest_difference_in_forgetting():
    table = load_results(ROOT / "results/paper", ["table1"])["table1"]["data"]["rotated"]
    most = max(TABLE1["rotated"][m].forgetting - mean(of["forgetting"]) for m, of in table.items())
    text = " ".join((ROOT / "docs/usage.md").read_text("utf-8").split())
    assert f"on Rotated MNIST by up to {most:.1f} points" in text


def test_a_guards_step_is_said_to_take_what_was_measured():
    cases = json.loads((ROOT / "results/bench/large.json").read_text("utf-8"))["cases"]
    text = " ".join((ROOT / "docs/scale.md").read_text("utf-8").split())
    for protected, storage, words, digits in (
        ("all weights", "dense", r"rows in float32 it took (\S+) to (\S+) times", 2),
        ("all weights", "bfloat16", r"in bfloat16 (\S+) to (\S+) times", 2),
        ("adapters", "dense", r"with adapters, whose rows are short, (\S+) to (\S+) times", 1),
    ):
        times = [
            case["times_floor"]
            for case in cases
            if (case["protected"], case["storage"]) == (protected, storage)
        ]
        found = re.search(words, text)
        assert found is not None
        assert found.groups() == (f"{min(times):.{digits}f}", f"{max(times):.{digits}f}")
