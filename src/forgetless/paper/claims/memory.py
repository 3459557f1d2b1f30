"""Claims of section 5.2 and its appendix about final accuracy against memory."""

import numpy as np

from forgetless.methods import method_label
from forgetless.paper.benchmarks import NAMES
from forgetless.paper.claims.base import (
    MEANS_ALONE,
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
from forgetless.paper.numbers import allowance, listed
from forgetless.paper.results import Data
from forgetless.support.statistics import Margin, ahead, apart, estimate, mean, std, student, two

CLAIMS = Claims()
_TWICE = (
    "A_T clearly not below OGD's with twice the memory by more than 1, and clearly above OGD's "
)
_TWICE += "with the same (±)"


def _as_good(benchmark: str) -> Former:
    """An earlier rule: only a clear difference counts, and noise helps."""

    def decide(memory: Data) -> Verdict:
        most = max(map(int, memory[benchmark]["ogd"]))
        lead, noise = _lead(memory, benchmark, most // 2, most, two)
        gain, doubt = _lead(memory, benchmark, most // 2, margin=two)
        return either(lead >= -noise and gain > doubt)

    return Former("not below, and above, by two standard errors", decide)


@CLAIMS.add(
    "section 5.2, memory figure",
    "PCA-OGD is twice as memory efficient on Rotated: PCA-OGD(100) is like OGD(200)",
    _TWICE,
    "memory",
    former=_as_good("rotated"),
)
def _twice(memory: Data) -> Finding:
    return _twice_on(memory, "rotated")


@CLAIMS.add(
    "appendix, memory figure", "… and on Split CIFAR", _TWICE, "memory", former=_as_good("cifar")
)
def _twice_cifar(memory: Data) -> Finding:
    return _twice_on(memory, "cifar")


def _twice_on(memory: Data, benchmark: str) -> Finding:
    result = memory[benchmark]
    memories = sorted(map(int, result["ogd"]))
    doubled = [(d, 2 * d) for d in memories if 2 * d in memories]
    if not doubled:
        return UNDECIDED, "", "no memory is twice another"
    found = {pair: _lead(memory, benchmark, *pair) for pair in doubled}
    (kept, twice), (lead, noise) = list(found.items())[-1]
    gain, doubt = _lead(memory, benchmark, kept)
    measured = f"PCA-OGD({kept}) minus OGD({twice}) {lead:+.1f} ± {noise:.1f}, minus OGD({kept}) "
    measured += f"{gain:+.1f} ± {doubt:.1f}"
    others = [
        f"PCA-OGD({d}) minus OGD({more}) {lead:+.1f} ± {noise:.1f}"
        for (d, more), (lead, noise) in list(found.items())[:-1]
    ]
    why = "; ".join([*others, "in directions; for bytes see “the same bytes” below"])
    return everywhere([inside(lead, noise, -1), by_noise(gain, doubt)]), measured, why


@CLAIMS.add(
    "section 5.2",
    "PCA-OGD gains about as much from 25 to 50 as from 50 to 100; OGD gains much from 100 to 200 "
    "and relatively little below",
    "first seven tasks: PCA-OGD's two gains clearly within a factor of 2, OGD's last clearly more "
    "than twice the others",
    "memory",
    former=Former(
        "over all tasks; PCA-OGD's gains within a factor of 2, OGD's last its largest",
        lambda memory: _largest_last(memory),
    ),
)
def _marginal(memory: Data, margin: Margin = student) -> Finding:
    gains = {}
    for method in ("pca-ogd", "ogd"):
        result = memory["rotated"][method]
        first = [np.transpose(result[d]["final"])[:7].mean(0) for d in sorted(result, key=int)]
        gains[method] = np.diff(first, axis=0)  # (memories − 1, S)
    (one, other, *_), (*earlier, last) = gains.values()
    alike = everywhere(by_noise(*ahead(2 * a, b, margin)) for a, b in ((one, other), (other, one)))
    more = everywhere(by_noise(*ahead(last, 2 * gain, margin)) for gain in earlier)
    means = {m: [mean(gain) for gain in found] for m, found in gains.items()}
    shown = "; ".join(f"{method_label(m)} {listed(of, '+.1f')}" for m, of in means.items())
    ratio = means["ogd"][-1] / max(*means["ogd"][:-1], 1e-9)
    why = f"that PCA-OGD's are alike {alike}; OGD's last is {ratio:.1f} times the larger of the "
    return everywhere([alike, more]), shown, why + "others"


def _largest_last(memory: Data) -> Verdict:
    pca, ogd = (
        np.diff([mean(result[d]["average"]) for d in sorted(result, key=int)])
        for result in (memory["rotated"][m] for m in ("pca-ogd", "ogd"))
    )
    return either(bool(0.5 <= pca[0] / max(pca[1], 1e-9) <= 2 and ogd[-1] == ogd.max()))


@CLAIMS.add(
    "section 5.2; appendix, Permuted",
    "On Permuted, OGD and PCA-OGD are comparable, but PCA-OGD is much worse on task 1",
    "A_T clearly within 1.5 at every memory, task 1 clearly lower by 5 at Table 1's memory",
    "memory",
    former=MEANS_ALONE,
)
def _permuted(memory: Data, margin: Margin = student) -> Finding:
    result = memory["permuted"]
    memories = sorted(map(int, result["ogd"]))
    averages = [_lead(memory, "permuted", d, margin=margin) for d in memories]
    pca, ogd = (
        [np.transpose(result[m][str(d)]["final"])[0] for d in memories] for m in ("pca-ogd", "ogd")
    )
    first = [ahead(p, o, margin) for p, o in zip(pca, ogd, strict=True)]
    much, doubt = first[memories.index(memories[-1] // 2)]
    verdicts = [inside(*lead, -1.5, 1.5) for lead in averages]
    shown = [", ".join(f"{d:+.1f} ± {n:.1f}" for d, n in found) for found in (averages, first)]
    why = f"PCA-OGD minus OGD at memories {listed(memories)}"
    measured = f"A_T {shown[0]}; task 1 {shown[1]}"
    return everywhere([*verdicts, by_noise(-5 - much, doubt)]), measured, why


@CLAIMS.add(
    "section 5.2",
    "On Permuted, which has no structure, PCA-OGD is less efficient",
    "its A_T minus OGD's, Table 1's memory, is clearly smaller than on Rotated (±)",
    "memory",
    former=Former(
        "A_T below OGD's with twice the memory by more than max(1.5, 2σ)",
        lambda memory: _not_twice(memory),
    ),
)
def _less_efficient(memory: Data) -> Finding:
    table1 = max(map(int, memory["permuted"]["ogd"])) // 2
    rotated, permuted = (
        np.subtract(*(memory[b][m][str(table1)]["average"] for m in ("pca-ogd", "ogd")))
        for b in ("rotated", "permuted")
    )
    leads = {"rotated": ahead(rotated), "permuted": ahead(permuted)}
    shown = ", ".join(f"{NAMES[b]} {lead:+.1f} ± {noise:.1f}" for b, (lead, noise) in leads.items())
    return by_noise(*apart(estimate(rotated), estimate(permuted))), shown, ""


@CLAIMS.add(
    "introduction, contributions",
    "PCA-OGD is advantageous where tasks depend on each other",
    "its A_T minus OGD's, Table 1's memory, is clearly positive where the mean of SGD's O(1→2) is "
    "above the least of the benchmarks', and clearly more than there (±)",
    "memory",
    "overlap-next",
)
def _advantageous(memory: Data, following: Data) -> Finding:
    overlaps = {
        b: mean(next(of["mean"] for v, of in result.items() if v.startswith("sgd")))
        for b, result in following.items()
        if b in memory
    }
    order = sorted(overlaps, key=lambda b: -overlaps[b])
    kept = {b: str(max(map(int, memory[b]["ogd"])) // 2) for b in order}
    leads = {
        b: np.subtract(*(memory[b][m][kept[b]]["average"] for m in ("pca-ogd", "ogd")))
        for b in order
    }
    shown = ", ".join(
        "{} {:+.1f} ± {:.1f} (overlap {:.2f})".format(NAMES[b], *ahead(leads[b]), overlaps[b])
        for b in order
    )
    *others, least = order
    verdicts = [by_noise(*ahead(leads[b])) for b in others]
    more = [by_noise(*apart(estimate(leads[b]), estimate(leads[least]))) for b in others]
    why = "three benchmarks, the network as released; PCA-OGD has as many directions, not bytes"
    return everywhere([*verdicts, *more]), shown, why


def _not_twice(memory: Data) -> Verdict:
    result = memory["permuted"]
    most = max(map(int, result["ogd"]))
    pca, ogd = result["pca-ogd"][str(most // 2)]["average"], result["ogd"][str(most)]["average"]
    return either(mean(pca) - mean(ogd) < -allowance(1.5, std(pca), std(ogd)))


def _lead(
    memory: Data, benchmark: str, kept: int, rival: int | None = None, margin: Margin = student
) -> tuple[float, float]:
    """By how much PCA-OGD's A_T is above OGD's, and half the 95 % interval.

    Arguments:
        kept: PCA-OGD's memory.
        rival: OGD's, if it is another.
    """
    result = memory[benchmark]
    pca, ogd = result["pca-ogd"][str(kept)], result["ogd"][str(rival or kept)]
    return ahead(pca["average"], ogd["average"], margin)
