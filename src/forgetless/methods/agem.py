"""Averaged gradient episodic memory (Chaudhry et al. 2019)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, final

from torch import Tensor

from forgetless.linalg import project_halfspace
from forgetless.methods.base import FinishedTask, LoadSamples, LossGrad, SampleSet
from forgetless.methods.rehearsal import Rehearsal
from forgetless.support.options import option
from forgetless.support.validation import whole


@final
@dataclass(frozen=True)
class Pool:
    """The remembered samples of all tasks in one pool."""

    samples: SampleSet | None = None

    def tensors(self, seed: int) -> dict[str, Tensor]:
        """The samples of a seed."""
        return {} if self.samples is None else self.samples.tensors(seed)

    @classmethod
    def restore(cls, of_seeds: Sequence[Mapping[str, Tensor]], load: LoadSamples) -> "Pool":
        """From what `tensors` gave for each seed."""
        return cls(load(of_seeds) if of_seeds[0] else None)


@final
@dataclass(frozen=True)
class AGEM(Rehearsal[Pool]):
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
    kept = Pool
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

    def update(self, g: Tensor, state: Pool, theta: Tensor, loss_grad: LossGrad) -> Tensor:
        """Project on the half-space that does not raise the memory's loss."""
        if state.samples is None:
            return g
        released = self.heads == "released"
        reference = loss_grad(state.samples, self.batch_size, one_head=released)
        return project_halfspace(g, reference)

    def consolidate(self, state: Pool, theta: Tensor, task: FinishedTask) -> Pool:
        """Keep some samples of the task."""
        new = task.draw(self.memory)
        return Pool(new if state.samples is None else state.samples + new)

    @property
    def may_leave_unprotected(self) -> bool:
        """The released code stops training everything out of reach after the first task."""
        return self.heads == "own"

    def trains_heads(self, state: Pool) -> bool:
        """Always, except as the released code does."""
        return self.heads == "own" or state.samples is None
