"""A guard on a transformer of 124 million parameters, on a GPU.

    python benchmarks/large.py [--tasks 1,2,3] [--rounds 6] [--out FILE]

GPT-2-small's shape, randomly initialised, batches of 8 × 512 tokens, bfloat16 autocast, AdamW. One
task is consolidated (64 directions of 64 sequences' likelihood); more tasks are timed with random
rows. Reported are the guard's share of a step, and its time against its floor: the bytes of the
rows, read twice because no cache holds a row, over the measured bandwidth. Then the same with only
LoRA adapters of rank 16 trained and protected. KronOGD comes first: its step, its `end_task`
against a forward and a backward pass of the same sequences, and the memory at the peak of each.
"""

import argparse
import gc
import json
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path

# Rows of a hundred gigabytes leave no room for gaps between blocks of memory.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
from torch import Tensor, nn
from torch.nn import functional

import forgetless
from forgetless.subspace.dense import aligned

OUT = Path("results/bench/large.json")
WIDTH, HEADS, LAYERS, VOCABULARY, CONTEXT = 768, 12, 12, 50257, 512
BATCH, DIRECTIONS = 8, 64
STEPS = 5  # in a row


class Layer(nn.Module):
    """Attention and a two-layer perceptron, with norms before each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attend, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(n, T, d) → (n, T, d)."""
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.attend(self.first(x)).split(WIDTH, -1)
        )
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).flatten(2))
        return x + self.narrow(functional.gelu(self.widen(self.second(x))))


class GPT(nn.Module):
    """Tokens (n, T) → logits (n, T, V); the head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(1024, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token at each position."""
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.tokens(tokens) + self.places(places)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Adapter(nn.Module):
    """A frozen linear layer plus a trained product of rank r."""

    def __init__(self, layer: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        """W x + B A x."""
        return self.layer(x) + self.up(self.down(x))


def with_adapters(model: GPT) -> GPT:
    """All weights frozen, adapters at every linear layer of the blocks."""
    model.requires_grad_(False)
    for layer in model.layers:
        for name in ("attend", "mix", "widen", "narrow"):
            setattr(layer, name, Adapter(getattr(layer, name)))
    return model


class Loop:
    """A training loop on random text."""

    def __init__(
        self, adapters: bool, storage: str, method: forgetless.Method | None = None
    ) -> None:
        torch.manual_seed(0)
        model = GPT()
        self.model = (with_adapters(model) if adapters else model).cuda()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.size = sum(p.numel() for p in trained)
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
        method = method or forgetless.PCAOGD(components=DIRECTIONS, samples=DIRECTIONS)
        self.guard = forgetless.Guard(
            self.model, self.optimizer, method, output="likelihood", storage=storage
        )
        self.text = torch.randint(0, VOCABULARY, (DIRECTIONS, CONTEXT), device="cuda")

    def step(self) -> None:
        """One step on eight sequences."""
        tokens = self.text[torch.randperm(len(self.text), device="cuda")[:BATCH]]
        with torch.autocast("cuda", torch.bfloat16):
            logits = self.model(tokens)
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def remember(self) -> float:
        """Consolidate a task; returns the seconds it takes."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.guard.end_task((self.text, self.text))
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def pretend(self, tasks: int) -> None:
        """Random directions, as many as so many tasks have."""
        guard, now = self.guard, self.guard._current()
        size, dtype = now.state.rows.shape[2], now.state.rows.dtype
        empty = replace(now, state=replace(now.state, rows=now.state.rows[:, :0].clone()))
        guard._set(empty)
        del now
        torch.cuda.empty_cache()
        rows = aligned(torch.empty(1, 0, size, dtype=dtype, device="cuda"), tasks * DIRECTIONS)
        for row in rows[0]:
            row.normal_().mul_(size**-0.5)
        guard._set(replace(empty, state=replace(empty.state, rows=rows)))

    def seconds(self, rounds: int) -> tuple[list[float], list[float]]:
        """Of a step without and with the guard, in turns: a host is faster at times than at others.

        Five steps in a row, as in training, where Python runs ahead.
        """
        now = self.guard._current()
        taken: tuple[list[float], list[float]] = ([], [])
        for number in range(rounds + 1):
            # A guard without a task leaves the steps alone.
            for times, followed in zip(taken, (replace(now, tasks=0), now), strict=True):
                self.guard._set(followed)
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(STEPS):
                    self.step()
                torch.cuda.synchronize()
                if number:
                    times.append((time.perf_counter() - start) / STEPS)
        return taken

    def one_pass(self) -> float:
        """Seconds of a forward and a backward pass of the task's sequences."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for tokens in self.text.split(BATCH):
            logits = self.model(tokens)
            functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
            ).backward()
        self.optimizer.zero_grad()
        torch.cuda.synchronize()
        return time.perf_counter() - start


def eigenbasis(rounds: int) -> dict:
    """KronOGD: `end_task` in turns with a pass, and the step with and without the guard."""
    loop = Loop(False, "dense", forgetless.KronOGD())
    for _ in range(STEPS):
        loop.step()
    peaks, seconds = {}, {"end_task": [], "pass": []}
    for number in range(3):
        for name, call in (("end_task", loop.remember), ("pass", loop.one_pass)):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            taken = call()
            peaks[f"{name}_peak_bytes"] = torch.cuda.max_memory_allocated() - before
            if number:  # the first call compiles and allocates
                seconds[name].append(taken)
    plain, guarded = loop.seconds(rounds)
    middle = {name: statistics.median(taken) for name, taken in seconds.items()}
    row = {
        "method": "KronOGD",
        "parameters": loop.size,
        "sequences": len(loop.text),
        "bytes": loop.guard.memory_report().bytes,
        "end_task_s": middle["end_task"],
        "pass_s": middle["pass"],
        "end_task_over_pass": middle["end_task"] / middle["pass"],
        **peaks,
        "plain_s": statistics.median(plain),
        "guarded_s": statistics.median(guarded),
        "step_over_plain": statistics.median(guarded) / statistics.median(plain),
    }
    print(
        f"KronOGD: end_task {row['end_task_s']:.1f} s, {row['end_task_over_pass']:.2f} passes; "
        f"step {1e3 * row['plain_s']:.1f} → {1e3 * row['guarded_s']:.1f} ms, "
        f"{row['step_over_plain']:.2f} times; {row['bytes'] / 1e9:.2f} GB kept",
        flush=True,
    )
    return row


def bandwidth() -> float:
    """Bytes a second at which a large array is read."""
    values = torch.ones(1 << 30, device="cuda")
    best = float("inf")
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        values.sum()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return values.nbytes / best


def measured(
    adapters: bool, storage: str, tasks: list[int], rounds: int, rate: float
) -> list[dict]:
    """The guard's part of a step after some numbers of tasks."""
    loop = Loop(adapters, storage)
    remembering = loop.remember()
    kind = "adapters" if adapters else "all weights"
    print(f"{kind}, {loop.size / 1e6:.1f}M parameters, {storage}: {remembering:.1f} s to remember")
    found = []
    for count in tasks:
        if count > 1:
            loop.pretend(count)
        plain, guarded = loop.seconds(rounds)
        item = 4 if storage == "dense" else 2
        floor = 2 * count * DIRECTIONS * loop.size * item / rate
        before, after = statistics.median(plain), statistics.median(guarded)
        row = {
            "protected": kind,
            "parameters": loop.size,
            "storage": storage,
            "tasks": count,
            "remember_s": remembering,
            "plain_s": before,
            "guarded_s": after,
            "share_of_step": (after - before) / after,
            "overhead_over_plain": after / before - 1,
            "floor_s": floor,
            "times_floor": (after - before) / floor,
            "spread_s": [min(guarded), max(guarded)],
        }
        print(
            f"  {count} tasks: step {1e3 * before:.1f} → {1e3 * after:.1f} ms, guard "
            f"{row['overhead_over_plain']:+.1%}, {row['times_floor']:.2f} of its floor",
            flush=True,
        )
        found.append(row)
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", default="1,2,3")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path, default=None, help="file for the results, JSON")
    options = parser.parse_args()
    rate = bandwidth()
    print(f"{torch.cuda.get_device_name()}, reads {rate / 1e9:.0f} GB/s")
    tasks = [int(t) for t in options.tasks.split(",")]
    kron = eigenbasis(options.rounds)
    gc.collect()
    torch.cuda.empty_cache()
    found = []
    for adapters, storage, counts in (
        (False, "dense", tasks),
        (False, "bfloat16", [1, 2, 4, 6, 8]),
        (True, "dense", [1, 2, 4, 8]),
    ):
        try:
            found += measured(adapters, storage, counts, options.rounds, rate)
        except torch.OutOfMemoryError as error:
            print(f"  out of memory: {str(error).splitlines()[0]}")
        gc.collect()  # a guard and its optimizer know each other
        torch.cuda.empty_cache()
        if options.out is not None:
            setting = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
            result = {**setting, "read_bytes_per_s": rate, "eigenbasis": kron, "cases": found}
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
