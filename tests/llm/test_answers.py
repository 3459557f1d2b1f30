"""A model's own answers: what it says by itself, as batches that a guard protects."""

import copy

import peft
import pytest
import torch
from transformers import GenerationConfig

from forgetless import ConfigError, DataError, Guard, KronOGD
from forgetless.guard.frameworks.transformers import GuardTrainerCallback
from forgetless.llm import own_answers
from forgetless.llm.answers import OwnAnswers
from tests.guard.frameworks.test_transformers import tokens, train
from tests.llm.tiny import PROMPTS, WORDS, llama, tokenizer


def spoken(model, tokens: list[int], most: int) -> list[int]:
    """The greedy answer, one token at a time and without padding or a cache."""
    said: list[int] = []
    while len(said) < most and (not said or said[-1] != 0):
        logits = model(input_ids=torch.tensor([[*tokens, *said]]), use_cache=False).logits
        said.append(int(logits[0, -1].argmax()))
    return said


@pytest.mark.parametrize("batch_size", [1, 2, 8])
@pytest.mark.parametrize("chat", [False, True])
def test_they_are_greedy(chat, batch_size):
    model, words = llama(), tokenizer(chat=chat)
    found = own_answers(model, words, PROMPTS, max_new_tokens=6, batch_size=batch_size)
    for prompt, answer in zip(PROMPTS, found.answers, strict=True):
        text = f"<user> {prompt} <model>" if chat else prompt
        asked = [WORDS.index(word) for word in text.split()]
        assert list(answer.tokens[: answer.start]) == asked
        assert list(answer.tokens[answer.start :]) == spoken(model, asked, 6)
        assert answer.prompt == prompt


def test_only_the_answers_tokens_count():
    model = llama()
    found = own_answers(model, tokenizer(), PROMPTS, max_new_tokens=6)
    assert sorted(i for numbers in found.numbers for i in numbers) == [*range(len(PROMPTS))]
    for batch, numbers in zip(found, found.numbers, strict=True):
        assert batch["attention_mask"].all()
        for ids, labels, i in zip(batch["input_ids"], batch["labels"], numbers, strict=True):
            answer = found.answers[i]
            assert tuple(ids.tolist()) == answer.tokens
            assert (labels[: answer.start] == -100).all()
            assert labels[answer.start :].tolist() == ids[answer.start :].tolist()


def test_the_model_stays_as_it_is():
    model = llama().train()
    model.generation_config = asked = GenerationConfig(do_sample=True, temperature=3.0)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    sampled = own_answers(model, tokenizer(), PROMPTS, max_new_tokens=6)
    assert model.training
    assert model.generation_config is asked
    assert torch.equal(torch.get_rng_state(), random)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    plain = own_answers(llama(), tokenizer(), PROMPTS, max_new_tokens=6)
    assert [a.tokens for a in sampled.answers] == [a.tokens for a in plain.answers]


def test_a_guard_protects_them():
    model = llama()
    answers = own_answers(model, tokenizer(chat=True), PROMPTS, max_new_tokens=6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with Guard(model, optimizer, KronOGD()) as guard:
        least, most = guard.estimate(answers).bytes
        guard.protect(answers)
        assert least <= guard.memory_report().bytes <= most
        assert guard.tasks == 1
        text = torch.tensor([[5, 13, 7, 8, 10, 4, 12, 11]])
        for _ in range(10):
            optimizer.zero_grad()
            model(input_ids=text, labels=text).loss.backward()
            optimizer.step()
        assert guard.stats().removed > 0.1


def test_the_trainers_callback_protects_them(tmp_path):
    model = llama()
    answers = own_answers(model, tokenizer(), PROMPTS, max_new_tokens=6)
    callback = GuardTrainerCallback(KronOGD(), protect=answers, end_task=False)
    train(model, tokens(0), tmp_path, callback)
    assert callback.guard.tasks == 1
    assert callback.stats().removed > 0


def test_the_cache_is_of_one_model_one_tokenizer_and_the_prompts(tmp_path, monkeypatch):
    options = {"max_new_tokens": 6, "cache": tmp_path}
    first = own_answers(llama(), tokenizer(), PROMPTS, **options)
    files = [*tmp_path.iterdir()]
    assert len(files) == 1
    with monkeypatch.context() as patch:
        patch.setattr("forgetless.llm.answers._generated", None)  # not called
        again = own_answers(llama(), tokenizer(), PROMPTS, **options)
    assert again.answers == first.answers
    other = own_answers(llama(1), tokenizer(), PROMPTS, **options)
    assert other.answers != first.answers
    own_answers(llama(), tokenizer(chat=True), PROMPTS, **options)
    own_answers(llama(), tokenizer(), PROMPTS[:2], **options)
    own_answers(llama(), tokenizer(), PROMPTS, **{**options, "max_new_tokens": 5})
    assert len([*tmp_path.iterdir()]) == 5
    files[0].write_bytes(b"broken")
    with pytest.raises(DataError, match="remove it"):
        own_answers(llama(), tokenizer(), PROMPTS, **options)


def test_a_progress_bar_is_for_terminals(capsys):
    own_answers(llama(), tokenizer(), PROMPTS, max_new_tokens=2)
    out, err = capsys.readouterr()
    assert not out
    assert "answers" not in err


def test_a_tokenizer_that_does_not_fit():
    with pytest.raises(ConfigError, match=r"does not fit the model: it has 15 tokens.* has 10"):
        own_answers(llama(vocabulary=10), tokenizer(), PROMPTS)
    with pytest.raises(ConfigError, match="the model says tokens of 15 and more"):
        own_answers(llama(vocabulary=900), tokenizer(), PROMPTS, max_new_tokens=6)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts must be a list of at least one text"),
        ("the cat", "prompts must be a list of at least one text"),
        (["the cat", "  "], r"prompts\[1\] must be a text that is not empty"),
        ([3], r"prompts\[0\] must be a text"),
        (["the cat " * 20], "has 40 tokens, and 4 for the answer are more than .* context of 32"),
    ],
)
def test_prompts_that_cannot_be_answered(prompts, message):
    with pytest.raises((ConfigError, DataError), match=message):
        own_answers(llama(), tokenizer(), prompts, max_new_tokens=4)


def test_a_chat_template_can_be_left_out():
    bare = own_answers(llama(), tokenizer(), PROMPTS, max_new_tokens=6, chat=False)
    told = own_answers(llama(), tokenizer(chat=True), PROMPTS, max_new_tokens=6, chat=False)
    assert told.answers == bare.answers
    turns = own_answers(llama(), tokenizer(chat=True), PROMPTS, max_new_tokens=6, chat=True)
    assert turns.answers[0].start == bare.answers[0].start + 2


def test_a_chat_template_that_is_missing_or_fails():
    with pytest.raises(ConfigError, match=r"has no chat template.*or give chat=False"):
        own_answers(llama(), tokenizer(), PROMPTS, max_new_tokens=6, chat=True)
    words = tokenizer(chat=True)
    words.chat_template = "{{ raise_exception('a system message is needed') }}"
    with pytest.raises(DataError, match=r"cannot render the prompt 'the cat'.*message is needed"):
        own_answers(llama(), words, PROMPTS, max_new_tokens=6)


def test_a_model_that_generates_no_text():
    with pytest.raises(ConfigError, match="generates text, not Linear"):
        own_answers(torch.nn.Linear(2, 2), tokenizer(), PROMPTS)


def test_an_adapted_model_answers_with_its_adapter():
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, init_lora_weights=False))
    found = own_answers(model, tokenizer(), PROMPTS, max_new_tokens=6)
    assert list(found.answers[0].tokens[2:]) == spoken(model, [4, 6], 6)
    merged = model.merge_and_unload()
    again = own_answers(merged, tokenizer(), PROMPTS, max_new_tokens=6)
    assert again.answers == found.answers


def test_an_adapter_merged_in_between_is_rejected():
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=2, init_lora_weights=False))
    answers = own_answers(model, tokenizer(), PROMPTS, max_new_tokens=6)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    with Guard(model, optimizer) as guard:
        guard.protect(answers)
        model.merge_and_unload()
        with pytest.raises(ConfigError, match="merging an adapter"):
            guard.end_task(answers)


def test_what_is_stored_of_another_model_is_rejected():
    small, large = llama(), llama(width=32)
    answers = own_answers(small, tokenizer(), PROMPTS, max_new_tokens=6)
    with Guard(small, torch.optim.AdamW(small.parameters())) as guard:
        guard.protect(answers)
        stored = guard.state_dict()
    other = Guard(large, torch.optim.AdamW(large.parameters()))
    with pytest.raises(ConfigError, match="model"):
        other.load_state_dict(stored)
    assert other.tasks == 0


def test_no_answers_are_no_batches():
    assert OwnAnswers([]) == []
