"""Projection, training step and whole runs on one GPU, against plain forms and the bandwidth.

    python benchmarks/gpu.py [--data DIR] [--parts projection,step,runs] [--cells ewc,split-mnist]
        [--repeats 20] [--out]

The projection away from K rows for each of five seeds has a floor: the bytes of the rows over the
bandwidth of a large copy measured in the same run. The reference is the usual two products; a sum
over as many bytes shows what any kernel takes to start and end. A training step is compared with
the same step launched from Python. Runs are cells of the paper's Table 1 (MNIST,
five seeds, protocol "released"), from the configuration to the trace. Other parts and runs in
the file do not change.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from forgetless import average_accuracy, fit, forgetting
from forgetless.data import build_scenario
from forgetless.launch.runs import resolve
from forgetless.linalg import project_out
from forgetless.subspace import DenseSubspace
from forgetless.subspace.dense import aligned, project_out_rows
from forgetless.support.provenance import versions
from forgetless.training.build import make_learner
from forgetless.training.models import ModelFactory

OUT = Path("results/bench/gpu.json")
SEEDS = 5
PARAMETERS = 113_610  # of the MLP 1024-100-100-10
COUNTS = (100, 400, 700, 1000, 1400)
CELLS = [
    (scenario, method)
    for method in ("sgd", "ewc", "a-gem", "ogd", "pca-ogd")
    for scenario in ("rotated-mnist", "permuted-mnist", "split-mnist")
]
RUNS = [*CELLS, ("rotated-mnist", "pca-ogd, bfloat16 rows")]


def timed(function: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each call on the GPU, after a warm-up."""
    for _ in range(repeats):
        function()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        function()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]


def timed_in_a_graph(function: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each call with ten in a CUDA graph, as in training."""
    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            function()
    return [seconds / 10 for seconds in timed(graph.replay, repeats)]


def described(seconds: list[float]) -> str:
    """Median and spread in microseconds."""
    low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
    return f"{1e6 * middle:8.1f} us ({1e6 * low:.1f} to {1e6 * high:.1f})"


def bandwidth(repeats: int) -> float:
    """Bytes a second of a copy of 4 GiB, read and written."""
    source = torch.empty(2**30, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / statistics.median(timed(lambda: target.copy_(source), repeats))


def projection(repeats: int) -> list[dict[str, Any]]:
    """One pass over the rows against two products and the floor."""
    rate = bandwidth(repeats)
    print(f"copy: {rate / 1e12:.2f} TB/s\n\nProjection, {SEEDS} seeds, p = {PARAMETERS}")
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for count in COUNTS:
            g = torch.randn(SEEDS, PARAMETERS, device="cuda")
            rows = aligned(g.unsqueeze(1).to(dtype), count)
            rows.copy_(torch.randn_like(rows) / PARAMETERS**0.5)
            ours = timed_in_a_graph(partial(project_out_rows, g, rows), repeats)
            plain = timed_in_a_graph(partial(project_out, g.to(dtype), rows), repeats)
            bytes_alone = torch.zeros(rows.numel() * rows.element_size() // 4, device="cuda")
            reading = timed_in_a_graph(bytes_alone.sum, repeats)
            exact = project_out(g[:1].double(), rows[:1].double())
            error = (project_out_rows(g, rows)[:1] - exact).norm() / exact.norm()
            floor = rows.numel() * rows.element_size() / rate
            ratio = statistics.median(ours) / floor
            found.append(
                {"dtype": str(dtype), "rows": count, "floor": floor, "seconds": ours,
                 "two_products": plain, "reading": reading, "ratio": ratio, "error": float(error)}
            )  # fmt: skip
            print(
                f"{str(dtype)[6:]:9}{count:5} rows {described(ours)}  {ratio:.2f}x the floor, "
                f"{statistics.median(ours) / statistics.median(reading):.2f}x a sum of as much, "
                f"{statistics.median(plain) / statistics.median(ours):.2f}x faster than two "
                f"products, error {float(error):.0e}",
                flush=True,
            )
    return found


def step(data: Path | None) -> dict[str, Any]:
    """A training step of all seeds, recorded and launched from Python."""
    print("\nTraining step, five seeds, batch 32")
    found: dict[str, Any] = {}
    for method, count in (("sgd", 0), ("ewc", 0), ("pca-ogd", 700)):
        config = resolve("rotated-mnist", method, protocol="released", seeds=str(SEEDS))
        tasks = build_scenario("rotated-mnist", config, data)
        model = ModelFactory(config, tasks.input_shape, tasks.n_outputs)
        device = torch.device("cuda")
        made = config.build_method()
        train = tasks.task(0, range(SEEDS)).train.to(device, torch.float32)
        steps = -(-len(train) // config.batch_size)
        for records in (True, False):
            learner = make_learner(tasks, made, model, range(SEEDS), config, None, device)
            learner.recorder.active = records
            if count:
                rows = aligned(learner.network.theta.unsqueeze(1), count)
                learner.state = replace(DenseSubspace.empty(learner.network.theta), rows=rows)
            durations = []
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in learner.train(train, 0, 6 if records else 2):
                torch.cuda.synchronize()
                durations.append((time.perf_counter() - started) / steps)
                started = time.perf_counter()
            name = f"{method}{f', {count} rows' if count else ''}"
            how = "recorded" if records else "from Python"
            found[f"{name}, {how}"] = durations[1:]
            print(f"{name:20}{how:12} {described(durations[1:])}", flush=True)
    return found


def runs(data: Path | None, cells: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Whole runs, one after the other in this process."""
    print("\nRuns, five seeds, protocol released")
    found = []
    for scenario, name in cells:
        method = method_of(name)
        started = time.perf_counter()
        storage = "bfloat16" if "bfloat16" in name else "dense"
        config = resolve(scenario, method, protocol="released", seeds=str(SEEDS), storage=storage)
        tasks = build_scenario(scenario, config, data)
        made = config.build_method()
        model = ModelFactory(config, tasks.input_shape, tasks.n_outputs)
        trace = fit(tasks, made, model, seeds=SEEDS, training=config, keep="nothing")
        seconds = time.perf_counter() - started
        accuracy, forgotten = average_accuracy(trace.accuracy), forgetting(trace.accuracy)
        found.append(
            {"scenario": scenario, "method": name, "seconds": seconds, "parts": trace.timings,
             "average_accuracy": accuracy.tolist(), "forgetting": forgotten.tolist(),
             "versions": versions(torch.device("cuda"))}
        )  # fmt: skip
        parts = ", ".join(f"{k} {v:.1f}" for k, v in trace.timings.items() if k != "total")
        print(
            f"{scenario:15}{name:24}{seconds:6.1f} s ({parts})  "
            f"A_T {accuracy.mean():.2f} ± {accuracy.std():.2f}  F_T {forgotten.mean():.2f}",
            flush=True,
        )
    if set(CELLS) <= set(cells):
        whole = sum(run["seconds"] for run in found if cell_of(run) in CELLS)
        print(f"all cells of the table: {whole:.1f} s")
    return found


def method_of(name: str) -> str:
    """The method of a run, without its storage."""
    return name.split(",")[0]


def chosen(wanted: str) -> list[tuple[str, str]]:
    """The runs with a named scenario or method (comma-separated), or all."""
    names = set(wanted.split(","))
    return [(s, m) for s, m in RUNS if not wanted or names & {s, method_of(m)}]


def cell_of(run: dict[str, Any]) -> tuple[str, str]:
    """The scenario and method of a run."""
    return run["scenario"], run["method"]


def merged(report: dict[str, Any], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs of a report, updated by new ones, in the table's order."""
    old = report.get("runs", [])
    if old:  # each run has the versions with which it was measured
        old = [{"versions": report["versions"]["runs"]} | run for run in old]
    found = {cell_of(run): run for run in [*old, *new]}
    rank = {cell: i for i, cell in enumerate(RUNS)}
    return sorted(found.values(), key=lambda run: rank.get(cell_of(run), len(rank)))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--data", type=Path)
    parser.add_argument("--parts", default="projection,step,runs")
    parser.add_argument("--cells", default="", help="only runs whose scenario or method is named")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, nargs="?", const=OUT, help=f"write {OUT}, or this")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA GPU")
    known = options.out and options.out.is_file()
    report: dict[str, Any] = json.loads(options.out.read_text("utf-8")) if known else {}
    parts: dict[str, Callable[[], Any]] = {
        "projection": lambda: projection(options.repeats),
        "step": lambda: step(options.data),
        "runs": lambda: merged(report, runs(options.data, chosen(options.cells))),
    }
    for part in options.parts.split(","):
        report[part] = parts[part]()
        report.setdefault("versions", {})[part] = versions(torch.device("cuda"))
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(report, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
