"""The interface between a continual-learning method and whoever drives it.

A method is a frozen dataclass of hyperparameters and three functions; what it remembers is a value
that is handed back and forth. It sees the model and the training through a `View` alone, never the
optimizer or the loop. Every vector has a leading dimension of S independent seeds.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar, get_args

from torch import Tensor

from forgetless.methods.cost import Cost, TaskProbe, cost_of_directions
from forgetless.methods.view import FinishedTask, View
from forgetless.subspace.storage import Demand
from forgetless.support.errors import ConfigError, require
from forgetless.support.options import check_options

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
        replaces: setting → another setting that is not used where the first is given.
        state_types: classes of the state that are defined outside the method's module.
    """

    name: ClassVar[str]
    label: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    protects: ClassVar[bool] = True
    keeps_directions: ClassVar[bool] = False
    keeps_all_data: ClassVar[bool] = False
    needs_model: ClassVar[bool] = True
    needs_batch: ClassVar[bool] = False
    idle_before_first_task: ClassVar[bool] = False
    recordable: ClassVar[bool] = False
    separable: ClassVar[bool] = False
    zero_for_new_weights: ClassVar[bool] = False
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
