"""Tangent features against the usual ways to compute them, and against the arithmetic.

    python benchmarks/tangent.py [--samples 3000] [--repeats 5] [--out]

The network is the paper's MLP 784-100-100-10, briefly trained on shifted and rotated digits. Three
questions: the time of the Gram matrix against a loop of autograd calls and vmap, its memory, and
the time of the top 100 directions against randomised PCA, which gets the dense features for free.
The floor of each is its floating-point operations over the rate of a large matrix product measured
in the same run and precision: the Gram matrix in float64, that for the directions in float32.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.utils.extmath import randomized_svd
from timing import product_rate, seconds
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn import functional

import forgetless
from forgetless.tangent import tangent_features
from forgetless.training.models import MLP

OUT = Path("results/bench/tangent.json")
COMPONENTS = 100
WIDTHS = (784, 100, 100, 10)


def digits(n: int) -> tuple[Tensor, Tensor]:
    """Digits of 28x28 pixels, each turned and shifted at random."""
    data = load_digits()
    chosen = torch.randint(0, len(data.target), (n,))
    angle, shift = torch.rand(n) - 0.5, 0.3 * (torch.rand(n, 2) - 0.5)
    rows = [[angle.cos(), -angle.sin(), shift[:, 0]], [angle.sin(), angle.cos(), shift[:, 1]]]
    turn = torch.stack([torch.stack(row, 1) for row in rows], 1)
    images = torch.from_numpy(data.images).float().div(16)[chosen].unsqueeze(1)
    grid = functional.affine_grid(turn, [n, 1, 28, 28], align_corners=False)
    images = functional.grid_sample(images, grid, align_corners=False).flatten(1)
    return images, torch.from_numpy(data.target)[chosen]


def setting(n: int) -> tuple[MLP, Tensor, Tensor]:
    """The network after 300 steps, inputs and labels."""
    torch.manual_seed(0)
    x, y = digits(n)
    model = MLP(784, 100, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(300):
        batch = torch.randint(0, n, (64,))
        optimizer.zero_grad()
        functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    return model.eval(), x, y


def rows_by_loop(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    """φ, one autograd call per sample."""
    parameters = list(model.parameters())
    rows = x.new_empty(len(x), sum(p.numel() for p in parameters))
    for i in range(len(x)):
        grads = torch.autograd.grad(model(x[i : i + 1])[0, y[i]], parameters)
        rows[i] = torch.cat([g.flatten() for g in grads])
    return rows


def rows_by_vmap(model: MLP, x: Tensor, y: Tensor) -> Tensor:
    """φ, all samples at once."""

    def output(parameters: dict[str, Tensor], sample: Tensor, label: Tensor) -> Tensor:
        logits: Tensor = functional_call(model, parameters, (sample.unsqueeze(0),))
        return logits[0].gather(0, label.unsqueeze(0))[0]

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    grads = vmap(grad(output), in_dims=(None, 0, 0))(parameters, x, y)
    return torch.cat([g.flatten(1) for g in grads.values()], 1)


def gram_of_float32(rows: Tensor) -> Tensor:
    """φ φᵀ with products in float32."""
    return (rows @ rows.T).double()


Setting = tuple[MLP, Tensor, Tensor]
GRAMS: dict[str, Callable[[MLP, Tensor, Tensor], Tensor]] = {
    "forgetless": lambda m, x, y: tangent_features(m, x, y).gram(),
    "vmap, float32 product": lambda m, x, y: gram_of_float32(rows_by_vmap(m, x, y)),
    "loop, float32 product": lambda m, x, y: gram_of_float32(rows_by_loop(m, x, y)),
}


def tops(rows: Tensor, at: Setting) -> dict[str, Callable[[], Tensor]]:
    """Ways to the top directions, (k, p); all but the first are given φ."""
    return {
        "forgetless": lambda: tangent_features(*at).top(COMPONENTS)[1],
        "pca_lowrank(niter=2)": lambda: (
            torch.pca_lowrank(rows, q=COMPONENTS, niter=2, center=False)[2].T
        ),
        "pca_lowrank(niter=7)": lambda: (
            torch.pca_lowrank(rows, q=COMPONENTS, niter=7, center=False)[2].T
        ),
        "randomized_svd": lambda: torch.from_numpy(
            randomized_svd(rows.numpy(), COMPONENTS, random_state=0)[2]
        ),
    }


def peak_memory(variant: str, n: int) -> float:
    """Additional bytes that a fresh process needs for one Gram matrix."""
    command = [sys.executable, __file__, "--samples", str(n), "--peak", variant]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(result.stdout)


def measure_peak(variant: str, n: int) -> float:
    """The same, in this process."""
    model, x, y = setting(n)
    GRAMS[variant](model, x[:64], y[:64])  # libraries loaded, thread pools and scratch made
    before = high_water_mark()
    GRAMS[variant](model, x, y)
    return high_water_mark() - before


def high_water_mark() -> float:
    """The peak memory of this process in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # Linux: ru_maxrss would begin at the size of the parent process
        line = next(s for s in status.read_text().splitlines() if s.startswith("VmHWM"))
        return 1024.0 * int(line.split()[1])
    scale = 1 if sys.platform == "darwin" else 1024
    return float(scale * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def described(taken: list[float]) -> str:
    """Median and range."""
    return f"{statistics.median(taken):8.3f} s ({min(taken):.3f} to {max(taken):.3f})"


def floors(n: int, rates: Mapping[str, float]) -> tuple[float, float]:
    """Seconds of arithmetic for a Gram matrix, and for the top directions."""
    pairs = list(pairwise(WIDTHS))
    p = sum((a + 1) * b for a, b in pairs)
    # Half of a symmetric matrix: (A Aᵀ)∘(D Dᵀ) of each layer; and one product (k, n) · (n, p).
    gram, product = n * n * sum(a + b for a, b in pairs), 2 * COMPONENTS * n * p
    # `gram` computes in float64, `top` in float32 (see `precise_enough_gram`).
    return gram / rates["torch.float64"], (gram + product) / rates["torch.float32"]


def run(n: int, repeats: int) -> dict[str, object]:
    """Measure everything and print a table."""
    rates = {str(d): product_rate(d) for d in (torch.float64, torch.float32)}
    at = setting(n)
    p = sum((a + 1) * b for a, b in pairwise(WIDTHS))
    gram_floor, top_floor = floors(n, rates)
    print(f"n = {n}, p = {p}, {torch.get_num_threads()} threads; products at "
          + ", ".join(f"{r / 1e9:.0f} GFlop/s in {d}" for d, r in rates.items()))  # fmt: skip

    exact = tangent_features(at[0].double(), at[1].double(), at[2]).gram()
    lengths = exact.diagonal().sqrt()
    at[0].float()
    report: dict[str, object] = {
        "version": forgetless.__version__, "samples": n, "parameters": p,
        "threads": torch.get_num_threads(), "torch": torch.__version__, "gemm_rates": rates,
        "floors": {"gram": gram_floor, "top": top_floor},
    }  # fmt: skip
    grams: dict[str, dict[str, object]] = {}
    print(f"\nGram matrix, floor {gram_floor:.3f} s")
    for name, gram in GRAMS.items():
        # The first call, of which only the result is looked at, has warmed up the slow ones.
        slow = name != "forgetless"
        error = (gram(*at) - exact).abs() / lengths / lengths.unsqueeze(1)
        taken = seconds(lambda gram=gram: gram(*at), 1 if slow else repeats)
        grams[name] = {"seconds": taken, "peak_bytes": peak_memory(name, n),
                       "error": float(error.max())}  # fmt: skip
        _line(name, taken, grams["forgetless"]["seconds"], gram_floor)
        print(f"{'':24}{grams[name]['peak_bytes'] / 2**20:8.0f} MiB, "  # type: ignore[operator]
              f"largest error {grams[name]['error']:.1e} of |φ_i| |φ_j|")  # fmt: skip
    report["gram"] = grams

    rows = tangent_features(*at).dense()
    energy = float(torch.linalg.eigvalsh(exact).flip(0)[:COMPONENTS].sum())
    found: dict[str, dict[str, object]] = {}
    print(f"\nTop {COMPONENTS} directions, floor {top_floor:.3f} s")
    for name, top in tops(rows, at).items():
        kept = float((rows @ top().T).double().square().sum()) / energy
        slow = name not in ("forgetless", "pca_lowrank(niter=2)")
        found[name] = {"seconds": seconds(top, 1 if slow else repeats), "kept": kept}
        _line(name, found[name]["seconds"], found["forgetless"]["seconds"], top_floor)
        print(f"{'':24}{1 - kept:.1e} of the variance of the best {COMPONENTS} lost")
    report["top"] = found
    return report


def _line(name: str, taken: object, ours: object, floor: float) -> None:
    median, own = statistics.median(taken), statistics.median(ours)  # type: ignore[call-overload]
    times = f"{median / own:6.1f}x ours, {median / floor:6.1f}x the floor"
    print(f"{name:24}{described(taken)} {times}")  # type: ignore[arg-type]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--samples", type=int, default=3000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--out", action="store_true", help=f"write {OUT}")
    parser.add_argument("--peak", choices=GRAMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.peak:
        print(measure_peak(options.peak, options.samples))
        return
    report = run(options.samples, options.repeats)
    if options.out:
        OUT.parent.mkdir(parents=True, exist_ok=True)
        OUT.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
