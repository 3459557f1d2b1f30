"""The table: all methods × benchmarks × task-, domain- and class-incremental, each tuned alike.

For each method on each benchmark `forgetless.tune` chooses the learning rate and the knobs that the
method declares, on held-out training images with two seeds, and goes on around the best until its
neighbours were tried. The choices are trained with five other seeds, on the test images. The table
has intervals, paired tests, the bytes that a seed stores, and seconds.

    python benchmarks/incremental.py --out [--data DATA] [--jobs 5]  # on a GPU: make bench-table
    python benchmarks/incremental.py --tiny                          # on digits, in minutes

The same command resumes what is in runs/incremental (with --tiny, runs/incremental-tiny). A method
that diverges with every setting is named in the results.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from tuned import SEEDS, measured

import forgetless
from forgetless.launch.search import Trial, described
from forgetless.methods import METHODS
from forgetless.report import as_latex, comparison_table, ranking, rows

RESULTS = Path(__file__).parent.parent / "results" / "bench" / "incremental.json"


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Arguments:
        cells: the benchmark of each column of the table, and its settings.
        seeds: on the test images.
        grid: in place of the values that options declare.
        search: other arguments of the search.
    """

    cells: Mapping[str, tuple[str, Mapping[str, Any]]]
    seeds: str
    runs: Path
    grid: Mapping[str, Sequence[float]] = field(default_factory=dict)
    search: Mapping[str, Any] = field(default_factory=dict)


def _cells(digits: bool) -> dict[str, tuple[str, dict[str, Any]]]:
    """Split, permuted and rotated benchmarks; the last two have the same classes in every task."""
    split = {"Split MNIST": "split-mnist", "Split CIFAR-100": "split-cifar100"}
    whole = {"Permuted MNIST": "permuted-mnist", "Rotated MNIST": "rotated-mnist"}
    if digits:
        split = {"Split digits": "split-digits"}
        whole = {"Permuted digits": "permuted-digits", "Rotated digits": "rotated-digits"}
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for title, scenario in split.items():
        for setting in ("task", "domain", "class"):
            found[f"{title}, {setting}-incremental"] = scenario, {"setting": setting}
    return found | {f"{title}, domain-incremental": (name, {}) for title, name in whole.items()}


FULL = Size(_cells(False), SEEDS, Path("runs/incremental"), search={"extend": True})
TINY = Size(
    _cells(True),
    "0,1,2",
    Path("runs/incremental-tiny"),
    grid={"lr": (0.02, 0.1)},
    search={"tasks": 2, "epochs": 1, "train_per_class": 20},
)


def cell(
    title: str, size: Size, methods: Sequence[str], data: Path | None, jobs: int
) -> dict[str, Any]:
    """All methods on one benchmark: the choices, and the rows of the table."""
    scenario, settings = size.cells[title]
    folder = size.runs / title.lower().replace(", ", "-").replace(" ", "-")
    search = forgetless.tune(
        scenario,
        methods,
        grid=size.grid,
        data=data,
        out=folder / "search",
        jobs=jobs,
        on_trial=lambda trial, done, total: show(title, trial, done, total),
        **settings,
        **size.search,
    )
    best = search.best
    traces = measured(search, scenario, folder, data, size.seeds)
    made = ranking(traces)
    Console().print(comparison_table(made))
    chosen = {
        trace.method: {
            "settings": dict(best[trace.method].settings),
            "validation": list(best[trace.method].trial.average_accuracy),
            "trials": best[trace.method].trials,
            "limits": list(best[trace.method].limits),
            "test": trace.summary()["average_accuracy"]["per_seed"],
        }
        for trace in traces
    }
    return {
        "title": title,
        "scenario": scenario,
        "settings": dict(settings),
        "protocol": search.protocol,
        "seeds": list(traces[0].seeds),
        "versions": traces[0].versions,
        "diverged": [method for method in methods if method not in best],
        "chosen": chosen,
        "rows": rows(made),
        "footnote": made.footnote,
        "latex": as_latex(made),
    }


def show(title: str, trial: Trial, done: int, total: int) -> None:
    """A line for a trial."""
    found = trial.error or f"A_T {trial.score:.2f}"
    what = f"{trial.method} {described(trial.settings)}"
    print(f"{title}: {done} of {total}: {what}: {found}", flush=True)


def main() -> None:
    """Fill the table, cell by cell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with MNIST and CIFAR-100")
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated")
    parser.add_argument("--jobs", type=int, default=1, help="trials at a time")
    parser.add_argument("--tiny", action="store_true", help="digits, few images, one epoch")
    parser.add_argument("--out", nargs="?", type=Path, const=RESULTS, help="write the results")
    options = parser.parse_args()
    size = TINY if options.tiny else FULL
    cells = []
    for title in size.cells:
        methods = options.methods.split(",")
        cells.append(cell(title, size, methods, options.data, options.jobs))
        if options.out:
            options.out.write_text(json.dumps({"cells": cells}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
