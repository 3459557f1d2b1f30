"""Claims about forgetting on the four benchmarks."""

from forgetless.paper.artefact import Data
from forgetless.paper.claims.base import (
    FAILS,
    HOLDS,
    UNDECIDED,
    Claims,
    Finding,
    Word,
    by_noise,
    everywhere,
)
from forgetless.paper.claims.cells import (
    LOWEST,
    WITHIN,
    by_protocol,
    cells_of,
    compared,
    first,
    in_all,
    leads,
)
from forgetless.paper.numbers import DIVERGED, ahead, mean
from forgetless.paper.pictures import LABELS, NAMES
from forgetless.paper.scale import METHODS

CLAIMS = Claims()


@CLAIMS.add(
    "Table 1",
    "EWC forgets least on Permuted",
    LOWEST,
    "protocols: permuted",
    f"table1: {', '.join(f'permuted {m}' for m in METHODS)}",
)
def _ewc_least(data: Data, table: Data) -> Finding:
    word, measured, why = first(data["permuted"], "ewc", "forgetting", sign=-1)
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


leads(CLAIMS, "A-GEM forgets least on Rotated", "rotated", "a-gem", "forgetting")
leads(CLAIMS, "PCA-OGD forgets least on Split MNIST", "split", "pca-ogd", "forgetting")
leads(CLAIMS, "PCA-OGD forgets least on Split CIFAR", "cifar", "pca-ogd", "forgetting")
_ROBUST = "F_T lower by more than two standard errors (±), four benchmarks, released"


@CLAIMS.add("section 4.3", "OGD is more robust to forgetting than SGD", _ROBUST, "table1")
def _ogd_robust(table: Data) -> Finding:
    return _robust({b: of["ogd"] for b, of in table.items()}, table)


@CLAIMS.add(
    "section 4.3", "… and so is GEM-NT", _ROBUST, "more-methods", "table1", fails_early=True
)
def _gem_nt_robust(more: Data, table: Data) -> Finding:
    word, shown, why = _robust({b: of["gem-nt"] for b, of in more.items() if "gem-nt" in of}, table)
    if word == FAILS:
        why = "a step orthogonal to a gradient keeps its loss to first order only"
    return word, shown, why


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
    return word, f"F_T minus SGD's: {', '.join(shown)}", WITHIN if word == UNDECIDED else ""


_LESS = "F_T below {} by more than two standard errors, four benchmarks, every protocol"


@CLAIMS.add(
    "abstract, conclusion",
    "PCA-OGD mitigates forgetting on classical datasets",
    _LESS.format("SGD's"),
    cells_of("sgd", "pca-ogd"),
    fails_early=True,
)
def _mitigates(data: Data) -> Finding:
    return _less_than(data, "sgd")


@CLAIMS.add(
    "abstract, conclusion",
    "… and more than OGD does",
    _LESS.format("OGD's"),
    cells_of("ogd", "pca-ogd"),
    fails_early=True,
)
def _more_than_ogd(data: Data) -> Finding:
    return _less_than(data, "ogd")


def _less_than(data: Data, method: str) -> Finding:
    """Whether PCA-OGD forgets clearly less than another method, in every cell."""
    words = by_protocol(data)
    doubtful = []
    for benchmark, protocol, rival in compared(data, "pca-ogd", method):
        word, how = FAILS, DIVERGED
        if rival is not None:
            of = data[benchmark][protocol]
            word = by_noise(*ahead(of[rival]["forgetting"], of["pca-ogd"]["forgetting"]))
            how = "higher than" if word == FAILS else "within noise of"
            how += f" {LABELS[rival]}'s"
        words[protocol].append(word)
        doubtful += [f"{NAMES[benchmark]} {protocol} ({how})"] if word != HOLDS else []
    word = in_all(words)
    count = sum(map(len, words.values()))
    shown = f"in {count - len(doubtful)} of {count} cells"
    shown += f"; not clearly: {', '.join(sorted(doubtful))}" if doubtful else ""
    return word, shown, WITHIN if word == UNDECIDED else ""
