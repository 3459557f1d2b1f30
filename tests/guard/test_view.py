"""What a guard shows to a method: true weights, every step, the model and its samples."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import nn, optim
from torch.nn.functional import cross_entropy

from forgetless import OGD, ConfigError, Guard, KronOGD, Method, Training, fit
from forgetless.guard.batches.samples import Part, StoredSamples
from tests.methods.in_place import InPlace
from tests.methods.test_own_methods import METHODS as OWN

from .problems import INPUTS, flat, mlp, task, train


@dataclass(frozen=True)
class Replay(Method):
    """The mean of the gradients on new and stored samples: docs/methods.md's example."""

    name = "replay"
    acts_on = "gradient"
    idle_before_first_task = True

    def init(self, view):
        return None

    def update(self, g, state, view):
        return (g if state is None else (g + view.gradient(state)) / 2), state

    def consolidate(self, state, view, task):
        return task.draw(10)


def test_a_mixed_gradient_makes_a_step_as_long_as_the_optimizers():
    """An average of the optimizer's update and a gradient would be hundreds of times longer."""
    model, twin = mlp(), mlp()
    optimizer, other = (optim.Adam(m.parameters(), lr=1e-3) for m in (model, twin))
    guard = Guard(model, optimizer, Replay())
    stored = tuple(t[:10] for t in task(0))
    guard.end_task(stored)
    x, y = task(1)
    before = flat(model)
    cross_entropy(model(x), y).backward()
    optimizer.step()
    loss = (cross_entropy(twin(x), y) + cross_entropy(twin(stored[0]), stored[1])) / 2
    loss.backward()
    other.step()
    torch.testing.assert_close(flat(model), flat(twin), rtol=1e-5, atol=1e-7)
    assert float((flat(model) - before).abs().max()) < 1.01e-3


@dataclass(frozen=True)
class Noting(Method):
    """Notes what it is shown."""

    name = "noting"
    acts_on = "gradient"
    needs_batch = True
    seen: Any = None

    def init(self, view):
        self.seen.append(("init", view.theta.clone()))
        return 0

    def update(self, g, state, view):
        self.seen.append(("update", view.task, view.step, view.lr, len(view.batch)))
        return g, state + 1

    def consolidate(self, state, view, task):
        self.seen.append(("consolidate", view.task, view.step, state, task.size))
        return state


def noting(**options):
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    method = Noting([])
    return model, optimizer, Guard(model, optimizer, method, **options), method.seen


def shown(model, optimizer, guard, number=0):
    """Steps on two batches, shown to the method."""
    x, y = task(number)
    for rows in (slice(0, 20), slice(20, 30)):
        guard.observe((x[rows], y[rows]))
        optimizer.zero_grad()
        cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()


def test_the_first_state_is_of_the_weights_that_training_begins_with():
    model, optimizer, guard, seen = noting()
    loaded = mlp()
    nn.init.normal_(loaded[0].weight)
    model.load_state_dict(loaded.state_dict())  # after the guard was created
    before = flat(loaded, torch.float32)
    shown(model, optimizer, guard)
    assert [one[0] for one in seen] == ["init", "update", "update"]
    assert torch.equal(seen[0][1][0], before)


def test_the_first_state_of_an_idle_method_is_too():
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, KronOGD())
    before = guard._model.parameters.read()
    train(model, optimizer, task(0))
    assert torch.equal(guard._steps.state.start, before)
    assert not torch.equal(guard._model.parameters.read(), before)


def test_every_step_of_every_task_is_shown():
    model, optimizer, guard, seen = noting()
    shown(model, optimizer, guard)
    guard.end_task(task(0))
    optimizer.param_groups[0]["lr"] = 0.05
    shown(model, optimizer, guard, 1)
    assert seen[1:] == [
        ("update", 0, 0, 0.1, 20),
        ("update", 0, 1, 0.1, 10),
        ("consolidate", 0, 2, 2, 30),
        ("update", 1, 2, 0.05, 20),
        ("update", 1, 3, 0.05, 10),
    ]


def test_batches_of_one_step_are_one_batch():
    model, optimizer, guard, seen = noting()
    x, y = task(0)
    for part in (slice(0, 7), slice(7, 12)):
        guard.observe({"input": x[part], "labels": y[part]})
        cross_entropy(model(x[part]), y[part]).backward()
    optimizer.step()
    assert seen[-1] == ("update", 0, 0, 0.1, 12)


def test_a_batch_that_was_not_shown_is_asked_for():
    model, optimizer, guard, _ = noting()
    shown(model, optimizer, guard)
    with pytest.raises(ConfigError, match=r"call guard\.observe\(batch\) before every"):
        train(model, optimizer, task(0))


@pytest.mark.parametrize("method", [OGD(5), Replay()], ids=lambda m: m.name)
def test_an_idle_method_does_not_see_the_steps_of_its_first_task(method, monkeypatch):
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    Guard(model, optimizer, method)
    monkeypatch.setattr(type(method), "update", None)
    train(model, optimizer, task(0), steps=3)


def test_a_state_changed_in_place_is_rejected():
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    Guard(model, optimizer, InPlace())
    with pytest.raises(ConfigError, match=r"InPlace\.update changed its state in place"):
        train(model, optimizer, task(0))


class InPlaceSamples(Replay):
    idle_before_first_task = False

    def update(self, g, state, view):
        if state is not None:
            state.extra["age"].add_(1)
        return g, state

    def consolidate(self, state, view, task):
        return task.draw(5).attach(age=torch.zeros(1, 5))


def test_stored_samples_changed_in_place_are_rejected():
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, InPlaceSamples())
    guard.end_task(task(0))
    with pytest.raises(ConfigError, match=r"InPlaceSamples\.update changed its state in place"):
        train(model, optimizer, task(0))


def test_stored_samples_changed_in_place_are_rejected_by_fit_too(digits):
    with pytest.raises(ConfigError, match=r"InPlaceSamples\.update changed its state in place"):
        fit(digits, InPlaceSamples(), seeds=1, training=Training(epochs=1))


class Recordable(InPlace):
    recordable = True

    def update(self, g, state, view):
        return g, {"sum": state["sum"] + g}


def test_a_recordable_method_keeps_its_state():
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    Guard(model, optimizer, Recordable())
    with pytest.raises(ConfigError, match="must return the state it is given, since it says rec"):
        train(model, optimizer, task(0))


def double():
    model = nn.Sequential(nn.Linear(INPUTS, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 4))
    model = model.double()
    return model, Guard(model, optim.SGD(model.parameters(), lr=0.1), Replay())


def samples(number: int = 0, n: int = 12) -> StoredSamples:
    x, y = task(number, n, torch.float64)
    return StoredSamples((Part((x,), {}, y),))


def test_outputs_losses_and_gradients_are_those_of_the_module():
    model, guard = double()
    view, some = guard._view(guard._model, guard._storage, 0), samples()
    x, y = some.parts[0].args[0], some.parts[0].target
    statistics = model[1].running_mean.clone()
    outputs = view.outputs(some)
    assert torch.equal(model[1].running_mean, statistics)
    torch.testing.assert_close(outputs[0], model(x))
    each = view.losses(outputs, some)
    torch.testing.assert_close(each[0], cross_entropy(model(x), y, reduction="none"))
    names = [name for name, _ in model.named_parameters()]
    assert list(view.layout.shapes) == names

    def by_autograd(loss):
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*model.parameters()])])

    torch.testing.assert_close(view.gradient(some)[0], by_autograd(cross_entropy(model(x), y)))
    wanted = by_autograd((model(x) ** 2).sum(1).mean())
    for loss in (lambda z, s: z.square().sum(2), lambda z, s: z.square().sum(2).mean(1)):
        torch.testing.assert_close(view.gradient(some, loss)[0], wanted)
    with_logits = some.attach(logits=outputs.detach() + 1)
    distance = lambda z, s: (z - s.extra["logits"]).square().mean(2)  # noqa: E731
    wanted = by_autograd((model(x) - model(x).detach() - 1).square().mean())
    torch.testing.assert_close(view.gradient(with_logits, distance)[0], wanted)
    assert float(view.gradient(some, lambda z, s: torch.zeros_like(z[..., 0])).abs().max()) == 0
    other = view.theta + 0.1 * torch.randn_like(view.theta)
    here = view.gradient(some, theta=other)
    with torch.no_grad():
        for name, part in view.layout.split(other).items():
            model.get_parameter(name).copy_(part[0])
    torch.testing.assert_close(here[0], by_autograd(cross_entropy(model(x), y)))
    torch.testing.assert_close(
        view.gradients([some, samples(1)])[0, 1],
        view.gradient(samples(1))[0],
    )


def test_samples_of_several_shapes_have_gradients_but_no_one_output():
    model = nn.Sequential(nn.AdaptiveAvgPool1d(6), nn.Flatten(), nn.Linear(6, 3)).double()
    guard = Guard(model, optim.SGD(model.parameters(), lr=0.1), Replay())
    view = guard._view(guard._model, guard._storage, 0)
    parts = [
        Part((torch.randn(n, 1, t, dtype=torch.float64),), {}, torch.arange(n) % 3)
        for n, t in ((4, 9), (6, 12))
    ]
    losses = [cross_entropy(model(p.args[0]), p.target) for p in parts]
    mean = 0.4 * losses[0] + 0.6 * losses[1]
    wanted = torch.cat([g.flatten() for g in torch.autograd.grad(mean, [*model.parameters()])])
    both = StoredSamples(tuple(parts))
    torch.testing.assert_close(view.gradient(both)[0], wanted)
    torch.testing.assert_close(view.gradient(both, view.losses)[0], wanted)
    assert view.layer_inputs(both)["2.weight"].shape == (1, 10, 6)
    with pytest.raises(ConfigError, match="the samples have 2 shapes"):
        view.outputs(both)


def test_a_task_comes_in_batches_of_any_size():
    x, y = task(0, 23, torch.float64)
    loader = [(x[i : i + 5], y[i : i + 5]) for i in range(0, 23, 5)]
    seen = []

    class Looking(Replay):
        def consolidate(self, state, view, task):
            for size in (1, 4, 7, 100):
                batches = list(task.batches(size))
                lengths = [size] * (23 // size) + [23 % size] * bool(23 % size)
                assert [len(b) for b in batches] == lengths
                seen.append(torch.cat([b.parts[0].args[0] for b in batches]))
            return

    model = mlp().double()
    Guard(model, optim.SGD(model.parameters(), lr=0.1), Looking()).end_task(loader)
    assert len(seen) == 4
    assert all(torch.equal(one, x) for one in seen)


def started(method):
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, Guard(model, optimizer, method)


def steps(model, optimizer, guard, number, some):
    x, y = task(number)
    for index in torch.arange(30).split(6)[some]:
        guard.observe((x[index], y[index]))
        optimizer.zero_grad()
        cross_entropy(model(x[index]), y[index]).backward()
        optimizer.step()


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("tasks", [0, 2])
def test_own_methods_resume_bit_for_bit_in_the_middle_of_a_task(name, tasks):
    model, optimizer, guard = started(OWN[name])
    for number in range(tasks):
        steps(model, optimizer, guard, number, slice(None))
        guard.end_task(task(number))
    steps(model, optimizer, guard, tasks, slice(0, 3))
    stored = load(save(guard.state_dict()))
    twin, other, again = started(OWN[name])
    twin.load_state_dict(model.state_dict())
    again.load_state_dict(stored)
    for m, o, g in ((model, optimizer, guard), (twin, other, again)):
        steps(m, o, g, tasks, slice(3, 5))
        g.end_task(task(tasks))
        steps(m, o, g, tasks + 1, slice(None))
    assert torch.equal(flat(model), flat(twin))
    assert all(torch.equal(t, again.state_dict()[n]) for n, t in guard.state_dict().items())


class Transposed(Replay):
    """Its state has a matrix whose columns are contiguous, as those of an SVD."""

    def consolidate(self, state, view, task):
        rows = view.layer_inputs(task.draw(20))["0.weight"][0]
        return {"basis": torch.linalg.svd(rows, full_matrices=False).Vh.mT.unsqueeze(0)}


def test_a_state_is_as_it_would_be_restored():
    """Products with a matrix stored by columns differ in their last bits."""
    _, _, guard = started(Transposed())
    guard.end_task(task(0))
    state = guard._current().state["basis"]
    assert state.is_contiguous()
    _, _, again = started(Transposed())
    again.load_state_dict(load(save(guard.state_dict())))
    assert again._current().state["basis"].stride() == state.stride()


@pytest.mark.parametrize("name", OWN)
def test_damaged_states_of_own_methods_are_rejected(name):
    model, optimizer, guard = started(OWN[name])
    steps(model, optimizer, guard, 0, slice(None))
    guard.end_task(task(0))
    whole = guard.state_dict()
    for key in whole:
        if key.startswith("memory."):
            with pytest.raises(ConfigError, match="the state is damaged"):
                guard.load_state_dict({n: t for n, t in whole.items() if n != key})
            with pytest.raises(ConfigError, match="the state is damaged"):
                guard.load_state_dict({**whole, key: whole[key][..., :-1].clone()})
    assert all(torch.equal(t, guard.state_dict()[n]) for n, t in whole.items())


def test_a_step_that_overflows_leaves_the_state_alone():
    """A fused optimizer is called with infinite gradients, and leaves out the step itself."""
    model = mlp()
    optimizer = optim.Adam(model.parameters(), lr=1e-2, fused=True)
    guard = Guard(model, optimizer, OWN["si"])
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x, y = task(0)
    for factor in (1.0, torch.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale(factor * cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    guard.end_task((x, y))
    assert all(t.isfinite().all() for t in guard.state_dict().values())
