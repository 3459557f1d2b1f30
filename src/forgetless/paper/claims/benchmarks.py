"""Claims of section 5.3 and its appendix: accuracy on the four benchmarks."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from forgetless.paper.artefact import Data
from forgetless.paper.artefacts import forgetting_gap, per_task, table1
from forgetless.paper.claims.base import (
    FAILS,
    HOLDS,
    UNDECIDED,
    Claims,
    Finding,
    either,
    everywhere,
)
from forgetless.paper.claims.cells import (
    CLEARLY,
    as_released,
    by_protocol,
    cells_of,
    compared,
    first,
    in_all,
    leads,
    values,
)
from forgetless.paper.numbers import DIVERGED, mean
from forgetless.paper.pictures import LABELS, NAMES
from forgetless.paper.printed import TABLE1
from forgetless.paper.printed_tasks import FINAL

CLAIMS = Claims()


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


@CLAIMS.add(
    "appendix, tables of final accuracy, bold",
    "The best method of each task",
    "it has the highest mean here too, in 90 % of all tasks",
    "per-task",
)
def _winners(data: Data) -> Finding:
    same, shown = [], []
    for benchmark, methods in data.items():
        ours = {m: np.mean(of, 0) for m, of in per_task.finished(methods).items()}
        theirs = {m: FINAL[benchmark][m][0] for m in methods}
        tasks = min(map(len, [*ours.values(), *theirs.values()]))
        agree = [_best(ours, t) <= _best(theirs, t) for t in range(tasks)]  # printed ones may tie
        same += agree
        shown.append(f"{NAMES[benchmark]} {sum(agree)} of {tasks}")
    return either(sum(same) >= 0.9 * len(same)), ", ".join(shown), "released protocol"


def _best(of: Mapping[str, Any], task: int) -> set[str]:
    """The methods with the highest accuracy on a task."""
    highest = max(accuracy[task] for accuracy in of.values())
    return {m for m, accuracy in of.items() if accuracy[task] == highest}


@CLAIMS.add(
    "section 5.3",
    "PCA-OGD is comparable to A-GEM overall",
    "A_T not below A-GEM's by more than 2, four benchmarks, every protocol",
    cells_of("a-gem", "pca-ogd"),
    fails_early=True,
)
def _comparable(data: Data) -> Finding:
    words, shown = by_protocol(data), by_protocol(data)
    for benchmark, protocol, rival in compared(data, "pca-ogd", "a-gem"):
        word, text = FAILS, DIVERGED
        if rival is not None:
            of = data[benchmark][protocol]
            lead = mean(of["pca-ogd"]["average"]) - mean(of[rival]["average"])
            word, text = either(lead >= -2), f"{lead:+.1f}"
        words[protocol].append(word)
        shown[protocol].append(f"{NAMES[benchmark]} {text}")
    parts = [f"{p} {', '.join(shown[p])}" for p in sorted(shown, reverse=True) if shown[p]]
    word = in_all(words)
    why = ["PCA-OGD minus A-GEM, which keeps samples and far fewer bytes"]
    why.append(as_released(word, {p: everywhere(of) for p, of in words.items()}))
    return word, "; ".join(parts), "; ".join(filter(None, why))


@CLAIMS.add(
    "Table 1",
    "On Split CIFAR A-GEM is the worst of all, below SGD",
    f"lowest A_T, {CLEARLY}",
    "protocols: cifar",
    fails_early=True,
)
def _agem_worst(data: Data) -> Finding:
    cifar = data.get("cifar", {})
    word, shown, why = first(cifar, "a-gem", "average", sign=-1)
    found = values(cifar, "average")
    ranks = ", ".join(f"{p} {_rank(of, 'a-gem')}" for p, of in found.items() if "a-gem" in of)
    if word not in (HOLDS, UNDECIDED):
        why = f"its rank: {ranks}; the released code sends a mixed batch through one head and "
        why += "trains no head after the first task"
    return word, shown, why


def _rank(of: Mapping[str, Any], method: str) -> str:
    order = sorted(of, key=lambda m: -mean(of[m]))
    return f"{order.index(method) + 1} of {len(of)}"


leads(
    CLAIMS, "PCA-OGD is the best on Split CIFAR", "cifar", "pca-ogd", place="Table 1, section 5.3"
)
leads(CLAIMS, "A-GEM is the best on Rotated", "rotated", "a-gem")
leads(CLAIMS, "A-GEM is the best on Permuted", "permuted", "a-gem")
leads(CLAIMS, "OGD is the best on Split MNIST", "split", "ogd")
