"""What a guard costs: the same loop with and without it, and the projection against its floor.

    python benchmarks/guard.py [--device cuda] [--repeats 5] [--only end-task] [--out]

Three models (the paper's MLP, its LeNet, a transformer of ten million parameters) and 0, 100 and
1,000 stored directions. The overhead is the median time of a training step with the guard over
that without it, measured alternately. The floor of a projection is the bytes of the stored
rows over the bandwidth of summing them, measured alternately: read once if two rows fit the cache
of a core (on a GPU, if its multiprocessors together hold a row), otherwise twice. The reference is
the usual form, g − P (Pᵀ g) with directions as columns. Cases that do not fit in memory are
reported and left out.

Images and tokens are noise, whose moments have the full rank; where MNIST is at hand, its images
are measured too. KronOGD's `end_task` is measured in turns with a forward and a backward pass of
the same samples by the same loader, in batches of 64, and with the eigenvectors of its moments,
which take about the same time for any number of samples. Its floor is the sum of the two. A step
with KronOGD, KronEWC or GPM is measured as one with directions is, after one task. On a CPU seconds
are those of the processor.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import forgetless
from forgetless.data.datasets import find_source, shared_source
from forgetless.methods import Method
from forgetless.subspace.dense import project_out_rows
from forgetless.subspace.eigenbasis import Axis
from forgetless.support.provenance import versions
from forgetless.training.models import MLP, LeNet

OUT = Path("results/bench")
DIRECTIONS = (0, 100, 1000)
BATCH = 64  # of the samples that `end_task` is given
L2 = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")
SMALL = 1 << 28  # bytes of rows below which there is time for more rounds
ON_CHIP = 30 << 20  # bytes of rows that the processors of a Hopper GPU hold together


def cache_size(device: str) -> int:
    """Bytes of cache, which are read a second time without memory access."""
    if device == "cuda":
        return 2 * ON_CHIP
    text = L2.read_text().strip() if L2.exists() else "1024K"
    return int(text.rstrip("KM")) << (20 if text.endswith("M") else 10)


class Transformer(nn.Module):
    """A small transformer encoder for classification with ten million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4000, 320)
        layer = nn.TransformerEncoderLayer(320, 8, 1280, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 7, enable_nested_tensor=False)
        self.head = nn.Linear(320, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (n, T) → logits (n, 10)."""
        return self.head(self.encoder(self.embedding(tokens)).mean(1))


@dataclass(frozen=True)
class Case:
    """A model, its batch, and how many samples `end_task` is given."""

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    samples: int


def mnist_images() -> Tensor:
    """Real images, whose moments have a lower rank than those of noise."""
    images = shared_source("mnist", download=False).train_images
    return images[torch.randperm(len(images))[:32]].flatten(1).float() / 255


CASES = (
    Case("MLP 784-100-100-10", lambda: MLP(784, 100, 10), lambda: torch.randn(32, 784), 3000),
    Case("LeNet", lambda: LeNet((3, 32, 32), 200, 10), lambda: torch.randn(32, 3, 32, 32), 3000),
    Case("transformer, 10M", Transformer, lambda: torch.randint(0, 4000, (16, 64)), 256),
)
METHODS = (forgetless.KronOGD(energy=0.95), forgetless.KronEWC(), forgetless.GPM())
REAL = Case("MLP, MNIST images", lambda: MLP(784, 100, 10), mnist_images, 3000)


def synchronise(device: str) -> None:
    """Wait for a GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def in_turns(
    calls: dict[str, Callable[[], object]],
    rounds: int,
    device: str,
    idle: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list]:
    """Seconds of each call, interleaved, so that other load disturbs all alike.

    Arguments:
        idle: rounds before those that count.
        clock: what seconds are read from.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + idle):
        for name, call in calls.items():
            synchronise(device)
            start = clock()
            call()
            synchronise(device)
            if number >= idle:
                seconds[name].append(clock() - start)
    return seconds


def directions(count: int, size: int, device: str) -> Tensor:
    """Rows that behave like stored directions, (count, size)."""
    return torch.randn(count, size, device=device) / size**0.5


def projection(size: int, count: int, device: str, rounds: int) -> dict:
    """The projection of one vector against its floor and against the column form.

    The bandwidth of the floor is that of summing the rows, in turns with the rest: on a shared
    machine it changes from one second to the next.
    """
    rows = directions(count, size, device)
    g = torch.randn(1, size, device=device)
    columns = rows.T.contiguous()
    calls = {
        "ours": lambda: project_out_rows(g, rows.unsqueeze(0)),
        "columns": lambda: g[0] - columns @ (columns.T @ g[0]),
        "read": rows.sum,
    }
    seconds = in_turns(calls, rounds if rows.nbytes > SMALL else 5 * rounds, device)
    passes = 1 if 2 * size * 4 <= cache_size(device) else 2
    ratios = [a / (passes * b) for a, b in zip(seconds["ours"], seconds["read"], strict=True)]
    ours, reference, read = (statistics.median(seconds[name]) for name in calls)
    return {
        "passes": passes,
        "read_bytes_per_s": rows.nbytes / read,
        "floor_s": passes * read,
        "ours_s": ours,
        "times_floor": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "columns_over_ours": reference / ours,
    }


class Loop:
    """A training loop with a guard that stores a number of directions, or a task by a method."""

    def __init__(
        self, case: Case, count: int, device: str, method: Method[Any] | None = None
    ) -> None:
        torch.manual_seed(0)
        self.model = case.model().to(device)
        self.inputs = case.inputs().to(device)
        self.labels = torch.randint(0, 10, (len(self.inputs),), device=device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.guard = forgetless.Guard(
            self.model, self.optimizer, method or forgetless.OGD(samples=1)
        )
        if method is not None:
            samples = torch.cat(
                [case.inputs() for _ in range(-(-case.samples // len(self.inputs)))]
            )
            labels = torch.randint(0, 10, (len(samples),))
            self.guard.end_task((samples.to(device), labels.to(device)))
        elif count:
            self._remember(count)

    def _remember(self, count: int) -> None:
        """Random directions in place of stored ones."""
        self.guard.end_task((self.inputs, self.labels))
        now = self.guard._current()
        size, device = now.state.rows.shape[2], str(self.inputs.device)
        rows = directions(count, size, device).unsqueeze(0)
        self.guard._set(replace(now, state=replace(now.state, rows=rows)))

    def step(self) -> None:
        """One step."""
        self.optimizer.zero_grad()
        cross_entropy(self.model(self.inputs), self.labels).backward()
        self.optimizer.step()


def overhead(
    case: Case, count: int, device: str, rounds: int, method: Method[Any] | None = None
) -> dict:
    """The time of a step with the guard over one without."""
    guarded, plain = Loop(case, count, device, method), Loop(case, 0, device)
    plain.guard.remove()
    clock = time.perf_counter if method is None or device == "cuda" else time.process_time
    seconds = in_turns({"guarded": guarded.step, "plain": plain.step}, rounds, device, clock=clock)
    ratios = [a / b for a, b in zip(seconds["guarded"], seconds["plain"], strict=True)]
    return {
        "plain_s": statistics.median(seconds["plain"]),
        "guarded_s": statistics.median(seconds["guarded"]),
        "overhead": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
    }


def end_task(case: Case, device: str, rounds: int) -> dict:
    """KronOGD's `end_task` over a forward and a backward pass, and the shares of its parts."""
    torch.manual_seed(0)
    model = case.model().to(device)
    batches = [case.inputs().to(device) for _ in range(-(-case.samples // len(case.inputs())))]
    inputs = torch.cat(batches)[: case.samples]
    labels = torch.randint(0, 10, (len(inputs),), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = forgetless.Guard(model, optimizer, forgetless.KronOGD(energy=0.95))
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=BATCH)

    def one_pass() -> None:
        for x, y in loader:
            model.zero_grad()
            cross_entropy(model(x), y).backward()

    guard.end_task(loader)  # later moments are averaged with those that are stored
    basis = guard._steps.state.basis
    axes = [a for a in (*basis.outputs.values(), *basis.inputs.values()) if not a.is_standard]
    moments = [axis.moment() for axis in axes]
    calls = {
        "end_task": lambda: guard.end_task(loader),
        "pass": one_pass,
        "eigh": lambda: [
            Axis.of(moment, axis.vectors) for axis, moment in zip(axes, moments, strict=True)
        ],
    }
    one_pass()
    # The processor's own time, where a GPU does not work beside it: other work counts little.
    clock = time.perf_counter if device == "cuda" else time.process_time
    seconds = in_turns(calls, rounds, device, idle=0, clock=clock)
    turns = list(zip(*seconds.values(), strict=True))
    return {
        "samples": len(inputs),
        **{f"{name}_s": statistics.median(taken) for name, taken in seconds.items()},
        "times_pass": [whole / once for whole, once, _ in turns],
        "without_eigh_times_pass": [(whole - eigh) / once for whole, once, eigh in turns],
        "times_floor": [whole / (once + eigh) for whole, once, eigh in turns],
    }


def fits(size: int, count: int, device: str) -> bool:
    """Whether the rows, their columns and a copy fit in memory."""
    needed = 3 * 4 * size * count
    if device == "cuda":
        return needed < torch.cuda.mem_get_info()[0]
    return needed < 14 * 2**30


def steps(device: str, repeats: int) -> list[dict]:
    """What steps cost, by model and number of directions."""
    print(f"{'model':20} {'params':>10} {'K':>5}  step ×      projection, × floor  columns ÷ ours")
    found = []
    for case in CASES:
        size = sum(p.numel() for p in case.model().parameters())
        for count in DIRECTIONS:
            if not fits(size, count, device):
                print(f"{case.name:20} {size:>10,} {count:>5}  needs more memory than there is")
                continue
            row = {"model": case.name, "parameters": size, "directions": count}
            row |= overhead(case, count, device, repeats)
            line = f"{case.name:20} {size:>10,} {count:>5}  {row['overhead']:5.2f}"
            if count:
                one = projection(size, count, device, repeats)
                row["projection"] = one
                line += f"  {1e3 * one['ours_s']:9.2f} ms, {one['times_floor']:5.2f}"
                line += f" of {one['passes']} pass{'es' if one['passes'] > 1 else '  '}"
                line += f"  {one['columns_over_ours']:5.2f}"
            print(line, flush=True)
            found.append(row)
    return found


def end_tasks(device: str, repeats: int) -> list[dict]:
    """What KronOGD's `end_task` costs, by model."""
    found = []
    real = (REAL,) if find_source("mnist") else ()
    for case in (*CASES, *real):
        row = {"model": case.name} | end_task(case, device, repeats)
        whole, rest, floor = (
            statistics.median(row[name])
            for name in ("times_pass", "without_eigh_times_pass", "times_floor")
        )
        print(
            f"{case.name:20} {row['samples']:>5} samples: end_task {row['end_task_s']:.2f} s, "
            f"{whole:.2f} passes, {rest:.2f} without eigenvectors, {floor:.2f} × floor",
            flush=True,
        )
        found.append(row)
    return found


def method_steps(device: str, repeats: int) -> list[dict]:
    """What a step costs with methods whose memory does not grow, by model."""
    found = []
    for case in CASES:
        for method in METHODS:
            row = {"model": case.name, "method": method.label}
            row |= overhead(case, 0, device, repeats, method)
            print(f"{case.name:20} {method.label:8} step × {row['overhead']:.2f}", flush=True)
            found.append(row)
    return found


MEASURES = {"guard": steps, "end-task": end_tasks, "methods": method_steps}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, help="default: torch's own choice")
    parser.add_argument("--only", choices=tuple(MEASURES), help="of the files of results")
    parser.add_argument("--out", action="store_true", help="write the results as JSON")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    print(f"{options.device}, {torch.get_num_threads()} threads")
    for name, measure in MEASURES.items():
        if options.only in (None, name):
            setting = {
                "device": options.device,
                "threads": torch.get_num_threads(),
                "versions": versions(torch.device(options.device)),
            }
            cases = measure(options.device, options.repeats)
            if options.out:
                OUT.mkdir(parents=True, exist_ok=True)
                path = OUT / f"{name}-{options.device}.json"
                path.write_text(json.dumps({**setting, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
