"""How near `guard.estimate` comes: predicted and measured seconds of `end_task`, and bytes.

    python benchmarks/estimate.py [--threads 1]

One run of each method on an MLP and a small convolutional network, with random data. A ratio is
predicted over measured time; those outside of 1/3 to 3 are marked, unless `end_task` takes less
than 0.1 s, most of which is then Python.
"""

import argparse
import time
import warnings

import torch
from torch import nn

from forgetless import EWC, GEM, GPM, OGD, PCAOGD, Guard, KFACLaplace, KronEWC, KronOGD
from forgetless.support.validation import format_bytes

METHODS = (
    KronOGD(),
    OGD(samples=100),
    PCAOGD(components=50, samples=500),
    GPM(),
    EWC(),
    KFACLaplace(),
    KronEWC(),
    GEM(),
)


def mlp() -> tuple[nn.Module, torch.Tensor]:
    """269 thousand parameters, 4,000 samples."""
    layers = nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    return nn.Sequential(*layers), torch.randn(4000, 784)


def cnn() -> tuple[nn.Module, torch.Tensor]:
    """151 thousand parameters, 800 images."""
    layers = (
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4)),
        *(nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10)),
    )
    return nn.Sequential(*layers), torch.randn(800, 3, 32, 32)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    for make in (mlp, cnn):
        for method in METHODS:
            model, x = make()
            data = x, torch.randint(10, (len(x),))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            guard = Guard(model, optimizer, method, drift_samples=0)
            estimate = guard.estimate(data)
            start = time.perf_counter()
            guard.end_task(data)
            taken = time.perf_counter() - start
            ratio = (estimate.seconds or 0.0) / taken
            mark = " !" if taken > 0.1 and not 1 / 3 < ratio < 3 else ""
            most = format_bytes(estimate.bytes[1] if estimate.bytes else 0)
            stored = format_bytes(guard.memory_report().bytes)
            print(
                f"{make.__name__} {method.name:12} {estimate.seconds:7.2f} s predicted, "
                f"{taken:7.2f} s taken, ratio {ratio:.2f}{mark}; at most {most}, {stored} stored",
                flush=True,
            )


if __name__ == "__main__":
    main()
