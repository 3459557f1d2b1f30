"""Files to tensors (sources) and tensors to tasks (scenarios)."""

from forgetless.data.datasets import SOURCES, ImageSet, load_source
from forgetless.data.features import FeatureScenario
from forgetless.data.scenarios import (
    SCENARIOS,
    SETTINGS,
    Blurry,
    Scenario,
    ScenarioOptions,
    Setting,
    Split,
    Task,
    TensorScenario,
    build_scenario,
    grows_with_tasks,
    scenario_defaults,
    scenario_settings,
    unused_by_scenario,
)

__all__ = [
    "SCENARIOS",
    "SETTINGS",
    "SOURCES",
    "Blurry",
    "FeatureScenario",
    "ImageSet",
    "Scenario",
    "ScenarioOptions",
    "Setting",
    "Split",
    "Task",
    "TensorScenario",
    "build_scenario",
    "grows_with_tasks",
    "load_source",
    "scenario_defaults",
    "scenario_settings",
    "unused_by_scenario",
]
