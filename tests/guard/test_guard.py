"""The guard's life: created, attached, moved, copied, and what it rejects."""

import copy
import doctest
import pickle
import warnings

import pytest
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import forgetless.guard.guard as module_under_test
from forgetless import AGEM, EWC, OGD, PCAOGD, SGD, ConfigError, Guard, Joint
from tests.methods.test_all_methods import TABLE

from .problems import CLASSES, exact_basis, flat, guarded, mlp, task, train, wander

METHODS = {name: m for name, m in TABLE.items() if name != "a-gem, released"}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def test_the_example_in_the_docstring():
    found = doctest.testmod(module_under_test)
    assert found.attempted >= 5
    assert found.failed == 0


def hooks(optimizer) -> int:
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


@every_method
def test_removed_it_leaves_training_alone_to_the_bit(method):
    model, plain = mlp(), mlp()
    optimizer, other = (optim.Adam(m.parameters(), lr=1e-2) for m in (model, plain))
    with Guard(model, optimizer, method) as guard:
        train(model, optimizer, task(0), steps=3)
        train(plain, other, task(0), steps=3)
        assert torch.equal(flat(model), flat(plain))  # nothing is remembered yet
        guard.end_task(task(0))
        assert torch.equal(flat(model), flat(plain))
        assert hooks(optimizer) == 2
    assert hooks(optimizer) == 0
    train(model, optimizer, task(1), steps=5)
    train(plain, other, task(1), steps=5)
    assert torch.equal(flat(model), flat(plain))
    assert guard.tasks == 1
    guard.remove()
    guard.attach(optimizer)
    assert hooks(optimizer) == 2


def test_a_context_manager_lets_go_of_the_optimizer_after_an_error():
    model = mlp()
    optimizer = optim.SGD(model.parameters())
    with pytest.raises(KeyError), Guard(model, optimizer, OGD()):
        raise KeyError
    assert hooks(optimizer) == 0


def test_another_optimizer_for_every_task():
    model, first, guard = guarded()
    basis = exact_basis(model, *task(0))
    second = optim.Adam(model.parameters(), lr=1e-2)
    guard.attach(second)
    assert (hooks(first), hooks(second)) == (0, 2)
    before = flat(model)
    wander(model, second, 0)
    delta = flat(model) - before
    assert float((basis @ delta).norm() / delta.norm()) < 1e-5
    guard.attach(second)
    assert hooks(second) == 2
    with pytest.raises(ConfigError, match="the optimizer trains none of the protected parameters"):
        guard.attach(optim.SGD(mlp().parameters()))
    assert hooks(second) == 2  # a refused one changes nothing


@pytest.mark.parametrize("optimizer", [None, "sgd", nn.Linear(1, 1), object()])
def test_what_is_no_optimizer(optimizer):
    with pytest.raises(ConfigError, match=r"optimizer must be a torch\.optim\.Optimizer, not"):
        Guard(mlp(), optimizer, OGD())


def test_a_wrapped_optimizer():
    class Wrapper:
        def __init__(self, inner):
            self.optimizer = inner

    model = mlp()
    optimizer = optim.SGD(model.parameters())
    Guard(model, Wrapper(optimizer), OGD())
    assert hooks(optimizer) == 2


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (("net", None, OGD()), {}, r"model must be a torch\.nn\.Module, not str"),
        ((None, None, "ogd"), {}, r"method must be such as PCAOGD\(\), not 'ogd'"),
        ((None, None, OGD), {}, r"method must be such as PCAOGD\(\)"),
        (
            (None, None, OGD()),
            {"project": "weights"},
            "project must be 'update' or 'gradient', not",
        ),
        ((None, None, EWC()), {"project": "update"}, "ewc changes the gradient and cannot project"),
        ((None, None, Joint()), {"project": "update"}, "joint changes the gradient"),
    ],
)
def test_arguments_that_cannot_be(arguments, options, message):
    model, optimizer, method = arguments
    model = model or mlp()
    if isinstance(model, nn.Module):
        optimizer = optim.SGD(model.parameters())
    with pytest.raises(ConfigError, match=message):
        Guard(model, optimizer, method, **options)


def test_two_guards_on_one_optimizer():
    """Of two projections only the last would hold: refused, unless they share nothing."""
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    first = Guard(model, optimizer, OGD(1000), params="0")
    for project in ("update", "gradient"):
        with pytest.raises(ConfigError, match=r"another guard projects .* of 0\.weight already"):
            Guard(model, optimizer, PCAOGD(), project=project)
    assert hooks(optimizer) == 2
    Guard(model, optimizer, EWC()).remove()  # it adds to the gradient
    second = Guard(model, optimizer, OGD(1000), params="2")
    for guard in (first, second):
        guard.end_task(task(0))
    basis = exact_basis(model, *task(0))
    before = flat(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(model, optimizer, task(1), steps=3)
    delta = flat(model) - before
    assert float((basis @ delta).norm() / delta.norm()) < 1e-5
    first.remove()
    # One that changes the gradient, and one that projects what comes of it.
    springs = Guard(model, optimizer, EWC(), params="0")
    springs.end_task(task(0))
    Guard(model, optim.SGD(model.parameters()), OGD())


class Breaks:
    """A loader that breaks after some batches."""

    def __init__(self, error: BaseException, after: int = 2) -> None:
        self.error, self.after = error, after

    def __iter__(self):
        x, y = task(1)
        for i in range(self.after):
            yield x[i * 5 : i * 5 + 5], y[i * 5 : i * 5 + 5]
        raise self.error


@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
@every_method
def test_a_task_that_ends_half_way_changes_nothing(method, error):
    if isinstance(method, SGD):
        return  # it does not look at the data
    results = []
    for broken in (False, True):
        model = mlp()
        optimizer = optim.SGD(model.parameters(), lr=0.05)
        guard = Guard(model, optimizer, method)
        train(model, optimizer, task(0), steps=2)
        guard.end_task(task(0))
        train(model, optimizer, task(1), steps=2)
        if broken:
            before, stats = guard.state_dict(), guard.stats()
            for attempt in (guard.end_task, guard.refresh):
                with pytest.raises(type(error)):
                    attempt(Breaks(error))
            after = guard.state_dict()
            assert all(torch.equal(after[n], t) for n, t in before.items())
            assert guard.stats() == stats
            assert all(m.training for m in model.modules())
        train(model, optimizer, task(1), steps=2, seed=1)
        guard.end_task(task(1))
        train(model, optimizer, task(2), steps=2)
        results.append(flat(model))
    assert torch.equal(*results)


def test_with_a_budget_too():
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.05)
    guard = Guard(model, optimizer, OGD(5), budget="1MB")
    before = guard.state_dict()
    with pytest.raises(OSError, match="disk"):
        guard.end_task(Breaks(OSError("disk"), after=1))
    assert all(torch.equal(guard.state_dict()[n], t) for n, t in before.items())
    assert guard.memory_report().storage == "dense rows"


def test_a_step_that_breaks_does_not_disturb_the_next():
    model, optimizer, _ = guarded()
    twin, other, _ = guarded()
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    train(model, optimizer, task(1), steps=2)
    train(twin, other, task(1), steps=2)
    assert torch.equal(flat(model), flat(twin))


def test_the_model_can_be_copied_and_pickled():
    model, optimizer, guard = guarded()
    twin = copy.deepcopy(model)
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(flat(twin), flat(model))
    assert torch.equal(flat(again), flat(model))
    copied = copy.deepcopy(optimizer)
    train(twin, optim.SGD(twin.parameters(), lr=0.1), task(1))
    train(model, optimizer, task(1))
    assert not torch.equal(flat(twin), flat(model))
    assert isinstance(copied, optim.SGD)
    assert guard.stats().steps == 1


def test_weights_made_float64_later():
    for storage in ("dense", "factored"):
        model = mlp()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        guard = Guard(model, optimizer, OGD(1000), storage=storage)
        guard.end_task(task(0))
        basis = exact_basis(model, *task(0))
        model.double()
        before = flat(model)
        train(model, optimizer, task(1, dtype=torch.float64))
        delta = flat(model) - before
        assert float((basis @ delta).norm() / delta.norm()) < 1e-5
        guard.end_task(task(1, dtype=torch.float64))
        assert guard.tasks == 2
        train(model, optimizer, task(2, dtype=torch.float64))


@pytest.mark.parametrize("storage", ["dense", "factored"])
def test_a_model_that_was_moved_takes_the_memory_along(storage, monkeypatch):
    """There is one device here: the guard is made to believe that it was another."""
    model, optimizer, guard = guarded(storage=storage)
    twin, other, _ = guarded(storage=storage)
    state = guard._now.state
    monkeypatch.setattr(guard._steps, "place", (torch.device("meta"), torch.float32))
    train(model, optimizer, task(1), steps=3)
    train(twin, other, task(1), steps=3)
    assert guard._now.state is not state
    assert guard._steps.place == (torch.device("cpu"), torch.float32)
    assert torch.equal(flat(model), flat(twin))


def test_parameters_that_were_replaced_are_noticed():
    model, _, guard = guarded()
    model[0].weight = nn.Parameter(torch.zeros(40, 12))
    with pytest.raises(ConfigError, match=r"the model's 0\.weight is another parameter than when"):
        guard.end_task(task(1))
    assert guard.tasks == 1


@pytest.mark.parametrize("given", ["loader", "batches", "one batch", "inputs alone"])
def test_what_a_pretrained_model_does_is_protected(given):
    """Before any training: `end_task`'s directions, and steps that keep the outputs."""
    x, y = task(0)
    data = {
        "loader": DataLoader(TensorDataset(x, y), batch_size=8),
        "batches": [(x[:16], y[:16]), (x[16:], y[16:])],
        "one batch": (x, y),
        "inputs alone": x,
    }[given]
    model = mlp()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    guard = Guard(model, optimizer, OGD(samples=30))
    rows = exact_basis(model, x, None if given == "inputs alone" else y)
    before = flat(model)
    guard.protect(data)
    assert guard.tasks == 1
    assert len(guard.memory_report().tasks) == 1
    train(model, optimizer, task(1))
    step = flat(model) - before
    assert float(step.norm()) > 1e-3
    assert float((rows @ step).norm() / step.norm()) < 1e-5
    guard.end_task(task(1))
    guard.refresh(data, task(1))
    assert guard.tasks == 2


def test_a_seed_chooses_the_samples():
    def chosen(seed):
        _, _, guard = guarded(method=AGEM(5), seed=seed)
        return guard.state_dict()["memory.0:arg0"]

    assert torch.equal(chosen(1), chosen(1))
    assert not torch.equal(chosen(1), chosen(2))


def test_global_random_numbers_are_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model, optimizer, guard = guarded(method=AGEM(5, batch_size=3))
    train(model, optimizer, task(1))
    guard.state_dict()
    assert torch.equal(torch.rand(3), expected)


def test_what_is_trained_only_later_is_warned_of():
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    all_of_it, chosen = (
        Guard(model, optim.SGD(model.parameters(), lr=0.1), OGD(5), params=params)
        for params in (None, lambda name: True)
    )
    without = Guard(model, optimizer, OGD(5), exclude=["2"])
    model.append(nn.Linear(CLASSES, CLASSES))
    for guard in (all_of_it, chosen, without):
        guard.attach(optim.SGD(model.parameters(), lr=0.1))
    for guard in (all_of_it, without):
        with pytest.warns(UserWarning, match=r"3\.weight is trained now .* is not protected"):
            guard.end_task(task(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen.end_task(task(0))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_guard_is_not_copied(copied):
    """For the copy would guard nothing."""
    _, _, guard = guarded()
    with pytest.raises(ConfigError, match=r"cannot be copied or pickled.* state_dict"):
        copied(guard)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself
@pytest.mark.parametrize("project", ["update", "gradient"])
@pytest.mark.parametrize("what", ["step", "loop"])
def test_a_compiled_training_step(what, project):
    found = []
    for compiled in (False, True):
        model = mlp()
        optimizer = optim.Adam(model.parameters(), lr=0.01)
        guard = Guard(model, optimizer, OGD(20), project=project)
        guard.end_task(task(0))
        x, y = task(1)

        def step(model=model, optimizer=optimizer, x=x, y=y):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

        if compiled and what == "step":
            optimizer.step = torch.compile(optimizer.step, backend="eager")
        elif compiled:
            step = torch.compile(step, backend="eager")
        for _ in range(3):
            step()
        assert guard.stats().steps == 3
        found.append(flat(model))
    torch.testing.assert_close(*found, rtol=0, atol=1e-5)
