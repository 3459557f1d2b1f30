"""A fine-tuning script as people write it, for one process or for `torchrun`.

torchrun --nproc_per_node 2 -m tests.guard.frameworks.trainer_script FOLDER [die | resume]
"""

import os
import signal
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import TrainerCallback

from forgetless import KronOGD
from forgetless.guard.frameworks.transformers import GuardTrainerCallback
from tests.guard.frameworks.test_transformers import llama, tokens, train

# Name → arguments of the Trainer. One process of these takes twice the sequences of one of two.
CASES = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2, "max_steps": 3},
    "checkpointed": {"gradient_checkpointing": True},
    "bf16": {"bf16": True},
    "lora": {},
}
KILLED = "plain"  # the case whose second task is interrupted
STEPS = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}


class Death(TrainerCallback):
    """The last process is killed in the third step."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3 and args.process_index == args.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def made(name: str):
    """A model in double precision, with adapters that have been trained a little."""
    model = llama().double()
    if name != "lora":
        return model
    model = get_peft_model(model, LoraConfig(r=2, init_lora_weights=False))
    return model.double()


def settings(name: str) -> dict:
    """Two processes take two sequences each where one takes four, so all take the same ones."""
    here = int(os.environ.get("WORLD_SIZE", "1"))
    return {**STEPS, **CASES[name], "per_device_train_batch_size": 4 // here}


def two_tasks(name: str, folder: Path, *, mode: str = "") -> None:
    """Protect, train two tasks; the first process writes the weights after each."""
    model, kept = made(name), {}
    rows = torch.stack([row["labels"] for row in tokens(0)])
    protect = [{"input_ids": rows, "labels": rows}]
    callback = GuardTrainerCallback(KronOGD(energy=0.8), protect=protect)
    of_case, second = settings(name), folder / name / "second"
    if mode != "resume":
        train(model, tokens(0), folder / name / "first", callback, **of_case)
        assert callback.guard.tasks == 2
        kept["first"] = weights(model)
    if mode:
        second = second.with_name("killed")
    train(
        model, tokens(1), second, callback,
        resume=str(second / "checkpoint-2") if mode == "resume" else None,
        after=(lambda trainer: trainer.add_callback(Death())) if mode == "die" else None,
        **of_case,
    )  # fmt: skip
    assert callback.guard.tasks == 3
    kept["second"] = weights(model)
    if int(os.environ.get("RANK", "0")) == 0:
        save_file(kept, folder / f"{name}{mode}.safetensors")


def weights(model) -> torch.Tensor:
    """All that is trained, as one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])


def main(folder: Path, mode: str = "") -> None:
    """All cases; or one that is killed after them; or that one, resumed."""
    if mode != "resume":
        for name in CASES:
            two_tasks(name, folder)
    if mode:
        two_tasks(KILLED, folder, mode=mode)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
