"""PCA-OGD (the paper's algorithm 1): orthogonal to what a task's features have in common."""

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from forgetless.methods.base import FinishedTask
from forgetless.methods.orthogonal import Orthogonal
from forgetless.subspace import Subspace
from forgetless.subspace.footprint import Demand
from forgetless.support.errors import require
from forgetless.support.validation import SHARE, whole


@final
@dataclass(frozen=True)
class PCAOGD(Orthogonal):
    """Steps are orthogonal to the top principal directions of each earlier task's tangent features.

    Where features have structure, a few directions hold most of their variance, so the same memory
    protects more than OGD's single samples do.

    Arguments:
        components: directions kept of each task (an int), or the share of the variance that they
            explain (a float in (0, 1)).
        samples: samples of the task whose features are looked at.
        centred: take the mean feature out first. The theory does not; the released code does.
    """

    name: ClassVar[str] = "pca-ogd"
    components: int | float = 100
    samples: int = 3000
    centred: bool = False

    def __post_init__(self) -> None:
        fits = whole(1).fits(self.components) or SHARE.fits(self.components)
        accepted = f"{whole(1).words} or {SHARE.words}"
        require(fits, "PCA-OGD's components", self.components, accepted)
        whole(1).check("PCA-OGD's samples", self.samples)

    def consolidate(self, state: Subspace, theta: Tensor, task: FinishedTask) -> Subspace:
        """Add the principal directions of the task's features."""
        features = task.features(task.draw(self.samples))
        return state.add_principal(features, self.components, centred=self.centred)

    def demand(self, available: int | None = None) -> Demand:
        """The principal directions; for a share of variance, up to one for each sample."""
        samples = self.samples if available is None else min(self.samples, available)
        by_share = not isinstance(self.components, int)
        directions = samples if by_share else min(int(self.components), samples)
        return Demand(samples, directions, combined=True)
