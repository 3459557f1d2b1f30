"""Claims of sections 5.1 and 5.2 and their appendices: overlap of tasks, and memory."""

import numpy as np

from forgetless.paper.artefact import Data
from forgetless.paper.artefacts import overlap_later
from forgetless.paper.claims.base import HOLDS, Claims, Finding, either
from forgetless.paper.numbers import allowance, mean, std
from forgetless.paper.pictures import LABELS, NAMES

CLAIMS = Claims()


def _memories(of: Data) -> list[int]:
    """The memories of OGD's and PCA-OGD's variants "method memory"."""
    return sorted({int(v.split()[1]) for v in of if v.startswith("ogd")})


@CLAIMS.add(
    "section 5.1",
    "Low eigenvalues of O(1→15) go with a smaller drop on task 1",
    "rank correlation over methods and memories at least 0.8",
    "overlap-later: rotated, rotated with GEM-NT",
)
def _drop(later: Data) -> Finding:
    value, p = overlap_later.rank_correlation(later)
    count = len(overlap_later.points(later))
    alone, _ = overlap_later.rank_correlation(later, without="gem-nt")
    fewer = len(overlap_later.points(later, without="gem-nt"))
    why = f"Rotated MNIST; {value:.3f} over all {count} points, which chance alone would give with "
    why += f"p = {p:.2g}; {alone:.3f} over the {fewer} without GEM-NT"
    return either(value >= 0.8), f"{value:.2f} over {count} points", why


@CLAIMS.add(
    "section 5.1",
    "PCA-OGD has 7 to 10 points less drop than OGD",
    "difference at every memory from 5.5 to 11.5",
    "overlap-later: rotated",
)
def _less_drop(later: Data) -> Finding:
    of = later["rotated"]
    gains = [mean(of[f"ogd {d}"]["drop"]) - mean(of[f"pca-ogd {d}"]["drop"]) for d in _memories(of)]
    held = all(5.5 <= gain <= 11.5 for gain in gains)
    shown = ", ".join(f"{gain:.1f}" for gain in gains)
    return either(held), f"{shown} at memories {_memories(of)}", "task 1 of Rotated MNIST"


@CLAIMS.add(
    "section 5.1",
    "… and that is because its eigenvalues of O(1→15) are lower",
    "largest singular value below OGD's at every memory, Rotated",
    "overlap-later: rotated",
)
def _because(later: Data) -> Finding:
    of = later["rotated"]
    values = {
        d: [mean(list(of[f"{m} {d}"]["later"].values())[-1]["largest"]) for m in ("ogd", "pca-ogd")]
        for d in _memories(of)
    }
    shown = ", ".join(f"{ogd:.3f} / {pca:.3f}" for ogd, pca in values.values())
    gains = {
        d: mean(of[f"ogd {d}"]["drop"]) - mean(of[f"pca-ogd {d}"]["drop"])
        for d, (ogd, pca) in values.items()
        if pca >= ogd
    }
    less = ", ".join(f"{gain:.1f} at memory {d}" for d, gain in gains.items() if gain > 0)
    why = f"where they are not, the drop is smaller all the same: by {less}" if less else ""
    return either(not gains), f"OGD / PCA-OGD {shown}", why


@CLAIMS.add(
    "sections 5.2 and appendix, captions",
    "Lower eigenvalues imply less forgetting, on Permuted too",
    "rank correlation of O(1→15) and the drop on task 1 at least 0.8",
    "overlap-later: permuted",
)
def _implies(later: Data) -> Finding:
    value, _ = overlap_later.rank_correlation(later, "permuted")
    found = overlap_later.points(later, "permuted")
    pairs = "; ".join(
        f"{overlap_later.label(v)} {overlap:.2f}, {drop:.0f}" for v, overlap, drop in found
    )
    return either(value >= 0.8), f"{value:.2f} over {pairs}", "largest singular value, drop"


@CLAIMS.add(
    "section 5.2",
    "PCA-OGD has lower eigenvalues than OGD and GEM-NT",
    "largest and mean of O(1→2), every memory, Rotated",
    "overlap-next",
)
def _lower(following: Data) -> Finding:
    of = following["rotated"]
    gem = next(v for v in of if v.startswith("gem-nt"))
    pairs = [
        (mean(of[f"pca-ogd {d}"][what]), mean(of[other][what]))
        for d in _memories(of)
        for other in (f"ogd {d}", gem)
        for what in ("largest", "mean")
    ]
    lower = sum(a < b for a, b in pairs)
    return either(lower == len(pairs)), f"lower in {lower} of {len(pairs)} comparisons", ""


def _gap(of: Data, memory: int) -> float:
    return mean(of[f"ogd {memory}"]["mean"]) - mean(of[f"pca-ogd {memory}"]["mean"])


@CLAIMS.add(
    "section 5.2",
    "… and the gap grows with memory",
    "OGD − PCA-OGD of the mean singular value, most memory against least",
    "overlap-next",
)
def _growing(following: Data) -> Finding:
    of = following["rotated"]
    gaps = [_gap(of, d) for d in _memories(of)]
    shown = ", ".join(f"{gap:.3f}" for gap in gaps)
    return either(gaps[-1] > gaps[0]), f"gap {shown} at memories {_memories(of)}", ""


@CLAIMS.add(
    "section 5.2",
    "SGD has higher eigenvalues than the projection methods",
    "largest and mean, all variants, Rotated",
    "overlap-next",
)
def _sgd_highest(following: Data) -> Finding:
    of = following["rotated"]
    sgd = next(v for v in of if v.startswith("sgd"))
    others = [v for v in of if v != sgd]
    held = all(mean(of[sgd][w]) >= mean(of[v][w]) for v in others for w in ("largest", "mean"))
    rival = max(others, key=lambda v: mean(of[v]["largest"]))
    measured = f"largest {mean(of[sgd]['largest']):.3f}; next {mean(of[rival]['largest']):.3f}"
    return either(held), measured, f"next: {LABELS[rival.split()[0]]}"


@CLAIMS.add(
    "section 5.2, memory figure",
    "PCA-OGD is twice as memory efficient on Rotated: PCA-OGD(100) is like OGD(200)",
    "A_T not below OGD's with twice the memory by more than max(1.5, 2σ)",
    "memory: rotated",
)
def _twice(memory: Data) -> Finding:
    return _twice_on(memory, "rotated")


@CLAIMS.add("appendix, memory figure", "… and on Split CIFAR", "the same", "memory: cifar")
def _twice_cifar(memory: Data) -> Finding:
    return _twice_on(memory, "cifar")


def _twice_on(memory: Data, benchmark: str) -> Finding:
    of = memory[benchmark]
    most = max(map(int, of["ogd"]))
    pca, ogd = of["pca-ogd"][str(most // 2)]["average"], of["ogd"][str(most)]["average"]
    difference = mean(pca) - mean(ogd)
    held = difference >= -allowance(1.5, std(pca), std(ogd))
    measured = f"PCA-OGD({most // 2}) {mean(pca):.1f}, OGD({most}) {mean(ogd):.1f}"
    return either(held), measured, "in directions; for bytes see “the same bytes” below"


@CLAIMS.add(
    "section 5.2",
    "PCA-OGD gains about as much from 25 to 50 as from 50 to 100; OGD most from 100 to 200",
    "first seven tasks: PCA-OGD's two gains within a factor of 2, OGD's last twice the others",
    "memory: rotated",
)
def _marginal(memory: Data) -> Finding:
    gains = {
        method: np.diff(
            [np.mean(np.transpose(of["final"])[:7]) for of in memory["rotated"][method].values()]
        )
        for method in ("ogd", "pca-ogd")
    }
    pca, ogd = gains["pca-ogd"], gains["ogd"]
    constant = 0.5 <= pca[0] / max(pca[1], 1e-9) <= 2
    held = constant and ogd[-1] > 2 * ogd[:-1].max()
    shown = {m: ", ".join(f"{g:+.1f}" for g in of) for m, of in gains.items()}
    why = (
        "constant: yes; OGD's last is the largest, not by so much" if constant and not held else ""
    )
    return either(bool(held)), f"PCA-OGD {shown['pca-ogd']}; OGD {shown['ogd']}", why


@CLAIMS.add(
    "section 5.2; appendix, Permuted",
    "On Permuted, OGD and PCA-OGD are comparable, but PCA-OGD is much worse on task 1",
    "A_T within 1.5 at every memory, task 1 lower by 5 or more at memory 100",
    "memory: permuted",
)
def _permuted(memory: Data) -> Finding:
    of = memory["permuted"]
    differences = [
        mean(of["pca-ogd"][d]["average"]) - mean(of["ogd"][d]["average"]) for d in of["ogd"]
    ]
    first = [
        float(np.mean(of["pca-ogd"][d]["final"], 0)[0] - np.mean(of["ogd"][d]["final"], 0)[0])
        for d in of["ogd"]
    ]
    held = max(map(abs, differences)) <= 1.5 and first[-2] <= -5
    total, alone = (", ".join(f"{d:+.1f}" for d in found) for found in (differences, first))
    why = f"PCA-OGD minus OGD at memories {list(map(int, of['ogd']))}"
    return either(bool(held)), f"A_T {total}; task 1 {alone}", why


@CLAIMS.add(
    "section 5.2",
    "On Permuted, which has no structure, PCA-OGD is less efficient",
    "A_T below OGD's with twice the memory by more than max(1.5, 2σ)",
    "memory: permuted",
)
def _less_efficient(memory: Data) -> Finding:
    word, measured, why = _twice_on(memory, "permuted")
    return either(word != HOLDS), measured, why


@CLAIMS.add(
    "appendix, evolution figures",
    "More memory gives PCA-OGD a larger advantage (Rotated, Split CIFAR)",
    "OGD − PCA-OGD of the largest singular value, mean over later tasks, most memory against least",
    "overlap-later: rotated, cifar",
)
def _evolution(later: Data) -> Finding:
    found = {b: _advantages(later, b) for b in ("rotated", "cifar")}
    held = all(most > least for least, most in found.values())
    shown = "; ".join(f"{NAMES[b]} {least:.3f} to {most:.3f}" for b, (least, most) in found.items())
    return either(held), shown, ""


@CLAIMS.add(
    "appendix, evolution figures",
    "… but not on Permuted, where there is no pattern",
    "its advantage grows by at most a quarter of what it grows by on Rotated",
    "overlap-later: permuted, rotated",
)
def _no_evolution(later: Data) -> Finding:
    found = {b: _advantages(later, b) for b in ("permuted", "rotated")}
    permuted, rotated = (most - least for least, most in found.values())
    shown = "; ".join(f"{NAMES[b]} {least:.3f} to {most:.3f}" for b, (least, most) in found.items())
    return either(permuted <= rotated / 4), shown, ""


def _advantages(later: Data, benchmark: str) -> tuple[float, float]:
    """OGD's minus PCA-OGD's largest singular value over later tasks: least and most memory."""
    of = later[benchmark]

    def largest(variant: str) -> float:
        return mean([mean(found["largest"]) for found in of[variant]["later"].values()])

    gaps = [largest(f"ogd {d}") - largest(f"pca-ogd {d}") for d in _memories(of)]
    return gaps[0], gaps[-1]


@CLAIMS.add(
    "appendix, Permuted",
    "Permuted's eigenvalues are very small beside Rotated's",
    "SGD's mean singular value of O(1→2) below a third of Rotated's",
    "overlap-next",
)
def _small(following: Data) -> Finding:
    permuted, rotated = (
        next(of for v, of in following[b].items() if v.startswith("sgd"))
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
    "PCA-OGD's largest falls by less than 20 % from least to most memory",
    "overlap-next",
)
def _hardly(following: Data) -> Finding:
    falls, ends = {}, {}
    for benchmark in ("permuted", "rotated"):
        of = following[benchmark]
        found = [mean(of[f"pca-ogd {d}"]["largest"]) for d in _memories(of)]
        falls[benchmark] = 100 * (1 - found[-1] / found[0])
        ends[benchmark] = f"from {found[0]:.2f} to {found[-1]:.2f}"
    measured = f"falls by {falls['permuted']:.0f} %, on Rotated by {falls['rotated']:.0f} %"
    held = falls["permuted"] < 20
    why = "" if held else f"{ends['permuted']}, on Rotated {ends['rotated']}"
    return either(held), measured, why
