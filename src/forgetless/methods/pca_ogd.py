"""PCA-OGD (the paper's algorithm 1): orthogonal to what a task's features have in common."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

from forgetless.methods.base import FinishedTask, View
from forgetless.methods.ogd import Orthogonal
from forgetless.subspace import Subspace
from forgetless.subspace.storage import Demand
from forgetless.support.validation import SHARE, option, whole


@final
@dataclass(frozen=True)
class PCAOGD(Orthogonal):
    """Steps are orthogonal to the top principal directions of each earlier task's tangent features.

    Where features have structure, a few directions hold most of their variance, so the same memory
    protects more than OGD's single samples.

    Arguments:
        components: directions stored of each task.
        samples: samples of the task whose features are computed.
        centred: subtract the mean feature first. The theory does not; the released code does.
        variance: if given, store as many directions as explain this share of the variance, in
            place of a fixed number.
    """

    name: ClassVar[str] = "pca-ogd"
    label: ClassVar[str] = "PCA-OGD"
    summary: ClassVar[str] = "PCA-OGD: steps orthogonal to the features' principal directions"
    family: ClassVar[str] = "projection"
    replaces: ClassVar[Mapping[str, str]] = {"variance": "memory"}
    components: int = option(
        100, "Principal directions stored of each task.", accepted=whole(1), setting="memory"
    )
    samples: int = option(
        3000, "Samples of each task whose features are computed.", accepted=whole(1)
    )
    centred: bool = option(False, "Subtract the mean feature first.")
    variance: float | None = option(
        None,
        "Store the directions that explain this share of the variance, in place of --memory.",
        accepted=SHARE,
    )

    @property
    def protected_by(self) -> str:
        """The number of directions, or their share of the variance."""
        return "components" if self.variance is None else "variance"

    def consolidate(self, state: Subspace, view: View, task: FinishedTask) -> Subspace:
        """Add the principal directions of the task's features."""
        features = view.features(task.draw(self.samples))
        wanted = self.components if self.variance is None else self.variance
        return state.add_principal(features, wanted, centred=self.centred)

    def demand(self, available: int | None = None) -> Demand:
        """The principal directions; for a share of variance, up to one for each sample."""
        samples = self.samples if available is None else min(self.samples, available)
        directions = samples if self.variance is not None else min(self.components, samples)
        return Demand(samples, directions, combined=True)
