"""Perceptrons on a GPU: gradients by hand, in few kernels."""

from forgetless.perceptron.chain import Layer, Perceptron, is_chain, perceptron_of

__all__ = ["Layer", "Perceptron", "is_chain", "perceptron_of"]
