"""Stored directions of layers' inputs: what GPM, SGP and Adam-NSCL have in common."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from forgetless.methods.base import FinishedTask, View
from forgetless.methods.cost import Cost, TaskProbe, cost_of_inputs
from forgetless.methods.ogd import Orthogonal
from forgetless.subspace import InputSubspace
from forgetless.support.validation import (
    SHARE,
    Accepted,
    ConfigError,
    option,
    real,
    require,
    whole,
)
from forgetless.tangent import InputMoments


@dataclass(frozen=True, kw_only=True)
class InputProjection(Orthogonal, ABC):
    """A method whose steps leave alone directions of each layer's inputs on earlier tasks.

    A bias is a column of its layer's weight, with a one as its input. Linear layers and
    convolutions have such inputs. Gradients are not needed, so samples may interact, as in batch
    norm without running statistics.

    Arguments:
        samples: samples of each task whose layer inputs are used.
        others: what becomes of the parameters that a task used in another way (norms, embeddings)
            once it is over: "freeze" stops them, "train" leaves them without protection.
    """

    samples: int = option(
        3000, "Samples of each task whose layer inputs are used.", accepted=whole(1)
    )
    others: Literal["freeze", "train"] = option(
        "freeze",
        "Norms, embeddings and other parameters without layer inputs, after the first task.",
        choices=("freeze", "train"),
        setting="without_inputs",
    )

    all_vectors: ClassVar[bool] = False  # whether those that are not protected are stored too

    def cost(self, probe: TaskProbe) -> Cost | None:
        """One to all directions of each layer."""
        return cost_of_inputs(probe, self.samples, all_vectors=self.all_vectors)

    def init(self, view: View) -> InputSubspace:
        """No directions yet."""
        return InputSubspace.empty(view.layout, view.theta, view.storage)

    def consolidate(self, state: InputSubspace, view: View, task: FinishedTask) -> InputSubspace:
        """Add the directions of the task's inputs."""
        moments = view.input_moments(task.draw(self.samples))
        if not moments.inputs:
            raise ConfigError(
                f"{self.label} protects the inputs of linear and convolutional layers, and the "
                "task used no protected weight of one"
            )
        new = self.extended(state, moments, view)
        return new if self.others == "train" else new.freezing(moments.others)

    @abstractmethod
    def extended(self, state: InputSubspace, moments: InputMoments, view: View) -> InputSubspace:
        """The state with the inputs of one more task."""


def _shares(text: str) -> list[float]:
    """The numbers of a text that separates them by commas."""
    return [float(part) for part in text.split(",")]


def _are_shares(text: object) -> bool:
    with suppress(ValueError):
        return isinstance(text, str) and all(SHARE.fits(share) for share in _shares(text))
    return False


@dataclass(frozen=True, kw_only=True)
class SpannedInputs(InputProjection, ABC):
    """A method that adds the directions that hold a share of each layer's input energy.

    Of a task's inputs R (d, N) the part outside the directions so far is decomposed,
    R − Q Qᵀ R = U Σ Vᵀ, and the fewest columns of U are added with which
    ‖Qᵀ R‖² + Σ_j σ_j² ≥ ε ‖R‖².

    Arguments:
        threshold: ε.
        layer_thresholds: an ε for each layer in the order in which they run, as text.
        growth: added to ε with every further task.
    """

    replaces: ClassVar[Mapping[str, str]] = {"gpm_layer_thresholds": "gpm_threshold"}
    threshold: float = option(
        0.95,
        "Share of each layer's input energy that is protected.",
        accepted=SHARE,
        setting="gpm_threshold",
        search=(0.9, 0.95, 0.97, 0.99),
    )
    layer_thresholds: str | None = option(
        None,
        "A share for each layer, first to last (comma-separated), in place of --gpm-threshold.",
        accepted=Accepted(_are_shares, "shares in (0, 1), separated by commas"),
        setting="gpm_layer_thresholds",
    )
    growth: float = option(
        0.0,
        "Added to the thresholds with every further task.",
        accepted=real(0),
        setting="gpm_growth",
    )

    def extended(self, state: InputSubspace, moments: InputMoments, view: View) -> InputSubspace:
        """With the directions that hold a share of the energy."""
        return state.spanning(
            moments, view.theta, self._wanted(moments.inputs, view.task), self.scales
        )

    def _wanted(self, layers: Collection[str], task: int) -> dict[str, float]:
        """Weight → ε in a task."""
        given = [self.threshold] * len(layers)
        if self.layer_thresholds is not None:
            given = _shares(self.layer_thresholds)
        accepted = f"one share for each of the {len(layers)} layers: {', '.join(layers)}"
        require(len(given) == len(layers), "layer_thresholds", self.layer_thresholds, accepted)
        return {
            name: min(1.0, share + self.growth * task)
            for name, share in zip(layers, given, strict=True)
        }

    @abstractmethod
    def scales(self, old: Tensor, new: Tensor, before: Tensor) -> Tensor:
        """λ of all directions.

        Arguments:
            old: σ of the task's inputs along the directions so far, (k,).
            new: σ along the new ones, (l,).
            before: λ of the directions so far, (k,).
        """
