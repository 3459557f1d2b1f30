"""The guard as a callback of transformers' Trainer."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack, final

import torch.distributed as dist
from safetensors import safe_open
from torch import nn

from forgetless.guard.frameworks.base import FILE, GuardCarrier, GuardOptions
from forgetless.methods import Method
from forgetless.support.validation import ForgetlessWarning

try:
    from transformers import (
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
except ImportError as error:
    raise ImportError("this needs transformers: pip install 'forgetless[transformers]'") from error

_NOTE = "forgetless"  # the callback's entry in a checkpoint's trainer_state.json
_FINISHED = "finished_at_step"  # in a file that has the task of its own training, too


@final
class GuardTrainerCallback(GuardCarrier, TrainerCallback):  # type: ignore[misc]
    """Preserves what a model has learned in one training through all later ones.

    Give the same callback to the `Trainer` of every task. It guards the trainer's optimizer and
    stores the task on its training data when training ends without an error. For a model that
    generates text it protects the log-likelihood of each sequence, unless `output` says otherwise.

    Every checkpoint has what is stored in `forgetless.safetensors`, which is loaded when training
    resumes from it; it warns if the file cannot be found. When the task is stored, after the last
    step, the file is written to the output folder and, with the task, to the last checkpoint
    again. In another run of the script the next task finds it, if the model comes from one of
    these folders by `from_pretrained` and no `protect` is given; otherwise `load` it.

    The numbers of `stats()` are logged as `guard_removed`, `guard_drift/task 1` and so on. In
    several processes (`torchrun`, `accelerate launch`) each does the same.

    Arguments:
        method: as for `Guard`, for example `PCAOGD(components=100)`, with its default.
        protect: data whose outputs must stay, of a pretrained model: a loader, batches or a
            dataset, stored before the first training as `Guard.protect` does.
        end_task: whether to store a task when training ends; if not, call `end_task` yourself.
        options: keyword arguments of `Guard`.
    """

    def __init__(
        self,
        method: Method[Any] | None = None,
        *,
        protect: Any = None,
        end_task: bool = True,
        **options: Unpack[GuardOptions],
    ) -> None:
        super().__init__(method, options, protect)
        self._ends_tasks = end_task
        self._folders: list[Path] = []  # of the finished task
        self._step = 0
        self._is_stored = False  # whether the task of this training is
        self._model: Any = None
        self._hook: Any = None

    def add_to(self, trainer: Trainer) -> None:
        """Add the callback to a trainer before its loggers, which are then given its numbers.

        Given as `Trainer(callbacks=[…])` it comes after them: the numbers are in the trainer's log
        history and in what it prints, but not in TensorBoard or Weights & Biases.
        """
        handler = trainer.callback_handler
        handler.callbacks = [self, *(one for one in handler.callbacks if one is not self)]

    def end_task(self, loader: Any, held_out: Any = None) -> None:
        """Store the task that was just learned, on data that `Guard.end_task` takes."""
        with _without_autocast(self._model):
            super().end_task(loader, held_out)
        self._save(*self._folders, metadata={_FINISHED: str(self._step)})

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Guard the optimizer that was made for this training."""
        self._model = kwargs["model"]
        self._folders, self._is_stored = [Path(args.output_dir)], False
        # Only the number of steps already made tells a callback that training resumes.
        if state.global_step > 0:
            self._resume(args, state)
        elif not self._has_memory and self._calibration is None:
            self._load_with_model(Path(args.output_dir))
        several = args.world_size > 1 and dist.is_initialized()
        self._attach(
            self._model, kwargs["optimizer"], {"process_group": dist.group.WORLD} if several else {}
        )
        size = args.per_device_train_batch_size
        batches = self._calibration_batches(size, kwargs["train_dataloader"])
        if batches is not None:
            with _without_autocast(self._model):
                self.guard.protect(batches)
        note = {"folder": str(Path(args.output_dir).absolute()), "tasks": self.guard.tasks}
        state.stateful_callbacks = {**(state.stateful_callbacks or {}), _NOTE: note}

    def _load_with_model(self, output: Path) -> None:
        """Load what is stored beside the weights that the model was loaded from."""
        home = getattr(self._model, "name_or_path", "")
        # Adapters are trained beside a model whose own file is of other parameters.
        if home and (Path(home) / FILE).exists() and not hasattr(self._model, "peft_config"):
            self.load(home)
        elif (output / FILE).exists():
            warnings.warn(
                f"{output / FILE} is of an earlier training and will be replaced: its tasks are "
                "not protected. To protect them call load(folder) before training",
                ForgetlessWarning,
                stacklevel=3,
            )

    def _resume(self, args: TrainingArguments, state: TrainerState) -> None:
        """Load what is stored with the checkpoint; the trainer does not tell where that is."""
        note = (state.stateful_callbacks or {}).get(_NOTE, {})
        given = args.resume_from_checkpoint
        folders = [Path(given)] if isinstance(given, str) else []
        folders += [
            Path(folder) / _checkpoint(args, state).name
            for folder in (args.output_dir, note.get("folder", args.output_dir))
        ]
        found = next((folder for folder in folders if (folder / FILE).exists()), None)
        if found is not None:
            self.load(found)
            with safe_open(found / FILE, "pt") as file:
                step = (file.metadata() or {}).get(_FINISHED)
            self._is_stored = step == str(state.global_step)
        elif note.get("tasks", 1):
            self._warn_if_unguarded(" or ".join(dict.fromkeys(map(str, folders))))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Show the batches of the coming step to the method: the model is called with them."""
        # A trainer that resumes at its last step, within an epoch, takes one more.
        self._is_stored = self._is_stored and state.global_step >= state.max_steps

        def observe(module: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
            # `num_items_in_batch` and its like are numbers, not samples.
            self.guard.observe({k: v for k, v in inputs.items() if getattr(v, "ndim", 1)})

        if self.guard.method.needs_batch:
            self._hook = self._model.register_forward_pre_hook(observe, with_kwargs=True)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Show no more, since the method may call the model as well."""
        if self._hook is not None:
            self._hook.remove()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Store the task, unless training resumed at its end."""
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        last = _checkpoint(args, state) if best is None else Path(best)
        self._folders += [last] if last.is_dir() else []
        self._step = state.global_step
        if self._ends_tasks and not self._is_stored:
            self.end_task(kwargs["train_dataloader"])

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the numbers of `stats()` to what the trainer logs of training."""
        if logs is not None and ("loss" in logs or "train_loss" in logs):
            numbers = self._numbers()
            logs.update(numbers)
            if state.log_history:
                state.log_history[-1].update(numbers)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save the stored tasks next to the weights."""
        self.save(_checkpoint(args, state))


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


@contextmanager
def _without_autocast(model: Any) -> Iterator[None]:
    """Without the autocast that accelerate has put around the model's `forward`."""
    original = getattr(model, "_original_forward", None)
    if original is None:
        yield
        return
    autocast, model.forward = model.forward, original
    try:
        yield
    finally:
        model.forward = autocast
