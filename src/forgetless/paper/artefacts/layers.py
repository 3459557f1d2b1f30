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


def _runs(scale: Scale) -> dict[str, Run]:
    """Both methods with both, by the name of the part. The whole network is trained in each."""
    settings: dict[str, dict[str, str]] = {"all": {}, "linear": {"unprotected": "convolutions"}}
    return {
        f"{BENCHMARK}/{method}/{layers}": mended_run(
            scale, BENCHMARK, method, "corrected", **settings[layers]
        )
        for method in METHODS
        for layers in LAYERS
    }


def parts(scale: Scale, results: Results) -> dict[str, list[Run]]:
    """One run each."""
    return {part: [run] for part, run in _runs(scale).items()}


def measure(workshop: Workshop) -> dict[str, Any]:
    """A_T and F_T, seed by seed: benchmark → method → layers."""
    data: dict[str, Any] = {}
    runs = _runs(workshop.scale)
    for part in workshop.measurable(runs):
        benchmark, method, layers = part.split("/")
        of = picked(accuracies(workshop.trace(runs[part])), "average", "forgetting")
        data.setdefault(benchmark, {}).setdefault(method, {})[layers] = of
    return data


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
    "layers", "Where to project", "appendix, footnote on LeNet", measure, show, parts
)
