"""LoRA adapters: they are protected and move, and what is under them does neither."""

import peft
import pytest
import torch

from forgetless import PCAOGD, Guard
from forgetless.guard.frameworks.transformers import GuardTrainerCallback
from forgetless.support.validation import ForgetlessWarning
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


def test_a_new_optimizer_of_merged_weights_is_told_of():
    model = adapted()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.02)
    guard = Guard(model, optimizer)
    batch = torch.stack([row["input_ids"] for row in tokens(0)])
    guard.end_task({"input_ids": batch, "labels": batch})
    merged = model.merge_and_unload()
    merged.requires_grad_(True)
    new = torch.optim.AdamW(merged.parameters(), lr=1e-3)
    words = r"lora_A.*, which the guard protects, is no longer .* an adapter was merged"
    merged(input_ids=batch, labels=batch).loss.backward()
    with pytest.warns(ForgetlessWarning, match=words) as caught:
        new.step()
    new.step()
    assert len(caught) == 1
