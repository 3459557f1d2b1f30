"""Adam-NSCL (Wang, Li, Sun and Xu 2021): training in the null space of the features' covariance."""

from dataclasses import dataclass
from typing import ClassVar, final

from forgetless.methods.base import View
from forgetless.methods.input_projection import InputProjection
from forgetless.subspace import InputSubspace
from forgetless.support.validation import option, real
from forgetless.tangent import InputMoments


@final
@dataclass(frozen=True, kw_only=True)
class AdamNSCL(InputProjection):
    """Steps of each layer stay in the approximate null space of its inputs on earlier tasks.

    Of the uncentred covariance of a layer's inputs, averaged over the tasks, the eigenvectors with
    eigenvalues above a · λ_min span what is protected: ΔW ← ΔW − ΔW Q Qᵀ. λ_min is the smallest
    eigenvalue that is not rounding; directions without any input are free.

    The published method is this with Adam. Its code also divides the projector by its Frobenius
    norm, which shortens every step; here it is a projection.

    Arguments:
        ratio: a.
    """

    name: ClassVar[str] = "adam-nscl"
    label: ClassVar[str] = "Adam-NSCL"
    summary: ClassVar[str] = "steps in the null space of the covariance of layers' inputs"
    family: ClassVar[str] = "projection"
    all_vectors: ClassVar[bool] = True
    ratio: float = option(
        10.0,
        "Eigenvalues up to this many times the smallest are free.",
        accepted=real(1),
        setting="nscl_ratio",
        search=(3.0, 10.0, 30.0, 100.0),
    )

    def extended(self, state: InputSubspace, moments: InputMoments, view: View) -> InputSubspace:
        """With the covariance averaged over one more task."""
        return state.above(moments, view.theta, self.ratio)
