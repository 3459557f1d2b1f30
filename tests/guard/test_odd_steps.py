"""Optimizers that go up, states that a budget has changed, batches and samples of odd kinds."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import forgetless
from forgetless import AGEM, EWC, GEM, OGD, PCAOGD, Joint
from forgetless.support.errors import ConfigError


@pytest.mark.parametrize(
    ("method", "project"),
    [(EWC(10.0), None), (AGEM(20), "gradient"), (Joint(20), None), (GEM(20, margin=0.5), None)],
    ids=lambda value: getattr(value, "name", value),
)
def test_going_up_along_minus_the_loss_is_going_down_along_it(method, project):
    weights = []
    for maximize in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, maximize=maximize)
        guard = forgetless.Guard(model, optimizer, method, project=project)
        guard.end_task((torch.randn(50, 5), torch.randint(0, 3, (50,))))
        x, y = torch.randn(50, 5), torch.randint(0, 3, (50,))
        for _ in range(10):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            (-loss if maximize else loss).backward()
            optimizer.step()
        weights.append(model.weight.detach().clone())
    torch.testing.assert_close(weights[1], weights[0])


@pytest.mark.filterwarnings("ignore:task 1. factored samples made rows", "ignore:task 2")
def test_a_guard_takes_back_the_rows_that_its_budget_made_of_factored_samples():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def made() -> forgetless.Guard:
        method = PCAOGD(components=4, samples=100)
        return forgetless.Guard(model, optimizer, method, storage="factored", budget="40KB")

    guard = made()
    guard.end_task((torch.randn(100, 20), torch.randint(0, 5, (100,))))
    state = guard.state_dict()
    guard.remove()
    again = made()
    again.load_state_dict(state)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in state.items())
    again.end_task((torch.randn(100, 20), torch.randint(0, 5, (100,))))
    assert again.tasks == 2


def test_a_batch_as_a_loader_gives_it_is_one_batch():
    data = TensorDataset(torch.randn(9, 5), torch.randint(0, 3, (9,)))
    batch = next(iter(DataLoader(data, batch_size=9)))
    assert isinstance(batch, list)
    model = nn.Linear(5, 3)
    guard = forgetless.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), AGEM(9))
    guard.end_task(batch)
    assert guard.tasks == 1


def test_a_list_that_may_be_one_batch_or_two_is_refused():
    model = nn.Linear(50, 50)
    guard = forgetless.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), OGD(100))
    pair = [torch.randn(20, 50), torch.randn(20, 50)]
    for either in (pair, [pair[0], pair[1][:, :1]]):
        with pytest.raises(ConfigError, match="may be one batch or two"):
            guard.end_task(either)
    guard.end_task([(part,) for part in pair])
    assert guard.tasks == 1


@pytest.mark.parametrize("method", [EWC(), AGEM(), Joint()], ids=lambda m: m.name)
@pytest.mark.parametrize("place", [0, 8])
def test_a_label_too_large_is_named_wherever_it_is(method, place):
    model, labels = nn.Linear(5, 3), torch.randint(0, 3, (9,))
    labels[place] = 3
    guard = forgetless.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), method)
    with pytest.raises(ConfigError, match=r"labels must be in \[0, 3\)"):
        guard.end_task((torch.randn(9, 5), labels))


def test_batch_norm_and_one_remembered_sample_are_refused_before_any_step():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    guard = forgetless.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), AGEM(memory=1))
    with pytest.raises(ConfigError, match="batch norm cannot be trained on one remembered sample"):
        guard.end_task((torch.randn(20, 5), torch.randint(0, 3, (20,))))
    assert guard.tasks == 0
