"""A claim of the paper, the test that decides it, and the verdict."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

from forgetless.paper.numbers import DIVERGED
from forgetless.paper.pictures import titled
from forgetless.paper.store import Results, is_among, readable

Word = Literal[
    "holds", "holds only under the released protocol", "does not hold", "cannot be decided"
]
HOLDS: Word = "holds"
RELEASED_ONLY: Word = "holds only under the released protocol"
FAILS: Word = "does not hold"
UNDECIDED: Word = "cannot be decided"

Finding = tuple[Word, str, str]  # verdict, what was measured, why


@final
@dataclass(frozen=True)
class Claim:
    """One checkable sentence.

    Arguments:
        place: where it is in the paper.
        says: what it says, in short.
        test: what decides, in words.
        needs: artefacts whose data `decide` takes, in this order; "memory: rotated, permuted" if
            those parts of it will do.
        decide: the test.
        fails_early: whether it takes less than all it needs, and has failed if it fails on that,
            or on what there is beside a whole released protocol.
    """

    place: str
    says: str
    test: str
    needs: tuple[str, ...]
    decide: Callable[..., Finding]
    fails_early: bool = False


@final
class Claims:
    """Claims in the order in which they are written down."""

    def __init__(self) -> None:
        self.all: list[Claim] = []

    def add(
        self, place: str, says: str, test: str, *needs: str, fails_early: bool = False
    ) -> Callable[[Callable[..., Finding]], Callable[..., Finding]]:
        """Decorator: the function takes the data of the artefacts it needs and decides."""

        def note(decide: Callable[..., Finding]) -> Callable[..., Finding]:
            self.all.append(Claim(place, says, test, needs, decide, fails_early))
            return decide

        return note


def measured(needs: Sequence[str], results: Results) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The data of artefacts, as `Claim` names them, and what of it is not there, in words.

    What is needed may be part of what is lacking, or have it as a part.
    """
    data: list[Mapping[str, Any]] = []
    missing = []
    for need in needs:
        name, _, parts = need.partition(": ")
        record = results.get(name)
        if record is None:
            missing.append(name)
            continue
        lacks = record.get("lacks", [])
        needed = parts.split(", ") if parts else lacks
        lacking = [
            titled(part)
            for part in lacks
            if is_among(part, needed) or any(is_among(other, [part]) for other in needed)
        ]
        words = " and ".join(lacking) if len(lacking) < 4 else f"{len(lacking)} of its parts"
        missing += [f"{name} on {words}"] if lacking else []
        data.append(record["data"])
    return data, missing


def judged(claim: Claim, results: Results) -> Finding:
    """The verdict on a claim; what is not measured cannot be decided."""
    data, missing = measured(claim.needs, results)
    waits = f"not measured yet: {', '.join(missing)}"
    if missing and not (claim.fails_early and len(data) == len(claim.needs)):
        return UNDECIDED, "", waits
    records = [results[need.partition(": ")[0]] for need in claim.needs]
    seeds = {str(record.get("seeds")) for record in records}
    if len(seeds) > 1:
        return UNDECIDED, "", f"measured with different seeds: {' and '.join(sorted(seeds))}"
    with readable(", ".join(claim.needs)):
        try:
            word, found, why = claim.decide(*data)
        except KeyError:
            if not _diverged(data):
                raise
            return UNDECIDED, "", "training diverged in a run that is compared"
    if not missing:
        return word, found, why
    # What is still to be measured cannot undo a failure, nor one under another protocol than the
    # released, if that is there.
    lacks = [part for record in records for part in record.get("lacks", [])]
    there = all("/" in part and "released" not in part for part in lacks)
    settled = word == FAILS or (word == RELEASED_ONLY and there)
    return (
        (word, found, "; ".join(filter(None, (waits, why)))) if settled else (UNDECIDED, "", waits)
    )


def _diverged(data: Any) -> bool:
    """Whether training broke down in one of the runs that something was measured on."""
    if isinstance(data, Mapping):
        return DIVERGED in data or _diverged(list(data.values()))
    return isinstance(data, list) and any(map(_diverged, data))


def over_protocols(words: Mapping[str, Word]) -> Word:
    """Of what is true under each protocol: whether it is under all, or only under the released.

    A failure under another protocol settles that it is only under the released one, whatever
    cannot be decided under a third. Else what cannot be decided under one cannot be for all.
    """
    released = words.get("released", UNDECIDED)
    if released != HOLDS or set(words.values()) == {HOLDS}:
        return released
    return RELEASED_ONLY if FAILS in words.values() else UNDECIDED


def by_noise(difference: float, noise: float) -> Word:
    """Whether something is clearly above zero, clearly below, or neither."""
    return HOLDS if difference > noise else FAILS if difference < -noise else UNDECIDED


def everywhere(words: Iterable[Word]) -> Word:
    """Holds where everything does, and not where anything does not."""
    found = set(words)
    return FAILS if FAILS in found else HOLDS if found == {HOLDS} else UNDECIDED


def either(decision: bool) -> Word:
    """Holds or does not."""
    return HOLDS if decision else FAILS
