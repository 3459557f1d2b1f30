"""Small networks take few threads; large ones all that torch has."""

import pytest
import torch
from threadpoolctl import threadpool_info, threadpool_limits
from torch import nn

from forgetless import OGD, PCAOGD, SGD, ConfigError, Training, fit
from forgetless.training.build import make_learner
from forgetless.training.fit import Threads
from forgetless.training.learner import Learner
from forgetless.training.models import MLP, LeNet
from forgetless.training.network import Network
from tests.conftest import blobs

CPU = torch.device("cpu")


@pytest.fixture
def many():
    """A torch with many threads, as on a large machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    yield 6
    torch.set_num_threads(before)


@pytest.fixture
def numbers(monkeypatch):
    """The number of threads at each step."""
    found, plain = [], Learner.update

    def update(self, samples):
        found.append(torch.get_num_threads())
        plain(self, samples)

    monkeypatch.setattr(Learner, "update", update)
    return found


def test_a_small_network_trains_on_one_thread_and_torch_gets_its_own_back(many, numbers):
    trace = fit(blobs(), PCAOGD(components=3, samples=10), training=Training(epochs=1))
    assert set(numbers) == {1}
    assert torch.get_num_threads() == many
    assert trace.versions["threads"] == "1"


def test_torch_gets_its_own_back_after_an_error(many):
    with pytest.raises(ConfigError):
        fit(blobs(), SGD(), nn.Linear(6, 2))
    assert torch.get_num_threads() == many


def test_scipys_blas_takes_no_more_threads_than_torch(monkeypatch):
    found, plain = [], Learner.consolidate

    def consolidate(self, *args):
        found.extend(lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas")
        plain(self, *args)

    monkeypatch.setattr(Learner, "consolidate", consolidate)
    with threadpool_limits(6, "blas"):
        fit(blobs(), PCAOGD(components=3, samples=10), training=Training(epochs=1))
        after = [lib["num_threads"] for lib in threadpool_info() if lib["user_api"] == "blas"]
    assert set(found) == {1}
    assert set(after) == {6}


def planned(method, tasks, make, training):
    """The threads for a run's parts."""
    threads = Threads(CPU)
    learner = make_learner(tasks, method, make, [0], training, None, CPU)
    threads.plan(learner.network, method, tasks, training)
    return {part: threads.count(part) for part in ("training", "consolidation", "evaluation")}


def test_a_large_network_takes_all(many):
    training = Training(batch_size=64)
    found = planned(SGD(), blobs(tasks=1, n=64), lambda: MLP(6, 1000, 3), training)
    assert found == {"training": many, "consolidation": many, "evaluation": 3}


def test_many_directions_take_more(many):
    """The same network and batches, with many rows to project on."""
    tasks, training = blobs(n=600), Training(batch_size=2)
    make = lambda: MLP(6, 200, 3)  # noqa: E731
    assert planned(SGD(), tasks, make, training)["training"] == 1
    assert planned(OGD(samples=600), tasks, make, training)["training"] == 2


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_the_number_can_be_given(by, many, numbers, monkeypatch):
    if by == "environment":
        monkeypatch.setenv("FORGETLESS_THREADS", "2")
    fit(blobs(), SGD(), training=Training(epochs=1), threads=2 if by == "argument" else None)
    assert set(numbers) == {2}


def test_numbers_that_are_none(monkeypatch):
    with pytest.raises(ConfigError, match="threads must be a whole number of at least 1, not 0"):
        fit(blobs(), SGD(), threads=0)
    monkeypatch.setenv("FORGETLESS_THREADS", "many")
    with pytest.raises(ConfigError, match=r"FORGETLESS_THREADS must be a whole number .* 'many'"):
        fit(blobs(), SGD())


def test_work_is_counted_in_multiply_adds():
    network = Network(
        [LeNet((3, 8, 8), 5, 4) for _ in range(2)],
        torch.ones(1, 4, dtype=torch.bool),
        is_free=lambda name: False,
        is_frozen=lambda name: False,
        device=CPU,
        dtype=torch.float32,
    )
    network.check_outputs(torch.zeros(2, 3, 3, 8, 8))
    convolutions = 64 * 20 * 75 + 16 * 50 * 500
    assert network.work == convolutions + 200 * 5 + 5 * 4
