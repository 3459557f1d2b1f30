"""Does what a method leaves unprotected order what is forgotten? On small runs, on a CPU.

    python scripts/unprotected.py run [--only NAMES] [--seeds 2] [--data DIR] [--out FILE]
    python scripts/unprotected.py report [--out FILE]

Every method learns a few tasks. For every earlier task s and later task k, at the weights with
which task k starts and with the method's projection T then, `run` computes from samples of s and k:

- overlap: the mean singular value of O = V_s T V_kᵀ;
- unprotected: ‖φ_s T‖² / n, what steps of task k may still change, in the Frobenius norm;
- bound: (‖φ_s T‖ ‖ω_k − ω_{k−1}‖)² / n, which needs the weights after task k;
- first order: ‖φ_s (ω_k − ω_{k−1})‖² / n, the forgetting of the linearised network;

and what task k does to s: the mean squared change of the true-class outputs, and the points of
accuracy lost. `report` prints Spearman's rank correlations of each with both:

- methods: over all methods, at one pair of tasks; the mean over pairs and seeds;
- energies: the same over KronOGD's energies alone;
- all: over all methods, pairs and seeds;
- pairs: over the pairs of tasks of one method and seed; the mean over both.

The rule, set before the first run: a quantity orders what is lost if the correlation is above 0.8.
(The last of the four was added after it.)
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from forgetless import fit, theory
from forgetless.data import Scenario, build_scenario
from forgetless.launch.rebuild import projections, rebuild
from forgetless.launch.runs import resolve
from forgetless.support.provenance import versions
from forgetless.tangent import tangent_features
from forgetless.trace import Trace
from forgetless.training.models import ModelFactory

OUT = Path("results/theory/unprotected.json")
SAMPLES = 100  # of each task, for features and changes
ENERGIES = (0.8, 0.9, 0.95, 0.98, 0.99)
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("sgd", {}),
    "OGD": ("ogd", {"memory": 100}),
    "PCA-OGD": ("pca-ogd", {"memory": 100}),
    **{
        f"KronOGD {energy}": ("kron-ogd", {"energy": energy, "shrinkage": 0.0})
        for energy in ENERGIES
    },
}
SCENARIOS: dict[str, dict[str, Any]] = {
    "rotated-digits": {"tasks": 5},
    "permuted-digits": {"tasks": 5},
    "split-digits": {},
    "rotated-mnist": {"tasks": 4, "train_per_class": 50, "lr": 0.01},
}
QUANTITIES = ("overlap", "unprotected", "bound", "first order")
LOSSES = {"moved": "outputs", "lost": "accuracy"}


def samples(tasks: Scenario, task: int, seed: int) -> tuple[Tensor, Tensor]:
    """Training samples spread over a task, inputs (n, *) and labels (n,)."""
    split = tasks.task(task, (seed,)).train
    index = torch.linspace(0, len(split) - 1, min(SAMPLES, len(split))).round().long()
    inputs, labels = split.take(index.unsqueeze(0))
    return inputs[0], labels[0]


def vector(weights: dict[str, Tensor], names: Sequence[str]) -> Tensor:
    """Some parameters as one vector (p,)."""
    return torch.cat([weights[name].flatten() for name in names]).double()


def pairs(trace: Trace, tasks: Scenario, model: Any, method: Any, seed: int) -> list[dict]:
    """All quantities for all tasks s < k."""
    rebuilt = rebuild(trace, tasks=tasks, model=model)
    count, row = tasks.n_tasks, trace.seeds.index(seed)
    network: nn.Module = rebuilt.network(trace.weights(seed, 0)).eval()
    free = rebuilt.out_of_reach(network)
    names = [n for n, p in network.named_parameters() if p.requires_grad and n not in free]
    avoided: list[Callable[[Tensor], Tensor] | None] = [None] * count
    if method.keeps_directions:
        avoided = list(projections(rebuilt, method, trace, seed, count, names))
    data = [samples(tasks, task, seed) for task in range(count)]
    found = []
    for k in range(1, count):
        before, after = trace.weights(seed, k - 1), trace.weights(seed, k)
        network.load_state_dict(before)
        features = [tangent_features(network, x, y, params=names) for x, y in data[: k + 1]]
        step = vector(after, names) - vector(before, names)
        moved = [
            float(theory.model_drift(network, before, after, x, y).square().mean())
            for x, y in data[:k]
        ]
        for s in range(k):
            n, phi = len(data[s][1]), features[s]
            o = theory.operator_overlap(phi, features[k], avoided[k], rtol=theory.FLOAT32_RTOL)
            rows = phi.dense().double()
            left = rows if avoided[k] is None else theory.projected(rows, avoided[k])
            gram = left @ left.T
            longest = float(torch.linalg.eigvalsh(gram)[-1])  # ‖φ_s T‖², spectral
            found.append(
                {
                    "source": s,
                    "target": k,
                    "overlap": float(theory.overlap_spectrum(o).mean()),
                    "unprotected": float(gram.trace()) / n,
                    "share": float(gram.trace() / rows.square().sum()),
                    "bound": longest * float(step.square().sum()) / n,
                    "first order": float((rows @ step).square().mean()),
                    "moved": moved[s],
                    "lost": float(trace.accuracy[row, k - 1, s] - trace.accuracy[row, k, s]),
                }
            )
    return found


def run(arguments: argparse.Namespace) -> None:
    """All methods on the chosen scenarios; each is written when it is done."""
    torch.set_num_threads(1)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"scenarios": {}}
    if arguments.out.exists():
        record = json.loads(arguments.out.read_text("utf-8"))
    chosen = arguments.only.split(",") if arguments.only else list(SCENARIOS)
    for scenario in chosen:
        runs = []
        for label, (name, settings) in METHODS.items():
            started = time.perf_counter()
            config = resolve(scenario, name, **SCENARIOS[scenario], **settings)
            tasks = build_scenario(scenario, config, arguments.data)
            model = ModelFactory(config, tasks.input_shape, tasks.n_outputs)
            method = config.build_method()
            seeds = tuple(range(arguments.seeds))
            trace = fit(tasks, method, model, seeds=seeds, training=config, keep="all")
            runs += [
                {"method": label, "seed": seed, **pair}
                for seed in seeds
                for pair in pairs(trace, tasks, model, method, seed)
            ]
            final = float(np.mean(trace.accuracy[:, -1]))
            seconds = time.perf_counter() - started
            print(f"{scenario:16}{label:14} A_T {final:5.1f}  {seconds:5.1f} s", flush=True)
        settings = {"samples": SAMPLES, "seeds": arguments.seeds, **SCENARIOS[scenario]}
        ran_on = versions(torch.device("cpu"))
        record["scenarios"][scenario] = {"settings": settings, "versions": ran_on, "runs": runs}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


def correlations(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Over what → quantity → loss → Spearman's rank correlation."""
    at_pair: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for one in runs:
        at_pair.setdefault((one["seed"], one["source"], one["target"]), []).append(one)
    of_method: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for one in runs:
        of_method.setdefault((one["method"], one["seed"]), []).append(one)
    groups = {
        "methods": list(at_pair.values()),
        "energies": [[r for r in of if "KronOGD" in r["method"]] for of in at_pair.values()],
        "all": [list(runs)],
        "pairs": list(of_method.values()),
    }
    return {
        over: {
            quantity: {loss: _mean_correlation(of, quantity, loss) for loss in LOSSES}
            for quantity in QUANTITIES
        }
        for over, of in groups.items()
    }


def _mean_correlation(groups: Sequence[Sequence[dict[str, Any]]], a: str, b: str) -> float:
    """The mean over groups; a group in which one of the two never differs says nothing."""
    found = []
    for group in groups:
        columns = [[one[key] for one in group] for key in (a, b)]
        if all(len(set(column)) > 1 for column in columns):
            found.append(spearmanr(*columns).statistic)
    return float(np.mean(found)) if found else float("nan")


def table(record: dict[str, Any]) -> str:
    """The correlations in Markdown."""
    scenarios = record["scenarios"]
    lines = [
        "| ordered | by | " + " | ".join(scenarios) + " |",
        "|---|---|" + "---|" * len(scenarios),
    ]
    found = {name: correlations(of["runs"]) for name, of in scenarios.items()}
    for over in ("methods", "energies", "all", "pairs"):
        for quantity in QUANTITIES:
            cells = [
                ", ".join(f"{found[name][over][quantity][loss]:.2f}" for loss in LOSSES)
                for name in scenarios
            ]
            lines.append(f"| {over} | {quantity} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("run", "report"):
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, default=OUT, help="the results, JSON")
        if name == "run":
            command.add_argument("--only", help="some of the scenarios, comma-separated")
            command.add_argument("--seeds", type=int, default=2)
            command.add_argument("--data", type=Path, help="folder with MNIST")
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments)
    print(table(json.loads(arguments.out.read_text("utf-8"))))


if __name__ == "__main__":
    main()
