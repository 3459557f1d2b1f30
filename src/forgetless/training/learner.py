"""One group of seeds learning task after task: the training step, and nothing around it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from forgetless.data import Scenario, Split
from forgetless.methods import Method, Samples, State
from forgetless.methods.orthogonal import Orthogonal
from forgetless.subspace import DENSE, FactoredSubspace, Storage
from forgetless.support.streams import stream
from forgetless.training.divergence import FiniteWatch
from forgetless.training.fast.frozen import Front
from forgetless.training.fast.recording import Recording
from forgetless.training.network import Network
from forgetless.training.view import Draws, LearnedTask, MemoryGradient, batch_of, choose, sent

# Test samples of all seeds together that go through the network at once; on a GPU as many as
# have so many numbers.
_EVALUATION_CHUNK = 8192
_EVALUATION_NUMBERS = 1 << 26
# Training steps in a recording at most: so many that starting it takes no time beside running it.
_RECORDED_STEPS = 8
# Notes on whether weights are finite that may wait, over epochs, for someone to look at them.
_UNSEEN = 256
# By samples in a step, steps, and whether the network is in training mode.
Recordings = dict[tuple[int, int, bool], Recording]


@final
@dataclass
class Place:
    """Where in the training on a task a learner is.

    Arguments:
        first_step: of the task, counted over the whole run.
        epochs: that are done.
        batches: of the epoch after them that are done.
        order: of that epoch's samples, (S, n); None until it is drawn.
    """

    first_step: int
    epochs: int = 0
    batches: int = 0
    order: Tensor | None = None


@final
class Learner:
    """A network with S sets of weights, and a method that watches over them.

    Arguments:
        network: the network.
        method: what is done against forgetting.
        scenario: where the tasks come from.
        seeds: the S seeds.
        batch_size: samples in a step.
        lr: learning rate.
        eval_mode_after: the step of the whole run from which on the network is in eval mode while
            it trains, so that batch norm stays fixed; 0 for never.
        storage: how the method keeps directions.
    """

    def __init__(
        self,
        network: Network,
        method: Method[Any],
        scenario: Scenario,
        seeds: Sequence[int],
        *,
        batch_size: int,
        lr: float,
        eval_mode_after: int,
        storage: Storage = DENSE,
    ) -> None:
        self.network = network
        self.method = method
        self.seeds = tuple(seeds)
        self.batch_size = int(batch_size)  # NumPy's are none to torch
        self.lr = lr
        self.eval_mode_after = eval_mode_after
        self.state: State = method.init(self._protected(), storage)
        self.steps = 0
        self.remembers = False  # anything at all
        self.storage = storage
        self.place: Place | None = None
        remedies = [f"a smaller learning rate than {lr:g}", method.steadied_by]
        self.watch = FiniteWatch(self.seeds, [remedy for remedy in remedies if remedy])
        self._needs_neighbours = any(isinstance(m, _BatchNorm) for m in network.module.modules())
        self._batches = [stream(s, "batches") for s in seeds]
        self._choices = [stream(s, "remembered samples") for s in seeds]
        device = network.theta.device
        self.draws = Draws([stream(s, "memory batches") for s in seeds], device)
        classes = [scenario.classes(t) for t in range(scenario.n_tasks)]
        self._loss_grad = MemoryGradient(network, classes, self.draws)
        # What dropout draws in a recording is not what it draws in a step.
        random = any(isinstance(m, _DropoutNd) for m in network.module.modules())
        self._records = device.type == "cuda" and not random
        self._rehearsed: set[tuple[int, bool]] = set()
        self._latest: Recording | None = None  # whose memory the next one takes over
        self.front = Front(network)

    def _seen(self, split: Split) -> Split:
        """The samples as what is trained sees them.

        The frozen start is cut off as soon as it is in eval mode for good, which must be before
        anything was remembered: a method's memory holds samples as they were then.
        """
        fixed = 0 < self.eval_mode_after <= self.steps
        split = self.front.seen(split, may_cut=fixed and not self.remembers)
        self._loss_grad.network = self.front.network
        return split

    def train(
        self, split: Split, task: int, epochs: int, pause: Callable[[], bool] = lambda: False
    ) -> Iterator[int]:
        """Learn a task; yields how many epochs are done, after each and whenever a pause is asked.

        At a yield the learner is between two steps; `place` says between which. On a GPU nobody
        may have looked yet whether the weights are finite: `watch` does, and does so at the end.
        """
        place = self.place = self.place or Place(self.steps)
        self.watch.begin(task, place.first_step)
        recordings: Recordings = {}
        while place.epochs < epochs:
            order = place.order
            if order is None:
                chosen = choose(len(split), len(split), self._batches)
                order = place.order = sent(chosen, self.network.theta.device)
            batches = list(self._epoch(order))
            in_epoch = len(batches)
            del batches[: place.batches]
            while batches:
                steps, finite = self._advance(self._seen(split), task, batches, recordings)
                del batches[:steps]
                self.watch.note(self.steps, finite)
                if self._records and not len(self.draws.coming):
                    self.draws.ahead(len(batches))  # as the latest step has asked
                place.batches += steps
                if batches and pause():
                    self.watch.look()
                    yield place.epochs
            place.epochs, place.batches, place.order = place.epochs + 1, 0, None
            ended = place.epochs == epochs
            if self._records and not ended:
                self.draws.ahead(in_epoch)  # while the GPU is at work
            if ended or not self._records or len(self.watch) >= _UNSEEN:
                self.watch.look()
            yield place.epochs

    def _epoch(self, order: Tensor) -> tuple[Tensor, ...]:
        batches: tuple[Tensor, ...] = order.split(self.batch_size, dim=1)
        # Batch norm cannot train on one sample: a last batch of one waits for the next epoch.
        if self._needs_neighbours and len(batches) > 1 and batches[-1].shape[1] == 1:
            batches = batches[:-1]
        return batches

    def _advance(
        self, split: Split, task: int, batches: Sequence[Tensor], recordings: Recordings
    ) -> tuple[int, Tensor]:
        """Steps on the next batch, or on as many as a recording takes.

        Returns:
            how many, and whether the weights are finite after them, (S,).
        """
        steps = self._recorded_steps(batches)
        finite = self._replay(split, task, batches[:steps], recordings) if steps else None
        return (1, self._step(split, batches[0], task)) if finite is None else (steps, finite)

    def _step(self, split: Split, index: Tensor, task: int) -> Tensor:
        """One step by itself; returns whether the weights are finite after it, (S,)."""
        self._set_mode()
        with self.draws.step():
            self._update(batch_of(split, index, task))
        self._rehearsed.add((index.shape[1], self.network.module.training))
        self.steps += 1
        return self.network.theta.isfinite().all(1)

    def _update(self, samples: Samples) -> None:
        """θ ← θ − lr · g̃ on a batch of samples."""
        network, state = self.front.network, self.state
        outers: dict[int, tuple[Tensor, Tensor]] = {}
        gradient = network.gradient(samples, remember=True, outers=outers)
        size = network.protected_size
        if isinstance(state, FactoredSubspace) and type(self.method).update is Orthogonal.update:
            # A batch of few samples is less to multiply with than its gradient.
            update = state.project_out(gradient[:, :size], outers)
        else:
            update = self.method.update(
                gradient[:, :size], state, self._protected(), self._loss_grad
            )
        network.theta[:, :size].sub_(update, alpha=self.lr)
        if self.method.trains_heads(self.state):
            network.theta[:, size:].sub_(gradient[:, size:], alpha=self.lr)

    def _is_training(self, step: int) -> bool:
        """Whether the network is in training mode at a step of the run."""
        return not self.eval_mode_after or bool(step < self.eval_mode_after)

    def _set_mode(self) -> None:
        training = self._is_training(self.steps)
        if self.network.module.training != training:
            self.network.module.train(training)

    def _recorded_steps(self, batches: Sequence[Tensor]) -> int:
        """How many of the next steps can be done as one recording, 0 if none."""
        size, mode = batches[0].shape[1], self._is_training(self.steps)
        # A first step by itself lets libraries get ready, and shows what the method draws.
        first = self.place is None or self.steps == self.place.first_step
        if not self._records or first or (size, mode) not in self._rehearsed:
            return 0

        def is_alike(i: int) -> bool:
            return batches[i].shape[1] == size and self._is_training(self.steps + i) == mode

        return len(list(takewhile(is_alike, range(min(len(batches), _RECORDED_STEPS)))))

    def _replay(
        self,
        split: Split,
        task: int,
        batches: Sequence[Tensor],
        recordings: Recordings,
    ) -> Tensor | None:
        """Steps on the batches by a recording; None if they cannot be recorded."""
        self._set_mode()
        size = batches[0].shape[1]
        key = size, len(batches), self.network.module.training
        if key not in recordings:
            made = self._recording(split, task, size, len(batches))
            if made is None:
                self._records = False
                return None
            recordings[key] = self._latest = made
        finite = recordings[key].replay(torch.cat(list(batches), dim=1))
        self.steps += len(batches)
        return finite

    def _recording(self, split: Split, task: int, size: int, steps: int) -> Recording | None:
        """So many steps on batches of a size; None if they cannot be recorded."""
        for _ in range(2):
            try:
                return Recording(
                    lambda index: batch_of(split, index, task),
                    self._update,
                    len(self.seeds),
                    size,
                    steps,
                    self.draws,
                    lambda: self.network.theta.sum(1).isfinite(),  # in one pass
                    self.network.theta.device,
                    self._latest,
                )
            except RuntimeError:
                # The method or the network waits for a result on the way; or there is no memory,
                # of which torch takes back none that is unused while something is recorded.
                torch.cuda.empty_cache()
        return None

    def consolidate(self, split: Split, task: int) -> None:
        """Let the method remember the task that was learned."""
        seen = self._seen(split)  # first: what the network is depends on it
        learned = LearnedTask(self.front.network, seen, task, self._choices)
        self.remembers = True
        self.state = self.method.consolidate(self.state, self._protected(), learned)
        self.place = None

    def keep_in(self, storage: Storage) -> None:
        """Keep directions in another way, from before the first task on."""
        self.storage = storage
        self.state = self.method.init(self._protected(), storage)

    def generators(self) -> list[torch.Generator]:
        """All that draw for the seeds: batches, remembered samples, memory batches."""
        return [*self._batches, *self._choices, *self.draws.generators]

    def accuracy(self, split: Split, classes: range) -> Tensor:
        """Share of the samples that are classified right, in percent, (S,)."""
        self.network.module.eval()
        device = self.network.theta.device
        correct = torch.zeros(len(self.seeds), dtype=torch.long, device=device)
        chunk = _EVALUATION_CHUNK
        if device.type == "cuda":
            chunk = _EVALUATION_NUMBERS // split.inputs[0].numel()
        chunk = max(1, chunk // len(self.seeds))
        for index in torch.arange(len(split), device=device).split(chunk):
            inputs, labels = split.take(index.expand(len(self.seeds), -1))
            correct += self.network.correct(inputs, labels, classes)
        return 100.0 * correct.double().cpu() / len(split)

    def _protected(self) -> Tensor:
        return self.network.theta[:, : self.network.protected_size]
