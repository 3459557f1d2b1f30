"""What a guard tells its page: true numbers, and advice that fits them."""

import re

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from forgetless import GEM, OGD, ConfigError, Guard, KronEWC

from .problems import mlp, task
from .test_history import trained


def account(guard, held_out=()):
    seen = {}
    import forgetless.report.guard_page as page

    original = page.write_guard_page
    page.write_guard_page = lambda content, path: seen.update(content)
    try:
        guard.report("unused.html", held_out=list(held_out))
    finally:
        page.write_guard_page = original
    return seen


def test_accuracy_and_loss_on_held_out_samples_are_those_of_a_plain_loop():
    guard = trained()
    model = guard._model.module
    held = [task(number, n=50) for number in range(2)]
    loaders = [DataLoader(TensorDataset(*pair), batch_size=7) for pair in held]
    found = account(guard, loaders)["tasks"]
    for (x, y), entry in zip(held, found, strict=True):
        with torch.no_grad():
            outputs = model.eval()(x)
        assert entry["held_out"]["samples"] == 50
        assert entry["held_out"]["accuracy"] == pytest.approx(
            float((outputs.argmax(1) == y).double().mean())
        )
        assert entry["held_out"]["loss"] == pytest.approx(
            float(cross_entropy(outputs, y)), rel=1e-5
        )


def test_an_earlier_report_is_what_a_later_one_compares_with():
    guard = trained()
    x, y = task(0, n=50)
    first = account(guard, [(x, y)])["tasks"][0]
    again = account(guard, [(x, y)])["tasks"][0]
    assert first["before"] == []
    ((step, accuracy, loss),) = again["before"]
    assert (accuracy, loss) == (first["held_out"]["accuracy"], first["held_out"]["loss"])
    assert step == 120
    assert again["held_out"] == first["held_out"]


def test_tasks_without_held_out_data_and_regression_have_no_accuracy():
    guard = trained()
    tasks = account(guard, [None, task(1)])["tasks"]
    assert tasks[0]["held_out"] is None
    assert tasks[1]["held_out"]["accuracy"] is not None
    model = torch.nn.Linear(3, 1)
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    guard.end_task((x, y))
    held = account(guard, [(x, y)])["tasks"][0]["held_out"]
    assert held["accuracy"] is None
    error = (model(x) - y).detach().square().mean()
    assert held["loss"] == pytest.approx(float(error), rel=1e-5)


def test_what_is_protected_and_what_is_free_adds_up():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, OGD(samples=6), exclude="2.bias")
    guard.end_task(task())
    found = account(guard)
    trained_numbers = sum(p.numel() for p in model.parameters())
    assert [layer["name"] for layer in found["layers"]] == ["0.weight", "0.bias", "2.weight"]
    assert found["free"] == [{"name": "2.bias", "count": model[2].bias.numel()}]
    assert found["parameters"] + model[2].bias.numel() == trained_numbers
    assert {x["name"]: x["bytes"] for x in found["layers"]} == guard.memory_report().layers
    assert found["memory"]["directions"] == guard.memory_report().directions
    # Left out on purpose, so nothing is to be done about it.
    assert not any("not protected" in advice for advice in found["advice"])


def test_the_page_leaves_model_random_state_and_guard_as_they_are(tmp_path):
    guard = trained()
    model = guard._model.module.train()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    stored, random = guard.state_dict(), torch.get_rng_state()
    guard.report(tmp_path / "page.html", held_out=[task(0), task(1)])
    assert model.training
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    after = guard.state_dict()
    assert stored.keys() == after.keys()
    assert all(torch.equal(t, after[name]) for name, t in stored.items())


NOTHING = "there is nothing to do"


def test_advice_fits_what_was_measured():
    model = mlp()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (nothing,) = account(guard)["advice"]
    assert "call guard.end_task(loader)" in nothing

    calm = trained(steps=20, lr=1e-4)
    assert [NOTHING in advice for advice in account(calm)["advice"]] == [True]

    with pytest.warns(UserWarning, match="is being forgotten"):
        forgetful = trained(steps=150, method=OGD(samples=1), lr=0.5, contradict=True)
    advice = " ".join(account(forgetful)["advice"])
    assert re.search(r"Task 1 is being forgotten: set samples above 1, or lower", advice)
    assert NOTHING not in advice

    blind = trained(steps=5, drift_samples=0)
    assert any("drift_samples" in advice for advice in account(blind)["advice"])


def test_parameters_that_should_be_protected_are_named():
    model = mlp()
    model[0].requires_grad_(False)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), OGD(samples=4))
    guard.end_task(task())
    model[0].requires_grad_(True)
    advice = " ".join(account(guard)["advice"])
    assert "0.weight and 1 more is trained and not protected: call guard.adopt" in advice


def test_a_model_that_no_longer_takes_the_kept_samples_has_a_page_all_the_same(tmp_path):
    guard = trained(steps=5)
    guard._model.module.add_module("more", torch.nn.Linear(4, 2))
    with pytest.warns(UserWarning, match="the drift cannot be checked any more"):
        found = account(guard)
    assert [task["drift"] for task in found["tasks"]] == [None, None]


@pytest.mark.parametrize("method", [KronEWC(samples=20), GEM(memory=8)])
def test_methods_without_directions_have_a_page_too(method, tmp_path):
    page = trained(steps=5, method=method).report(tmp_path / "page.html")
    assert page.read_text().startswith("<!doctype html>")


def test_more_data_than_tasks_is_rejected(tmp_path):
    guard = trained(steps=1, tasks=1)
    with pytest.raises(ConfigError, match="report's held_out must be a list of at most 1, one"):
        guard.report(tmp_path / "page.html", held_out=[task(), task()])
    assert not list(tmp_path.iterdir())
