"""Averaged gradient episodic memory (Chaudhry et al. 2019)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, final

from torch import Tensor

from forgetless.linalg import project_halfspace
from forgetless.methods.base import FinishedTask, LoadSamples, LossGrad, SampleSet
from forgetless.methods.rehearsal import Rehearsal
from forgetless.support.errors import require
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
    kept = Pool
    memory: int = 100
    batch_size: int = 256
    heads: Literal["own", "released"] = "own"

    def __post_init__(self) -> None:
        whole(1).check("A-GEM's memory", self.memory)
        whole(1).check("A-GEM's batch_size", self.batch_size)
        require(self.heads in ("own", "released"), "A-GEM's heads", self.heads, "own or released")

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

    def trains_heads(self, state: Pool) -> bool:
        """Always, except as the released code did."""
        return self.heads == "own" or state.samples is None
