"""Seconds of replay, distillation and regularisation, here and in Avalanche, in one run.

Five tasks of two digits of MNIST in one full head, a perceptron 784-100-100-10, plain SGD in
batches of ten, one pass; a buffer of 500 images, ten of them in a step. Both libraries train in
turns with the same settings and one thread, which is the fastest for a network of this size in
both; of each the fastest of some repeats counts. Seconds are those of all training, with what a
method does at the end of a task and without evaluation: of the clock, and of the processors.

    python benchmarks/versus_avalanche.py [--data DATA] [--repeats 3] [--images 1000]
        [--threads 1] [--out]
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forgetless import DER, DERPP, ER, ERACE, EWC, SGD, SI, LwF, Method, Scenario, Training
from forgetless.subspace import DENSE
from forgetless.support.provenance import versions
from forgetless.training.build import make_learner

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import _avalanche_on_cpu  # noqa: F401
from avalanche import __version__ as their_version
from avalanche import training as theirs
from avalanche.benchmarks import tensors_benchmark
from avalanche.training.plugins import (
    EvaluationPlugin,
    ReplayPlugin,
    SynapticIntelligencePlugin,
)
from benchmarks.class_incremental import perceptron, split_mnist

RESULTS = Path(__file__).parent.parent / "results" / "bench" / "versus_avalanche.json"
BATCH, BUFFER, LR = 10, 500, 0.03
_DER = {"mem_size": BUFFER, "batch_size_mem": BATCH, "alpha": 0.5}
# Row → the method here, and there: the strategy with its options.
PAIRS: dict[str, tuple[Method[Any], Callable[..., Any]]] = {
    "fine-tuning": (SGD(), theirs.Naive),
    "ER": (
        ER(BUFFER, BATCH),
        lambda **o: theirs.Naive(
            **o, plugins=[ReplayPlugin(BUFFER, batch_size=BATCH, batch_size_mem=BATCH)]
        ),
    ),
    "ER-ACE": (
        ERACE(BUFFER, BATCH),
        lambda **o: theirs.ER_ACE(**o, mem_size=BUFFER, batch_size_mem=BATCH),
    ),
    "DER": (DER(BUFFER, BATCH, alpha=0.5), lambda **o: theirs.DER(**o, **_DER, beta=0.0)),
    "DER++": (
        DERPP(BUFFER, BATCH, alpha=0.5, beta=0.5),
        lambda **o: theirs.DER(**o, **_DER, beta=0.5),
    ),
    "LwF": (LwF(), lambda **o: theirs.LwF(**o, alpha=4.0, temperature=2.0)),
    "SI": (SI(), lambda **o: theirs.Naive(**o, plugins=[SynapticIntelligencePlugin(1.0)])),
    "online EWC": (
        EWC(strength=10.0, decay=0.9),
        lambda **o: theirs.EWC(**o, ewc_lambda=5.0, mode="online", decay_factor=0.9),
    ),
}


def timed(call: Callable[[], None]) -> tuple[float, float]:
    """Seconds of the clock and of the processors."""
    clock, processor = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - clock, time.process_time() - processor


def here(method: Method[Any], tasks: Scenario) -> tuple[tuple[float, float], float]:
    """Seconds and final accuracy of this library."""
    training, cpu = Training(epochs=1, batch_size=BATCH, lr=LR), torch.device("cpu")
    learner = make_learner(tasks, method, perceptron, [0], training, None, cpu, DENSE)
    splits = [tasks.task(t, [0]).train for t in range(tasks.n_tasks)]

    def train() -> None:
        for t, split in enumerate(splits):
            for _ in learner.train(split, t, 1):
                pass
            learner.consolidate(split, t)

    seconds = timed(train)
    tests = [tasks.task(t, [0]).test for t in range(tasks.n_tasks)]
    found = [learner.accuracy(test, range(tasks.n_outputs)).item() for test in tests]
    return seconds, sum(found) / len(found)


def there(strategy: Callable[..., Any], tasks: Scenario) -> tuple[tuple[float, float], float]:
    """Seconds and final accuracy of Avalanche."""
    torch.manual_seed(0)
    model = perceptron()
    learner = strategy(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LR),
        criterion=nn.CrossEntropyLoss(),
        train_mb_size=BATCH,
        train_epochs=1,
        evaluator=EvaluationPlugin(),
    )

    def pairs(part: str) -> list[tuple[Tensor, Tensor]]:
        splits = [getattr(tasks.task(t, [0]), part) for t in range(tasks.n_tasks)]
        return [(split.inputs, split.labels) for split in splits]

    stream = tensors_benchmark(
        train_tensors=pairs("train"),
        test_tensors=pairs("test"),
        task_labels=[0] * tasks.n_tasks,
    ).train_stream

    def train() -> None:
        for experience in stream:
            learner.train(experience)

    seconds = timed(train)
    model.eval()
    with torch.no_grad():
        found = [100 * (model(x).argmax(1) == y).double().mean().item() for x, y in pairs("test")]
    return seconds, sum(found) / len(found)


def main() -> None:
    """Time every pair in turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with MNIST")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--images", type=int, default=1000, help="training images of a task")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", nargs="?", type=Path, const=RESULTS, help="write the results")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(arguments.threads)
    tasks = split_mnist(arguments.data, per_class=arguments.images // 2)
    rows: dict[str, Any] = {}
    for name, (method, strategy) in PAIRS.items():
        mine, others = [], []
        for _ in range(arguments.repeats):
            mine.append(here(method, tasks))
            others.append(there(strategy, tasks))
        rows[name] = {
            side: {
                "clock": min(s[0] for s, _ in runs),
                "processor": min(s[1] for s, _ in runs),
                "accuracy": runs[0][1],
            }
            for side, runs in (("forgetless", mine), ("avalanche", others))
        }
        a, b = rows[name]["forgetless"], rows[name]["avalanche"]
        ratios = [b[kind] / a[kind] for kind in ("clock", "processor")]
        print(
            f"{name:12} {a['clock']:6.2f} s here, {b['clock']:6.2f} s there: {ratios[0]:.1f} times "
            f"the clock, {ratios[1]:.1f} times the processors; accuracy {a['accuracy']:.1f}, "
            f"{b['accuracy']:.1f}",
            flush=True,
        )
    if arguments.out:
        steps = tasks.n_tasks * (arguments.images // BATCH)
        content = {
            "versions": versions(torch.device("cpu")) | {"avalanche": their_version},
            "threads": arguments.threads,
            "steps": steps,
            "repeats": arguments.repeats,
            "rows": rows,
        }
        arguments.out.write_text(json.dumps(content, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
