"""Forecast of forgetting: what training on the next task will do to the earlier ones."""

from forgetless.theory.forecast.forecast import forecast
from forgetless.theory.forecast.outlook import TRUSTED, Forecast, Outlook, margins

__all__ = ["TRUSTED", "Forecast", "Outlook", "forecast", "margins"]
