"""Claims of section 5.3 and its appendix: accuracy and forgetting on the four benchmarks."""

from collections.abc import Iterator, Mapping
from typing import Any

from forgetless.paper.artefact import Data
from forgetless.paper.artefacts import forgetting_gap, per_task, protocols, table1
from forgetless.paper.claims.base import (
    FAILS,
    HOLDS,
    UNDECIDED,
    Claims,
    Finding,
    Word,
    by_noise,
    either,
    everywhere,
    over_protocols,
)
from forgetless.paper.numbers import DIVERGED, ahead, mean
from forgetless.paper.pictures import LABELS, NAMES
from forgetless.paper.printed import TABLE1
from forgetless.paper.scale import FULL, METHODS

CLAIMS = Claims()
_CLEARLY = "by more than two standard errors of the difference (±), every protocol"
_HIGHEST = f"highest A_T, {_CLEARLY}"
_LOWEST = f"lowest F_T, {_CLEARLY}"
_WITHIN = "a difference is within two standard errors"


@CLAIMS.add("Table 1", "A_T of 20 cells", "within max(1.5, 2σ) each", "table1")
def _cells(data: Data) -> Finding:
    return _agreeing(data, "average")


@CLAIMS.add("Table 1", "F_T of 20 cells", "within max(1.5, 2σ) each", "table1", "forgetting-gap")
def _forgetting(data: Data, gap: Data) -> Finding:
    word, measured, why = _agreeing(data, "forgetting")
    lower = sum(
        mean(of["forgetting"]) < TABLE1[b][m].forgetting
        for b, methods in data.items()
        for m, of in methods.items()
        if DIVERGED not in of
    )
    far = [f"{NAMES[b]} {LABELS[m]}" for b, m in forgetting_gap.out_of_reach(gap)]
    if far:
        why += f"; best accuracies that the printed F_T implies were never seen: {', '.join(far)}"
    return word, f"{measured}; lower here than printed in {lower}", why


def _agreeing(data: Data, what: str) -> Finding:
    good = {
        f"{NAMES[b]} {LABELS[m]}": table1.agreement(TABLE1[b][m], of, what)[0]
        for b, methods in data.items()
        for m, of in methods.items()
    }
    bad = [cell for cell, agrees in good.items() if not agrees]
    why = f"released protocol{'; not ' if bad else ''}{', '.join(bad)}"
    return either(not bad), f"{sum(good.values())} of {len(good)}", why


@CLAIMS.add(
    "appendix, tables of final accuracy",
    "275 final accuracies",
    "90 % within max(2.5, 2σ)",
    "per-task",
)
def _tasks(data: Data) -> Finding:
    counts = per_task.agreeing(data).values()
    good, of = sum(c[0] for c in counts), sum(c[1] for c in counts)
    close = sum(c[0] for c in per_task.agreeing(data, per_task.closely).values())
    why = f"released protocol; {close} within two standard errors of the difference"
    return either(good >= 0.9 * of), f"{good} of {of}", why


def _cells_of(*methods: str) -> str:
    """Of the protocols, all cells of some methods, as `Claim` names them."""
    rows = [f"{b}/{p}" for b in FULL.benchmarks for p in protocols.variants(FULL, b)]
    return f"protocols: {', '.join(f'{row}/{m}' for row in rows for m in methods)}"


@CLAIMS.add(
    "section 5.3",
    "PCA-OGD is comparable to A-GEM overall",
    "A_T not below A-GEM's by more than 2, four benchmarks, every protocol",
    _cells_of("a-gem", "pca-ogd"),
    fails_early=True,
)
def _comparable(data: Data) -> Finding:
    words, shown = _by_protocol(data), _by_protocol(data)
    for benchmark, protocol, rival in _compared(data, "pca-ogd", "a-gem"):
        word, text = FAILS, DIVERGED
        if rival is not None:
            of = data[benchmark][protocol]
            lead = mean(of["pca-ogd"]["average"]) - mean(of[rival]["average"])
            word, text = either(lead >= -2), f"{lead:+.1f}"
        words[protocol].append(word)
        shown[protocol].append(f"{NAMES[benchmark]} {text}")
    parts = [f"{p} {', '.join(shown[p])}" for p in sorted(shown, reverse=True) if shown[p]]
    why = "PCA-OGD minus A-GEM, which keeps samples and far fewer bytes"
    return _in_all(words), "; ".join(parts), why


def _by_protocol(data: Data) -> dict[str, list[Any]]:
    """An empty list for every protocol of some benchmark."""
    return {protocol: [] for of in data.values() for protocol in of}


def _in_all(words: Mapping[str, list[Word]]) -> Word:
    """Of verdicts on several cells of each protocol."""
    return over_protocols({protocol: everywhere(of) for protocol, of in words.items()})


def _compared(data: Data, method: str, *rivals: str) -> Iterator[tuple[str, str, str | None]]:
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


def _values(protocols: Data, what: str) -> dict[str, dict[str, Any]]:
    """Protocol → method → what was measured, seed by seed, where training did not diverge."""
    return {
        p: {m: of[what] for m, of in methods.items() if what in of}
        for p, methods in protocols.items()
    }


@CLAIMS.add(
    "Table 1",
    "On Split CIFAR A-GEM is the worst of all, below SGD",
    f"lowest A_T, {_CLEARLY}",
    "protocols: cifar",
    fails_early=True,
)
def _agem_worst(data: Data) -> Finding:
    cifar = data.get("cifar", {})
    word, shown, why = _first(cifar, "a-gem", "average", sign=-1)
    found = _values(cifar, "average")
    ranks = ", ".join(f"{p} {_rank(of, 'a-gem')}" for p, of in found.items() if "a-gem" in of)
    if word not in (HOLDS, UNDECIDED):
        why = f"its rank: {ranks}; the released code sends a mixed batch through one head and "
        why += "trains no head"
    return word, shown, why


def _rank(of: Mapping[str, Any], method: str) -> str:
    order = sorted(of, key=lambda m: -mean(of[m]))
    return f"{order.index(method) + 1} of {len(of)}"


def _first(protocols: Data, method: str, what: str, sign: int = 1) -> Finding:
    """Whether a method has the highest value under every protocol, or with sign −1 the lowest.

    A protocol under which it was not measured is left out.
    """
    words: dict[str, Word] = {}
    shown = []
    for protocol, cells in _values(protocols, what).items():
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
    return word, "; ".join(shown), _WITHIN if word == UNDECIDED else ""


def _leads(
    says: str, benchmark: str, method: str, what: str = "average", place: str = "Table 1"
) -> None:
    """A claim that a method has the highest A_T of a benchmark, or the lowest F_T."""
    test, sign = (_HIGHEST, 1) if what == "average" else (_LOWEST, -1)

    @CLAIMS.add(place, says, test, f"protocols: {benchmark}", fails_early=True)
    def decide(data: Data) -> Finding:
        return _first(data.get(benchmark, {}), method, what, sign)


_leads("PCA-OGD is the best on Split CIFAR", "cifar", "pca-ogd", place="Table 1, section 5.3")
_leads("A-GEM is the best on Rotated", "rotated", "a-gem")
_leads("A-GEM is the best on Permuted", "permuted", "a-gem")
_leads("OGD is the best on Split MNIST", "split", "ogd")


@CLAIMS.add(
    "Table 1",
    "EWC forgets least on Permuted",
    _LOWEST,
    "protocols: permuted",
    f"table1: {', '.join(f'permuted {m}' for m in METHODS)}",
)
def _ewc_least(data: Data, table: Data) -> Finding:
    word, measured, why = _first(data["permuted"], "ewc", "forgetting", sign=-1)
    last = {
        m: mean([seed[-1] for seed in of["final"]])
        for m, of in table["permuted"].items()
        if "final" in of
    }
    if word != FAILS and min(last, key=lambda m: last[m]) == "ewc":
        others = min(value for m, value in last.items() if m != "ewc")
        why = (
            f"and learns least: {last['ewc']:.1f} on the last task, the others {others:.1f} or more"
        )
    return word, measured, why


_leads("A-GEM forgets least on Rotated", "rotated", "a-gem", "forgetting")
_leads("PCA-OGD forgets least on Split MNIST", "split", "pca-ogd", "forgetting")
_leads("PCA-OGD forgets least on Split CIFAR", "cifar", "pca-ogd", "forgetting")
_ROBUST = "F_T lower by more than two standard errors (±), four benchmarks, released"


@CLAIMS.add("section 4.3", "OGD is more robust to forgetting than SGD", _ROBUST, "table1")
def _ogd_robust(table: Data) -> Finding:
    return _robust({b: of["ogd"] for b, of in table.items()}, table)


@CLAIMS.add(
    "section 4.3", "… and so is GEM-NT", _ROBUST, "more-methods", "table1", fails_early=True
)
def _gem_nt_robust(more: Data, table: Data) -> Finding:
    return _robust({b: of["gem-nt"] for b, of in more.items() if "gem-nt" in of}, table)


def _robust(cells: Data, table: Data) -> Finding:
    words: list[Word] = []
    shown = []
    for benchmark, of in cells.items():
        sgd = table.get(benchmark, {}).get("sgd", {})
        if DIVERGED in of:
            words.append(FAILS)
            shown.append(f"{NAMES[benchmark]} {DIVERGED}")
        elif "forgetting" in sgd:
            gain, noise = ahead(of["forgetting"], sgd["forgetting"])
            words.append(by_noise(-gain, noise))
            shown.append(f"{NAMES[benchmark]} {gain:+.1f} ± {noise:.1f}")
    word = everywhere(words)
    return word, f"F_T minus SGD's: {', '.join(shown)}", _WITHIN if word == UNDECIDED else ""


@CLAIMS.add(
    "abstract, conclusion",
    "PCA-OGD mitigates forgetting on classical datasets",
    "F_T below SGD's and OGD's by more than two standard errors, four benchmarks, every protocol",
    _cells_of("sgd", "ogd", "pca-ogd"),
    fails_early=True,
)
def _mitigates(data: Data) -> Finding:
    words = _by_protocol(data)
    doubtful = []
    for benchmark, protocol, rival in _compared(data, "pca-ogd", "sgd", "ogd"):
        word, how = FAILS, DIVERGED
        if rival is not None:
            of = data[benchmark][protocol]
            word = by_noise(*ahead(of[rival]["forgetting"], of["pca-ogd"]["forgetting"]))
            how = "higher than" if word == FAILS else "within noise of"
            how += f" {LABELS[rival]}'s"
        words[protocol].append(word)
        doubtful += [f"{NAMES[benchmark]} {protocol} ({how})"] if word != HOLDS else []
    word = _in_all(words)
    shown = f"not clearly: {', '.join(sorted(doubtful))}" if doubtful else "in every cell"
    return word, shown, _WITHIN if word == UNDECIDED else ""
