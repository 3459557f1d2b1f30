"""Beyond the paper: every method with the bytes that PCA-OGD(100) uses on Rotated MNIST."""

from collections.abc import Callable
from math import isqrt
from typing import Any

from forgetless.paper.artefact import Artefact, Data
from forgetless.paper.artefacts import more_methods, table1
from forgetless.paper.numbers import accuracies, mean, shown, table
from forgetless.paper.pictures import LABELS, NAMES, Pictures
from forgetless.paper.run import Run
from forgetless.paper.scale import Scale
from forgetless.paper.store import Results
from forgetless.paper.work import Workshop

BENCHMARK = "rotated"
LIMIT = 640e6  # bytes for the best result
_SMALL_MATRICES = 24  # bytes of the three K×K matrices of float64 that factored samples need


def _budget(results: Results) -> int:
    return int(results["methods"]["data"]["bytes"][BENCHMARK]["pca-ogd dense"])


def _sample_bytes(results: Results) -> tuple[float, float]:
    """Of a sample itself, and of its factored gradient without the small matrices."""
    data = results["methods"]["data"]
    memory, tasks = data["memory"], data["tasks"][BENCHMARK]
    image = data["bytes"][BENCHMARK]["a-gem dense"] / (memory * (tasks - 1))
    small = _SMALL_MATRICES * memory**2
    return image, (data["factored, one task"][BENCHMARK] - small) / memory


def samples_that_fit(budget: int, sample: float, tasks: int, small: int) -> int:
    """The most samples of a task, n, with sample · N + small · N² ≤ budget for N = n · tasks."""
    if small == 0:
        return int(budget / (sample * tasks))
    most = (isqrt(int(sample**2 + 4 * small * budget)) - sample) / (2 * small)
    return int(most / tasks)


def variants(scale: Scale, results: Results) -> dict[str, tuple[Run, float]]:
    """Runs by name, each with the bytes that it keeps of all tasks but the last."""
    budget, earlier = _budget(results), scale.tasks(BENCHMARK) - 1
    image, factored = _sample_bytes(results)
    of_bytes = results["methods"]["data"]["bytes"][BENCHMARK]
    config = scale.config(BENCHMARK, "sgd")
    size = 10 * (config.train_per_class or 1)
    images = min(size, samples_that_fit(budget, image, earlier, 0))
    gradients = min(size, samples_that_fit(budget, factored, earlier, _SMALL_MATRICES))
    kept = gradients * earlier

    def run(method: str, **settings: Any) -> Run:
        return Run(scale.config(BENCHMARK, method, **settings))

    def cell(method: str) -> Run:
        return table1.cell_run(scale, BENCHMARK, method)

    few = image * scale.memory * earlier
    return {
        "SGD": (cell("sgd"), 0.0),
        "EWC": (cell("ewc"), of_bytes["ewc dense"]),
        f"GEM-NT, {scale.memory} samples": (
            more_methods.cell_run(scale, BENCHMARK, "gem-nt"), few,
        ),
        f"GEM, {scale.memory} samples": (more_methods.cell_run(scale, BENCHMARK, "gem"), few),
        f"A-GEM, {scale.memory} samples": (cell("a-gem"), few),
        f"A-GEM, {images} samples": (run("a-gem", memory=images), image * images * earlier),
        f"OGD, {scale.memory} samples": (cell("ogd"), of_bytes["ogd dense"]),
        f"OGD, {2 * scale.memory} samples in bfloat16": (
            run("ogd", memory=2 * scale.memory, storage="bfloat16"), of_bytes["pca-ogd dense"],
        ),
        f"OGD, {gradients} factored samples": (
            run("ogd", memory=gradients, storage="factored"),
            factored * kept + _SMALL_MATRICES * kept**2,
        ),
        f"PCA-OGD, {scale.memory} directions": (cell("pca-ogd"), of_bytes["pca-ogd dense"]),
        f"PCA-OGD, {2 * scale.memory} directions in bfloat16": (
            run("pca-ogd", memory=2 * scale.memory, storage="bfloat16"),
            of_bytes["pca-ogd dense"],
        ),
        "joint training on all images": (
            more_methods.cell_run(scale, BENCHMARK, "joint"), image * size * earlier,
        ),
    }  # fmt: skip


def parts(scale: Scale, results: Results) -> dict[str, list[Run]]:
    """All of them, once it is known how many bytes they may keep."""
    known = variants(scale, results) if "methods" in results else {}
    return {_part(name): [run] for name, (run, _) in known.items()}


def _part(name: str) -> str:
    return f"{BENCHMARK} {name}"


def measure(workshop: Workshop) -> dict[str, Any]:
    """A_T, F_T and bytes of each."""
    data = {}
    for name, (run, size) in variants(workshop.scale, workshop.results).items():
        if not workshop.measurable([_part(name)]):
            continue
        of = accuracies(workshop.trace(run))
        data[name] = {k: of[k] for k in ("average", "forgetting", "seconds")} | {"bytes": size}
    return {"budget": _budget(workshop.results), "methods": data}


def best(data: Data) -> tuple[str, float]:
    """The best A_T within the limit, and by which method; no method's is 0."""
    return _best(data, lambda name, of: of["bytes"] < LIMIT)


def best_without_images(data: Data) -> tuple[str, float]:
    """The best A_T among the methods that keep directions, no images."""
    return _best(data, lambda name, of: "OGD" in name)


def _best(data: Data, counts: Callable[[str, Data], bool]) -> tuple[str, float]:
    found = {n: mean(of["average"]) for n, of in data["methods"].items() if counts(n, of)}
    name = max(found, key=lambda n: found[n], default="none")
    return name, found.get(name, 0.0)


def show(data: Data, pictures: Pictures) -> list[str]:
    """One row a method."""
    rows = [
        [name, f"{of['bytes'] / 1e6:.1f} MB", shown(of["average"]), shown(of["forgetting"])]
        for name, of in data["methods"].items()
    ]
    name, value = best(data)
    directions, least = best_without_images(data)
    return [
        f"PCA-OGD keeps {data['budget'] / 1e6:.0f} MB for one seed while the last task is learned. "
        "That is more than all images of all tasks take. In as many bytes:",
        "",
        *table([f"{NAMES[BENCHMARK]}, kept of each task", "bytes", "A_T", "F_T"], rows),
        f"Best under {LIMIT / 1e6:.0f} MB: **{name}, A_T {value:.1f}**. Best of those that keep no "
        f"image: {directions}, {least:.1f}. A-GEM and joint training with more images cost no more "
        f"time; {LABELS['gem-nt']} and {LABELS['gem']} look at all their samples in every step and "
        "stay as they are.",
        "",
    ]


ARTEFACT = Artefact(
    "same-bytes",
    "Beyond the paper: the same bytes",
    "",
    measure,
    show,
    parts,
    needs=("methods",),
)
