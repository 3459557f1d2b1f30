"""Neural networks that forget less when they learn one task after another."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from forgetless.support.provenance import __version__
from forgetless.support.validation import did_you_mean

if TYPE_CHECKING:  # what `__getattr__` imports at run time
    from forgetless.data import Blurry, FeatureScenario, Scenario, Task, TensorScenario
    from forgetless.guard import Guard
    from forgetless.launch.runs import scenario
    from forgetless.launch.search import Search, load_search, tune
    from forgetless.methods import (
        AGEM,
        DER,
        DERPP,
        ER,
        ERACE,
        EWC,
        GEM,
        GEMNT,
        GPM,
        OGD,
        PCAOGD,
        SGD,
        SGP,
        SI,
        AdamNSCL,
        Joint,
        KFACLaplace,
        KronEWC,
        KronOGD,
        LwF,
        Method,
        View,
    )
    from forgetless.subspace import Storage
    from forgetless.support.validation import (
        ConfigError,
        DataError,
        ForgetlessError,
        TraceError,
        TrainingError,
    )
    from forgetless.tangent import tangent_features
    from forgetless.trace import Trace, load_trace
    from forgetless.trace.trace import (
        average_accuracy,
        backward_transfer,
        forgetting,
        forward_transfer,
    )
    from forgetless.training.fit import fit
    from forgetless.training.forecasting import Forecast, forecast
    from forgetless.training.settings import Progress, Training

__all__ = [
    "AGEM",
    "DER",
    "DERPP",
    "ER",
    "ERACE",
    "EWC",
    "GEM",
    "GEMNT",
    "GPM",
    "OGD",
    "PCAOGD",
    "SGD",
    "SGP",
    "SI",
    "AdamNSCL",
    "Blurry",
    "ConfigError",
    "DataError",
    "FeatureScenario",
    "Forecast",
    "ForgetlessError",
    "Guard",
    "Joint",
    "KFACLaplace",
    "KronEWC",
    "KronOGD",
    "LwF",
    "Method",
    "Progress",
    "Scenario",
    "Search",
    "Storage",
    "Task",
    "TensorScenario",
    "Trace",
    "TraceError",
    "Training",
    "TrainingError",
    "View",
    "__version__",
    "average_accuracy",
    "backward_transfer",
    "fit",
    "forecast",
    "forgetting",
    "forward_transfer",
    "load_search",
    "load_trace",
    "scenario",
    "tangent_features",
    "tune",
]

# Module → its names here. Importing one of them is what loads torch; `import forgetless` does not.
_MODULES = {
    "data": "Blurry FeatureScenario Scenario Task TensorScenario",
    "guard": "Guard",
    "launch.runs": "scenario",
    "launch.search": "Search load_search tune",
    "methods": (
        "AGEM DER DERPP ER ERACE EWC GEM GEMNT GPM OGD PCAOGD SGD SGP SI AdamNSCL Joint "
        "KFACLaplace KronEWC KronOGD LwF Method View"
    ),
    "subspace": "Storage",
    "support.validation": "ConfigError DataError ForgetlessError TraceError TrainingError",
    "tangent": "tangent_features",
    "trace": "Trace load_trace",
    "trace.trace": "average_accuracy backward_transfer forgetting forward_transfer",
    "training.fit": "fit",
    "training.forecasting": "Forecast forecast",
    "training.settings": "Progress Training",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        meant = did_you_mean(name, _HOMES)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{meant}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
