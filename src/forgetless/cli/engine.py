"""The options that say where runs are trained."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Annotated

import typer

from forgetless.launch.engines import Cluster, Engine, InProcess, Processes
from forgetless.support.errors import ConfigError, require

ENGINES = ("local", "ray")

EngineName = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="|".join(ENGINES),
        help="Where runs are trained: on this machine, or on a Ray cluster.",
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        help="Of the Ray cluster, such as 10.0.0.1:6379; by default RAY_ADDRESS, or else a cluster "
        "of this machine alone.",
    ),
]
Jobs = Annotated[
    int,
    typer.Option(
        "--jobs",
        metavar="N",
        help="How many runs, or groups of a run's seeds, are trained at a time, each in a process "
        "of its own with its part of the processor's threads. With ray: how many share a GPU; "
        "without GPUs a job takes one processor.",
    ),
]


@contextmanager
def engine_for(name: str, address: str | None, jobs: int) -> Iterator[Engine]:
    """The engine that the options ask for."""
    require(name in ENGINES, "--engine", name, " or ".join(ENGINES))
    require(jobs >= 1, "--jobs", jobs, "a number of jobs at a time, at least 1")
    if name == "ray":
        with closing(Cluster(address, jobs)) as cluster:
            yield cluster
        return
    if address is not None:
        raise ConfigError(f"--address {address} is of a Ray cluster; add --engine ray")
    yield InProcess() if jobs == 1 else Processes(jobs)
