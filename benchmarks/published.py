"""The protocols of the papers of GPM, SGP and Adam-NSCL, with the methods of this library.

Networks, thresholds and schedules are those that the papers and their code state; where a run has
fewer epochs, its record says so. Beside every method: plain fine-tuning.

    python benchmarks/published.py --data DATA [--only split-cifar,permuted:gpm] [--seeds N]
        [--jobs N] [--epochs split-cifar:sgd=20] [--seconds N] [--tiny] [--out [FILE]]
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from forgetless import (
    GPM,
    SGD,
    SGP,
    AdamNSCL,
    Method,
    Progress,
    Scenario,
    TensorScenario,
    Training,
    average_accuracy,
    backward_transfer,
    fit,
    scenario,
)
from forgetless.data import ScenarioOptions
from forgetless.data.datasets import shared_source
from forgetless.data.scenarios import VIEWS, ImageView, Permuted, normalize

RESULTS = Path(__file__).parent.parent / "results" / "bench" / "published.json"
_SHARE = 0.85  # of the time at hand that is planned for: later tasks have more directions
TINY = {"tasks": 2, "images": 40}  # tasks, and training images of a class

# The networks.


def perceptron(outputs: int) -> nn.Module:
    """784-100-100-10 without biases."""
    sizes = (784, 100, 100, outputs)
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs, bias=False), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def alexnet(outputs: int) -> nn.Module:
    """Three convolutions and two linear layers, each with batch norm, ReLU and dropout.

    Batch norm has no running statistics: at test time too it normalises by the batch.
    """
    channels, kernels, drops = (3, 64, 128, 256), (4, 3, 2), (0.2, 0.2, 0.5)
    layers: list[nn.Module] = []
    for i, (kernel, drop) in enumerate(zip(kernels, drops, strict=True)):
        layers += [
            nn.Conv2d(channels[i], channels[i + 1], kernel, bias=False),
            nn.BatchNorm2d(channels[i + 1], track_running_stats=False),
            nn.ReLU(),
            nn.Dropout(drop),
            nn.MaxPool2d(2),
        ]
    layers.append(nn.Flatten())
    for inputs in (1024, 2048):
        layers += [
            nn.Linear(inputs, 2048, bias=False),
            nn.BatchNorm1d(2048, track_running_stats=False),
            nn.ReLU(),
            nn.Dropout(0.5),
        ]
    return nn.Sequential(*layers, nn.Linear(2048, outputs, bias=False))


def lenet(outputs: int) -> nn.Module:
    """Two convolutions with local response normalisation, two linear layers: 20-50-800-500."""
    layers: list[nn.Module] = []
    for inputs, channels in ((3, 20), (20, 50)):
        layers += [
            nn.Conv2d(inputs, channels, 5, padding=2, bias=False),
            nn.ReLU(),
            nn.LocalResponseNorm(4, alpha=0.001 / 9, beta=0.75, k=1),
            nn.MaxPool2d(3, stride=2, padding=1),
        ]
    layers.append(nn.Flatten())
    for inputs, units in ((50 * 8 * 8, 800), (800, 500)):
        layers += [nn.Linear(inputs, units, bias=False), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(500, outputs, bias=False))


def lenet_as_released(outputs: int) -> nn.Module:
    """The same with weights from U(−b, b), b² = 6 / inputs, as the released code starts."""
    model = lenet(outputs)
    for parameter in model.parameters():
        nn.init.kaiming_uniform_(parameter, nonlinearity="relu")
    return model


class Block(nn.Module):
    """Two convolutions, each after batch norm and ReLU, and a way around them."""

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(inputs), nn.BatchNorm2d(channels)])
        self.first = nn.Conv2d(inputs, channels, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        changes = stride > 1 or inputs != channels
        self.around = nn.Conv2d(inputs, channels, 1, stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        ready = relu(self.norms[0](x))
        around = x if self.around is None else self.around(ready)
        return self.second(relu(self.norms[1](self.first(ready)))) + around


def resnet(outputs: int) -> nn.Module:
    """A ResNet-18 with pre-activation for images of 32 × 32."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1, bias=False)]
    channels = 64
    for width, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(channels, width, stride), Block(width, width, 1)]
        channels = width
    layers += [nn.BatchNorm2d(512), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(512, outputs, bias=False))


# The tasks.


def permuted(data: Path | None, seed: int, tiny: bool) -> Scenario:
    """Ten orders of MNIST's 784 pixels; every seed has its own."""
    options = ScenarioOptions(tasks=10)
    if tiny:
        options = ScenarioOptions(tasks=TINY["tasks"], train_per_class=TINY["images"])
    mnist = shared_source("mnist", data)
    return Permuted("permuted-mnist", mnist, ImageView(0, (0.1307,), (0.3081,)), options)


def split_cifar(data: Path | None, seed: int, tiny: bool) -> Scenario:
    """CIFAR-100, ten classes a task in the order of their labels, with a head each."""
    tasks, images = (TINY["tasks"], TINY["images"]) if tiny else (10, 0)
    options = {"tasks": tasks, "train_per_class": images, "classes_per_task": 10}
    return scenario("split-cifar100", data=data, **options)


# CIFAR-100's superclasses in the order of their labels, of five classes each.
SUPERCLASSES = (
    (4, 30, 55, 72, 95), (1, 32, 67, 73, 91), (54, 62, 70, 82, 92), (9, 10, 16, 28, 61),
    (0, 51, 53, 57, 83), (22, 39, 40, 86, 87), (5, 20, 25, 84, 94), (6, 7, 14, 18, 24),
    (3, 42, 43, 88, 97), (12, 17, 37, 68, 76), (23, 33, 49, 60, 71), (15, 19, 21, 31, 38),
    (34, 63, 64, 66, 75), (26, 45, 77, 79, 99), (2, 11, 35, 46, 98), (27, 29, 44, 78, 93),
    (36, 50, 65, 74, 80), (47, 52, 56, 59, 96), (8, 13, 48, 58, 90), (41, 69, 81, 85, 89),
)  # fmt: skip


# The orders in which the papers learn them, of Yoon et al. (2020).
ORDERS = (
    tuple(range(20)),
    (15, 12, 5, 9, 7, 16, 18, 17, 1, 0, 3, 8, 11, 14, 10, 6, 2, 4, 13, 19),
    (17, 1, 19, 18, 12, 7, 6, 0, 11, 15, 10, 5, 13, 3, 9, 16, 4, 14, 2, 8),
    (11, 9, 6, 5, 12, 4, 0, 10, 13, 7, 14, 3, 15, 16, 8, 1, 2, 19, 18, 17),
    (6, 14, 0, 11, 12, 17, 13, 4, 9, 1, 7, 19, 8, 10, 3, 15, 18, 5, 2, 16),
)


def scrambled(images: Tensor) -> Tensor:
    """What the released loaders make of planar images (n, 3, 32, 32): read as if colours came last.

    Rows of a colour become rows of mixed pixels, so that neighbours are no longer neighbours.
    """
    return images.reshape(-1, 32, 32, 3).permute(0, 3, 1, 2).contiguous()


def superclasses(
    data: Path | None,
    seed: int,
    tiny: bool,
    *,
    mixed: bool = False,
    view: ImageView = VIEWS["cifar100"],
) -> Scenario:
    """The superclasses in one of five orders, with a head each."""
    source, order = shared_source("cifar100", data), ORDERS[seed % len(ORDERS)]

    def part(images: Tensor, labels: Tensor, classes: Sequence[int], most: int) -> Any:
        number = torch.full((100,), -1).scatter(0, torch.tensor(classes), torch.arange(5))[labels]
        chosen = (number >= 0).nonzero().flatten()[: most or None]
        own = scrambled(images[chosen]) if mixed else images[chosen]
        return normalize(own, view.mean, view.std), number[chosen]

    splits = (
        (source.train_images, source.train_labels, 5 * TINY["images"] if tiny else 0),
        (source.test_images, source.test_labels, 0),
    )
    names = order[: TINY["tasks"]] if tiny else order
    tasks = [
        tuple(part(images, labels, SUPERCLASSES[i], most) for images, labels, most in splits)
        for i in names
    ]
    return TensorScenario(tasks, setting="task", name="superclasses")  # type: ignore[arg-type]


def superclasses_scrambled(data: Path | None, seed: int, tiny: bool) -> Scenario:
    """The same, of images in the released loaders' shape."""
    return superclasses(data, seed, tiny, mixed=True)


def superclasses_released(data: Path | None, seed: int, tiny: bool) -> Scenario:
    """The same, with pixels from 0 to 1, as the released loaders have them."""
    return superclasses(data, seed, tiny, mixed=True, view=ImageView(0, (0.0,), (1.0,)))


# The runs.

PLATEAU = Training(
    lr=0.01,
    epochs=200,
    batch_size=64,
    schedule="plateau",
    decay=0.5,
    decay_after=6,
    held_out=0.05,
    evaluation_batch=64,
)


def rates_of_adam_nscl() -> Callable[[list[Any]], torch.optim.Optimizer]:
    """Adam with 1e-4 in the first task and 5e-5 later, 1e-3 for heads and 5e-4 for batch norm."""
    made = count()

    def adam(parameters: list[Any]) -> torch.optim.Optimizer:
        later = next(made) > 0
        *body, heads = parameters  # heads come last, free of the method
        groups = [
            {"params": [p for p in body if p.dim() > 1], "lr": 5e-5 if later else 1e-4},
            {"params": [p for p in body if p.dim() == 1], "lr": 5e-4},
            {"params": [heads], "lr": 1e-3},
        ]
        return torch.optim.Adam(groups)

    return adam


@dataclass(frozen=True)
class Protocol:
    """One line of a paper's table.

    Arguments:
        tasks: from the data folder, a seed and whether they are tiny to the tasks.
        model: from the number of outputs to the network.
        method: with the paper's settings.
        training: likewise; made anew for each seed.
        printed: the paper's ACC and BWT in percent, where it has them.
    """

    tasks: Callable[[Path | None, int, bool], Scenario]
    model: Callable[[int], nn.Module]
    method: Method[Any]
    training: Callable[[], Training]
    printed: tuple[float | None, float | None] = (None, None)

    @property
    def one_by_one(self) -> bool:
        """Whether seeds differ in more than their random numbers."""
        return self.tasks is not permuted


def _protocols() -> Iterator[tuple[str, Protocol]]:
    def plain() -> Training:
        return Training(lr=0.01, epochs=5, batch_size=10)

    few = {"samples": 300, "layer_thresholds": "0.95,0.99,0.99"}
    for name, method, printed in (("gpm", GPM(**few), 93.91), ("sgd", SGD(), None)):
        yield f"permuted:{name}", Protocol(permuted, perceptron, method, plain, (printed, None))

    grown: dict[str, Any] = {"threshold": 0.97, "growth": 0.003, "samples": 125}
    for name, method, lr, ends, printed in (
        ("gpm", GPM(**grown), 0.01, 1e-5, (72.48, -0.9)),
        ("sgp", SGP(**grown, scale=10.0), 0.05, 5e-5, (76.05, None)),
        ("sgd", SGD(), 0.01, 1e-5, (None, None)),
    ):
        settings = replace(PLATEAU, lr=lr, least_lr=ends)
        yield (
            f"split-cifar:{name}",
            Protocol(split_cifar, alexnet, method, lambda s=settings: s, printed),
        )

    def nscl() -> Training:
        adam = rates_of_adam_nscl()
        shown = {"augmentation": "crop-flip", "schedule": "step", "decay": 0.5, "decay_after": 30}
        return Training(epochs=80, batch_size=32, optimizer=adam, **shown)

    method = AdamNSCL(samples=5000, ratio=10.0)
    yield "split-cifar:adam-nscl", Protocol(split_cifar, resnet, method, nscl, (73.77, -1.6))

    grown = {"threshold": 0.98, "growth": 0.001, "samples": 125}
    settings = replace(PLATEAU, epochs=50)
    for tasks in (superclasses, superclasses_scrambled, superclasses_released):
        model = lenet_as_released if tasks is superclasses_released else lenet
        for name, method, printed in (
            ("gpm", GPM(**grown), 57.72),
            ("sgp", SGP(**grown, scale=3.0), 59.05),
            ("sgd", SGD(), None),
        ):
            yield (
                f"{tasks.__name__.replace('_', '-')}:{name}",
                Protocol(tasks, model, method, lambda: settings, (printed, None)),
            )


PROTOCOLS = dict(_protocols())


def fitting_epochs(
    protocol: Protocol, tasks: Scenario, training: Training, seconds: float, device: str
) -> int:
    """The epochs of each task with which a run takes about so many seconds, from a short trial."""
    few, ends = copy(tasks), []
    few.n_tasks = min(2, tasks.n_tasks)
    trial = fit(
        few,
        protocol.method,
        partial(protocol.model, tasks.n_outputs),
        training=replace(training, epochs=3),
        device=device,
        keep="nothing",
        observer=lambda progress: ends.append(time.perf_counter()),
    )
    epoch = (ends[-2] - ends[-4]) / 2  # the last two; then comes the evaluation
    left = _SHARE * (seconds - tasks.n_tasks * trial.timings["consolidation"])
    return max(1, int(left / (tasks.n_tasks * epoch)))


def trained(
    name: str,
    data: Path | None,
    seeds: int,
    epochs: int,
    seconds: float,
    tiny: bool,
    device: str,
) -> dict[str, Any]:
    """The record of a protocol's run with the first few seeds.

    Arguments:
        epochs: at most so many; 0 for those of the protocol.
        seconds: likewise, of a seed; 0 for any.
    """
    protocol, started = PROTOCOLS[name], time.perf_counter()
    accuracy, forgotten, settings, of = [], [], {}, {}
    groups = [(s,) for s in range(seeds)] if protocol.one_by_one else [tuple(range(seeds))]
    for group in groups:
        begun = time.perf_counter()
        tasks, training = protocol.tasks(data, group[0], tiny), protocol.training()
        most = min(epochs or training.epochs, training.epochs)
        if seconds:
            left = seconds - (time.perf_counter() - begun)
            fitting = fitting_epochs(protocol, tasks, protocol.training(), left, device)
            most = min(most, fitting)
            print(f"{name}: {fitting} epochs would fit, {most} at most", flush=True)
        if training.schedule == "step":
            decay_after = max(1, round(most / training.epochs * training.decay_after))
            training = replace(training, decay_after=decay_after)
        training = replace(training, epochs=most)
        trace = fit(
            tasks,
            protocol.method,
            partial(protocol.model, tasks.n_outputs),
            seeds=group,
            training=training,
            device=device,
            keep="nothing",
            observer=_Shown(f"{name} {group[0]}"),
        )
        accuracy += average_accuracy(trace.accuracy).tolist()
        forgotten += backward_transfer(trace.accuracy).tolist()
        settings, of = trace.config, trace.versions
    return {
        "seeds": list(range(seeds)),
        "accuracy": accuracy,
        "backward_transfer": forgotten,
        "printed": dict(zip(("accuracy", "backward_transfer"), protocol.printed, strict=True)),
        "epochs": {"published": protocol.training().epochs, "most": settings["epochs"]},
        "seconds": time.perf_counter() - started,
        "settings": {n: v for n, v in settings.items() if not callable(v)},
        "versions": of,
    }


class _Shown:
    """Prints the mean accuracy after every task."""

    def __init__(self, title: str) -> None:
        self.title, self.started, self.last = title, time.perf_counter(), 0

    def __call__(self, progress: Progress) -> None:
        row = [a for a in progress.measured[0] if math.isfinite(a)]
        if len(row) <= self.last:
            return
        self.last = len(row)
        seconds, mean = time.perf_counter() - self.started, sum(row) / len(row)
        shown = f"task {self.last:2} ACC {mean:.2f}, new {row[-1]:.2f}"
        print(f"{seconds:6.1f} s  {self.title}: {shown}", flush=True)


def main() -> None:
    """Run the protocols that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with MNIST and CIFAR-100")
    parser.add_argument("--only", default="", help=f"comma-separated: {', '.join(PROTOCOLS)}")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", default="", help="at most, comma-separated: split-cifar:sgp=90")
    parser.add_argument("--seconds", type=float, default=0, help="at most, for a seed of a run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true", help="few images, two tasks, one epoch")
    parser.add_argument("--out", nargs="?", type=Path, const=RESULTS, help="write the results")
    arguments = parser.parse_args()
    asked = arguments.only.split(",")
    names = [n for n in PROTOCOLS if any(n == a or n.startswith(f"{a}:") or not a for a in asked)]
    caps = dict.fromkeys(names, 1) if arguments.tiny else {}
    for text in filter(None, arguments.epochs.split(",")):
        name, _, most = text.partition("=")
        caps[name] = int(most)
    found: dict[str, Any] = {}
    failed: list[str] = []
    if arguments.out and arguments.out.exists():
        found = json.loads(arguments.out.read_text("utf-8"))
    names.sort(key=lambda n: n.startswith("superclasses"))
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool:
        runs = {
            pool.submit(
                trained,
                name,
                arguments.data,
                arguments.seeds,
                caps.get(name, 0),
                arguments.seconds,
                arguments.tiny,
                arguments.device,
            ): name
            for name in names
        }
        for done in as_completed(runs):
            name = runs[done]
            if error := done.exception():
                failed.append(name)
                print(f"{name} failed: {error}", flush=True)
                continue
            run = found[name] = done.result()
            mean = sum(run["accuracy"]) / len(run["accuracy"])
            print(f"{run['seconds']:6.1f} s  {name}: ACC {mean:.2f}, printed {run['printed']}")
            if arguments.out:
                arguments.out.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
