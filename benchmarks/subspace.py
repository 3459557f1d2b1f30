"""Consolidation and projection against the usual ways and the arithmetic, and their growth.

    python benchmarks/subspace.py [--repeats 7] [--out]

The network is the paper's MLP 784-100-100-10. Factored OGD projects away from 1,400 samples (14
tasks of 100); the usual way has the directions as columns P and computes g − P (Pᵀ g).
Consolidation reduces 3,000 samples to 100 directions; the usual way is one backward pass per sample
and randomised PCA. Floors are floating-point operations over the rate of a large product in this
run. Growth is the exponent of a straight line through logarithms: time against directions,
parameters and samples.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from sklearn.utils.extmath import randomized_svd
from timing import product_rate, seconds
from torch import Tensor

from forgetless import tangent_features
from forgetless.subspace import DENSE, FACTORED, Subspace, empty_subspace
from forgetless.subspace.dense import project_out_rows
from forgetless.tangent import stored_bytes
from forgetless.training.models import MLP

OUT = Path("results/bench/subspace.json")
WIDTHS = (784, 100, 100, 10)
PRODUCTS = sum(a * b for a, b in pairwise(WIDTHS))


def warm_seconds(call: Callable[[], object], repeats: int) -> list[float]:
    """Of each call, once it has warmed up."""
    call()
    return seconds(call, repeats)


def digits(n: int) -> tuple[Tensor, Tensor]:
    """Inputs as sparse as handwritten digits, and labels."""
    x = torch.rand(n, 784) * (torch.rand(n, 784) < 0.2)
    return x, torch.randint(0, 10, (n,))


def remembered(model: MLP, tasks: int, size: int) -> Subspace:
    """OGD's memory of some tasks as factored samples."""
    state = empty_subspace(torch.zeros(1, size), FACTORED)
    for _ in range(tasks):
        state = state.add_samples([tangent_features(model, *digits(100))])
    return state


def factored(model: MLP, size: int, repeats: int) -> dict[str, Any]:
    """Projection away from 1,400 samples."""
    state = remembered(model, 14, size)
    g, columns = torch.randn(1, size), torch.randn(size, 1400) / size**0.5
    ours = warm_seconds(lambda: state.project_out(g), repeats)
    usual = warm_seconds(lambda: g[0] - columns @ (columns.T @ g[0]), repeats)
    operations = 4 * 1400 * PRODUCTS / product_rate(torch.float32) + 4 * 1400**2 / product_rate(
        torch.float64
    )
    each = stored_bytes(state.atoms[0].phi) / state.rank
    return {
        "samples": state.rank,
        "ours_s": ours,
        "columns_s": usual,
        "columns_over_ours": statistics.median(usual) / statistics.median(ours),
        "times_floor": statistics.median(ours) / operations,
        "bytes_a_sample": each,
        "row_over_sample": 4 * size / each,
    }


def by_loop(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    """Features by one backward pass per sample, (n, p)."""
    parameters = list(model.parameters())
    rows = []
    for i in range(len(x)):
        gradients = torch.autograd.grad(model(x[i : i + 1])[0, y[i]], parameters)
        rows.append(torch.cat([g.flatten() for g in gradients]))
    return torch.stack(rows)


# Randomised PCA as scikit-learn does it, and as fast as PyTorch does it, less precisely.
PCA: dict[str, Callable[[Tensor], object]] = {
    "randomized_svd": lambda rows: randomized_svd(rows.numpy(), 100, random_state=0),
    "pca_lowrank(niter=2)": lambda rows: torch.pca_lowrank(rows, q=100, niter=2, center=False),
}


def consolidation(model: MLP, size: int, repeats: int) -> dict[str, Any]:
    """3,000 samples to 100 directions."""
    data = digits(3000)
    empty = empty_subspace(torch.zeros(1, size), DENSE)

    def ours() -> Subspace:
        return empty.add_principal([tangent_features(model, *data)], 100, centred=False)

    taken = warm_seconds(ours, repeats)
    start = time.perf_counter()
    rows = by_loop(model, *data)
    loop = time.perf_counter() - start
    usual = {name: loop + min(warm_seconds(lambda: pca(rows), 1)) for name, pca in PCA.items()}  # noqa: B023
    # Directions are found from a Gram matrix in float32 (see `precise_enough_gram`).
    gram = 3000**2 * sum(WIDTHS[:-1] + WIDTHS[1:])
    floor = (gram + 2 * 3000 * 100 * size) / product_rate(torch.float32)
    return {
        "ours_s": taken,
        "loop_s": loop,
        "loop_and_pca_s": usual,
        "usual_over_ours": {k: v / statistics.median(taken) for k, v in usual.items()},
        "times_floor": statistics.median(taken) / floor,
    }


def exponent(sizes: list[int], measure: Callable[[int], list[float]]) -> dict[str, Any]:
    """The slope of log time against log size."""
    times = [statistics.median(measure(size)) for size in sizes]
    x, y = [math.log(s) for s in sizes], [math.log(t) for t in times]
    slope = statistics.linear_regression(x, y).slope
    return {"sizes": sizes, "seconds": times, "exponent": slope}


def growth(model: MLP, repeats: int) -> dict[str, dict[str, Any]]:
    """How times grow with the number of directions, parameters and samples."""

    def rows(count: int, size: int) -> list[float]:
        basis, g = torch.randn(1, count, size) / size**0.5, torch.randn(1, size)
        return warm_seconds(lambda: project_out_rows(g, basis), repeats)

    size = sum(p.numel() for p in model.parameters())

    def samples(tasks: int) -> list[float]:
        state, g = remembered(model, tasks, size), torch.randn(1, size)
        return warm_seconds(lambda: state.project_out(g), repeats)

    def gram(n: int) -> list[float]:
        data = digits(n)
        return warm_seconds(lambda: tangent_features(model, *data).gram(), repeats)

    return {
        "dense projection, directions": exponent([250, 500, 1000, 2000], lambda k: rows(k, size)),
        "dense projection, parameters": exponent(
            [100_000, 300_000, 1_000_000, 3_000_000], lambda p: rows(100, p)
        ),
        "factored projection, hundreds of samples": exponent([4, 8, 16, 32], samples),
        "Gram matrix, samples": exponent([1000, 2000, 4000], gram),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", action="store_true", help=f"write {OUT}")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = MLP(784, 100, 10).eval()
    size = sum(p.numel() for p in model.parameters())
    found: dict[str, Any] = {
        "parameters": size,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    one = found["factored"] = factored(model, size, options.repeats)
    print(
        f"factored projection, {one['samples']} samples: "
        f"{1e3 * statistics.median(one['ours_s']):.1f} ms, columns take "
        f"{one['columns_over_ours']:.1f} times as long, {one['times_floor']:.1f} of the floor; "
        f"a row is {one['row_over_sample']:.0f} samples large",
        flush=True,
    )
    one = found["consolidation"] = consolidation(model, size, options.repeats)
    print(
        f"consolidation of 3,000 samples: {statistics.median(one['ours_s']):.2f} s, "
        f"{one['times_floor']:.1f} of the floor"
    )
    for name, ratio in one["usual_over_ours"].items():
        print(f"  a loop of backward passes and {name} take {ratio:.1f} times as long", flush=True)
    found["growth"] = growth(model, options.repeats)
    for name, curve in found["growth"].items():
        print(f"{name}: exponent {curve['exponent']:.2f}")
    if options.out:
        OUT.parent.mkdir(parents=True, exist_ok=True)
        OUT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
