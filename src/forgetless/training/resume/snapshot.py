"""All that a learner is between two steps, as tensors and plain values, and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from forgetless.methods import Samples, State
from forgetless.training.learner import Learner, Place


def progress(learner: Learner) -> dict[str, Tensor]:
    """Weights, buffers, generators and what was drawn: all but what the method remembers."""
    theta, order = learner.network.theta, learner.place.order if learner.place else None
    drawn = {"choices": learner.draws.coming} | ({} if order is None else {"order": order})
    fixed = {f"fixed.{name}": t for name, t in learner.network.fixed.items()}
    return {"theta": theta, **_random(learner), **fixed, **drawn}


def memory(learner: Learner) -> dict[str, Tensor]:
    """What the method remembers, of every seed."""
    rows = range(len(learner.seeds))
    return {f"{row}.{n}": t for row in rows for n, t in learner.state.tensors(row).items()}


def numbers(learner: Learner) -> dict[str, Any]:
    """What else there is, in plain values."""
    place = learner.place or Place(learner.steps)
    return {
        "steps": learner.steps,
        "first_step": place.first_step,
        "epochs": place.epochs,
        "batches": place.batches,
        "asked": learner.draws.asked,
        "remembers": learner.remembers,
        "cut": learner.front.is_cut,
    }


def restore(
    learner: Learner,
    tensors: Mapping[str, Tensor],
    remembered: Mapping[str, Tensor],
    values: Mapping[str, Any],
) -> None:
    """Go on from what `progress`, `memory` and `numbers` gave, in a learner that is made alike."""
    network = learner.network
    theta = network.theta
    if tensors["theta"].shape != theta.shape:
        raise ValueError(f"weights of shape {tuple(tensors['theta'].shape)}")
    # Copied into the tensors that are there: what lies elsewhere in memory may round otherwise.
    theta.copy_(tensors["theta"])
    for name, value in network.fixed.items():
        value.copy_(tensors[f"fixed.{name}"])
    of_seeds = [
        {n.removeprefix(f"{row}."): t for n, t in remembered.items() if n.startswith(f"{row}.")}
        for row in range(len(learner.seeds))
    ]

    def load(samples: Sequence[Mapping[str, Tensor]]) -> Samples:
        return Samples.restore([{n: t.to(theta.device) for n, t in of.items()} for of in samples])

    protected = theta[:, : network.protected_size]
    learner.state = learner.method.restore(of_seeds, protected, learner.storage, load)
    learner.steps = int(values["steps"])
    learner.remembers = bool(values["remembers"])
    if values["cut"]:
        learner.front.cut()
    order = tensors["order"].to(theta.device) if "order" in tensors else None
    first, epochs, batches = (int(values[name]) for name in ("first_step", "epochs", "batches"))
    learner.place = Place(first, epochs, batches, order)
    learner.draws.restore(values["asked"], tensors["choices"])
    _set_random(learner, tensors)


@final
@dataclass(frozen=True)
class Mark:
    """What a consolidation changes: the method's memory, the place and the generators."""

    state: State
    remembers: bool
    place: Place | None
    random: dict[str, Tensor]

    @classmethod
    def of(cls, learner: Learner) -> "Mark":
        """As the learner is now."""
        return cls(learner.state, learner.remembers, learner.place, _random(learner))

    def rewind(self, learner: Learner) -> None:
        """Back to where the mark was made, as if there had been no consolidation."""
        learner.state, learner.remembers = self.state, self.remembers
        learner.place = self.place
        _set_random(learner, self.random)


def _random(learner: Learner) -> dict[str, Tensor]:
    """States of the seeds' generators, (3 S, bytes), and of torch's own, which dropout uses."""
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
