"""The algorithm-summary table, with what each method really keeps, and what the PCA step costs."""

from collections.abc import Sequence
from typing import Any

from forgetless.paper.artefact import Artefact, Data, all_or_nothing
from forgetless.paper.artefacts import table1
from forgetless.paper.numbers import same_device, table
from forgetless.paper.pictures import LABELS, NAMES, Pictures
from forgetless.paper.run import Run
from forgetless.paper.scale import Scale
from forgetless.paper.work import Workshop

BENCHMARKS = ("rotated", "cifar")
# Method, and how its directions are kept.
KEPT = (
    ("sgd", "dense"),
    ("ewc", "dense"),
    ("a-gem", "dense"),
    ("gem-nt", "dense"),
    ("ogd", "dense"),
    ("ogd", "factored"),
    ("pca-ogd", "dense"),
    ("pca-ogd", "bfloat16"),
)
_WORDS = {
    "sgd": ("nothing", "no"),
    "ewc": ("Fisher diagonal, one anchor", "no"),
    "a-gem": ("samples", "yes, every step"),
    "gem-nt": ("samples", "yes, every step, of every task"),
    "ogd": ("gradients of samples", "no"),
    "pca-ogd": ("top principal directions of gradients", "no"),
}


def runs(scale: Scale) -> list[Run]:
    """The runs whose time at the ends of tasks is compared."""
    return [table1.cell_run(scale, b, m) for b in scale.benchmarks for m in ("ogd", "pca-ogd")]


def measure(workshop: Workshop) -> dict[str, Any]:
    """Bytes of a seed's memory while the last task is learned, and seconds of consolidation."""
    scale = workshop.scale
    memory = {
        b: {f"{m} {kept}": kept_bytes(workshop, b, m, kept) for m, kept in KEPT} for b in BENCHMARKS
    }
    one_task = {b: kept_bytes(workshop, b, "ogd", "factored", tasks=1) for b in BENCHMARKS}
    seconds: dict[str, Any] = {}
    ran: dict[str, Any] = {}
    for benchmark in scale.benchmarks:
        for method in ("ogd", "pca-ogd"):
            trace = workshop.trace(table1.cell_run(scale, benchmark, method))
            parts = {part: trace.timings[part] for part in ("training", "consolidation")}
            seconds.setdefault(benchmark, {})[method] = parts
            how = {"storage": trace.config["storage"], "device": trace.versions["device"]}
            ran.setdefault(benchmark, {})[method] = how
    return {
        "memory": scale.memory,
        "tasks": {b: scale.tasks(b) for b in BENCHMARKS},
        "bytes": memory,
        "factored, one task": one_task,
        "seconds": seconds,
        "ran": ran,
    }


def kept_bytes(
    workshop: Workshop, benchmark: str, method: str, storage: str, tasks: int | None = None
) -> int:
    """Bytes that a method keeps for one seed of all tasks but the last (or of so many).

    They do not depend on the weights, so nothing is trained for this; and they grow with the
    tasks as a polynomial of degree two, which three tasks determine.
    """
    scale = workshop.scale
    # PCA keeps as much however many samples it looks at.
    settings: dict[str, Any] = {"seeds": "1", "samples": 2 * scale.memory, "storage": storage}
    replay = workshop.untrained(scale.config(benchmark, method, **settings))
    count = scale.tasks(benchmark) - 1 if tasks is None else tasks
    seen = []
    for task in range(min(count, 3)):
        replay.remember(task)
        seen.append(replay.kept_bytes())
    return seen[count - 1] if count <= 3 else grown(seen, count)


def grown(seen: Sequence[int], count: int) -> int:
    """What a quadratic sequence that begins with three numbers has at a place, from 1."""
    first, second, third = seen
    slope, bend = second - first, third - 2 * second + first
    return first + (count - 1) * slope + (count - 1) * (count - 2) // 2 * bend


def apart(data: Data, benchmark: str) -> str:
    """Why OGD's and PCA-OGD's times at the ends of tasks do not compare; empty if they do."""
    ran = data.get("ran", {}).get(benchmark)
    if ran is None:
        return "it is not known how directions were kept"
    ogd, pca = ran["ogd"], ran["pca-ogd"]
    if ogd["storage"] != pca["storage"] or ogd["storage"] == "factored":
        words = f"OGD is stored {ogd['storage']} and PCA-OGD {pca['storage']}"
        return words + (
            ", and factored samples take no Gram-Schmidt" if "factored" in words else ""
        )
    return "" if same_device(ogd, pca) else "they ran on different devices"


def show(data: Data, pictures: Pictures) -> list[str]:
    """What is kept, in words and bytes, and the time of the PCA step."""
    rows = []
    for variant in data["bytes"][BENCHMARKS[0]]:
        method, kept = variant.split()
        name = LABELS[method] + ("" if kept == "dense" else f", {kept}")
        cells = [f"{data['bytes'][b][variant] / 1e6:.2f} MB" for b in BENCHMARKS]
        rows.append([name, *_WORDS[method], *cells])
    without = {benchmark: apart(data, benchmark) for benchmark in data["seconds"]}
    time = [
        [
            NAMES[benchmark],
            *(
                f"{of[m]['consolidation']:.2f} of {sum(of[m].values()):.2f} s"
                for m in ("ogd", "pca-ogd")
            ),
            f"{of['pca-ogd']['consolidation'] / max(of['ogd']['consolidation'], 1e-9):.1f}"
            if not without[benchmark]
            else "",
        ]
        for benchmark, of in data["seconds"].items()
    ]
    notes = [f"No ratio on {NAMES[b]}: {reason}." for b, reason in without.items() if reason]
    headings = ["", "kept", "gradients recomputed", *(f"{NAMES[b]}, one seed" for b in BENCHMARKS)]
    return [
        *table(headings, rows),
        f"With {data['memory']} samples or directions of each task, while the last is learned; "
        "measured on three tasks, from which the rest follows. Factored, a sample's gradient is "
        "kept as its layers' inputs and output gradients, exactly.",
        "",
        *table(["at the ends of tasks, all seeds", "OGD", "PCA-OGD", "ratio"], time),
        *(line for note in notes for line in (note, "")),
    ]


ARTEFACT = Artefact(
    "methods",
    "Algorithm summary, with measured memory; the cost of the PCA step",
    'appendix, "Algorithms summary" and "Computational overhead of PCA-OGD"',
    measure,
    show,
    all_or_nothing(runs),
)
