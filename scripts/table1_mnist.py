"""Run the MNIST part of the paper's Table 1, and set the results beside the printed numbers.

    python scripts/table1_mnist.py run [--jobs 2] [--seeds 5] [--data DIR] [--out results/table1]
    python scripts/table1_mnist.py table [--out results/table1]

`run` shares the cells among a few processes, so that one prepares or consolidates while another
trains, and leaves a `trace.json` for each cell; `table` reads them and writes `README.md` beside
them. Made for one GPU; on a CPU it takes hours.
"""

import argparse
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

from forgetless import Trace, average_accuracy, forgetting, load_trace
from forgetless.config import resolve
from forgetless.runs import run as train

# Table 1 as printed: A_T, its standard deviation, F_T, its standard deviation.
PRINTED = {
    "permuted-mnist": {
        "sgd": (76.81, 1.36, 14.88, 1.64),
        "ewc": (79.71, 0.52, 3.81, 0.47),
        "a-gem": (83.4, 0.43, 7.29, 0.45),
        "ogd": (80.95, 0.5, 9.72, 0.51),
        "pca-ogd": (81.44, 0.62, 9.11, 0.65),
    },
    "rotated-mnist": {
        "sgd": (66.07, 0.47, 29.57, 0.56),
        "ewc": (76.2, 0.62, 13.44, 0.82),
        "a-gem": (83.52, 0.22, 9.86, 0.28),
        "ogd": (77.42, 0.35, 16.52, 0.46),
        "pca-ogd": (82.05, 0.58, 11.67, 0.65),
    },
    "split-mnist": {
        "sgd": (95.1, 1.08, 2.02, 1.48),
        "ewc": (95.06, 1.15, 2.08, 1.56),
        "a-gem": (94.25, 1.62, 2.82, 1.72),
        "ogd": (96.05, 0.34, 0.37, 0.21),
        "pca-ogd": (95.96, 0.29, 0.28, 0.15),
    },
}
# The slow ones first, so that no process is left alone at the end.
ORDER = ("pca-ogd", "ogd", "a-gem", "ewc", "sgd")
CELLS = [(scenario, method) for method in ORDER for scenario in PRINTED]


def run_cell(names: tuple[str, str], arguments: argparse.Namespace) -> str:
    """Train one cell; returns what there is to say about it."""
    scenario, method = names
    config = resolve(scenario, method, protocol="released", seeds=arguments.seeds)
    trace = train(
        config,
        data=arguments.data,
        out=arguments.out / scenario / method,
        overwrite=True,
        keep="nothing",
    )
    return f"{scenario} {method}: {describe(trace)}"


def describe(trace: Trace) -> str:
    """A_T, F_T and the time in one line."""
    accuracy, forgotten = average_accuracy(trace.accuracy), forgetting(trace.accuracy)
    return (
        f"A_T {accuracy.mean():.2f} ± {accuracy.std():.2f}  "
        f"F_T {forgotten.mean():.2f} ± {forgotten.std():.2f}  {trace.timings['total']:.0f} s"
    )


def run(arguments: argparse.Namespace) -> None:
    """All cells, several at a time."""
    started = time.perf_counter()
    fresh = multiprocessing.get_context("spawn")  # a GPU cannot be used in a forked process
    with ProcessPoolExecutor(arguments.jobs, mp_context=fresh) as pool:
        for result in pool.map(partial(run_cell, arguments=arguments), CELLS):
            print(f"{time.perf_counter() - started:5.0f} s  {result}", flush=True)


def table(arguments: argparse.Namespace) -> None:
    """Write the comparison with the paper as Markdown."""
    lines = [
        "# Table 1 of the paper, its MNIST part",
        "",
        "Made by `scripts/table1_mnist.py` with `--protocol released` (settings and departures of",
        "the paper's code), mean ± standard deviation over the seeds. A cell agrees when its A_T",
        "is within max(1.5, 2σ) points of the printed one, σ both standard deviations combined.",
        "",
        "| benchmark | method | A_T, paper | A_T, here | F_T, paper | F_T, here | A_T agrees |",
        "|---|---|---|---|---|---|---|",
    ]
    agreed = 0
    traces = [load_trace(arguments.out / s / m) for s in PRINTED for m in PRINTED[s]]
    for trace in traces:
        a_paper, a_std, f_paper, f_std = PRINTED[trace.scenario][trace.method]
        accuracy, forgotten = average_accuracy(trace.accuracy), forgetting(trace.accuracy)
        allowed = max(1.5, 2 * float(np.hypot(a_std, accuracy.std())))
        difference = float(accuracy.mean()) - a_paper
        agrees = abs(difference) <= allowed
        agreed += agrees
        lines.append(
            f"| {trace.scenario} | {trace.method} | {a_paper:.2f} ± {a_std:.2f} "
            f"| {accuracy.mean():.2f} ± {accuracy.std():.2f} | {f_paper:.2f} ± {f_std:.2f} "
            f"| {forgotten.mean():.2f} ± {forgotten.std():.2f} "
            f"| {'yes' if agrees else 'no'} ({difference:+.2f}, allowed {allowed:.2f}) |"
        )
    seconds = sum(t.timings["total"] for t in traces)
    versions = traces[0].versions
    lines += [
        "",
        f"{agreed} of {len(traces)} cells agree. {len(traces[0].seeds)} seeds, "
        f"{versions['device']}, torch {versions['torch']}, code {versions['code']}; "
        f"{seconds:.0f} s of run time in all, several cells sharing the device.",
    ]
    file = arguments.out / "README.md"
    file.write_text("\n".join(lines) + "\n", "utf-8")
    print(file.read_text("utf-8"))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("action", choices=("run", "table"))
    parser.add_argument("--out", type=Path, default=Path("results/table1"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seeds", default="5")
    parser.add_argument("--data", type=Path)
    arguments = parser.parse_args()
    run(arguments) if arguments.action == "run" else table(arguments)


if __name__ == "__main__":
    main()
