"""Numbers of bytes, as people write and read them."""

from contextlib import suppress

from forgetless.support.errors import require

AUTO = "auto"  # in the place of a number of bytes: as many as there is room for
_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def in_words(count: float) -> str:
    """Bytes as one reads them."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def parsed_bytes(budget: str | int) -> int:
    """A number of bytes from "512MB", "1.5 GiB" or an integer."""
    accepted = "a number of bytes such as '512MB', '1.5GiB' or 10_000_000"
    count = -1.0
    if isinstance(budget, str):
        text = budget.strip().lower().replace(" ", "")
        digits = text.rstrip("abcdefghijklmnopqrstuvwxyz")
        with suppress(ValueError, KeyError):
            count = float(digits) * _UNITS[text[len(digits) :] or "b"]
    elif isinstance(budget, int | float) and not isinstance(budget, bool):
        count = float(budget)
    require(1 <= count < float("inf"), "budget", budget, accepted)
    return int(count)
