"""The complete state of a learner between two steps, as tensors and plain values, and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from forgetless.methods import Samples
from forgetless.methods.state import restored_state, state_tensors
from forgetless.training.held_out import HeldOut
from forgetless.training.learner import Learner, TaskProgress
from forgetless.training.optimizers import TorchOptimizer


def progress(learner: Learner) -> dict[str, Tensor]:
    """Weights, buffers, generators and their latest draws: all but the method's state."""
    theta, done = learner.network.theta, learner.progress
    found = {"theta": theta, "choices": learner.sampler.coming, **_random(learner)}
    found |= {f"fixed.{name}": t for name, t in learner.network.fixed.items()}
    if learner.optimizer is not None:
        found |= {f"optimizer.{name}": t for name, t in learner.optimizer.tensors().items()}
    if done is not None:
        found |= {} if done.order is None else {"order": done.order}
        found |= {f"best.{name}": t for name, t in done.held_out.best.items()}
    return found


def state(learner: Learner) -> dict[str, Tensor]:
    """The tensors of the method's state, of every seed."""
    rows = range(len(learner.seeds))
    return {f"{row}.{n}": t for row in rows for n, t in state_tensors(learner.state, row).items()}


def numbers(learner: Learner) -> dict[str, Any]:
    """Counters, as plain values."""
    progress = learner.progress or TaskProgress(learner.steps)
    return {
        "steps": learner.steps,
        "first_step": progress.first_step,
        "epochs": progress.epochs,
        "batches": progress.batches,
        "asked": learner.sampler.asked,
        "held_out": progress.held_out.numbers(),
    }


def restore(
    learner: Learner,
    tensors: Mapping[str, Tensor],
    remembered: Mapping[str, Tensor],
    values: Mapping[str, Any],
) -> None:
    """Bring a learner made alike to where `progress`, `state` and `numbers` were taken."""
    network = learner.network
    theta = network.theta
    if tensors["theta"].shape != theta.shape:
        raise ValueError(f"weights of shape {tuple(tensors['theta'].shape)}")
    # Copied in place: at another alignment in memory products may round differently.
    theta.copy_(tensors["theta"])
    for name, value in network.fixed.items():
        value.copy_(tensors[f"fixed.{name}"])
    of_seeds = [
        {n.removeprefix(f"{row}."): t for n, t in remembered.items() if n.startswith(f"{row}.")}
        for row in range(len(learner.seeds))
    ]

    def load(samples: Sequence[Mapping[str, Tensor]]) -> Samples:
        return Samples.restore(
            [{n: t.to(theta.device) for n, t in kept.items()} for kept in samples]
        )

    storage = learner.view.storage
    learner.state = restored_state(of_seeds, learner.method, network.protected, storage, load)
    learner.steps = int(values["steps"])
    order = tensors["order"].to(theta.device) if "order" in tensors else None
    first, epochs, batches = (int(values[name]) for name in ("first_step", "epochs", "batches"))
    held_out = HeldOut(_starting_with("best.", tensors), **values["held_out"])
    learner.progress = TaskProgress(first, epochs, batches, order, held_out)
    learner.optimizer = learner.new_optimizer()
    if learner.optimizer is not None:
        learner.optimizer.restore(_starting_with("optimizer.", tensors))
    learner.sampler.asked = [(int(count), int(available)) for count, available in values["asked"]]
    learner.sampler.coming = tensors["choices"].to(theta.device)
    _set_random(learner, tensors)


@final
@dataclass(frozen=True)
class Savepoint:
    """All that a consolidation changes: the method's state, progress, optimizer, generators."""

    state: Any
    progress: TaskProgress | None
    optimizer: TorchOptimizer | None
    random: dict[str, Tensor]

    @classmethod
    def of(cls, learner: Learner) -> "Savepoint":
        """The learner as it is now."""
        return cls(learner.state, learner.progress, learner.optimizer, _random(learner))

    def restore(self, learner: Learner) -> None:
        """Undo a consolidation."""
        learner.state, learner.progress = self.state, self.progress
        learner.optimizer = self.optimizer
        _set_random(learner, self.random)


def _random(learner: Learner) -> dict[str, Tensor]:
    """States of the seeds' generators, (4 S, bytes), and of torch's own, which dropout uses."""
    own = torch.stack([generator.get_state() for generator in learner.generators()])
    states = {"generators": own, "global": torch.get_rng_state()}
    theta = learner.network.theta
    if theta.is_cuda:
        states["global.cuda"] = torch.cuda.get_rng_state(theta.device)
    return states


def _set_random(learner: Learner, states: Mapping[str, Tensor]) -> None:
    for generator, state in zip(learner.generators(), states["generators"], strict=True):
        generator.set_state(state.clone())
    torch.set_rng_state(states["global"])
    theta = learner.network.theta
    if theta.is_cuda and "global.cuda" in states:
        torch.cuda.set_rng_state(states["global.cuda"], theta.device)


def _starting_with(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
