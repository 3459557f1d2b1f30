"""Tangent features: the gradient of a network's output, sample by sample."""

from forgetless.tangent.features import TangentFeatures, tangent_features

__all__ = ["TangentFeatures", "tangent_features"]
