"""Remembered directions, and how they are stored."""

from forgetless.subspace.base import Directions, Record, Subspace
from forgetless.subspace.dense import DenseSubspace
from forgetless.subspace.factored import FactoredSubspace
from forgetless.subspace.inputs import InputSubspace
from forgetless.subspace.kronecker import KroneckerSubspace
from forgetless.subspace.storage import DENSE, FACTORED, STORAGES, Storage

__all__ = [
    "DENSE",
    "FACTORED",
    "STORAGES",
    "DenseSubspace",
    "Directions",
    "FactoredSubspace",
    "InputSubspace",
    "KroneckerSubspace",
    "Record",
    "Storage",
    "Subspace",
]
