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
from forgetless.guard.batches.outputs import Loss, Named, Output, chosen_output
from forgetless.guard.batches.samples import StoredSamples, Unpack, unpacked
from forgetless.guard.distributed.loading import SharedTaskData
from forgetless.guard.distributed.sharding import broadcast_in_place, reshard, training_ranks
from forgetless.guard.drift import Drift, DriftCheck
from forgetless.guard.estimate import Estimate, Speed, working_device
from forgetless.guard.model import GuardedModel, full_precision
from forgetless.guard.parameters import (
    FrozenStatistics,
    Parameters,
    Params,
    chosen_parameters,
    grown_names,
    protected_names,
    unprotected,
    untrained_versions,
)
from forgetless.guard.report import MemoryReport, Stats, directions_report, samples_report
from forgetless.guard.state import (
    Snapshot,
    as_asked,
    chosen_storage,
    empty_shard,
    from_dict,
    require_rows_fit,
    to_dict,
    voted_storage,
)
from forgetless.guard.steps import Projected, Steps
from forgetless.guard.view import GuardedTask, GuardView
from forgetless.guard.watch import LOADS
from forgetless.methods import KronEWC, Method
from forgetless.methods.cost import TaskProbe, Work
from forgetless.methods.state import (
    check_state,
    check_storage,
    consolidated,
    grown_state,
    state_tensors,
)
from forgetless.subspace import STORAGES, Storage
from forgetless.support.memory import shortage_of
from forgetless.support.streams import stream
from forgetless.support.validation import (
    ConfigError,
    is_whole,
    parse_bytes,
    require,
    warn_caller,
    whole,
)
from forgetless.tangent.evaluation import eval_mode

_TRIED = 64  # samples that an estimate runs
_OWN = 20  # times that a guarded step reads or writes all weights besides the method


@final
class Guard:
    """Preserves what a model has learned while your own loop trains it on the next task.

    After `end_task` the method changes every step of the optimizer. Projections (KronOGD, GPM,
    PCA-OGD, A-GEM, …) change the optimizer's update, Δθ ← P Δθ, so momentum, weight decay and
    adaptive step sizes leak only the rounding of the weights, which is coarse in half precision;
    EWC and joint training add to the gradient. Only one guard can project a parameter's updates.

    Arguments:
        model: any module, compiled or not, in `DistributedDataParallel` or sharded by
            `fully_shard`: then every process makes the same calls.
        optimizer: any of `torch.optim` except LBFGS, or a list of those that train the model
            together: each one's steps are changed as if the parameters of the others were fixed.
        method: as for `fit`, for example `PCAOGD(components=100)`; by default `KronEWC()`.
        params: the protected parameters: None for all trained ones; names or beginnings of names
            (`"encoder"` is all of `encoder.*`), modules, parameters; or a function of the name.
            Parameters that are frozen now and trained later must be chosen here.
        exclude: names or beginnings of names that are not protected, such as heads.
        project: "update" projects the optimizer's update, "gradient" its gradient (as in the
            paper, exact for plain SGD only); by default the update if the method allows it.
        output: the protected scalars of a sample's outputs: "class", the true class's logit;
            "regression", every predicted number; "likelihood", the mean log-likelihood of a
            sequence's next tokens; "tokens", that of labels at their logits' positions; or a
            function of outputs and target to (n,) or (n, K). By default what fits a language
            model or tagger of transformers; otherwise "class" for integer targets (n,),
            "regression" for real or absent ones.
        loss: for methods that use a loss, a function of outputs and target to one number; by
            default cross-entropy (of sequences as `output` says), or squared error for real
            targets.
        unpack: from a batch of the loader to the model's inputs (a tensor, a tuple, a dict) and
            the target, if batches are not (input, target) pairs or dicts with labels.
        storage: how to store directions: "dense" (float32 rows), "bfloat16", "cpu" (rows in main
            memory while the model is on a GPU), "factored" (samples as factors), or a `Storage`.
        budget: bytes for directions, such as "512MB"; `memory_report()` shows the effect.
        max_rank: the most directions to store (`Storage` says which, if there are more).
        freeze_batch_norm: whether batch norm normalises by the running statistics of the first
            task from its end on, also in training, and no longer updates them.
        process_group: of `torch.distributed`: the processes that train the model together, if
            the model is given without the wrapper that tells.
        drift_samples: samples kept of each task, with the outputs on them, to check how far these
            move later (`drift()`); 0 keeps none and checks nothing.
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
        optimizer: Optimizer | Sequence[Optimizer],
        method: Method[Any] | None = None,
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
        freeze_batch_norm: bool = False,
        process_group: Any = None,
        drift_samples: int = 16,
        seed: int = 0,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        method = KronEWC() if method is None else method
        if not isinstance(method, Method):
            raise ConfigError(f"method must be such as PCAOGD(), not {method!r}")
        module = unwrapped(model)
        optimizers = _torch_optimizers(optimizer)
        exclude = (exclude,) if isinstance(exclude, str) else exclude
        self.method = method
        self.project = _projected(method, project)
        reshard(module)
        self._process_group = process_group
        chosen = chosen_parameters(module, params, exclude)
        self._parameters = Parameters(module, protected_names(module, optimizers, chosen))
        self._exclude = exclude
        self._chosen = None if params is None else chosen
        self._warned_of: set[str] = set()
        self._others = {} if params is not None else untrained_versions(module, optimizers, exclude)
        self.ranks = training_ranks(model, self._parameters.tensors, method, process_group)
        if self.ranks is not None and method.needs_batch:
            raise ConfigError(
                f"{method.name} uses the batch of every step, and each process has another one: "
                "it is for one process"
            )
        sharded = self._parameters.slices is not None
        output = chosen_output(output, module)
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
            raise ConfigError(
                f"budget= is for methods that keep directions, such as KronOGD, not {method.name}"
            )
        if self._budget is not None and sharded:
            raise ConfigError("budget= is not for sharded models: limit them by max_rank=")
        accepted = "0, or a whole number of at least 2"
        counted = is_whole(drift_samples) and drift_samples >= 0 and drift_samples != 1
        require(counted, "drift_samples", drift_samples, accepted)
        self._steps = self._new_steps(self._model)
        self._drift = DriftCheck(self._model, method, drift_samples, seed)
        self._frozen = FrozenStatistics(module) if freeze_batch_norm else None
        self._now: Snapshot | None = None  # before the first step that the method changes
        self._steps.attach(optimizers)
        self._groups = self._steps.groups

    @property
    def tasks(self) -> int:
        """How many tasks are stored."""
        return 0 if self._now is None else self._now.tasks

    @property
    def names(self) -> tuple[str, ...]:
        """The protected parameters."""
        return self._parameters.names

    def attach(self, optimizer: Optimizer | Sequence[Optimizer]) -> None:
        """Change another optimizer's steps from now on, for example one made for a new task.

        Arguments:
            optimizer: in place of the present one; a list of all if there are several.
        """
        reshard(self._model.module)
        self._parameters.check_current(self._model.module)
        self._steps.attach(_torch_optimizers(optimizer))
        self._groups = self._steps.groups
        self._freeze()

    def adopt(self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer]) -> None:
        """Continue with a model that has grown, such as by a head with more classes.

        Parameters are found by name. Their rows are the first rows of the new ones and stay
        protected; further rows are free until a task is stored with them, and so are further
        parameters, which are protected from then on if the guard protects all that is trained.

        Arguments:
            model: the model, the same object or another one.
            optimizer: one that trains it, or a list.
        """
        self._steps.watch.between_steps()
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        module, optimizers = unwrapped(model), _torch_optimizers(optimizer)
        reshard(module)
        old, chosen = self._parameters, self._chosen
        if chosen is None:
            chosen = chosen_parameters(module, None, _present(module, self._exclude))
        parameters = Parameters(module, grown_names(module, optimizers, old.names, chosen))
        growth = old.growth(parameters)
        ranks = training_ranks(model, parameters.tensors, self.method, self._process_group)
        grown = replace(self._model, module=module, parameters=parameters, ranks=ranks)
        steps = self._new_steps(grown)
        steps.check(optimizers, successor_of=self._steps)
        now = self._now and self._current()
        changed = old.changed_in(parameters)
        if now is not None:
            with full_precision(parameters.device):
                state = grown_state(self.method, now.state, growth, parameters.read())
            now = replace(now, state=state)
        if changed is not None and self.tasks:
            warn_caller(
                f"the weights of {changed} are not those of the model before, in the rows that "
                "both have, and what changed them is not protected: copy them before adopt"
            )
        self._steps.detach()
        self._parameters, self._model, self.ranks, self._steps = parameters, grown, ranks, steps
        self._drift.model = grown
        steps.attach(optimizers)
        self._groups = steps.groups
        if self._frozen is not None:
            self._frozen.restore()
            self._frozen = FrozenStatistics(module)
        if now is not None:
            self._set(now)

    def remove(self) -> None:
        """Detach from the optimizer; the stored tasks stay."""
        self._detach(complains=True)

    def _detach(self, *, complains: bool) -> None:
        steps = self._steps
        idle = self.method.protects and self.method.idle_before_first_task
        if complains and steps.is_attached and steps.steps and idle and not self.tasks:
            warn_caller(
                f"the guard is removed after {steps.steps} steps and no task is stored, so it has "
                "protected nothing: call guard.end_task(loader) when a task is learned"
            )
        steps.remove()
        if self._frozen is not None:
            self._frozen.restore()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._detach(complains=error[0] is None)

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

    def protect(self, data: Any) -> None:
        """Store what the model does now: before the first task, what a pretrained model can do.

        As `end_task` does, at the present weights, and counted as a task: it is number one in the
        reports, and `refresh` takes its data first.

        Arguments:
            data: inputs whose outputs must stay, with labels if the method or `output` needs them:
                an iterable of batches such as a `DataLoader`, or one batch.
        """
        self.end_task(data)

    def end_task(self, loader: Any) -> None:
        """Store the task that was just learned, at the present weights.

        Arguments:
            loader: its training data: an iterable of batches such as a `DataLoader`, or one batch.
        """
        self._steps.warn_if_full()
        self._steps.watch.between_steps()
        removed = self._steps.removed.share()
        self._prepare()
        self._warn_of_unprotected()
        with self._all_or_nothing():
            drift = self._drift.measured(self._steps.steps)
            self._set(self._with_task(self._current(), loader))
        self._drift.report(drift, removed, ends=True)

    def refresh(self, *loaders: Any) -> None:
        """Replace what is stored of all earlier tasks, at the present weights.

        Directions are computed at the weights at the end of their task, and age in training.

        Arguments:
            loaders: data of the earlier tasks, one loader each.
        """
        wanted = f"{self.tasks}, one for each earlier task"
        require(len(loaders) == self.tasks, "refresh's loaders", len(loaders), wanted)
        self._steps.watch.between_steps()
        with self._all_or_nothing():
            now = replace(self._initial(), kept=self._current().kept)
            for loader in loaders:
                now = self._with_task(now, loader)
            self._set(now)

    def estimate(self, data: Any = None) -> Estimate:
        """What storing the next task will cost, before anything is stored.

        A few samples are run forward and backward to see the layers' use and the time that they
        take; the model, torch's random state and the guard stay as they are. A model on the device
        "meta", without weights, is estimated for this machine.

        Arguments:
            data: what `end_task` will be given; without it some methods' bytes are unknown, and the
                seconds of all.
        """
        if self.ranks is not None:
            raise ConfigError("estimate is for a model on one process")
        if isinstance(data, Iterator):
            raise ConfigError(
                "estimate's data must be readable once more by end_task, as a list or a loader "
                "is, not an iterator"
            )
        self._parameters.check_current(self._model.module)
        devices = [self._parameters.device] if self._parameters.device.type == "cuda" else []
        with torch.random.fork_rng(devices), full_precision(self._parameters.device):
            return self._estimated(data)

    def _estimated(self, data: Any) -> Estimate:
        size = sample_bytes = samples = None
        if data is not None:
            task = TaskData(data, self._unpack, torch.Generator())
            size, few = task.known_size, task.few(_TRIED)
            sample_bytes = sum(t.nbytes for t in few.named().values()) // len(few)
            samples = StoredSamples((few,))
        storage, model = self._storage if self._now is None else self._now.storage, self._model
        chooses = self._budget is not None and self._asked is None and not self.tasks
        if chooses and samples is not None:
            phi = model.features(StoredSamples((few.mapped(lambda t: t[:4]),)))
            storage = replace(chosen_storage(phi, self.method), max_rank=storage.max_rank)
        probe = TaskProbe(
            self.tasks,
            self.memory_report().bytes if self.tasks else 0,
            self._parameters.layout,
            self._parameters.empty().element_size(),
            storage,
            size,
            sample_bytes,
            lambda: model.moment_shapes(samples),
            None if samples is None else lambda: model.features(samples),
            None if samples is None else lambda: model.input_shapes(samples),
        )
        cost = self.method.cost(probe)
        words = str(storage) if self.method.demand() is not None else self.method.label
        if cost is None:
            name = type(self.method).__name__
            reason = f"{name} does not say what it stores (Method.cost)"
            known = type(self.method).cost is not Method.cost or self.method.demand() is not None
            if known:
                missing = "data" if data is None else "data whose size is known"
                reason = f"{name} needs {missing} for that"
            return Estimate(words, None, None, None, None, notes=(reason,))
        least, most = cost.least, cost.most
        if self._budget is not None and most > self._budget:
            least, most = 0, self._budget
        speed = None if samples is None else Speed(model, samples)
        # What is stored already is not free.
        needed, device = cost.peak - probe.stored, working_device(self._parameters.device)
        own = Work(bytes=_OWN * probe.vector if self.method.protects else 0)
        notes = [] if data is not None else ["without data every layer counts as used, on its own"]
        if self._parameters.device.type == "meta" and speed is not None:
            notes.append("without weights: seconds are multiplications at this machine's speed")
        if size is None:
            notes.append("the number of samples is unknown: the method's most are counted")
        return Estimate(
            words,
            (least, most),
            cost.peak,
            None if speed is None else speed.seconds(cost.storing),
            None if speed is None else speed.seconds(cost.step) + speed.seconds(own),
            shortage_of("storing the task", needed, device),
            tuple(notes),
        )

    def stats(self) -> Stats:
        """How much of the steps was removed since the latest task was stored, and the drift.

        The drift is as last measured; `drift()` measures it now.
        """
        self._steps.watch.between_steps()
        removed, state = self._steps.removed.stats(), self._steps.state
        numbers = self.method.metrics(state) if self.tasks else {}
        return replace(removed, tasks=self.tasks, drift=self._drift.latest, method=numbers)

    def drift(self) -> Drift:
        """How far the outputs on the samples kept of each task have moved since it was stored.

        The guard measures it by itself after 100, 200, 400, … steps for each stored task and when a
        task ends, and warns once if a task is being forgotten.
        """
        self._steps.watch.between_steps()
        if self.tasks and not self._drift.kept:
            raise ConfigError(
                "the drift cannot be measured: no samples are kept of any task, because the guard "
                "has drift_samples=0 or loaded a state without them"
            )
        drift = self._drift.measure(self._steps.steps)
        self._drift.latest = drift if drift.tasks else None
        return drift

    def metrics(self) -> dict[str, float]:
        """The numbers of `stats()` for a logger, by name: "removed", "drift/task 1" and so on."""
        return self.stats().metrics()

    def memory_report(self) -> MemoryReport:
        """Bytes, directions and share of variance, per task and per layer."""
        now = self._current()
        report = (
            directions_report(now.state, self._parameters.layout.columns, now.notes)
            if self.method.keeps_directions
            else samples_report(now.state, now.tasks)
        )
        kept = [t.nbytes for samples in now.kept.values() for t in samples.tensors().values()]
        return replace(report, drift_check=sum(kept))

    def state_dict(self) -> dict[str, Tensor]:
        """All that is stored, as tensors: for `torch.save`, or safetensors' `save_file`."""
        self._steps.watch.between_steps()
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
        self._steps.watch_from_now(may_load=True)  # the model's own weights may come after
        self._drift.latest = None

    def _prepare(self) -> None:
        """Make the first state, or bring the state to the model's device and precision."""
        if self._steps.groups != self._groups:  # by `optimizer.add_param_group`
            self._groups = self._steps.groups
            self._warn_of_unprotected()
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
        self._drift.start(snapshot.kept, snapshot.steps)
        self._freeze()

    def _freeze(self) -> None:
        if self._frozen is not None and self.tasks:
            self._frozen.freeze()

    def _check_drift(self) -> None:
        """Let the method adapt, and measure the drift, if it is time."""
        self._steps.state = self._drift.adapted(self._steps.state, self._steps.steps)
        if self._drift.is_due(self._steps.steps):
            drift = self._drift.measured(self._steps.steps)
            self._drift.report(drift, self._steps.removed.share())

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
        step, optimizers = self._steps.steps, self._steps.optimizers
        return GuardView(
            model, self._generators[1], storage, task=task, step=step, optimizers=optimizers
        )

    def _new_steps(self, model: GuardedModel) -> Steps:
        return Steps(
            model,
            self.method,
            self.project,
            self._generators[1],
            self._prepare,
            self._check_drift,
            self._column_ranks,
        )

    def _warn_of_unprotected(self) -> None:
        """Warn, once for each, of a parameter that is trained and should be protected, but is not.

        It was not trained when the guard was made, or is by an optimizer that the guard lacks.
        """
        known = {*self.names, *self._warned_of}
        module, optimizers = self._model.module, self._steps.optimizers
        exclude = _present(module, self._exclude)
        new = unprotected(module, optimizers, known, self._chosen, exclude)
        if new:
            self._warned_of |= {*new}
            warn_caller(
                f"{new[0]} is trained now and was not when the guard was made, so it is not "
                "protected: call guard.adopt(model, optimizer), or choose by params= what is "
                "protected if that is meant"
            )
        versions = untrained_versions(module, optimizers, exclude)
        trained = [n for n, v in versions.items() if v > self._others.get(n, v) + LOADS]
        moved = [name for name in trained if name not in known]
        if moved:
            self._warned_of |= {*moved}
            warn_caller(
                f"{moved[0]} is trained by an optimizer that the guard was not given, so it is not "
                "protected: make the guard with all of them, Guard(model, [a, b], …), or choose by "
                "params= what is protected if that is meant"
            )

    def _warn_of_blind(self, names: Sequence[str]) -> None:
        """Warn, once for each, of parameters whose gradient was zero when the task was stored."""
        new = [name for name in names if name not in self._warned_of]
        self._warned_of |= {*new}
        if new:
            others = f" (and of {len(new) - 1} more)" if new[1:] else ""
            warn_caller(
                f"the gradient of {new[0]}{others} is zero on all samples of the task, so it is "
                "not protected, though it may matter later. The first factor of a fresh LoRA "
                "adapter is so while its second factor is zero: call guard.refresh(loader) after "
                "some steps, or train the adapter before end_task. In other layers, see whether "
                "training has diverged or units have died"
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
        chooses, number = self._generators[0], now.tasks + 1
        aside = self._drift.reservoir(number)
        data: TaskData | SharedTaskData = (
            TaskData(loader, self._unpack, chooses, aside)
            if self.ranks is None
            else SharedTaskData(loader, self._unpack, chooses, self.ranks, aside)
        )
        chooses_storage = self._asked is None and self.method.demand() is not None
        if self._budget is not None and chooses_storage and not now.tasks:
            now = self._with_chosen_storage(now, data)
        if isinstance(data, TaskData):
            require_rows_fit(self.method, now.storage, self._parameters, data.known_size)
        task = GuardedTask(self._model, data)
        view = self._view(task.model, now.storage, now.tasks)
        with eval_mode(task.model.module):
            state = consolidated(self.method, now.state, view, task, 1)
        if self.method.needs_model:
            task.check()
        of_loss = not self.method.keeps_directions
        is_penalty = self.method.acts_on == "gradient" and not self.method.needs_model
        if self.method.protects and (self.method.separable or is_penalty or not of_loss):
            self._warn_of_blind(task.blind(of_loss=of_loss))
        storage, notes = now.storage, now.notes
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
        kept = self._drift.keep(now.kept, number, data)
        return Snapshot(state, storage, number, now.steps, notes, self._random(), kept)

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


def _present(module: nn.Module, exclude: Sequence[str]) -> tuple[str, ...]:
    """The excluded names that a changed model still has."""
    own = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    return tuple(e for e in exclude if any(n == e or n.startswith(f"{e}.") for n in own))


def _torch_optimizers(optimizer: Any) -> list[Optimizer]:
    """The torch optimizers of one or a list."""
    if not isinstance(optimizer, list | tuple):
        return [_torch_optimizer(optimizer)]
    if not optimizer:
        raise ConfigError("optimizer must be one or a list of at least one, not an empty list")
    found = [*map(_torch_optimizer, optimizer)]
    if len({*map(id, found)}) < len(found):
        raise ConfigError("optimizer must be a list of different optimizers, and has one twice")
    return found


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
