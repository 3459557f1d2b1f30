"""What claims about Table 1's cells share: who is compared with whom, and who comes first."""

from collections.abc import Iterator, Mapping
from typing import Any

from forgetless.paper.artefact import Data
from forgetless.paper.artefacts import protocols
from forgetless.paper.claims.base import (
    FAILS,
    HOLDS,
    RELEASED_ONLY,
    UNDECIDED,
    Claims,
    Finding,
    Word,
    by_noise,
    everywhere,
    over_protocols,
)
from forgetless.paper.numbers import DIVERGED, ahead, mean
from forgetless.paper.pictures import LABELS
from forgetless.paper.scale import FULL

CLEARLY = "by more than two standard errors of the difference (±), every protocol"
HIGHEST = f"highest A_T, {CLEARLY}"
LOWEST = f"lowest F_T, {CLEARLY}"
WITHIN = "a difference is within two standard errors"


def cells_of(*methods: str) -> str:
    """Of the protocols, all cells of some methods, as `Claim` names them."""
    rows = [f"{b}/{p}" for b in FULL.benchmarks for p in protocols.variants(FULL, b)]
    return f"protocols: {', '.join(f'{row}/{m}' for row in rows for m in methods)}"


def by_protocol(data: Data) -> dict[str, list[Any]]:
    """An empty list for every protocol of some benchmark."""
    return {protocol: [] for of in data.values() for protocol in of}


def in_all(words: Mapping[str, list[Word]]) -> Word:
    """Of verdicts on several cells of each protocol."""
    return over_protocols({protocol: everywhere(of) for protocol, of in words.items()})


def compared(data: Data, method: str, *rivals: str) -> Iterator[tuple[str, str, str | None]]:
    """Benchmark, protocol and each rival to compare a method with; None if the method diverged.

    Cells that are not measured are left out, and rivals that diverged.
    """
    for benchmark, of in data.items():
        for protocol, cells in of.items():
            if DIVERGED in cells.get(method, {}):
                yield benchmark, protocol, None
            elif method in cells:
                there = [m for m in rivals if m in cells and DIVERGED not in cells[m]]
                yield from ((benchmark, protocol, rival) for rival in there)


def as_released(word: Word, words: Mapping[str, Word]) -> str:
    """For a claim that holds only as released: what mended methods make of it on that network."""
    frozen = words.get("frozen")
    if word != RELEASED_ONLY or frozen in (None, FAILS):
        return ""
    how = "it holds" if frozen == HOLDS else "within two standard errors"
    return f"with mended methods on the network as released {how}; it fails where all of it trains"


def values(protocols: Data, what: str) -> dict[str, dict[str, Any]]:
    """Protocol → method → what was measured, seed by seed, where training did not diverge."""
    return {
        p: {m: of[what] for m, of in methods.items() if what in of}
        for p, methods in protocols.items()
    }


def first(protocols: Data, method: str, what: str, sign: int = 1) -> Finding:
    """Whether a method has the highest value under every protocol, or with sign −1 the lowest.

    A protocol under which it was not measured is left out.
    """
    words: dict[str, Word] = {}
    shown = []
    for protocol, cells in values(protocols, what).items():
        if method not in protocols[protocol]:
            continue
        if method not in cells:
            words[protocol] = FAILS
            shown.append(f"{protocol} diverged")
            continue
        others = [m for m in cells if m != method]
        if not others:
            words[protocol] = UNDECIDED
            shown.append(f"{protocol} all others diverged")
            continue
        rival = max(others, key=lambda m: sign * mean(cells[m]))
        lead, noise = ahead(cells[method], cells[rival])
        words[protocol] = by_noise(sign * lead, noise)
        shown.append(f"{protocol} {lead:+.2f} ± {noise:.2f} to {LABELS[rival]}")
    word = over_protocols(words)
    return word, "; ".join(shown), WITHIN if word == UNDECIDED else as_released(word, words)


def leads(
    claims: Claims,
    says: str,
    benchmark: str,
    method: str,
    what: str = "average",
    place: str = "Table 1",
) -> None:
    """Add a claim that a method has the highest A_T of a benchmark, or the lowest F_T."""
    test, sign = (HIGHEST, 1) if what == "average" else (LOWEST, -1)

    @claims.add(place, says, test, f"protocols: {benchmark}", fails_early=True)
    def decide(data: Data) -> Finding:
        return first(data.get(benchmark, {}), method, what, sign)
