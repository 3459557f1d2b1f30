"""Four questions that the paper leaves open, answered from the results."""

from collections.abc import Callable

from forgetless.methods import method_label
from forgetless.paper.artefacts import forgetting_gap, same_bytes, variance
from forgetless.paper.benchmarks import NAMES
from forgetless.paper.claims.base import unmeasured
from forgetless.paper.numbers import DIVERGED, average, cell, shown
from forgetless.paper.results import Data, Results, readable
from forgetless.support.statistics import ahead, mean

# Each protocol in words for A-GEM, first the one that answers the question.
_PROTOCOLS = {
    "frozen": "With proper heads, on the network as released",
    "corrected": "where all of the network trains",
    "released": "as released",
}


def _agem(protocols: Data) -> str:
    """A-GEM's place on Split CIFAR under each protocol."""
    parts = []
    for protocol, words in _PROTOCOLS.items():
        methods = protocols["cifar"].get(protocol, {})
        known = {m: result["average"] for m, result in methods.items() if DIVERGED not in result}
        if "a-gem" not in known:
            parts.append(f"{words} {DIVERGED if 'a-gem' in methods else 'not measured yet'}")
            continue
        order = sorted(known, key=lambda m: -mean(known[m]))
        place = order.index("a-gem")
        near = [order[i] for i in (place - 1, place + 1) if 0 <= i < len(order)]
        leads = {m: ahead(known["a-gem"], known[m]) for m in near}
        margins = [
            f"{lead:+.1f} ± {noise:.1f} to {method_label(m)}" for m, (lead, noise) in leads.items()
        ]
        accuracy = ", ".join(filter(None, [f"A_T {shown(known['a-gem'])}", " and ".join(margins)]))
        parts.append(f"{words} number {place + 1} of {len(order)}: {accuracy}")
    return "; ".join(parts) + ". Differences have 95 % intervals."


def _structure(data: Data) -> str:
    """The moment from which the features of Permuted have structure."""
    count = data["counts"][2]
    moments = ("task 2, at initialisation", "task 2, before training on it")
    before, reached = (variance.at(data, "permuted", m, count) for m in moments)
    after = variance.at(data, "permuted", "task 2, after training on it", count)
    rotated = [
        variance.at(data, "rotated", m, count)
        for m in ("task 2, at initialisation", "task 2, after training on it")
    ]
    columns = ", for ".join(
        f"{NAMES[b]} that of *{variance.convention(data, b)}*" for b in ("permuted", "rotated")
    )
    return (
        f"Once the network has been trained on it. {count} components explain {before:.0f} % of "
        f"a permuted task's features at initialisation, {reached:.0f} % when training on it "
        f"starts and {after:.0f} % when it ends, which is when PCA-OGD computes them. Rotated is "
        f"no different: {rotated[0]:.0f} % at initialisation, {rotated[1]:.0f} % at the end. The "
        f"moment that fits the paper's numbers best is for {columns}."
    )


def _gap(gap: Data) -> str:
    """The formula that gives the printed F_T."""
    if "readings" not in gap:
        return "It cannot be said from so few seeds."
    text, likely = (gap["readings"][name] for name in (forgetting_gap.TEXT, forgetting_gap.LIKELY))
    fitted = ", ".join(
        f"{NAMES[b]} {found['factor']:.3f} ± {found['noise']:.3f}"
        for b, found in gap["factors"].items()
    )
    left = forgetting_gap.standing(gap)
    pair = (forgetting_gap.TEXT, forgetting_gap.LIKELY)
    others = " or ".join(name for name in left if name not in pair)
    gone = "; ".join(name for name in gap["readings"] if name not in left and name not in pair)
    solved = forgetting_gap.LIKELY in left and forgetting_gap.TEXT not in left
    sentences = [
        "Most likely from the normaliser" if solved else "It is open",
        "From our best and the printed final accuracies, the text's F_T misses the printed one by "
        f"up to {text['printed finals']['miss']:.1f} points (Σt² "
        f"{text['printed finals']['sum']:.0f} over {text['cells']} cells)",
        f"Times T / (T − 1), the printed numbers {'' if solved else 'do not '}fit (Σt² "
        f"{likely['printed finals']['sum']:.0f}, p = "
        f"{forgetting_gap.shown_p(likely['printed finals']['p'])}, misses up to "
        f"{likely['printed finals']['miss']:.1f}), and {likely['agree']} of {likely['cells']} "
        "cells of F_T agree",
        f"Fitted factors: {fitted}",
        f"Σ (best − final) times {others} is not ruled out" if others else "",
        f"Ruled out: {gone}" if gone else "",
    ]
    return "".join(f"{sentence}. " for sentence in sentences if sentence).rstrip()


def _bytes(data: Data) -> str:
    """Whether PCA-OGD wins when OGD may use its bytes for factored samples, and in bfloat16."""
    methods, over = data["methods"], same_bytes.over_budget(data)
    factored = next(name for name in methods if "factored" in name)
    halved = [name for name in methods if name.endswith("in bfloat16")]
    pca = next(name for name in methods if name.startswith("PCA-OGD") and name not in halved)
    broken = [name for name in (factored, pca) if DIVERGED in methods[name]]
    if broken:
        return f"It cannot be said: {' and '.join(broken)} {DIVERGED}."
    ours, theirs = methods[factored]["average"], methods[pca]["average"]
    word = "no" if mean(ours) > mean(theirs) else "yes"
    reached = " and ".join(
        f"{cell(methods[name], average)} with {name.removesuffix(' in bfloat16')} "
        f"({over.get(name, 'no more bytes')})"
        for name in halved
    )
    name, value = same_bytes.best(data)
    return (
        f"In as many bytes as float32 rows of PCA-OGD take, {word}: {shown(theirs)} with {pca}, "
        f"{shown(ours)} with {factored}. In bfloat16, {reached}. The best in no more bytes is "
        f"{name}, {value:.1f}."
    )


_QUESTIONS: tuple[tuple[str, str, Callable[[Data], str]], ...] = (
    ("What is A-GEM's true place on Split CIFAR?", "protocols", _agem),
    ("When does Permuted MNIST have structure?", "variance", _structure),
    ("Where does the difference in F_T come from?", "forgetting-gap", _gap),
    ("Does PCA-OGD still win when OGD stores factored samples?", "same-bytes", _bytes),
)


def answers(results: Results) -> list[str]:
    """Questions and answers as Markdown lines."""
    lines = []
    for question, needed, answer in _QUESTIONS:
        with readable(needed):
            if unmeasured(needed, results):
                text = f"Not measured yet: {needed}."
            else:
                text = answer(results[needed]["data"])
        lines.append(f"- **{question}** {text}")
    return [*lines, ""]
