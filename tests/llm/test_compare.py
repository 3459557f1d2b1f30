"""What fine-tuning changed, against the definitions in float64."""

import copy
import math

import peft
import pytest
import torch

from forgetless import ConfigError, DataError, TrainingError
from forgetless.llm import compare, own_answers
from forgetless.llm.compare import Examination
from tests.llm.tiny import PROMPTS, llama, tokenizer

TEXTS = ["the cat sat on the mat", "a dog ran", "dog"]


def moved(model, seed: int, far: float):
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in other.parameters():
            p += far * torch.randn(p.shape, generator=generator)
    return other


@torch.no_grad()
def divergence(base, tuned, tokens: tuple[int, ...], start: int) -> float:
    """Mean KL over the answer's tokens, summed over the vocabulary by hand in float64."""
    p, q = (
        copy.deepcopy(m).double()(input_ids=torch.tensor([tokens])).logits[0].softmax(-1)
        for m in (base, tuned)
    )
    each = [
        sum(float(a) * math.log(float(a) / float(b)) for a, b in zip(p[t], q[t], strict=True))
        for t in range(start - 1, len(tokens) - 1)
    ]
    return sum(each) / len(each)


@torch.no_grad()
def nll(model, text: str) -> tuple[float, int]:
    tokens = tokenizer()(text)["input_ids"]
    logs = copy.deepcopy(model).double()(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    return -sum(float(logs[t, tokens[t + 1]]) for t in range(len(tokens) - 1)), len(tokens) - 1


@pytest.mark.parametrize("batch_size", [1, 8])
def test_numbers_are_those_of_the_definitions(batch_size):
    base = llama()
    runs = {"near": moved(base, 1, 0.02), "far": moved(base, 2, 0.2)}
    found = compare(
        base, runs, tokenizer(), PROMPTS, texts=TEXTS, task=TEXTS[:1], max_new_tokens=6,
        batch_size=batch_size,
    )  # fmt: skip
    answers = own_answers(base, tokenizer(), PROMPTS, max_new_tokens=6).answers
    for name, model in runs.items():
        expected = [divergence(base, model, a.tokens, a.start) for a in answers]
        assert found.models[name].kl == pytest.approx(expected, rel=1e-4, abs=1e-7)
        lengths = [len(a.tokens) - a.start for a in answers]
        mean = sum(k * n for k, n in zip(expected, lengths, strict=True)) / sum(lengths)
        assert found.models[name].mean_kl == pytest.approx(mean, rel=1e-4)
        losses = [nll(model, text) for text in TEXTS]
        expected_loss = sum(x for x, _ in losses) / sum(n for _, n in losses)
        assert found.models[name].text_loss == pytest.approx(expected_loss, rel=1e-5)
        assert found.models[name].task_loss == pytest.approx(losses[0][0] / losses[0][1], rel=1e-5)
        own = own_answers(model, tokenizer(), PROMPTS, max_new_tokens=6)
        assert found.models[name].answers == tuple(a.text for a in own.answers)
    assert found.models["near"].mean_kl < found.models["far"].mean_kl
    assert set(found.models["base"].kl) == {0.0}


def test_several_tasks_and_models_one_by_one():
    base = llama()
    runs = {"near": moved(base, 1, 0.02), "far": moved(base, 2, 0.2)}
    options = {"task": {"one": TEXTS[:1], "other": TEXTS[1:]}, "max_new_tokens": 6}
    together = compare(base, runs, tokenizer(), PROMPTS, **options)
    examination = Examination(base, tokenizer(), PROMPTS, **options)
    apart = {name: examination.of(model) for name, model in runs.items()}
    assert together == examination.compared(apart)
    for name, model in runs.items():
        found = apart[name].tasks
        sums = [nll(model, text) for text in TEXTS]
        rest = sum(x for x, _ in sums[1:]) / sum(n for _, n in sums[1:])
        assert found == {
            "one": pytest.approx(sums[0][0] / sums[0][1], rel=1e-5),
            "other": pytest.approx(rest, rel=1e-5),
        }
        assert apart[name].task_loss == pytest.approx(sum(found.values()) / 2)


def test_texts_longer_than_the_context_are_cut():
    base, text = llama(context=8), "the cat sat on the mat a dog ran on the red mat the dog"
    found = compare(base, moved(base, 1, 0.1), tokenizer(), PROMPTS[:1], texts=[text],
                    max_new_tokens=2)  # fmt: skip
    words = text.split()
    parts = [nll(base, " ".join(words[i : i + 8])) for i in range(0, len(words), 8)]
    expected = sum(x for x, _ in parts) / sum(n for _, n in parts)
    assert found.models["base"].text_loss == pytest.approx(expected, rel=1e-5)


def test_questions_are_right_if_an_answer_occurs_as_words():
    base = llama()
    said = own_answers(base, tokenizer(), PROMPTS, max_new_tokens=6).answers
    long = max(said, key=lambda a: len(a.text.split()))
    word = long.text.split()[-1]
    questions = {long.prompt: ["nowhere", word.upper()], PROMPTS[2]: word[:-1] + "x"}
    found = compare(base, moved(base, 1, 0.0), tokenizer(), PROMPTS, questions=questions,
                    max_new_tokens=6)  # fmt: skip
    assert found.models["tuned"].right == (True, False)
    assert found.models["tuned"].right_share == 0.5
    part = compare(base, moved(base, 1, 0.0), tokenizer(), PROMPTS,
                   questions={long.prompt: word[:1]}, max_new_tokens=6)  # fmt: skip
    assert part.models["tuned"].right == (len(word) == 1,)


def test_an_unchanged_model_is_the_same():
    base = llama()
    found = compare(base, copy.deepcopy(base), tokenizer(chat=True), PROMPTS, max_new_tokens=6)
    one, other = found.models.values()
    assert other.mean_kl == 0
    assert one.answers == other.answers


def test_models_that_cannot_be_compared():
    base = llama()
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=2))
    with pytest.raises(ConfigError, match="share weights"):
        compare(base, adapted, tokenizer(), PROMPTS)
    with pytest.raises(ConfigError, match="share weights"):
        compare(base, base, tokenizer(), PROMPTS)
    with pytest.raises(ConfigError, match="a model of 15 tokens, not 'one of 20'"):
        compare(llama(), llama(vocabulary=20), tokenizer(), PROMPTS)
    for others in {}, {"base": llama(1), "other": llama(2)}:
        with pytest.raises(ConfigError, match="by names other than 'base'"):
            compare(llama(), others, tokenizer(), PROMPTS)
    with pytest.raises(ConfigError, match="generates text, not int"):
        compare(llama(), {"tuned": 3}, tokenizer(), PROMPTS)


def test_a_model_that_has_diverged():
    base = llama()
    broken = moved(base, 1, 0.1)
    with torch.no_grad():
        broken.lm_head.weight[3] = math.nan
    with pytest.raises(TrainingError, match="the outputs of tuned are not finite"):
        compare(base, broken, tokenizer(), PROMPTS, max_new_tokens=2)


def test_texts_and_questions_that_say_nothing():
    base, other = llama(), llama(1)
    with pytest.raises(DataError, match="texts have no token that follows another"):
        compare(base, other, tokenizer(), PROMPTS, texts=["dog"], max_new_tokens=2)
    with pytest.raises(ConfigError, match="the answers to 'the cat' must be"):
        compare(base, other, tokenizer(), PROMPTS, questions={"the cat": []}, max_new_tokens=2)
