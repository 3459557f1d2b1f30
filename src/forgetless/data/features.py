"""Tasks as a frozen network sees them: its features of every sample, computed once."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from forgetless.data.scenarios import Scenario, Split, Task
from forgetless.support.files import write_atomically
from forgetless.support.plugins import code_of
from forgetless.support.progress import advance, bar_on_terminal
from forgetless.support.provenance import digest_of
from forgetless.support.validation import ConfigError, DataError, first_line, require, whole


@final
class FeatureScenario(Scenario):
    """The tasks of another scenario with inputs f(x), the features of a frozen network f.

    With a pretrained f this is how methods are compared on top of a backbone: what is trained sees
    features, and f runs once over all samples in place of once an epoch.

    Arguments:
        tasks: any scenario whose inputs are the same for all seeds (those of permuted pixels are
            not).
        network: f, from inputs (n, *shape) to features (n, *). It runs in evaluation mode, on the
            device and in the precision that its weights have, and stays as it is.
        batch_size: how many samples it sees at once.
        cache: a folder for the features; they are read from there if network and samples are the
            same.
    """

    def __init__(
        self,
        tasks: Scenario,
        network: nn.Module,
        *,
        batch_size: int = 256,
        cache: str | Path | None = None,
    ) -> None:
        require(isinstance(tasks, Scenario), "tasks", tasks, "a Scenario")
        require(isinstance(network, nn.Module), "network", network, "a torch.nn.Module")
        whole(1).check("batch_size", batch_size)
        self.name = tasks.name
        self.setting = tasks.setting
        self.n_tasks = tasks.n_tasks
        self.n_outputs = tasks.n_outputs
        self.full_head, self.measured_on = tasks.full_head, tasks.measured_on
        self._tasks, self._seen = tasks, list[Task]()
        with bar_on_terminal(f"features of {tasks.name}"):
            for t in range(tasks.n_tasks):
                advance("tasks", t, tasks.n_tasks)
                task = tasks.task(t, (0,))
                splits = [
                    _seen_by(network, split, batch_size, cache) for split in (task.train, task.test)
                ]
                self._seen.append(Task(task.name, *splits))
        self.input_shape = tuple(self._seen[0].train.inputs.shape[1:])

    def task(self, index: int, seeds: Sequence[int]) -> Task:
        """Task `index`, the same for every seed."""
        return self._seen[index]

    def classes(self, index: int) -> range:
        """The outputs of the classes of task `index`."""
        return self._tasks.classes(index)

    def competing(self, index: int, learned: int | None = None) -> range:
        """The outputs that compete for a sample of task `index`, as the tasks say."""
        return self._tasks.competing(index, learned)


def _seen_by(network: nn.Module, split: Split, size: int, cache: str | Path | None) -> Split:
    """The same samples with their features as inputs."""
    if split.orders is not None:
        raise ConfigError(
            "tasks must have the same inputs for all seeds, since features are computed once; in "
            "permuted scenarios each seed orders the pixels in its own way"
        )
    file = None
    if cache is not None:
        weights = network.state_dict()
        code = [repr(network), *sorted({code_of(type(m)) for m in network.modules()})]
        key = digest_of(code, [*weights], *weights.values(), split.inputs)
        file = Path(cache) / f"features-{key}.safetensors"
    found = None if file is None else _read(file, len(split))
    if found is None:
        found = _features(network, split.inputs, size)
        if file is not None:
            _write(file, found)
    return Split(found, split.labels)


def _features(network: nn.Module, inputs: Tensor, size: int) -> Tensor:
    """f(x) of inputs (n, *shape), on the CPU: (n, *)."""
    frozen = copy.deepcopy(network).eval()
    like = next((t for t in frozen.state_dict().values() if t.is_floating_point()), inputs)
    parts = []
    for some in inputs.split(size):
        try:
            with torch.no_grad():
                made = frozen(some.to(like))
        except (RuntimeError, ValueError, TypeError) as error:
            raise ConfigError(
                f"the network cannot take inputs of shape {tuple(inputs.shape[1:])}: "
                f"{first_line(error)}"
            ) from error
        fits = isinstance(made, Tensor) and made.dim() > 1 and len(made) == len(some)
        came = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
        accepted = f"a tensor with a row of features for each of {len(some)} samples"
        require(fits, "what the network returns", came, accepted)
        if not bool(made.isfinite().all()):
            raise DataError("the network makes features that are NaN or infinite")
        parts.append(made.float().cpu())
    return torch.cat(parts)


def _write(file: Path, features: Tensor) -> None:
    checked = {"digest": digest_of(features)}
    stored = {"features": features.contiguous()}
    write_atomically(file, lambda new: save_file(stored, new, metadata=checked))


def _read(file: Path, n: int) -> Tensor | None:
    """Stored features of n samples; None if there are none, or damaged ones, to be made again."""
    try:
        with safe_open(file, "pt") as stored:
            found: Tensor = stored.get_tensor("features")
            digest = (stored.metadata() or {}).get("digest")
    except (OSError, SafetensorError):
        return None
    return found if digest_of(found) == digest and len(found) == n else None
