"""Continual-learning methods, one file each, behind one interface."""

import re
from collections.abc import Mapping
from dataclasses import Field, fields, is_dataclass
from typing import Any

from forgetless.methods.adam_nscl import AdamNSCL
from forgetless.methods.agem import AGEM
from forgetless.methods.base import (
    ActsOn,
    FinishedTask,
    LoadSamples,
    Method,
    Samples,
    SampleSet,
    View,
    choose,
)
from forgetless.methods.der import DER, DERPP
from forgetless.methods.er import ER
from forgetless.methods.er_ace import ERACE
from forgetless.methods.ewc import EWC
from forgetless.methods.gem import GEM
from forgetless.methods.gem_nt import GEMNT
from forgetless.methods.gpm import GPM
from forgetless.methods.joint import Joint
from forgetless.methods.kfac_laplace import KFACLaplace
from forgetless.methods.kron_ewc import KronEWC
from forgetless.methods.kron_ogd import KronOGD
from forgetless.methods.lwf import LwF
from forgetless.methods.ogd import OGD
from forgetless.methods.pca_ogd import PCAOGD
from forgetless.methods.sgd import SGD
from forgetless.methods.sgp import SGP
from forgetless.methods.si import SI
from forgetless.support.plugins import plugin, wrong_kind
from forgetless.support.validation import ConfigError, option, require, setting_name

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
    "METHODS",
    "OGD",
    "PCAOGD",
    "SGD",
    "SGP",
    "SI",
    "ActsOn",
    "AdamNSCL",
    "FinishedTask",
    "Joint",
    "KFACLaplace",
    "KronEWC",
    "KronOGD",
    "LoadSamples",
    "LwF",
    "Method",
    "SampleSet",
    "Samples",
    "View",
    "build_method",
    "choose",
    "method_calls",
    "method_class",
    "method_label",
    "method_options",
    "method_settings",
    "option",
]

# In the order of tables and lists. A new method is one more line.
METHODS: dict[str, type[Method[Any]]] = {
    SGD.name: SGD,
    Joint.name: Joint,
    EWC.name: EWC,
    AGEM.name: AGEM,
    GEM.name: GEM,
    GEMNT.name: GEMNT,
    OGD.name: OGD,
    PCAOGD.name: PCAOGD,
    KronOGD.name: KronOGD,
    KFACLaplace.name: KFACLaplace,
    GPM.name: GPM,
    SGP.name: SGP,
    AdamNSCL.name: AdamNSCL,
    KronEWC.name: KronEWC,
    SI.name: SI,
    LwF.name: LwF,
    ER.name: ER,
    ERACE.name: ERACE,
    DER.name: DER,
    DERPP.name: DERPP,
}


def method_class(name: str) -> type[Method[Any]]:
    """The method of that name: a built-in one, an installed plug-in, or `my_file.py:OWM`."""
    if name in METHODS:
        return METHODS[name]
    found = plugin("method", name, METHODS)
    if not (isinstance(found, type) and issubclass(found, Method)):
        raise wrong_kind("method", name, found, "a subclass of Method")
    # A class that does not say what it acts on explains that when it is made.
    lacking = sorted(set(getattr(found, "__abstractmethods__", ())) - {"acts_on"})
    lacking += [] if isinstance(getattr(found, "name", None), str) else ["name"]
    if lacking or not is_dataclass(found):
        what = f"has no {', '.join(lacking)}" if lacking else "is no dataclass"
        raise ConfigError(f"the method {name} is not complete: {found.__name__} {what}")
    # A name is a folder's too.
    fits = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9+._-]*", found.name) is not None
    require(fits, f"the name of {found.__name__}", found.name, "letters, digits and + . _ -")
    return found


def method_label(name: str) -> str:
    """The name of a method as people write it, such as PCA-OGD."""
    return (METHODS[name].label if name in METHODS else "") or name


def method_calls() -> list[str]:
    """How each of METHODS is made in Python, with its defaults: "PCAOGD()"."""
    return [f"{kind.__name__}()" for kind in METHODS.values()]


def method_options(name: str) -> dict[str, Field[Any]]:
    """Setting → the field of the method that it sets."""
    kind: Any = method_class(name)
    return {setting_name(f): f for f in fields(kind)}


def build_method(name: str, settings: Mapping[str, Any]) -> Method[Any]:
    """The method of that name with its share of the settings; others are ignored."""
    chosen = {f.name: settings[s] for s, f in method_options(name).items() if s in settings}
    return method_class(name)(**chosen)


def method_settings(method: Method[Any]) -> dict[str, Any]:
    """The settings from which `build_method` makes the same method."""
    made: Any = method  # a dataclass, which its type does not say
    return {setting_name(f): getattr(method, f.name) for f in fields(made)}
