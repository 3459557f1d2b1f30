"""Claims of sections 5.1 and 5.2 and their appendices: the overlap of tasks."""

from collections.abc import Sequence
from math import isnan
from typing import Any

import numpy as np

from forgetless.paper.artefacts import overlap
from forgetless.paper.benchmarks import NAMES
from forgetless.paper.claims.base import (
    UNDECIDED,
    Claims,
    Finding,
    Verdict,
    by_noise,
    either,
    everywhere,
)
from forgetless.paper.numbers import ahead, listed, mean
from forgetless.paper.results import Data

CLAIMS = Claims()
_TOGETHER = "rank correlation with the drop over methods and memories positive, p below 0.05"


def _memories(result: Data) -> list[int]:
    """The memories of OGD's and PCA-OGD's variants "method memory"."""
    return sorted({int(v.split()[1]) for v in result if v.startswith("ogd")})


@CLAIMS.add(
    "section 5.1",
    "Low eigenvalues of O(1→15) go with a smaller drop on task 1",
    _TOGETHER,
    "overlap-later",
)
def _drop(later: Data) -> Finding:
    value, p = overlap.rank_correlation(later)
    count = len(overlap.points(later))
    alone, _ = overlap.rank_correlation(later, without="gem-nt")
    fewer = len(overlap.points(later, without="gem-nt"))
    why = f"Rotated MNIST; {alone:.2f} over the {fewer} without GEM-NT"
    seeds = [overlap.rank_correlation(later, seed=s)[0] for s in overlap.seeds(later)]
    why += f"; in single seeds {listed(sorted(seeds), '.2f')}"
    return _correlated(value, p), f"{value:.2f} over {count} points, p = {p:.2g}", why


def _correlated(value: float, p: float) -> Verdict:
    """Of a rank correlation: undecided where it is positive, but may be so by chance."""
    if isnan(value) or (value > 0 and p >= 0.05):
        return UNDECIDED
    return either(value > 0)


@CLAIMS.add(
    "section 5.1",
    "PCA-OGD has 7 to 10 points less drop than OGD",
    "difference at every memory from 5.5 to 11.5",
    "overlap-later",
)
def _less_drop(later: Data) -> Finding:
    result = later["rotated"]
    gains = [
        mean(result[f"ogd {d}"]["drop"]) - mean(result[f"pca-ogd {d}"]["drop"])
        for d in _memories(result)
    ]
    held = all(5.5 <= gain <= 11.5 for gain in gains)
    measured = f"{listed(gains, '.1f')} at memories {listed(_memories(result))}"
    return either(held), measured, "task 1 of Rotated MNIST"


@CLAIMS.add(
    "section 5.1, between the lines",
    "… as its eigenvalues of O(1→15) are lower",
    "largest singular value below OGD's by more than two standard errors, every memory, Rotated",
    "overlap-later",
)
def _because(later: Data) -> Finding:
    result, memories = later["rotated"], _memories(later["rotated"])

    def last(variant: str) -> list[float]:
        return list(list(result[variant]["later"].values())[-1]["largest"])

    leads = {d: ahead(last(f"ogd {d}"), last(f"pca-ogd {d}")) for d in memories}
    shown = ", ".join(f"{lead:+.3f} ± {noise:.3f}" for lead, noise in leads.values())
    gains = {
        d: mean(result[f"ogd {d}"]["drop"]) - mean(result[f"pca-ogd {d}"]["drop"])
        for d, (lead, noise) in leads.items()
        if lead <= noise
    }
    less = ", ".join(f"{gain:.1f} at memory {d}" for d, gain in gains.items() if gain > 0)
    why = "where they are not clearly lower, the drop is smaller all the same: by "
    verdict = everywhere(by_noise(lead, noise) for lead, noise in leads.values())
    return verdict, f"OGD minus PCA-OGD {shown}", why + less if less else ""


@CLAIMS.add(
    "section 5.2 and appendix, captions",
    "Lower eigenvalues imply less forgetting, on Permuted too",
    _TOGETHER,
    "overlap-later",
)
def _implies(later: Data) -> Finding:
    value, p = overlap.rank_correlation(later, "permuted")
    found = overlap.points(later, "permuted")
    least, most = min(found, key=lambda x: x[2]), max(found, key=lambda x: x[2])
    ends = "; ".join(
        f"{overlap.label(v)} has {largest:.2f} and drops by {drop:.0f}"
        for v, largest, drop in (least, most)
    )
    return _correlated(value, p), f"{value:.2f} over {len(found)} points, p = {p:.2g}", ends


@CLAIMS.add(
    "section 5.2 and appendix, captions",
    "… and on Split CIFAR",
    _TOGETHER,
    "overlap-later",
)
def _implies_cifar(later: Data) -> Finding:
    value, p = overlap.rank_correlation(later, "cifar")
    count = len(overlap.points(later, "cifar"))
    *_, last = next(iter(later["cifar"].values()))["later"]
    return _correlated(value, p), f"{value:.2f} over {count} points, p = {p:.2g}", f"O(1→{last})"


@CLAIMS.add(
    "section 5.2",
    "PCA-OGD has lower eigenvalues of O(1→2) than OGD and GEM-NT",
    "largest and mean, every memory, Rotated",
    "overlap-next",
)
def _lower(following: Data) -> Finding:
    result = following["rotated"]
    gem = next(v for v in result if v.startswith("gem-nt"))
    pairs = [
        (mean(result[f"pca-ogd {d}"][what]), mean(result[other][what]))
        for d in _memories(result)
        for other in (f"ogd {d}", gem)
        for what in ("largest", "mean")
    ]
    lower = sum(a < b for a, b in pairs)
    return either(lower == len(pairs)), f"lower in {lower} of {len(pairs)} comparisons", ""


def _gap(result: Data, memory: int) -> float:
    return mean(result[f"ogd {memory}"]["mean"]) - mean(result[f"pca-ogd {memory}"]["mean"])


@CLAIMS.add(
    "section 5.2",
    "… and the gap grows with memory",
    "OGD − PCA-OGD of the mean singular value, most memory against least",
    "overlap-next",
)
def _growing(following: Data) -> Finding:
    result = following["rotated"]
    gaps = [_gap(result, d) for d in _memories(result)]
    measured = f"gap {listed(gaps, '.3f')} at memories {listed(_memories(result))}"
    return either(gaps[-1] > gaps[0]), measured, ""


@CLAIMS.add(
    "section 5.2",
    "SGD has higher eigenvalues than the projection methods",
    "largest and mean of O(1→2) above all variants', Rotated",
    "overlap-next",
)
def _sgd_highest(following: Data) -> Finding:
    result = following["rotated"]
    sgd = next(v for v in result if v.startswith("sgd"))
    others = [v for v in result if v != sgd]
    held = all(
        mean(result[sgd][w]) > mean(result[v][w]) for v in others for w in ("largest", "mean")
    )
    parts = []
    for what in ("largest", "mean"):
        rival = max(others, key=lambda v, what=what: mean(result[v][what]))  # type: ignore[misc]
        value, other = mean(result[sgd][what]), mean(result[rival][what])
        parts.append(f"{what} {value:.4f}, next {overlap.label(rival)} {other:.4f}")
    return either(held), "; ".join(parts), ""


_GROWTH = "growth of OGD − PCA-OGD of the largest singular value from least to most memory, mean "
_GROWTH += "over later tasks: {} two standard errors (±)"


@CLAIMS.add(
    "appendix, evolution figures",
    "More memory gives PCA-OGD a larger advantage (Rotated, Split CIFAR)",
    _GROWTH.format("above"),
    "overlap-later",
)
def _evolution(later: Data) -> Finding:
    verdicts, shown, whys = [], [], []
    for benchmark in ("rotated", "cifar"):
        growth = _growths(later, benchmark)
        lead, noise = _clear(list(growth.values()))
        verdicts.append(by_noise(lead, noise))
        shown.append(f"{NAMES[benchmark]} {lead:+.3f} ± {noise:.3f}")
        each = {k: _clear([result]) for k, result in growth.items()}
        clear = [f"O(1→{k})" for k, (lead, noise) in each.items() if lead > noise]
        where = f"{', '.join(clear) or 'none'} of {len(each)} later tasks"
        whys.append(f"{NAMES[benchmark]}: clearly at {where}")
    return everywhere(verdicts), "; ".join(shown), "; ".join(whys)


@CLAIMS.add(
    "appendix, evolution figures",
    "… but not on Permuted, where there is no pattern",
    _GROWTH.format("not above"),
    "overlap-later",
)
def _no_evolution(later: Data) -> Finding:
    lead, noise = _clear(list(_growths(later, "permuted").values()))
    return either(lead <= noise), f"Permuted {lead:+.3f} ± {noise:.3f}", ""


def _growths(later: Data, benchmark: str) -> dict[str, list[float]]:
    """By later task, how much PCA-OGD's advantage grows from least to most memory, seed by seed."""
    result = later[benchmark]
    memories = _memories(result)

    def advantage(memory: int, task: str) -> Any:
        ogd, pca = (result[f"{m} {memory}"]["later"][task]["largest"] for m in ("ogd", "pca-ogd"))
        return np.subtract(ogd, pca)

    tasks = next(iter(result.values()))["later"]
    return {t: list(advantage(memories[-1], t) - advantage(memories[0], t)) for t in tasks}


def _clear(growths: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The mean over tasks and seeds, and two standard errors of it over seeds."""
    of_seeds = np.mean(growths, 0)
    return ahead(of_seeds, np.zeros_like(of_seeds))


@CLAIMS.add(
    "appendix, Permuted",
    "Permuted's eigenvalues are very small compared to Rotated's",
    "SGD's mean singular value of O(1→2) below a third of Rotated's",
    "overlap-next",
)
def _small(following: Data) -> Finding:
    permuted, rotated = (
        next(result for v, result in following[b].items() if v.startswith("sgd"))
        for b in ("permuted", "rotated")
    )
    held = mean(permuted["mean"]) < mean(rotated["mean"]) / 3
    shown = "; ".join(
        f"{what} {mean(permuted[what]):.2f} against {mean(rotated[what]):.2f}"
        for what in ("mean", "largest")
    )
    share = mean(permuted["largest"]) / mean(rotated["largest"])
    why = f"the largest is {100 * share:.0f} % of Rotated's" if held and share >= 1 / 3 else ""
    return either(held), shown, why


@CLAIMS.add(
    "appendix, Permuted",
    "There, more memory hardly lowers the eigenvalues",
    "PCA-OGD's largest and mean fall by less than 20 % from least to most memory",
    "overlap-next",
)
def _hardly(following: Data) -> Finding:
    falls, parts = {}, []
    for what in ("largest", "mean"):
        for benchmark in ("permuted", "rotated"):
            result = following[benchmark]
            found = [mean(result[f"pca-ogd {d}"][what]) for d in _memories(result)]
            falls[benchmark, what] = 100 * (1 - found[-1] / found[0])
        permuted, rotated = (falls[b, what] for b in ("permuted", "rotated"))
        parts.append(f"{what} falls by {permuted:.0f} %, on Rotated by {rotated:.0f} %")
    return either(max(falls["permuted", w] for w in ("largest", "mean")) < 20), "; ".join(parts), ""
