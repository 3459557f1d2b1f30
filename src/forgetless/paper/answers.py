"""Four questions that the paper leaves open, answered from the results."""

from collections.abc import Callable

from forgetless.paper.artefact import Data
from forgetless.paper.artefacts import forgetting_gap, same_bytes, variance
from forgetless.paper.claims.base import measured
from forgetless.paper.numbers import mean, shown
from forgetless.paper.pictures import LABELS, NAMES
from forgetless.paper.store import Results, readable


def _agem(protocols: Data) -> str:
    """A-GEM's place on Split CIFAR under each protocol."""
    parts = []
    for protocol, methods in protocols["cifar"].items():
        known = {m: of for m, of in methods.items() if "average" in of}
        order = sorted(known, key=lambda m: -mean(known[m]["average"]))
        place = order.index("a-gem") + 1
        parts.append(
            f"{shown(known['a-gem']['average'])} under the {protocol} protocol, number {place} of "
            f"{len(order)} ({', '.join(LABELS[m] for m in order)})"
        )
    return "A_T " + "; ".join(parts) + "."


def _structure(data: Data) -> str:
    """When the features of Permuted have structure."""
    count = data["counts"][2]
    moments = ("task 2, at initialisation", "task 2, before training on it")
    before, reached = (variance.at(data, "permuted", m, count) for m in moments)
    after = variance.at(data, "permuted", "task 2, after training on it", count)
    rotated = variance.at(data, "rotated", "task 2, after training on it", count)
    return (
        f"Once the network has been trained on it. {count} components explain {before:.0f} % of "
        f"a permuted task's features at initialisation, {reached:.0f} % when training on it "
        f"starts and {after:.0f} % when it ends, which is when PCA-OGD looks; on Rotated "
        f"{rotated:.0f} %. The paper's column for Permuted is the first of these, its column for "
        "Rotated the last."
    )


def _gap(gap: Data) -> str:
    """What the difference in F_T is."""
    cells = forgetting_gap.excess(gap)
    differences = [difference for *_, difference, _ in cells]
    benchmark, method, most, _ = max(cells, key=lambda cell: cell[2])
    likeness = forgetting_gap.likeness(gap)
    far = [f"{NAMES[b]} {LABELS[m]}" for b, m in forgetting_gap.out_of_reach(gap)]
    text = (
        "Final accuracies agree; it is the best ones before that are higher in the paper, by "
        f"{mean(differences):.1f} points on average and {most:.1f} for {LABELS[method]} on "
        f"{NAMES[benchmark]}. "
    )
    if likeness < 0.5:
        text += (
            "Noise of evaluating on 256 images does not explain it: it would raise F_T most "
            "where little is missing "
            f"(correlation {likeness:.2f}). "
        )
    if far:
        text += (
            f"On {', '.join(far)} the mean best accuracy would have to be higher than that of any "
            "task at any time here: it was probably measured in another way than the final ones."
        )
    return text


def _bytes(data: Data) -> str:
    """Whether PCA-OGD wins when OGD may use its bytes for factored samples."""
    methods = data["methods"]
    factored = next(name for name in methods if "factored" in name)
    pca = next(name for name in methods if name.startswith("PCA-OGD") and "bfloat16" not in name)
    ours, theirs = methods[factored]["average"], methods[pca]["average"]
    word = "No" if mean(ours) > mean(theirs) else "Yes"
    name, value = same_bytes.best(data)
    return (
        f"{word}: {factored} reach A_T {shown(ours)} in the bytes of {pca}, {shown(theirs)}. "
        f"And in no more bytes, {name} reaches {value:.1f}."
    )


_QUESTIONS: tuple[tuple[str, str, Callable[[Data], str]], ...] = (
    ("What is A-GEM's true place on Split CIFAR?", "protocols: cifar", _agem),
    ("When does Permuted MNIST have structure?", "variance", _structure),
    ("What is the difference in F_T?", "forgetting-gap", _gap),
    ("Does PCA-OGD still win when OGD stores factored samples?", "same-bytes", _bytes),
)


def answers(results: Results) -> list[str]:
    """Questions and answers as Markdown lines."""
    lines = []
    for question, needed, answer in _QUESTIONS:
        data, missing = measured([needed], results)
        with readable(needed):
            text = f"Not measured yet: {', '.join(missing)}." if missing else answer(*data)
        lines.append(f"- **{question}** {text}")
    return [*lines, ""]
