"""The errors and the warning of forgetless."""


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
    """An exception in a user's own code, from another process: names file and line."""


class ForgetlessWarning(UserWarning):
    """A warning; one clear sentence."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its kind if it has none."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def require(satisfied: bool, argument: str, got: object, accepted: str) -> None:
    """Raise a ConfigError naming the argument, its value and the accepted values."""
    if not satisfied:
        raise ConfigError(f"{argument} must be {accepted}, not {got!r}")
