"""The looks of entries in figures and on the page: a hue for a family of methods, tones, dashes.

A line is known by its colour and its dashes, a point by its colour and its shape. Families of
methods have a hue each, and within it three tones, from dark to bright on white paper; a family's
first three looks are solid lines in these, the next ones the same with dashes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, final

from forgetless.methods import METHODS, Method

# Family → its tones on white and on dark paper. Chosen by search within a range of hues, so that
# any two differ on a thin line under normal vision and each kind of colour blindness.
_TONES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "reference": (("#1a1a1a", "#949494"), ("#f5f5f5", "#808890")),
    "projection": (("#a59cfc", "#4749a9", "#805af9"), ("#5752ca", "#94a0fb", "#836cfe")),
    "penalty": (("#a21919", "#f1800b", "#be591e"), ("#955328", "#f08d73", "#ad7f29")),
    "replay": (("#429563", "#75bb6f", "#1e6b4c"), ("#0ad4a9", "#b7f672", "#076f64")),
    "other": (("#773b5c", "#b486b6", "#995d89"), ("#d72975", "#f6b9ea", "#987eb6")),
}
LIGHT, DARK = (tuple(c for tones in _TONES.values() for c in tones[paper]) for paper in (0, 1))
# Places of colours for things that are no methods: another hue for each of the first four.
DISTINCT = (3, 6, 8, 11, 2, 5, 10, 12, 4, 7, 9, 13)
_DASHES: tuple[tuple[float, ...], ...] = ((), (6, 3), (1.5, 2.5), (8, 3, 1.5, 3))
# The same shapes as matplotlib and as Observable Plot draw them.
_MARKERS = ("o", "X", "s", "^", "v", "P", "D", "*", "h", ">", "<", "d", "p", "8")
_SYMBOLS = (
    "circle", "times", "square", "triangle", "wye", "cross", "diamond", "star",
    "hexagon", "asterisk", "plus", "diamond2", "square2", "triangle2",
)  # fmt: skip


@final
@dataclass(frozen=True)
class Look:
    """The look of an entry.

    Attributes:
        place: of its colour in LIGHT and DARK.
        dashed: which of the dash patterns its line has; 0 for a solid line.
    """

    place: int
    dashed: int = 0

    @property
    def colour(self) -> str:
        """The colour on white paper."""
        return LIGHT[self.place]

    @property
    def dash(self) -> tuple[float, ...]:
        """The lengths of dashes and gaps of its line, in points; empty for a solid line."""
        return _DASHES[self.dashed]

    @property
    def marker(self) -> str:
        """Its shape, as matplotlib names it."""
        return _MARKERS[self._shape]

    @property
    def symbol(self) -> str:
        """The same on the page, as Observable Plot names it."""
        return _SYMBOLS[self._shape]

    @property
    def _shape(self) -> int:
        # 5 and 14 have no common divisor, so solid lines and those of one colour differ in shape.
        return (self.place + 5 * self.dashed) % len(_MARKERS)


@cache
def _family_looks(family: str) -> tuple[Look, ...]:
    """The looks of a family, solid lines first."""
    start = 0
    for name, (tones, _) in _TONES.items():
        if name == family:
            break
        start += len(tones)
    places = range(start, start + len(tones))
    return tuple(Look(place, dashed) for dashed in range(len(_DASHES)) for place in places)


def _free(family: str, taken: set[Look]) -> Look:
    """The first look of a family that is not taken, or of another one if all are."""
    others = [name for name in reversed(_TONES) if name != family]
    candidates = [look for name in (family, *others) for look in _family_looks(name)]
    return next((look for look in candidates if look not in taken), candidates[0])


def family_of(kind: type[Method[Any]]) -> str:
    """What a method declares; a reference if it protects nothing or keeps all data."""
    if kind.family in _TONES:
        return kind.family
    return "reference" if kind.keeps_all_data or not kind.protects else "other"


def looks(methods: Sequence[str], families: Sequence[str] = ()) -> list[Look]:
    """The look of each of several entries.

    The first entry of a method has the method's own look, which depends on no other entry. Other
    settings of it, and methods from elsewhere, have looks of their family that are free.

    Arguments:
        methods: their names.
        families: of those that are not in METHODS; "" or missing is "other".
    """
    own = _own_looks()
    taken = {own[method] for method in methods if method in own}
    found: list[Look] = []
    for number, method in enumerate(methods):
        if method in own and method not in methods[:number]:
            found.append(own[method])
            continue
        declared = families[number] if number < len(families) else ""
        family = family_of(METHODS[method]) if method in METHODS else declared
        found.append(_free(family if family in _TONES else "other", taken))
        taken.add(found[-1])
    return found


def _own_looks() -> dict[str, Look]:
    """The look of each of METHODS, by their order in their families."""
    found: dict[str, Look] = {}
    for name, kind in METHODS.items():
        found[name] = _free(family_of(kind), {*found.values()})
    return found


def method_colour(method: str) -> str:
    """The colour of one of METHODS."""
    return looks([method])[0].colour
