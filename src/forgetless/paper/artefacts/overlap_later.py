"""Overlap of task 1 with later tasks, and the drop in accuracy on it: evolution and drop figure."""

from typing import Any

from matplotlib.figure import Figure
from scipy.stats import spearmanr

from forgetless.paper.artefact import Artefact, Data
from forgetless.paper.artefacts import table1
from forgetless.paper.artefacts.memory_sweep import sweep_run
from forgetless.paper.numbers import mean, shown, std, table
from forgetless.paper.pictures import COLOURS, LABELS, NAMES, Pictures, panels
from forgetless.paper.run import Run
from forgetless.paper.scale import Scale
from forgetless.paper.spectra import overlap_with_first
from forgetless.paper.store import Results
from forgetless.paper.work import Look, Workshop

NAME = "overlap-later"
DROP = "rotated"  # the benchmark of the drop figure, with all memories
BENCHMARKS = (DROP, "cifar", "permuted")


def targets(tasks: int) -> list[int]:
    """Which of so many tasks are looked at, from 0: the next, two between, the last."""
    return sorted({1, tasks // 3, 2 * tasks // 3, tasks - 1})


def variants(scale: Scale, benchmark: str) -> dict[str, Run]:
    """The runs of a benchmark by "method memory"."""
    few = (scale.memories[0], scale.memories[-1])
    found = {
        f"sgd {scale.memory}": table1.cell_run(scale, benchmark, "sgd"),
        f"gem-nt {scale.memory}": table1.cell_run(scale, benchmark, "gem-nt"),
    }
    for memory in scale.memories if benchmark == DROP else few:
        for method in ("ogd", "pca-ogd"):
            found[f"{method} {memory}"] = sweep_run(scale, benchmark, method, memory)
    return found


def _variants(scale: Scale) -> dict[str, tuple[str, str, Run]]:
    """Benchmark, variant and run by the name of the part; GEM-NT, by far the slowest, is apart."""
    return {
        f"{b} with GEM-NT" if variant.startswith("gem-nt") else f"{b}/{variant}": (b, variant, run)
        for b in BENCHMARKS
        for variant, run in variants(scale, b).items()
    }


def parts(scale: Scale, results: Results) -> dict[str, list[Run]]:
    """Every variant on every benchmark."""
    return {part: [run] for part, (*_, run) in _variants(scale).items()}


def find(workshop: Workshop, run: Run) -> dict[str, Any]:
    """Largest and mean singular value of O(1→k) at the weights with which task k starts."""
    scale, replay, later = workshop.scale, workshop.replay(run), {}
    for task in range(run.config.tasks - 1):
        replay.at(task)
        replay.remember(task)
        if task + 1 in targets(run.config.tasks):
            found = overlap_with_first(replay, task + 1, scale.overlap_samples)
            later[str(task + 2)] = {name: found[name] for name in ("largest", "mean")}
    return later


LOOK = Look(NAME, find)


def measure(workshop: Workshop) -> dict[str, Any]:
    """Spectra of O(1→k), and the drop on task 1: benchmark → "method memory"."""
    data: dict[str, Any] = {}
    every = _variants(workshop.scale)
    for part in workshop.measurable(every):
        benchmark, variant, run = every[part]
        later = workshop.looked(LOOK, run)
        accuracy = workshop.trace(run).accuracy
        drop = accuracy[:, 0, 0] - accuracy[:, -1, 0]
        data.setdefault(benchmark, {})[variant] = {"later": later, "drop": drop}
    return data


def seeds(data: Data, benchmark: str = DROP) -> range:
    """Places of the seeds that all variants have."""
    return range(min(len(of["drop"]) for of in data[benchmark].values()))


def points(
    data: Data, benchmark: str = DROP, without: str | None = None, seed: int | None = None
) -> list[tuple[str, float, float]]:
    """Of the drop figure: variant, largest singular value for the last task, drop.

    Arguments:
        data: of this artefact.
        benchmark: whose.
        without: a method that is left out.
        seed: the place of the only seed that is looked at; None for the mean over all.
    """
    chosen = slice(None) if seed is None else slice(seed, seed + 1)
    found = []
    for variant, of in data[benchmark].items():
        if variant.split()[0] == without:
            continue
        last = list(of["later"].values())[-1]
        found.append((variant, mean(last["largest"][chosen]), mean(of["drop"][chosen])))
    return found


def rank_correlation(
    data: Data, benchmark: str = DROP, without: str | None = None, seed: int | None = None
) -> tuple[float, float]:
    """Spearman's, of overlap and drop over the `points` of the drop figure, and its p-value."""
    _, overlap, drop = zip(*points(data, benchmark, without, seed), strict=True)
    found = spearmanr(overlap, drop)
    return float(found.statistic), float(found.pvalue)


def show(data: Data, pictures: Pictures) -> list[str]:
    """The largest singular value by task, the drop, and both figures."""
    lines = []
    for benchmark, variants_ in data.items():
        tasks = list(next(iter(variants_.values()))["later"])
        rows = [
            [
                label(variant),
                *(f"{mean(of['later'][t]['largest']):.3f}" for t in tasks),
                shown(of["drop"]),
            ]
            for variant, of in variants_.items()
        ]
        headings = [NAMES[benchmark], *(f"O(1→{t})" for t in tasks), "drop on task 1, points"]
        lines += table(headings, rows)
    return [
        "Largest singular value of O(1→k), at the weights with which task k starts and with what "
        "the method has stored by then, and the drop in accuracy on task 1 until the end.",
        "",
        *lines,
        pictures.add("overlap-drop", "Drop in accuracy against overlap", lambda: _figure(data)),
        "",
        "*Left: drop in accuracy on task 1 against the largest singular value of O(1→last), one "
        "point a method and memory, ± one standard deviation. Others: the largest singular value "
        "as tasks go by, for the largest memory.*",
        "",
    ]


def label(variant: str) -> str:
    """A variant's name for people."""
    method, memory = variant.split()
    return LABELS[method] if method in ("sgd", "gem-nt") else f"{LABELS[method]} {memory}"


def _figure(data: Data) -> Figure:
    figure, axes = panels(
        [f"{NAMES[DROP]}: drop", *(f"{NAMES[b]}: evolution" for b in data)], width=2.5
    )
    for variant, of in data.get(DROP, {}).items():
        method, memory = variant.split()
        last = list(of["later"].values())[-1]["largest"]
        axes[0].errorbar(
            mean(last), mean(of["drop"]), std(of["drop"]), std(last), fmt="o", ms=4,
            color=COLOURS[method],
        )  # fmt: skip
        words = LABELS[method] if method in ("sgd", "gem-nt") else memory
        left = method in ("sgd", "ogd")  # whose points have GEM-NT's and PCA-OGD's to the right
        axes[0].annotate(
            words,
            (mean(last), mean(of["drop"])),
            (-4, 3) if left else (4, -7),
            textcoords="offset points",
            ha="right" if left else "left",
            fontsize=7,
        )
    axes[0].margins(x=0.15)
    axes[0].set_xlabel("largest singular value")
    axes[0].set_ylabel("drop on task 1, points")
    for panel, variants_ in zip(axes[1:], data.values(), strict=True):
        most = max((int(v.split()[1]) for v in variants_ if "ogd" in v), default=0)
        for variant, of in variants_.items():
            method, memory = variant.split()
            if "ogd" in method and int(memory) != most:
                continue
            tasks = [int(t) for t in of["later"]]
            values = [mean(found["largest"]) for found in of["later"].values()]
            panel.plot(tasks, values, "o-", ms=3, color=COLOURS[method], label=label(variant))
        panel.set_xlabel("task k")
        panel.set_ylim(0, 1.05)
    figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


ARTEFACT = Artefact(
    NAME,
    "Overlap with later tasks, and what is lost",
    "section 5.1, drop figure; appendix, evolution of the eigenvalues",
    measure,
    show,
    parts,
    look=LOOK,
)
