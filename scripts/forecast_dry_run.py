"""Check forecasts by a dry run against real training and against other cheap forecasts.

    python scripts/forecast_dry_run.py run SET [--data DIR] [--out DIR] [--only NAME]
    python scripts/forecast_dry_run.py report [--out DIR]

SET is `choose`, the pairs of tasks on which the share of the steps, the rate and the trial were
chosen, or `test`, other pairs, networks, optimizers and methods. A network learns the source by
SGD; then the effect of the target on the source's test accuracy is forecast and measured. Costs are
processor time as a share of that of the real training, in the same process. Each case is written as
it ends, and `run` goes on where it stopped. `report` makes dry-run.md.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import rankdata

from forgetless import EWC, OGD, PCAOGD, SGD, KronOGD, Scenario, Task, Trace, fit, scenario
from forgetless.data import Split
from forgetless.launch.rebuild import Rebuilt, forecast_run, samples_of
from forgetless.launch.runs import resolve
from forgetless.methods import Method
from forgetless.support.provenance import versions
from forgetless.support.streams import stream
from forgetless.support.validation import TrainingError, select_options
from forgetless.theory import linearised_forecast
from forgetless.training.build import ModelFactory, ModelOptions, make_learner
from forgetless.training.forecasting import dry_run
from forgetless.training.learner import Learner
from forgetless.training.settings import Training

CPU = torch.device("cpu")
MNIST = ("rotated-mnist", "permuted-mnist", "split-mnist")
DIGITS = ("rotated-digits", "permuted-digits", "split-digits")
TUNED = {"lr": 0.05, "epochs": 3}
ADAM = {"lr": 1e-3, "optimizer": "adam", "epochs": 3}
# CIFAR's real schedule has 50 epochs, hours on a CPU.
CIFAR = {"epochs": 10}
# name → benchmark, seeds, sources of each, targets of each source, training, model, method
Case = tuple[str, tuple[int, ...], int, int, dict[str, Any], dict[str, Any], Method[Any]]
CASES: dict[str, dict[str, Case]] = {
    "choose": {
        **{name: (name, (1,), 4, 4, {}, {}, SGD()) for name in DIGITS},
        **{name: (name, (11,), 2, 3, {}, {}, SGD()) for name in MNIST},
        "rotated-mnist, larger rate": ("rotated-mnist", (11,), 1, 4, TUNED, {}, SGD()),
    },
    "test": {
        **{name: (name, (5, 6), 2, 3, {}, {}, SGD()) for name in MNIST},
        **{name: (name, (7, 8), 2, 4, {}, {}, SGD()) for name in DIGITS},
        "rotated-mnist, 300 hidden": ("rotated-mnist", (3,), 2, 3, {}, {"hidden": 300}, SGD()),
        "permuted-mnist, larger rate": ("permuted-mnist", (3,), 2, 3, TUNED, {}, SGD()),
        "rotated-mnist, Adam": ("rotated-mnist", (3,), 2, 3, ADAM, {}, SGD()),
        "rotated-mnist, KronOGD": ("rotated-mnist", (4,), 2, 3, {}, {}, KronOGD()),
        "rotated-mnist, PCA-OGD": ("rotated-mnist", (4,), 2, 3, {}, {}, PCAOGD(50, 500)),
        "permuted-mnist, OGD": ("permuted-mnist", (4,), 2, 3, {}, {}, OGD(50)),
        "permuted-mnist, EWC": ("permuted-mnist", (4,), 2, 3, {}, {}, EWC(10.0)),
        "split-cifar100": ("split-cifar100", (1,), 2, 4, CIFAR, {}, SGD()),
    },
}
# Candidates at fixed rates, measured on `choose` alone: share of the steps, times the rate.
FIXED = ((0.05, 20), (0.1, 20), (0.1, 10), (0.1, 5), (0.1, 2.5))
LINEARISED = 6  # every so many pairs, since it is slow
BOOTSTRAPS = 1000


class Chosen(Scenario):
    """Two tasks of a sequence, with all of its outputs, made once."""

    def __init__(self, tasks: Scenario, pair: Sequence[int], seed: int) -> None:
        self.tasks, self.pair = tasks, tuple(pair)
        self.name, self.n_tasks, self.setting = tasks.name, len(self.pair), tasks.setting
        self.input_shape, self.n_outputs = tasks.input_shape, tasks.n_outputs
        self.made = [tasks.task(t, [seed]) for t in self.pair]

    def task(self, index: int, seeds: Sequence[int]) -> Task:
        """The source or the target, as one seed sees it."""
        return self.made[index]

    def classes(self, index: int) -> range:
        """Its outputs."""
        return self.tasks.classes(self.pair[index])


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What it returns and the processor time it takes."""
    started = time.process_time()
    found = work()
    return found, time.process_time() - started


def trained(learner: Learner, split: Split, epochs: int) -> Learner:
    """The learner after training on the target."""
    for _ in learner.train(split, 1, epochs):
        pass
    return learner


def some(split: Split, share: float, seed: int) -> Split:
    """A random share of the samples."""
    order = torch.randperm(len(split), generator=stream(seed, "baseline"))
    return split.subset(order[: max(1, round(share * len(split)))])


def pairs_of(case: Case, name: str, which: str, data: str | None) -> list[dict[str, Any]]:
    """All pairs of one case, forecast and measured."""
    benchmark, seeds, n_sources, n_targets, settings, network, method = case
    config = resolve(benchmark, "sgd")
    training = replace(select_options(Training, config.as_dict()), **settings)
    tasks = scenario(benchmark, data=None if "digits" in benchmark else data)
    options = replace(select_options(ModelOptions, config.as_dict()), **network)
    model = ModelFactory(options, tasks.input_shape, tasks.n_outputs)
    found = []
    for seed in seeds:
        random = np.random.default_rng(seed)
        for source in random.permutation(tasks.n_tasks)[:n_sources].tolist():
            first = Chosen(tasks, [source], seed)
            learned = fit(first, SGD(), model, seeds=[seed + 100 * source], training=training)
            weights = learned.weights(seed + 100 * source, 0)
            others = [t for t in range(tasks.n_tasks) if t != source]
            for target in random.permutation(others)[:n_targets].tolist():
                both = Chosen(tasks, [source, target], seed)
                row = pair_of(both, model, training, method, weights, seed, which, len(found))
                found.append({"case": name, "source": source, "target": target, **row})
                print(name, found[-1]["measured"], found[-1]["forecasts"]["dry run"], flush=True)
    return found


def pair_of(
    tasks: Chosen,
    model: ModelFactory,
    training: Training,
    method: Method[Any],
    weights: dict[str, Any],
    seed: int,
    which: str,
    number: int,
) -> dict[str, Any]:
    """One pair: forecasts, their costs, and the measurement."""
    known, coming = (tasks.task(t, [seed]) for t in (0, 1))
    trace = Trace(tasks.name, method.name, (seed,), ("1", "2"), np.full((1, 2, 2), np.nan), {})
    trace.keep_weights(seed, 0, weights)
    rebuilt = Rebuilt(tasks, model, training, ())
    knowing = make_learner(tasks, method, model, (seed,), training, None, CPU)
    knowing.network.load_state_dict(0, weights)
    if method.protects:
        knowing.consolidate(known.train, 0)
    classes = tasks.competing(0, 1)
    now = float(knowing.accuracy(known.test, classes)[0])

    def make(settings: Training, batches: int = seed) -> Learner:
        learner = make_learner(tasks, method, model, (batches,), settings, None, CPU)
        learner.network.load_state_dict(0, weights)
        learner.state = knowing.state if method.protects else learner.state
        return learner

    def change(learner: Learner) -> float:
        return float(learner.accuracy(known.test, classes)[0]) - now

    steps = training.epochs * math.ceil(len(coming.train) / training.batch_size)
    epochs = training.epochs
    # The real training draws its batches from another stream than the forecasts.
    real, seconds = timed(lambda: trained(make(training, seed + 50), coming.train, epochs))
    measured = change(real)
    forecasts: dict[str, float | None] = {"no change": 0.0}
    costs: dict[str, float] = {}

    def note(label: str, work: Callable[[], float]) -> None:
        try:
            forecasts[label], spent = timed(work)
            costs[label] = spent / seconds
        except TrainingError:
            forecasts[label] = None  # it diverged

    result, spent = timed(lambda: forecast_run(rebuilt, method, trace, seed, 0, 1))
    forecasts["dry run"] = result.accuracy_change
    if method.protects:  # which stores what it needs of the source in both
        _, storing = timed(lambda: knowing.consolidate(known.train, 0))
        spent = max(0.0, spent - storing)
    costs["dry run"] = spent / seconds
    tenth = max(1, round(0.1 * epochs))
    share = 0.1 * epochs / tenth
    note(
        "a tenth of the steps",
        lambda: change(trained(make(training), some(coming.train, share, seed), tenth)),
    )
    note(
        "a tenth of the samples",
        lambda: change(trained(make(training), some(coming.train, 0.1, seed), epochs)),
    )
    if which == "choose":
        for part, rate in FIXED:
            k = math.ceil(part * epochs)
            faster = replace(training, lr=rate * training.lr)
            few = some(coming.train, part * epochs / k, seed)

            def candidate(faster: Training = faster, few: Split = few, k: int = k) -> float:
                return change(trained(make(faster), few, k))

            note(f"{part:g} of the steps at {rate:g} times", candidate)
    if not method.protects and number % LINEARISED == 0 and "cifar" not in tasks.name:
        network = rebuilt.network(weights).eval()

        def linearised() -> Any:
            return linearised_forecast(
                network,
                samples_of(known.test),
                samples_of(coming.train),
                lr=training.lr,
                epochs=epochs,
                batch_size=training.batch_size,
                source_classes=classes,
                target_classes=tasks.competing(1),
                quick=True,
                seed=seed,
            )

        if training.is_constant_sgd:
            found, spent = timed(linearised)
            forecasts["linearised, quick"] = found.accuracy_change
            costs["linearised, quick"] = spent / seconds
            forecasts["mean overlap"] = -float(found.overlap.mean())
    if number % 6 == 0:
        run, spent = timed(
            lambda: dry_run(lambda s: make(s, seed + 70), coming.train, 1, training, 1.0)
        )
        whole = make(training)
        whole.network.load_state_dict(0, run.weights)
        forecasts["a full copy"], costs["a full copy"] = change(whole), spent / seconds
    return {
        "seed": seed,
        "steps": steps,
        "before": now,
        "measured": measured,
        "rate": result.run.rate,
        "covered": result.covered,
        "seconds": seconds,
        "forecasts": forecasts,
        "costs": costs,
    }


def run(arguments: argparse.Namespace) -> None:
    """The cases that are not measured yet, one after another."""
    torch.set_num_threads(1)
    file = arguments.out / f"dry-run-{arguments.set}.json"
    record: dict[str, Any] = {"cases": {}, "pairs": []}
    if file.exists():
        record = json.loads(file.read_text("utf-8"))
    for name, case in CASES[arguments.set].items():
        if name in record["cases"] or (arguments.only and arguments.only != name):
            continue
        started = time.perf_counter()
        pairs = pairs_of(case, name, arguments.set, arguments.data or None)
        record["pairs"] += pairs
        record["cases"][name] = {
            "benchmark": case[0],
            "seeds": case[1],
            "training": case[4],
            "model": case[5],
            "method": repr(case[6]),
            "seconds": time.perf_counter() - started,
            "versions": versions(CPU),
        }
        arguments.out.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


def rank(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's correlation."""
    if len(set(a.tolist())) < 2 or len(set(b.tolist())) < 2:
        return float("nan")
    return float(np.corrcoef(rankdata(a), rankdata(b))[0, 1])


def repeated(pairs: Sequence[dict[str, Any]]) -> None:
    """Add forecasts from earlier measurements of the case: the last one, and their mean."""
    for name in {p["case"] for p in pairs}:
        own = [p for p in pairs if p["case"] == name]
        changes = np.array([p["measured"] for p in own])
        for i, pair in enumerate(own):
            pair["forecasts"]["the pair before"] = float(changes[i - 1])
            pair["forecasts"]["mean of the other pairs"] = float(np.delete(changes, i).mean())


def statistics(pairs: Sequence[dict[str, Any]], label: str) -> dict[str, Any] | None:
    """Rank correlation and error of one forecast with 95 % intervals, and its mean cost."""
    own = [p for p in pairs if p["forecasts"].get(label) is not None]
    if len(own) < 3:
        return None
    said = np.array([p["forecasts"][label] for p in own])
    real = np.array([p["measured"] for p in own])
    # Pairs with one source share its network: whole sources are drawn.
    groups: dict[tuple[Any, ...], list[int]] = {}
    for i, pair in enumerate(own):
        groups.setdefault((pair["case"], pair["seed"], pair["source"]), []).append(i)
    random, members = np.random.default_rng(0), list(groups.values())
    draws = []
    for _ in range(BOOTSTRAPS):
        index = np.concatenate([members[g] for g in random.integers(0, len(members), len(members))])
        draws.append((rank(said[index], real[index]), np.abs(said - real)[index].mean()))
    low, high = np.nanpercentile(np.array(draws), [2.5, 97.5], axis=0)
    costs = [p["costs"][label] * p["seconds"] for p in own if label in p["costs"]]
    total = sum(p["seconds"] for p in own if label in p["costs"])
    failed = sum(label in p["forecasts"] for p in pairs) - len(own)
    return {
        "pairs": len(own),
        "rank": [rank(said, real), float(low[0]), float(high[0])],
        "error": [float(np.abs(said - real).mean()), float(low[1]), float(high[1])],
        "cost": sum(costs) / total if costs else None,
        "diverged": failed,
    }


def report(arguments: argparse.Namespace) -> None:
    """Tables of both sets."""
    lines = [
        "# Forecasts by a dry run, against measurement",
        "",
        "Made by `scripts/forecast_dry_run.py` (which says what the cases are). Changes of the",
        "accuracy on the source, in points; ρ is Spearman's rank correlation with the measured",
        "change. In brackets 95 % bootstrap intervals over source networks. Cost: processor time",
        "as a share of the real training's, in one process on one core, evaluations counted. The",
        "linearised forecast, the overlap and the full copy (other batches: the best that can be",
        "had) were computed for some of the pairs only, as their numbers say.",
    ]
    for which, title in (
        ("test", "Pairs that were not used to choose it"),
        ("choose", "Pairs on which it was chosen"),
    ):
        file = arguments.out / f"dry-run-{which}.json"
        if not file.exists():
            continue
        record = json.loads(file.read_text("utf-8"))
        pairs = record["pairs"]
        repeated(pairs)
        lines += ["", f"## {title}", ""]
        main = [p for p in pairs if p["case"] in MNIST]
        tables = {"the three MNIST benchmarks, pooled": main, "all cases, pooled": pairs}
        tables |= {name: [p for p in pairs if p["case"] == name] for name in record["cases"]}
        for name, own in tables.items():
            lines += table(name, own) if own else []
        torches = {case["versions"]["torch"] for case in record["cases"].values()}
        codes = {case["versions"]["code"] for case in record["cases"].values()}
        lines += ["", f"torch {', '.join(sorted(torches))}; code {', '.join(sorted(codes))}."]
    (arguments.out / "dry-run.md").write_text("\n".join(lines) + "\n", "utf-8")
    print("\n".join(lines))


def table(name: str, pairs: Sequence[dict[str, Any]]) -> list[str]:
    """One case's forecasts."""
    real = np.array([p["measured"] for p in pairs])
    rates = sorted({round(p["rate"], 2) for p in pairs})
    lines = [
        "",
        f"**{name}**: {len(pairs)} pairs, changes from {real.min():.1f} to {real.max():.1f}; the "
        f"dry run's rate was {' or '.join(f'{rate:g}' for rate in rates)} times the real one.",
        "",
        "| forecast | pairs | ρ | mean error, points | cost |",
        "|---|--:|--:|--:|--:|",
    ]
    labels = list(dict.fromkeys(label for p in pairs for label in p["forecasts"]))
    labels.sort(key=lambda label: label != "dry run")
    for label in labels:
        found = statistics(pairs, label)
        if found is None:
            continue
        error = "–" if label == "mean overlap" else shown(found["error"])
        cost = "–" if found["cost"] is None else f"{found['cost']:.2f}"
        note = f" ({found['diverged']} diverged)" if found["diverged"] else ""
        # The mean of all but one pair falls where that one rises.
        unranked = math.isnan(found["rank"][0]) or label == "mean of the other pairs"
        ranked = "–" if unranked else shown(found["rank"])
        lines.append(f"| {label}{note} | {found['pairs']} | {ranked} | {error} | {cost} |")
    return lines


def shown(value: Sequence[float]) -> str:
    """A statistic with its interval."""
    return f"{value[0]:.2f} [{value[1]:.2f}, {value[2]:.2f}]"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("run", "report"))
    parser.add_argument("set", nargs="?", choices=("choose", "test"), default="test")
    parser.add_argument("--out", type=Path, default=Path("results/forecast"))
    parser.add_argument("--data", default="")
    parser.add_argument("--only", default="", help="one case")
    arguments = parser.parse_args()
    run(arguments) if arguments.action == "run" else report(arguments)


if __name__ == "__main__":
    main()
