"""A continual-learning method attached to a user's model and optimizer."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Never, Self, final

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from forgetless.guard.batches.loading import TaskData
from forgetless.guard.batches.outputs import Loss, Named, Output, check_output
from forgetless.guard.batches.samples import StoredSamples, Unpack, unpacked
from forgetless.guard.budget import as_asked, chosen_storage, voted_storage
from forgetless.guard.distributed.loading import SharedTaskData
from forgetless.guard.distributed.sharding import broadcast_in_place, reshard, training_ranks
from forgetless.guard.model import GuardedModel, full_precision
from forgetless.guard.parameters import Parameters, Params, protected_names, warn_of_unprotected
from forgetless.guard.report import MemoryReport, Stats, directions_report, samples_report
from forgetless.guard.state import Snapshot, empty_shard, from_dict, to_dict
from forgetless.guard.steps import Projected, Steps
from forgetless.guard.view import GuardedTask, GuardView
from forgetless.methods import Method
from forgetless.methods.state import check_state, check_storage, consolidated, state_tensors
from forgetless.subspace import STORAGES, Storage
from forgetless.support.errors import ConfigError, require
from forgetless.support.options import parse_bytes, whole
from forgetless.support.streams import stream
from forgetless.tangent.evaluation import eval_mode


@final
class Guard:
    """Preserves what a model has learned while your own loop trains it on the next task.

    After `end_task` the method changes every step of the optimizer. Projections (OGD, PCA-OGD,
    A-GEM, GEM, GEM-NT) change the optimizer's update, Δθ ← P Δθ, so momentum, weight decay and
    adaptive step sizes leak only the rounding of the weights, which is coarse in half precision;
    EWC and joint training add to the gradient. Only one guard can project a parameter's updates.

    Arguments:
        model: any module, compiled or not, in `DistributedDataParallel` or sharded by
            `fully_shard`: then every process makes the same calls.
        optimizer: any of `torch.optim` except LBFGS.
        method: as for `fit`, for example `PCAOGD(components=100)`.
        params: the protected parameters: None for all trained ones; names or beginnings of names
            (`"encoder"` is all of `encoder.*`), modules, parameters; or a function of the name.
            Parameters that are frozen now and trained later must be chosen here.
        exclude: names or beginnings of names that are not protected, such as heads.
        project: "update" projects the optimizer's update, "gradient" its gradient (as in the
            paper, exact for plain SGD only); by default the update if the method allows it.
        output: the protected scalars of a sample's outputs: "class", the true class's logit;
            "regression", every predicted number; "likelihood", the mean log-likelihood of a
            sequence's next tokens; "tokens", that of labels at their logits' positions; or a
            function of outputs and target to (n,) or (n, K). By default "class" for integer
            targets (n,), "regression" for real or absent ones.
        loss: for methods that use a loss, a function of outputs and target to one number; by
            default cross-entropy (of sequences as `output` says), or squared error for real
            targets.
        unpack: from a batch of the loader to the model's inputs (a tensor, a tuple, a dict) and
            the target, if batches are not (input, target) pairs or dicts with labels.
        storage: how to store directions: "dense" (float32 rows), "bfloat16", "cpu" (rows in main
            memory while the model is on a GPU), "factored" (samples as factors), or a `Storage`.
        budget: bytes for directions, such as "512MB"; `memory_report()` shows the effect.
        max_rank: the most directions to store (`Storage` says which, if there are more).
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
        exclude: str | Sequence[str] = (),
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
        module = unwrapped(model)
        optimizer = _torch_optimizer(optimizer)
        exclude = (exclude,) if isinstance(exclude, str) else exclude
        self.method = method
        self.project = _projected(method, project)
        reshard(module)
        self._parameters = Parameters(module, protected_names(module, optimizer, params, exclude))
        self._exclude = exclude if params is None else None
        self.ranks = training_ranks(model, self._parameters.tensors, method)
        if self.ranks is not None and method.needs_batch:
            raise ConfigError(
                f"{method.name} uses the batch of every step, and each process has another one: "
                "it is for one process"
            )
        sharded = self._parameters.slices is not None
        check_output(output, module)
        for argument, value in {"loss": loss, "unpack": unpack}.items():
            fits = value is None or callable(value)
            require(fits, argument, value, "a function or None")
        self._model = GuardedModel(module, self._parameters, output, Loss(loss, output), self.ranks)
        self._unpack = unpack
        self._budget = None if budget is None else parse_bytes(budget)
        self._column_ranks = self.ranks if sharded else None
        layout = self._parameters.layout if sharded else None
        self._storage = replace(
            _storage_of(storage, max_rank), ranks=self._column_ranks, layout=layout
        )
        self._asked = None if storage is None else self._storage
        whole(0).check("seed", seed)
        self._generators = [stream(seed, "remembered samples"), stream(seed, "memory batches")]
        if self._budget is not None and not method.keeps_directions:
            raise ConfigError(f"budget= is for methods that keep directions, not {method.name}")
        if self._budget is not None and sharded:
            raise ConfigError("budget= is not for sharded models: limit them by max_rank=")
        self._steps = Steps(
            self._model,
            method,
            self.project,
            self._generators[1],
            self._prepare,
            self._column_ranks,
        )
        self._now: Snapshot | None = None  # before the first step that the method changes
        self._steps.attach(optimizer)

    @property
    def tasks(self) -> int:
        """How many tasks are stored."""
        return 0 if self._now is None else self._now.tasks

    @property
    def names(self) -> tuple[str, ...]:
        """The protected parameters."""
        return self._parameters.names

    def attach(self, optimizer: Optimizer) -> None:
        """Change another optimizer's steps from now on, for example one made for a new task."""
        self._steps.attach(_torch_optimizer(optimizer))

    def remove(self) -> None:
        """Detach from the optimizer; the stored tasks stay."""
        self._steps.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()

    def __reduce__(self) -> Never:
        raise ConfigError(
            "a guard cannot be copied or pickled, because the copy would have no optimizer: make "
            "one for the other model and optimizer, and give it this one's state_dict()"
        )

    def observe(self, batch: Any) -> None:
        """Show a batch of the coming step to a method that needs it (`needs_batch`).

        Arguments:
            batch: as the loader gives it; several before one step are one batch.
        """
        if self.method.needs_batch and self._steps.is_active:
            new, seen = StoredSamples((unpacked(batch, self._unpack),)), self._steps.batch
            self._steps.batch = new if seen is None else seen + new

    def end_task(self, loader: Any) -> None:
        """Store the task that was just learned, at the present weights.

        Arguments:
            loader: its training data: an iterable of batches such as a `DataLoader`, or one batch.
        """
        self._steps.warn_if_full()
        self._prepare()
        if self._exclude is not None:
            optimizer = self._steps.optimizer
            warn_of_unprotected(self._model.module, optimizer, self.names, self._exclude)
        with self._all_or_nothing():
            self._set(self._with_task(self._current(), loader))

    def refresh(self, *loaders: Any) -> None:
        """Replace what is stored of all earlier tasks, at the present weights.

        Directions are computed at the weights at the end of their task, and age in training.

        Arguments:
            loaders: data of the earlier tasks, one loader each.
        """
        wanted = f"{self.tasks}, one for each earlier task"
        require(len(loaders) == self.tasks, "refresh's loaders", len(loaders), wanted)
        with self._all_or_nothing():
            now = self._initial()
            for loader in loaders:
                now = self._with_task(now, loader)
            self._set(now)

    def stats(self) -> Stats:
        """How much of the steps was removed since the latest task was stored."""
        return self._steps.removed.stats()

    def memory_report(self) -> MemoryReport:
        """Bytes, directions and share of variance, per task and per layer."""
        now = self._current()
        if not self.method.keeps_directions:
            return samples_report(now.state, now.tasks)
        return directions_report(now.state, self._parameters.layout.columns, now.notes)

    def state_dict(self) -> dict[str, Tensor]:
        """All that is stored, as tensors: for `torch.save`, or safetensors' `save_file`."""
        now = replace(self._current(), generators=self._random())
        return to_dict(now, self.method, self._parameters)

    def template(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """An empty tensor for one of a stored state, sharded as this model is."""
        return empty_shard(name, shape, dtype, self._parameters)

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Continue from a `state_dict`; that of another model or method is rejected.

        Directions stay in the storage they have there, unless this guard was given one.
        """
        with full_precision(self._parameters.device):
            snapshot = self._restored(state_dict)
            if self.method.keeps_directions:
                limits = self._asked, self._storage.max_rank, self._budget
                snapshot = as_asked(snapshot, self._empty, self._parameters.read(), *limits)
        self._set_random(snapshot.generators)
        self._set(snapshot)

    def _prepare(self) -> None:
        """Make the first state, or bring the state to the model's device and precision."""
        if self._now is None:
            self._set(self._initial())
        elif self._steps.place != self._parameters.place:
            with full_precision(self._parameters.device):
                self._set(self._restored(self.state_dict()))

    def _restored(self, state_dict: Mapping[str, Tensor]) -> Snapshot:
        return from_dict(state_dict, self.method, self._parameters, self._column_ranks)

    def _set(self, snapshot: Snapshot) -> None:
        self._now = snapshot
        self._steps.set_state(snapshot.state, snapshot.storage, snapshot.tasks, snapshot.steps)

    def _current(self) -> Snapshot:
        """All that is stored, with the changes of the steps since the latest task."""
        if self._now is None:
            self._set(self._initial())
        now: Any = self._now
        found: Snapshot = replace(now, state=self._steps.state, steps=self._steps.steps)
        return found

    def _initial(self) -> Snapshot:
        state = check_state(self.method, self._empty(self._storage), 1)
        return Snapshot(state, self._storage, 0, self._steps.steps, (), self._random())

    def _empty(self, storage: Storage) -> Any:
        """The state before the first step."""
        with torch.no_grad(), full_precision(self._parameters.device):
            state = self.method.init(self._view(self._model, storage, 0))
        check_storage(self.method, state, storage)
        by_columns = self.method.separable or not self.method.keeps_directions or state.over_ranks
        if self._column_ranks is not None and not by_columns:
            raise ConfigError(
                f"{type(state).__name__} needs all columns of a vector, and the processes of a "
                "sharded model have some each: use DistributedDataParallel"
            )
        return state

    def _view(self, model: GuardedModel, storage: Storage, task: int) -> GuardView:
        step, optimizer = self._steps.steps, self._steps.optimizer
        return GuardView(
            model, self._generators[1], storage, task=task, step=step, optimizer=optimizer
        )

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """An error inside leaves the guard as it was."""
        reshard(self._model.module)
        self._parameters.check_current(self._model.module)
        random = self._random()
        try:
            with full_precision(self._parameters.device):
                yield
        except BaseException:
            self._set_random(random)
            raise

    def _with_task(self, now: Snapshot, loader: Any) -> Snapshot:
        """One more task stored."""
        chooses = self._generators[0]
        data: TaskData | SharedTaskData = (
            TaskData(loader, self._unpack, chooses)
            if self.ranks is None
            else SharedTaskData(loader, self._unpack, chooses, self.ranks)
        )
        chooses_storage = self._asked is None and self.method.demand() is not None
        if self._budget is not None and chooses_storage and not now.tasks:
            now = self._with_chosen_storage(now, data)
        task = GuardedTask(self._model, data)
        view = self._view(task.model, now.storage, now.tasks)
        with eval_mode(task.model.module):
            state = consolidated(self.method, now.state, view, task, 1)
        if self.method.needs_model:
            task.check()
        storage, notes, number = now.storage, now.notes, now.tasks + 1
        alike = self.method.needs_model or self.method.separable
        if self.ranks is not None and self._column_ranks is None and not alike:
            broadcast_in_place(state_tensors(state, 0), self.ranks)
        if self.method.keeps_directions:
            note = None
            if self._budget is not None:
                state, note = state.within(self._budget)
            if note is not None:
                warnings.warn(f"task {number}: {note}", stacklevel=4)
                notes = (*notes, f"task {number}: {note}")
            storage = state.storage
        return Snapshot(state, storage, number, now.steps, notes, self._random())

    def _with_chosen_storage(self, now: Snapshot, data: TaskData | SharedTaskData) -> Snapshot:
        """The storage that needs less for this model, by the features of a few samples."""
        first = data.first()
        few = None if first is None else StoredSamples((first.mapped(lambda t: t[:4]),))
        kind = None if few is None else chosen_storage(self._model.features(few), self.method)
        storage = replace(voted_storage(kind, self.ranks), max_rank=self._storage.max_rank)
        notes = (f"{storage} chosen",)
        return replace(now, state=self._empty(storage), storage=storage, notes=notes)

    def _random(self) -> Tensor:
        return torch.stack([generator.get_state() for generator in self._generators])

    def _set_random(self, states: Tensor) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state.clone())


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside `torch.compile` and data-parallel wrappers."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def _torch_optimizer(optimizer: Any) -> Optimizer:
    """The torch optimizer, also inside a wrapper such as accelerate's."""
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer):
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        raise ConfigError(f"optimizer must be a torch.optim.Optimizer, not {kind}")
    if isinstance(optimizer, LBFGS):
        raise ConfigError(
            "LBFGS cannot be guarded: it takes many steps in one call and learns its curvature "
            "from gradients of steps that would not have been taken"
        )
    return optimizer


def _projected(method: Method[Any], project: Projected | None) -> Projected:
    accepted = "'update' or 'gradient'"
    require(project in (None, "update", "gradient"), "project", project, accepted)
    if project == "update" and method.acts_on == "gradient":
        raise ConfigError(f"{method.name} changes the gradient and cannot project the update")
    return project or method.acts_on


def _storage_of(storage: str | Storage | None, max_rank: int | None) -> Storage:
    if not isinstance(storage, Storage):
        accepted = f"{', '.join(map(repr, STORAGES))} or a Storage"
        known = storage is None or (isinstance(storage, str) and storage in STORAGES)
        require(known, "storage", storage, accepted)
        storage = STORAGES[storage or "dense"]
    return storage if max_rank is None else replace(storage, max_rank=max_rank)
