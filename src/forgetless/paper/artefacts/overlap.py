"""Overlap of task 1 with later tasks: its spectra, its evolution, and the drop in accuracy."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from forgetless.methods import method_label
from forgetless.paper import numbers
from forgetless.paper.artefacts.memory import sweep_run
from forgetless.paper.artefacts.table1 import cell_run
from forgetless.paper.benchmarks import NAMES, Run, Scale
from forgetless.paper.numbers import shown, table
from forgetless.paper.pictures import Pictures, legend_below, panels
from forgetless.paper.replay import Replay
from forgetless.paper.results import Data, Results
from forgetless.paper.workshop import Artefact, Probe, Workshop, each, each_probed
from forgetless.report.looks import method_colour
from forgetless.support.statistics import mean, std
from forgetless.theory import operator_overlap, overlap_spectrum

DROP = "rotated"  # the benchmark of the drop figure, with all memories
BENCHMARKS = (DROP, "cifar", "permuted")
_RTOL = 1e-4  # below `theory.FLOAT32_RTOL`: the published numbers were measured with it
_POINTS = 30  # of a spectrum that are stored


def overlap_with_first(replay: Replay, target: int, samples: int) -> dict[str, Any]:
    """Singular values of O^{1→k} at the present weights and with the method's present memory.

    Arguments:
        replay: at the weights with which task k starts.
        target: k, from 0.
        samples: of each of the two tasks.

    Returns:
        largest and mean (S,), and the spectrum (S, points) at `points`, its indices from 1.
    """
    purpose = "samples of the overlap matrix"
    pairs = [replay.features(replay.samples(task, samples, purpose)) for task in (0, target)]
    spectra = []
    for source, later, basis in zip(*pairs, replay.directions(), strict=True):
        matrix = operator_overlap(source, later, basis, rtol=_RTOL)
        spectra.append(overlap_spectrum(matrix).cpu().numpy())
    # Beyond the numerical rank there is no overlap.
    full = np.stack([np.pad(s, (0, samples - len(s))) for s in spectra])
    points = np.unique(np.geomspace(1, samples, _POINTS).round().astype(int))
    return {
        "largest": full[:, 0],
        "mean": full.mean(1),
        "points": points,
        "spectrum": full[:, points - 1],
    }


def label(variant: str) -> str:
    """The name of a variant "method memory" for figures and tables."""
    method, memory = variant.split()
    name = method_label(method)
    return name if method in ("sgd", "gem-nt") else f"{name} {memory}"


# Tasks 1 and 2


def next_cells(scale: Scale, results: Results) -> dict[str, Run]:
    """One run per benchmark: until task 1 is learned all methods are the same."""
    return {b: cell_run(scale, b, "sgd") for b in ("rotated", "permuted", "cifar")}


def probe_next(workshop: Workshop, run: Run) -> dict[str, Any]:
    """Spectra at the weights after task 1, by "method memory"."""
    scale = workshop.scale
    variants = [("sgd", scale.memory), ("gem-nt", scale.memory)]
    variants += [(m, d) for d in scale.memories for m in ("ogd", "pca-ogd")]
    found = {}
    for method, memory in variants:
        options = {} if method == "sgd" else {"memory": memory}
        replay = workshop.replay(run, scale.with_method(run.config, method, **options))
        replay.at(0)
        replay.remember(0)
        found[f"{method} {memory}"] = overlap_with_first(replay, 1, scale.overlap_samples)
    return found


def show_next(data: Data, pictures: Pictures) -> list[str]:
    """The largest and the mean singular value, and the spectra."""
    columns = list(next(iter(data.values())))
    rows = [
        [f"{NAMES[b]}, {what}", *(f"{mean(result[c][what]):.3f}" for c in columns)]
        for b, result in data.items()
        for what in ("largest", "mean")
    ]
    return [
        *table(["singular values of O(1→2)", *map(label, columns)], rows),
        pictures.add("overlap-next", "Singular values of the overlap matrix of tasks 1 and 2",
                     lambda: _figure_next(data)),
        "",
        "*Singular values of O(1→2), mean over seeds, at the weights after task 1. The paper "
        "reads lower ones as less forgetting. Of OGD and PCA-OGD the smallest (dashed) and the "
        "largest memory.*",
        "",
    ]  # fmt: skip


def _figure_next(data: Data) -> Figure:
    figure, axes = panels(list(data))
    memories = sorted({int(v.split()[1]) for v in next(iter(data.values())) if "ogd" in v})
    for panel, result in zip(axes, data.values(), strict=True):
        for variant, found in result.items():
            method, memory = variant.split()
            if "ogd" in method and int(memory) not in (memories[0], memories[-1]):
                continue
            panel.plot(
                found["points"],
                np.mean(found["spectrum"], 0),
                "--" if "ogd" in method and int(memory) == memories[0] else "-",
                color=method_colour(method),
                label=label(variant),
            )
        panel.set_xlabel("index")
        panel.set_ylim(0, 1.05)
    axes[0].set_ylabel("singular value")
    legend_below(figure, axes[0], 6)
    return figure


_PROBE_NEXT = Probe("overlap-next", probe_next)
NEXT = Artefact(
    _PROBE_NEXT.name,
    "Overlap of tasks 1 and 2",
    "section 5.2, figure on Rotated MNIST; appendix, Permuted MNIST",
    each_probed(_PROBE_NEXT),
    show_next,
    next_cells,
    probe=_PROBE_NEXT,
)


# Task 1 and later tasks


def targets(tasks: int) -> list[int]:
    """The later tasks, from 0: the next, two in between, the last."""
    return sorted({1, tasks // 3, 2 * tasks // 3, tasks - 1})


def later_cells(scale: Scale, results: Results) -> dict[str, Run]:
    """The runs as "benchmark/method memory"."""
    few = (scale.memories[0], scale.memories[-1])
    found = {}
    for benchmark in BENCHMARKS:
        for method in ("sgd", "gem-nt"):
            found[f"{benchmark}/{method} {scale.memory}"] = cell_run(scale, benchmark, method)
        for memory in scale.memories if benchmark == DROP else few:
            for method in ("ogd", "pca-ogd"):
                run = sweep_run(scale, benchmark, method, memory)
                found[f"{benchmark}/{method} {memory}"] = run
    return found


def probe_later(workshop: Workshop, run: Run) -> dict[str, Any]:
    """Largest and mean singular value of O(1→k) at the weights with which task k starts."""
    scale, replay, later = workshop.scale, workshop.replay(run), {}
    for task in range(run.config.tasks - 1):
        replay.at(task)
        replay.remember(task)
        if task + 1 in targets(run.config.tasks):
            found = overlap_with_first(replay, task + 1, scale.overlap_samples)
            later[str(task + 2)] = {name: found[name] for name in ("largest", "mean")}
    return later


LATER_PROBE = Probe("overlap-later", probe_later)


def measure_later(workshop: Workshop, run: Run) -> dict[str, Any]:
    """Spectra of O(1→k), and the drop in accuracy on task 1."""
    later = workshop.probe(LATER_PROBE, run)
    accuracy = workshop.trace(run).accuracy
    return {"later": later, "drop": accuracy[:, 0, 0] - accuracy[:, -1, 0]}


def seeds(data: Data, benchmark: str = DROP) -> range:
    """The positions of the seeds that all variants have."""
    return range(min(len(result["drop"]) for result in data[benchmark].values()))


def points(
    data: Data, benchmark: str = DROP, without: str | None = None, seed: int | None = None
) -> list[tuple[str, float, float]]:
    """The drop figure's points: variant, largest singular value for the last task, drop.

    Arguments:
        data: of this artefact.
        benchmark: its key.
        without: a method that is left out.
        seed: the position of a single seed; None for the mean over all.
    """
    chosen = slice(None) if seed is None else slice(seed, seed + 1)
    found = []
    for variant, result in data[benchmark].items():
        if variant.split()[0] == without:
            continue
        last = list(result["later"].values())[-1]
        found.append((variant, mean(last["largest"][chosen]), mean(result["drop"][chosen])))
    return found


def rank_correlation(
    data: Data, benchmark: str = DROP, without: str | None = None, seed: int | None = None
) -> tuple[float, float]:
    """Spearman's correlation of overlap and drop over the `points`, and its p-value (two-sided)."""
    _, overlap, drop = zip(*points(data, benchmark, without, seed), strict=True)
    return numbers.rank_correlation(overlap, drop)


def show_later(data: Data, pictures: Pictures) -> list[str]:
    """The largest singular value by task, the drop, and both figures."""
    lines = []
    for benchmark, variants in data.items():
        tasks = list(next(iter(variants.values()))["later"])
        rows = [
            [
                label(variant),
                *(f"{mean(result['later'][t]['largest']):.3f}" for t in tasks),
                shown(result["drop"]),
            ]
            for variant, result in variants.items()
        ]
        headings = [NAMES[benchmark], *(f"O(1→{t})" for t in tasks), "drop on task 1, points"]
        lines += table(headings, rows)
    return [
        "Largest singular value of O(1→k), at the weights with which task k starts and with what "
        "the method has stored by then, and the drop in accuracy on task 1 until the end.",
        "",
        *lines,
        pictures.add(
            "overlap-drop", "Drop in accuracy against overlap", lambda: _figure_later(data)
        ),
        "",
        "*Left: drop in accuracy on task 1 against the largest singular value of O(1→last), one "
        "point a method and memory, ± one standard deviation. Others: the largest singular value "
        "as tasks go by, for the largest memory.*",
        "",
    ]


def _figure_later(data: Data) -> Figure:
    titles = [f"{NAMES[DROP]}: drop", *(f"{NAMES[b]}: evolution" for b in data)]
    figure, axes = panels(titles, width=2.5)
    for variant, result in data.get(DROP, {}).items():
        method, memory = variant.split()
        last = list(result["later"].values())[-1]["largest"]
        axes[0].errorbar(
            mean(last), mean(result["drop"]), std(result["drop"]), std(last), fmt="o", ms=4,
            color=method_colour(method),
        )  # fmt: skip
        words = method_label(method) if method in ("sgd", "gem-nt") else memory
        left = method in ("sgd", "ogd")  # whose points have GEM-NT's and PCA-OGD's to the right
        axes[0].annotate(
            words,
            (mean(last), mean(result["drop"])),
            (-4, 3) if left else (4, -7),
            textcoords="offset points",
            ha="right" if left else "left",
            fontsize=7,
        )
    axes[0].margins(x=0.15)
    axes[0].set_xlabel("largest singular value")
    axes[0].set_ylabel("drop on task 1, points")
    for panel, variants in zip(axes[1:], data.values(), strict=True):
        most = max((int(v.split()[1]) for v in variants if "ogd" in v), default=0)
        for variant, result in variants.items():
            method, memory = variant.split()
            if "ogd" in method and int(memory) != most:
                continue
            tasks = [int(t) for t in result["later"]]
            values = [mean(found["largest"]) for found in result["later"].values()]
            panel.plot(tasks, values, "o-", ms=3, color=method_colour(method), label=label(variant))
        panel.set_xlabel("task k")
        panel.set_ylim(0, 1.05)
    legend_below(figure, axes[1], 4)
    return figure


LATER = Artefact(
    LATER_PROBE.name,
    "Overlap with later tasks, and what is lost",
    "section 5.1, drop figure; appendix, evolution of the eigenvalues",
    each(measure_later),
    show_later,
    later_cells,
    probe=LATER_PROBE,
)
