"""Methods at their own best settings on Rotated, Permuted and Split MNIST, on a GPU.

Learning rate and each method's own knob are chosen on held-out training images (100 of each class,
two seeds): from a grid, and then on until the neighbours of the best setting were tried as well.
It is then trained with five other seeds and measured on the test images. Beside the accuracy: what
a seed's state takes, and the seconds of the run.

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
from forgetless.training.models import ModelFactory

RESULTS = Path(__file__).parent.parent / "results" / "bench" / "tuned.json"
SCENARIOS = ("rotated-mnist", "permuted-mnist", "split-mnist")
# Values in their order, and how many of the middle ones are tried at first.
RATES = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1)
THRESHOLDS = (0.8, 0.9, 0.95, 0.97, 0.99, 0.995)
ENERGIES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
# Row of the table → its method, the values of the method's own knob, those that are tried at first,
# and other settings. A-GEM, OGD and PCA-OGD store 100 samples or directions of each task.
Row = tuple[str, str, tuple[float, ...], slice, dict[str, float]]
ROWS: dict[str, Row] = {
    "sgd": ("sgd", "", (), slice(0), {}),
    "ewc": ("ewc", "ewc_strength", (1, 10, 30, 100, 300, 1000, 3000), slice(5), {}),
    "a-gem": ("a-gem", "", (), slice(0), {}),
    "ogd": ("ogd", "", (), slice(0), {}),
    "pca-ogd": ("pca-ogd", "", (), slice(0), {}),
    "gpm": ("gpm", "gpm_threshold", THRESHOLDS, slice(1, 5), {}),
    "sgp": ("sgp", "gpm_threshold", THRESHOLDS, slice(1, 5), {}),
    "adam-nscl": ("adam-nscl", "nscl_ratio", (3, 10, 30, 100, 300, 1000), slice(4), {}),
    "kfac-laplace": ("kfac-laplace", "laplace_strength", (0.1, 1, 10, 100), slice(3), {}),
    "kron-ogd": ("kron-ogd", "energy", ENERGIES, slice(3, 6), {}),
    "kron-ogd, no shrinkage": ("kron-ogd", "energy", ENERGIES, slice(3, 6), {"shrinkage": 0.0}),
    "kron-ogd, by itself": ("kron-ogd", "", (), slice(0), {}),
}
FIRST_RATES = RATES[2:5]
HELD_OUT, SEARCH_SEEDS, SEEDS = 100, (100, 101), (0, 1, 2, 3, 4)
Run = dict[str, Any]
DIVERGED = {"average_accuracy": [0.0], "forgetting": [0.0], "bytes": None, "seconds": 0.0}


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
    of_run = {"row": row, "scenario": scenario, "settings": settings, "seeds": seeds}
    of_run |= {"method": config.method_name, "measured_on": tasks.measured_on}
    try:
        trace = fit(tasks, config.build_method(), model, seeds=seeds, training=config, keep=keep)
    except TrainingError as error:  # a penalty may be too strong for a learning rate
        return of_run | {"error": str(error)} | DIVERGED
    return of_run | {
        "average_accuracy": average_accuracy(trace.accuracy).round(3).tolist(),
        "forgetting": forgetting(trace.accuracy).round(3).tolist(),
        "bytes": trace.memory_bytes(seeds[0]) if final else None,
        "seconds": round(time.perf_counter() - started, 2),
    }


def grid(row: str) -> list[dict[str, float]]:
    """The settings that are tried at first."""
    _, knob, values, first, more = ROWS[row]
    knobs = [{knob: value} for value in values[first]] if knob else [{}]
    return [{"lr": lr, **one, **more} for lr in FIRST_RATES for one in knobs]


def neighbours(row: str, settings: dict[str, float]) -> list[dict[str, float]]:
    """The settings with the next smaller and larger learning rate, and knob."""
    _, knob, values, *_ = ROWS[row]
    found = []
    for name, known in (("lr", RATES), (knob, values)):
        if name:
            place = known.index(settings[name])
            near = {max(0, place - 1), min(len(known) - 1, place + 1)} - {place}
            found += [{**settings, name: known[other]} for other in near]
    return found


def search(
    cells: list[tuple[str, str]], known: list[Run], data: Path | None, jobs: int
) -> Iterator[Run]:
    """The runs of the search that are not known, as they end; each is to be added to `known`."""
    tried = {(run["row"], run["scenario"], key(run["settings"])) for run in known}
    wanted = [(row, scenario, settings) for row, scenario in cells for settings in grid(row)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        while new := [job for job in wanted if (*job[:2], key(job[2])) not in tried]:
            tried |= {(row, scenario, key(settings)) for row, scenario, settings in new}
            coming = [pool.submit(trained, *job, data, False) for job in new]
            for future in as_completed(coming):
                yield future.result()
            wanted = [
                (row, scenario, settings)
                for row, scenario in cells
                for settings in neighbours(row, best(known, row, scenario)["settings"])
            ]


def is_searched(runs: list[Run], row: str, scenario: str) -> bool:
    """Whether the neighbours of the best setting of a cell were tried."""
    tried = [
        key(run["settings"]) for run in runs if (run["row"], run["scenario"]) == (row, scenario)
    ]
    near = neighbours(row, best(runs, row, scenario)["settings"])
    return all(key(settings) in tried for settings in near)


def key(settings: dict[str, float]) -> str:
    """Settings as text, whatever their order."""
    return json.dumps({name: float(value) for name, value in sorted(settings.items())})


def best(runs: list[Run], row: str, scenario: str) -> Run:
    """The run of a cell with the highest accuracy."""
    of_cell = [run for run in runs if (run["row"], run["scenario"]) == (row, scenario)]
    return max(of_cell, key=lambda run: sum(run["average_accuracy"]))


def show(run: Run) -> None:
    """A line for a run."""
    accuracy, forgotten = torch.tensor(run["average_accuracy"]), torch.tensor(run["forgetting"])
    settings = ", ".join(f"{k} {v:g}" for k, v in run["settings"].items())
    print(
        f"{run['scenario']:15}{run['row']:24}{settings:36}{run['measured_on']:11}"
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

    for run in search(cells, record["searched"], options.data, options.jobs):
        note("searched", run)
    for row, scenario in cells:
        settings = best(record["searched"], row, scenario)["settings"]
        known = [r for r in record["chosen"] if (r["row"], r["scenario"]) == (row, scenario)]
        if key(settings) in [key(run["settings"]) for run in known]:
            continue
        for run in known:
            record["chosen"].remove(run)
        run = trained(row, scenario, settings, options.data, True)
        note("chosen", run | {"searched": is_searched(record["searched"], row, scenario)})


if __name__ == "__main__":
    main()
