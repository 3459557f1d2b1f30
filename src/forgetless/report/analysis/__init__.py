"""Why a run forgot: overlap, explained variance, kernel change and forecast, from its trace."""

from forgetless.report.analysis.analysis import Analysis, ForecastPoint, Images, Sample, Variance
from forgetless.report.analysis.measure import analyse, cached_analysis, known_analysis

__all__ = [
    "Analysis",
    "ForecastPoint",
    "Images",
    "Sample",
    "Variance",
    "analyse",
    "cached_analysis",
    "known_analysis",
]
