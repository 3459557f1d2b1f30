"""A trace: the record of one run, all that reports read of it, metrics, and cached results.

A trace is a folder of plain files, without pickle: `trace.json` (configuration, versions, timings,
accuracy matrix), and for each seed `seed-N/task-TT.safetensors` (the weights after a task) and
`seed-N/memory.safetensors` (the method's state at the end).

Metrics of forgetting are functions of the accuracy matrix (*, T, T) alone: accuracy[..., t, s] on
task s after learning task t, NaN if not measured. A run that stopped early counts up to the last
task that it learned.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, final, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from forgetless.support.files import write_atomically
from forgetless.support.validation import Accepted, TraceError
from forgetless.trace.notebook import trace_html

FORMAT = 1
TRACE_FILE = "trace.json"
BEST_WITHIN = "best within tasks"  # key in the outcome
_STRUCTURE = "structure"  # in a state's file: how it is built; not counted in its size
_TENSOR_FILES = ("seed-*/task-*.safetensors", "seed-*/memory.safetensors")


def read_beside(folder: Path, name: str, version: object) -> Any:
    """A cached result; None if there is none, or an outdated or damaged one.

    Arguments:
        folder: the trace's.
        name: the result's name.
        version: of the result, or whatever else must be as it was then.
    """
    try:
        record = json.loads(_file(folder, name).read_text("utf-8"))
        fits = record["format"] == version and record["of"] == _fingerprint(folder)
        return record["content"] if fits else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def write_beside(folder: Path, name: str, version: object, content: object) -> None:
    """Cache a result that JSON can hold."""
    record = {"format": version, "of": _fingerprint(folder), "content": content}
    text = json.dumps(record)
    write_atomically(_file(folder, name), lambda file: file.write_text(text, "utf-8"))


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _fingerprint(folder: Path) -> str:
    return hashlib.sha256((folder / TRACE_FILE).read_bytes()).hexdigest()


Array = NDArray[np.float64]
Metric = Callable[[NDArray[np.float64]], NDArray[np.float64]]
Keep = Literal["all", "weights", "nothing"]
KEEPS = Accepted(lambda value: value in get_args(Keep), "all, weights or nothing", get_args(Keep))
Status = Literal["running", "complete", "interrupted", "failed"]


@final
@dataclass
class Trace:
    """One scenario learned by one method with several seeds.

    Attributes:
        scenario, method: their names.
        seeds: the S seeds.
        tasks: the names of the T tasks.
        accuracy: (S, T, T) in percent, [seed, after task, on task]; NaN where not evaluated.
        config: the settings that the run uses, by name; see `forgetless.trace.experiment`.
        versions: of the program, its libraries and the device.
        timings: seconds, `total` and for each part.
        status: "complete", or how the run ended.
        path: its folder, or None for a trace in memory.
        fingerprint: checksums of the parts of the experiment: scenario, data (one for each task
            learned), model, start, method, training.
        outcome: results of settings: the `storage` that a budget chose, whether it `diverged`, and
            by seed the best accuracies on the tasks so far of evaluations within tasks.
    """

    scenario: str
    method: str
    seeds: tuple[int, ...]
    tasks: tuple[str, ...]
    accuracy: NDArray[np.float64]
    config: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    status: Status = "running"
    path: Path | None = None
    fingerprint: dict[str, Any] = field(default_factory=dict)
    outcome: dict[str, Any] = field(default_factory=dict)
    _tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict, repr=False)

    @property
    def finished(self) -> NDArray[np.bool_]:
        """Which seeds have learned all tasks, (S,)."""
        return np.isfinite(self.accuracy[:, -1, -1])

    @property
    def measured_on(self) -> str:
        """Whether accuracies are those on "test" or on held-out "validation" images."""
        validation = self.config.get("validation_per_class") or self.config.get("measured_on")
        return "validation" if validation not in (None, 0, "test") else "test"

    def per_seed(self, metric: Metric) -> NDArray[np.float64]:
        """A metric of the accuracy matrix for each seed, (S,).

        A seed that was stopped early counts with the tasks that it learned, or not at all (NaN) if
        other seeds learned all tasks.
        """
        values = np.array([float(metric(matrix)) for matrix in self.accuracy])
        if self.finished.any():
            values[~self.finished] = np.nan
        return values

    def weights(self, seed: int, task: int) -> dict[str, Tensor]:
        """The network's `state_dict` after learning a task (from 0)."""
        return self._read(weights_file(seed, task))

    def state(self, seed: int) -> dict[str, Tensor]:
        """The method's state at the end, by the path in it; empty for a method without one."""
        return self._read(_state_file(seed))

    def memory_bytes(self, seed: int) -> int | None:
        """The bytes of the method's state at the end; None if the trace does not have it."""
        try:
            tensors = self.state(seed)  # mapped from the file, not loaded
        except TraceError:
            return None
        return sum(tensor.nbytes for name, tensor in tensors.items() if name != _STRUCTURE)

    def summary(self) -> dict[str, Any]:
        """The result as the command line's `--json` prints it."""
        return {
            "scenario": self.scenario,
            "method": self.method,
            "seeds": list(self.seeds),
            "average_accuracy": _spread(self.per_seed(average_accuracy)),
            "forgetting": _spread(self.per_seed(forgetting)),
            "measured_on": self.measured_on,
            "accuracy": nulls(self.accuracy.tolist()),
            "seconds": self.timings.get("total", 0.0),
            "config": self.config,
            "outcome": self.outcome,
            "out": None if self.path is None else str(self.path),
        }

    def _repr_html_(self) -> str:
        """The run as a small table in a notebook."""
        metric_names = {"A_T": average_accuracy, "F_T": forgetting}
        spreads = {name: _spread(self.per_seed(m)) for name, m in metric_names.items()}
        facts = [
            (n, f"{s['mean']:.2f} ± {s['std']:.2f}")
            for n, s in spreads.items()
            if s["mean"] is not None
        ]
        facts += [("seeds", str(len(self.seeds))), ("status", self.status)]
        rows = self.accuracy[self.finished] if self.finished.any() else self.accuracy
        title = f"{self.scenario}, {self.method}, {len(self.tasks)} tasks"
        return trace_html(title, facts, rows.mean(0).tolist())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the whole trace to a folder, which is its folder from then on."""
        if self.path is not None:
            files = (f for pattern in _TENSOR_FILES for f in self.path.glob(pattern))
            names = [f.relative_to(self.path).as_posix() for f in files]
            self._tensors |= {name: self._read(name) for name in names}
        self.path = Path(path)
        for name, tensors in self._tensors.items():
            self._write_tensors(name, tensors)
        self._tensors.clear()
        self.save_record()

    def save_record(self) -> None:
        """Write `trace.json`, if the trace has a folder."""
        if self.path is None:
            return
        record = self.summary()
        del record["out"]
        record |= {
            "format": FORMAT,
            "tasks": list(self.tasks),
            "status": self.status,
            "fingerprint": self.fingerprint,
            "timings": self.timings,
            "versions": self.versions,
        }
        text = json.dumps(record, indent=1, allow_nan=False, default=_plain)
        write_atomically(self.path / TRACE_FILE, lambda file: file.write_text(text, "utf-8"))

    def keep_weights(self, seed: int, task: int, tensors: Mapping[str, Tensor]) -> None:
        """Store the weights of a seed after a task."""
        self._keep(weights_file(seed, task), tensors)

    def keep_state(self, seed: int, tensors: Mapping[str, Tensor]) -> None:
        """Store the method's state for a seed."""
        self._keep(_state_file(seed), tensors)

    def _keep(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        # A copy: training changes the weights, and a view would keep all seeds' tensors alive.
        own = {key: t.detach().cpu().contiguous().clone() for key, t in tensors.items()}
        if self.path is None:
            self._tensors[name] = own
        else:
            self._write_tensors(name, own)

    def _write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        if self.path is None:
            raise TraceError("the trace has no folder yet")
        write_atomically(self.path / name, lambda file: save_file(dict(tensors), file))

    def _read(self, name: str) -> dict[str, Tensor]:
        if name in self._tensors:
            return dict(self._tensors[name])
        file = None if self.path is None else self.path / name
        if file is None or not file.is_file():
            raise TraceError(f"the trace has no {name}: it was not kept (`keep`), or is lost")
        try:
            return dict(load_file(file))
        except (OSError, SafetensorError) as error:
            raise TraceError(f"{file} cannot be read: {error}") from error


def weights_file(seed: int, task: int) -> str:
    """The file of a seed's weights after a task (from 0), in the folder of its trace."""
    return f"seed-{seed}/task-{task + 1:02d}.safetensors"


def _state_file(seed: int) -> str:
    return f"seed-{seed}/memory.safetensors"


def is_trace(folder: Path) -> bool:
    """Whether a folder holds a trace."""
    return (folder / TRACE_FILE).is_file()


def make_room(folder: Path, *, overwrite: bool) -> None:
    """Prepare a folder for a trace; a trace in it is removed if `overwrite`, other files never."""
    remove_unfinished(folder)
    if not is_trace(folder):
        return
    if not overwrite:
        raise TraceError(f"{folder} holds a trace already; choose another folder or overwrite it")
    (folder / TRACE_FILE).unlink(missing_ok=True)
    for file in (f for pattern in _TENSOR_FILES for f in folder.glob(pattern)):
        file.unlink()
        if not any(file.parent.iterdir()):
            file.parent.rmdir()


def remove_unfinished(folder: Path) -> None:
    """Remove the temporary files of a process that was killed."""
    for pattern in (f".{TRACE_FILE}.*", "seed-*/.*"):
        for file in folder.glob(pattern):
            file.unlink(missing_ok=True)


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """Read the trace of a run from its folder."""
    folder = Path(path)
    file = folder / TRACE_FILE
    if not file.is_file():
        raise TraceError(f"{folder} holds no trace: there is no {TRACE_FILE} in it")
    try:
        record = json.loads(file.read_text("utf-8"))
        if record["format"] != FORMAT:
            raise TraceError(f"{file} has format {record['format']!r}; this version reads {FORMAT}")
        seeds, tasks = tuple(map(int, record["seeds"])), tuple(map(str, record["tasks"]))
        accuracy = np.array(record["accuracy"], dtype=float)  # null becomes NaN
        if accuracy.shape != (len(seeds), len(tasks), len(tasks)):
            raise TraceError(f"{file} has an accuracy matrix of shape {accuracy.shape}")
        return Trace(
            scenario=str(record["scenario"]),
            method=str(record["method"]),
            seeds=seeds,
            tasks=tasks,
            accuracy=accuracy,
            config=dict(record["config"]),
            fingerprint=dict(record.get("fingerprint", {})),
            outcome=dict(record.get("outcome", {})),
            versions=dict(record["versions"]),
            timings=dict(record["timings"]),
            status=record["status"],
            path=folder,
        )
    except (OSError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{file} cannot be read: {error}") from error
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{file} is not a trace: {type(error).__name__} {error}") from error


def merged_seeds(parts: Sequence[Trace]) -> Trace:
    """One trace in memory from several of the same run with other seeds."""
    if len(parts) == 1:
        return parts[0]
    names = sorted({name for part in parts for name in part.timings})
    unfinished = [part.status for part in parts if part.status != "complete"]
    return replace(
        parts[0],
        seeds=tuple(seed for part in parts for seed in part.seeds),
        accuracy=np.concatenate([part.accuracy for part in parts]),
        timings={name: sum(part.timings.get(name, 0.0) for part in parts) for name in names},
        outcome=parts[0].outcome | _best_within(parts),
        status=unfinished[0] if unfinished else "complete",
        path=None,
        _tensors={},
    )


def _best_within(parts: Sequence[Trace]) -> dict[str, Any]:
    """The part of the outcome that is noted seed by seed."""
    best = [part.outcome[BEST_WITHIN] for part in parts if BEST_WITHIN in part.outcome]
    return {BEST_WITHIN: {seed: found for of in best for seed, found in of.items()}} if best else {}


def _spread(values: NDArray[np.float64]) -> dict[str, Any]:
    """Mean and (population) standard deviation over the seeds that have a value."""
    known = [float(v) for v in values if math.isfinite(v)]
    return {
        "mean": float(np.mean(known)) if known else None,
        "std": float(np.std(known)) if known else None,
        "per_seed": nulls([float(v) for v in values]),
    }


def _plain(value: Any) -> Any:
    """A NumPy or torch number as a Python one, other values as text."""
    return value.item() if hasattr(value, "item") else str(value)


def nulls(value: Any) -> Any:
    """The value with None in place of NaN and infinities, which JSON does not have."""
    if isinstance(value, dict):
        return {key: nulls(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [nulls(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def average_accuracy(accuracy: ArrayLike) -> Array:
    """A_T = 1/T Σ_s a[T, s], over the tasks learned so far: (*, T, T) → (*).

    Example:
        >>> nan = float("nan")
        >>> float(average_accuracy([[90, nan], [70, 80]]))
        75.0
    """
    a = _learned(accuracy)
    return np.asarray(a[..., -1, :].mean(-1))


def forgetting(accuracy: ArrayLike) -> Array:
    """F_T = 1/(T−1) Σ_{s<T} (max_{l≥s} a[l, s] − a[T, s]); 0 for a single task.

    Example:
        >>> nan = float("nan")
        >>> float(forgetting([[90, nan], [70, 80]]))
        20.0
    """
    a = _learned(accuracy)
    if a.shape[-1] == 1:
        return np.zeros(a.shape[:-2])
    best = np.stack([a[..., s:, s].max(-1) for s in range(a.shape[-1] - 1)], -1)
    return np.asarray((best - a[..., -1, :-1]).mean(-1))


def backward_transfer(accuracy: ArrayLike) -> Array:
    """BWT = 1/(T−1) Σ_{s<T} (a[T, s] − a[s, s]) (Lopez-Paz and Ranzato 2017); 0 for one task."""
    a = _learned(accuracy)
    if a.shape[-1] == 1:
        return np.zeros(a.shape[:-2])
    learned = np.diagonal(a, axis1=-2, axis2=-1)[..., :-1]
    return np.asarray((a[..., -1, :-1] - learned).mean(-1))


def forward_transfer(accuracy: ArrayLike, baseline: ArrayLike = 0.0) -> Array:
    """FWT = 1/(T−1) Σ_{s>1} (a[s−1, s] − b[s]); NaN without `evaluate="all"`.

    Arguments:
        accuracy: (*, T, T).
        baseline: b, the accuracy on each task without any training, (T,) or one number.
    """
    a = _learned(accuracy)
    if a.shape[-1] == 1:
        return np.zeros(a.shape[:-2])
    beforehand = np.diagonal(a, offset=1, axis1=-2, axis2=-1)
    chance = np.broadcast_to(np.asarray(baseline, float), (np.shape(accuracy)[-1],))
    return np.asarray((beforehand - chance[1 : a.shape[-1]]).mean(-1))


def tasks_learned(accuracy: ArrayLike) -> int:
    """The number of tasks, from the first on, that every run in (*, T, T) has learned."""
    own = np.isfinite(np.diagonal(np.asarray(accuracy, float), axis1=-2, axis2=-1))
    learned_by_all = own.reshape(-1, own.shape[-1]).all(0)
    return int(np.argmin(np.append(learned_by_all, False)))


def _learned(accuracy: ArrayLike) -> Array:
    """The leading square of the matrix: the tasks that every run in it has learned."""
    a = np.asarray(accuracy, float)
    if a.ndim < 2 or a.shape[-1] != a.shape[-2] or a.shape[-1] == 0:
        raise ValueError(f"an accuracy matrix is (*, T, T) with T at least 1, not {a.shape}")
    tasks = tasks_learned(a)
    if tasks == 0:
        return np.full((*a.shape[:-2], 1, 1), np.nan)
    return a[..., :tasks, :tasks]
