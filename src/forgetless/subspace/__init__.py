"""Remembered directions, and how they are stored."""

from torch import Tensor

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
    "empty_subspace",
]


def empty_subspace(theta: Tensor, storage: Storage) -> Subspace:
    """No directions yet, for weights theta (S, p)."""
    if storage.kind == "factored":
        return FactoredSubspace.empty(theta, storage)
    return DenseSubspace.empty(theta, storage)
