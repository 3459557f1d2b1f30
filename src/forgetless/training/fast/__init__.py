"""Faster ways to take the same steps. A reader can skip this folder: everything works without it.

`Network` uses `perceptron_of`: logits and gradients of a plain perceptron by hand, or None.
`Learner` uses `Recorder`: on a GPU several steps at once as one CUDA graph, or none.
"""

from forgetless.training.fast.perceptron import perceptron_of
from forgetless.training.fast.recording import Recorder

__all__ = ["Recorder", "perceptron_of"]
