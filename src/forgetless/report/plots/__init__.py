"""The figures of the report for papers: matplotlib, at the width of a column, as vectors."""

from forgetless.report.plots.looks import COLUMN, PAGE, save
from forgetless.report.plots.what import (
    accuracy_against_memory,
    accuracy_courses,
    accuracy_matrices,
    final_accuracy,
)
from forgetless.report.plots.why import (
    explained_variance,
    forecast_against_measured,
    kernel_change,
    overlap_maps,
    overlap_spectra,
)

__all__ = [
    "COLUMN",
    "PAGE",
    "accuracy_against_memory",
    "accuracy_courses",
    "accuracy_matrices",
    "explained_variance",
    "final_accuracy",
    "forecast_against_measured",
    "kernel_change",
    "overlap_maps",
    "overlap_spectra",
    "save",
]
