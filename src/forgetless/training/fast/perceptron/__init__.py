"""Perceptrons: gradients by hand, in few calls."""

from forgetless.training.fast.perceptron.chain import (
    Factors,
    Layer,
    Perceptron,
    is_chain,
    links,
    perceptron_of,
)

__all__ = ["Factors", "Layer", "Perceptron", "is_chain", "links", "perceptron_of"]
