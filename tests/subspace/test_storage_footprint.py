"""The storage that fits a budget."""

from dataclasses import replace

import pytest
import torch

from forgetless import OGD, PCAOGD
from forgetless.subspace import STORAGES
from forgetless.subspace.storage import Footprint, budget_of, fitting_storage
from forgetless.support.validation import MemoryShortageError

CPU = torch.device("cpu")


def needs(method, **counts) -> Footprint:
    return Footprint(method.demand(), size=100_000, itemsize=4, factored=700.0, **counts)


@pytest.mark.parametrize(
    ("method", "budget", "storage"),
    [
        (OGD(10), 10**9, "dense"),
        (OGD(100), 500 * 10**6, "dense"),
        (OGD(100), 100 * 10**6, "factored"),
        (PCAOGD(20, 3000), 100 * 10**6, "dense"),
        (PCAOGD(20, 3000), 75 * 10**6, "factored"),
        (PCAOGD(20, 3000), 50 * 10**6, "bfloat16"),
    ],
)
def test_the_first_storage_that_fits(method, budget, storage):
    found = needs(method, tasks=10)
    chosen = fitting_storage(found, budget, CPU)
    assert chosen == STORAGES[storage]
    assert found.bytes(chosen) <= budget


def test_fewer_directions_where_nothing_fits():
    found = needs(PCAOGD(20, 3000), tasks=10)
    chosen = fitting_storage(found, 2_000_000, CPU)
    assert chosen.max_rank == 9
    assert found.bytes(chosen) <= 2_000_000 < found.bytes(replace(chosen, max_rank=10))
    with pytest.raises(MemoryShortageError, match=r"^budget must be .* one direction, 200 kB"):
        fitting_storage(found, 1000, CPU)


def test_fewer_samples_where_they_are_smaller_than_rows():
    found = needs(OGD(100), tasks=10, seeds=2)
    chosen = fitting_storage(found, 500_000, CPU)
    assert (chosen.kind, chosen.max_rank) == ("factored", 88)
    assert found.bytes(chosen) <= 500_000 < found.bytes(replace(chosen, max_rank=89))
    bulky = replace(found, factored=300_000.0)
    assert fitting_storage(bulky, 10**6, CPU) == replace(STORAGES["bfloat16"], max_rank=2)
    with pytest.raises(MemoryShortageError, match=r"at least one direction, 1\.45 kB"):
        fitting_storage(found, 1000, CPU)


def test_what_is_free_is_more_than_nothing():
    assert 10**6 < budget_of(CPU) < 10**15
