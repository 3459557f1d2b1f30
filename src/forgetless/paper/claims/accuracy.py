"""Claims of section 5.3 and its appendix: accuracy and forgetting on the four benchmarks."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from forgetless.methods import method_label
from forgetless.paper.artefacts import forgetting_gap, per_task, table1
from forgetless.paper.benchmarks import NAMES
from forgetless.paper.claims.base import (
    FAILS,
    HOLDS,
    MEANS_ALONE,
    RELEASED_ONLY,
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
    over_protocols,
)
from forgetless.paper.numbers import DIVERGED, by_chance
from forgetless.paper.printed import FINAL, TABLE1
from forgetless.paper.results import Data
from forgetless.support.statistics import Margin, ahead, mean, student

ACCURACY, FORGETTING = Claims(), Claims()
_CLEARLY = "0 outside the difference's 95 % interval (±), every protocol"
_HIGHEST = f"highest A_T, {_CLEARLY}"
_LOWEST = f"lowest F_T, {_CLEARLY}"
_WITHIN = "a difference is within its 95 % interval"
_AGREE = "0 in the 95 % interval of each difference, but for as many as chance explains (p ≥ 0.05)"


def _near(what: str) -> Former:
    """An earlier rule of Table 1, whose tolerance is as large as the spread."""

    def decide(data: Data, *_: Data) -> Verdict:
        good = (table1.near(TABLE1[b][m], data[b][m], what) for b in data for m in data[b])
        return either(all(good))

    return Former("within max(1.5, 2σ) each", decide)


@ACCURACY.add("Table 1", "A_T of 20 cells", _AGREE, "table1", former=_near("average"))
def _cells(data: Data) -> Finding:
    return _agreeing(data, "average")


@ACCURACY.add(
    "Table 1", "F_T of 20 cells, as the text defines it", _AGREE, "table1",
    former=_near("forgetting"),
)  # fmt: skip
def _forgetting(data: Data) -> Finding:
    verdict, measured, why = _agreeing(data, "forgetting")
    lower = sum(
        mean(result["forgetting"]) < TABLE1[b][m].forgetting
        for b, methods in data.items()
        for m, result in methods.items()
        if DIVERGED not in result
    )
    return verdict, f"{measured}; lower here than printed in {lower}", why


def _agreeing(data: Data, what: str) -> Finding:
    good = {
        f"{NAMES[b]} {method_label(m)}": table1.agreement(TABLE1[b][m], result, what)[0]
        for b, methods in data.items()
        for m, result in methods.items()
    }
    bad = [cell for cell, agrees in good.items() if not agrees]
    broken = any(DIVERGED in result for methods in data.values() for result in methods.values())
    p = by_chance(len(bad), len(good))
    why = f"released protocol{'; not ' if bad else ''}{', '.join(bad)}"
    verdict = either(p >= 0.05 and not broken)
    return verdict, f"{sum(good.values())} of {len(good)}, p = {p:.2g}", why


@ACCURACY.add(
    "appendix, tables of final accuracy",
    "275 final accuracies",
    _AGREE,
    "per-task",
    former=Former("90 % within max(2.5, 2σ)", lambda data: _most_near(data)),
)
def _tasks(data: Data) -> Finding:
    good, total = _counted(per_task.agreeing(data))
    p = by_chance(total - good, total)
    near, _ = _counted(per_task.agreeing(data, per_task.near))
    apart = per_task.differences(data)
    why = f"released protocol; differences {np.median(apart):.1f} in the median, "
    why += f"{np.quantile(apart, 0.95):.1f} in 95 %; {near} within max(2.5, 2σ). The tasks of a "
    why += "run are not independent, as the p-value takes them to be"
    return either(p >= 0.05), f"{good} of {total}, p = {p:.2g}", why


def _counted(counts: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """Cells that agree, and all, of all benchmarks."""
    good, total = zip(*counts.values(), strict=True)
    return sum(good), sum(total)


def _most_near(data: Data) -> Verdict:
    good, total = _counted(per_task.agreeing(data, per_task.near))
    return either(good >= 0.9 * total)


@ACCURACY.add(
    "appendix, tables of final accuracy, bold",
    "The best method of each task",
    "it has the highest mean here too, in 90 % of all tasks",
    "per-task",
)
def _winners(data: Data) -> Finding:
    same, shown = [], []
    for benchmark, methods in data.items():
        ours = {m: np.mean(result, 0) for m, result in per_task.finished(methods).items()}
        theirs = {m: FINAL[benchmark][m][0] for m in methods}
        tasks = min(map(len, [*ours.values(), *theirs.values()]))
        agree = [_best(ours, t) <= _best(theirs, t) for t in range(tasks)]  # printed ones may tie
        same += agree
        shown.append(f"{NAMES[benchmark]} {sum(agree)} of {tasks}")
    return either(sum(same) >= 0.9 * len(same)), ", ".join(shown), "released protocol"


def _best(result: Mapping[str, Any], task: int) -> set[str]:
    """The methods with the highest accuracy on a task."""
    highest = max(accuracy[task] for accuracy in result.values())
    return {m for m, accuracy in result.items() if accuracy[task] == highest}


@ACCURACY.add(
    "section 5.3",
    "PCA-OGD is comparable to A-GEM overall",
    "A_T clearly not below A-GEM's by more than 2 (±), four benchmarks, every protocol",
    "protocols",
    former=MEANS_ALONE,
)
def _comparable(data: Data, margin: Margin = student) -> Finding:
    def decide(cells: Data) -> tuple[Verdict, str]:
        lead, noise = ahead(cells["pca-ogd"]["average"], cells["a-gem"]["average"], margin)
        return inside(lead, noise, -2), f"{lead:+.1f} ± {noise:.1f}"

    found = _by_protocol(data, decide)
    parts = [f"{p} {', '.join(' '.join(result[1:]) for result in found[p])}" for p in found]
    verdicts = {p: everywhere(result[0] for result in cells) for p, cells in found.items()}
    verdict = over_protocols(verdicts)
    why = ["PCA-OGD minus A-GEM, which stores samples in far fewer bytes"]
    why.append(_as_released(verdict, verdicts))
    return verdict, "; ".join(sorted(parts, reverse=True)), "; ".join(filter(None, why))


def _by_protocol(
    data: Data, decide: Callable[[Data], tuple[Verdict, str]]
) -> dict[str, list[tuple[Verdict, str, str]]]:
    """Protocol → verdict, benchmark and number of each benchmark."""
    found: dict[str, list[tuple[Verdict, str, str]]] = {}
    for benchmark, protocols in data.items():
        for protocol, cells in protocols.items():
            verdict, text = decide(cells)
            found.setdefault(protocol, []).append((verdict, NAMES[benchmark], text))
    return found


def _as_released(verdict: Verdict, verdicts: Mapping[str, Verdict]) -> str:
    """For a claim that holds only as released: the verdict with mended methods on that network."""
    frozen = verdicts.get("frozen")
    if verdict != RELEASED_ONLY or frozen in (None, FAILS):
        return ""
    how = "it holds" if frozen == HOLDS else "within its 95 % interval"
    return f"with mended methods on the network as released {how}; it fails where all of it trains"


def _first(
    protocols: Data, method: str, what: str, sign: int = 1, margin: Margin = student
) -> Finding:
    """Whether a method has the highest value under every protocol, or with sign −1 the lowest."""
    verdicts: dict[str, Verdict] = {}
    shown = []
    for protocol, methods in protocols.items():
        values = {m: result[what] for m, result in methods.items()}
        rival = max((m for m in values if m != method), key=lambda m: sign * mean(values[m]))
        lead, noise = ahead(values[method], values[rival], margin)
        verdicts[protocol] = by_noise(sign * lead, noise)
        shown.append(f"{protocol} {lead:+.2f} ± {noise:.2f} to {method_label(rival)}")
    verdict = over_protocols(verdicts)
    why = _WITHIN if verdict == UNDECIDED else _as_released(verdict, verdicts)
    return verdict, "; ".join(shown), why


@ACCURACY.add(
    "Table 1",
    "On Split CIFAR A-GEM is the worst of all, below SGD",
    f"lowest A_T, {_CLEARLY}",
    "protocols",
    former=TWO_ERRORS,
)
def _agem_worst(data: Data, margin: Margin = student) -> Finding:
    verdict, shown, why = _first(data["cifar"], "a-gem", "average", -1, margin)
    ranks = []
    for protocol, methods in data["cifar"].items():
        order = sorted(methods, key=lambda m: -mean(methods[m]["average"]))
        ranks.append(f"{protocol} {order.index('a-gem') + 1} of {len(order)}")
    if verdict not in (HOLDS, UNDECIDED):
        why = f"its rank: {', '.join(ranks)}; the released code sends a mixed batch through one "
        why += "head and trains no head after the first task"
    return verdict, shown, why


def _leads(
    says: str, benchmark: str, method: str, what: str = "average", place: str = "Table 1"
) -> None:
    """Add a claim that a method has the highest A_T of a benchmark, or the lowest F_T."""
    claims, test, sign = ACCURACY, _HIGHEST, 1
    if what == "forgetting":
        claims, test, sign = FORGETTING, _LOWEST, -1

    @claims.add(place, says, test, "protocols", former=TWO_ERRORS)
    def decide(data: Data, margin: Margin = student) -> Finding:
        return _first(data[benchmark], method, what, sign, margin)


_leads("PCA-OGD is the best on Split CIFAR", "cifar", "pca-ogd", place="Table 1, section 5.3")
_leads("A-GEM is the best on Rotated", "rotated", "a-gem")
_leads("A-GEM is the best on Permuted", "permuted", "a-gem")
_leads("OGD is the best on Split MNIST", "split", "ogd")


@FORGETTING.add(
    "Table 1", "F_T is the mean over T − 1 tasks of the best minus the final accuracy",
    "the printed F_T, from our best and the printed final accuracies: Σt² over the cells not above "
    "that of chance (p ≥ 0.05)",
    "forgetting-gap",
)  # fmt: skip
def _normaliser(gap: Data) -> Finding:
    if "readings" not in gap:
        return UNDECIDED, "", "training diverged or seeds are too few"
    text, likely = (gap["readings"][name] for name in (forgetting_gap.TEXT, forgetting_gap.LIKELY))
    shown = [
        f"Σt² {found['printed finals']['sum']:.0f}, "
        f"p {forgetting_gap.shown_p(found['printed finals']['p'])}"
        for found in (text, likely)
    ]
    measured = "; times T / (T − 1) ".join(shown)
    why = f"with that factor {likely['agree']} of {likely['cells']} cells of F_T agree; not told "
    why += f"apart: {', '.join(forgetting_gap.standing(gap))}"
    return either(text["printed finals"]["p"] >= 0.05), measured, why


@FORGETTING.add(
    "Table 1", "EWC forgets least on Permuted", _LOWEST, "protocols", "table1", former=TWO_ERRORS
)
def _ewc_least(data: Data, table: Data, margin: Margin = student) -> Finding:
    verdict, measured, why = _first(data["permuted"], "ewc", "forgetting", -1, margin)
    last = {m: mean(np.transpose(result["final"])[-1]) for m, result in table["permuted"].items()}
    others = min(value for m, value in last.items() if m != "ewc")
    if verdict != FAILS and last["ewc"] < others:
        why = f"and learns least: {last['ewc']:.1f} on the last task, "
        why += f"the others {others:.1f} or more"
    return verdict, measured, why


_leads("A-GEM forgets least on Rotated", "rotated", "a-gem", "forgetting")
_leads("PCA-OGD forgets least on Split MNIST", "split", "pca-ogd", "forgetting")
_leads("PCA-OGD forgets least on Split CIFAR", "cifar", "pca-ogd", "forgetting")
_ROBUST = "F_T clearly lower (±), four benchmarks, released"


@FORGETTING.add(
    "section 4.3", "OGD is more robust to forgetting than SGD", _ROBUST, "table1",
    former=TWO_ERRORS,
)  # fmt: skip
def _ogd_robust(table: Data, margin: Margin = student) -> Finding:
    return _robust(table, "ogd", table, margin)


@FORGETTING.add(
    "section 4.3", "… and so is GEM-NT", _ROBUST, "more-methods", "table1", former=TWO_ERRORS
)
def _gem_nt_robust(more: Data, table: Data, margin: Margin = student) -> Finding:
    verdict, shown, why = _robust(more, "gem-nt", table, margin)
    if verdict == FAILS:
        why = "a step orthogonal to a gradient keeps its loss to first order only"
    return verdict, shown, why


def _robust(data: Data, method: str, table: Data, margin: Margin) -> Finding:
    leads = {
        b: ahead(result[method]["forgetting"], table[b]["sgd"]["forgetting"], margin)
        for b, result in data.items()
    }
    verdict = everywhere(by_noise(-lead, noise) for lead, noise in leads.values())
    shown = ", ".join(f"{NAMES[b]} {lead:+.1f} ± {noise:.1f}" for b, (lead, noise) in leads.items())
    return verdict, f"F_T minus SGD's: {shown}", _WITHIN if verdict == UNDECIDED else ""


_LESS = "F_T clearly below {}, four benchmarks, every protocol"


@FORGETTING.add(
    "abstract, conclusion",
    "PCA-OGD mitigates forgetting on classical datasets",
    _LESS.format("SGD's"),
    "protocols",
    former=TWO_ERRORS,
)
def _mitigates(data: Data, margin: Margin = student) -> Finding:
    return _less_than(data, "sgd", margin)


@FORGETTING.add(
    "abstract, conclusion", "… and more than OGD does", _LESS.format("OGD's"), "protocols",
    former=TWO_ERRORS,
)  # fmt: skip
def _more_than_ogd(data: Data, margin: Margin = student) -> Finding:
    return _less_than(data, "ogd", margin)


def _less_than(data: Data, method: str, margin: Margin) -> Finding:
    """Whether PCA-OGD forgets clearly less than another method, in every cell."""

    def decide(cells: Data) -> tuple[Verdict, str]:
        lead = ahead(cells[method]["forgetting"], cells["pca-ogd"]["forgetting"], margin)
        verdict = by_noise(*lead)
        how = "higher than" if verdict == FAILS else "within noise of"
        return verdict, f"({how} {method_label(method)}'s)"

    found = _by_protocol(data, decide)
    every = [(v, f"{name} {p} {how}") for p, result in found.items() for v, name, how in result]
    doubtful = sorted(text for verdict, text in every if verdict != HOLDS)
    shown = f"in {len(every) - len(doubtful)} of {len(every)} cells"
    shown += f"; not clearly: {', '.join(doubtful)}" if doubtful else ""
    verdict = over_protocols(
        {p: everywhere(result[0] for result in cells) for p, cells in found.items()}
    )
    return verdict, shown, _WITHIN if verdict == UNDECIDED else ""
