"""Methods at their own best settings on Rotated, Permuted and Split MNIST, on a GPU.

Learning rate and each method's own knob are chosen on held-out training images (100 of each class,
two seeds); the chosen setting is then trained with five other seeds and measured on the test
images. Beside the accuracy: what a seed's state takes, and the seconds of the run.

    python benchmarks/tuned.py [--data DATA] [--methods sgd,gpm] [--jobs 5] [--out]

Searches run several at a time, which changes nothing but their seconds; the chosen settings one
after another. With --out, runs that the file has already are not made again.
"""

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from forgetless import TrainingError, average_accuracy, fit, forgetting
from forgetless.data import build_scenario
from forgetless.launch.runs import resolve
from forgetless.support.provenance import versions
from forgetless.training.build import ModelFactory

RESULTS = Path(__file__).parent.parent / "results" / "bench" / "tuned.json"
SCENARIOS = ("rotated-mnist", "permuted-mnist", "split-mnist")
RATES = (0.001, 0.003, 0.01)
# Row of the table → its method, and the values of the method's own knob. A-GEM, OGD and PCA-OGD
# store 100 samples or directions of each task, as in the paper.
ROWS: dict[str, tuple[str, tuple[dict[str, float], ...]]] = {
    "sgd": ("sgd", ({},)),
    "ewc": ("ewc", tuple({"ewc_strength": s} for s in (1.0, 10.0, 30.0, 100.0, 300.0))),
    "a-gem": ("a-gem", ({},)),
    "ogd": ("ogd", ({},)),
    "pca-ogd": ("pca-ogd", ({},)),
    "gpm": ("gpm", tuple({"gpm_threshold": t} for t in (0.9, 0.95, 0.97, 0.99))),
    "sgp": ("sgp", tuple({"gpm_threshold": t} for t in (0.9, 0.95, 0.97, 0.99))),
    "adam-nscl": ("adam-nscl", tuple({"nscl_ratio": r} for r in (3.0, 10.0, 30.0, 100.0))),
    "kfac-laplace": ("kfac-laplace", tuple({"laplace_strength": s} for s in (0.1, 1.0, 10.0))),
    "kron-ogd": (
        "kron-ogd",
        tuple(
            {"energy": e, **more} for e in (0.9, 0.95, 0.98) for more in ({"shrinkage": 0.0}, {})
        ),
    ),
    "kron-ogd, by itself": ("kron-ogd", ({},)),
}
HELD_OUT, SEARCH_SEEDS, SEEDS = 100, (100, 101), (0, 1, 2, 3, 4)
Run = dict[str, Any]


def trained(
    row: str, scenario: str, settings: dict[str, float], data: Path | None, final: bool
) -> Run:
    """One run: of the search, on held-out images, or of the table, on the test images."""
    held_out = {} if final else {"validation_per_class": HELD_OUT}
    config = resolve(scenario, ROWS[row][0], **settings, **held_out)
    tasks = build_scenario(scenario, config, data)
    model = ModelFactory(config, tasks.input_shape, tasks.n_outputs)
    seeds, keep = (SEEDS, "all") if final else (SEARCH_SEEDS, "nothing")
    started = time.perf_counter()
    trace = fit(tasks, config.build_method(), model, seeds=seeds, training=config, keep=keep)
    return {
        "row": row,
        "scenario": scenario,
        "method": config.method_name,
        "settings": settings,
        "measured_on": tasks.measured_on,
        "seeds": seeds,
        "average_accuracy": average_accuracy(trace.accuracy).round(3).tolist(),
        "forgetting": forgetting(trace.accuracy).round(3).tolist(),
        "bytes": trace.memory_bytes(seeds[0]) if final else None,
        "seconds": round(time.perf_counter() - started, 2),
    }


def searched(
    cells: list[tuple[str, str]], data: Path | None, jobs: int, known: list[Run]
) -> Iterator[Run]:
    """The runs of the search that are not known, as they end."""
    have = [(run["row"], run["scenario"], run["settings"]) for run in known]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        coming = [
            pool.submit(trained, row, scenario, {"lr": lr, **knob}, data, False)
            for row, scenario in cells
            for lr in RATES
            for knob in ROWS[row][1]
            if (row, scenario, {"lr": lr, **knob}) not in have
        ]
        for future in as_completed(coming):
            try:
                yield future.result()
            except TrainingError as error:  # a penalty may be too strong for a learning rate
                print(f"left out: {error}", flush=True)


def show(run: Run) -> None:
    """A line for a run."""
    accuracy, forgotten = torch.tensor(run["average_accuracy"]), torch.tensor(run["forgetting"])
    settings = ", ".join(f"{k} {v:g}" for k, v in run["settings"].items())
    print(
        f"{run['scenario']:15}{run['row']:20}{settings:26}{run['measured_on']:11}"
        f"{run['seconds']:6.1f} s  A_T {accuracy.mean():.2f} ± {accuracy.std(correction=0):.2f}  "
        f"F_T {forgotten.mean():.2f}  {(run['bytes'] or 0) / 1e6:.1f} MB",
        flush=True,
    )


def as_text(record: dict[str, Any]) -> str:
    """A record as JSON with a line for each run."""
    lists = [
        f'"{kind}": [\n' + ",\n".join(json.dumps(run) for run in record[kind]) + "\n]"
        for kind in ("chosen", "searched")
    ]
    return f'{{"versions": {json.dumps(record["versions"])},\n' + ",\n".join(lists) + "}\n"


def main() -> None:
    """Search and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with MNIST")
    parser.add_argument("--methods", default=",".join(ROWS), help="rows, comma-separated")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), help="comma-separated")
    parser.add_argument("--jobs", type=int, default=1, help="searches at a time")
    parser.add_argument("--out", nargs="?", type=Path, const=RESULTS, help="write the results")
    options = parser.parse_args()
    rows = [row for row in ROWS if row in options.methods.split(",")]
    cells = [(row, s) for s in options.scenarios.split(",") for row in rows]
    record: dict[str, Any] = {"chosen": [], "searched": []}
    if options.out and options.out.is_file():
        record = json.loads(options.out.read_text())

    def note(kind: str, run: Run) -> None:
        show(run)
        record[kind].append(run)
        if options.out:
            options.out.write_text(as_text({"versions": versions(torch.device("cuda")), **record}))

    for run in searched(cells, options.data, options.jobs, record["searched"]):
        note("searched", run)
    for row, scenario in cells:
        tried = [r for r in record["searched"] if (r["row"], r["scenario"]) == (row, scenario)]
        best = max(tried, key=lambda run: sum(run["average_accuracy"]))
        of_cell = [r for r in record["chosen"] if (r["row"], r["scenario"]) == (row, scenario)]
        if best["settings"] not in [run["settings"] for run in of_cell]:
            note("chosen", trained(row, scenario, best["settings"], options.data, True))


if __name__ == "__main__":
    main()
