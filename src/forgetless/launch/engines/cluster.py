"""Jobs on a Ray cluster: as many at a time as it has room for, again elsewhere if a node dies."""

import contextlib
import os
import socket
import time
import warnings
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, final

import torch

from forgetless.launch.engines import worker
from forgetless.launch.engines.attempts import Attempts
from forgetless.launch.engines.job import Job, Outcome, Watch
from forgetless.support.errors import ConfigError, ForgetlessWarning, require
from forgetless.training.settings import Progress

_LOOK_EVERY = 0.25  # seconds
_GRACE = 30.0  # seconds that jobs have to save when they are told to stop
_ANSWER = 10.0  # seconds in which a cluster answers
# What a job says: which one and which attempt at it, where it is, and a message if it has one.
_Said = tuple[int, str, worker.Message | None]


@final
class Cluster:
    """Jobs on a Ray cluster.

    A job takes one processor, and computes with one thread; on GPUs it takes a part of one.

    Arguments:
        address: of the cluster; None starts one on this machine, or takes that of RAY_ADDRESS.
        per_gpu: how many jobs share a GPU.
    """

    divides = True

    def __init__(self, address: str | None = None, per_gpu: int = 1) -> None:
        require(per_gpu >= 1, "--jobs", per_gpu, "a number of jobs at a time, at least 1")
        self._per_gpu = per_gpu
        self._ray = _package()
        self._started = not self._ray.is_initialized()
        if self._started:
            self._connect(address or os.environ.get("RAY_ADDRESS") or "local")

    @property
    def workers(self) -> int:
        """How many jobs it has room for; at least two, since others may join it."""
        has = self._ray.cluster_resources()
        return max(2, int(has.get("GPU", 0) * self._per_gpu or has.get("CPU", 1)))

    def device(self, name: str) -> torch.device:
        """What a job's device is, on whichever node it will be."""
        if name == "auto":
            return torch.device("cuda" if self._ray.cluster_resources().get("GPU") else "cpu")
        try:
            return torch.device(name)
        except RuntimeError as error:
            raise ConfigError(f"device {name!r} cannot be used: no device is called so") from error

    def carry_out(self, jobs: Sequence[Job], watch: Watch) -> Generator[Outcome]:
        attempts = Attempts(jobs, watch, self.workers)
        ears = self._ears()
        running: dict[Any, tuple[int, Job]] = {}  # what stands for its result → number, job
        places: dict[int, str] = {}
        count = 0
        try:
            while attempts.waiting or running:
                while attempts.waiting:
                    job, count = attempts.next(), count + 1
                    running[self._begin(job, count, ears)] = count, job
                over, _ = self._ray.wait(list(running), timeout=_LOOK_EVERY)
                numbers = dict(running.values())
                for number, place, message in self._ray.get(ears.heard.remote()):
                    _pass_on(numbers.get(number), number, place, message, places, attempts)
                for result in over:
                    number, job = running.pop(result)
                    place = places.get(number, "the cluster")
                    outcome = attempts.over(job, place, self._verdict(result))
                    if outcome is not None:
                        yield outcome
        finally:
            self._stop(list(running))
            self._ray.kill(ears)

    def close(self) -> None:
        """Leave the cluster, and end it if it was started here."""
        if self._started and self._ray.is_initialized():
            self._ray.shutdown()

    def _connect(self, address: str) -> None:
        # Nobody who trains a network expects that to be reported somewhere.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        own = {"include_dashboard": False} if address == "local" else {}
        try:
            _knock(address)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what Ray will do in versions to come
                self._ray.init(address=address, log_to_driver=False, logging_level="ERROR", **own)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            words = getattr(error, "strerror", None) or str(error)
            reason = words.splitlines()[0] if words else type(error).__name__
            raise ConfigError(f"no Ray cluster can be used at {address}: {reason}") from error

    def _ears(self) -> Any:
        """What hears the jobs, on this node: if that dies, so do we."""
        affinity = import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        here = affinity(self._ray.get_runtime_context().get_node_id(), soft=False)
        return self._ray.remote(_Ears).options(num_cpus=0, scheduling_strategy=here).remote()

    def _begin(self, job: Job, number: int, ears: Any) -> Any:
        on_gpu = self.device(job.order.config.device).type == "cuda"
        needs = {"num_cpus": 1, "num_gpus": 1 / self._per_gpu if on_gpu else 0}
        # On another machine the folder this one is in may be another.
        order = job.order
        data = None if order.data is None else order.data.resolve()
        order = replace(order, folder=order.folder.resolve(), data=data)
        job = replace(job, order=order, folder=job.folder.resolve())
        # Attempts are counted here, where a new one can be told to go on from the last one's.
        task = self._ray.remote(_work).options(max_retries=0, **needs)
        return task.remote(job, number, ears)

    def _verdict(self, result: Any) -> worker.Verdict:
        errors = self._ray.exceptions
        try:
            verdict: worker.Verdict = self._ray.get(result)
            return verdict
        except errors.RayTaskError:
            raise  # a mistake in the program
        except errors.RayError:
            return worker.STOPPED  # its process or its node is gone

    def _stop(self, running: list[Any]) -> None:
        """Tell all jobs to end; those under way save first, if that does not take too long."""
        if not running or not self._ray.is_initialized():
            return
        with contextlib.suppress(self._ray.exceptions.RayError):
            for result in running:
                self._ray.cancel(result)
            until = time.monotonic() + _GRACE
            while running and time.monotonic() < until:
                _, running = self._ray.wait(running, num_returns=len(running), timeout=_LOOK_EVERY)
            for result in running:
                self._ray.cancel(result, force=True)


def _knock(address: str) -> None:
    """See that somebody answers at HOST:PORT; Ray by itself tries for more than half a minute."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        with socket.create_connection((host.strip("[]"), int(port)), _ANSWER):
            pass


def _pass_on(
    job: Job | None,
    number: int,
    place: str,
    message: worker.Message | None,
    places: dict[int, str],
    attempts: Attempts,
) -> None:
    """Tell of what a job said; one that was given up in the meantime is not listened to."""
    if job is None:
        return
    if places.setdefault(number, place) and message is None:
        attempts.begun(job, place)
    elif isinstance(message, Progress):
        attempts.progress(job, place, message)
    elif message is not None:
        warnings.warn(f"{job.name}: {message}", ForgetlessWarning, stacklevel=2)


class _Ears:
    """Collects what jobs say until they are asked for."""

    def __init__(self) -> None:
        self._said: list[_Said] = []

    def hear(self, said: _Said) -> None:
        self._said.append(said)

    def heard(self) -> list[_Said]:
        said, self._said = self._said, []
        return said


def _work(job: Job, number: int, ears: Any) -> worker.Verdict:
    """Carry out a job in a process of the cluster."""
    torch.set_num_threads(1)
    place = f"{socket.gethostname()} {os.getpid()}"
    say: Callable[[worker.Message | None], None] = lambda said: ears.hear.remote(  # noqa: E731
        (number, place, said)
    )
    say(None)
    return worker.attempt(job, say)


def _package() -> Any:
    try:
        return import_module("ray")
    except ImportError as error:
        raise ConfigError("--engine ray needs Ray: pip install 'forgetless[ray]'") from error
