"""Jobs on a Ray cluster: as many at a time as there is room, retried elsewhere if a node dies."""

import contextlib
import os
import socket
import time
import warnings
from collections.abc import Generator, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any, final

import torch

from forgetless.launch.engines.jobs import Job, Outcome, Watch
from forgetless.launch.engines.processes import STOPPED, Attempts, JobVerdict, Message, attempt
from forgetless.support.validation import ConfigError, ForgetlessWarning, first_line, require
from forgetless.training.settings import Progress

_POLL_EVERY = 0.25  # seconds
_GRACE = 30.0  # seconds in which stopped jobs may save
_ANSWER = 10.0  # seconds in which a cluster must answer
# The number of an attempt at a job, where that runs, and a message; None when it begins.
_Said = tuple[int, str, Message | None]


@final
class Cluster:
    """Executes jobs on a Ray cluster.

    A job takes one processor and computes with one thread; on GPUs it takes a share of one.

    Arguments:
        address: of the cluster; by default that of RAY_ADDRESS, or a new one on this machine.
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
        """How many jobs it has room for; at least two, since nodes may join."""
        has = self._ray.cluster_resources()
        return max(2, int(has.get("GPU", 0) * self._per_gpu or has.get("CPU", 1)))

    def device(self, name: str) -> torch.device:
        """The device of a job, on whichever node it will be."""
        if name == "auto":
            return torch.device("cuda" if self._ray.cluster_resources().get("GPU") else "cpu")
        try:
            return torch.device(name)
        except RuntimeError as error:
            raise ConfigError(f"device {name!r} cannot be used: there is no such device") from error

    def execute(self, jobs: Sequence[Job], watch: Watch) -> Generator[Outcome]:
        attempts = Attempts(jobs, watch, self.workers)
        mailbox = self._open_mailbox()
        running: dict[Any, tuple[int, Job]] = {}  # future result → number, job
        places: dict[int, str] = {}
        count = 0
        try:
            while attempts.waiting or running:
                while attempts.waiting:
                    job, count = attempts.next(), count + 1
                    running[self._begin(job, count, mailbox)] = count, job
                over, _ = self._ray.wait(list(running), timeout=_POLL_EVERY)
                numbers = dict(running.values())
                for number, place, message in self._ray.get(mailbox.collect.remote()):
                    _pass_on(numbers.get(number), number, place, message, places, attempts)
                for result in over:
                    number, job = running.pop(result)
                    place = places.get(number, "the cluster")
                    outcome = attempts.over(job, place, self._verdict(result))
                    if outcome is not None:
                        yield outcome
        finally:
            self._stop(list(running))
            self._ray.kill(mailbox)

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        if self._started and self._ray.is_initialized():
            self._ray.shutdown()

    def _connect(self, address: str) -> None:
        # Nobody who trains a network expects that to be reported.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        own = {"include_dashboard": False} if address == "local" else {}
        try:
            _knock(address)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about future versions of Ray
                self._ray.init(address=address, log_to_driver=False, logging_level="ERROR", **own)
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            reason = getattr(error, "strerror", None) or first_line(error)
            raise ConfigError(f"no Ray cluster can be used at {address}: {reason}") from error

    def _open_mailbox(self) -> Any:
        """The mailbox of all jobs, on this node: it dies only if we do."""
        affinity = import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        here = affinity(self._ray.get_runtime_context().get_node_id(), soft=False)
        return self._ray.remote(_Mailbox).options(num_cpus=0, scheduling_strategy=here).remote()

    def _begin(self, job: Job, number: int, mailbox: Any) -> Any:
        on_gpu = self.device(job.order.config.device).type == "cuda"
        needs = {"num_cpus": 1, "num_gpus": 1 / self._per_gpu if on_gpu else 0}
        # The working directory may differ on another machine.
        order = job.order
        data = None if order.data is None else order.data.resolve()
        order = replace(order, folder=order.folder.resolve(), data=data)
        job = replace(job, order=order, folder=job.folder.resolve())
        # Not retried by Ray: the next attempt must know to resume from the checkpoint of this one.
        task = self._ray.remote(_work).options(max_retries=0, **needs)
        return task.remote(job, number, mailbox)

    def _verdict(self, result: Any) -> JobVerdict:
        errors = self._ray.exceptions
        try:
            verdict: JobVerdict = self._ray.get(result)
            return verdict
        except errors.RayTaskError:
            raise  # a mistake in the program
        except errors.RayError:
            return STOPPED  # its process or its node is gone

    def _stop(self, running: list[Any]) -> None:
        """End all jobs; those under way save first, unless that takes too long."""
        if not running or not self._ray.is_initialized():
            return
        with contextlib.suppress(self._ray.exceptions.RayError):
            for result in running:
                self._ray.cancel(result)
            until = time.monotonic() + _GRACE
            while running and time.monotonic() < until:
                _, running = self._ray.wait(running, num_returns=len(running), timeout=_POLL_EVERY)
            for result in running:
                self._ray.cancel(result, force=True)


def _knock(address: str) -> None:
    """Check that HOST:PORT answers; Ray by itself tries for more than half a minute."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        with socket.create_connection((host.strip("[]"), int(port)), _ANSWER):
            pass


def _pass_on(
    job: Job | None,
    number: int,
    place: str,
    message: Message | None,
    places: dict[int, str],
    attempts: Attempts,
) -> None:
    """Pass on a message of a job, unless that was given up in the meantime."""
    if job is None:
        return
    if places.setdefault(number, place) and message is None:
        attempts.begun(job, place)
    elif isinstance(message, Progress):
        attempts.progress(job, place, message)
    elif message is not None:
        warnings.warn(f"{job.name}: {message}", ForgetlessWarning, stacklevel=2)


class _Mailbox:
    """The messages of all jobs that were not collected yet."""

    def __init__(self) -> None:
        self._messages: list[_Said] = []

    def put(self, message: _Said) -> None:
        self._messages.append(message)

    def collect(self) -> list[_Said]:
        messages, self._messages = self._messages, []
        return messages


def _work(job: Job, number: int, mailbox: Any) -> JobVerdict:
    """Execute a job in a process of the cluster."""
    torch.set_num_threads(1)
    place = f"{socket.gethostname()} {os.getpid()}"

    def say(message: Message | None) -> None:
        mailbox.put.remote((number, place, message))

    say(None)
    return attempt(job, say)


def _package() -> Any:
    try:
        return import_module("ray")
    except ImportError as error:
        raise ConfigError("--engine ray needs Ray: pip install 'forgetless[ray]'") from error
