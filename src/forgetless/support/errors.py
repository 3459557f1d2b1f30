"""The errors and the warning of forgetless."""

import sys
import warnings


class ForgetlessError(Exception):
    """Base of all errors that forgetless raises on purpose; the text is one clear sentence."""


class ConfigError(ForgetlessError, ValueError):
    """An invalid argument: names the argument, its value, and the accepted values."""


class DataError(ForgetlessError, ValueError):
    """A dataset that is missing, damaged or not the published one."""


class NoSamplesError(DataError):
    """A loader without samples."""


class TraceError(ForgetlessError, ValueError):
    """A run's folder that cannot be read or must not be overwritten."""


class RankError(ForgetlessError, RuntimeError):
    """Another process of the same training has ended or does not answer."""


class WorkerError(ForgetlessError, RuntimeError):
    """The processes that tried to train a run all died."""


class UnwritableError(TraceError, OSError):
    """A file of a run that the operating system refuses to write."""


class TrainingError(ForgetlessError, ArithmeticError):
    """Training diverged to NaN or infinity; names the seed, task and step."""


class MemoryShortageError(ForgetlessError, MemoryError):
    """Out of memory: says how much was needed and what would fit."""


class UserCodeError(ForgetlessError, RuntimeError):
    """An exception in a user's own code, in another process: file and line, then a traceback."""


class ForgetlessWarning(UserWarning):
    """A warning; one clear sentence."""


def warn_caller(message: str) -> None:
    """Warn at the user's line that led here, however deep inside forgetless and torch this is."""
    frame, level = sys._getframe(1), 2
    while frame.f_globals.get("__name__", "").partition(".")[0] in ("forgetless", "torch"):
        if frame.f_back is None:
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(message, ForgetlessWarning, stacklevel=level)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its kind if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


def require(satisfied: bool, argument: str, got: object, accepted: str) -> None:
    """Raise a ConfigError naming the argument, its value and the accepted values."""
    if not satisfied:
        raise ConfigError(f"{argument} must be {accepted}, not {got!r}")
