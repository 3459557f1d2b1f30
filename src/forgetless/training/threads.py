"""The number of threads of a run on a CPU: few where there is little work for each.

Small products take longer to hand out than to compute, and on a busy machine threads wait for each
other a thousand times longer than they work.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from threadpoolctl import ThreadpoolController

from forgetless.data import Scenario
from forgetless.methods import Method
from forgetless.support.options import whole
from forgetless.training.network import Network
from forgetless.training.settings import Training

VARIABLE = "FORGETLESS_THREADS"
_WORK = 2e7  # multiply-adds for which a thread is worth its while: about a millisecond
_EIGEN = 20  # dense decompositions hand out a share of their n³ only


@final
class Threads:
    """Threads for each part of a run, at most as many as torch has when it is made.

    Arguments:
        device: where the run trains; on a GPU nothing is limited.
        given: a number for all parts; by default the environment's FORGETLESS_THREADS, or else by
            the amount of work.
    """

    def __init__(self, device: torch.device, given: int | None = None) -> None:
        text = os.environ.get(VARIABLE, "")
        name = "threads" if given is not None else VARIABLE
        number: Any = given if given is not None else int(text) if text.isdecimal() else text
        if number != "":
            whole(1).check(name, number)
        self._most = torch.get_num_threads()
        self._given = None if number == "" else int(number)
        self._limits = device.type == "cpu"
        self._counts: dict[str, int] = {}
        self._libraries = ThreadpoolController()  # SciPy has a BLAS of its own

    def plan(
        self, network: Network, method: Method[Any], scenario: Scenario, training: Training
    ) -> None:
        """Count the work of each part for a group of seeds."""
        if not self._limits:
            return
        samples = len(scenario.task(0, (0,)).train)
        demand = method.demand(samples)
        rows = demand.directions * (scenario.n_tasks - 1) if demand is not None else 0
        # A method that asks for the model does about as much again on samples of its own.
        gradients = 3 * network.work * training.batch_size * (4 if method.needs_model else 1)
        work = {
            "training": network.seeds * (gradients + 2 * rows * network.protected_size),
            "consolidation": demand.samples**3 / _EIGEN if demand is not None else gradients,
            "evaluation": network.seeds * network.work * samples,
        }
        self._counts = {part: max(1, int(w / _WORK)) for part, w in work.items()}

    def count(self, part: str = "") -> int:
        """The number of threads of a part; the least of all parts by default."""
        if not self._limits:
            return self._most
        return self._given or min(self._most, self._counts.get(part, 1))

    @contextmanager
    def use(self, part: str = "") -> Iterator[None]:
        """That number in the block, the previous one after it."""
        before, count = torch.get_num_threads(), self.count(part)
        if count != before:
            torch.set_num_threads(count)
        try:
            with self._libraries.limit(limits=count if self._limits else None, user_api="blas"):
                yield
        finally:
            if torch.get_num_threads() != before:
                torch.set_num_threads(before)
