"""PCA-OGD (the paper's algorithm 1): orthogonal to what a task's features have in common."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from forgetless.errors import require
from forgetless.methods.base import FinishedTask, LoadSamples, LossGrad, Method
from forgetless.subspace import DENSE, Storage, Subspace, empty_subspace, restored_subspace


@final
@dataclass(frozen=True)
class PCAOGD(Method[Subspace]):
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
        enough = self.components > 0 if isinstance(self.components, float) else self.components >= 1
        share = not isinstance(self.components, float) or self.components < 1
        accepted = "a count of at least 1 or a share in (0, 1)"
        require(enough and share, "PCA-OGD's components", self.components, accepted)
        require(self.samples >= 1, "PCA-OGD's samples", self.samples, "at least 1")

    def init(self, theta: Tensor, storage: Storage = DENSE) -> Subspace:
        """No directions yet."""
        return empty_subspace(theta, storage)

    def restore(
        self,
        of_seeds: Sequence[Mapping[str, Tensor]],
        theta: Tensor,
        storage: Storage,
        load: LoadSamples,
    ) -> Subspace:
        """What was remembered."""
        return restored_subspace(of_seeds, theta, storage)

    def update(self, g: Tensor, state: Subspace, theta: Tensor, loss_grad: LossGrad) -> Tensor:
        """Project out the remembered directions."""
        return state.project_out(g)

    def consolidate(self, state: Subspace, theta: Tensor, task: FinishedTask) -> Subspace:
        """Add the principal directions of the task's features."""
        features = task.features(task.draw(self.samples))
        return state.add_principal(features, self.components, centred=self.centred)
