"""What is remembered is what the user's loader gives."""

import pytest
import torch
from torch import optim
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from forgetless import EWC, OGD, DataError, Guard, Joint

from .problems import exact_basis, flat, mlp, task, train


class Normalised(DataLoader):
    """A loader that changes its batches."""

    def __iter__(self):
        for x, y in super().__iter__():
            yield (x - 100) / 10, y


class EverySecond(SequentialSampler):
    def __iter__(self):
        return iter(range(0, len(self.data_source), 2))

    def __len__(self):
        return len(self.data_source) // 2


class FirstHalf(RandomSampler):
    def __iter__(self):
        return iter(range(len(self.data_source) // 2))


class Once(IterableDataset):
    """A stream that goes on where it was left."""

    def __init__(self, data) -> None:
        self.stream = iter(list(zip(*data, strict=True)))

    def __iter__(self):
        return self.stream


def ended(loader, method=None, **options):
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, method or OGD(samples=1000), **options)
    guard.end_task(loader)
    return model, optimizer, guard


def test_a_loader_that_changes_its_batches():
    x, y = task(0)
    model, optimizer, _ = ended(Normalised(TensorDataset(10 * x + 100, y), batch_size=7))
    basis = exact_basis(model, x, y)
    before = flat(model)
    train(model, optimizer, task(1), steps=3)
    delta = flat(model) - before
    assert float((basis @ delta).norm() / delta.norm()) < 1e-5


@pytest.mark.parametrize("kind", [EverySecond, FirstHalf])
def test_a_sampler_that_leaves_samples_out(kind):
    data = TensorDataset(*task(0))
    loader = DataLoader(data, sampler=kind(data), batch_size=7)
    _, _, guard = ended(loader)
    assert guard.memory_report().directions == len(data) // 2


@pytest.mark.parametrize("options", [{}, {"budget": "10MB"}])
def test_a_stream_that_can_be_read_once_is_remembered_as_a_whole(options):
    data = task(0)
    _, _, guard = ended(DataLoader(Once(data), batch_size=7), **options)
    assert guard.memory_report().directions == len(data[1])


@pytest.mark.parametrize("method", [EWC(), Joint()], ids=lambda m: m.name)
def test_what_walks_through_a_stream_twice_says_so(method):
    with pytest.raises(DataError, match=r"can be walked through only once.* give a list"):
        ended(DataLoader(Once(task(0)), batch_size=7), method)
    ended(list(DataLoader(Once(task(0)), batch_size=7)), method)


def test_an_empty_loader_has_no_samples():
    for loader in ([], DataLoader(Once((torch.empty(0, 5), torch.empty(0))), batch_size=7)):
        with pytest.raises(DataError, match="the loader has no samples"):
            ended(loader)
