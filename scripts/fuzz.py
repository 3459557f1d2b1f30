"""Feed every reader of files with corrupt ones, 100,000 or more: only clean errors are allowed.

    python scripts/fuzz.py --inputs 110000 --out results/faults/fuzz.json

Each reader gets random bytes, valid files with bytes changed, cut or added, and files with a valid
container (checksums, JSON, safetensors) and wrong contents. Records how many were accepted and
rejected, and the memory of the process before, at its peak and after.
"""

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import pytest  # noqa: E402
from tests.faults.problems import Plug  # noqa: E402
from tests.faults.readers import Reader, all_readers, inputs  # noqa: E402


def memory_kib(field: str) -> int:
    """VmRSS or VmHWM of this process, in KiB (Linux)."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    return 0


def fuzz(reader: Reader, count: int, start: int) -> dict[str, Any]:
    """Feed a reader with so many inputs; errors other than clean ones are raised."""
    accepted = refused = 0
    if not reader.survives(reader.sound):
        raise AssertionError("the valid example is rejected")

    @seed(start)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs(reader))
    def feed(content: bytes) -> None:
        nonlocal accepted, refused
        if reader.survives(content):
            accepted += 1
        else:
            refused += 1

    started = time.perf_counter()
    before = memory_kib("VmRSS")
    feed()
    gc.collect()
    return {
        "inputs": accepted + refused,
        "accepted": accepted,
        "refused": refused,
        "crashes": 0,
        "rss_growth_mib": round((memory_kib("VmRSS") - before) / 1024, 1),
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=110_000)
    parser.add_argument("--rounds", type=int, default=4, help="each with another seed")
    parser.add_argument("--only", default="", help="readers whose names have this in them")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    record: dict[str, Any] = {"readers": {}}
    with pytest.MonkeyPatch.context() as patch, all_readers(Plug(patch)) as readers:
        chosen = {n: r for n, r in readers.items() if arguments.only in n}
        count = -(-arguments.inputs // (len(chosen) * arguments.rounds))
        record["rss_at_start_mib"] = round(memory_kib("VmRSS") / 1024, 1)
        for turn in range(arguments.rounds):
            for name, reader in chosen.items():
                found = fuzz(reader, count, turn)
                print(
                    f"{time.perf_counter() - started:6.0f} s  {turn}  {name}: {found}", flush=True
                )
                total = record["readers"].setdefault(name, dict.fromkeys(found, 0))
                record["readers"][name] = {k: round(total[k] + v, 1) for k, v in found.items()}
            record[f"rss_after_round_{turn + 1}_mib"] = round(memory_kib("VmRSS") / 1024, 1)
    record["inputs"] = sum(r["inputs"] for r in record["readers"].values())
    record["crashes"] = 0  # the first one would have raised
    record["rss_peak_mib"] = round(memory_kib("VmHWM") / 1024, 1)
    record["seconds"] = round(time.perf_counter() - started, 1)
    print(json.dumps(record, indent=1))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(record, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
