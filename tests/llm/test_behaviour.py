"""The numbers of a comparison, and its table."""

import numpy as np
import pytest

from forgetless.llm import Behaviour, ModelComparison


def test_the_mean_is_over_tokens_and_its_error_over_prompts():
    rng = np.random.default_rng(0)
    kl, tokens = rng.gamma(1.0, 0.1, 400), rng.integers(1, 60, 400)
    found = Behaviour(("",) * 400, tuple(kl), tuple(map(int, tokens)))
    assert found.mean_kl == pytest.approx(np.average(kl, weights=tokens))
    # The spread of the mean over prompts that are drawn again and again.
    draws = rng.integers(0, 400, (4000, 400))
    means = (kl * tokens)[draws].sum(1) / tokens[draws].sum(1)
    assert found.kl_error == pytest.approx(means.std(), rel=0.1)


def test_a_single_prompt_has_no_error():
    assert Behaviour(("",), (0.1,), (3,)).kl_error is None


def test_the_table_has_what_was_measured():
    base = Behaviour(("a", "b"), (0.0, 0.0), (1, 1), 1.5, {}, ("x",), (True,))
    tuned = Behaviour(("a", "c"), (0.1, 0.3), (1, 1), 1.25, {}, ("y",), (False,))
    text = ModelComparison(("p", "q"), (("r", ("x",)),), {"base": base, "tuned": tuned}).summary()
    assert text.splitlines() == [
        "       KL to the base  loss on texts  questions right",
        "base                0          1.500           1 of 1",
        "tuned       0.2 ± 0.1          1.250           0 of 1",
    ]
