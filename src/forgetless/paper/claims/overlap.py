"""Claims of sections 5.1 and 5.2 and their appendices: the overlap of tasks."""

from collections.abc import Sequence
from math import isnan
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from forgetless.paper.artefacts import alignment, overlap
from forgetless.paper.benchmarks import NAMES
from forgetless.paper.claims.base import (
    FAILS,
    HOLDS,
    MEANS_ALONE,
    TWO_ERRORS,
    UNDECIDED,
    Claims,
    Finding,
    Former,
    Verdict,
    by_noise,
    either,
    everywhere,
    inside,
)
from forgetless.paper.numbers import listed
from forgetless.paper.results import Data
from forgetless.support.statistics import Margin, ahead, apart, estimate, mean, student

CLAIMS = Claims()
_TOGETHER = "rank correlation with the drop over methods and memories positive; two-sided "
_TOGETHER += "permutation test, p below 0.05"


def _memories(result: Data) -> list[int]:
    """The memories of OGD's and PCA-OGD's variants "method memory"."""
    return sorted({int(v.split()[1]) for v in result if v.startswith("ogd")})


@CLAIMS.add(
    "section 5.1",
    "Low eigenvalues of O(1→15) go with a smaller drop on task 1",
    _TOGETHER,
    "overlap-later",
    former=Former("at least 0.8", lambda later: either(overlap.rank_correlation(later)[0] >= 0.8)),
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
    """Of a rank correlation: undecided, whatever its sign, where it may be so by chance."""
    return UNDECIDED if isnan(value) or p >= 0.05 else either(value > 0)


def _one_sided(benchmark: str) -> Former:
    """An earlier rule: any negative correlation fails."""

    def decide(later: Data) -> Verdict:
        _, largest, drop = zip(*overlap.points(later, benchmark), strict=True)
        found = spearmanr(largest, drop)
        positive = found.statistic > 0
        return UNDECIDED if positive and found.pvalue >= 0.05 else either(positive)

    return Former("p of a t-distribution; fails if negative, whatever p", decide)


@CLAIMS.add(
    "section 5.1",
    "PCA-OGD has 7 to 10 points less drop than OGD",
    "difference (±) at every memory from 5.5 to 11.5",
    "overlap-later",
    former=MEANS_ALONE,
)
def _less_drop(later: Data, margin: Margin = student) -> Finding:
    result = later["rotated"]
    gains = [
        ahead(result[f"ogd {d}"]["drop"], result[f"pca-ogd {d}"]["drop"], margin)
        for d in _memories(result)
    ]
    verdict = everywhere(inside(*gain, 5.5, 11.5) for gain in gains)
    shown = ", ".join(f"{gain:.1f} ± {noise:.1f}" for gain, noise in gains)
    measured = f"{shown} at memories {listed(_memories(result))}"
    return verdict, measured, "task 1 of Rotated MNIST"


@CLAIMS.add(
    "section 5.1, between the lines",
    "… as its eigenvalues of O(1→15) are lower",
    "largest singular value clearly below OGD's (±), every memory, Rotated",
    "overlap-later",
    former=TWO_ERRORS,
)
def _because(later: Data, margin: Margin = student) -> Finding:
    result, memories = later["rotated"], _memories(later["rotated"])

    def last(variant: str) -> list[float]:
        return list(list(result[variant]["later"].values())[-1]["largest"])

    leads = {d: ahead(last(f"ogd {d}"), last(f"pca-ogd {d}"), margin) for d in memories}
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
    former=_one_sided("permuted"),
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
    former=_one_sided("cifar"),
)
def _implies_cifar(later: Data) -> Finding:
    value, p = overlap.rank_correlation(later, "cifar")
    count = len(overlap.points(later, "cifar"))
    *_, last = next(iter(later["cifar"].values()))["later"]
    return _correlated(value, p), f"{value:.2f} over {count} points, p = {p:.2g}", f"O(1→{last})"


@CLAIMS.add(
    "section 5.2",
    "PCA-OGD has lower eigenvalues of O(1→2) than OGD and GEM-NT",
    "largest and mean, every memory, Rotated, each clearly lower",
    "overlap-next",
    former=MEANS_ALONE,
)
def _lower(following: Data, margin: Margin = student) -> Finding:
    result = following["rotated"]
    gem = next(v for v in result if v.startswith("gem-nt"))
    found = [
        by_noise(*ahead(result[other][what], result[f"pca-ogd {d}"][what], margin))
        for d in _memories(result)
        for other in (f"ogd {d}", gem)
        for what in ("largest", "mean")
    ]
    measured = f"clearly lower in {found.count(HOLDS)} of {len(found)} comparisons"
    return everywhere(found), measured, ""


def _gap(result: Data, memory: int) -> Any:
    """OGD's mean singular value minus PCA-OGD's, seed by seed."""
    return np.subtract(result[f"ogd {memory}"]["mean"], result[f"pca-ogd {memory}"]["mean"])


@CLAIMS.add(
    "section 5.2",
    "… and the gap grows with memory",
    "OGD − PCA-OGD of the mean singular value, clearly more with most memory than with least",
    "overlap-next",
    former=MEANS_ALONE,
)
def _growing(following: Data, margin: Margin = student) -> Finding:
    result = following["rotated"]
    gaps = [_gap(result, d) for d in _memories(result)]
    shown = listed(map(mean, gaps), ".3f")
    measured = f"gap {shown} at memories {listed(_memories(result))}"
    return by_noise(*ahead(gaps[-1], gaps[0], margin)), measured, ""


@CLAIMS.add(
    "section 5.2",
    "SGD has higher eigenvalues than the projection methods",
    "largest and mean of O(1→2) clearly above all variants', Rotated",
    "overlap-next",
    former=MEANS_ALONE,
)
def _sgd_highest(following: Data, margin: Margin = student) -> Finding:
    result = following["rotated"]
    sgd = next(v for v in result if v.startswith("sgd"))
    others = [v for v in result if v != sgd]
    verdict = everywhere(
        by_noise(*ahead(result[sgd][w], result[v][w], margin))
        for v in others
        for w in ("largest", "mean")
    )
    parts = []
    for what in ("largest", "mean"):
        rival = max(others, key=lambda v, what=what: mean(result[v][what]))  # type: ignore[misc]
        value, other = mean(result[sgd][what]), mean(result[rival][what])
        parts.append(f"{what} {value:.4f}, next {overlap.label(rival)} {other:.4f}")
    return verdict, "; ".join(parts), ""


_GROWTH = "growth of OGD − PCA-OGD of the largest singular value from least to most memory, mean "
_GROWTH += "over later tasks (±): {}"


@CLAIMS.add(
    "appendix, evolution figures",
    "More memory gives PCA-OGD a larger advantage (Rotated, Split CIFAR)",
    _GROWTH.format("clearly positive"),
    "overlap-later",
    former=TWO_ERRORS,
)
def _evolution(later: Data, margin: Margin = student) -> Finding:
    verdicts, shown, whys = [], [], []
    for benchmark in ("rotated", "cifar"):
        growth = _growths(later, benchmark)
        lead, noise = _clear(list(growth.values()), margin)
        verdicts.append(by_noise(lead, noise))
        shown.append(f"{NAMES[benchmark]} {lead:+.3f} ± {noise:.3f}")
        each = {k: _clear([result], margin) for k, result in growth.items()}
        clear = [f"O(1→{k})" for k, (lead, noise) in each.items() if lead > noise]
        where = f"{', '.join(clear) or 'none'} of {len(each)} later tasks"
        whys.append(f"{NAMES[benchmark]}: clearly at {where}")
    return everywhere(verdicts), "; ".join(shown), "; ".join(whys)


@CLAIMS.add(
    "appendix, evolution figures",
    "… but not on Permuted, where there is no pattern",
    _GROWTH.format("fails if clearly positive, holds if clearly below a quarter of Rotated's"),
    "overlap-later",
    former=Former(
        "its advantage with most memory at most a quarter of Rotated's",
        lambda later: _quarter(later),
    ),
)
def _no_evolution(later: Data, margin: Margin = student) -> Finding:
    growth, rotated = (
        np.mean(list(_growths(later, b).values()), 0) for b in ("permuted", "rotated")
    )
    lead, noise = ahead(growth, margin=margin)
    small = by_noise(*apart(estimate(rotated / 4), estimate(growth), margin))
    verdict = FAILS if by_noise(lead, noise) == HOLDS else HOLDS if small == HOLDS else UNDECIDED
    return verdict, f"Permuted {lead:+.3f} ± {noise:.3f}", ""


def _quarter(later: Data) -> Verdict:
    most = {b: max(_memories(later[b])) for b in ("permuted", "rotated")}
    found = {b: np.mean(list(_advantages(later, b, d).values())) for b, d in most.items()}
    return either(bool(found["permuted"] <= found["rotated"] / 4))


def _growths(later: Data, benchmark: str) -> dict[str, list[float]]:
    """By later task, how much PCA-OGD's advantage grows from least to most memory, seed by seed."""
    least, *_, most = _memories(later[benchmark])
    before, after = (_advantages(later, benchmark, memory) for memory in (least, most))
    return {task: list(after[task] - before[task]) for task in after}


def _advantages(later: Data, benchmark: str, memory: int) -> dict[str, Any]:
    """By later task, OGD's largest singular value minus PCA-OGD's, seed by seed."""
    ogd, pca = (later[benchmark][f"{m} {memory}"]["later"] for m in ("ogd", "pca-ogd"))
    return {t: np.subtract(ogd[t]["largest"], pca[t]["largest"]) for t in ogd}


def _clear(growths: Sequence[Sequence[float]], margin: Margin) -> tuple[float, float]:
    """The mean over tasks and seeds, and half its 95 % interval over seeds."""
    return ahead(np.mean(growths, 0), margin=margin)


@CLAIMS.add(
    "appendix, Permuted",
    "Permuted's eigenvalues are very small compared to Rotated's",
    "SGD's mean singular value of O(1→2) clearly below a third of Rotated's",
    "overlap-next",
    former=Former("largest below 0.6 of Rotated's", lambda data: _smaller(data)),
)
def _small(following: Data) -> Finding:
    permuted, rotated = _of_sgd(following)
    third = np.divide(rotated["mean"], 3)
    verdict = by_noise(*apart(estimate(third), estimate(permuted["mean"])))
    shown = "; ".join(
        f"{what} {mean(permuted[what]):.2f} against {mean(rotated[what]):.2f}"
        for what in ("mean", "largest")
    )
    share = mean(permuted["largest"]) / mean(rotated["largest"])
    why = (
        f"the largest is {100 * share:.0f} % of Rotated's"
        if verdict == HOLDS and share >= 1 / 3
        else ""
    )
    return verdict, shown, why


def _of_sgd(following: Data) -> list[Data]:
    """SGD's singular values on Permuted and on Rotated."""
    return [
        next(result for v, result in following[b].items() if v.startswith("sgd"))
        for b in ("permuted", "rotated")
    ]


def _smaller(following: Data) -> Verdict:
    permuted, rotated = _of_sgd(following)
    return either(mean(permuted["largest"]) < 0.6 * mean(rotated["largest"]))


@CLAIMS.add(
    "appendix, Permuted",
    "There, more memory hardly lowers the eigenvalues",
    "PCA-OGD's largest and mean fall by clearly less than 20 % from least to most memory",
    "overlap-next",
    former=MEANS_ALONE,
)
def _hardly(following: Data, margin: Margin = student) -> Finding:
    falls, parts, verdicts = {}, [], []
    for what in ("largest", "mean"):
        for benchmark in ("permuted", "rotated"):
            result = following[benchmark]
            least, *_, most = (result[f"pca-ogd {d}"][what] for d in _memories(result))
            falls[benchmark, what] = 100 * (1 - mean(most) / mean(least))
            if benchmark == "permuted":
                verdicts.append(by_noise(*ahead(most, np.multiply(0.8, least), margin)))
        permuted, rotated = (falls[b, what] for b in ("permuted", "rotated"))
        parts.append(f"{what} falls by {permuted:.0f} %, on Rotated by {rotated:.0f} %")
    return everywhere(verdicts), "; ".join(parts), ""


def _aligned(says: str, effect: str) -> None:
    """Add a claim that an effect of learning a task on an earlier one grows as they align."""

    @CLAIMS.add(
        "abstract, sections 3 and 4.2",
        says,
        "rank correlation with O's mean singular value over pairs of tasks: its 95 % interval, "
        "which knows that pairs share networks, above 0 on three benchmarks; fails if below on one",
        "alignment",
    )
    def decide(data: Data) -> Finding:
        if not data:
            return UNDECIDED, "", "no pairs were measured"
        found = {name: result[f"mean_overlap {effect}"] for name, result in data.items()}
        verdict = everywhere(
            HOLDS if low > 0 else FAILS if high < 0 else UNDECIDED
            for _, low, high in found.values()
        )
        shown = ", ".join(f"{name} {alignment.shown(value)}" for name, value in found.items())
        return verdict, shown, "plain SGD, one task after another"


_aligned("The impact of forgetting grows as tasks align, on real tasks: Δ", "delta")
_aligned("… and the accuracy that is lost", "lost")
