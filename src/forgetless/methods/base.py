"""The interface between a continual-learning method and whoever drives it.

A method is a frozen dataclass of hyperparameters and three functions; what it remembers is a value
that is handed back and forth. It sees the model and the training through a `View` alone, which is
the same in `fit` and in a guard, never the optimizer or the loop. Every tensor has a leading
dimension of S independent seeds; in a guard S is 1.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, Protocol, Self, TypeVar, final, get_args

import torch
from torch import Tensor

from forgetless.linalg import Layout
from forgetless.methods.cost import Cost, TaskProbe, cost_of_directions
from forgetless.subspace import Storage
from forgetless.subspace.storage import Demand
from forgetless.support.validation import ConfigError, check_options, require
from forgetless.tangent import InputMoments, Moments, TangentFeatures

# A method that adapts is told how well tasks are kept after so many steps, times the stored tasks
# up to so many, on so many samples of each.
_LOOK_EVERY, _LOOK_TASKS = 10, 5
FOLLOWED = 16


def is_look(step: int, tasks: int) -> bool:
    """Whether `Method.adapted` is called after so many steps, with so many tasks stored."""
    return tasks > 0 and step % (_LOOK_EVERY * min(tasks, _LOOK_TASKS)) == 0


FeatureOutputs = Literal["class", "all"]
MomentOutputs = Literal["all", "class", "fisher", "mixed"]
# From outputs (S, n, C) and their samples to a loss for each seed, (S,), or each sample, (S, n).
LossFunction = Callable[[Tensor, Any], Tensor]


class SampleSet(Protocol):
    """Training samples that a method may store, n for each seed."""

    @property
    def extra(self) -> Mapping[str, Tensor]:
        """What a method attached to the samples, (S, n, *) each."""

    def __len__(self) -> int:
        """How many samples a seed has."""

    def __add__(self, other: Any) -> Any:
        """Both sets, these samples first."""

    def select(self, index: Tensor) -> Any:
        """The samples at index (S, m), a choice of its own for each seed."""

    def attach(self, **tensors: Tensor) -> Any:
        """The same samples with more tensors (S, n, *), which travel with them."""

    def tensors(self, seed: int) -> dict[str, Tensor]:
        """The tensors of one seed, from which the samples can be restored."""


# From what `SampleSet.tensors` gave for each seed to the samples.
LoadSamples = Callable[[Sequence[Mapping[str, Tensor]]], SampleSet]


@final
@dataclass(frozen=True)
class Samples:
    """Training samples of one or several tasks, n for each of S seeds.

    Arguments:
        inputs: (S, n, *).
        labels: (S, n), each an index among all of the network's outputs.
        tasks: (S, n), the task that each sample came from (it decides the head).
        extra: what a method attached to the samples, (S, n, *) each.
    """

    inputs: Tensor
    labels: Tensor
    tasks: Tensor
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        """How many samples a seed has."""
        return self.labels.shape[1]

    def __add__(self, other: Self) -> Self:
        """Both sets, these samples first."""
        mine, theirs = self._named(), other._named()
        both = f"with {', '.join(theirs)} attached"
        require(mine.keys() == theirs.keys(), "samples to add", both, f"with {', '.join(mine)}")
        return self._of({name: torch.cat([mine[name], theirs[name]], 1) for name in mine})

    def select(self, index: Tensor) -> Self:
        """The samples at index (S, m), a choice of its own for each seed."""
        seed = torch.arange(index.shape[0], device=index.device).unsqueeze(1)
        return self._of({name: tensor[seed, index] for name, tensor in self._named().items()})

    def attach(self, **tensors: Tensor) -> Self:
        """The same samples with more tensors (S, n, *), which travel with them."""
        for name, tensor in tensors.items():
            check_attached(name, tensor, tuple(self.labels.shape))
        extra = {**self.extra, **tensors}
        return type(self)(self.inputs, self.labels, self.tasks, extra)

    def tensors(self, seed: int) -> dict[str, Tensor]:
        """The tensors of one seed."""
        return {name: tensor[seed] for name, tensor in self._named().items()}

    @classmethod
    def restore(cls, of_seeds: Sequence[Mapping[str, Tensor]]) -> Self:
        """From what `tensors` gave for each seed."""
        return cls._of({n: torch.stack([of[n] for of in of_seeds]) for n in of_seeds[0]})

    def _named(self) -> dict[str, Tensor]:
        own = {"inputs": self.inputs, "labels": self.labels, "tasks": self.tasks}
        return own | {f"extra.{name}": tensor for name, tensor in self.extra.items()}

    @classmethod
    def _of(cls, named: Mapping[str, Tensor]) -> Self:
        extra = {n.removeprefix("extra."): t for n, t in named.items() if n.startswith("extra.")}
        return cls(named["inputs"], named["labels"], named["tasks"], extra)


def check_attached(name: str, tensor: Any, shape: tuple[int, ...]) -> None:
    """Reject an attached tensor that does not have a row for each sample."""
    fits = isinstance(tensor, Tensor) and tuple(tensor.shape[:2]) == shape
    came = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
    require(fits, f"the attached {name}", came, f"a tensor of shape {(*shape, '…')}")


class View(Protocol):
    """What a method sees in `init`, `update` and `consolidate`."""

    @property
    def theta(self) -> Tensor:
        """The protected weights, (S, p), as they are before this step. Not to be changed."""

    @property
    def layout(self) -> Layout:
        """Which columns of theta belong to which parameter."""

    @property
    def storage(self) -> Storage:
        """How directions are stored, for methods that store directions."""

    @property
    def task(self) -> int:
        """The task that is being learned, from 0; in `consolidate` the one just learned."""

    @property
    def step(self) -> int:
        """Steps taken before this one, over all tasks."""

    @property
    def lr(self) -> float:
        """The learning rate of this step."""

    @property
    def batch(self) -> Any:
        """The samples of this step, a `SampleSet`."""

    def outputs(self, samples: Any, theta: Tensor | None = None) -> Tensor:
        """The network's outputs on samples, (S, n, C), at the present weights or at theta (S, p).

        In the network's present mode, which in `consolidate` is evaluation; its buffers stay as
        they are. The outputs can be differentiated with respect to theta.
        """

    def losses(self, outputs: Tensor, samples: Any) -> Tensor:
        """The training loss of each sample, (S, n), from outputs (S, n, C)."""

    def labels(self, samples: Any) -> Tensor:
        """The class of each sample, (S, n), an index among the outputs."""

    def competing(self, outputs: Tensor, samples: Any) -> Tensor:
        """Which of the outputs (S, n, C) compete for each sample in the loss, likewise of bool."""

    def gradient(
        self, samples: Any, loss: LossFunction | None = None, *, theta: Tensor | None = None
    ) -> Tensor:
        """The gradient of a loss on samples with respect to the protected weights, (S, p).

        Arguments:
            samples: where to take it.
            loss: from (outputs, samples) to (S,), or to (S, n) whose mean over n counts; by
                default the training loss.
            theta: the weights, (S, p); by default the present ones.
        """

    def gradients(self, several: Sequence[Any]) -> Tensor:
        """The gradients of the mean training loss on each of K sets of samples, (S, K, p)."""

    def features(
        self, samples: Any, outputs: FeatureOutputs = "class"
    ) -> Sequence[TangentFeatures]:
        """φ of the samples' outputs in evaluation mode, one operator for each seed.

        Arguments:
            samples: the samples.
            outputs: "class" for the true class's (in a guard, the protected outputs), "all" for
                every output that competes for the sample: φ then has n · K rows.
        """

    def moments(self, samples: Any, outputs: MomentOutputs = "all") -> Moments:
        """The Kronecker moments of the samples' gradients, with a leading dimension of S.

        Arguments:
            samples: the samples.
            outputs: whose gradients: of "all" outputs that compete for the sample (in a guard, of
                the protected ones), by a random combination of them; of the true "class"; or of
                the log-likelihood of a label that the model draws, the "fisher" matrix; the same
                with one label in ten of any class, "mixed".
        """

    def input_moments(self, samples: Any) -> InputMoments:
        """The second moments of the inputs of each protected weight, with a leading dimension of S.

        Samples may interact, since no gradients are taken.
        """

    def layer_inputs(self, samples: Any) -> Mapping[str, Tensor]:
        """Weight of a linear or convolutional layer → its inputs on samples, (S, N, d).

        N is samples × positions; of a convolution d numbers are a patch.
        """

    def choice(self, count: int, available: int) -> Tensor:
        """Random indices without replacement for each seed, (S, min(count, available))."""

    def random(self, count: int) -> Tensor:
        """Random numbers, uniform in [0, 1), for each seed: (S, count), float64."""

    @property
    def starts(self) -> Tensor:
        """The first output of each task, (T,); a guard does not know and raises `ConfigError`."""


def seed_losses(each: Tensor, outputs: Tensor) -> Tensor:
    """The loss of each seed, (S,), from what a `LossFunction` returned for outputs (S, n, C)."""
    shapes = tuple(outputs.shape[:1]), tuple(outputs.shape[:2])
    came = tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__
    accepted = f"of shape {shapes[0]}, one for each seed, or {shapes[1]}, one for each sample"
    require(came in shapes, "the loss", came, accepted)
    return each.mean(1) if each.dim() == 2 else each


def choose(view: View, samples: Any, count: int) -> Any:
    """A random choice of `count` of the samples for each seed, all of them if there are no more."""
    return samples if count >= len(samples) else samples.select(view.choice(count, len(samples)))


class FinishedTask(Protocol):
    """The training data of the task that was just learned."""

    @property
    def size(self) -> int:
        """How many training samples the task has."""

    def draw(self, count: int) -> Any:
        """A random choice of its samples, all of them if it has no more than count."""

    def batches(self, size: int) -> Iterator[Any]:
        """All of its samples in order, so many at a time."""

    def squared_loss_gradients(self) -> Tensor:
        """Σ over the training samples of the squared gradient of a sample's loss, (S, p)."""


ActsOn = Literal["gradient", "update"]
State = TypeVar("State")


class Method(ABC, Generic[State]):
    """A way to learn the next task without losing the earlier ones.

    Subclasses are frozen dataclasses whose fields are the hyperparameters. A field made by `option`
    is checked when the method is made, and is an option of the command line. State is the type of
    its state: a tree as `methods.state` describes.

    Attributes:
        name: in configurations and on the command line.
        label: as people write it; by default the name.
        summary: one line for `forgetless list`.
        family: "projection", "penalty", "replay" or "reference", which has a hue of its own in
            figures; others share one.
        protects: whether it does anything against forgetting.
        keeps_directions: whether its state is `Directions`, which have a storage and fit a budget,
            and `update` projects them out.
        keeps_all_data: whether its state is all training data, which a trace need not repeat.
        needs_model: whether `update` asks the view for outputs, gradients or features.
        needs_batch: whether `update` asks the view for the present batch.
        idle_before_first_task: whether `update` returns what it is given, and its state, until the
            first `consolidate`; a guard then leaves the first task's steps alone.
        recordable: whether `update` returns its state as it was, waits for no result of a GPU and
            draws by `View.choice` alone, so that a GPU may record it. Only the first is checked.
        separable: whether `update` changes each weight by that weight's own numbers alone, so that
            the processes of a sharded model can each have a part of them.
        zero_for_new_weights: whether the numbers per weight in its state are zero for a weight that
            no task has used, so that a layer may get more rows.
        over_ranks: whether `update` takes some of the columns and sums over the processes that
            have the others, so that they can each have a part of the weights.
        adapts: whether `adapted` follows how well the stored tasks are kept.
        replaces: setting → another setting that is not used where the first is given.
        state_types: classes of the state that are defined outside the method's module.
    """

    name: ClassVar[str]
    label: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    family: ClassVar[str] = ""
    protects: ClassVar[bool] = True
    keeps_directions: ClassVar[bool] = False
    keeps_all_data: ClassVar[bool] = False
    needs_model: ClassVar[bool] = True
    needs_batch: ClassVar[bool] = False
    idle_before_first_task: ClassVar[bool] = False
    recordable: ClassVar[bool] = False
    separable: ClassVar[bool] = False
    zero_for_new_weights: ClassVar[bool] = False
    over_ranks: ClassVar[bool] = False
    adapts: ClassVar[bool] = False
    replaces: ClassVar[Mapping[str, str]] = {}
    state_types: ClassVar[tuple[type, ...]] = ()

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Reject a class that does not say what it acts on."""
        if getattr(cls.acts_on, "__isabstractmethod__", False):
            raise ConfigError(
                f"{cls.__name__} must say what it acts on: acts_on = 'gradient' if it changes the "
                "loss gradient, acts_on = 'update' if it projects the optimizer's update"
            )
        if not hasattr(cls.acts_on, "__get__"):  # a property is checked once the fields are set
            cls._check_acts_on(cls.acts_on)
        return super().__new__(cls)

    @classmethod
    def _check_acts_on(cls, acts_on: object) -> None:
        accepted = " or ".join(map(repr, get_args(ActsOn)))
        require(acts_on in get_args(ActsOn), f"{cls.__name__}.acts_on", acts_on, accepted)

    def __post_init__(self) -> None:
        title = self.label or self.name
        check_options(type(self), vars(self), lambda field: f"{title}'s {field}")
        self._check_acts_on(self.acts_on)

    def demand(self, available: int | None = None) -> Demand | None:
        """The directions stored for each task; None for methods that keep no directions.

        Arguments:
            available: training samples of a task; None if unknown.
        """
        return None

    def cost(self, probe: TaskProbe) -> Cost | None:
        """What storing one more task will cost; None if that is unknown.

        Arguments:
            probe: what is known of the model and the task.
        """
        demand = self.demand(probe.size)
        return None if demand is None else cost_of_directions(probe, demand)

    @property
    @abstractmethod
    def acts_on(self) -> ActsOn:
        """What `update` changes; a class attribute will do. There is no default.

        "gradient": the loss gradient, which the optimizer is then given. "update": what the
        optimizer would take away from the weights, momentum and all; `update` must be a projection,
        for this is as long as a step, not as a gradient.
        """

    @abstractmethod
    def init(self, view: View) -> State:
        """The state before the first step."""

    @abstractmethod
    def update(self, g: Tensor, state: State, view: View) -> tuple[Tensor, State]:
        """The step in place of g, (S, p), and the next state; called at every step.

        Arguments:
            g: the loss gradient of the present batch, or the optimizer's update, as `acts_on` says.
        """

    @abstractmethod
    def consolidate(self, state: State, view: View, task: FinishedTask) -> State:
        """The state once a task is learned; the model is in evaluation mode."""

    def adapted(self, state: State, harm: Callable[[Tensor], Tensor]) -> State:
        """The state after a look at how well the stored tasks are kept.

        Whoever drives the method calls it when `is_look` says so, with a few samples of each task.

        Arguments:
            state: the state.
            harm: from weights (S, p) to how much worse each of K tasks is at the present weights,
                (S, K): the rise of the mean loss, or of the drift where nothing is classified.
        """
        return state

    def metrics(self, state: State) -> dict[str, float]:
        """Numbers of the state for reports and loggers, by name."""
        return {}

    @property
    def steadied_by(self) -> str:
        """What, besides a smaller learning rate, may help where training diverges."""
        return ""

    @property
    def protected_by(self) -> str:
        """The hyperparameter that protects more the larger it is, if one does; for advice."""
        return ""

    def advice(self, *, more: bool) -> str:
        """What to set so that earlier tasks are protected more, or less; "" if unknown."""
        name = self.protected_by
        value = getattr(self, name, "its value")
        return f"set {name} {'above' if more else 'below'} {value}" if name else ""

    @property
    def reaches_heads(self) -> bool:
        """Whether the method works on the heads too, not only on what the tasks share.

        Projections away from a task's features need not: its head is left alone by other tasks.
        Methods that follow the loss on stored samples do, for it depends on their heads.
        """
        return False

    @property
    def needs_own_heads(self) -> bool:
        """Whether every task must have a head of its own."""
        return False

    @property
    def may_leave_unprotected(self) -> bool:
        """Whether some parameters can be trained out of the method's reach throughout a run."""
        return True

    def trains_heads(self, state: State) -> bool:
        """Whether parameters outside of the method's reach (heads) follow their own gradient."""
        return True
