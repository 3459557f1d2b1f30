"""Tangent features: the gradient of a network's output, sample by sample."""

from forgetless.tangent.arguments import tangent_features
from forgetless.tangent.features import TangentFeatures, features_of

__all__ = ["TangentFeatures", "features_of", "tangent_features"]
