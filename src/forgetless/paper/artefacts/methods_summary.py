"""The algorithm-summary table, with the measured memory of each method; cost of the PCA step."""

from collections.abc import Sequence
from typing import Any

from forgetless.methods import method_label
from forgetless.paper.artefacts import table1
from forgetless.paper.benchmarks import NAMES, Run, Scale
from forgetless.paper.numbers import same_device, table
from forgetless.paper.pictures import Pictures
from forgetless.paper.results import Data, Results
from forgetless.paper.workshop import Artefact, Cells, Workshop

BENCHMARKS = ("rotated", "cifar")
# Method, and how its directions are stored.
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


def cells(scale: Scale, results: Results) -> dict[str, Run]:
    """The runs whose time at the ends of tasks is compared."""
    return {
        f"{b}/{m}": table1.cell_run(scale, b, m)
        for b in scale.benchmarks
        for m in ("ogd", "pca-ogd")
    }


def measure(workshop: Workshop, cells: Cells) -> dict[str, Any]:
    """Bytes of a seed's memory while the last task is learned, and seconds of consolidation."""
    scale = workshop.scale
    data: dict[str, Any] = {
        "memory": scale.memory,
        "tasks": {b: scale.tasks(b) for b in BENCHMARKS},
        "bytes": {
            b: {f"{m} {kept}": kept_bytes(workshop, b, m, kept) for m, kept in KEPT}
            for b in BENCHMARKS
        },
        "factored, one task": {
            b: kept_bytes(workshop, b, "ogd", "factored", tasks=1) for b in BENCHMARKS
        },
        "seconds": {},
        "ran": {},
    }
    for benchmark in scale.benchmarks:
        runs = {m: cells.get(f"{benchmark}/{m}") for m in ("ogd", "pca-ogd")}
        traces = {m: workshop.trace(run) for m, run in runs.items() if run is not None}
        if len(traces) == len(runs):
            data["seconds"][benchmark] = {
                m: {part: trace.timings[part] for part in ("training", "consolidation")}
                for m, trace in traces.items()
            }
            data["ran"][benchmark] = {
                m: {"storage": trace.config["storage"], "device": trace.versions["device"]}
                for m, trace in traces.items()
            }
    return data


def kept_bytes(
    workshop: Workshop, benchmark: str, method: str, storage: str, tasks: int | None = None
) -> int:
    """Bytes of a method's memory for one seed, of all tasks but the last (or of `tasks` tasks).

    They do not depend on the weights, so nothing is trained for this; and they grow with the
    tasks as a polynomial of degree two, which three tasks determine.
    """
    scale = workshop.scale
    # The memory of PCA does not depend on the number of samples.
    settings: dict[str, Any] = {"seeds": "1", "samples": 2 * scale.memory, "storage": storage}
    replay = workshop.untrained(scale.config(benchmark, method, **settings))
    count = scale.tasks(benchmark) - 1 if tasks is None else tasks
    seen = []
    for task in range(min(count, 3)):
        replay.remember(task)
        seen.append(replay.kept_bytes())
    return seen[count - 1] if count <= 3 else grown(seen, count)


def grown(seen: Sequence[int], count: int) -> int:
    """The element at a position, from 1, of a quadratic sequence with these first three numbers."""
    first, second, third = seen
    slope, bend = second - first, third - 2 * second + first
    return first + (count - 1) * slope + (count - 1) * (count - 2) // 2 * bend


def apart(data: Data, benchmark: str) -> str:
    """Why OGD's and PCA-OGD's times at the ends of tasks cannot be compared; empty if they can."""
    ran = data.get("ran", {}).get(benchmark)
    if ran is None:
        return "it is not known how directions were stored"
    ogd, pca = ran["ogd"], ran["pca-ogd"]
    if ogd["storage"] != pca["storage"] or ogd["storage"] == "factored":
        words = f"OGD is stored {ogd['storage']} and PCA-OGD {pca['storage']}"
        return words + (
            ", and factored samples take no Gram-Schmidt" if "factored" in words else ""
        )
    return "" if same_device(ogd, pca) else "they ran on different devices"


def show(data: Data, pictures: Pictures) -> list[str]:
    """The memory in words and bytes, and the time of the PCA step."""
    rows = []
    for variant in data["bytes"][BENCHMARKS[0]]:
        method, kept = variant.split()
        name = method_label(method) + ("" if kept == "dense" else f", {kept}")
        cells = [f"{data['bytes'][b][variant] / 1e6:.2f} MB" for b in BENCHMARKS]
        rows.append([name, *_WORDS[method], *cells])
    without = {benchmark: apart(data, benchmark) for benchmark in data["seconds"]}
    time = [
        [
            NAMES[benchmark],
            *(
                f"{result[m]['consolidation']:.2f} of {sum(result[m].values()):.2f} s"
                for m in ("ogd", "pca-ogd")
            ),
            f"{result['pca-ogd']['consolidation'] / max(result['ogd']['consolidation'], 1e-9):.1f}"
            if not without[benchmark]
            else "",
        ]
        for benchmark, result in data["seconds"].items()
    ]
    notes = [f"No ratio on {NAMES[b]}: {reason}." for b, reason in without.items() if reason]
    headings = [
        "",
        "stored",
        "gradients recomputed",
        *(f"{NAMES[b]}, one seed" for b in BENCHMARKS),
    ]
    return [
        *table(headings, rows),
        f"With {data['memory']} samples or directions of each task, while the last is learned; "
        "measured on three tasks, from which the rest follows. Factored, a sample's gradient is "
        "stored as its layers' inputs and output gradients, exactly.",
        "",
        *table(["at the ends of tasks, all seeds", "OGD", "PCA-OGD", "ratio"], time),
        *(line for note in notes for line in (note, "")),
    ]


METHODS_SUMMARY = Artefact(
    "methods",
    "Algorithm summary, with measured memory; the cost of the PCA step",
    'appendix, "Algorithms summary" and "Computational overhead of PCA-OGD"',
    measure,
    show,
    cells,
)
