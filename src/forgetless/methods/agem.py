"""Averaged gradient episodic memory (Chaudhry et al. 2019)."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

from torch import Tensor

from forgetless.linalg import project_halfspace
from forgetless.methods.base import FinishedTask, Samples, View, choose
from forgetless.methods.cost import TaskProbe
from forgetless.methods.rehearsal import Rehearsal
from forgetless.support.validation import option, whole


@final
@dataclass(frozen=True)
class AGEM(Rehearsal[Any]):
    """Steps never oppose the loss gradient on a random batch of remembered samples.

    g̃ = g − min(0, ⟨g, r⟩) / ⟨r, r⟩ · r, with r the memory batch's mean gradient.

    Arguments:
        memory: samples kept of each task.
        batch_size: samples of all tasks together that r is computed on.
        heads: "own" sends each remembered sample through its own task's head. "released" does
            what the PCA-OGD paper's code does: the whole batch goes through the head of its first
            sample, and after the first task no head trains any more.
    """

    name: ClassVar[str] = "a-gem"
    label: ClassVar[str] = "A-GEM"
    summary: ClassVar[str] = "averaged GEM: no step against the memory's loss gradient"
    family: ClassVar[str] = "replay"
    acts_on = "update"
    protected_by = "memory"
    memory: int = option(100, "Samples stored of each task.", accepted=whole(1))
    batch_size: int = option(
        256, "Stored samples in a step.", accepted=whole(1), setting="agem_batch"
    )
    heads: Literal["own", "released"] = option(
        "own",
        "Send a stored sample through its own head, or through the first one's as the paper's code "
        "does.",
        choices=("own", "released"),
        setting="agem_heads",
    )

    @property
    def reaches_heads(self) -> bool:
        """The loss on earlier tasks depends on their heads; the released code leaves them out."""
        return self.heads == "own"

    @property
    def needs_own_heads(self) -> bool:
        """The released code chooses among heads."""
        return self.heads == "released"

    def kept(self, probe: TaskProbe) -> int:
        """As many as asked for, or all."""
        return probe.drawn(self.memory)

    def rehearsed(self, tasks: int) -> int:
        """A batch."""
        return min(self.batch_size, tasks * self.memory)

    def init(self, view: View) -> None:
        """No samples yet."""

    def update(self, g: Tensor, state: Any, view: View) -> tuple[Tensor, Any]:
        """Project on the half-space that does not raise the stored samples' loss."""
        if state is None:
            return g, state
        chosen = choose(view, state, self.batch_size)
        if self.heads == "released":
            chosen = _through_first_head(chosen, view)
        return project_halfspace(g, view.gradient(chosen)), state

    def consolidate(self, state: Any, view: View, task: FinishedTask) -> Any:
        """Store some samples of the task."""
        new = task.draw(self.memory)
        return new if state is None else state + new

    @property
    def may_leave_unprotected(self) -> bool:
        """The released code stops training everything out of reach after the first task."""
        return self.heads == "own"

    def trains_heads(self, state: Any) -> bool:
        """Always, except as the released code does."""
        return self.heads == "own" or state is None


def _through_first_head(samples: Samples, view: View) -> Samples:
    """The samples as if all belonged to the task of the first."""
    starts = view.starts  # first: a guard, whose samples have no tasks, says here that it cannot
    tasks = samples.tasks[:, :1].expand_as(samples.tasks)
    return Samples(samples.inputs, samples.labels - starts[samples.tasks] + starts[tasks], tasks)
