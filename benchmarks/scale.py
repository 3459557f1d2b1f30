"""Communication of a guard of a sharded model, measured, and predicted for large models.

    python benchmarks/scale.py [--out]

Two and four processes (gloo, on this machine) train a small transformer sharded by `fully_shard`,
and one in `DistributedDataParallel`; the guard counts its own collectives. The table for models of
1, 7 and 70 billion parameters is computed from the constants in results/bench/large.json, measured
on one H200, and from the assumptions below.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import forgetless

FOLDER = Path(__file__).parent.parent / "results" / "bench"
DIRECTIONS, SAMPLES, CLASSES, WORDS, WIDTH = 64, 64, 4, 50, 32

# Assumptions, not measurements.
LINK = 50e9  # bytes/s to and from a GPU: 400 Gb/s
HOP = 10e-6  # seconds of one message of an all-reduce, which takes 2 log2(R) of them
GPU_BYTES = 141e9
TRAINING = 16  # bytes a parameter: float32 weights, gradients and Adam's two moments


class Classifier(nn.Module):
    """Tokens to classes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, T) → (n, C)."""
        return self.head(self.block(self.tokens(x)).mean(1))


def count(rank: int, size: int, folder: str) -> None:
    """One process: the communication of the guard for one consolidation and one step."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(WORDS, (SAMPLES, 8), generator=generator)
    y = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    found = []
    for wrap in ("fully_shard", "DistributedDataParallel"):
        torch.manual_seed(0)
        model: nn.Module = Classifier()
        parameters = sum(p.numel() for p in model.parameters())
        if wrap == "fully_shard":
            for layer in model.children():
                fully_shard(layer)
            fully_shard(model)
        else:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters())
        guard = forgetless.Guard(model, optimizer, forgetless.PCAOGD(DIRECTIONS, SAMPLES))
        ranks = guard.ranks
        assert ranks is not None
        for tasks in (1, 2):
            before = ranks.calls, ranks.bytes
            guard.end_task((x, (y + tasks) % CLASSES))
            remembered = ranks.calls - before[0], ranks.bytes - before[1]
            nn.functional.cross_entropy(model(x), y).backward()
            before = ranks.calls, ranks.bytes
            optimizer.step()
            found.append(
                {
                    "wrap": wrap,
                    "processes": size,
                    "parameters": parameters,
                    "tasks": tasks,
                    "directions": guard.memory_report().directions,
                    "step_calls": ranks.calls - before[0],
                    "step_bytes": ranks.bytes - before[1],
                    "end_task_calls": remembered[0],
                    "end_task_bytes": remembered[1],
                    "rows_here_bytes": guard.memory_report().bytes,
                }
            )
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measured() -> list[dict[str, Any]]:
    """Communication with two and with four processes."""
    found = []
    for size in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(count, (size, folder), nprocs=size)
            found += json.loads((Path(folder) / "found.json").read_text())
    return found


def worked(constants: dict[str, Any]) -> list[dict[str, Any]]:
    """Memory, traffic and time of the guard of a sharded model, a task of 64 directions."""
    bandwidth = constants["read_bytes_per_s"]
    one_task = constants["cases"][0]
    # The noise of steps without the guard, which are subtracted, can leave less than the floor.
    times = max(1.0, one_task["times_floor"])
    rows = []
    for billions in (1, 7, 70):
        p = billions * 1e9
        for gpus in (1, 8, 64):
            mine = p / gpus
            others = (gpus - 1) / gpus
            stages = 2 * (gpus.bit_length() - 1)
            kept = 4 * DIRECTIONS * mine
            vectors = 3 * 4 * mine  # weights before the step, the step, what is removed
            reading = 2 * kept / bandwidth * times
            rows.append(
                {
                    "billions": billions,
                    "gpus": gpus,
                    "rows_bytes": kept,
                    "training_bytes": TRAINING * mine,
                    "fits": kept + vectors + TRAINING * mine <= GPU_BYTES,
                    "fits_bfloat16": kept / 2 + vectors + TRAINING * mine <= GPU_BYTES,
                    "step_bytes": 4 * DIRECTIONS if gpus > 1 else 0,
                    "sharding_bytes": 3 * 4 * p * others,
                    "step_s": reading + stages * HOP,
                    "sharding_s": 3 * 4 * p * others / LINK,
                    "gathered_bytes": 4 * p,
                    "end_task_fits": 4 * p + kept + TRAINING * mine <= GPU_BYTES,
                    "gather_s": 4 * p * others / LINK,
                    "end_task_s": one_task["remember_s"] * p / one_task["parameters"],
                }
            )
    return rows


def page(rows: list[dict[str, Any]]) -> str:
    """The table of docs/scale.md."""
    lines = [
        "| parameters | GPUs | rows per GPU | fits next to training | guard sends per step | "
        "fully_shard sends | step longer by | end_task needs | end_task takes |",
        "| ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        fits = "yes" if row["fits"] else "in bfloat16" if row["fits_bfloat16"] else "no"
        holds = f"{row['gathered_bytes'] / 1e9:,.0f} GB"
        holds += "" if row["end_task_fits"] else ", does not fit"
        lines.append(
            f"| {row['billions']}B | {row['gpus']} | {row['rows_bytes'] / 1e9:,.1f} GB | {fits} | "
            f"{row['step_bytes']} B | {row['sharding_bytes'] / 1e9:,.1f} GB, "
            f"{row['sharding_s']:.2f} s | {1e3 * row['step_s']:,.1f} ms | {holds} | "
            f"{row['gather_s'] + row['end_task_s']:,.0f} s |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", action="store_true", help="write results/bench/scale.json")
    arguments = parser.parse_args()
    constants = json.loads((FOLDER / "large.json").read_text("utf-8"))
    found = {"torch": torch.__version__, "measured": measured(), "worked": worked(constants)}
    for row in found["measured"]:
        print(row)
    print(page(found["worked"]))
    if arguments.out:
        (FOLDER / "scale.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
