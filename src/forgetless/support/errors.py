"""What forgetless raises when it cannot do what it was asked to."""


class ForgetlessError(Exception):
    """Base of every error that forgetless raises on purpose; its text is one clear sentence."""


class ConfigError(ForgetlessError, ValueError):
    """An argument that cannot be used: names the argument, what came, and what is accepted."""


class DataError(ForgetlessError, ValueError):
    """A dataset that is missing, damaged, tampered with, or not what it claims to be."""


class NoSamplesError(DataError):
    """A loader that gives nothing."""


class TraceError(ForgetlessError, ValueError):
    """A run's folder that cannot be read or must not be written over."""


class RankError(ForgetlessError, RuntimeError):
    """A process that trains the same model has ended or does not answer."""


class WorkerError(ForgetlessError, RuntimeError):
    """A process that was to train a run has died, and so have those that tried after it."""


class UnwritableError(TraceError, OSError):
    """A file of a run that the operating system does not let us write."""


class TrainingError(ForgetlessError, ArithmeticError):
    """Training broke down: a NaN or infinite gradient, with the seed, task and step."""


class MemoryShortageError(ForgetlessError, MemoryError):
    """What a run keeps does not fit: says how much was wanted, and what would fit."""


class ForgetlessWarning(UserWarning):
    """Something that the user should know and that stops nothing; one clear sentence."""


def require(satisfied: bool, argument: str, got: object, accepted: str) -> None:
    """Raise a ConfigError that names the argument, what came and what is accepted."""
    if not satisfied:
        raise ConfigError(f"{argument} must be {accepted}, not {got!r}")
