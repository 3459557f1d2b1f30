"""Where remembered directions live."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from forgetless.subspace.base import Record, Subspace
from forgetless.subspace.dense import DenseSubspace
from forgetless.subspace.factored import FactoredSubspace
from forgetless.subspace.storage import DENSE, FACTORED, STORAGES, Storage

__all__ = [
    "DENSE",
    "FACTORED",
    "STORAGES",
    "DenseSubspace",
    "FactoredSubspace",
    "Record",
    "Storage",
    "Subspace",
    "empty_subspace",
    "restored_subspace",
]


def empty_subspace(theta: Tensor, storage: Storage) -> Subspace:
    """No directions yet, for weights theta (S, p)."""
    if storage.kind == "factored":
        return FactoredSubspace.empty(theta, storage)
    return DenseSubspace.empty(theta, storage)


def restored_subspace(
    of_seeds: Sequence[Mapping[str, Tensor]], theta: Tensor, storage: Storage
) -> Subspace:
    """From what `tensors` gave for each seed."""
    if storage.kind == "factored":
        return FactoredSubspace.restore(of_seeds, theta, storage)
    return DenseSubspace.restore(of_seeds, theta, storage)
