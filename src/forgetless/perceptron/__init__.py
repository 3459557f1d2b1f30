"""Perceptrons: gradients by hand, in few calls."""

from forgetless.perceptron.chain import Layer, Perceptron, is_chain, links, perceptron_of

__all__ = ["Layer", "Perceptron", "is_chain", "links", "perceptron_of"]
