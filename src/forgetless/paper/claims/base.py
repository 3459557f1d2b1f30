"""A claim of the paper, the test that decides it, and the verdict."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, final

from forgetless.paper.numbers import DIVERGED
from forgetless.paper.results import Results, readable
from forgetless.support.statistics import Margin, none, two

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
class Former:
    """An earlier rule of a claim whose rule was changed after its numbers were known.

    Arguments:
        test: the rule in words.
        decide: its verdict; None for the present rule with another margin.
        margin: that margin, which `Claim.decide` takes.
    """

    test: str
    decide: Callable[..., Verdict] | None = None
    margin: Margin | None = None


TWO_ERRORS = Former("two standard errors", margin=two)
MEANS_ALONE = Former("means alone", margin=none)


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
        former: an earlier rule, if there was another one.
        slip: whether a failure is a slip of notation or wording, without effect on any result.
    """

    place: str
    says: str
    test: str
    needs: tuple[str, ...]
    decide: Callable[..., Finding]
    former: Former | None = None
    slip: bool = False

    def formerly(self, *data: Any) -> Verdict | None:
        """The verdict of the earlier rule; None if the rule was never changed."""
        if self.former is None:
            return None
        if self.former.decide is not None:
            return self.former.decide(*data)
        return self.decide(*data, margin=self.former.margin)[0]


@final
class Claims:
    """Claims in the order in which they are written down."""

    def __init__(self) -> None:
        self.all: list[Claim] = []

    def add(
        self,
        place: str,
        says: str,
        test: str,
        *needs: str,
        former: Former | None = None,
        slip: bool = False,
    ) -> Callable[[Callable[..., Finding]], Callable[..., Finding]]:
        """Decorator: the function takes the data of the artefacts it needs and decides."""

        def register(decide: Callable[..., Finding]) -> Callable[..., Finding]:
            self.all.append(Claim(place, says, test, needs, decide, former, slip))
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
            word, measured, why = claim.decide(*data)
            return word, measured, _with_former(claim, word, why, data)
        except KeyError:
            if not _diverged(data):
                raise
            return UNDECIDED, "", "training diverged in a run that is compared"


def _with_former(claim: Claim, word: Verdict, why: str, data: Sequence[Any]) -> str:
    """The reason, and what the earlier rule said; of a mere margin only another verdict."""
    before = claim.formerly(*data)
    if before is None or claim.former is None:
        return why
    if claim.former.margin is not None and before == word:
        return why
    changed = (
        f"changed after the numbers were known; the rule before ({claim.former.test}): *{before}*"
    )
    return "; ".join(filter(None, [why, changed]))


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


def inside(difference: float, noise: float, low: float, high: float = inf) -> Verdict:
    """Whether an interval, difference ± noise, is wholly within limits, wholly outside, or neither.

    An equivalence test: noise does not help, as it does where no clear difference counts as none.
    """
    if low <= difference - noise and difference + noise <= high:
        return HOLDS
    return FAILS if difference + noise < low or difference - noise > high else UNDECIDED


def everywhere(verdicts: Iterable[Verdict]) -> Verdict:
    """Holds if all hold, fails if any fails."""
    found = set(verdicts)
    return FAILS if FAILS in found else HOLDS if found == {HOLDS} else UNDECIDED


def either(decision: bool) -> Verdict:
    """Holds or does not."""
    return HOLDS if decision else FAILS
