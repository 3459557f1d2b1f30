"""What an artefact is: the runs it needs, what it measures on them, and how it is shown."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from forgetless.paper.pictures import Pictures
from forgetless.paper.scale import Scale
from forgetless.paper.store import Results
from forgetless.paper.work import Run, Workshop

Data = Mapping[str, Any]


def no_runs(scale: Scale, results: Results) -> Sequence[Run]:
    """For artefacts that need no training."""
    return ()


@final
@dataclass(frozen=True)
class Artefact:
    """A table or figure of the paper, or one that it should have had.

    Arguments:
        name: what `forgetless paper build` calls it, and its file in the results.
        title: its heading on the page.
        place: where it is in the paper.
        measure: from trained runs to the data that is stored: all that `show` and the verdicts
            need, nothing else.
        show: the data as Markdown lines; figures are handed to the pictures.
        runs: what has to be trained, from the scale and the results of what it needs.
        needs: artefacts that must be built before.
        may_lack: whether it can be measured when some of its runs are missing.
    """

    name: str
    title: str
    place: str
    measure: Callable[[Workshop], dict[str, Any]]
    show: Callable[[Data, Pictures], list[str]]
    runs: Callable[[Scale, Results], Sequence[Run]] = no_runs
    needs: tuple[str, ...] = ()
    may_lack: bool = False
