"""The guard's life: created, attached, moved, copied, and what it rejects."""

import copy
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from forgetless import (
    AGEM,
    EWC,
    GPM,
    OGD,
    PCAOGD,
    SGD,
    SI,
    ConfigError,
    Guard,
    Joint,
    KronEWC,
    KronOGD,
)
from forgetless.guard import steps
from forgetless.methods import Method
from forgetless.methods.reservoir import ReservoirRehearsal
from tests.methods.test_all_methods import TABLE

from .problems import (
    CLASSES,
    basis_of,
    exact_basis,
    flat,
    guarded,
    mlp,
    seeded,
    task,
    train,
    wander,
)

METHODS = {name: m for name, m in TABLE.items() if name != "a-gem, released"}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def hooks(optimizer) -> int:
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


@every_method
def test_removed_it_leaves_training_alone_to_the_bit(method):
    model, plain = mlp(), mlp()
    optimizer, other = (optim.Adam(m.parameters(), lr=1e-2) for m in (model, plain))
    with Guard(model, optimizer, method) as guard:
        train(model, optimizer, task(0), steps=3, guard=guard)
        train(plain, other, task(0), steps=3)
        if isinstance(method, ReservoirRehearsal):  # which repeats samples from the first batch on
            plain.load_state_dict(model.state_dict())
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
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
    if isinstance(method, SGD | SI | ReservoirRehearsal):
        return  # the end of a task does not read its data
    results = []
    for broken in (False, True):
        model = mlp()
        optimizer = optim.SGD(model.parameters(), lr=0.05)
        guard = Guard(model, optimizer, method)
        train(model, optimizer, task(0), steps=2, guard=guard)
        guard.end_task(task(0))
        train(model, optimizer, task(1), steps=2, guard=guard)
        if broken:
            before, stats = guard.state_dict(), guard.stats()
            for attempt in (guard.end_task, guard.refresh):
                with pytest.raises(type(error)):
                    attempt(Breaks(error))
            after = guard.state_dict()
            assert all(torch.equal(after[n], t) for n, t in before.items())
            assert guard.stats() == stats
            assert all(m.training for m in model.modules())
        train(model, optimizer, task(1), steps=2, seed=1, guard=guard)
        guard.end_task(task(1))
        train(model, optimizer, task(2), steps=2, guard=guard)
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


def test_an_optimizer_with_more_parameters_is_told_of_as_it_is_attached():
    model, _, guard = guarded()
    model.append(nn.Linear(CLASSES, CLASSES))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"3\.weight is trained now .*guard\.adopt") as caught:
        guard.attach(optimizer)
    assert caught[0].filename == __file__
    guard.adopt(model, optimizer)
    guard.end_task(task(1))
    assert "3.weight" in guard.names


@pytest.mark.parametrize("options", [{}, {"params": ["0"]}, {"exclude": ["2"]}])
def test_an_optimizer_that_the_guard_was_not_given(options):
    model = mlp()
    body, head = (optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2))
    guard = Guard(model, body, OGD(5), **options)
    for _ in range(6):
        train(model, body, task(0), steps=1)
        head.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        guard.end_task(task(0))
        guard.end_task(task(1))
    said = [str(one.message) for one in caught]
    assert [text.partition(" is trained by an optimizer")[0] for text in said] == (
        [] if options else ["2.weight"]
    )


def test_a_parameter_group_that_is_added_later():
    """Protected parameters are guarded in any group, others are told of at the next step, once."""
    model = mlp()
    adapter = nn.Linear(CLASSES, CLASSES)
    model.append(adapter)
    head = [*adapter.parameters()]
    optimizer = optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.1)
    guard = Guard(model, optimizer, OGD(20), params=lambda name: True)
    every = Guard(model, optim.SGD(model.parameters(), lr=0.1), OGD(1000))
    guard.end_task(task(0))
    optimizer.add_param_group({"params": head})
    with pytest.warns(UserWarning, match=r"3\.weight is trained now .* is not protected: .*adopt"):
        train(model, optimizer, task(1))
    guard.end_task(task(1))

    every.remove()
    optimizer = optim.SGD(head, lr=0.1)
    every.attach(optimizer)
    every.end_task(task(0))
    basis = exact_basis(model, *task(0))
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.3})
    before = flat(model)
    train(model, optimizer, task(1))
    delta = flat(model) - before
    assert float(delta[:480].norm()) > 0
    assert float((basis @ delta).norm() / delta.norm()) < 1e-5


def test_a_new_group_for_what_is_excluded_says_nothing():
    model = mlp()
    optimizer = optim.SGD(model[0].parameters(), lr=0.1)
    guard = Guard(model, optimizer, OGD(20), exclude="2")
    guard.end_task(task(0))
    optimizer.add_param_group({"params": model[2].parameters()})
    train(model, optimizer, task(1))
    guard.end_task(task(1))


NO_TASK = r"removed after 3 steps and no task is stored, so it has protected nothing.*end_task"


def test_a_guard_that_never_stored_a_task_says_so_in_the_end():
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, OGD())
    train(model, optimizer, task(0), steps=3)
    for report in (guard.stats(), guard.memory_report()):
        assert "no task is stored yet: nothing is protected" in str(report)
    with pytest.warns(UserWarning, match=NO_TASK) as caught:
        guard.remove()
    assert caught[0].filename == __file__
    guard.remove()  # once
    with pytest.warns(UserWarning, match=NO_TASK), Guard(model, optimizer, PCAOGD()):
        train(model, optimizer, task(0), steps=3)


def test_what_has_not_been_in_vain_ends_in_silence():
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    Guard(model, optimizer, OGD()).remove()  # no step
    with Guard(model, optimizer, SGD()):  # protects nothing anyway
        train(model, optimizer, task(0), steps=3)

    def broken():
        train(model, optimizer, task(0), steps=3)
        raise KeyError

    with pytest.raises(KeyError), Guard(model, optimizer, OGD()):
        broken()
    with Guard(model, optimizer, OGD()) as guard:
        train(model, optimizer, task(0), steps=3)
        guard.end_task(task(0))
        assert "no task" not in f"{guard.stats()}{guard.memory_report()}"


def wider(model, classes=6):
    """The head with more classes: its first rows are the old ones."""
    old, new = model[2], seeded(lambda: nn.Linear(40, classes), 7)
    with torch.no_grad():
        new.weight[:CLASSES] = old.weight
        new.bias[:CLASSES] = old.bias
    model[2] = new
    return new


def spread_rows(rows, classes=6):
    """Rows of the small network's features at the weights of the large one."""
    out = torch.zeros(len(rows), 520 + classes * 41, dtype=rows.dtype)
    out[:, : 520 + CLASSES * 40] = rows[:, : 520 + CLASSES * 40]
    out[:, 520 + classes * 40 :][:, :CLASSES] = rows[:, 520 + CLASSES * 40 :]
    return out


GROWING = {
    "ogd": (OGD(30), {}),
    "ogd, factored": (OGD(30), {"storage": "factored"}),
    "pca-ogd, factored": (PCAOGD(components=30), {"storage": "factored"}),
    "pca-ogd, bfloat16": (PCAOGD(components=30), {"storage": "bfloat16"}),
}


@pytest.mark.parametrize("option", GROWING)
def test_a_head_that_grows(option):
    """Old rows are protected as before, new ones are free, and later tasks protect all of them."""
    method, options = GROWING[option]
    model = mlp()
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    guard = Guard(model, optimizer, method, **options)
    train(model, optimizer, task(0), steps=5)
    guard.end_task(task(0))
    basis = spread_rows(exact_basis(model, *task(0)))
    wider(model)
    new = optim.Adam(model.parameters(), lr=1e-2)
    with pytest.raises(ConfigError, match=r"2\.weight is another parameter.*guard\.adopt\("):
        guard.attach(new)
    guard.adopt(model, new)
    x, y = task(1)
    data = x, y + 2
    before = flat(model)
    train(model, new, data, steps=3)
    delta = flat(model) - before
    bound = 1e-2 if "bfloat16" in option else 2e-5
    assert float((basis @ delta).norm() / delta.norm()) < bound
    assert float(delta[520 + CLASSES * 40 : 520 + 6 * 40].norm()) > 0.1 * float(delta.norm())
    guard.end_task(data)
    both = torch.cat([basis, exact_basis(model, *data)])
    before = flat(model)
    train(model, new, task(2), steps=1)
    delta = flat(model) - before
    assert float((basis_of(both) @ delta).norm() / delta.norm()) < bound
    # A guard made for the grown model can continue from it.
    twin = copy.deepcopy(model)
    again = Guard(twin, optim.SGD(twin.parameters(), lr=0.1), method, **options)
    again.load_state_dict(guard.state_dict())
    assert again.tasks == 2


@every_method
def test_every_method_follows_a_head_that_grows(method):
    model, optimizer, guard = guarded(method=method)
    wider(model)
    new = optim.SGD(model.parameters(), lr=0.05)
    guard.adopt(model, new)
    x, y = task(1)
    train(model, new, (x, y + 2), steps=3, guard=guard)
    guard.end_task((x, y + 2))
    train(model, new, task(2), steps=2, guard=guard)
    assert guard.tasks == 2
    assert hooks(optimizer) == 0
    assert hooks(new) == 2


def test_a_model_that_grows_before_the_first_task():
    model = mlp()
    guard = Guard(model, optim.SGD(model.parameters(), lr=0.1), OGD(1000), params=["0", "2"])
    wider(model)
    new = optim.Adam(model.parameters(), lr=1e-2)
    guard.adopt(model, new)
    train(model, new, task(0))
    guard.end_task(task(0))
    basis = exact_basis(model, *task(0))
    before = flat(model)
    train(model, new, task(1))
    delta = flat(model) - before
    assert float((basis @ delta).norm() / delta.norm()) < 2e-5


def test_a_spring_only_on_the_old_rows():
    model, _, guard = guarded(method=EWC(strength=1.0))
    old = guard.state_dict()
    wider(model)
    guard.adopt(model, optim.SGD(model.parameters(), lr=0.05))
    new = guard.state_dict()
    for part in ("fisher", "anchor"):
        want = spread_rows(old[f"memory.{part}"].unsqueeze(0))[0]
        assert torch.equal(new[f"memory.{part}"], want)


def test_the_same_optimizer_with_a_new_group():
    model = mlp()
    optimizer = optim.SGD([*model[0].parameters()], lr=0.1)
    head = optim.SGD([*model[2].parameters()], lr=0.1)
    guard = Guard(model, [optimizer, head], OGD(20))
    guard.end_task(task(0))
    optimizer.add_param_group({"params": wider(model).parameters()})
    guard.adopt(model, optimizer)
    train(model, optimizer, task(1))
    assert hooks(head) == 0
    assert guard.stats().steps == 1


def test_a_model_with_more_layers_is_adopted():
    model, optimizer, guard = guarded()
    basis = exact_basis(model, *task(0))
    model.append(nn.Linear(CLASSES, CLASSES))
    with torch.no_grad():
        model[3].weight.copy_(torch.eye(CLASSES))
        model[3].bias.zero_()
    optimizer.add_param_group({"params": model[3].parameters()})
    guard.adopt(model, optimizer)
    assert guard.names[4:] == ("3.weight", "3.bias")
    before = flat(model)
    train(model, optimizer, task(1))
    delta = flat(model) - before
    size = basis.shape[1]
    assert float((basis @ delta[:size]).norm() / delta.norm()) < 1e-5
    guard.end_task(task(1))
    basis = exact_basis(model, *task(1))
    before = flat(model)
    train(model, optimizer, task(2))
    delta = flat(model) - before
    assert float((basis @ delta).norm() / delta.norm()) < 1e-5


def test_models_that_cannot_be_adopted():
    """And the guard is as before."""
    model, optimizer, guard = guarded()
    before = guard.state_dict()
    narrow, broad, gone = mlp(), mlp(hidden=50), nn.Sequential(mlp()[0])
    narrow[2] = nn.Linear(40, 3)
    for wrong, message in (
        (narrow, r"2\.weight had the shape \(4, 40\) and has \(3, 40\): .* more rows"),
        (broad, r"2\.weight had the shape \(4, 40\) and has \(4, 50\)"),
        (gone, r"no parameter 2\.weight any more.*merging an adapter.*new guard"),
        ("net", r"model must be a torch\.nn\.Module, not str"),
    ):
        tensors = wrong.parameters() if isinstance(wrong, nn.Module) else model.parameters()
        with pytest.raises(ConfigError, match=message):
            guard.adopt(wrong, optim.SGD(tensors, lr=0.1))
    with pytest.raises(ConfigError, match="trains none of the protected"):
        guard.adopt(model, optim.SGD(mlp().parameters()))
    assert all(torch.equal(guard.state_dict()[n], t) for n, t in before.items())
    train(model, optimizer, task(1))
    assert guard.stats().steps == 1


def test_a_merged_adapter_is_one_clear_error():
    model = mlp()
    model[0].lora_A = nn.Parameter(torch.zeros(2, 12))
    model[0].lora_B = nn.Parameter(torch.zeros(40, 2))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, OGD(5))
    guard.end_task(task(0))
    del model[0].lora_A, model[0].lora_B
    new = optim.SGD(model.parameters(), lr=0.1)
    for call in (lambda: guard.end_task(task(1)), lambda: guard.attach(new)):
        with pytest.raises(ConfigError, match=r"no parameter 0\.lora_A any more, .*merging"):
            call()


def test_rows_that_were_not_copied_are_told_of():
    model, _, guard = guarded()
    model[2] = seeded(lambda: nn.Linear(40, 6), 7)
    with pytest.warns(UserWarning, match=r"2\.weight are not those of the model before") as caught:
        guard.adopt(model, optim.SGD(model.parameters(), lr=0.1))
    assert caught[0].filename == __file__


class Mine(Method):
    """Stores numbers per weight and does not say what those of new weights are."""

    name = "mine"
    acts_on = "gradient"

    def init(self, view):
        return view.theta

    def update(self, g, state, view):
        return g + (view.theta - state), state

    def consolidate(self, state, view, task):
        return view.theta


def test_a_method_that_cannot_grow_says_so():
    model, optimizer, guard = guarded(method=Mine())
    wider(model)
    with pytest.raises(ConfigError, match=r"Mine stores numbers per weight.*zero_for_new_weights"):
        guard.adopt(model, optim.SGD(model.parameters(), lr=0.1))
    assert hooks(optimizer) == 2


class LowRank(nn.Module):
    """A frozen layer and a fresh adapter, whose second factor is zero."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(2, inputs))
        self.lora_B = nn.Parameter(torch.zeros(outputs, 2))

    def forward(self, x):
        return self.base(x) + x @ self.lora_A.T @ self.lora_B.T


BLIND = r"0\.lora_A \(and of 1 more\) is zero on all samples .* not protected.*guard\.refresh"
FIXED = {"ogd": OGD(40), "pca": PCAOGD(40), "kron": KronOGD(), "ewc": EWC()}


@pytest.mark.parametrize("method", FIXED.values(), ids=FIXED)
def test_a_fresh_adapter_is_only_half_protected(method):
    """Its first factor has no gradient while the second is zero: not one of its rows is stored."""
    make = lambda: nn.Sequential(LowRank(12, 40), nn.Tanh(), LowRank(40, 4))  # noqa: E731
    model = seeded(make)
    optimizer = optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    guard = Guard(model, optimizer, method)
    with pytest.warns(UserWarning, match=BLIND) as caught:
        guard.end_task(task(0))
    assert caught[0].filename == __file__
    train(model, optimizer, task(1), steps=3)
    if method.keeps_directions:
        layers = guard.stats().layers
        assert layers["0.lora_A"] == 0 < layers["0.lora_B"]
    guard.refresh(task(0))
    train(model, optimizer, task(1), steps=3)
    if method.name in ("ogd", "pca-ogd"):  # for KronOGD the gradient is too small for now
        assert guard.stats().layers["0.lora_A"] > 0


class Adapter(nn.Module):
    """The same as peft makes it, of linear layers."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_A = nn.Linear(inputs, 4, bias=False)
        self.lora_B = nn.Linear(4, outputs, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(x))


@pytest.mark.parametrize("method", [KronOGD(), GPM()], ids=lambda m: m.name)
def test_a_fresh_adapter_of_linear_layers_is_protected_by_its_inputs(method):
    """Three directions of the inputs: what the adapter adds for them stays zero."""
    make = lambda: nn.Sequential(Adapter(12, 40), nn.Tanh(), Adapter(40, 4))  # noqa: E731
    model = seeded(make)
    optimizer = optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    x, y = task(0)
    x[:, 3:] = 0
    guard = Guard(model, optimizer, method)
    guard.end_task((x, y))  # without a warning
    before = model[0].lora_A(x).detach()
    train(model, optimizer, task(1), steps=30)
    assert model[0].lora_B.weight.norm() > 0.1
    assert guard.stats().layers["0.lora_A.weight"] > 0.1
    moved = (model[0].lora_A(x) - before).norm() / before.norm()
    assert moved < 0.02


def test_a_penalty_holds_a_fresh_adapter_by_its_inputs():
    """The first factor moves less than without, for the inputs that it had."""
    x, y = task(0)
    x[:, 3:] = 0
    found = []
    for method in (SGD(), KronEWC(strength=1000.0)):
        model = seeded(lambda: nn.Sequential(Adapter(12, 40), nn.Tanh(), Adapter(40, 4)))
        optimizer = optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
        Guard(model, optimizer, method).end_task((x, y))  # without a warning
        before = model[0].lora_A.weight.detach().clone()
        train(model, optimizer, task(1), steps=60)
        moved = (model[0].lora_A.weight.detach() - before).norm(dim=0)
        found.append(float(moved[:3].norm() / moved.norm()))
    assert found[1] < 0.6 * found[0]


def test_a_script_that_stores_no_task_is_told_of_as_it_ends(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from forgetless import Guard, OGD\n"
        "model = torch.nn.Linear(3, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "def main():\n"
        "    guard = Guard(model, optimizer, OGD(5))\n"
        "    x, y = torch.randn(8, 3), torch.arange(8) % 2\n"
        "    for _ in range(4):\n"
        "        torch.nn.functional.cross_entropy(model(x), y).backward()\n"
        "        optimizer.step()\n"
        "main()\n"
    )
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=True
    )
    assert "a guard of 4 steps has protected nothing, because no task was stored" in run.stderr


def test_at_the_end_of_a_script_that_stored_one_or_failed_nothing_is_said(monkeypatch):
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, OGD(5))
    train(model, optimizer, task(0), steps=3)
    monkeypatch.setattr(steps, "_attached", [guard._steps])
    for has_stored, error in ((True, None), (False, ValueError())):
        monkeypatch.setattr(steps.Steps, "has_stored", has_stored)
        monkeypatch.setattr(sys, "last_value", error, raising=False)
        steps._warn_if_in_vain()
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    with pytest.warns(UserWarning, match="a guard of 3 steps has protected nothing"):
        steps._warn_if_in_vain()


@pytest.mark.parametrize("method", [AGEM(20), Joint()], ids=["a-gem", "joint"])
def test_methods_that_look_again_at_every_step_protect_a_fresh_adapter(method):
    model = seeded(lambda: nn.Sequential(LowRank(12, 4)))
    optimizer = optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    Guard(model, optimizer, method).end_task(task(0))


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


def test_a_report_before_the_first_step_decides_nothing():
    """The first state is that of the weights at the first step, which may be loaded ones."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=1), KronOGD())
    guard.memory_report()
    guard.state_dict()
    with torch.no_grad():
        model.weight.fill_(7)
    loss = nn.functional.cross_entropy(model(torch.ones(4, 3).double()), torch.tensor([0, 1, 0, 1]))
    loss.backward()
    guard._steps.optimizers[0].step()
    assert (guard._steps.state.start[:, :6] == 7).all()
