"""Spectra of the overlap matrix O(1→2) for SGD, GEM-NT, OGD and PCA-OGD, by memory size."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from forgetless.paper.artefact import Artefact, Data, all_or_nothing
from forgetless.paper.artefacts.overlap_later import label
from forgetless.paper.artefacts.table1 import cell_run
from forgetless.paper.numbers import mean, table
from forgetless.paper.pictures import COLOURS, NAMES, Pictures, panels
from forgetless.paper.run import Run
from forgetless.paper.scale import Scale
from forgetless.paper.spectra import overlap_with_first
from forgetless.paper.work import Look, Workshop

NAME = "overlap-next"
BENCHMARKS = ("rotated", "permuted", "cifar")


def runs(scale: Scale) -> list[Run]:
    """One run a benchmark: until task 1 is learned all methods are the same."""
    return [cell_run(scale, b, "sgd") for b in BENCHMARKS]


def variants(scale: Scale) -> list[tuple[str, int]]:
    """Methods and their memories."""
    kept = [(m, d) for d in scale.memories for m in ("ogd", "pca-ogd")]
    return [("sgd", scale.memory), ("gem-nt", scale.memory), *kept]


def find(workshop: Workshop, run: Run) -> dict[str, Any]:
    """Spectra at the weights after task 1, by "method memory"."""
    found = {}
    for method, memory in variants(workshop.scale):
        options = {} if method == "sgd" else {"memory": memory}
        replay = workshop.replay(run, workshop.scale.with_method(run.config, method, **options))
        replay.at(0)
        replay.remember(0)
        samples = workshop.scale.overlap_samples
        found[f"{method} {memory}"] = overlap_with_first(replay, 1, samples)
    return found


LOOK = Look(NAME, find)


def measure(workshop: Workshop) -> dict[str, Any]:
    """Benchmark → what is found in the run's weights."""
    return {b: workshop.looked(LOOK, cell_run(workshop.scale, b, "sgd")) for b in BENCHMARKS}


def show(data: Data, pictures: Pictures) -> list[str]:
    """The largest and the mean singular value, and the spectra."""
    columns = list(data[BENCHMARKS[0]])
    rows = [
        [f"{NAMES[b]}, {what}", *(f"{mean(of[c][what]):.3f}" for c in columns)]
        for b, of in data.items()
        for what in ("largest", "mean")
    ]
    return [
        *table(["singular values of O(1→2)", *map(label, columns)], rows),
        pictures.add("overlap-next", "Singular values of the overlap matrix of tasks 1 and 2",
                     lambda: _figure(data)),
        "",
        "*Singular values of O(1→2), mean over seeds, at the weights after task 1. The paper "
        "reads lower ones as less forgetting. Of OGD and PCA-OGD the smallest (dashed) and the "
        "largest memory.*",
        "",
    ]  # fmt: skip


def _figure(data: Data) -> Figure:
    figure, axes = panels(list(data))
    memories = sorted({int(v.split()[1]) for v in next(iter(data.values())) if "ogd" in v})
    for panel, of in zip(axes, data.values(), strict=True):
        for variant, found in of.items():
            method, memory = variant.split()
            if "ogd" in method and int(memory) not in (memories[0], memories[-1]):
                continue
            panel.plot(
                found["points"],
                np.mean(found["spectrum"], 0),
                "--" if "ogd" in method and int(memory) == memories[0] else "-",
                color=COLOURS[method],
                label=label(variant),
            )
        panel.set_xlabel("index")
        panel.set_ylim(0, 1.05)
    axes[0].set_ylabel("singular value")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return figure


ARTEFACT = Artefact(
    NAME,
    "Overlap of tasks 1 and 2",
    "section 5.2, figure on Rotated MNIST; appendix, Permuted MNIST",
    measure,
    show,
    all_or_nothing(runs),
    look=LOOK,
)
