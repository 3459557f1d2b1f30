"""Which layers to project in: all that are trained, or the fully connected ones alone."""

from typing import Any

from forgetless.paper.artefact import Artefact, Data
from forgetless.paper.artefacts.protocols import mended_run
from forgetless.paper.numbers import accuracies, cell, picked, table
from forgetless.paper.pictures import LABELS, NAMES, Pictures
from forgetless.paper.run import Run
from forgetless.paper.scale import Scale
from forgetless.paper.store import Results
from forgetless.paper.work import Workshop

BENCHMARK = "cifar"  # the one whose network has convolutions
METHODS = ("ogd", "pca-ogd")
LAYERS = {"all": "all layers", "linear": "fully connected layers"}


def _run(scale: Scale, method: str, layers: str) -> Run:
    """The whole network is trained in each."""
    settings = {"unprotected": "convolutions"} if layers == "linear" else {}
    return mended_run(scale, BENCHMARK, method, "corrected", **settings)


def _known(scale: Scale, results: Results, method: str) -> Any:
    """What `protocols` measured with all layers and the same seeds, None if it has not."""
    record = results.get("protocols", {"data": {}})
    if (record.get("scale"), record.get("seeds")) != (scale.name, scale.seeds):
        return None
    return record["data"].get(BENCHMARK, {}).get("corrected", {}).get(method)


def parts(scale: Scale, results: Results) -> dict[str, list[Run]]:
    """A method with projections in the fully connected layers, and in all if that is not known."""
    found = {}
    for method in METHODS:
        wanted = ["linear"] if _known(scale, results, method) else list(LAYERS)
        found[f"{BENCHMARK}/{method}"] = [_run(scale, method, layers) for layers in wanted]
    return found


def measure(workshop: Workshop) -> dict[str, Any]:
    """A_T and F_T, seed by seed: benchmark → method → layers."""

    def of(method: str, layers: str) -> Any:
        known = _known(workshop.scale, workshop.results, method) if layers == "all" else None
        if known:
            return known
        trace = workshop.trace(_run(workshop.scale, method, layers))
        return picked(accuracies(trace), "average", "forgetting")

    methods = [
        part.split("/")[1] for part in workshop.measurable(f"{BENCHMARK}/{m}" for m in METHODS)
    ]
    return {
        BENCHMARK: {method: {layers: of(method, layers) for layers in LAYERS} for method in methods}
    }


def show(data: Data, pictures: Pictures) -> list[str]:
    """One row a method."""
    rows = [
        [f"{NAMES[benchmark]}, {LABELS[method]}", *(cell(of.get(layers)) for layers in LAYERS)]
        for benchmark, methods in data.items()
        for method, of in methods.items()
    ]
    return [
        *table(["A_T / F_T", *LAYERS.values()], rows),
        "Projections in all layers, or in the fully connected ones alone; every layer is trained "
        "in both. Convolutions and their batch norms follow plain SGD in the second, as heads do "
        "in both.",
        "",
    ]


ARTEFACT = Artefact(
    "layers",
    "Where to project",
    "appendix, footnote on LeNet",
    measure,
    show,
    parts,
)
