"""Neural networks that forget less when they learn one task after another."""

from forgetless.data import Scenario, Task, TensorScenario
from forgetless.errors import (
    ConfigError,
    DataError,
    ForgetlessError,
    TraceError,
    TrainingError,
)
from forgetless.fit import fit
from forgetless.guard import Guard
from forgetless.methods import AGEM, EWC, GEM, GEMNT, OGD, PCAOGD, SGD, Joint, Method
from forgetless.metrics import average_accuracy, backward_transfer, forgetting, forward_transfer
from forgetless.runs import scenario
from forgetless.subspace import Storage
from forgetless.tangent import tangent_features
from forgetless.theory import Forecast, forecast
from forgetless.trace import Trace, load_trace
from forgetless.training import Progress, Training
from forgetless.version import __version__

__all__ = [
    "AGEM",
    "EWC",
    "GEM",
    "GEMNT",
    "OGD",
    "PCAOGD",
    "SGD",
    "ConfigError",
    "DataError",
    "Forecast",
    "ForgetlessError",
    "Guard",
    "Joint",
    "Method",
    "Progress",
    "Scenario",
    "Storage",
    "Task",
    "TensorScenario",
    "Trace",
    "TraceError",
    "Training",
    "TrainingError",
    "__version__",
    "average_accuracy",
    "backward_transfer",
    "fit",
    "forecast",
    "forgetting",
    "forward_transfer",
    "load_trace",
    "scenario",
    "tangent_features",
]
