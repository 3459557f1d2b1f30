"""The guard as a callback of transformers' Trainer."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack, final

from safetensors.torch import load_file, save_file
from torch import nn

from forgetless.guard.frameworks.base import GuardCarrier, GuardOptions, require_one_process
from forgetless.methods import Method

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError("this needs transformers: pip install 'forgetless[transformers]'") from error

_FILE = "forgetless.safetensors"


@final
class GuardTrainerCallback(GuardCarrier, TrainerCallback):  # type: ignore[misc]
    """Preserves what a model has learned in one training through all later ones.

    Give the same callback to the `Trainer` of every task. It guards the trainer's optimizer and
    stores the task on its training data when training ends without an error. For a model that
    generates text it protects the log-likelihood of each sequence, unless `output` says otherwise.

    Every checkpoint has the stored tasks in `forgetless.safetensors`, which training loads when it
    resumes from the trainer's output folder; `save` and `load` are for other folders. The last
    task is stored after its last checkpoint: `save` it then.

    Arguments:
        method: as for `Guard`, for example `PCAOGD(components=100)`.
        end_task: whether to store a task when training ends; if not, call `end_task` yourself.
        options: keyword arguments of `Guard`.
    """

    def __init__(
        self, method: Method[Any], *, end_task: bool = True, **options: Unpack[GuardOptions]
    ) -> None:
        super().__init__(method, options)
        self._ends_tasks = end_task
        self._model: Any = None
        self._hook: Any = None

    def end_task(self, loader: Any) -> None:
        """Store the task that was just learned, on data that `Guard.end_task` takes."""
        with _without_autocast(self._model):
            super().end_task(loader)

    def save(self, folder: str | Path) -> None:
        """Write all that is stored to `forgetless.safetensors` in a folder."""
        save_file(self.state_dict(), Path(folder) / _FILE)

    def load(self, folder: str | Path) -> None:
        """Continue from what `save` wrote, at the latest when training begins."""
        self.load_state_dict(load_file(Path(folder) / _FILE))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Guard the optimizer that was made for this training."""
        if self._ends_tasks:
            require_one_process(args.world_size, type(self).__name__)
        # Only the number of steps already made tells a callback that training resumes.
        checkpoint = _checkpoint(args, state)
        if state.global_step > 0 and (checkpoint / _FILE).exists():
            self.load(checkpoint)
        self._model = kwargs["model"]
        self._attach(self._model, kwargs["optimizer"], _defaults(self._model))

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Show the batches of the coming step to the method: the model is called with them."""

        def observe(module: nn.Module, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
            # `num_items_in_batch` and its like are numbers, not samples.
            self.guard.observe({k: v for k, v in inputs.items() if getattr(v, "ndim", 1)})

        if self._method.needs_batch:
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
        """Store the task."""
        if self._ends_tasks:
            self.end_task(kwargs["train_dataloader"])

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save the stored tasks next to the weights."""
        if state.is_world_process_zero:
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


def _defaults(model: Any) -> GuardOptions:
    """The likelihood of sequences for models that generate them."""
    if not hasattr(model, "can_generate") or not model.can_generate():
        return {}
    return {"output": "tokens" if model.config.is_encoder_decoder else "likelihood"}
