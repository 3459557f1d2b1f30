"""Training steps as CUDA graphs: recorded once, then run again and again without Python."""

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from forgetless.methods import Samples
from forgetless.support.cuda_graphs import capturing
from forgetless.training.view import Draws, batches_of


@final
class Recording:
    """Some training steps in a row that a GPU repeats by itself, on other samples each time.

    Small networks are bound by the time it takes to launch a step's kernels from Python, thirty
    times what they take to run. A recording does what the steps do, kernel by kernel, with the
    tensors that they used: weights and memory must stay where they are while it is in use.

    Arguments:
        take: the samples at an index (S, n).
        step: one training step on a batch of samples. It is called once for each batch to record
            it, which has no effect but on Python.
        seeds: S.
        batch_size: samples in a step.
        steps: how many steps.
        draws: where the steps get their random choices from; it has seen one step already.
        result: called at the end; what a replay returns.
        device: where all of it happens.
        beside: an earlier recording, whose memory this one uses as well; the two are never at work
            at the same time.

    Raises:
        RuntimeError: the steps do something that cannot be recorded, such as waiting for a result.
    """

    def __init__(
        self,
        take: Callable[[Tensor], Samples],
        step: Callable[[Samples], None],
        seeds: int,
        batch_size: int,
        steps: int,
        draws: Draws,
        result: Callable[[], Tensor],
        device: torch.device,
        beside: "Recording | None" = None,
    ) -> None:
        self._draws = draws
        self._index = torch.zeros(seeds, steps * batch_size, dtype=torch.long, device=device)
        self._choices = draws.blank(steps)
        self._graph = torch.cuda.CUDAGraph()
        shared = None if beside is None else beside._graph
        with draws.handing_out(self._choices), capturing(self._graph, device, shared):
            for batch in batches_of(take(self._index), batch_size):
                step(batch)
            self._result = result()

    def replay(self, index: Tensor) -> Tensor:
        """Do the steps on the samples at index (S, steps · n)."""
        self._index.copy_(index)
        if self._choices.numel():
            self._choices.copy_(self._draws.take(len(self._choices)))
        self._graph.replay()
        return self._result.clone()
