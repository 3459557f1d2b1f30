"""Continual-learning methods, one file each, behind one interface."""

from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any

from forgetless.methods.agem import AGEM
from forgetless.methods.base import (
    FinishedTask,
    LoadSamples,
    LossGrad,
    Method,
    Nothing,
    Samples,
    SampleSet,
    State,
)
from forgetless.methods.ewc import EWC
from forgetless.methods.gem import GEM
from forgetless.methods.gem_nt import GEMNT
from forgetless.methods.joint import Joint
from forgetless.methods.ogd import OGD
from forgetless.methods.pca_ogd import PCAOGD
from forgetless.methods.sgd import SGD
from forgetless.support.errors import ConfigError
from forgetless.support.options import setting_name

__all__ = [
    "AGEM",
    "EWC",
    "GEM",
    "GEMNT",
    "METHODS",
    "OGD",
    "PCAOGD",
    "SGD",
    "FinishedTask",
    "Joint",
    "LoadSamples",
    "LossGrad",
    "Method",
    "Nothing",
    "SampleSet",
    "Samples",
    "State",
    "build_method",
    "method_class",
    "method_label",
    "method_options",
    "method_settings",
]

# From the plainest on: the order of tables and lists. A new method is one more line.
METHODS: dict[str, type[Method[Any]]] = {
    SGD.name: SGD,
    Joint.name: Joint,
    EWC.name: EWC,
    AGEM.name: AGEM,
    GEM.name: GEM,
    GEMNT.name: GEMNT,
    OGD.name: OGD,
    PCAOGD.name: PCAOGD,
}


def method_class(name: str) -> type[Method[Any]]:
    """The method of that name."""
    if name not in METHODS:
        raise ConfigError(f"unknown method {name!r}; there are {', '.join(METHODS)}")
    return METHODS[name]


def method_label(name: str) -> str:
    """The name of a method as people write it, such as PCA-OGD."""
    return (METHODS[name].label if name in METHODS else "") or name


def method_options(name: str) -> dict[str, Field[Any]]:
    """Setting → the field of the method that it sets."""
    kind: Any = method_class(name)
    return {setting_name(f): f for f in fields(kind)}


def build_method(name: str, settings: Mapping[str, Any]) -> Method[Any]:
    """The method of that name with its share of the settings; others are ignored."""
    chosen = {f.name: settings[s] for s, f in method_options(name).items() if s in settings}
    return METHODS[name](**chosen)


def method_settings(method: Method[Any]) -> dict[str, Any]:
    """The settings from which `build_method` makes the same method."""
    of: Any = method
    return {setting_name(f): getattr(method, f.name) for f in fields(of)}
