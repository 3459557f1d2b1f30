"""Workers and nodes that are killed at random moments, and how many runs come out another way."""

import contextlib
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forgetless.launch.engines import Cluster, Engine, Event, Order, Processes

from .problems import assert_alike, order, trained

ROOT = Path(__file__).parents[3]
# Seconds of training, so that there is time to be killed in.
LONG = {"tasks": 8, "epochs": 12}
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "OMP_NUM_THREADS": "1",
    # A node that is gone is noticed in seconds.
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "500",
    "RAY_health_check_failure_threshold": "4",
}
NODE = {"num_cpus": 1, "object_store_memory": 100 * 2**20}


@contextmanager
def ray_nodes(count: int, environment: Mapping[str, str] | None = None) -> Iterator[Any]:
    """A Ray cluster on this machine: a head without processors, and nodes with one each.

    Arguments:
        environment: further variables of the workers.
    """
    import ray
    from ray.cluster_utils import Cluster as Nodes

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, **(environment or {})}.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, sys.path)]))
        head = {**NODE, "num_cpus": 0, "include_dashboard": False}
        nodes = Nodes(initialize_head=True, head_node_args=head)
        for _ in range(count):
            nodes.add_node(**NODE)
        connect(nodes)
        try:
            yield nodes
        finally:
            ray.shutdown()
            nodes.shutdown()


def connect(nodes: Any) -> None:
    """Make the cluster the one of this process."""
    import ray

    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")


def node_of(nodes: Any, worker: str) -> Any:
    """The node that a worker's process belongs to."""
    pid = int(worker.split()[1])
    while pid > 1:
        for node in nodes.worker_nodes:
            raylets = node.all_processes.get("raylet", [])
            if any(info.process.pid == pid for info in raylets):
                return node
        pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    raise AssertionError(f"{worker} is on no node")


def killed_workers(folder: Path, kills: int, seed: int) -> dict[str, int]:
    """Kill that many worker processes of `--jobs`, each at a random moment of a run."""

    def kill(event: Event) -> None:
        os.kill(random.choice(multiprocessing.active_children()).pid, signal.SIGKILL)  # type: ignore[arg-type]

    return _repeated(folder, Processes(2), kills, seed, kill)


def killed_nodes(folder: Path, kills: int, seed: int) -> dict[str, int]:
    """Kill that many nodes of a Ray cluster, each at a random moment of a run."""
    with ray_nodes(2) as nodes:

        def kill(event: Event) -> None:
            nodes.remove_node(node_of(nodes, event.worker), allow_graceful=False)
            nodes.add_node(**NODE)  # for the next time

        return _repeated(folder, Cluster(), kills, seed, kill)


def _repeated(
    folder: Path, engine: Engine, kills: int, seed: int, kill: Callable[[Event], None]
) -> dict[str, int]:
    chance, found = random.Random(seed), {"injected": 0, "survived": 0, "lost": 0}
    wanted = order(folder / "expected", **LONG)
    assert trained([wanted]) == {"expected": None}
    for n in range(4 * kills):  # some are over before the moment has come
        if found["injected"] == kills:
            break
        here = folder / f"{n}" / "here"
        run = replace(wanted, folder=here, shared=f"file://{folder}/{n}/shared")
        fell, error = _run(run, engine, chance.uniform(0, 2), kill)
        if not fell:
            continue
        found["injected"] += 1
        try:
            assert error is None
            assert_alike(here, wanted.folder)
            found["survived"] += 1
        except AssertionError:
            found["lost"] += 1
    return found


def _run(
    run: Order, engine: Engine, delay: float, kill: Callable[[Event], None]
) -> tuple[bool, Any]:
    """Train a run, and kill once when it has gone on for a while; whether that came to be."""
    fell: list[Event] = []
    moment: list[threading.Timer] = []
    due = threading.Event()

    def watch(event: Event) -> None:
        if event.progress is not None and not moment:
            moment.append(threading.Timer(delay, due.set))
            moment[0].start()
        if event.progress is not None and due.is_set() and not fell:
            with contextlib.suppress(AssertionError, FileNotFoundError, IndexError):
                kill(event)
                fell.append(event)

    (error,) = trained([run], engine, watch).values()
    if moment:
        moment[0].cancel()
    return bool(fell), error
