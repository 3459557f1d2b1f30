"""The guard as a callback of transformers' Trainer: attached, remembered, saved."""

import copy
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from forgetless import OGD, PCAOGD, ConfigError, DataError, Guard, KronOGD
from forgetless.guard.frameworks.transformers import GuardTrainerCallback
from forgetless.support.validation import ForgetlessWarning
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


def train(
    model, data, folder, callback, resume=None, eval_dataset=None, after=None, **settings
) -> Trainer:
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
        eval_dataset=eval_dataset,
        callbacks=[callback],
    )
    if after is not None:
        after(trainer)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoints_hold_what_is_remembered(tmp_path, dtype):
    model, callback = llama().to(dtype), GuardTrainerCallback(METHOD)
    train(model, tokens(0), tmp_path / "first", callback)
    train(model, tokens(1), tmp_path / "second", callback, save_strategy="steps", save_steps=3)
    checkpoint = tmp_path / "second" / "checkpoint-3"
    assert len(load_file(checkpoint / "forgetless.safetensors")["memory.directions"]) == 10

    resumed, fresh = llama().to(dtype), GuardTrainerCallback(METHOD)
    train(resumed, tokens(1), tmp_path / "second", fresh, resume=str(checkpoint))
    assert fresh.guard.tasks == 2
    assert all(p.dtype == dtype for p in model.parameters())
    for there, here in zip(model.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(there, here, rtol=0, atol=0)


def batches(rows) -> list[dict[str, Tensor]]:
    """All samples as the one batch of a list."""
    return [{key: torch.stack([row[key] for row in rows]) for key in rows[0]}]


def same_memory(folder, guard) -> bool:
    stored, here = load_file(folder / "forgetless.safetensors"), guard.state_dict()
    return all(torch.equal(stored[name], here[name]) for name in here | stored)


def without_memory(checkpoint, to):
    """A copy of a checkpoint that lacks what the guard stored."""
    shutil.copytree(checkpoint, to)
    (to / "forgetless.safetensors").unlink()
    return to


def test_what_a_pretrained_model_does_is_protected(tmp_path):
    method = PCAOGD(components=10, samples=24)  # all of them
    for protect in (batches(tokens(0)), Rows(tokens(0))):
        model, callback = llama(), GuardTrainerCallback(method, protect=protect)
        expected, names = llama(), [n for n, _ in llama().named_parameters()]
        before = vector(expected, names)
        train(model, tokens(1), tmp_path, callback)
        assert callback.guard.tasks == 2
        by_hand = Guard(
            expected, torch.optim.SGD(expected.parameters()), method, output="likelihood"
        )
        by_hand.protect(batches(tokens(0)))
        directions = by_hand.state_dict()["memory.directions"]
        assert leak(callback.guard, before, vector(model, names), directions) < 1e-5
        train(model, tokens(1), tmp_path, callback)
        assert callback.guard.tasks == 3  # protected once


class Rows(torch.utils.data.Dataset):
    def __init__(self, rows) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int):
        return self.rows[i]


def test_the_last_task_is_saved_too(tmp_path):
    model, callback = llama(), GuardTrainerCallback(METHOD)
    train(model, tokens(0), tmp_path, callback, save_strategy="steps", save_steps=3)
    assert load_file(tmp_path / "checkpoint-3" / "forgetless.safetensors")
    assert not same_memory(tmp_path / "checkpoint-3", callback.guard)
    for folder in (tmp_path, tmp_path / "checkpoint-6"):
        assert same_memory(folder, callback.guard)
        fresh = GuardTrainerCallback(METHOD)
        fresh.load(folder)
        before = vector(model, callback.guard.names)
        second = copy.deepcopy(model)
        train(second, tokens(1), tmp_path / "second", fresh)
        assert fresh.guard.tasks == 2
        directions = callback.guard.state_dict()["memory.directions"]
        assert leak(fresh.guard, before, vector(second, fresh.guard.names), directions) < 1e-5


def test_a_model_brings_along_what_is_stored_beside_it(tmp_path):
    callback = GuardTrainerCallback(METHOD)
    settings = {"save_strategy": "steps", "save_steps": 6}
    train(llama(), tokens(0), tmp_path, callback, **settings).save_model()
    directions = callback.guard.state_dict()["memory.directions"]
    for folder in (tmp_path, tmp_path / "checkpoint-6"):
        model, fresh = LlamaForCausalLM.from_pretrained(folder), GuardTrainerCallback(METHOD)
        before = vector(model, callback.guard.names)
        train(model, tokens(1), tmp_path / "second", fresh)
        assert fresh.guard.tasks == 2
        assert leak(fresh.guard, before, vector(model, fresh.guard.names), directions) < 1e-5
    # Adapters are other parameters, and a model of its own says nothing.
    alone = GuardTrainerCallback(METHOD)
    adapted = get_peft_model(
        LlamaForCausalLM.from_pretrained(tmp_path), LoraConfig(task_type="CAUSAL_LM")
    )
    train(adapted, tokens(1), tmp_path / "adapted", alone)
    assert alone.guard.tasks == 1
    with pytest.warns(ForgetlessWarning, match="forgetless.safetensors is of an earlier training"):
        train(llama(), tokens(1), tmp_path, GuardTrainerCallback(METHOD))


@pytest.mark.parametrize("steps", [6, 4], ids=["an epoch's end", "within an epoch"])
def test_training_that_resumes_at_its_end_stores_its_task_once(tmp_path, steps):
    """Within an epoch the trainer takes one more step."""
    train(
        llama(), tokens(0), tmp_path, GuardTrainerCallback(METHOD),
        save_strategy="steps", save_steps=steps // 2, max_steps=steps,
    )  # fmt: skip
    for step in (steps, steps // 2):
        fresh = GuardTrainerCallback(METHOD)
        checkpoint = str(tmp_path / f"checkpoint-{step}")
        train(llama(), tokens(0), tmp_path, fresh, resume=checkpoint, max_steps=steps)
        assert fresh.guard.tasks == 1
    longer = GuardTrainerCallback(METHOD)
    checkpoint = str(tmp_path / f"checkpoint-{steps}")
    train(llama(), tokens(0), tmp_path, longer, resume=checkpoint, max_steps=steps + 3)
    assert longer.guard.tasks == 2


def test_the_best_checkpoint_has_the_task(tmp_path):
    callback = GuardTrainerCallback(METHOD)
    every = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}
    trainer = train(
        llama(), tokens(0), tmp_path, callback, eval_dataset=tokens(1),
        load_best_model_at_end=True, metric_for_best_model="loss", **every,
    )  # fmt: skip
    best = trainer.state.best_model_checkpoint
    assert best is not None
    assert same_memory(Path(best), callback.guard)


def test_a_resumed_training_finds_what_is_stored_elsewhere(tmp_path):
    model, callback = llama(), GuardTrainerCallback(METHOD)
    train(model, tokens(0), tmp_path / "first", callback)
    steps = {"save_strategy": "steps", "save_steps": 3}
    train(model, tokens(1), tmp_path / "second", callback, **steps)
    checkpoint = tmp_path / "second" / "checkpoint-3"

    fresh = GuardTrainerCallback(METHOD)
    train(llama(), tokens(1), tmp_path / "third", fresh, resume=str(checkpoint))
    assert fresh.guard.tasks == 2

    moved = without_memory(checkpoint, tmp_path / "moved" / "checkpoint-3")
    (tmp_path / "second").rename(tmp_path / "renamed")
    unguarded = GuardTrainerCallback(METHOD)
    with pytest.warns(ForgetlessWarning, match="earlier tasks are not protected.*call load") as got:
        train(llama(), tokens(1), tmp_path / "moved", unguarded, resume=str(moved))
    assert sum("not protected" in str(one.message) for one in got) == 1
    assert unguarded.guard.tasks == 1

    told = GuardTrainerCallback(METHOD)
    told.load(tmp_path / "renamed" / "checkpoint-3")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ForgetlessWarning)
        train(llama(), tokens(1), tmp_path / "moved", told, resume=str(moved))
    assert told.guard.tasks == 2


def test_a_first_task_that_resumes_lacks_nothing(tmp_path):
    """Its checkpoint says that no task was stored."""
    steps = {"save_strategy": "steps", "save_steps": 3}
    train(llama(), tokens(0), tmp_path / "first", GuardTrainerCallback(METHOD), **steps)
    bare = without_memory(tmp_path / "first" / "checkpoint-3", tmp_path / "bare" / "checkpoint-3")
    shutil.rmtree(tmp_path / "first")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ForgetlessWarning)
        train(llama(), tokens(0), tmp_path / "bare", GuardTrainerCallback(METHOD), resume=str(bare))


def test_a_file_that_cannot_be_read(tmp_path):
    for content in (None, b"", b"nonsense"):
        if content is not None:
            (tmp_path / "forgetless.safetensors").write_bytes(content)
        with pytest.raises(DataError, match=r"forgetless.safetensors cannot be read"):
            GuardTrainerCallback(METHOD).load(tmp_path)


def test_what_is_stored_of_another_model_is_rejected(tmp_path):
    train(llama(), tokens(0), tmp_path, GuardTrainerCallback(METHOD))
    callback = GuardTrainerCallback(METHOD)
    callback.load(tmp_path)
    with pytest.raises(
        ConfigError, match=r"forgetless.safetensors does not fit: the state is for another model"
    ):
        train(gpt2(), tokens(1), tmp_path, callback)


def test_an_adapter_that_was_merged_in_between_is_rejected(tmp_path):
    torch.manual_seed(0)
    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    callback = GuardTrainerCallback(KronOGD(samples=20))
    train(model, tokens(0), tmp_path, callback)
    with pytest.raises(ConfigError, match=r"merging an adapter.*make a new guard"):
        train(model.merge_and_unload().requires_grad_(True), tokens(1), tmp_path, callback)


class Logger(TrainerCallback):
    """Stands where a reporter such as TensorBoard's does."""

    def __init__(self) -> None:
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def test_the_removed_share_is_logged_and_kept(tmp_path):
    model, callback, logger = llama(), GuardTrainerCallback(METHOD), Logger()
    train(model, tokens(0), tmp_path, callback)
    assert callback.stats().steps == 0
    settings = {"logging_strategy": "steps", "logging_steps": 3}
    trainer = train(model, tokens(1), tmp_path, logger, after=callback.add_to, **settings)
    stats = callback.stats()
    assert stats.steps == 6
    assert 0 < stats.removed < 1
    of_steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in of_steps] == [3, 6]
    assert of_steps[-1]["guard_removed"] == pytest.approx(stats.removed)
    assert of_steps[-1]["guard_blocked"] == pytest.approx(stats.blocked)
    assert [entry["guard_removed"] for entry in of_steps] == [
        logs["guard_removed"] for logs in logger.logs if "loss" in logs
    ]
    train(model, tokens(1), tmp_path, callback, max_steps=2)
    assert callback.stats().steps == 2


def test_the_drift_is_logged_too(tmp_path):
    model, callback = llama(), GuardTrainerCallback(METHOD)
    train(model, tokens(0), tmp_path, callback)
    settings = {"logging_strategy": "steps", "logging_steps": 60, "max_steps": 120}
    trainer = train(model, tokens(1), tmp_path, callback, **settings)
    first, second = (entry for entry in trainer.state.log_history if "loss" in entry)
    assert "guard_drift/task 1" not in first
    assert second["guard_drift/task 1"] > 0
    assert second["guard_loss/task 1"] > 0


def test_an_adapter_that_is_added_for_the_next_task_is_protected_after_it(tmp_path):
    torch.manual_seed(0)
    model = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    callback = GuardTrainerCallback(KronOGD(samples=20))
    train(model, tokens(0), tmp_path, callback)
    guard, first = callback.guard, callback.guard.names
    model.add_adapter("second", LoraConfig(r=2, target_modules=["v_proj"]))
    model.base_model.set_adapter(["default", "second"])
    train(model, tokens(1), tmp_path, callback)
    assert callback.guard is guard
    assert {name for name in guard.names if ".second." in name} == {*guard.names} - {*first}
    assert guard.tasks == 2


def tiny(kind):
    """A model of any class of BERT's or T5's."""
    sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
    bert = BertConfig(vocab_size=20, num_attention_heads=2, num_labels=3, **sizes)
    sizes = {"d_model": 8, "d_ff": 16, "d_kv": 4, "num_layers": 1, "num_heads": 2}
    t5 = T5Config(vocab_size=20, decoder_start_token_id=0, **sizes)
    torch.manual_seed(0)
    return kind(t5 if kind is T5ForConditionalGeneration else bert)


@pytest.mark.filterwarnings("ignore:the gradient of .*lora_A")  # a fresh adapter
@pytest.mark.parametrize(
    ("make", "output"),
    [
        (llama, "likelihood"),
        (gpt2, "likelihood"),
        (lambda: get_peft_model(llama(), LoraConfig(task_type="CAUSAL_LM")), "likelihood"),
        (lambda: tiny(T5ForConditionalGeneration), "tokens"),
        (lambda: tiny(BertForMaskedLM), "tokens"),
        (lambda: tiny(BertForTokenClassification), "tokens"),
        (lambda: tiny(BertForSequenceClassification), "class"),
    ],
    ids=["llama", "gpt2", "lora", "t5", "masked", "tagger", "classifier"],
)
def test_a_guard_and_the_callback_choose_the_same_output(tmp_path, make, output):
    rows = tokens(0)
    if output == "class":
        rows = [{"input_ids": row["input_ids"], "labels": i % 3} for i, row in enumerate(rows)]
    elif make().config.num_labels == 3:
        rows = [{"input_ids": row["input_ids"], "labels": row["labels"] % 3} for row in rows]
    if make().config.is_encoder_decoder:  # as DataCollatorForSeq2Seq makes them
        rows = [{**row, "decoder_input_ids": row["labels"]} for row in rows]
    batch = default_data_collator(rows)
    found = []
    for chosen in ({}, {"output": output}):
        model = make()
        guard = Guard(model, torch.optim.SGD(model.parameters()), OGD(samples=24), **chosen)
        guard.protect(batch)
        found.append(guard.state_dict()["memory.directions"])
    model, callback = make(), GuardTrainerCallback(OGD(samples=24), protect=[batch])
    train(model, rows, tmp_path, callback, max_steps=1, learning_rate=0.0)
    found.append(callback.guard.state_dict()["memory.directions"][: len(found[0])])
    assert len(found[0]) > 10
    for other in found[1:]:
        assert torch.equal(other, found[0])


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
