"""The options of a method that a search tries, the values to try, and what lies beyond them."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, fields
from typing import Any, final

from forgetless.methods import Method
from forgetless.support.validation import (
    FRACTION,
    SHARE,
    ConfigError,
    check_option,
    is_real,
    require,
    setting_name,
    unknown,
)
from forgetless.trace import INCIDENTAL
from forgetless.training.models import ModelOptions
from forgetless.training.settings import Training

Settings = Mapping[str, Any]  # of a trial: option → value
# Settings that do not change what is learned, or that decide how it is measured.
_NEVER = INCIDENTAL | {"evaluation_batch", "evaluate_every", "storage", "budget", "dtype"}
_ROUND = (1, 2, 3, 5)  # leading digits of the values beyond a grid


@final
@dataclass(frozen=True)
class Dimension:
    """An option that is searched.

    Arguments:
        name: of its setting.
        values: those to try, numbers in their order.
        field: of the option, which says what else it accepts.
    """

    name: str
    values: tuple[Any, ...]
    field: Field[Any]

    def __post_init__(self) -> None:
        argument = f"the grid of {self.name}"
        require(bool(self.values), argument, "nothing", "one or more values")
        for value in self.values:
            check_option(self.field, value, argument)
        distinct = len(set(map(repr, self.values))) == len(self.values)
        require(distinct, argument, list(self.values), "values that differ")
        if self.is_ordered:
            object.__setattr__(self, "values", tuple(sorted(self.values)))

    @property
    def is_ordered(self) -> bool:
        """Whether its values are numbers, of which there is a next one."""
        return len(self.values) > 1 and all(map(is_real, self.values))

    def accepts(self, value: Any) -> bool:
        """Whether the option may have this value."""
        try:
            check_option(self.field, value, self.name)
        except ConfigError:
            return False
        return True

    def beyond(self, values: Sequence[Any], *, up: bool) -> Any:
        """The next value after the largest or the smallest of some; None if there is none.

        The last two values say how far it is, by their ratio where that makes sense: for a share
        near one the ratio of what is missing to one, so that 0.9, 0.95, 0.98 leads to 0.99. It is
        rounded to a leading 1, 2, 3 or 5.
        """
        ordered = sorted(values, reverse=not up)
        before, last = ordered[-2:]
        shares = self.field.metadata.get("accepted") in (SHARE, FRACTION)
        if shares and (last >= 0.5 if up else last > 0.5):
            found = 1 - _next(1 - before, 1 - last)
        elif shares and before >= last:
            found = _next(min(before, 2 * last), last)
        else:
            found = _next(before, last)
        if all(isinstance(value, int) for value in values):
            found = round(found)
        else:
            found = float(f"{found:.12g}")
        further = found > last if up else found < last
        return found if further and self.accepts(found) else None


def _next(before: float, last: float) -> float:
    """The number that follows two, rounded where they are positive."""
    if before <= 0 or last <= 0:
        return last + (last - before)
    exact = last * last / before
    power = 10.0 ** math.floor(math.log10(exact))
    nice = min(
        (digit * power * scale for digit in _ROUND for scale in (1, 10)),
        key=lambda number: abs(math.log(number / exact)),
    )
    beyond = nice > last if last > before else nice < last
    return nice if beyond else float(f"{exact:.3g}")


@final
@dataclass(frozen=True)
class Candidate:
    """A method whose options are searched.

    Arguments:
        name: the method's.
        source: how it was named: the same, or "my_file.py:OWM".
        kind: its class.
        options: those of its options that were given, and that are not searched.
        space: the options that are.
    """

    name: str
    source: str
    kind: type[Method[Any]]
    options: Settings
    space: tuple[Dimension, ...]

    def parts(self, settings: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
        """The options of the method, with those that were given, and the settings of training."""
        known = options_of(self.kind)
        own = {name: value for name, value in settings.items() if name in known}
        return {**self.options, **own}, {n: v for n, v in settings.items() if n not in known}

    @property
    def count(self) -> int:
        """How many settings its grid has."""
        return math.prod(len(dimension.values) for dimension in self.space)


def options_of(kind: type[Method[Any]]) -> dict[str, Field[Any]]:
    """Setting → the field of the method that it sets."""
    made: Any = kind
    return {setting_name(f): f for f in fields(made)}


def searchable(kind: type[Method[Any]]) -> dict[str, Field[Any]]:
    """The options that can be searched: those of training, of the model and of the method."""
    common = {f.name: f for part in (Training, ModelOptions) for f in fields(part)}
    common = {name: f for name, f in common.items() if name not in _NEVER}
    return {**common, **options_of(kind)}


def space_of(
    kind: type[Method[Any]],
    grids: Mapping[str, Sequence[Any]],
    fixed: Iterable[str] = (),
) -> tuple[Dimension, ...]:
    """The options of a method that are searched.

    Arguments:
        kind: the method.
        grids: values to try by option, in place of those that the options declare (`search`).
        fixed: the options that were given a value; they are not searched, nor is one that takes the
            place of one of them.
    """
    known, fixed = searchable(kind), set(fixed)
    for name in grids:
        if name not in known:
            raise ConfigError(unknown(f"option of {kind.name}", name, known))
        if name in fixed:
            raise ConfigError(f"{name} has a value and a grid: give one of the two")
    found = []
    for name, option_field in known.items():
        declared = option_field.metadata.get("search", ())
        if name in fixed or kind.replaces.get(name) in fixed:
            declared = ()
        values = tuple(grids.get(name, declared))
        if values or name in grids:
            found.append(Dimension(name, values, option_field))
    return tuple(found)


def key(settings: Settings) -> str:
    """Settings as text, whatever their order; 1 and 1.0 are one value."""
    plain = {n: float(v) if is_real(v) else v for n, v in settings.items()}
    return json.dumps(plain, sort_keys=True, default=str)


def described(settings: Settings) -> str:
    """Settings for people, such as "lr 0.01, ewc strength 100"."""
    texts = (f"{name.replace('_', ' ')} {shown(value)}" for name, value in settings.items())
    return ", ".join(texts)


def shown(value: Any) -> str:
    """A value for people."""
    return f"{value:g}" if isinstance(value, float) else str(value)


Score = Callable[[Settings], float | None]  # −∞ for a setting that diverged; None if not tried
