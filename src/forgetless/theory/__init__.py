"""Why networks forget: drift, the linearised learner, overlap, exact forgetting and its bounds."""

from forgetless.theory.drift import drift, model_drift, squared_drift, true_class
from forgetless.theory.forecasting import TRUSTED, Forecast, Prediction, forecast
from forgetless.theory.forgetting import (
    Bounds,
    Contribution,
    Forgetting,
    bounds,
    decompose,
    rotation,
)
from forgetless.theory.grams import (
    coordinates,
    gram_grid,
    gram_overlap,
    operator_overlap,
    unprotected_share,
)
from forgetless.theory.learner import Descent, Learned, LinearTask, learn
from forgetless.theory.linearised import TangentModel
from forgetless.theory.projections import (
    ComponentProjection,
    GradientProjection,
    NoProjection,
    Projection,
    SampleProjection,
    remembered,
)
from forgetless.theory.structure import (
    explained_at,
    explained_variance,
    kernel_alignment,
    kernel_change,
)
from forgetless.theory.svd import (
    FLOAT32_RTOL,
    RTOL,
    Factors,
    Protected,
    factors,
    overlap,
    overlap_spectrum,
    principal_angles,
    projected,
)

__all__ = [
    "FLOAT32_RTOL",
    "RTOL",
    "TRUSTED",
    "Bounds",
    "ComponentProjection",
    "Contribution",
    "Descent",
    "Factors",
    "Forecast",
    "Forgetting",
    "GradientProjection",
    "Learned",
    "LinearTask",
    "NoProjection",
    "Prediction",
    "Projection",
    "Protected",
    "SampleProjection",
    "TangentModel",
    "bounds",
    "coordinates",
    "decompose",
    "drift",
    "explained_at",
    "explained_variance",
    "factors",
    "forecast",
    "gram_grid",
    "gram_overlap",
    "kernel_alignment",
    "kernel_change",
    "learn",
    "model_drift",
    "operator_overlap",
    "overlap",
    "overlap_spectrum",
    "principal_angles",
    "projected",
    "remembered",
    "rotation",
    "squared_drift",
    "true_class",
    "unprotected_share",
]
