"""Beyond the paper: every method with about the bytes that PCA-OGD(100) uses on Rotated MNIST."""

from collections.abc import Callable
from math import isqrt
from typing import Any

from forgetless.paper.benchmarks import NAMES, Run, Scale
from forgetless.paper.numbers import DIVERGED, accuracies, average, cell, picked, shown, table
from forgetless.paper.pictures import Pictures
from forgetless.paper.results import Data, Results
from forgetless.paper.workshop import Artefact, Cells, Workshop
from forgetless.support.statistics import mean

BENCHMARK = "rotated"
_ROUND = 640e6  # bytes, a round number below PCA-OGD's
_SMALL_MATRICES = 24  # bytes of the three K×K matrices of float64 that factored samples need
_MOMENTS = 8  # bytes of the one that K dense rows have


def _budget(results: Results) -> int:
    return int(results["methods"]["data"]["bytes"][BENCHMARK]["pca-ogd dense"])


def _sample_bytes(results: Results) -> tuple[float, float]:
    """Bytes of a sample itself, and of its factored gradient without the small matrices."""
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


def of_more_rows(kept: int, rows: int, times: int) -> int:
    """Bytes of `times` as many dense rows, from those of K: b p K + 8 K², b bytes a number."""
    moments = _MOMENTS * rows**2
    return times * (kept - moments) + times**2 * moments


def variants(scale: Scale, results: Results) -> dict[str, tuple[Run, float]]:
    """Runs by name, each with the bytes of its memory of all tasks but the last."""

    def run(method: str, **settings: Any) -> Run:
        return Run(scale.config(BENCHMARK, method, **settings))

    budget, earlier = _budget(results), scale.tasks(BENCHMARK) - 1
    image, factored = _sample_bytes(results)
    of_bytes = results["methods"]["data"]["bytes"][BENCHMARK]
    size = run("sgd").samples
    images = min(size, samples_that_fit(budget, image, earlier, 0))
    gradients = min(size, samples_that_fit(budget, factored, earlier, _SMALL_MATRICES))
    kept = gradients * earlier
    few = image * scale.memory * earlier
    twice = of_more_rows(of_bytes["pca-ogd bfloat16"], scale.memory * earlier, 2)
    return {
        "SGD": (run("sgd"), 0.0),
        "EWC": (run("ewc"), of_bytes["ewc dense"]),
        f"GEM-NT, {scale.memory} samples": (run("gem-nt"), few),
        f"GEM, {scale.memory} samples": (run("gem"), few),
        f"A-GEM, {scale.memory} samples": (run("a-gem"), few),
        f"A-GEM, {images} samples": (run("a-gem", memory=images), image * images * earlier),
        f"OGD, {scale.memory} samples": (run("ogd"), of_bytes["ogd dense"]),
        f"OGD, {2 * scale.memory} samples in bfloat16": (
            run("ogd", memory=2 * scale.memory, storage="bfloat16"), twice,
        ),
        f"OGD, {gradients} factored samples": (
            run("ogd", memory=gradients, storage="factored"),
            factored * kept + _SMALL_MATRICES * kept**2,
        ),
        f"PCA-OGD, {scale.memory} directions": (run("pca-ogd"), of_bytes["pca-ogd dense"]),
        f"PCA-OGD, {2 * scale.memory} directions in bfloat16": (
            run("pca-ogd", memory=2 * scale.memory, storage="bfloat16"), twice,
        ),
        "joint training on all images": (run("joint"), image * size * earlier),
    }  # fmt: skip


def cells(scale: Scale, results: Results) -> dict[str, Run]:
    """All of them, once it is known how many bytes they may take."""
    known = variants(scale, results) if "methods" in results else {}
    return {name: run for name, (run, _) in known.items()}


def measure(workshop: Workshop, cells: Cells) -> dict[str, Any]:
    """A_T, F_T and bytes of each."""
    data = {}
    for name, (run, size) in variants(workshop.scale, workshop.results).items():
        if name in cells:
            result = accuracies(workshop.trace(run))
            data[name] = picked(result, "average", "forgetting", "seconds") | {"bytes": size}
    return {"budget": _budget(workshop.results), "methods": data}


def best(data: Data) -> tuple[str, float]:
    """The best method within the budget and its A_T; "none" and 0 if there is no method."""
    over = over_budget(data)
    return _best(data, lambda name: name not in over)


def best_in_fewer(data: Data) -> tuple[str, float]:
    """The best method in fewer bytes, a round number of them."""
    return _best(data, lambda name: data["methods"][name]["bytes"] < _ROUND)


def best_without_images(data: Data) -> tuple[str, float]:
    """The best method within the budget that stores directions and no images.

    Factored samples contain the images, as inputs of the first layer.
    """
    left_out = {name for name in data["methods"] if "factored" in name} | over_budget(data).keys()
    return _best(data, lambda name: "OGD" in name and name not in left_out)


def over_budget(data: Data) -> dict[str, str]:
    """The rows over the budget, each with by how much: "7 % more bytes"."""
    shares = {name: result["bytes"] / data["budget"] for name, result in data["methods"].items()}
    return {
        name: f"{max(1, round(100 * (share - 1)))} % more bytes"
        for name, share in shares.items()
        if share > 1
    }


def _best(data: Data, counts: Callable[[str], bool]) -> tuple[str, float]:
    finished = {n: result for n, result in data["methods"].items() if DIVERGED not in result}
    found = {n: mean(result["average"]) for n, result in finished.items() if counts(n)}
    name = max(found, key=lambda n: found[n], default="none")
    return name, found.get(name, 0.0)


def _mean(result: Data) -> str:
    return f"{mean(result['average']):.1f}"


def show(data: Data, pictures: Pictures) -> list[str]:
    """One row per method."""
    methods, budget = data["methods"], data["budget"]
    rows = [
        [
            name,
            f"{result['bytes'] / 1e6:.1f} MB",
            f"{100 * result['bytes'] / budget:.0f} %",
            cell(result, average),
            cell(result, lambda result: shown(result["forgetting"])),
        ]
        for name, result in methods.items()
    ]
    over = over_budget(data)
    beyond = "; ".join(f"{n}, {cell(methods[n], _mean)} with {w}" for n, w in over.items())
    what = "In as many bytes or fewer" + ("; rows over 100 % take more:" if over else ":")
    name, value = best(data)
    fewer, reached = best_in_fewer(data)
    directions, least = best_without_images(data)
    headings = ("bytes", "of PCA-OGD's", "A_T", "F_T")
    return [
        f"PCA-OGD stores {budget / 1e6:.0f} MB for one seed while the last task is learned, "
        f"more than all images of all tasks take. {what}",
        "",
        *table([f"{NAMES[BENCHMARK]}, stored of each task", *headings], rows),
        f"Best under {_ROUND / 1e6:.0f} MB: **{fewer}, A_T {reached:.1f}**; within "
        f"{budget / 1e6:.0f} MB: {name}, {value:.1f}; of those that store no "
        f"image, {directions}, {least:.1f}: factored samples have images in them, as inputs of the "
        "first layer. "
        + (f"Over the budget: {beyond}. " if over else "")
        + "A step of A-GEM or joint training sees a batch of fixed size, however many images are "
        "stored; GEM-NT and GEM use all their samples in every step and are unchanged.",
        "",
    ]


SAME_BYTES = Artefact(
    "same-bytes",
    "Beyond the paper: the same bytes, or a few more",
    "",
    measure,
    show,
    cells,
    needs=("methods",),
)
