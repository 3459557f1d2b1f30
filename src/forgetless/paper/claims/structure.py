"""Claims about structure in the data and the constancy of the kernel."""

import itertools
from math import isnan

import numpy as np

from forgetless.paper.artefacts import kernel_change, variance
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
)
from forgetless.paper.printed import VARIANCE, VARIANCE_COUNTS, VARIANCE_OF_14
from forgetless.paper.results import Data
from forgetless.support.statistics import Margin, ahead, apart, estimate, mean, student

CLAIMS = Claims()
_OF_200 = VARIANCE["rotated"][VARIANCE_COUNTS.index(200)]
# The moments that were expected to fit, before they were measured.
_EXPECTED = {
    "permuted": "task 2, at initialisation",
    "rotated": "task 1, after training on it",
    "cifar": "task 2, after training on it",
}


def _as_expected(data: Data) -> Verdict:
    return either(all(variance.fits(data, b, moment) for b, moment in _EXPECTED.items()))


@CLAIMS.add(
    "appendix, variance table",
    "Explained variance of Permuted, Rotated and Split CIFAR",
    "within 2 points (Split CIFAR 4) at the best of seven moments, a column by itself",
    "variance",
    former=Former(
        "Permuted task 2 at initialisation, Rotated task 1 and Split CIFAR task 2 after training",
        _as_expected,
    ),
)
def _variance(data: Data) -> Finding:
    moments = {b: variance.convention(data, b) for b in variance.BENCHMARKS}
    held = all(variance.fits(data, b, moment) for b, moment in moments.items())
    shown = ", ".join(
        f"{NAMES[b]} {variance.furthest(data, b, moment):.1f} ({moment})"
        for b, moment in moments.items()
    )
    common = [
        m for m in variance.MOMENTS if all(variance.fits(data, b, m) for b in variance.BENCHMARKS)
    ]
    why = "" if common else "each column by itself; no moment fits all three"
    return either(held), f"largest difference {shown}", why


@CLAIMS.add(
    "section 5.2",
    f"200 components explain {_OF_200} % on Rotated",
    "within 2 points at the moment that fits Rotated's column best",
    "variance",
)
def _ninety(data: Data) -> Finding:
    count = data["counts"][4]
    moment = variance.convention(data, "rotated")
    value = variance.at(data, "rotated", moment, count)
    return either(abs(value - _OF_200) <= 2), f"{value:.1f} % with {count}", moment


@CLAIMS.add(
    "appendix, Structure in the data",
    f"14 components explain {VARIANCE_OF_14['permuted']} % on Permuted, "
    f"{VARIANCE_OF_14['rotated']} % on Rotated",
    "within 2 points at the matched moment",
    "variance",
)
def _fourteen(data: Data) -> Finding:
    values = {b: mean(data[b][variance.convention(data, b)]["few"]) for b in VARIANCE_OF_14}
    held = all(abs(value - VARIANCE_OF_14[b]) <= 2 for b, value in values.items())
    shown = " and ".join(f"{value:.1f} %" for value in values.values())
    return either(held), f"{shown} with {data['few']}", ""


@CLAIMS.add(
    "appendix, Permuted",
    "Permuted MNIST has no structure: 50 components explain 50 %, on Rotated 81 %",
    "after training on the task, Permuted's share clearly more than a tenth below Rotated's",
    "variance",
    former=MEANS_ALONE,
)
def _no_structure(data: Data, margin: Margin = student) -> Finding:
    count = data["counts"][2]
    shares = {
        b: np.array(data[b]["task 2, after training on it"]["percent"])[:, 2]
        for b in ("permuted", "rotated")
    }
    after = {b: mean(share) for b, share in shares.items()}
    before = variance.at(data, "permuted", "task 2, at initialisation", count)
    tenth_below, permuted = estimate(0.9 * shares["rotated"]), estimate(shares["permuted"])
    measured = f"task 2: {before:.0f} % at initialisation, {after['permuted']:.0f} % once learned"
    why = (
        f"Rotated {after['rotated']:.0f} %: the column looks before training, PCA-OGD after it. "
        "Within a task; whether tasks share structure is another question"
    )
    return by_noise(*apart(tenth_below, permuted, margin)), measured, why


@CLAIMS.add(
    "section 5.3; appendix, NTK changes",
    "The kernel does not vary any more (is approximately constant) after task 1 on Split CIFAR",
    "its change since the start is at most a tenth larger at the end than after task 1",
    "kernel-change",
)
def _constant(data: Data) -> Finding:
    more = 1 / kernel_change.growth(data, "cifar")[0] - 1
    later = 100 * np.mean(list(data["cifar"].values())[-1]["in task"], 0)[1:]
    measured = f"{100 * more:.0f} % larger; each later task changes the kernel by "
    measured += f"{later.min():.0f} to {later.max():.0f} %"
    why = "although convolutions are frozen; it would hold with a threshold of "
    why += f"{100 * more:.0f} % or more, which the paper does not give"
    return either(more <= 0.1), measured, why if more > 0.1 else ""


@CLAIMS.add(
    "section 5.3; appendix, NTK changes",
    "… and changes linearly on the MNIST benchmarks",
    "a line explains 90 % of the curve over tasks",
    "kernel-change",
)
def _linear(data: Data) -> Finding:
    found = {b: kernel_change.growth(data, b) for b in ("permuted", "rotated")}
    shown = ", ".join(f"{NAMES[b]} R² {fit:.2f}" for b, (_, fit) in found.items())
    if any(isnan(fit) for _, fit in found.values()):
        return UNDECIDED, shown, "two tasks are always on a line"
    more = ", ".join(f"{NAMES[b]} {100 / share - 100:.0f} %" for b, (share, _) in found.items())
    why = f"larger at the end than after task 1: {more}"
    return either(min(fit for _, fit in found.values()) >= 0.9), shown, why


@CLAIMS.add(
    "section 5.3",
    "A small dataset makes a constant kernel more realistic",
    "the change at the end clearly grows with the dataset, everywhere",
    "kernel-change",
    former=MEANS_ALONE,
)
def _smaller(data: Data, margin: Margin = student) -> Finding:
    curves = {
        b: [np.transpose(result["since start"])[-1] for result in sizes.values()]
        for b, sizes in data.items()
    }
    verdict = everywhere(
        by_noise(*ahead(more, less, margin))
        for curve in curves.values()
        for less, more in itertools.pairwise(curve)
    )
    shown = "; ".join(
        f"{NAMES[b]} {mean(curve[0]):.2f} to {mean(curve[-1]):.2f}" for b, curve in curves.items()
    )
    growing = [
        NAMES[b]
        for b, sizes in data.items()
        if kernel_change.later_growth(sizes, 0) > kernel_change.later_growth(sizes, -1)
    ]
    why = "least to most data, since initialisation; with epochs fixed, less data is fewer steps"
    if growing:
        why += (
            f"; counted from the end of task 1, less data changes it more on {', '.join(growing)}"
        )
    return verdict, shown, why


@CLAIMS.add(
    "section 5.3; appendix",
    "The kernel changes after OGD and PCA-OGD store their gradients, which become outdated",
    "of task 1's features, those at the end have clearly at least a tenth less in what PCA-OGD "
    "stored of it than those after task 1, MNIST",
    "kernel-change",
    former=MEANS_ALONE,
)
def _outdated(data: Data, margin: Margin = student) -> Finding:
    found = {b: kernel_change.captured(data[b]) for b in ("permuted", "rotated")}
    words = [
        f"{NAMES[b]} {100 * mean(first):.0f} %, then {100 * mean(last):.0f} %"
        for b, (first, last) in found.items()
    ]
    verdict = everywhere(
        by_noise(*ahead(np.multiply(0.9, first), last, margin)) for first, last in found.values()
    )
    return verdict, "; ".join(words), "shares of their squared norm"


@CLAIMS.add(
    "section 5.3; appendix, NTK changes",
    "The constant kernel explains PCA-OGD's good result on Split CIFAR",
    "no run holds the kernel fixed",
)
def _explains() -> Finding:
    return UNDECIDED, "", "that both go together on one benchmark does not show a cause"
