"""The guard as a callback of transformers' Trainer: attached, remembered, saved."""

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from forgetless import OGD, PCAOGD, ConfigError
from forgetless.guard.frameworks.transformers import GuardTrainerCallback
from tests.guard.frameworks.common import Looking, leak, vector

METHOD = PCAOGD(components=10, samples=20)
TINY = {"vocab_size": 20, "bos_token_id": 0, "eos_token_id": 0}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "max_position_embeddings": 12}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**TINY, **sizes, **layers))


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**TINY, n_embd=8, n_layer=1, n_head=2, n_positions=12))


def tokens(seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 10, (24, 12), generator=generator) + 10 * seed
    return [{"input_ids": row, "labels": row} for row in rows]


def train(model, data, folder, callback, resume=None, **settings) -> Trainer:
    arguments = {
        "max_steps": 6,
        "learning_rate": 0.02,
        "per_device_train_batch_size": 4,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        **settings,
    }
    trainer = Trainer(
        model,
        TrainingArguments(str(folder), **arguments),
        train_dataset=data,
        callbacks=[callback],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize(
    "settings",
    [{}, {"gradient_accumulation_steps": 2}, {"optim": "adafactor"}, {"bf16": True}],
    ids=["adamw", "accumulated", "adafactor", "bf16"],
)
def test_no_step_touches_what_was_learned(tmp_path, make, settings):
    model, callback = make(), GuardTrainerCallback(METHOD)
    train(model, tokens(0), tmp_path, callback, **settings)
    guard = callback.guard
    directions = guard.state_dict()["memory.directions"]
    assert guard.tasks == 1
    assert len(directions) == 10
    before = vector(model, guard.names)
    train(model, tokens(1), tmp_path, callback, **settings)
    assert callback.guard is guard
    assert guard.tasks == 2
    assert leak(guard, before, vector(model, guard.names), directions) < 1e-5


def test_classifiers_are_protected_by_class(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 16, "max_position_embeddings": 12}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 3}
    model = BertForSequenceClassification(BertConfig(vocab_size=20, **sizes, **layers))
    data = [{"input_ids": row["input_ids"], "label": i % 3} for i, row in enumerate(tokens(0))]
    callback = GuardTrainerCallback(OGD(samples=7), exclude=["classifier"])
    train(model, data, tmp_path, callback)
    assert callback.guard.memory_report().directions == 7
    assert not any("classifier" in name for name in callback.guard.names)


def test_checkpoints_hold_what_is_remembered(tmp_path):
    model, callback = llama(), GuardTrainerCallback(METHOD)
    train(model, tokens(0), tmp_path / "first", callback)
    train(model, tokens(1), tmp_path / "second", callback, save_strategy="steps", save_steps=3)
    checkpoint = tmp_path / "second" / "checkpoint-3"
    assert len(load_file(checkpoint / "forgetless.safetensors")["memory.directions"]) == 10

    resumed, fresh = llama(), GuardTrainerCallback(METHOD)
    train(resumed, tokens(1), tmp_path / "second", fresh, resume=str(checkpoint))
    assert fresh.guard.tasks == 2
    for there, here in zip(model.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(there, here, rtol=0, atol=0)


def test_a_folder_of_the_users_choice(tmp_path):
    model, callback = llama(), GuardTrainerCallback(METHOD)
    train(model, tokens(0), tmp_path, callback)
    callback.save(tmp_path)
    fresh = GuardTrainerCallback(METHOD, end_task=False)
    fresh.load(tmp_path)
    before = vector(model, callback.guard.names)
    train(model, tokens(1), tmp_path, fresh)
    assert fresh.guard.tasks == 1
    assert leak(fresh.guard, before, vector(model, fresh.guard.names)) < 1e-5


def test_the_user_may_end_tasks(tmp_path):
    callback = GuardTrainerCallback(METHOD, end_task=False)
    trainer = train(llama(), tokens(0), tmp_path, callback)
    assert callback.guard.tasks == 0
    callback.end_task(trainer.get_train_dataloader())
    assert callback.guard.tasks == 1


def test_mistakes_are_found_before_training():
    with pytest.raises(TypeError, match="componets"):
        GuardTrainerCallback(METHOD, componets=3)
    with pytest.raises(ConfigError, match="no guard yet"):
        GuardTrainerCallback(METHOD).guard  # noqa: B018


@pytest.mark.parametrize("accumulated", [1, 2])
def test_methods_see_the_batches_of_every_step(tmp_path, accumulated):
    seen = []
    callback = GuardTrainerCallback(Looking(seen))
    train(gpt2(), tokens(0), tmp_path, callback, gradient_accumulation_steps=accumulated)
    assert [len(batch) for batch in seen] == [4 * accumulated] * 6
    part = seen[0].parts[0]
    assert torch.equal(part.kwargs["input_ids"], part.target)
    rows = {tuple(row["input_ids"].tolist()) for row in tokens(0)}
    assert all(tuple(row.tolist()) in rows for row in part.target)
