"""The figures of the report for papers: matplotlib, at the width of a column, as vectors."""

from forgetless.report.plots.accuracy import (
    accuracy_against_memory,
    accuracy_curves,
    accuracy_matrices,
    final_accuracy,
)
from forgetless.report.plots.analysis import (
    explained_variance,
    forecast_against_measured,
    kernel_change,
    overlap_maps,
    overlap_spectra,
)
from forgetless.report.plots.style import COLUMN, PAGE, save

__all__ = [
    "COLUMN",
    "PAGE",
    "accuracy_against_memory",
    "accuracy_curves",
    "accuracy_matrices",
    "explained_variance",
    "final_accuracy",
    "forecast_against_measured",
    "kernel_change",
    "overlap_maps",
    "overlap_spectra",
    "save",
]
