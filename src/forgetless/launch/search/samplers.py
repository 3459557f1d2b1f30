"""Which settings to try next: all of a grid and what lies beyond it, or what Optuna proposes.

A sampler is asked in rounds, and its answer depends on the scores so far alone. A search that was
interrupted asks again from the first round on, and trains what has no score yet.
"""

import math
from collections.abc import Iterator
from importlib import import_module
from itertools import product
from typing import Any, Protocol, final

from forgetless.launch.search.space import Dimension, Score, Settings, described, key
from forgetless.support.validation import ConfigError, require

SAMPLERS = ("grid", "tpe")
_MOST_ROUNDS = 20  # beyond the first grid
_TOGETHER = 5  # trials that TPE proposes at once, whatever number of jobs there is
_DIGITS = 3  # of the values that it proposes


class SettingsSampler(Protocol):
    """Proposes settings in rounds."""

    @property
    def count(self) -> int:
        """How many settings it proposes at least."""
        ...

    def rounds(self, score: Score) -> Iterator[list[Settings]]:
        """Settings to try; `score` has those of the rounds before."""
        ...

    def limits(self, settings: Settings) -> list[str]:
        """What about the best settings lies at the end of what was tried, in words."""
        ...


def best_of(tried: list[Settings], score: Score) -> Settings | None:
    """The settings with the highest score, the first of several; None if all diverged."""
    scores = [score(settings) for settings in tried]
    known = [(s, n) for n, s in enumerate(scores) if s is not None and s > -math.inf]
    return tried[max(known, key=lambda found: (found[0], -found[1]))[1]] if known else None


@final
class Grid:
    """All combinations of the values; then, if it extends, on around the best.

    Extending, it tries the next smaller and larger value of each option of the best settings, of
    which one beyond the grid is new, until these were all tried.

    Arguments:
        space: the options and their values.
        extend: go on.
    """

    def __init__(self, space: tuple[Dimension, ...], *, extend: bool = False) -> None:
        self._space, self._extend = space, extend
        self._values = {d.name: list(d.values) for d in space}
        names = [d.name for d in space]
        self._tried = [dict(zip(names, values)) for values in product(*(d.values for d in space))]

    @property
    def count(self) -> int:
        return len(self._tried)

    def rounds(self, score: Score) -> Iterator[list[Settings]]:
        yield list(self._tried)
        for _ in range(_MOST_ROUNDS if self._extend else 0):
            best = best_of([*self._tried], score)
            new = [] if best is None else self._untried_neighbours(best)
            if not new:
                return
            self._tried += new
            yield list(new)

    def _untried_neighbours(self, best: Settings) -> list[dict[str, Any]]:
        known = set(map(key, self._tried))
        found = []
        for dimension in (d for d in self._space if d.is_ordered):
            values = self._values[dimension.name]
            for up in (False, True):
                place = values.index(best[dimension.name]) + (1 if up else -1)
                value = values[place] if 0 <= place < len(values) else None
                if value is None:
                    value = dimension.beyond(values, up=up)
                    if value is None:
                        continue
                    values.insert(len(values) if up else 0, value)
                found.append({**best, dimension.name: value})
        return [settings for settings in found if key(settings) not in known]

    def limits(self, settings: Settings) -> list[str]:
        found = []
        for dimension in (d for d in self._space if d.is_ordered):
            values, value = self._values[dimension.name], settings[dimension.name]
            for up, end, words in ((False, 0, "smallest"), (True, -1, "largest")):
                at_end = value == values[end]
                if at_end and dimension.beyond(values, up=up) is not None:
                    found.append(f"{described({dimension.name: value})} is the {words} value tried")
        return found


@final
class TPE:
    """Tree-structured Parzen estimators (Bergstra et al. 2011), by Optuna.

    Numbers are drawn between the least and the greatest of their values, on a logarithmic scale
    where these are positive; other values as they are listed.

    Arguments:
        space: the options and their values.
        trials: how many settings to try.
        seed: of what it draws.
    """

    def __init__(self, space: tuple[Dimension, ...], trials: int, seed: int = 0) -> None:
        require(trials >= 1, "trials", trials, "a number of settings to try, at least 1")
        try:
            self._optuna: Any = import_module("optuna")
        except ImportError as error:
            raise ConfigError(
                "the sampler tpe needs Optuna: pip install 'forgetless[optuna]'"
            ) from error
        self._space, self._trials, self._seed = space, trials, seed

    @property
    def count(self) -> int:
        return self._trials if self._space else 1

    def rounds(self, score: Score) -> Iterator[list[Settings]]:
        verbosity = self._optuna.logging.get_verbosity()
        sampler = self._optuna.samplers.TPESampler(seed=self._seed)
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        study = self._optuna.create_study(direction="maximize", sampler=sampler)
        try:
            for start in range(0, self.count, _TOGETHER):
                asked = [study.ask() for _ in range(min(_TOGETHER, self.count - start))]
                settings = [self._proposed(trial) for trial in asked]
                yield [*settings]
                for trial, proposed in zip(asked, settings):
                    found = score(proposed)
                    study.tell(trial, 0.0 if found is None or found == -math.inf else found)
        finally:
            self._optuna.logging.set_verbosity(verbosity)

    def _proposed(self, trial: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for dimension in self._space:
            name, values = dimension.name, dimension.values
            if not dimension.is_ordered:
                found[name] = values[trial.suggest_categorical(name, list(range(len(values))))]
                continue
            low, high = values[0], values[-1]
            if all(isinstance(value, int) for value in values):
                found[name] = trial.suggest_int(name, low, high, log=low > 0)
            else:
                value = trial.suggest_float(name, low, high, log=low > 0)
                found[name] = min(max(float(f"{value:.{_DIGITS}g}"), low), high)
        return found

    def limits(self, settings: Settings) -> list[str]:
        found = []
        for dimension in (d for d in self._space if d.is_ordered):
            low, high, value = dimension.values[0], dimension.values[-1], settings[dimension.name]
            # Nearer to an end than a twentieth of the range.
            near = math.exp(0.05 * math.log(high / low)) if low > 0 else 0
            ends = {"smallest": value <= low * near, "largest": value * near >= high}
            if low <= 0:
                margin = 0.05 * (high - low)
                ends = {"smallest": value <= low + margin, "largest": value >= high - margin}
            for (words, is_near), up in zip(ends.items(), (False, True)):
                if is_near and dimension.beyond(dimension.values, up=up) is not None:
                    found.append(
                        f"{described({dimension.name: value})} is near the {words} value allowed"
                    )
        return found
