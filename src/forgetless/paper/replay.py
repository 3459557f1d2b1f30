"""A finished run replayed from its trace: networks after each task, and the method's memory."""

from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor

from forgetless.data import Scenario
from forgetless.launch.runs import Config
from forgetless.linalg import orthonormalize
from forgetless.methods import GEMNT, SGD, Samples
from forgetless.methods.state import state_bytes
from forgetless.support.streams import stream
from forgetless.support.validation import TraceError
from forgetless.tangent import TangentFeatures, stored
from forgetless.trace import Trace
from forgetless.training.build import make_learner
from forgetless.training.models import ModelFactory
from forgetless.training.sampling import batch_of, choose_indices


@final
class Replay:
    """The networks of a run's seeds after any task, and the memory that a method has there.

    A method's memory follows from the weights after each task and the seeds, so traces need not
    hold it: `remember` computes it again, with the same samples and directions.

    Arguments:
        config: the run's settings, perhaps with another method.
        scenario: its tasks.
        trace: with the weights after each task; None for networks that were never trained.
        device: for the computations.
    """

    def __init__(
        self, config: Config, scenario: Scenario, trace: Trace | None, device: torch.device
    ) -> None:
        self.config = config
        self.scenario = scenario
        self.trace = trace
        self.seeds = config.seed_list()
        self._kept: list[Samples] = []  # GEM-NT's, task by task
        # All methods are measured in the same parameters: those that the tasks share.
        method = config.build_method()
        self._gem_nt = method if isinstance(method, GEMNT) else None
        if self._gem_nt is not None:
            method = SGD()
        self.learner = make_learner(
            scenario,
            method,
            ModelFactory(config, scenario.input_shape, scenario.n_outputs),
            self.seeds,
            config,
            None,
            device,
        )
        self._draws = [stream(s, "remembered samples") for s in self.seeds]

    def at(self, task: int) -> None:
        """Load the weights after a task, from 0."""
        if self.trace is None:
            raise TraceError("there is no trace to take the weights after a task from")
        for row, seed in enumerate(self.seeds):
            self.learner.network.load_state_dict(row, self.trace.weights(seed, task))

    def remember(self, task: int) -> None:
        """Let the method consolidate a task at the present weights."""
        theta = self.learner.network.theta
        train = self.scenario.task(task, self.seeds).train.to(theta.device, theta.dtype)
        if self._gem_nt is None:
            self.learner.consolidate(train, task)
        else:
            index = choose_indices(self._gem_nt.memory, len(train), self._draws).to(theta.device)
            self._kept.append(batch_of(train, index, task))

    def kept_bytes(self) -> int:
        """Bytes of the method's memory for the first seed."""
        state: Any = self.learner.state
        if self._gem_nt is not None:
            return sum(t.nbytes for samples in self._kept for t in samples.tensors(0).values())
        if self.learner.method.keeps_directions:
            return int(state.nbytes)
        return state_bytes(state)

    def directions(self) -> Iterator[Tensor | None]:
        """The directions that the method protects, as orthonormal rows (K, p), for each seed."""
        state: Any = self.learner.state
        if self._gem_nt is not None and self._kept:
            network = self.learner.network
            size = network.protected_size
            network.module.eval()
            gradients = torch.stack([network.gradient(s)[:, :size] for s in self._kept], dim=1)
            yield from (orthonormalize(rows) for rows in gradients)
        elif self.learner.method.keeps_directions and state.rank:
            yield from state.bases()
        else:
            yield from [None] * len(self.seeds)

    def samples(self, task: int, count: int, purpose: str) -> Samples:
        """A random choice of a task's training samples, the same for the same purpose."""
        theta = self.learner.network.theta
        train = self.scenario.task(task, self.seeds).train.to(theta.device, theta.dtype)
        generators = [stream(seed, purpose, task) for seed in self.seeds]
        return batch_of(train, choose_indices(count, len(train), generators).to(theta.device), task)

    def features(self, samples: Samples) -> list[TangentFeatures]:
        """φ of the samples at the present weights, for each seed."""
        network = self.learner.network
        return [stored(network.features(samples, row)) for row in range(len(self.seeds))]
