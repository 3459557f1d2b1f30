"""A continual-learning method attached to anyone's model and optimizer."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Never, Self, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from forgetless.guard.arguments import (
    Projected,
    function,
    named_storage,
    unwrapped,
    usable_optimizer,
    what_to_project,
)
from forgetless.guard.batches.loading import TaskData
from forgetless.guard.batches.losses import Loss
from forgetless.guard.batches.outputs import Named, Output, named_output
from forgetless.guard.batches.samples import Remembered, Unpack
from forgetless.guard.budget import as_asked, chosen_storage, voted_storage, within
from forgetless.guard.distributed.gathering import SharedTaskData
from forgetless.guard.distributed.sharding import agreed, settle, training_ranks
from forgetless.guard.distributed.shards import from_shards, sharded_template, to_shards
from forgetless.guard.model import GuardedModel, full_precision
from forgetless.guard.parameters import Parameters, Params, protected_names, warn_of_newcomers
from forgetless.guard.report import MemoryReport, Stats
from forgetless.guard.reporting import memory_report
from forgetless.guard.state import Snapshot, from_dict, to_dict
from forgetless.guard.steps import Steps
from forgetless.guard.task import GuardedTask
from forgetless.methods import Method, State
from forgetless.subspace import Storage, Subspace
from forgetless.support.errors import ConfigError, require
from forgetless.support.sizes import parsed_bytes
from forgetless.support.streams import stream
from forgetless.support.validation import whole


@final
class Guard:
    """Keeps what a model has learned while its user's own loop trains it on something new.

    After `end_task` every step of the optimizer is changed as the method says. Methods that
    project (OGD, PCA-OGD, A-GEM, GEM, GEM-NT) work on the update that the optimizer makes,
    Δθ ← P Δθ, so momentum, weight decay and adaptive step sizes leak nothing but the rounding of
    the weights, which is coarse for weights of half precision; EWC and joint training add to the
    gradient. Of one optimizer's parameters only one guard can project the updates.

    Arguments:
        model: any module, compiled or not, in `DistributedDataParallel` or sharded by
            `fully_shard`: then every process makes the same calls.
        optimizer: any of `torch.optim` but LBFGS.
        method: as `fit` takes it, for example `PCAOGD(components=100)`.
        params: what is protected: None for all trained parameters; names or beginnings of names
            (`"encoder"` is all of `encoder.*`), modules, parameters; or a function of the name.
            Frozen parameters that are trained later must be chosen so.
        exclude: names or beginnings of names that are not, such as heads.
        project: "update" projects what the optimizer does, "gradient" what it is given (the
            paper's way, exact for plain SGD only); by default the update where the method allows.
        output: which scalars of a sample's outputs are protected: "class", the true class's logit;
            "regression", every number predicted; "likelihood", the mean log-likelihood of a
            sequence's next tokens; "tokens", that of labels at their logits' positions; or a
            function of outputs and target to (n,) or (n, K). By default "class" for integer
            targets (n,), "regression" for real or absent ones.
        loss: for methods that follow the loss on remembered samples, a function of outputs and
            target to one number; by default cross-entropy (of sequences as `output` says), or
            squared error for real targets.
        unpack: from a batch of the loader to the model's inputs (a tensor, a tuple, a dict) and
            the target, where batches are not (input, target) pairs or dicts with labels.
        storage: how directions are kept: "dense" (float32 rows), "bfloat16", "cpu" (rows wait
            there while the model is on a GPU), "factored" (samples as factors), or a `Storage`.
        budget: bytes for directions, such as "512MB"; what it led to is in `memory_report()`.
        max_rank: the most directions that are kept (`Storage` says which, when there are more).
        seed: of the choice of samples.

    Example:
        >>> import torch, forgetless
        >>> model = torch.nn.Linear(4, 3)
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> guard = forgetless.Guard(model, optimizer, forgetless.OGD(samples=5))
        >>> guard.end_task((torch.randn(20, 4), torch.randint(0, 3, (20,))))
        >>> guard.tasks, guard.memory_report().directions
        (1, 5)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        method: Method[Any],
        *,
        params: Params = None,
        exclude: Sequence[str] = (),
        project: Projected | None = None,
        output: Named | Output | None = None,
        loss: Output | None = None,
        unpack: Unpack | None = None,
        storage: str | Storage | None = None,
        budget: str | int | None = None,
        max_rank: int | None = None,
        seed: int = 0,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        if not isinstance(method, Method):
            raise ConfigError(f"method must be such as PCAOGD(), not {method!r}")
        self.method = method
        self.project = what_to_project(method, project)
        module = unwrapped(model)
        optimizer = usable_optimizer(optimizer)
        settle(module)
        self._parameters = Parameters(module, protected_names(module, optimizer, params, exclude))
        self._exclude = exclude if params is None else None
        self.ranks = training_ranks(model, self._parameters.tensors, method)
        sharded = self._parameters.shares is not None
        output = named_output(output, module)
        losses = Loss(function("loss", loss), output)
        self._model = GuardedModel(module, self._parameters, output, losses)
        self._unpack = function("unpack", unpack)
        self._budget = None if budget is None else parsed_bytes(budget)
        self._over = self.ranks if sharded else None
        self._asked = replace(named_storage(storage, max_rank), ranks=self._over)
        self._told = None if storage is None else self._asked
        whole(0).check("seed", seed)
        self._generators = [stream(seed, "remembered samples"), stream(seed, "memory batches")]
        self._now = self._nothing()
        if self._budget is not None and not isinstance(self._now.state, Subspace):
            raise ConfigError(f"budget= is for methods that keep directions, not {method.name}")
        if self._budget is not None and sharded:
            raise ConfigError("budget= is not for sharded models: limit them by max_rank=")
        self._steps = Steps(
            self._model, method, self.project, self._generators[1], self._bring, self._over
        )
        self._steps.attach(optimizer)

    @property
    def tasks(self) -> int:
        """How many tasks are remembered."""
        return self._now.tasks

    @property
    def names(self) -> tuple[str, ...]:
        """The protected parameters."""
        return self._parameters.names

    def attach(self, optimizer: Optimizer) -> None:
        """Watch over another optimizer's steps from now on, for example one made for a new task."""
        self._steps.attach(usable_optimizer(optimizer))

    def remove(self) -> None:
        """Let the optimizer go its own way again; what was remembered stays."""
        self._steps.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __reduce__(self) -> Never:
        raise ConfigError(
            "a guard cannot be copied or pickled, for a copy would watch over no optimizer: make "
            "one for the other model and optimizer, and give it this one's state_dict()"
        )

    def end_task(self, loader: Any) -> None:
        """Remember the task that was just learned, at the present weights.

        Arguments:
            loader: its training data: an iterable of batches such as a `DataLoader`, or one batch.
        """
        self._steps.look()
        self._steps.follow_model()
        if self._exclude is not None:
            warn_of_newcomers(self._model.module, self._steps.optimizer, self.names, self._exclude)
        with self._all_or_nothing():
            self._set(self._with_task(self._now, loader))

    def refresh(self, *loaders: Any) -> None:
        """Replace what is remembered of all earlier tasks, at the present weights.

        Directions are those of the weights at the end of their task, and age as training goes on.

        Arguments:
            loaders: data of the earlier tasks, one loader each.
        """
        wanted = f"{self.tasks}, one for each earlier task"
        require(len(loaders) == self.tasks, "refresh's loaders", len(loaders), wanted)
        with self._all_or_nothing():
            now = self._nothing()
            for loader in loaders:
                now = self._with_task(now, loader)
            self._set(now)

    def stats(self) -> Stats:
        """How much of the steps was removed since the latest task was remembered."""
        return self._steps.removed.stats()

    def memory_report(self) -> MemoryReport:
        """What is kept: bytes, directions and share of variance, per task and per layer."""
        now = self._now
        return memory_report(now.state, now.storage, now.tasks, self._parameters, now.notes)

    def state_dict(self) -> dict[str, Tensor]:
        """All that is remembered, as tensors: for `torch.save`, or safetensors' `save_file`."""
        now = replace(self._now, generators=self._random())
        return to_shards(to_dict(now, self.method, self._parameters), self._parameters)

    def template(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Room for one tensor of a stored state, sharded as this model is."""
        return sharded_template(name, shape, dtype, self._parameters)

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` gave; a state of another model is refused.

        Directions are kept as they were there, unless this guard was told how.
        """
        with full_precision(self._parameters.device):
            snapshot = self._restored(state_dict)
            empty = partial(self.method.init, self._parameters.empty())
            snapshot = as_asked(snapshot, empty, self._told, self._asked.max_rank, self._budget)
        self._rewind(snapshot.generators)
        self._set(snapshot)

    def _bring(self) -> None:
        """What is remembered to where the model is."""
        with full_precision(self._parameters.device):
            self._set(self._restored(self.state_dict()))

    def _restored(self, state_dict: Mapping[str, Tensor]) -> Snapshot:
        tensors = from_shards(state_dict, self._parameters)
        return from_dict(tensors, self.method, self._parameters, self._over)

    def _set(self, snapshot: Snapshot) -> None:
        self._now = snapshot
        self._steps.follow(snapshot.state if snapshot.tasks else None)

    def _nothing(self) -> Snapshot:
        state: State = self.method.init(self._parameters.empty(), self._asked)
        return Snapshot(state, self._asked, 0, (), self._random())

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """What fails half way leaves the guard as it was."""
        settle(self._model.module)
        self._parameters.check_current(self._model.module)
        random = self._random()
        try:
            with full_precision(self._parameters.device):
                yield
        except BaseException:
            self._rewind(random)
            raise

    def _with_task(self, now: Snapshot, loader: Any) -> Snapshot:
        """One more task remembered."""
        data = self._data(loader)
        if self._budget is not None and self._told is None and not now.tasks:
            now = self._chosen(now, data)
        task = GuardedTask(self._model, data)
        state = self.method.consolidate(now.state, self._parameters.read(), task)
        task.check()
        if self.ranks is not None and self._over is None and isinstance(state, Subspace):
            agreed(state.tensors(0), self.ranks)
        notes, number = now.notes, now.tasks + 1
        if self._budget is not None and isinstance(state, Subspace):
            state, note = within(state, self._budget)
            if note is not None:
                warnings.warn(f"task {number}: {note}", stacklevel=4)
                notes = (*notes, f"task {number}: {note}")
        storage = state.storage if isinstance(state, Subspace) else now.storage
        return Snapshot(state, storage, number, notes, self._random())

    def _data(self, loader: Any) -> TaskData | SharedTaskData:
        if self.ranks is None:
            return TaskData(loader, self._unpack, self._generators[0])
        return SharedTaskData(loader, self._unpack, self._generators[0], self.ranks)

    def _chosen(self, now: Snapshot, data: TaskData | SharedTaskData) -> Snapshot:
        """The storage that needs less for this model, by the features of a few samples."""
        first = data.first()
        few = None if first is None else Remembered((first.mapped(lambda t: t[:4]),))
        kind = None if few is None else chosen_storage(self._model.features(few), self.method)
        storage = replace(voted_storage(kind, self.ranks), max_rank=self._asked.max_rank)
        state: State = self.method.init(self._parameters.empty(), storage)
        return replace(now, state=state, storage=storage, notes=(f"{storage} chosen",))

    def _random(self) -> Tensor:
        return torch.stack([generator.get_state() for generator in self._generators])

    def _rewind(self, states: Tensor) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state.clone())
