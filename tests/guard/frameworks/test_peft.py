"""LoRA adapters: they are protected and move, and what is under them does neither."""

import peft
import torch

from forgetless import PCAOGD, Guard
from forgetless.guard.frameworks.transformers import GuardTrainerCallback
from tests.guard.frameworks.common import leak, vector
from tests.guard.frameworks.test_transformers import llama, tokens, train

METHOD = PCAOGD(components=10, samples=20)


def adapted():
    return peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


def frozen(model) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}


def test_only_adapters_are_protected_and_move():
    model = adapted()
    base = frozen(model)
    # All parameters are given to the optimizer: it is enough that they are frozen.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    guard = Guard(model, optimizer, METHOD, output="likelihood")
    assert guard.names
    assert all("lora_" in name for name in guard.names)
    for seed in (0, 1):
        before = vector(model, guard.names)
        for _ in range(5):
            batch = torch.stack([row["input_ids"] for row in tokens(seed)])
            optimizer.zero_grad()
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
        if seed:
            assert leak(guard, before, vector(model, guard.names)) < 1e-5
        else:
            guard.end_task({"input_ids": batch, "labels": batch})
    for name, tensor in frozen(model).items():
        torch.testing.assert_close(tensor, base[name], rtol=0, atol=0)


def test_adapters_in_the_trainer(tmp_path):
    model, callback = adapted(), GuardTrainerCallback(METHOD)
    base = frozen(model)
    train(model, tokens(0), tmp_path, callback)
    directions = callback.guard.state_dict()["memory.directions"]
    before = vector(model, callback.guard.names)
    train(model, tokens(1), tmp_path, callback)
    assert all("lora_" in name for name in callback.guard.names)
    assert leak(callback.guard, before, vector(model, callback.guard.names), directions) < 1e-5
    for name, tensor in frozen(model).items():
        torch.testing.assert_close(tensor, base[name], rtol=0, atol=0)
