"""Files to tensors (sources) and tensors to tasks (scenarios)."""

from forgetless.data.scenarios import (
    SCENARIOS,
    ScenarioOptions,
    build_scenario,
    grows_with_tasks,
    unused_by_scenario,
)
from forgetless.data.sources import SOURCES, ImageSet, load_source
from forgetless.data.tasks import Scenario, Split, Task, TensorScenario

__all__ = [
    "SCENARIOS",
    "SOURCES",
    "ImageSet",
    "Scenario",
    "ScenarioOptions",
    "Split",
    "Task",
    "TensorScenario",
    "build_scenario",
    "grows_with_tasks",
    "load_source",
    "unused_by_scenario",
]
