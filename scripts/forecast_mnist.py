"""Check linearised forecasts of forgetting against real training, on pairs of MNIST tasks.

    python scripts/forecast_mnist.py run [--present] [--jobs 8] [--data DIR] [--out DIR]
    python scripts/forecast_mnist.py report [--out DIR]

For every ordered pair of tasks of Rotated, Permuted and Split MNIST: a network learns the source
by SGD with the paper's settings; the effect of the target is forecast, in full and in quick mode;
then the network learns the target. `run` writes `pairs.json`, or `pairs-present.json` for the
network linearised at its present weights, without warm-up; `--only` adds single jobs to an existing
file. `report` makes the table, the statistics and the plot.
"""

import argparse
import json
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.stats import spearmanr
from torch import Tensor, nn

from forgetless import SGD, Scenario, Task, fit, scenario
from forgetless.launch.runs import resolve
from forgetless.support.provenance import versions
from forgetless.theory import TRUSTED, linearised_forecast, true_class
from forgetless.training.models import ModelFactory

# All tasks; but eight of the permutations, which are all alike.
BENCHMARKS = {"rotated-mnist": 15, "permuted-mnist": 8, "split-mnist": 5}
SEED = 0
# Jobs per source, so that no core is idle at the end.
PARTS = 2
# A forecast is good if the change of accuracy is right within this many points.
GOOD = 5.0


class OneTask(Scenario):
    """A single task of a sequence, with all the outputs of the sequence."""

    def __init__(self, tasks: Scenario, index: int) -> None:
        self.tasks, self.index = tasks, index
        self.name, self.n_tasks = f"{tasks.name} {index + 1}", 1
        self.setting = tasks.setting
        self.input_shape, self.n_outputs = tasks.input_shape, tasks.n_outputs

    def task(self, index: int, seeds: Sequence[int]) -> Task:
        """The one task, as one seed sees it: which pixel orders there are must not change."""
        return self.tasks.task(self.index, [SEED] * len(seeds))

    def classes(self, index: int) -> range:
        """Its outputs."""
        return self.tasks.classes(self.index)


def samples(task: Task, part: str) -> tuple[Tensor, Tensor]:
    """All inputs and labels of the training or test set, as the seed sees them."""
    split = getattr(task, part)
    inputs, labels = split.take(torch.arange(len(split)).unsqueeze(0))
    return inputs[0], labels[0]


def correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's correlation over samples."""
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


def source_pairs(
    benchmark: str, source: int, part: int, data: str | None, warm_up: bool
) -> list[dict[str, Any]]:
    """Some of the pairs with one source task: forecast, then measured."""
    torch.set_num_threads(1)
    config = resolve(benchmark, "sgd")
    tasks = scenario(benchmark, data=data)
    make = ModelFactory(config, tasks.input_shape, tasks.n_outputs)
    model: nn.Module = make()

    def learn(index: int, start: Any) -> dict[str, Tensor]:
        # The seed decides the initial weights and the batches; a pair is learned in its own order.
        trace = fit(
            OneTask(tasks, index), SGD(), start, seeds=[100 * source + index], training=config
        )
        return trace.weights(100 * source + index, 0)

    learned = learn(source, make)
    model.load_state_dict(learned)
    model.eval()
    inputs, labels = samples(tasks.task(source, [SEED]), "test")
    classes = tasks.classes(source)

    def accuracy(outputs: Tensor) -> float:
        within = outputs[:, classes.start : classes.stop]
        return 100 * float((within.argmax(1) + classes.start == labels).double().mean())

    results = []
    for target in range(part, BENCHMARKS[benchmark], PARTS):
        if target == source:
            continue
        options = {
            "lr": config.lr,
            "epochs": config.epochs,
            "batch_size": config.batch_size,
            "source_classes": classes,
            "target_classes": tasks.classes(target),
            "seed": 1000 + target,
            "warm_up": warm_up,
        }
        onto = samples(tasks.task(target, [SEED]), "train")
        full = linearised_forecast(model, (inputs, labels), onto, **options)
        quick = linearised_forecast(model, (inputs, labels), onto, quick=True, **options)
        after = make()
        after.load_state_dict(learn(target, model))
        with torch.no_grad():
            before, outputs = model(inputs), after.eval()(inputs)
        moved = true_class(outputs - before, labels)
        results.append(
            {
                "benchmark": benchmark,
                "source": source + 1,
                "target": target + 1,
                "accuracy": accuracy(before),
                "measured": accuracy(outputs) - accuracy(before),
                "predicted": full.accuracy_change,
                "quick": quick.accuracy_change,
                "correlation": correlation(true_class(full.change, labels), moved),
                "delta_measured": float(moved.square().mean()),
                "delta_predicted": float(true_class(full.change, labels).square().mean()),
                "trust": full.trust,
                "quick_trust": quick.trust,
                "overlap": float(full.overlap[0]),
                "mean_overlap": float(full.overlap.mean()),
                "seconds": full.seconds,
                "quick_seconds": quick.seconds,
            }
        )
    return results


def run(arguments: argparse.Namespace) -> None:
    """All pairs in parallel; finished ones are written at once."""
    started = time.perf_counter()
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / ("pairs-present.json" if arguments.present else "pairs.json")
    jobs = [
        (benchmark, source, part)
        for benchmark, tasks in BENCHMARKS.items()
        for source in range(tasks)
        for part in range(PARTS)
    ]
    record: dict[str, Any] = {"versions": versions(torch.device("cpu")), "pairs": []}
    if arguments.only:
        wanted = arguments.only.split(",")
        jobs = [job for job in jobs if "/".join(map(str, job)) in wanted]
        completed_by = record["versions"]
        record = json.loads(file.read_text("utf-8")) | {"completed_by": completed_by}
    pairs: list[dict[str, Any]] = record["pairs"]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        options = arguments.data or None, not arguments.present
        work = [pool.submit(source_pairs, *job, *options) for job in jobs]
        for done, future in enumerate(as_completed(work), 1):
            pairs += future.result()
            order = list(BENCHMARKS)
            pairs.sort(key=lambda p: (order.index(p["benchmark"]), p["source"], p["target"]))
            file.write_text(json.dumps(record, indent=1), "utf-8")
            print(f"{time.perf_counter() - started:5.0f} s  {done} of {len(jobs)} jobs", flush=True)


def interval(statistic: Any, *columns: np.ndarray) -> tuple[float, float, float]:
    """A statistic of paired columns with its 95% bootstrap interval over pairs."""
    random = np.random.default_rng(0)
    n = len(columns[0])
    draws = []
    for _ in range(2000):
        index = random.integers(0, n, n)
        draws.append(statistic(*(c[index] for c in columns)))
    low, high = np.nanpercentile(draws, [2.5, 97.5])
    return float(statistic(*columns)), float(low), float(high)


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's."""
    return float(spearmanr(a, b).statistic)


def separation(trust: np.ndarray, good: np.ndarray) -> float:
    """The probability that a good forecast has more trust than another one (AUC)."""
    well, badly = trust[good], trust[~good]
    if not len(well) or not len(badly):
        return float("nan")
    wins = (well[:, None] > badly[None]).mean() + 0.5 * (well[:, None] == badly[None]).mean()
    return float(wins)


def column(key: str, of: Sequence[dict[str, Any]]) -> np.ndarray:
    """One number per pair."""
    return np.array([p[key] for p in of], float)


def table(pairs: Sequence[dict[str, Any]]) -> tuple[list[str], dict[str, Any]]:
    """Rows of Markdown and statistics, for each benchmark and for all pairs."""
    lines = [
        "| pairs of | number | rank correlation of accuracy changes | mean error, points "
        "| correlation of output changes per sample, mean | quick and full differ by, mean (most) "
        "| trust, median |",
        "|---|---|---|---|---|---|---|",
    ]
    statistics: dict[str, Any] = {}
    for name in (*BENCHMARKS, "all"):
        of = [p for p in pairs if name in ("all", p["benchmark"])]
        measured, predicted = column("measured", of), column("predicted", of)
        rank = interval(rank_correlation, predicted, measured)
        error = interval(lambda a, b: float(np.abs(a - b).mean()), predicted, measured)
        outputs = interval(lambda c: float(c.mean()), column("correlation", of))
        quick = np.abs(column("quick", of) - predicted)
        statistics[name] = {
            "pairs": len(of),
            "rank_correlation": rank,
            "mean_error": error,
            "output_correlation": outputs,
            "quick_difference": [float(quick.mean()), float(quick.max())],
            "trust_median": float(np.median(column("trust", of))),
        }
        lines.append(
            f"| {name} | {len(of)} | {shown(rank)} | {shown(error)} | {shown(outputs)} "
            f"| {quick.mean():.2f} ({quick.max():.2f}) | {np.median(column('trust', of)):.2f} |"
        )
    return lines, statistics


def trust_words(pairs: Sequence[dict[str, Any]], statistics: dict[str, Any]) -> str:
    """How the trust measure relates to the error of a forecast."""
    error = np.abs(column("predicted", pairs) - column("measured", pairs))
    correlation, trust = column("correlation", pairs), column("trust", pairs)
    by_accuracy = interval(separation, trust, error <= GOOD)
    by_outputs = interval(separation, trust, correlation >= 0.9)
    statistics["separation"] = {"accuracy": by_accuracy, "outputs": by_outputs}
    high = trust >= TRUSTED
    return (
        f"With trust of {TRUSTED} or more ({high.sum()} pairs) the accuracy change is wrong by "
        f"{error[high].mean():.1f} points on average and output changes correlate by "
        f"{correlation[high].mean():.2f}; below ({(~high).sum()} pairs), by "
        f"{error[~high].mean():.1f} points and {correlation[~high].mean():.2f}. A pair whose "
        f"accuracy change is right within {GOOD:g} points has more trust than another one with "
        f"probability {shown(by_accuracy)}; one whose output changes correlate by 0.9 or more, "
        f"with {shown(by_outputs)}."
    )


def report(arguments: argparse.Namespace) -> None:
    """Table, statistics and plot from the pairs."""
    records = [
        json.loads((arguments.out / name).read_text("utf-8"))
        for name in ("pairs.json", "pairs-present.json")
    ]
    pairs, present = (record["pairs"] for record in records)
    rows, statistics = table(pairs)
    present_rows, statistics_present = table(present)
    deltas = rank_correlation(column("delta_predicted", pairs), column("delta_measured", pairs))
    delta_and_loss = rank_correlation(column("delta_measured", pairs), -column("measured", pairs))
    makers = [r[part] for r in records for part in ("versions", "completed_by") if part in r]
    codes = ", ".join(sorted({maker["code"] for maker in makers}))
    torches = ", ".join(sorted({maker["torch"] for maker in makers}))
    lines = [
        "# Linearised forecast against measurement",
        "",
        "[The dry run](dry-run.md), which `forgetless forecast` makes by default, has tables of",
        "its own.",
        "",
        "Made by `scripts/forecast_mnist.py`: every ordered pair of tasks of a benchmark (of",
        "Permuted MNIST, whose tasks are all alike, of the first eight), the",
        "network trained on the source by SGD with the paper's settings, the change of accuracy on",
        "the source's test set after training on the target, predicted and measured. In brackets",
        "95% bootstrap intervals over pairs; the outputs are those of the true class.",
        "",
        "## With warm-up (the default)",
        "",
        "A copy is trained for a tenth of the steps and linearised there.",
        "",
        *rows,
        "",
        trust_words(pairs, statistics),
        "",
        "![Predicted against measured change of accuracy](forecast.png)",
        "",
        "## Linearised at the present weights",
        "",
        *present_rows,
        "",
        trust_words(present, statistics_present),
        "",
        "## Δ is no measure of lost accuracy",
        "",
        "Rank correlation of predicted and measured Δ (mean squared change of the true-class "
        f"outputs): {deltas:.2f}; of measured Δ and the accuracy that is lost: "
        f"{delta_and_loss:.2f}.",
        "",
        f"A forecast took {np.median(column('seconds', pairs)):.1f} s, a quick one "
        f"{np.median(column('quick_seconds', pairs)):.1f} s (medians, on one core of a busy "
        f"machine). torch {torches}; code {codes}.",
    ]
    both = {"warm-up": statistics, "present": statistics_present}
    (arguments.out / "README.md").write_text("\n".join(lines) + "\n", "utf-8")
    (arguments.out / "statistics.json").write_text(json.dumps(both, indent=1), "utf-8")
    plot(pairs, list(BENCHMARKS)).savefig(arguments.out / "forecast.png", dpi=120)
    print("\n".join(lines))


def shown(value: tuple[float, float, float]) -> str:
    """A statistic with its interval."""
    return f"{value[0]:.2f} [{value[1]:.2f}, {value[2]:.2f}]"


def plot(pairs: Sequence[dict[str, Any]], names: Sequence[str]) -> Figure:
    """Predicted against measured, a panel a benchmark, coloured by trust."""
    figure = Figure(figsize=(4 * len(names) + 0.8, 4), layout="constrained")
    panels = figure.subplots(1, len(names), squeeze=False)[0]
    points = None
    for panel, name in zip(panels, names, strict=True):
        of = [p for p in pairs if p["benchmark"] == name]
        measured, predicted = [p["measured"] for p in of], [p["predicted"] for p in of]
        low, high = min(*measured, *predicted) - 1, max(*measured, *predicted) + 1
        panel.plot([low, high], [low, high], color="0.7", linewidth=1, zorder=0)
        points = panel.scatter(
            measured, predicted, c=[p["trust"] for p in of], cmap="viridis", vmin=0, vmax=1, s=16
        )
        panel.set(title=name, xlabel="measured change of accuracy, points", aspect="equal")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("predicted change of accuracy, points")
    if points is not None:
        figure.colorbar(points, ax=panels.tolist(), label="trust", shrink=0.8)
    return figure


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("run", "report"))
    parser.add_argument("--out", type=Path, default=Path("results/forecast"))
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--data", default="")
    parser.add_argument("--present", action="store_true", help="without warm-up")
    parser.add_argument("--only", default="", help="such as permuted-mnist/13/0: source, part")
    arguments = parser.parse_args()
    run(arguments) if arguments.action == "run" else report(arguments)


if __name__ == "__main__":
    main()
