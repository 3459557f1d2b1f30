"""The guard as a callback of transformers' Trainer."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack, final

from safetensors.torch import load_file, save_file

from forgetless.guard import Guard
from forgetless.guard.frameworks.keeper import GuardOptions, Keeper
from forgetless.methods import Method
from forgetless.support.errors import ConfigError

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError("this needs transformers: pip install 'forgetless[transformers]'") from error

_FILE = "forgetless.safetensors"


@final
class GuardTrainerCallback(TrainerCallback):  # type: ignore[misc]
    """Keeps what a model has learned in one training through all that follow.

    Give the same callback to the `Trainer` of every task. It guards the trainer's optimizer and
    remembers the task on its training data when training ends without an error. Of a model that
    generates text the log-likelihood of each sequence is protected, unless `output` says otherwise.

    What is remembered is saved as `forgetless.safetensors` in every checkpoint, and loaded when
    training resumes from one in the trainer's output folder; `save` and `load` are for other
    folders. A task is remembered after its last checkpoint: `save` it then.

    Arguments:
        method: as `Guard` takes it, for example `PCAOGD(components=100)`.
        end_task: whether a task is remembered when training ends; if not, call `end_task` yourself.
        options: keyword arguments of `Guard`.
    """

    def __init__(
        self, method: Method[Any], *, end_task: bool = True, **options: Unpack[GuardOptions]
    ) -> None:
        self._keeper = Keeper(method, options)
        self._ends_tasks = end_task
        self._model: Any = None

    @property
    def guard(self) -> Guard:
        """The guard, once training has begun."""
        return self._keeper.guard

    def end_task(self, loader: Any) -> None:
        """Remember the task that was just learned, on data that `Guard.end_task` takes."""
        with _full_precision(self._model):
            self._keeper.end_task(loader)

    def save(self, folder: str | Path) -> None:
        """Write what is remembered to `forgetless.safetensors` in a folder."""
        save_file(self._keeper.state_dict(), Path(folder) / _FILE)

    def load(self, folder: str | Path) -> None:
        """Go on from what `save` wrote; before training has begun, as soon as it does."""
        self._keeper.load_state_dict(load_file(Path(folder) / _FILE))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Guard the optimizer that was made for this training."""
        if self._ends_tasks and args.world_size > 1:
            raise ConfigError(
                "each process would remember other samples: with several processes use "
                "GuardTrainerCallback(…, end_task=False) and call end_task with the same data in "
                "each"
            )
        # Callbacks are told that training resumes only by the number of steps already made.
        checkpoint = _checkpoint(args, state)
        if state.global_step > 0 and (checkpoint / _FILE).exists():
            self.load(checkpoint)
        self._model = kwargs["model"]
        self._keeper.watch(self._model, kwargs["optimizer"], _defaults(self._model))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remember the task."""
        if self._ends_tasks:
            self.end_task(kwargs["train_dataloader"])

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Put what is remembered beside the weights."""
        if state.is_world_process_zero:
            self.save(_checkpoint(args, state))


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


@contextmanager
def _full_precision(model: Any) -> Iterator[None]:
    """Run a model without the autocast that accelerate has put around its `forward`."""
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
