"""The method of a guard that was given none."""

import copy

import pytest
import torch
from torch import optim

from forgetless import ConfigError, DataError, Guard, KronEWC, KronOGD
from tests.guard.problems import mlp, task
from tests.llm.tiny import llama


def language_model():
    return llama(), {"input_ids": WORDS, "labels": WORDS}


WORDS = torch.randint(0, 15, (6, 8), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("steps", [0, 3])
def test_a_language_model_is_protected_by_projection_unless_a_method_is_given(steps):
    model, batch = language_model()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    guard = Guard(model, optimizer)
    assert isinstance(guard.method, KronEWC)

    def step():
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

    for _ in range(steps):
        step()
    with pytest.raises(DataError):
        guard.protect([])
    assert isinstance(guard.method, KronEWC)  # nothing was stored
    guard.protect(batch)
    assert isinstance(guard.method, KronOGD)
    assert guard.project == "update"

    given_model, _ = language_model()
    given_model.load_state_dict(model.state_dict())
    other = optim.AdamW(given_model.parameters(), lr=1e-3)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    given = Guard(given_model, other, KronOGD())
    given.protect(batch)
    for _ in range(3):
        step()
        other.zero_grad()
        given_model(**batch).loss.backward()
        other.step()
    assert guard.stats().removed > 0
    for a, b in zip(model.parameters(), given_model.parameters(), strict=True):
        assert torch.equal(a, b)

    # The state says which of the two it is of, also to a guard that was given no method.
    fresh, _ = language_model()
    again = Guard(fresh, optim.SGD(fresh.parameters()))
    again.load_state_dict(guard.state_dict())
    assert again.method == KronOGD()
    assert again.tasks == 1
    given_one = Guard(fresh, optim.SGD(fresh.parameters()), KronEWC())
    with pytest.raises(ConfigError, match="one of kron-ogd, and this guard uses kron-ewc"):
        given_one.load_state_dict(guard.state_dict())


def test_protect_keeps_the_method_that_is_given_and_that_of_other_models():
    model, batch = language_model()
    with Guard(model, optim.SGD(model.parameters()), KronEWC()) as guard:
        guard.protect(batch)
        assert isinstance(guard.method, KronEWC)
    with Guard(model, optim.SGD(model.parameters())) as guard:
        guard.end_task(batch)
        assert isinstance(guard.method, KronEWC)
        guard.protect(batch)  # the second task: what is stored stays
        assert isinstance(guard.method, KronEWC)
    classifier = mlp()
    with Guard(classifier, optim.SGD(classifier.parameters())) as guard:
        guard.protect(task(0))
        assert isinstance(guard.method, KronEWC)


def test_the_estimate_is_of_the_method_that_protect_takes():
    model, batch = language_model()
    with Guard(model, optim.SGD(model.parameters())) as guard:
        expected = guard.estimate(batch).bytes
        assert isinstance(guard.method, KronEWC)
        guard.protect(batch)
        assert expected == (guard.memory_report().bytes,) * 2
