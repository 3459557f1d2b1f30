"""Neural networks that forget less when they learn one task after another."""

from forgetless.data import Scenario, Task, TensorScenario
from forgetless.guard import Guard
from forgetless.launch.runs import scenario
from forgetless.methods import AGEM, EWC, GEM, GEMNT, OGD, PCAOGD, SGD, Joint, Method
from forgetless.subspace import Storage
from forgetless.support.errors import (
    ConfigError,
    DataError,
    ForgetlessError,
    TraceError,
    TrainingError,
)
from forgetless.support.version import __version__
from forgetless.tangent import tangent_features
from forgetless.theory import Forecast, forecast
from forgetless.trace import Trace, load_trace
from forgetless.trace.metrics import (
    average_accuracy,
    backward_transfer,
    forgetting,
    forward_transfer,
)
from forgetless.training.fit import fit
from forgetless.training.settings import Progress, Training

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
