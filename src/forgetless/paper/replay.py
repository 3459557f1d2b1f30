"""A finished run again, from its trace: its networks after each task, and what it remembered."""

from collections.abc import Iterator
from functools import partial
from typing import final

import torch
from torch import Tensor

from forgetless.data import Scenario
from forgetless.launch.config import Config
from forgetless.linalg import orthonormalize
from forgetless.methods import GEMNT, SGD, Samples
from forgetless.subspace import DenseSubspace, FactoredSubspace, Subspace
from forgetless.support.errors import TraceError
from forgetless.support.streams import stream
from forgetless.tangent import TangentFeatures, stored
from forgetless.trace import Trace
from forgetless.training.build import make_learner
from forgetless.training.models import build_model
from forgetless.training.view import batch_of, choose


@final
class Replay:
    """The networks of a run's seeds at the weights of any moment, and the method's memory.

    What a method remembers follows from the weights after each task and the seeds, so a trace need
    not hold it: `remember` makes it again, the same samples and directions.

    Arguments:
        config: the run's settings, perhaps with another method.
        scenario: its tasks.
        trace: with the weights after each task; None for networks that were never trained.
        device: where to work.
    """

    def __init__(
        self, config: Config, scenario: Scenario, trace: Trace | None, device: torch.device
    ) -> None:
        self.config = config
        self.scenario = scenario
        self.trace = trace
        self.seeds = config.seed_list()
        self._kept: list[Samples] = []  # GEM-NT's, task by task
        # All methods are looked at in the same parameters: those that the tasks share.
        method = config.build_method()
        self._gem_nt = method if isinstance(method, GEMNT) else None
        if self._gem_nt is not None:
            method = SGD()
        self.learner = make_learner(
            scenario,
            method,
            partial(build_model, config, scenario.input_shape, scenario.n_outputs),
            self.seeds,
            config,
            None,
            device,
        )
        self._draws = [stream(s, "remembered samples") for s in self.seeds]

    def at(self, task: int) -> None:
        """Go to the weights after a task, from 0."""
        if self.trace is None:
            raise TraceError("there is no trace to take the weights after a task from")
        for row, seed in enumerate(self.seeds):
            self.learner.network.load_state_dict(row, self.trace.weights(seed, task))

    def remember(self, task: int) -> None:
        """Let the method remember a task, at the present weights."""
        theta = self.learner.network.theta
        train = self.scenario.task(task, self.seeds).train.to(theta.device, theta.dtype)
        if self._gem_nt is None:
            self.learner.consolidate(train, task)
        else:
            index = choose(self._gem_nt.memory, len(train), self._draws).to(theta.device)
            self._kept.append(batch_of(train, index, task))

    def kept_bytes(self) -> int:
        """Bytes of what the method remembers for the first seed."""
        state = self.learner.state
        if self._gem_nt is not None:
            return sum(t.nbytes for samples in self._kept for t in samples.tensors(0).values())
        if isinstance(state, Subspace):
            return state.nbytes
        return sum(tensor.nbytes for tensor in state.tensors(0).values())

    def directions(self) -> Iterator[Tensor | None]:
        """What the method does not move along, as orthonormal rows (K, p), for each seed."""
        state = self.learner.state
        if self._gem_nt is not None and self._kept:
            network = self.learner.network
            size = network.protected_size
            network.module.eval()
            gradients = torch.stack([network.gradient(s)[:, :size] for s in self._kept], dim=1)
            yield from (orthonormalize(rows) for rows in gradients)
        elif isinstance(state, DenseSubspace) and state.rank:
            yield from state.rows
        elif isinstance(state, FactoredSubspace) and state.rank:
            # One seed's at a time: the rows of all of them may not fit into memory.
            yield from (atoms.basis() for atoms in state.atoms)
        else:
            yield from [None] * len(self.seeds)

    def samples(self, task: int, count: int, purpose: str) -> Samples:
        """A random choice of a task's training samples, the same for the same purpose."""
        theta = self.learner.network.theta
        train = self.scenario.task(task, self.seeds).train.to(theta.device, theta.dtype)
        generators = [stream(seed, purpose, task) for seed in self.seeds]
        return batch_of(train, choose(count, len(train), generators).to(theta.device), task)

    def features(self, samples: Samples) -> list[TangentFeatures]:
        """φ of the samples at the present weights, for each seed, captured once."""
        network = self.learner.network
        return [stored(network.features(samples, row)) for row in range(len(self.seeds))]
