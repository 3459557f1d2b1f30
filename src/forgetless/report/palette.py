"""Colours, dashes and markers of methods: the same in figures, on the report page, in the paper."""

from collections.abc import Sequence

from forgetless.methods import METHODS

# A colour per method in the order of METHODS, for white and for dark paper. Chosen by search: under
# normal vision and each kind of colour blindness any two differ on a thin line.
LIGHT = (
    "#1a1a1a", "#999999", "#e69f00", "#2e9e5b", "#3fb2ea", "#b04fa8", "#b3001b", "#004c99",
    "#00737d", "#ff5f74", "#8860fe", "#6b285a", "#7901d9", "#f70000",
)  # fmt: skip
DARK = (
    "#f5f5f5", "#7d7d7d", "#ffd166", "#45c07a", "#a6e3ff", "#e08fd8", "#e8402f", "#2f7fe0",
    "#5ddcc5", "#f253ab", "#3234ff", "#a02a59", "#9c4aa8", "#ff9036",
)  # fmt: skip
# The same places as matplotlib and as Observable Plot draw them.
_MARKERS = ("o", "X", "s", "^", "v", "P", "D", "*", "h", ">", "<", "d", "p", "8")
_SYMBOLS = (
    "circle", "times", "square", "triangle", "wye", "cross", "diamond", "star",
    "hexagon", "asterisk", "plus", "diamond2", "square2", "triangle2",
)  # fmt: skip
_DASHES: tuple[tuple[float, ...], ...] = ((), (5, 3), (2, 3))


def places(methods: Sequence[str]) -> list[int]:
    """For each of several entries a place in the palette.

    The first entry of a method has the place of the method in METHODS. Other settings of it, and
    methods from elsewhere, have the places of methods that are absent; after these, the same
    colours with dashes.
    """
    known = list(METHODS)[: len(LIGHT)]
    found: list[int | None] = [
        known.index(method) if method in known and method not in methods[:number] else None
        for number, method in enumerate(methods)
    ]
    free = [place for place in reversed(range(len(LIGHT))) if place not in found]
    free += range(len(LIGHT), len(LIGHT) + len(methods))
    return [free.pop(0) if place is None else place for place in found]


def colour(place: int) -> str:
    """The colour of a place."""
    return LIGHT[place % len(LIGHT)]


def marker(place: int) -> str:
    """The marker of a place, as matplotlib names it."""
    return _MARKERS[place % len(_MARKERS)]


def symbol(place: int) -> str:
    """The same on the report page, as Observable Plot names it."""
    return _SYMBOLS[place % len(_SYMBOLS)]


def dash(place: int) -> tuple[float, ...]:
    """The lengths of dashes and gaps of a place's line, in points; empty for a solid line."""
    return _DASHES[place // len(LIGHT) % len(_DASHES)]


def method_colour(method: str) -> str:
    """The colour of one of METHODS."""
    return colour(places([method])[0])
