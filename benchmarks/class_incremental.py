"""Replay, distillation and regularisation on Split MNIST, as printed by Buzzega et al. (2020).

The protocol of "Dark experience for general continual learning" and of its code, Mammoth: five
tasks of two digits, all 60,000 training images with pixels in [0, 1], one pass in batches of ten,
plain SGD, a perceptron 784-100-100-10 with Xavier's initial weights, one full head, a reservoir of
200 or 500 images. Settings are the authors' best ones. "class" is the final accuracy among all
digits, "task" that of the same network among the two of a task.

    python benchmarks/class_incremental.py [--data DATA] [--only "er,;der"] [--seeds 5] [--jobs N]
        [--tiny] [--out]
"""

import argparse
import json
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forgetless import (
    DER,
    DERPP,
    ER,
    ERACE,
    EWC,
    SGD,
    SI,
    Joint,
    LwF,
    Method,
    Scenario,
    TensorScenario,
    Training,
    fit,
)
from forgetless.data.datasets import shared_source
from forgetless.support.provenance import versions
from forgetless.training.models import MLP

RESULTS = Path(__file__).parent.parent / "results" / "bench" / "class_incremental.json"
TASKS, CLASSES = 5, 2
Interval = tuple[float, float]  # a mean and its standard deviation


@dataclass(frozen=True)
class Row:
    """A method at the authors' settings, and what they print: class- and task-incremental."""

    method: Method
    lr: float
    printed: tuple[Interval, Interval] | None = None
    weight_decay: float = 0.0


# Mammoth's penalties have no ½, and its distillation no T²: twice its λ, and α / T².
ROWS = {
    "sgd": Row(SGD(), 0.03, ((19.60, 0.04), (94.94, 2.18))),
    "online ewc": Row(EWC(strength=2 * 90.0), 0.03, ((20.46, 1.01), (98.39, 0.48))),
    "si": Row(SI(strength=1.0, damping=0.9), 0.1, ((19.27, 0.30), (96.00, 2.04))),
    "lwf": Row(LwF(strength=1 / 4, temperature=2.0), 0.03, ((19.62, 0.01), (94.11, 3.01)), 5e-4),
    "er, 200": Row(ER(200, 10), 0.01, ((80.43, 1.89), (97.86, 0.35))),
    "er, 500": Row(ER(500, 10), 0.1, ((86.12, 1.89), (99.04, 0.18))),
    "er-ace, 200": Row(ERACE(200, 10), 0.01),
    "er-ace, 500": Row(ERACE(500, 10), 0.03),
    "der, 200": Row(DER(200, 10, alpha=0.2), 0.03, ((84.55, 1.64), (98.80, 0.15))),
    "der, 500": Row(DER(500, 128, alpha=1.0), 0.03, ((90.54, 1.18), (98.84, 0.13))),
    "der++, 200": Row(DERPP(200, 128, alpha=0.2, beta=1.0), 0.03, ((85.61, 1.40), (98.76, 0.28))),
    "der++, 500": Row(DERPP(500, 10, alpha=1.0, beta=0.5), 0.03, ((91.00, 1.49), (98.94, 0.27))),
    "joint": Row(Joint(batch_size=40), 0.03, ((95.57, 0.24), (99.51, 0.07))),
}


def split_mnist(data: Path | None, per_class: int = 0) -> Scenario:
    """Five tasks of two digits, pixels in [0, 1]; few images of each for a trial."""
    images = shared_source("mnist", data)
    parts = []
    for x, y in (
        (images.train_images, images.train_labels),
        (images.test_images, images.test_labels),
    ):
        tasks = [(y // CLASSES == t).nonzero().flatten() for t in range(TASKS)]
        tasks = [index[: per_class * CLASSES] if per_class else index for index in tasks]
        parts.append([(x[index].float() / 255, y[index]) for index in tasks])
    return TensorScenario(
        list(zip(*parts, strict=True)), setting="class", full_head=True, name="split-mnist"
    )


def perceptron() -> nn.Module:
    """784-100-100-10 with Xavier's initial weights and biases of zero."""
    model = MLP(784, 100, TASKS * CLASSES)
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    return model


def within_tasks(weights: dict[str, Tensor], tasks: Scenario) -> float:
    """The mean accuracy with the task known, in percent."""
    model = perceptron()
    model.load_state_dict(weights)
    found = []
    for t in range(TASKS):
        test, own = tasks.task(t, [0]).test, tasks.classes(t)
        with torch.no_grad():
            chosen = model(test.inputs)[:, own.start : own.stop].argmax(1) + own.start
        found.append(100 * (chosen == test.labels).double().mean().item())
    return sum(found) / TASKS


def trained(name: str, data: Path | None, seeds: int, device: str, *, tiny: bool) -> dict[str, Any]:
    """One row: accuracies of each seed, the method's settings, seconds, and what is printed."""
    row, tasks = ROWS[name], split_mnist(data, per_class=50 if tiny else 0)
    training = Training(epochs=1, batch_size=10, lr=row.lr, weight_decay=row.weight_decay)
    started = time.perf_counter()
    trace = fit(
        tasks, row.method, perceptron, seeds=seeds, training=training, device=device, keep="weights"
    )
    seconds = time.perf_counter() - started
    return {
        "class": trace.accuracy[:, -1].mean(1).tolist(),
        "task": [within_tasks(trace.weights(seed, TASKS - 1), tasks) for seed in trace.seeds],
        "printed": row.printed and dict(zip(("class", "task"), row.printed, strict=True)),
        "seconds": seconds,
        "settings": {n: v for n, v in trace.config.items() if not callable(v)},
    }


def line(name: str, run: dict[str, Any]) -> str:
    """A row of the page's table."""
    cells = [name]
    for kind in ("class", "task"):
        values = torch.tensor(run[kind])
        cells.append(f"{values.mean():.1f} ± {values.std(correction=0):.1f}")
        printed = run["printed"]
        cells.append(f"{printed[kind][0]:.1f} ± {printed[kind][1]:.1f}" if printed else "–")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Run the rows that are asked for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with MNIST")
    parser.add_argument(
        "--only", default="", help=f"beginnings of names, separated by ;: {', '.join(ROWS)}"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="rows at a time")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tiny", action="store_true", help="few images")
    parser.add_argument("--out", nargs="?", type=Path, const=RESULTS, help="write the results")
    arguments = parser.parse_args()
    asked = [a.strip() for a in arguments.only.split(";")]
    names = [n for n in ROWS if any(n.startswith(a) for a in asked)]
    found: dict[str, Any] = {}
    if arguments.out and arguments.out.exists():
        found = json.loads(arguments.out.read_text("utf-8"))["rows"]
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool:
        runs = {
            pool.submit(
                trained, name, arguments.data, arguments.seeds, arguments.device,
                tiny=arguments.tiny,
            ): name
            for name in names
        }  # fmt: skip
        for done in as_completed(runs):
            name = runs[done]
            found[name] = done.result()
            print(f"{found[name]['seconds']:6.1f} s  {line(name, found[name])}", flush=True)
            if arguments.out:
                ordered = {n: found[n] for n in ROWS if n in found}
                content = {"versions": versions(torch.device(arguments.device)), "rows": ordered}
                arguments.out.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
