"""Tangent features: the gradient of a network's output, sample by sample."""

from forgetless.tangent.arguments import chosen_names, require_one_precision, tangent_features
from forgetless.tangent.evaluation import Batch, call_with, eval_mode, true_class
from forgetless.tangent.features import Known, TangentFeatures, features_of, top_weights_of_each
from forgetless.tangent.inputs import InputMoments, input_moments, layer_inputs, moment_shape
from forgetless.tangent.moments import (
    Moments,
    drawn_likelihood,
    kronecker_moments,
    mixed_likelihood,
    moment_shapes,
    probed,
)
from forgetless.tangent.spectrum import principal_weights
from forgetless.tangent.storage import (
    bytes_by_parameter,
    concatenated,
    empty_features,
    from_tensors,
    grown,
    sliced_features,
    stored,
    stored_bytes,
    to_tensors,
)

__all__ = [
    "Batch",
    "InputMoments",
    "Known",
    "Moments",
    "TangentFeatures",
    "bytes_by_parameter",
    "call_with",
    "chosen_names",
    "concatenated",
    "drawn_likelihood",
    "empty_features",
    "eval_mode",
    "features_of",
    "from_tensors",
    "grown",
    "input_moments",
    "kronecker_moments",
    "layer_inputs",
    "mixed_likelihood",
    "moment_shape",
    "moment_shapes",
    "principal_weights",
    "probed",
    "require_one_precision",
    "sliced_features",
    "stored",
    "stored_bytes",
    "tangent_features",
    "to_tensors",
    "top_weights_of_each",
    "true_class",
]
