"""Why a run forgot: overlap, explained variance, kernel change and forecast, from its trace."""

from forgetless.analysis.analysis import Analysis, ForecastPoint, Images, Sample, Variance
from forgetless.analysis.cache import analysed, known_analysis
from forgetless.analysis.measure import analyse

__all__ = [
    "Analysis",
    "ForecastPoint",
    "Images",
    "Sample",
    "Variance",
    "analyse",
    "analysed",
    "known_analysis",
]
