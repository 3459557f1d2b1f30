"""A claim of the paper, the test that decides it, and the verdict."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

from forgetless.paper.numbers import DIVERGED
from forgetless.paper.results import Results, readable

Verdict = Literal[
    "holds", "holds only under the released protocol", "does not hold", "cannot be decided"
]
HOLDS: Verdict = "holds"
RELEASED_ONLY: Verdict = "holds only under the released protocol"
FAILS: Verdict = "does not hold"
UNDECIDED: Verdict = "cannot be decided"

Finding = tuple[Verdict, str, str]  # verdict, what was measured, why


@final
@dataclass(frozen=True)
class Claim:
    """One checkable sentence.

    Arguments:
        place: where it is in the paper.
        says: the claim in short.
        test: the criterion in words.
        needs: artefacts whose data `decide` takes, in this order.
        decide: the test.
    """

    place: str
    says: str
    test: str
    needs: tuple[str, ...]
    decide: Callable[..., Finding]


@final
class Claims:
    """Claims in the order in which they are written down."""

    def __init__(self) -> None:
        self.all: list[Claim] = []

    def add(
        self, place: str, says: str, test: str, *needs: str
    ) -> Callable[[Callable[..., Finding]], Callable[..., Finding]]:
        """Decorator: the function takes the data of the artefacts it needs and decides."""

        def register(decide: Callable[..., Finding]) -> Callable[..., Finding]:
            self.all.append(Claim(place, says, test, needs, decide))
            return decide

        return register


def unmeasured(name: str, results: Results) -> bool:
    """Whether an artefact has not been measured, or not completely."""
    return name not in results or bool(results[name].get("lacks"))


def judged(claim: Claim, results: Results) -> Finding:
    """The verdict on a claim; without all its data it cannot be decided."""
    missing = [name for name in claim.needs if unmeasured(name, results)]
    if missing:
        return UNDECIDED, "", f"not measured yet: {', '.join(missing)}"
    records = [results[name] for name in claim.needs]
    seeds = {str(record.get("seeds")) for record in records}
    if len(seeds) > 1:
        return UNDECIDED, "", f"measured with different seeds: {' and '.join(sorted(seeds))}"
    data = [record["data"] for record in records]
    with readable(", ".join(claim.needs)):
        try:
            return claim.decide(*data)
        except KeyError:
            if not _diverged(data):
                raise
            return UNDECIDED, "", "training diverged in a run that is compared"


def _diverged(data: Any) -> bool:
    """Whether training diverged in any of the runs."""
    if isinstance(data, Mapping):
        return DIVERGED in data or _diverged(list(data.values()))
    return isinstance(data, list) and any(map(_diverged, data))


def over_protocols(verdicts: Mapping[str, Verdict]) -> Verdict:
    """From the verdict under each protocol: whether it holds under all or only the released one.

    A failure under another protocol leaves it to the released one alone, even if a third cannot be
    decided. Without a failure, one undecided protocol leaves all undecided.
    """
    released = verdicts.get("released", UNDECIDED)
    if released != HOLDS or set(verdicts.values()) == {HOLDS}:
        return released
    return RELEASED_ONLY if FAILS in verdicts.values() else UNDECIDED


def by_noise(difference: float, noise: float) -> Verdict:
    """Whether a difference is clearly above zero, clearly below, or neither."""
    return HOLDS if difference > noise else FAILS if difference < -noise else UNDECIDED


def everywhere(verdicts: Iterable[Verdict]) -> Verdict:
    """Holds if all hold, fails if any fails."""
    found = set(verdicts)
    return FAILS if FAILS in found else HOLDS if found == {HOLDS} else UNDECIDED


def either(decision: bool) -> Verdict:
    """Holds or does not."""
    return HOLDS if decision else FAILS
