"""Methods that keep steps orthogonal to stored directions, such as OGD and PCA-OGD."""

from abc import ABC
from typing import Any, ClassVar

from torch import Tensor

from forgetless.methods.base import Method
from forgetless.methods.view import View
from forgetless.subspace import Directions, empty_subspace


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
