"""Which numbers an argument accepts, and the words for them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, final

from forgetless.support.errors import require


def is_whole(value: object) -> bool:
    """Whether a value is a whole number, of Python or of NumPy."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_real(value: object) -> bool:
    """Whether a value is a number, neither NaN nor infinite."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        return False


@final
@dataclass(frozen=True)
class Accepted:
    """The values that an argument may have.

    Arguments:
        fits: tells whether a value is one of them.
        words: what they are called.
    """

    fits: Callable[[Any], bool]
    words: str

    def check(self, argument: str, value: object) -> None:
        """Refuse a value that is none of them."""
        require(self.fits(value), argument, value, self.words)


def whole(least: int) -> Accepted:
    """Whole numbers from one on."""
    return Accepted(
        lambda value: is_whole(value) and value >= least, f"a whole number of at least {least}"
    )


def real(least: float) -> Accepted:
    """Finite numbers from one on."""
    return Accepted(
        lambda value: is_real(value) and value >= least, f"a finite number of at least {least:g}"
    )


FINITE = Accepted(is_real, "a finite number")
POSITIVE = Accepted(lambda value: is_real(value) and value > 0, "a positive number")
SHARE = Accepted(lambda value: is_real(value) and 0 < value < 1, "a share in (0, 1)")
