"""Orthogonal gradient descent (Farajtabar et al. 2020), and what methods like it have in common."""

from abc import ABC
from dataclasses import dataclass
from typing import Any, ClassVar, final

from torch import Tensor

from forgetless.methods.base import FinishedTask, Method, View
from forgetless.subspace import DenseSubspace, Directions, FactoredSubspace, Storage, Subspace
from forgetless.subspace.storage import Demand
from forgetless.support.validation import option, whole


def empty_subspace(theta: Tensor, storage: Storage) -> Subspace:
    """No directions yet, for weights theta (S, p)."""
    if storage.kind == "factored":
        return FactoredSubspace.empty(theta, storage)
    return DenseSubspace.empty(theta, storage)


class Orthogonal(Method[Any], ABC):
    """Steps are orthogonal to stored directions: g̃ = (I − Vᵀ V) g.

    The state is `Directions`: the span of tangent features, or with an `init` of your own a class
    of yours. Drivers use more of it than `project_out`, so `update` cannot be overridden; a method
    that does something else derives from `Method`.
    """

    acts_on = "update"
    keeps_directions: ClassVar[bool] = True
    needs_model: ClassVar[bool] = False
    idle_before_first_task: ClassVar[bool] = True
    recordable: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.keeps_directions and cls.update is not Orthogonal.update:
            raise TypeError(
                f"{cls.__name__} overrides `update`, and a method that keeps directions must "
                "project them out and do nothing else: inherit it, or set keeps_directions = False"
            )

    def init(self, view: View) -> Directions:
        """No directions yet."""
        return empty_subspace(view.theta, view.storage)

    def update(self, g: Tensor, state: Directions, view: View) -> tuple[Tensor, Directions]:
        """Project out the stored directions."""
        return state.project_out(g), state


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
    family: ClassVar[str] = "projection"
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
