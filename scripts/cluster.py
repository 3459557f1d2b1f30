"""Many runs on a Ray cluster whose nodes die at random, and how long they take with more workers.

    python scripts/cluster.py [--runs 100] [--nodes 4] [--kills 20] [--out]

The cluster is of several nodes on this machine, with a processor each. Now and then one of them is
killed, with all of its processes, and another joins. Runs that are given up after three deaths are
resumed by the same command. Every trace is compared, bit for bit, with that of a single process.
The makespan with 1 to 16 workers is simulated: the seconds of the runs, each alone, are handed out
in the engine's order to whichever worker is free first.
"""

import argparse
import contextlib
import heapq
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from tests.launch.engines.kills import NODE, ray_nodes  # noqa: E402
from tests.launch.engines.problems import assert_alike, order, trained  # noqa: E402

from forgetless.launch.engines import Cluster, Event, Order  # noqa: E402
from forgetless.support.provenance import versions  # noqa: E402

OUT = ROOT / "results" / "faults" / "cluster.json"
METHODS = ("sgd", "ewc", "ogd", "a-gem", "pca-ogd")
WORKERS = (1, 2, 4, 8, 16)


def orders_of(folder: Path, runs: int) -> list[Order]:
    """Runs of several methods and lengths."""
    return [
        replace(
            order(
                folder / f"run-{n:03d}",
                METHODS[n % len(METHODS)],
                seeds="1",
                tasks=3 + n % 4,
                lr=0.01 * (1 + n),
                epochs=8,
            ),
            checkpoint_every=0.01,
        )
        for n in range(runs)
    ]


def alone(folder: Path, runs: int) -> list[float]:
    """The seconds of each run in a single process."""
    found = []
    for one in orders_of(folder, runs):
        start = time.perf_counter()
        (error,) = trained([one]).values()
        assert error is None, error
        found.append(time.perf_counter() - start)
    return found


class Killer:
    """Kills a node now and then while runs are under way.

    Arguments:
        nodes: the cluster.
        kills: how many in all.
        every: seconds between two, on average.
    """

    def __init__(self, nodes: Any, kills: int, every: float) -> None:
        self.kinds: Counter[str] = Counter()
        self.killed = 0
        self._nodes, self._left, self._every = nodes, kills, every
        self._chance = random.Random(0)
        self._next: float | None = None

    def __call__(self, event: Event) -> None:
        """Watch the runs."""
        self.kinds[event.kind] += event.kind != "progress"
        now = time.monotonic()
        if self._next is None and event.kind == "progress":
            self._next = now + self._wait()
        if self._next is not None and now >= self._next and self._left:
            with contextlib.suppress(FileNotFoundError, IndexError):
                node = self._chance.choice([*self._nodes.worker_nodes])
                self._nodes.remove_node(node, allow_graceful=False)
                self._nodes.add_node(**NODE)
                self.killed += 1
                self._left -= 1
            self._next = time.monotonic() + self._wait()

    def _wait(self) -> float:
        return self._chance.expovariate(1 / self._every)


def on_a_cluster(
    folder: Path, expected: Path, runs: int, count: int, kills: int, every: float
) -> dict[str, Any]:
    """The runs on a cluster whose nodes die."""
    wanted = [
        replace(one, shared=f"file://{folder}/shared/{one.folder.name}")
        for one in orders_of(folder / "here", runs)
    ]
    commands = given_up = 0
    start = time.perf_counter()
    with ray_nodes(count) as nodes:
        killer = Killer(nodes, kills, every)
        left = wanted
        while left and commands < 10:
            commands += 1
            errors = trained(left, Cluster(), killer)
            left = [one for one in left if errors[one.folder.name] is not None]
            given_up += len(left)
    seconds = time.perf_counter() - start
    lost = len(left)
    for one in wanted:
        try:
            for there in (one.folder, folder / "shared" / one.folder.name):
                assert_alike(there, expected / one.folder.name)
        except (AssertionError, OSError):
            lost += one not in left
    return {
        "nodes": count,
        "killed": killer.killed,
        "retried": killer.kinds["retried"],
        "given_up": given_up,
        "commands": commands,
        "lost": lost,
        "seconds": seconds,
    }


def makespan(seconds: Sequence[float], workers: int) -> float:
    """When the last of these jobs ends, each begun in turn by the first worker that is free."""
    free = [0.0] * workers
    for taken in seconds:
        heapq.heappush(free, heapq.heappop(free) + taken)
    return max(free)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--every", type=float, default=8.0, help="seconds between two kills")
    parser.add_argument("--out", action="store_true", help="write results/faults/cluster.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        alone(folder / "first", 1)  # which imports what the others have
        seconds = alone(folder / "alone", options.runs)
        found = {"runs": options.runs, "alone_seconds": sum(seconds), "longest": max(seconds)}
        found |= on_a_cluster(
            folder, folder / "alone", options.runs, options.nodes, options.kills, options.every
        )
    found["makespan"] = {str(workers): makespan(seconds, workers) for workers in WORKERS}
    found["versions"] = versions(torch.device("cpu"))
    print(json.dumps(found, indent=1))
    if options.out:
        OUT.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
