"""Two hundred tasks with every method: memory and time against predictions, orthonormality.

    python scripts/long_runs.py --tasks 200 --out results/faults/long-runs.json

Each method learns rotated digits in its own process, with checkpoints. Measured after every task:
the memory of the process and the time of a training step in the last epoch. At the end: the bytes
of the method's state against a prediction from the number of tasks, the deviation of its directions
from orthonormality, and memory that neither explains.
"""

import argparse
import ctypes
import gc
import json
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import theilslopes

from forgetless import Progress, Training, fit, scenario
from forgetless.launch.runs import resolve
from forgetless.methods import METHODS
from forgetless.trace import Trace
from forgetless.training.models import ModelOptions, build_model

HIDDEN = 30
SAMPLES_OF_CLASS = 10
BATCH = 25
EPOCHS = 2
MEMORY = 5
WARM_UP = 0.1  # share of the tasks before memory is measured
OPTIONS = {"memory": MEMORY, "samples": 60, "agem_batch": 32, "ewc_strength": 0.1}


def resident_bytes() -> int:
    """Resident memory of this process (Linux)."""
    return 4096 * int(Path("/proc/self/statm").read_text("ascii").split()[1])


class Watch:
    """An observer that notes memory and the time of a step after every task."""

    def __init__(self) -> None:
        self.resident: list[int] = []
        self.step_seconds: list[float] = []
        self._epoch_began = 0.0

    def __call__(self, progress: Progress) -> None:
        """Called after every epoch, and once more at the end of a task."""
        now = time.thread_time()  # without the time of other processes
        if progress.epoch == 1:
            self._epoch_began = now
        elif len(self.step_seconds) < progress.task:
            steps = 10 * SAMPLES_OF_CLASS // BATCH
            self.step_seconds.append((now - self._epoch_began) / steps / (EPOCHS - 1))
        else:
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # return free memory, which is no leak
            self.resident.append(resident_bytes())


def predicted_bytes(method: str, tasks: int, size: int, inputs: int) -> int:
    """Size of a method's state after some tasks, from its documentation."""
    directions = tasks * MEMORY
    sample = 4 * inputs + 8 + 8  # pixels, label, task
    return {
        "sgd": 0,
        "ewc": 2 * 4 * size,
        "joint": tasks * 10 * SAMPLES_OF_CLASS * sample + 8,
        "a-gem": tasks * MEMORY * sample,
        "gem": tasks * MEMORY * sample,
        "gem-nt": tasks * MEMORY * sample,
        "ogd": directions * size * 4 + 8 * directions**2 + 16 * tasks,
        "pca-ogd": directions * size * 4 + 8 * directions**2 + 16 * tasks,
    }[method]


def drift(trace: Trace) -> float | None:
    """Max |V Vᵀ − I| of the stored directions, None for methods without."""
    directions = trace.state(0).get("directions")
    if directions is None:
        return None
    rows = directions.double()
    return float((rows @ rows.T - torch.eye(len(rows), dtype=rows.dtype)).abs().max())


def learn(name: str, tasks: int, where: str) -> dict[str, Any]:
    """A long run with one method, and its measurements."""
    torch.set_num_threads(1)
    digits = scenario(
        "rotated-digits", tasks=tasks, train_per_class=SAMPLES_OF_CLASS, step_degrees=360 / tasks
    )
    config = resolve("rotated-digits", name, **OPTIONS)
    method = config.build_method()
    watch, started = Watch(), time.perf_counter()

    def model() -> torch.nn.Module:
        return build_model(ModelOptions(hidden=HIDDEN), digits.input_shape, digits.n_outputs)

    trace = fit(
        digits,
        method,
        model,
        training=Training(lr=0.02, epochs=EPOCHS, batch_size=BATCH),
        out=Path(where) / name,
        observer=watch,
    )
    size = sum(p.numel() for p in model().parameters())
    first = digits.task(0, [0])
    inputs = first.train.inputs[0].numel()
    kept = sum(t.nbytes for t in trace.state(0).values())
    predicted = predicted_bytes(name, tasks, size, inputs)
    warm = max(1, int(WARM_UP * tasks))
    # All test sets remain in memory: each task is evaluated after every later one.
    tests = (tasks - warm) * sum(t.nbytes for t in (first.test.inputs, first.test.labels))
    growth = watch.resident[-1] - watch.resident[warm - 1]
    state_growth = predicted - predicted_bytes(name, warm, size, inputs)
    times = np.array(watch.step_seconds)
    half = tasks // 2
    # A robust fit: a kernel is compiled during one of the tasks.
    slope, base, *_ = theilslopes(times[:half], np.arange(half))
    tail = slice(tasks - max(1, tasks // 10), tasks)
    expected = base + slope * np.arange(tasks)[tail].mean()
    return {
        "method": name,
        "tasks": tasks,
        "parameters": size,
        "stored_bytes": kept if name != "joint" else None,
        "predicted_bytes": predicted,
        "directions": len(trace.state(0)["directions"]) if "directions" in trace.state(0) else 0,
        "drift": drift(trace),
        "resident_growth_bytes": growth,
        "accounted_bytes": state_growth + tests,
        "step_ms_first": 1e3 * float(np.median(times[:warm])),
        "step_ms_last": 1e3 * float(np.median(times[tail])),
        "step_ms_predicted": 1e3 * float(expected),
        "accuracy_last_task": float(trace.accuracy[0, -1, -1]),
        "seconds": time.perf_counter() - started,
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = []
    spawned = multiprocessing.get_context("spawn")
    for name in arguments.methods.split(","):
        with tempfile.TemporaryDirectory() as where, spawned.Pool(1) as pool:
            results.append(pool.apply(learn, (name, arguments.tasks, where)))
        print(json.dumps(results[-1]), flush=True)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
