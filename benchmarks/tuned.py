"""Methods at their own best settings on Rotated, Permuted and Split MNIST, on a GPU.

`forgetless.tune` chooses the learning rate and each method's own knob on held-out training images
(100 of each class, two seeds): from a grid, and then on until the neighbours of the best setting
were tried as well. The choice is then trained with five other seeds and measured on the test
images. Beside the accuracy: what a seed's state takes, and the seconds of the run.

    python benchmarks/tuned.py [--data DATA] [--methods sgd,gpm] [--jobs 5] [--out]

Searches run several at a time, which changes nothing but their seconds; the chosen settings one
after another. The same command resumes what is in runs/tuned. The committed results are of an
earlier version of this script, which took its values beyond a grid from a list; they say which code
made them.
"""

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import forgetless
from forgetless import Search, Trace
from forgetless.launch.engines import InProcess, Order, train
from forgetless.launch.search import Trial, best_configs, described
from forgetless.support.provenance import versions

RESULTS = Path(__file__).parent.parent / "results" / "bench" / "tuned.json"
RUNS = Path("runs") / "tuned"
SCENARIOS = ("rotated-mnist", "permuted-mnist", "split-mnist")
RATES = {"lr": (0.001, 0.003, 0.01)}
ENERGIES = {"energy": (0.9, 0.95, 0.98)}
THRESHOLDS = {"gpm_threshold": (0.8, 0.9, 0.95, 0.97, 0.99, 0.995)}
# Row of the table → its method, the values of its own knob that are tried at first, and settings
# that are not searched. A-GEM, OGD and PCA-OGD store 100 samples or directions of each task.
Row = tuple[str, Mapping[str, tuple[float, ...]], Mapping[str, float]]
ROWS: dict[str, Row] = {
    "sgd": ("sgd", {}, {}),
    "ewc": ("ewc", {"ewc_strength": (1.0, 10.0, 30.0, 100.0, 300.0)}, {}),
    "a-gem": ("a-gem", {}, {}),
    "ogd": ("ogd", {}, {}),
    "pca-ogd": ("pca-ogd", {}, {}),
    "gpm": ("gpm", THRESHOLDS, {}),
    "sgp": ("sgp", THRESHOLDS, {}),
    "adam-nscl": ("adam-nscl", {"nscl_ratio": (3.0, 10.0, 30.0, 100.0)}, {}),
    "kfac-laplace": ("kfac-laplace", {"laplace_strength": (0.1, 1.0, 10.0)}, {}),
    "kron-ogd": ("kron-ogd", ENERGIES, {}),
    "kron-ogd without shrinkage": ("kron-ogd", ENERGIES, {"shrinkage": 0.0}),
    "kron-ogd by itself": ("kron-ogd", {}, {"drift": 1e-3}),
}
SEEDS = "0,1,2,3,4"
Run = dict[str, Any]


def search(row: str, scenario: str, data: Path | None, jobs: int) -> Search:
    """The best settings of a row on a scenario."""
    method, knob, fixed = ROWS[row]
    return forgetless.tune(
        scenario,
        [method],
        grid={**RATES, **knob},
        extend=True,
        data=data,
        out=folder_of(row, scenario) / "search",
        jobs=jobs,
        on_trial=lambda trial, done, total: show(row, scenario, trial, done, total),
        **fixed,
    )


def measured(
    found: Search, scenario: str, folder: Path, data: Path | None, seeds: str = SEEDS
) -> list[Trace]:
    """The runs of the choices of a search, on the test images, one after another."""
    configs = best_configs(found, scenario, None, {"seeds": seeds}, {})
    orders = [Order(config.title, config, folder / config.method_name, data) for config in configs]
    for _, error in train(orders, InProcess(), lambda event: None):
        if error is not None:
            raise error
    return [forgetless.load_trace(order.folder) for order in orders]


def folder_of(row: str, scenario: str) -> Path:
    """Where the search and the run of a row are resumed from."""
    return RUNS / scenario / row.replace(" ", "-")


def show(row: str, scenario: str, trial: Trial, done: int, total: int) -> None:
    """A line for a trial."""
    found = trial.error or f"A_T {trial.score:.2f}"
    settings = described(trial.settings)
    print(f"{scenario:16}{row:24}{done:3} of {total:3}  {settings:32}{found}", flush=True)


def searched_runs(row: str, scenario: str, found: Search) -> list[Run]:
    """The trials of a search, as the file of results has them."""
    of = {"row": row, "scenario": scenario, "method": ROWS[row][0], "measured_on": "validation"}
    return [
        of
        | {"settings": dict(trial.settings), "seeds": found.protocol["seeds"]}
        | {"average_accuracy": list(trial.average_accuracy), "forgetting": list(trial.forgetting)}
        | {"seconds": trial.seconds}
        | ({"error": trial.error} if trial.error else {})
        for trial in found.trials
    ]


def chosen_run(row: str, scenario: str, found: Search, trace: Trace) -> Run:
    """The run of the choice, as the file of results has it."""
    (choice,) = found.best.values()
    summary = trace.summary()
    return {
        "row": row,
        "scenario": scenario,
        "method": trace.method,
        "settings": {**choice.settings, **ROWS[row][2]},
        "measured_on": trace.measured_on,
        "seeds": list(trace.seeds),
        "average_accuracy": [round(v, 3) for v in summary["average_accuracy"]["per_seed"]],
        "forgetting": [round(v, 3) for v in summary["forgetting"]["per_seed"]],
        "bytes": trace.memory_bytes(trace.seeds[0]),
        "seconds": round(trace.timings["total"], 2),
        "searched": not choice.limits,
    }


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
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record: dict[str, Any] = {"versions": versions(device), "chosen": [], "searched": []}
    for scenario in options.scenarios.split(","):
        for row in (row for row in ROWS if row in options.methods.split(",")):
            found = search(row, scenario, options.data, options.jobs)
            record["searched"] += searched_runs(row, scenario, found)
            if found.best:
                started = time.perf_counter()
                run = folder_of(row, scenario) / "test"
                (trace,) = measured(found, scenario, run, options.data)
                record["chosen"].append(chosen_run(row, scenario, found, trace))
                accuracy = trace.summary()["average_accuracy"]
                seconds = time.perf_counter() - started
                print(f"  test: {accuracy['mean']:.2f} ± {accuracy['std']:.2f}, {seconds:.0f} s")
            if options.out:
                options.out.write_text(as_text(record))


if __name__ == "__main__":
    main()
