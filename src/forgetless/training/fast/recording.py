"""Training steps as CUDA graphs: recorded once, then replayed without Python.

Small networks are bound by the time to launch a step's kernels from Python, thirty times what they
take to run. A recording does what the steps did, kernel by kernel, on the tensors that they used:
weights and memory must stay where they are while it is in use.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd

from forgetless.data import Split
from forgetless.methods import Samples
from forgetless.support.cuda_graphs import capture_graph
from forgetless.training.sampling import batch_of

if TYPE_CHECKING:
    from forgetless.training.learner import Learner

# The most training steps in a recording: enough that starting it takes no time next to running it.
_STEPS = 8
Key = tuple[int, int, bool]  # samples in a step, steps, whether the network is in training mode


@final
class Recording:
    """Some training steps in a row that a GPU repeats by itself, on other samples each time.

    Arguments:
        learner: whose steps; it has taken one by itself already.
        split: the task's samples.
        task: its index.
        batch_size: samples in a step.
        steps: how many.
        earlier: a recording that never runs at the same time, whose memory this one may use.

    Raises:
        RuntimeError: the steps do something that cannot be recorded, such as waiting for a result.
    """

    def __init__(
        self,
        learner: "Learner",
        split: Split,
        task: int,
        batch_size: int,
        steps: int,
        earlier: "Recording | None",
    ) -> None:
        theta = learner.network.theta
        self._sampler = learner.sampler
        self._index = torch.zeros(
            len(theta), steps * batch_size, dtype=torch.long, device=theta.device
        )
        self._choices = self._sampler.blank(steps)
        self._graph = torch.cuda.CUDAGraph()
        shared = None if earlier is None else earlier._graph
        with (
            self._sampler.handing_out(self._choices),
            capture_graph(self._graph, theta.device, shared),
        ):
            for batch in batches_of(batch_of(split, self._index, task), batch_size):
                learner.update(batch)
            self._finite = theta.sum(1).isfinite()  # in one pass

    def replay(self, index: Tensor) -> Tensor:
        """Take the steps on the samples at index (S, steps · n); whether weights are finite."""
        self._index.copy_(index)
        if self._choices.numel():
            self._choices.copy_(self._sampler.take(len(self._choices)))
        self._graph.replay()
        return self._finite.clone()


@final
class Recorder:
    """Replays a learner's steps on a GPU, recording them first where that is possible.

    Arguments:
        learner: takes a first step of each kind by itself, so that libraries get ready and the
            sampler has seen what the method draws.
    """

    def __init__(self, learner: "Learner") -> None:
        network = learner.network
        # In a recording dropout draws other numbers than in a step by itself.
        random = any(isinstance(m, _DropoutNd) for m in network.module.modules())
        alike = learner.method.recordable and learner.training.is_constant_sgd and not random
        self.active = network.theta.is_cuda and alike
        self._learner = learner
        self._rehearsed: set[tuple[int, bool]] = set()
        self._recordings: dict[Key, Recording] = {}
        self._latest: Recording | None = None  # its memory is used by the next one

    def begin_task(self) -> None:
        """Forget recordings on other data."""
        self._recordings.clear()

    def rehearsed(self, batch_size: int) -> None:
        """The learner took a step by itself."""
        self._rehearsed.add((batch_size, self._learner.network.module.training))

    def draw_ahead(self, steps: int) -> None:
        """Draw the memory batches of coming steps while the GPU works."""
        if self.active and not len(self._learner.sampler.coming):
            self._learner.sampler.ahead(steps)

    def advance(
        self, split: Split, task: int, batches: Sequence[Tensor]
    ) -> tuple[int, Tensor] | None:
        """Take as many of the next steps as one recording can.

        Returns:
            how many, and whether the weights are finite after them, (S,); None for no steps.
        """
        learner, size = self._learner, batches[0].shape[1]
        training = learner.trains_at(learner.steps)
        if not self.active or learner.at_start or (size, training) not in self._rehearsed:
            return None

        def is_alike(i: int) -> bool:
            return batches[i].shape[1] == size and learner.trains_at(learner.steps + i) == training

        steps = len(list(takewhile(is_alike, range(min(len(batches), _STEPS)))))
        key = size, steps, training
        if key not in self._recordings:
            made = self._recorded(split, task, size, steps)
            if made is None:
                self.active = False
                return None
            self._recordings[key] = self._latest = made
        return steps, self._recordings[key].replay(torch.cat(list(batches[:steps]), dim=1))

    def _recorded(self, split: Split, task: int, size: int, steps: int) -> Recording | None:
        for _ in range(2):
            try:
                return Recording(self._learner, split, task, size, steps, self._latest)
            except RuntimeError:
                # The method or the network waits for a result; or memory is short, and torch frees
                # no unused memory while it records.
                torch.cuda.empty_cache()
        return None


def batches_of(samples: Samples, size: int) -> Iterator[Samples]:
    """Samples in their order, some at a time."""
    parts = (t.split(size, dim=1) for t in (samples.inputs, samples.labels, samples.tasks))
    return (Samples(*batch) for batch in zip(*parts, strict=True))
