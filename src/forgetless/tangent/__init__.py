"""Tangent features: the gradient of a network's output, sample by sample."""

from forgetless.tangent.arguments import chosen_names, refuse_mixed, tangent_features
from forgetless.tangent.chunks import Known
from forgetless.tangent.features import Batch, TangentFeatures, features_of
from forgetless.tangent.held import (
    bytes_by_parameter,
    held,
    held_bytes,
    joined,
    merged,
    nothing_held,
)
from forgetless.tangent.share import Share, shared_features
from forgetless.tangent.spectrum import principal_weights
from forgetless.tangent.stored import from_tensors, to_tensors
from forgetless.tangent.together import top_weights_of_each

__all__ = [
    "Batch",
    "Known",
    "Share",
    "TangentFeatures",
    "bytes_by_parameter",
    "chosen_names",
    "features_of",
    "from_tensors",
    "held",
    "held_bytes",
    "joined",
    "merged",
    "nothing_held",
    "principal_weights",
    "refuse_mixed",
    "shared_features",
    "tangent_features",
    "to_tensors",
    "top_weights_of_each",
]
