"""What an artefact is: the runs it needs, what it measures on them, and how it is shown."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from forgetless.paper.pictures import Pictures
from forgetless.paper.run import Run
from forgetless.paper.scale import Scale
from forgetless.paper.store import Results
from forgetless.paper.work import Look, Workshop

Data = Mapping[str, Any]
Parts = Callable[[Scale, Results], Mapping[str, Sequence[Run]]]


def no_runs(scale: Scale, results: Results) -> Mapping[str, Sequence[Run]]:
    """For artefacts that need no training."""
    return {}


def all_or_nothing(runs: Callable[[Scale], Sequence[Run]]) -> Parts:
    """For artefacts that can be measured only as a whole, which has no name."""
    return lambda scale, results: {"": runs(scale)}


@final
@dataclass(frozen=True)
class Artefact:
    """A table or figure of the paper, or one that it should have had.

    Arguments:
        name: what `forgetless paper build` calls it, and its file in the results.
        title: its heading on the page.
        place: where it is in the paper, empty for nowhere.
        measure: from trained runs to the data that is stored: all that `show` and the verdicts
            need, nothing else.
        show: the data as Markdown lines; figures are handed to the pictures.
        parts: what has to be trained, from the scale and the results of what it needs, by what can
            be measured without the rest, such as a benchmark.
        needs: artefacts that must be built before.
        look: what it finds in the weights of each of its runs, as `Workshop.looked` keeps it; None
            if it needs no weights.
    """

    name: str
    title: str
    place: str
    measure: Callable[[Workshop], dict[str, Any]]
    show: Callable[[Data, Pictures], list[str]]
    parts: Parts = no_runs
    needs: tuple[str, ...] = ()
    look: Look | None = None

    def runs(self, scale: Scale, results: Results) -> list[Run]:
        """Those of all parts, each once."""
        every = (run for part in self.parts(scale, results).values() for run in part)
        return list({run.key: run for run in every}.values())

    def has(self, workshop: Workshop, run: Run) -> bool:
        """Whether there is all that it needs of one of its runs."""
        if self.look is None:
            return workshop.is_trained(replace(run, weights=False))
        known = workshop.is_trained(run) and workshop.has_looked(self.look, run)
        return known or workshop.is_trained(replace(run, weights=True))

    def there(self, workshop: Workshop) -> dict[str, bool]:
        """Which of its parts can be measured, as all their runs are there."""
        parts = self.parts(workshop.scale, workshop.results)
        return {name: all(self.has(workshop, run) for run in runs) for name, runs in parts.items()}
