"""TRL's SFTTrainer: a Trainer, so the callback guards it, with and without adapters."""

import pytest
import torch
from peft import LoraConfig

from forgetless import PCAOGD, KronOGD
from forgetless.guard.frameworks.transformers import GuardTrainerCallback
from forgetless.llm import own_answers
from tests.guard.frameworks.common import leak, vector
from tests.llm.tiny import PROMPTS, llama, tokenizer

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
pytestmark = pytest.mark.filterwarnings("ignore:Cannot (locate|pickle)")  # by dill

CHATS = [
    {
        "prompt": [{"role": "user", "content": f"{a} {b} sat"}],
        "completion": [{"role": "assistant", "content": f"on {a} mat ?"}],
    }
    for a in ("the", "a")
    for b in ("red cat", "blue dog", "cat", "dog")
]
TEXTS = [{"text": "the red dog ran on the mat"}, {"text": "a blue cat sat on a mat ?"}] * 4


def fine_tuned(folder, callback, rows, *, model=None, adapters=None, **settings):
    arguments = {
        "max_steps": 4,
        "learning_rate": 0.02,
        "per_device_train_batch_size": 2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "max_length": 32,
        **settings,
    }
    trainer = trl.SFTTrainer(
        model=model or llama(),
        args=trl.SFTConfig(str(folder), **arguments),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(chat=True),
        callbacks=[callback],
        peft_config=adapters,
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("rows", [TEXTS, CHATS], ids=["texts", "chats"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"gradient_accumulation_steps": 2, "gradient_checkpointing": True}, {"bf16": True}],
    ids=["plain", "accumulated", "bf16"],
)
def test_no_step_touches_what_was_protected(tmp_path, rows, settings):
    model = llama()
    answers = own_answers(model, tokenizer(chat=True), PROMPTS, max_new_tokens=6)
    callback = GuardTrainerCallback(PCAOGD(components=5, samples=5), protect=answers)
    names = [name for name, _ in model.named_parameters()]
    before = vector(model, names)
    fine_tuned(tmp_path, callback, rows, model=model, **settings)
    guard = callback.guard
    assert guard.tasks == 2  # the answers, and what was fine-tuned
    assert [*guard.names] == names
    directions = guard.state_dict()["memory.directions"]
    own = directions[:5]  # of the answers; those of the task came after the steps
    assert leak(guard, before, vector(model, names), own) < 1e-5


def test_adapters_are_guarded(tmp_path):
    callback = GuardTrainerCallback(
        KronOGD(), protect=own_answers(llama(), tokenizer(chat=True), PROMPTS, max_new_tokens=6)
    )
    adapters = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = fine_tuned(tmp_path, callback, CHATS, adapters=adapters)
    assert all("lora_" in name for name in callback.guard.names)
    assert callback.guard.tasks == 2
    assert callback.stats().removed > 0
    assert torch.isfinite(torch.tensor(trainer.state.log_history[-1]["train_loss"]))
