"""Why networks forget: drift, the linearised learner, overlap, exact forgetting and its bounds."""

from forgetless.theory.bounds import Bounds, bounds
from forgetless.theory.descent import Descent
from forgetless.theory.drift import drift, model_drift, squared_drift, true_class
from forgetless.theory.factors import RTOL, Factors, factors
from forgetless.theory.forecasting import TRUSTED, Forecast, Outlook, forecast
from forgetless.theory.forgetting import Contribution, Forgetting, decompose, rotation
from forgetless.theory.grams import (
    component_memory,
    coordinates,
    gradient_memory,
    gram_grid,
    gram_overlap,
    operator_overlap,
    sample_memory,
)
from forgetless.theory.learner import Learned, LinearTask, learn
from forgetless.theory.linearised import TangentModel
from forgetless.theory.overlap import (
    learned_overlap,
    overlap,
    overlap_spectrum,
    principal_angles,
)
from forgetless.theory.projections import (
    ComponentProjection,
    GradientProjection,
    NoProjection,
    Projection,
    SampleProjection,
    remembered,
)
from forgetless.theory.structure import (
    OverlapDrop,
    drop_against_overlap,
    explained_at,
    explained_variance,
    kernel_alignment,
    kernel_change,
)

__all__ = [
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
    "Outlook",
    "OverlapDrop",
    "Projection",
    "SampleProjection",
    "TangentModel",
    "bounds",
    "component_memory",
    "coordinates",
    "decompose",
    "drift",
    "drop_against_overlap",
    "explained_at",
    "explained_variance",
    "factors",
    "forecast",
    "gradient_memory",
    "gram_grid",
    "gram_overlap",
    "kernel_alignment",
    "kernel_change",
    "learn",
    "learned_overlap",
    "model_drift",
    "operator_overlap",
    "overlap",
    "overlap_spectrum",
    "principal_angles",
    "remembered",
    "rotation",
    "sample_memory",
    "squared_drift",
    "true_class",
]
