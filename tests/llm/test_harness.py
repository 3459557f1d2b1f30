"""lm-evaluation-harness: the real one where it is installed, and its interface."""

import json
import random
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from forgetless.llm import compare
from forgetless.llm.harness import harness_scores
from tests.llm.test_compare import moved
from tests.llm.tiny import PROMPTS, llama, tokenizer

CHOICES = ["mat", "dog"]


@torch.no_grad()
def right_share(model, rows) -> float:
    """The share of rows whose right word is likelier than the other one, by hand."""
    words = tokenizer()
    right = 0
    for row in rows:
        logits = model(input_ids=torch.tensor([words(row["text"])["input_ids"]])).logits[0, -1]
        likely = [float(logits[words(word)["input_ids"][0]]) for word in CHOICES]
        right += likely.index(max(likely)) == row["label"]
    return right / len(rows)


def test_scores_of_the_harness(tmp_path):
    pytest.importorskip("lm_eval")
    rows = [
        {"text": text, "label": i % 2}
        for i, text in enumerate(
            ["the cat sat on the", "a red", "the dog ran on a", "the blue"] * 3
        )
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {
        "task": "last_word",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_target": "label",
        "doc_to_choice": CHOICES,
        "metric_list": [{"metric": "acc"}],
    }
    base = llama()
    other = moved(base, 1, 0.5)
    # ruff: noqa: NPY002 - it seeds NumPy's global generator
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    found = compare(
        base, other, tokenizer(), PROMPTS[:1], max_new_tokens=2,
        harness=[task], harness_options={"bootstrap_iters": 0},
    )  # fmt: skip
    assert random.getstate() == states[0]
    assert (np.random.get_state()[1] == states[1]).all()
    assert torch.equal(torch.get_rng_state(), states[2])
    for model, behaviour in zip((base, other), found.models.values(), strict=True):
        assert behaviour.scores == {"last_word, acc": pytest.approx(right_share(model, rows))}
    assert "last_word, acc" in found.summary()


def test_its_interface(monkeypatch):
    """What is asked of it, and which of its numbers is taken."""
    asked = []

    def simple_evaluate(model, tasks, **options):
        asked.append((model, tasks, options))
        random.seed(1234)
        numbers = {"alias": "x", "acc_stderr,none": 0.1, "acc,none": 0.75, "acc_norm,none": 0.5}
        return {"results": {"arc_easy": numbers}}

    harness, models = ModuleType("lm_eval"), ModuleType("lm_eval.models.huggingface")
    harness.simple_evaluate, models.HFLM = simple_evaluate, SimpleNamespace
    monkeypatch.setitem(sys.modules, "lm_eval", harness)
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", models)
    model, words, state = llama(), tokenizer(), random.getstate()
    found = harness_scores(model, words, ["arc_easy"], 4, {"limit": 10})
    assert found == {"arc_easy, acc": 0.75}
    ((wrapped, tasks, options),) = asked
    assert wrapped == SimpleNamespace(pretrained=model, tokenizer=words, batch_size=4)
    assert (tasks, options) == (["arc_easy"], {"limit": 10})
    assert random.getstate() == state


def test_without_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r"needs lm-evaluation-harness: pip install 'forgetless"):
        harness_scores(llama(), tokenizer(), ["arc_easy"], 4, {})
    assert harness_scores(llama(), tokenizer(), [], 4, {}) == {}
