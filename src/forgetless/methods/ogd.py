"""Orthogonal gradient descent (Farajtabar et al. 2020)."""

from dataclasses import dataclass
from typing import ClassVar, final

from forgetless.methods.orthogonal import Orthogonal
from forgetless.methods.view import FinishedTask, View
from forgetless.subspace import Subspace
from forgetless.subspace.footprint import Demand
from forgetless.support.options import option, whole


@final
@dataclass(frozen=True)
class OGD(Orthogonal):
    """Steps are orthogonal to the tangent features of samples of earlier tasks: g̃ = (I − Vᵀ V) g.

    To first order the true-class outputs of those samples then stay as they were.

    Arguments:
        samples: samples of each task whose features are kept.
    """

    name: ClassVar[str] = "ogd"
    label: ClassVar[str] = "OGD"
    summary: ClassVar[str] = "orthogonal gradient descent: steps orthogonal to samples' features"
    protected_by = "samples"
    samples: int = option(
        100, "Samples of each task whose features are stored.", accepted=whole(1), setting="memory"
    )

    def consolidate(self, state: Subspace, view: View, task: FinishedTask) -> Subspace:
        """Add the features of some samples of the task."""
        features = view.features(task.draw(self.samples))
        return state.add_samples(features)

    def demand(self, available: int | None = None) -> Demand:
        """One direction for each sample."""
        count = self.samples if available is None else min(self.samples, available)
        return Demand(count, count, combined=False)
