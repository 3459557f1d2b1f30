"""A method that must be rejected."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from forgetless import Method


@dataclass(frozen=True)
class InPlace(Method):
    """Adds up gradients where its state lies."""

    name: ClassVar[str] = "in place"
    acts_on: ClassVar[str] = "gradient"
    needs_model: ClassVar[bool] = False

    def init(self, view):
        return {"sum": torch.zeros_like(view.theta)}

    def update(self, g, state, view):
        state["sum"] += g
        return g, state

    def consolidate(self, state, view, task):
        return state
