"""A reservoir of samples, which stand for all that came by, and what its methods have in common."""

from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self, final

import torch

from forgetless.methods.base import FinishedTask, View, choose
from forgetless.methods.cost import TaskProbe
from forgetless.methods.rehearsal import Rehearsal
from forgetless.support.validation import option, whole


@final
@dataclass(frozen=True)
class ReplayBuffer:
    """A uniform random choice of all samples so far (Vitter 1985), with no need of task borders.

    Arguments:
        samples: those in it, for each seed its own; None before the first.
        seen: how many came by.
    """

    samples: Any = None
    seen: int = 0

    def with_batch(
        self, capacity: int, view: View, alike: Callable[[Any, View], tuple[Any, Any]]
    ) -> Self:
        """After the present batch came by.

        The i-th sample takes the place of number j, uniform in 0 … i − 1, if there is such a place.

        Arguments:
            capacity: the most samples.
            view: has the batch, and a random number for each of its samples.
            alike: gives the stored samples and the batch with the same tensors attached.
        """
        n, held = len(view.batch), min(self.seen, capacity)
        random = view.random(n)
        number = self.seen + torch.arange(n, device=random.device)
        place = (random * (number + 1)).long()
        place = torch.where(number < capacity, number, place).clamp_max(capacity)
        seen = self.seen + n
        # A GPU would wait for the answer, and copies faster than that.
        if not random.is_cuda and not bool((place < capacity).any()):
            return type(self)(self.samples, seen)
        stored, batch = alike(self.samples, view)
        # Place → row of the stored samples and the batch; later samples have higher rows.
        row = torch.arange(capacity + 1, device=random.device).repeat(len(random), 1)
        new = held + torch.arange(n, device=random.device).expand_as(place)
        row = row.scatter_reduce(1, place, new, "amax")[:, : min(seen, capacity)]
        both = batch if stored is None else stored + batch
        return type(self)(both.select(row), seen)


@dataclass(frozen=True)
class ReservoirRehearsal(Rehearsal[ReplayBuffer], ABC):
    """A method that follows a loss on samples drawn from a reservoir of all samples so far.

    It is filled at every step, and drawn from at every step but the first.

    Arguments:
        buffer: samples in the reservoir.
        batch_size: stored samples in a batch.
    """

    family: ClassVar[str] = "replay"
    acts_on = "gradient"
    protected_by = "buffer"
    needs_batch: ClassVar[bool] = True
    idle_before_first_task: ClassVar[bool] = False
    recordable: ClassVar[bool] = False
    buffer: int = option(500, "Samples in the reservoir, of all tasks together.", accepted=whole(1))
    batch_size: int = option(
        32, "Samples of the reservoir in a step.", accepted=whole(1), setting="replay_batch"
    )

    def kept(self, probe: TaskProbe) -> int | None:
        """As many of a first task as fit; of a later one they take the place of others."""
        return probe.drawn(self.buffer) if not probe.tasks else None

    def rehearsed(self, tasks: int) -> int:
        """A batch."""
        return min(self.batch_size, self.buffer)

    def init(self, view: View) -> ReplayBuffer:
        """No samples yet."""
        return ReplayBuffer()

    def drawn(self, state: ReplayBuffer, view: View) -> Any:
        """A random batch of the stored samples."""
        return choose(view, state.samples, self.batch_size)

    def alike(self, stored: Any, view: View) -> tuple[Any, Any]:
        """The stored samples and the present batch, with what this method attaches to them."""
        return stored, view.batch

    def followed(self, state: ReplayBuffer, view: View) -> ReplayBuffer:
        """The state after the present batch came by."""
        return state.with_batch(self.buffer, view, self.alike)

    def consolidate(self, state: ReplayBuffer, view: View, task: FinishedTask) -> ReplayBuffer:
        """Nothing: the reservoir has seen the task's samples already."""
        return state
