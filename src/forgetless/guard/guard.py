"""A continual-learning method attached to a user's model and optimizer."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Never, Self, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from forgetless.guard.account import account
from forgetless.guard.batches.loading import Reservoir, TaskData
from forgetless.guard.batches.outputs import Loss, Named, Output, chosen_output
from forgetless.guard.batches.samples import StoredSamples, Unpack, unpacked
from forgetless.guard.distributed.loading import SharedTaskData
from forgetless.guard.distributed.sharding import broadcast_in_place, reshard, training_ranks
from forgetless.guard.drift import Drift, DriftCheck, Score, scored
from forgetless.guard.estimate import Estimate, estimated
from forgetless.guard.history import NumberLogger, history_for
from forgetless.guard.model import GuardedModel, full_precision, unwrapped
from forgetless.guard.parameters import (
    FrozenStatistics,
    Parameters,
    Params,
    chosen_parameters,
    grown_names,
    has_moving_statistics,
    protected_names,
)
from forgetless.guard.report import MemoryReport, Stats, directions_report, samples_report
from forgetless.guard.state import (
    Snapshot,
    as_asked,
    chosen_storage,
    empty_shard,
    from_dict,
    method_name,
    require_rows_fit,
    storage_of,
    to_dict,
    voted_storage,
)
from forgetless.guard.steps import Projected, Steps, projected, torch_optimizers
from forgetless.guard.view import GuardedTask, GuardView
from forgetless.guard.watch import Coverage
from forgetless.methods import KronEWC, KronOGD, Method, method_calls
from forgetless.methods.state import (
    check_state,
    check_storage,
    consolidated,
    grown_state,
    state_tensors,
)
from forgetless.subspace import Storage
from forgetless.support.progress import bar_on_terminal
from forgetless.support.streams import stream
from forgetless.support.validation import (
    ConfigError,
    did_you_mean,
    is_whole,
    parse_bytes,
    require,
    warn_caller,
    whole,
)
from forgetless.tangent.evaluation import eval_mode

_DEFAULTS: tuple[Method[Any], ...] = (KronEWC(), KronOGD())  # of a guard that is given no method


@final
class Guard:
    """Preserves what a model has learned while your own loop trains it on the next task.

    After `end_task` the method changes every step of the optimizer. Projections (KronOGD, GPM,
    PCA-OGD, A-GEM, …) change the optimizer's update, Δθ ← P Δθ, so momentum, weight decay and
    adaptive step sizes leak only the rounding of the weights. In half precision, where that is
    coarse, what a step could not change is added to later ones, so that it never adds up;
    KronEWC, EWC and joint training add to the gradient. Only one guard can project a parameter's
    updates.

    Arguments:
        model: any module, compiled or not, in `DistributedDataParallel` or sharded by
            `fully_shard`: then every process makes the same calls.
        optimizer: any of `torch.optim` except LBFGS, or a list of those that train the model
            together: each one's steps are changed as if the parameters of the others were fixed.
        method: as for `fit`, for example `PCAOGD(components=100)`; by default `KronEWC()`, and
            `KronOGD()` if `protect` begins with what a causal language model does.
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
            move later (`drift()`), which KronEWC follows; 0 keeps none and checks nothing.
        seed: of the choice of samples.
        progress: whether a bar shows on a terminal how far `end_task` is, if it takes long.
        log: where the numbers of `metrics()` go, now and then and when a task ends: "tensorboard",
            "mlflow", "wandb" or several of them, comma-separated, into a new folder in `runs/`; or
            a logger of `forgetless.report.loggers`, or any object with `log(step, numbers)`.

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
        progress: bool = True,
        log: str | NumberLogger | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model must be a torch.nn.Module, not {type(model).__name__}")
        self._is_default = method is None
        method = KronEWC() if method is None else method
        if not isinstance(method, Method):
            meant = did_you_mean(method, method_calls())
            raise ConfigError(f"method must be such as PCAOGD(), not {method!r}{meant}")
        module = unwrapped(model)
        optimizers = torch_optimizers(optimizer)
        exclude = (exclude,) if isinstance(exclude, str) else exclude
        self.method = method
        self.progress = progress
        self._project = project
        self.project = projected(method, project)
        reshard(module)
        self._process_group = process_group
        chosen = chosen_parameters(module, params, exclude)
        self._parameters = Parameters(module, protected_names(module, optimizers, chosen))
        self._coverage = Coverage(None if params is None else chosen, exclude, self._warn)
        self._coverage.begin(module, optimizers)
        self.ranks = training_ranks(model, self._parameters.tensors, method, process_group)
        if self.ranks is not None and method.needs_batch:
            raise ConfigError(
                f"{method.name} uses the batch of every step, and each process has another one: "
                "it is for one process"
            )
        sharded = self._parameters.slices is not None
        output = chosen_output(output, module)
        self._generates = output == "likelihood"
        for argument, value in {"loss": loss, "unpack": unpack}.items():
            fits = value is None or callable(value)
            require(fits, argument, value, "a function or None")
        self._model = GuardedModel(module, self._parameters, output, Loss(loss, output), self.ranks)
        self._unpack = unpack
        self._budget = None if budget is None else parse_bytes(budget)
        self._column_ranks = self.ranks if sharded else None
        layout = self._parameters.layout if sharded else None
        self._storage = replace(
            storage_of(storage, max_rank), ranks=self._column_ranks, layout=layout
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
        writes = self.ranks is None or self.ranks.rank == 0
        self._history = history_for(log, self._settings, writes=writes)
        self._steps = self._new_steps(self._model)
        self._drift = DriftCheck(self._model, method, drift_samples, seed, self._warn)
        self._drift_options = drift_samples, seed
        self._frozen = FrozenStatistics(module) if freeze_batch_norm else None
        self._now: Snapshot | None = None  # before the first step that the method changes
        self._finished: Stats | None = None  # of the task that was stored last
        self._attach(optimizers)

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
        self._attach(torch_optimizers(optimizer))
        self._freeze()
        if self.tasks:
            self._warn_of_unprotected()

    def _attach(self, optimizers: Sequence[Optimizer]) -> None:
        self._steps.attach(optimizers)
        self._coverage.has_new_groups(self._steps.groups)

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
        module, optimizers = unwrapped(model), torch_optimizers(optimizer)
        reshard(module)
        old, chosen = self._parameters, self._coverage.chosen
        if chosen is None:
            chosen = chosen_parameters(module, None, self._coverage.excluded(module))
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
            now = replace(now, state=state, rest=None)
        if changed is not None and self.tasks:
            self._warn(
                f"the weights of {changed} are not those of the model before, in the rows that "
                "both have, and what changed them is not protected: copy them before adopt"
            )
        self._steps.detach()
        self._parameters, self._model, self.ranks, self._steps = parameters, grown, ranks, steps
        self._drift.model = grown
        self._attach(optimizers)
        if self._frozen is not None:
            self._frozen.restore()
            self._frozen = FrozenStatistics(module)
        if now is not None:
            self._set(now)

    def has_grown(self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer]) -> bool:
        """Whether a model has other shapes or more trained parameters: `adopt` it, if it grew.

        Arguments:
            model: the model.
            optimizer: one that trains it, or a list.
        """
        module, optimizers = unwrapped(model), torch_optimizers(optimizer)
        new = {name: tuple(p.shape) for name, p in module.named_parameters()}
        old = self._parameters.shapes
        differs = any(new.get(name, shape) != shape for name, shape in old.items())
        return differs or bool(self._coverage.unprotected(module, optimizers, self.names))

    def remove(self) -> None:
        """Detach from the optimizer; the stored tasks stay."""
        self._detach(complains=True)

    def _detach(self, *, complains: bool) -> None:
        if complains and self._steps.is_in_vain:
            self._warn(
                f"the guard is removed after {self._steps.steps} steps and no task is stored, so "
                "it has protected nothing: call guard.end_task(loader) when a task is learned"
            )
        self._steps.remove()
        self._history.close()
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

    def protect(self, data: Any, held_out: Any = None) -> None:
        """Store what the model does now: before the first task, what a pretrained model can do.

        As `end_task` does, at the present weights, and counted as a task: it is number one in the
        reports, and `refresh` takes its data first. A guard that was given no method takes
        `KronOGD()` from here on if the model is a causal language model: KronEWC lets a task's loss
        rise by 0.2 nats, and where every token has a whole distribution to keep that is much.

        Arguments:
            data: inputs whose outputs must stay, with labels if the method or `output` needs them:
                an iterable of batches such as a `DataLoader`, or one batch.
            held_out: as of `end_task`.
        """
        before = self.method
        if self._protects_by_default:
            self._take(KronOGD())
        try:
            self.end_task(data, held_out)
        except BaseException:
            self._take(before)
            raise

    @property
    def _protects_by_default(self) -> bool:
        """Whether `protect` chooses the method."""
        return self._is_default and self._generates and not self.tasks

    def _take(self, method: Method[Any]) -> None:
        """Another method, with nothing stored yet."""
        if method is self.method:
            return
        self._steps.watch.between_steps()
        old = self._steps
        self.method, self.project = method, projected(method, self._project)
        self._steps = self._new_steps(self._model)
        self._drift = DriftCheck(self._model, method, *self._drift_options, self._warn)
        self._now = None
        old.detach()
        if old.optimizers:
            self._attach(old.optimizers)

    def end_task(self, loader: Any, held_out: Any = None) -> None:
        """Store the task that was just learned, at the present weights.

        Arguments:
            loader: its training data: an iterable of batches such as a `DataLoader`, or one batch.
            held_out: data of the task that it was not trained on, of the same form: the samples to
                check the drift on are taken from it, in place of the training data.
        """
        if held_out is not None and not self._drift.samples:
            raise ConfigError("held_out= is for the drift check, and drift_samples=0 keeps none")
        self._steps.warn_if_full()
        self._steps.watch.between_steps()
        finished = self._stats()
        taken = self._taken
        self._prepare()
        self._warn_of_unprotected()
        with self._bar(f"storing task {self.tasks + 1}"), self._all_or_nothing():
            drift = self._drift.measured(self._steps.steps)
            self._set(self._with_task(self._current(), loader, held_out))
        ended = replace(finished, drift=drift)
        self._history.add(self._steps.steps, self.tasks, ended.metrics() if taken else {})
        self._history.store(self._steps.steps, self.tasks)
        self._drift.report(drift, finished.share, finished.pull, ends=True, steps=taken)
        if not self._steps.has_warned_of_full:
            self._drift.report_learning(self.tasks, finished.blocked, finished.pull)
        if finished.tasks:  # what preserved none has nothing to tell
            self._finished = replace(finished, tasks=self.tasks, drift=drift)

    def refresh(self, *loaders: Any) -> None:
        """Replace what is stored of all earlier tasks, at the present weights.

        Directions are computed at the weights at the end of their task, and age in training.

        Arguments:
            loaders: data of the earlier tasks, one loader each.
        """
        wanted = f"{self.tasks}, one for each earlier task"
        require(len(loaders) == self.tasks, "refresh's loaders", len(loaders), wanted)
        self._steps.watch.between_steps()
        with self._bar("refreshing"), self._all_or_nothing():
            old = self._current()
            now = replace(self._initial(), kept=old.kept, rest=old.rest)
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
            return estimated(
                data,
                self._model,
                KronOGD() if self._protects_by_default and not self._steps.steps else self.method,
                self._storage if self._now is None else self._now.storage,
                tasks=self.tasks,
                stored=self.memory_report().bytes if self.tasks else 0,
                unpack=self._unpack,
                budget=self._budget,
                chooses=self._budget is not None and self._asked is None and not self.tasks,
            )

    def stats(self) -> Stats:
        """How much of the steps was removed since the latest task was stored, and the drift.

        Until the first step after `end_task`, that of the finished task. The drift is as last
        measured; `drift()` measures it now.
        """
        self._steps.watch.between_steps()
        has_begun = self._now is not None and self._steps.steps > self._now.steps
        if self._finished is not None and not has_begun:
            return self._finished
        return replace(self._stats(), drift=self._drift.latest)

    def _stats(self) -> Stats:
        numbers = self.method.metrics(self._steps.state) if self.tasks else {}
        return replace(self._steps.removed.stats(), tasks=self.tasks, method=numbers)

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

    def report(
        self, path: str | os.PathLike[str] = "guard.html", *, held_out: Sequence[Any] | None = None
    ) -> Path:
        """Write a page of what the guard has done: tasks, layers, numbers over the steps, advice.

        The drift is measured now; what was measured before is that of this guard object, not of a
        loaded state. Every process calls it, and the first one writes.

        Arguments:
            path: the HTML file, which opens without a network.
            held_out: data of each stored task in order, None for those without: the page has the
                accuracy and the loss on all of it, at the present weights.

        Returns:
            the file.
        """
        data = [] if held_out is None else list(held_out)
        wanted = f"a list of at most {self.tasks}, one loader for each stored task"
        require(len(data) <= self.tasks, "report's held_out", len(data), wanted)
        with self._bar("report"):
            scores = {
                number: scored(
                    self._model, TaskData(one, self._unpack, self._generators[0]).batches()
                )
                for number, one in enumerate(data, 1)
                if one is not None
            }
            content = self._account(scores)
        for number, score in scores.items():
            found = self._history.scores.setdefault(number, [])
            found.append((self._steps.steps, score.accuracy, score.loss))
        # What draws pages is not needed where none is drawn.
        from forgetless.report.guard_page import write_guard_page

        if self.ranks is None or self.ranks.rank == 0:
            write_guard_page(content, path)
        return Path(path)

    def _account(self, scores: Mapping[int, Score]) -> dict[str, Any]:
        stats, module = self.stats(), self._model.module
        drift = self._drift.measured(self._steps.steps) if self._drift.kept else None
        optimizers, names = self._steps.optimizers, {*self.names}
        trained = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        free = {
            name: p.numel()
            for name, p in module.named_parameters()
            if id(p) in trained and name not in names
        }
        return account(
            self.method,
            type(module).__name__,
            steps=self._steps.steps,
            shapes=self._parameters.shapes,
            free=free,
            missed=self._coverage.unprotected(module, optimizers, self.names),
            memory=self.memory_report(),
            stats=replace(stats, drift=drift),
            kept={task: len(samples) for task, samples in self._drift.kept.items()},
            scores=scores,
            history=self._history,
            has_moving_statistics=has_moving_statistics(module),
        )

    def _settings(self) -> dict[str, Any]:
        """What a logger shows beside the numbers."""
        return {"method": self.method.name, **{k: str(v) for k, v in vars(self.method).items()}}

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
        stored = method_name(state_dict)
        method = next((m for m in _DEFAULTS if self._is_default and m.name == stored), self.method)
        with full_precision(self._parameters.device):
            snapshot = self._restored(state_dict, method)
            self._take(method)
            if self.method.keeps_directions:
                limits = self._asked, self._storage.max_rank, self._budget
                snapshot = as_asked(snapshot, self._empty, self._parameters.read(), *limits)
        self._set_random(snapshot.generators)
        self._set(snapshot)
        self._steps.watch_from_now(may_load=True)  # the model's own weights may come after
        self._drift.latest = None

    def _prepare(self) -> None:
        """Make the first state, or bring the state to the model's device and precision."""
        if self._coverage.has_new_groups(self._steps.groups):  # by `optimizer.add_param_group`
            for optimizer in self._steps.optimizers:
                self._look_at(optimizer)
        if self._now is None:
            self._set(self._initial())
        elif self._steps.place != self._parameters.place:
            with full_precision(self._parameters.device):
                self._set(self._restored(self.state_dict()))

    def _restored(
        self, state_dict: Mapping[str, Tensor], method: Method[Any] | None = None
    ) -> Snapshot:
        return from_dict(state_dict, method or self.method, self._parameters, self._column_ranks)

    def _set(self, snapshot: Snapshot) -> None:
        self._now, self._finished = snapshot, None
        self._parameters.rest = snapshot.rest
        self._steps.set_state(snapshot.state, snapshot.storage, snapshot.tasks, snapshot.steps)
        self._drift.start(snapshot.kept, snapshot.steps)
        self._freeze()

    def _freeze(self) -> None:
        if self._frozen is not None and self.tasks:
            self._frozen.freeze()

    def _check_drift(self) -> None:
        """Let the method adapt, and measure the drift, if it is time."""
        self._steps.state = self._drift.adapted(self._steps.state, self._steps.steps)
        drift = None
        if self._drift.is_due(self._steps.steps):
            drift = self._drift.measured(self._steps.steps)
            self._drift.report(drift, self._steps.removed.stats().share)
        # Of several processes all would have to sum up together.
        if self.ranks is None and (drift or self._history.is_due(self._taken)):
            numbers = replace(self._stats(), drift=drift).metrics()
            self._history.add(self._steps.steps, self.tasks + 1, numbers)

    @property
    def _taken(self) -> int:
        """The steps since the latest task was stored."""
        return self._steps.steps - (0 if self._now is None else self._now.steps)

    def _warn(self, message: str) -> None:
        """Warn at the user's line, and remember it for the page."""
        if hasattr(self, "_steps"):
            self._history.warnings.append((self._steps.steps, message))
        warn_caller(message)

    def _current(self) -> Snapshot:
        """All that is stored, with the changes of the steps since the latest task."""
        if self._now is None:  # the first state is that of the weights at the first step
            return self._initial()
        now: Snapshot = self._now
        rest = self._parameters.rest
        return replace(now, state=self._steps.state, steps=self._steps.steps, rest=rest)

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
            self._look_at,
            self._column_ranks,
            self._shows_progress,
            self._warn,
        )

    def _warn_of_unprotected(self) -> None:
        self._coverage.warn(self._model.module, self._steps.optimizers, self.names)

    def _look_at(self, optimizer: Optimizer) -> None:
        """Warn of what an optimizer trains and the guard does not protect."""
        self._warn_of_unprotected()
        replaced = self._parameters.replaced_in(self._model.module, optimizer)
        self._coverage.warn_of_replaced(replaced)

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

    def _bar(self, what: str) -> AbstractContextManager[None]:
        return bar_on_terminal(what) if self._shows_progress else nullcontext()

    @property
    def _shows_progress(self) -> bool:
        """Whether there may be a bar; of several processes one has it."""
        return self.progress and (self.ranks is None or self.ranks.rank == 0)

    def _task_data(self, loader: Any, aside: Reservoir | None) -> TaskData | SharedTaskData:
        """The samples of a loader, of which some are set aside on the way."""
        common = loader, self._unpack, self._generators[0]
        if self.ranks is None:
            return TaskData(*common, aside)
        return SharedTaskData(*common, self.ranks, aside)

    def _with_task(self, now: Snapshot, loader: Any, held_out: Any = None) -> Snapshot:
        """One more task stored."""
        number = now.tasks + 1
        aside = self._drift.reservoir(number)
        data = self._task_data(loader, aside if held_out is None else None)
        checked = data if held_out is None else self._task_data(held_out, aside)
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
        asks = self.method.protects and (self.method.separable or is_penalty or not of_loss)
        asks = asks and not view.by_inputs.issuperset(self.names)
        asks = asks and (of_loss or not state.reaches(self._parameters.layout.columns))
        if self._column_ranks is not None:  # each knows its own columns, and all run the model
            asks = bool(self._column_ranks.sum(torch.tensor(int(asks))))
        if asks:
            blind = task.blind(of_loss=of_loss)
            self._coverage.warn_of_blind([name for name in blind if name not in view.by_inputs])
        storage, notes = now.storage, now.notes
        alike = self.method.needs_model or self.method.separable
        if self.ranks is not None and self._column_ranks is None and not alike:
            broadcast_in_place(state_tensors(state, 0), self.ranks)
        if self.method.keeps_directions:
            note = None
            if self._budget is not None:
                state, note = state.within(self._budget)
            if note is not None:
                self._warn(f"task {number}: {note}")
                notes = (*notes, f"task {number}: {note}")
            storage = state.storage
        kept = self._drift.keep(now.kept, number, checked)
        random = self._random()
        return Snapshot(state, storage, number, now.steps, notes, random, kept, now.rest)

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
