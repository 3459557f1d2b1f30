"""Weights that change outside of the guarded steps are told of, and usual loops are not."""

import copy
import warnings
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.nn.functional import cross_entropy

from forgetless import AGEM, EWC, OGD, SGD, Guard, KronOGD
from forgetless.support.validation import ForgetlessWarning

from .problems import guarded, mlp, task, train

CHANGED = (
    r"was changed by something else than .* while 1 task is stored.*guard\.attach\(optimizer\)"
)
METHODS = {"ogd": OGD(20), "kron-ogd": KronOGD(samples=20), "ewc": EWC(), "a-gem": AGEM(20)}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
unguarded = partial(pytest.warns, ForgetlessWarning, match=CHANGED)
MOMENTS = {
    "end_task": lambda guard: guard.end_task(task(1)),
    "refresh": lambda guard: guard.refresh(task(0)),
    "stats": lambda guard: guard.stats(),
    "state_dict": lambda guard: guard.state_dict(),
    "remove": lambda guard: guard.remove(),
}
NEW = {
    "sgd": partial(optim.SGD, lr=0.05),
    "adamw": optim.AdamW,
    "foreach": partial(optim.Adam, foreach=True),
    "fused": partial(optim.Adam, fused=True),  # raises no version
}


def at(moment, guard):
    """The line of this file that warned, too: users must find theirs."""
    with unguarded() as caught:
        MOMENTS[moment](guard)
    assert [w.filename for w in caught if w.category is ForgetlessWarning] == [__file__]


@pytest.mark.parametrize("new", NEW.values(), ids=NEW)
def test_a_new_optimizer_that_was_not_attached(new):
    """Its first step is told of, whether or not the guard is used again."""
    model, _, guard = guarded()
    with unguarded() as caught:
        train(model, new(model.parameters()), task(1), steps=3)
    assert len(caught) == 1
    assert caught[0].filename.endswith("problems.py")
    guard.end_task(task(1))  # once


@pytest.mark.parametrize("moment", MOMENTS)
def test_weights_that_are_edited_again_and_again(moment):
    model, _, guard = guarded()
    for _ in range(6):
        edited(model)
        averaged(model)
    at(moment, guard)
    if moment != "remove":
        guard.stats()  # once


@every_method
def test_whatever_the_method(method):
    model, _, _ = guarded(method=method)
    with unguarded():
        train(model, optim.Adam(model.parameters()), task(1))


def test_one_that_is_attached_too_late():
    model, _, guard = guarded()
    new = optim.Adam(model.parameters())
    with unguarded():
        train(model, new, task(1), steps=3)
    guard.attach(new)
    train(model, new, task(1))


def test_one_that_takes_over_in_the_middle_of_a_task():
    model, optimizer, _ = guarded()
    train(model, optimizer, task(1), steps=3)
    with unguarded():
        train(model, optim.SGD(model.parameters(), lr=0.1), task(1), steps=10)


@pytest.mark.parametrize("new", NEW.values(), ids=NEW)
def test_a_second_optimizer_beside_the_guarded_one(new):
    model, optimizer, _ = guarded()
    second = new(model[2].parameters())
    train(model, optimizer, task(1))
    with unguarded() as caught:
        second.step()
    assert str(caught[0].message).startswith("2.weight was changed")
    assert caught[0].filename == __file__
    optimizer.step()
    second.step()  # once


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself
def test_a_compiled_step_that_nothing_guards():
    model, _, _ = guarded()
    new = optim.SGD(model.parameters(), lr=0.1)
    new.step = torch.compile(new.step, backend="eager")
    with unguarded():
        train(model, new, task(1))


class Wrapped(optim.Optimizer):
    """As SAM and Lookahead are: an optimizer that lets another one step."""

    def __init__(self, inner):
        super().__init__([*inner.param_groups], {})
        self.inner = inner

    def step(self, closure=None):
        self.inner.step(closure)


@pytest.mark.parametrize("guards", ["the outer", "the inner"])
def test_an_optimizer_inside_another_one(guards):
    model = mlp()
    inner = optim.SGD(model.parameters(), lr=0.05)
    outer = Wrapped(inner)
    guard = Guard(model, outer if guards == "the outer" else inner, OGD(20))
    guard.end_task(task(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, outer, task(1), steps=3)
    assert guard.stats().steps == 3


def test_optimizers_of_other_models_and_copies_say_nothing():
    model, optimizer, _ = guarded()
    for other in (mlp(), copy.deepcopy(model)):
        train(other, optim.SGD(other.parameters(), lr=0.1), task(1), steps=20)
    train(model, optimizer, task(1))


def test_a_guard_that_was_dropped_says_nothing():
    def first_run(model):
        optimizer = optim.SGD(model.parameters(), lr=0.05)
        Guard(model, optimizer, OGD(20)).end_task(task(0))

    model = mlp()
    first_run(model)
    train(model, optim.SGD(model.parameters(), lr=0.05), task(1), steps=3)


def test_another_guard_on_the_new_optimizer_is_enough():
    model, _, _ = guarded()
    new = optim.SGD(model.parameters(), lr=0.05)
    Guard(model, new, OGD(20)).end_task(task(0))
    train(model, new, task(1), steps=3)


def test_a_head_that_another_optimizer_trains_is_told_of_while_it_trains():
    model = mlp()
    body, head = (optim.SGD(model[i].parameters(), lr=0.05) for i in (0, 2))
    guard = Guard(model, body, OGD(20))
    guard.end_task(task(0))
    with pytest.warns(ForgetlessWarning, match=r"^2\.weight is trained by an optimizer that") as w:
        train(model, head, task(1), steps=20)
    assert len(w) == 1
    guard.end_task(task(1))


REPLACED = r"^2\.weight, which the guard protects, is no longer a parameter of the model"


@pytest.mark.parametrize("added", [False, True], ids=["new optimizer", "new group"])
def test_a_layer_that_was_replaced_is_told_of_while_it_trains(added):
    model = mlp()
    old = optim.SGD(model.parameters(), lr=0.05)
    guard = Guard(model, old, OGD(20))
    guard.end_task(task(0))
    model[2] = nn.Linear(model[2].in_features, model[2].out_features)
    new = old
    if added:
        old.add_param_group({"params": model[2].parameters()})
    else:
        new = optim.SGD(model[2].parameters(), lr=0.05)
    with pytest.warns(ForgetlessWarning, match=REPLACED) as w:
        train(model, new, task(1), steps=20)
    assert len(w) == 1


def test_what_was_replaced_and_is_not_trained_says_nothing():
    model, _, _ = guarded()
    model[2] = nn.Linear(model[2].in_features, model[2].out_features)
    other = mlp()
    train(other, optim.SGD(other.parameters(), lr=0.1), task(1), steps=20)


def loaded(model):
    other = mlp()
    train(other, optim.SGD(other.parameters(), lr=0.1), task(3), steps=2)
    model.load_state_dict(other.state_dict())


def edited(model):
    with torch.no_grad():
        model[0].bias.clamp_(-0.01, 0.01)


def averaged(model):
    for p in model.parameters():
        p.data.mul_(0.9)


EDITS = {"load_state_dict": loaded, "in place": edited, "through .data": averaged}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_weights_that_are_loaded_or_edited_before_a_step(edit, steps):
    model, optimizer, _ = guarded()
    train(model, optimizer, task(1), steps=steps)
    edit(model)
    with unguarded() as caught:
        train(model, optimizer, task(1))
    assert caught[0].filename.endswith("problems.py")


def test_an_edit_through_data_after_every_step_is_told_of_in_time():
    """It raises no version; values are looked at now and then."""
    model, optimizer, guard = guarded()
    train(model, optimizer, task(1), steps=33)

    def edited_steps():
        for _ in range(18):
            averaged(model)
            train(model, optimizer, task(1))

    with unguarded():
        edited_steps()
    assert guard.stats().steps == 51


def silent(loop):
    def test(method):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loop(method)

    test.__name__ = loop.__name__
    return every_method(test)


def begun(method, make=NEW["sgd"]):
    model = mlp()
    optimizer = make(model.parameters())
    guard = Guard(model, optimizer, method, drift_samples=0)  # what drifts has warnings of its own
    train(model, optimizer, task(0), steps=5)
    guard.end_task(task(0))
    return model, optimizer, guard


@silent
def test_a_usual_loop(method):
    model, optimizer, guard = begun(method, partial(optim.AdamW, lr=2e-3))
    schedule = optim.lr_scheduler.StepLR(optimizer, 2)
    x, y = task(1)
    for _ in range(6):
        for half in (slice(0, 15), slice(15, 30)):
            cross_entropy(model(x[half]), y[half]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
        guard.stats()
        guard.memory_report()
    guard.end_task(task(1))
    guard.remove()


@silent
def test_a_new_optimizer_that_is_attached(method):
    model, _, guard = begun(method)
    for number in (1, 2):
        new = optim.Adam(model.parameters(), lr=1e-3)
        guard.attach(new)
        train(model, new, task(number), steps=3)
        guard.end_task(task(number))


@silent
def test_the_best_weights_are_loaded_before_the_task_ends(method):
    model, optimizer, guard = begun(method)
    train(model, optimizer, task(1), steps=3)
    best = copy.deepcopy(model.state_dict())
    train(model, optimizer, task(1), steps=3)
    model.load_state_dict(best)
    guard.stats()
    guard.state_dict()
    guard.end_task(task(1))
    train(model, optimizer, task(2), steps=3)


@silent
def test_weights_trained_elsewhere_are_loaded_and_stored(method):
    model, _, guard = begun(method)
    loaded(model)
    guard.end_task(task(1))


@silent
def test_averages_are_swapped_in_for_evaluation(method):
    model, optimizer, guard = begun(method)
    average = optim.swa_utils.AveragedModel(model)
    for _ in range(4):
        train(model, optimizer, task(1))
        average.update_parameters(model)
        own = copy.deepcopy(model.state_dict())
        model.load_state_dict(average.module.state_dict())
        model.load_state_dict(own)
    model.load_state_dict(average.module.state_dict())
    guard.end_task(task(1))


@silent
def test_mixed_precision_with_steps_that_are_skipped(method):
    model, optimizer, guard = begun(method)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x, y = task(1)
    for number in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = cross_entropy(model(x), y)
        scaler.scale(loss * (torch.inf if number == 2 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
    guard.end_task(task(1))


@silent
def test_training_resumes_in_either_order(method):
    model, optimizer, guard = begun(method)
    train(model, optimizer, task(1), steps=2)
    weights, state = copy.deepcopy(model.state_dict()), guard.state_dict()
    for weights_first in (True, False):
        again = mlp()
        new = optim.SGD(again.parameters(), lr=0.02)
        second = Guard(again, new, method)
        if weights_first:
            again.load_state_dict(weights)
        second.load_state_dict(state)
        if not weights_first:
            again.load_state_dict(weights)
        train(again, new, task(1), steps=2)
        second.end_task(task(1))


@silent
def test_frozen_for_a_while_and_moved(method):
    model, optimizer, guard = begun(method)
    model[0].requires_grad_(False)
    train(model, optimizer, task(1), steps=2)
    model[0].requires_grad_(True)
    train(model, optimizer, task(1), steps=2)
    if method.needs_model:  # its samples keep their precision
        return
    model.double()
    train(model, optimizer, task(1, dtype=torch.float64), steps=2)
    guard.end_task(task(1, dtype=torch.float64))


@silent
def test_two_guards_on_one_optimizer(method):
    """One changes what the other has left, in the same step."""
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.02)
    guards = [Guard(model, optimizer, m) for m in (EWC(), OGD(20))]
    for guard in guards:
        guard.end_task(task(0))
    train(model, optimizer, task(1), steps=5)
    for guard in guards:
        guard.end_task(task(1))


@silent
def test_what_is_trained_without_a_guard_on_purpose(method):
    model, optimizer, guard = begun(method)
    guard.remove()
    train(model, optimizer, task(1), steps=5)
    guard.stats()
    guard.attach(optimizer)
    train(model, optimizer, task(1), steps=2)


def test_what_protects_nothing_says_nothing():
    model, _, guard = guarded(method=SGD())
    train(model, optim.SGD(model.parameters(), lr=0.1), task(1), steps=3)
    guard.end_task(task(1))


def test_before_the_first_task_nothing_is_watched():
    model = mlp()
    guard = Guard(model, optim.SGD(model.parameters(), lr=0.1), OGD())
    train(model, optim.Adam(model.parameters()), task(0), steps=5)
    guard.end_task(task(0))
