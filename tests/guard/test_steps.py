"""With every optimizer and in every precision, steps have no protected component."""

import warnings
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.nn.functional import cross_entropy

import forgetless
from forgetless import (
    AGEM,
    EWC,
    GEM,
    GEMNT,
    OGD,
    PCAOGD,
    ConfigError,
    Guard,
    Joint,
    Method,
    Training,
    TrainingError,
    fit,
)
from tests.conftest import blobs

from ..tangent.reference import by_loop
from .problems import (
    exact_basis,
    flat,
    guarded,
    leaks,
    mlp,
    seeded,
    task,
    train,
    wander,
)

BOUND = 1e-5
STEPS = 200

OPTIMIZERS = {
    "sgd": partial(optim.SGD, lr=0.05),
    "sgd, momentum": partial(optim.SGD, lr=0.05, momentum=0.9),
    "sgd, nesterov": partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "sgd, weight decay": partial(optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "sgd, default": optim.SGD,
    "adam": optim.Adam,
    "adam, amsgrad": partial(optim.Adam, amsgrad=True),
    "adam, weight decay": partial(optim.Adam, weight_decay=0.1),
    "adamw": optim.AdamW,
    "rmsprop": optim.RMSprop,
    "rmsprop, centred": partial(optim.RMSprop, centered=True, momentum=0.9),
    "adagrad": optim.Adagrad,
    "adadelta": optim.Adadelta,
    "adamax": optim.Adamax,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "asgd": optim.ASGD,
    "rprop": optim.Rprop,
    "adafactor": optim.Adafactor,
}
# Their steps are at times so small that float32 weights can hardly hold them.
TINY_STEPS = {"sgd, default", "radam", "rprop", "asgd"}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def worst(found) -> float:
    return max(leak for leak, _ in found)


def assert_holds(found, strict: bool = True) -> None:
    for leak, rounding in found:
        assert leak <= (BOUND if strict else BOUND + rounding), (leak, rounding)


def test_the_table_has_every_optimizer():
    made = {getattr(make, "func", make).__name__ for make in OPTIMIZERS.values()}
    there = {n for n in dir(optim) if isinstance(getattr(optim, n), type)} - {"Optimizer"}
    assert there - made <= {"LBFGS", "SparseAdam", "Muon"}  # with tests of their own


@pytest.mark.parametrize("storage", ["dense", "factored"])
@every_optimizer
def test_no_step_leaks(name, storage):
    model, optimizer, guard = guarded(optimizer=OPTIMIZERS[name], storage=storage)
    basis = exact_basis(model, *task(0))
    step = lambda i: wander(model, optimizer, i)  # noqa: E731
    assert_holds(leaks(model, basis, step, count=STEPS), strict=name not in TINY_STEPS)
    assert guard.stats().steps == STEPS
    assert 0 < guard.stats().removed < 1


VARIANTS = {
    f"{cls.__name__}, {kind}": partial(cls, lr=1e-2, **{kind: True})
    for cls in (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad, optim.RMSprop)
    for kind in ("foreach", "fused")
    if not (cls is optim.RMSprop and kind == "fused")
}


@pytest.mark.parametrize("name", VARIANTS)
def test_foreach_and_fused(name):
    model, optimizer, _ = guarded(optimizer=VARIANTS[name])
    basis = exact_basis(model, *task(0))
    step = lambda i: wander(model, optimizer, i)  # noqa: E731
    assert_holds(leaks(model, basis, step, count=STEPS))


@pytest.mark.skipif(not hasattr(optim, "Muon"), reason="this torch has no Muon")
def test_muon_with_another_optimizer_for_the_biases():
    model = mlp()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    muon, adam = optim.Muon(matrices), optim.Adam(vectors)
    guards = [Guard(model, o, OGD(samples=1000)) for o in (muon, adam)]
    assert [g.names for g in guards] == [("0.weight", "2.weight"), ("0.bias", "2.bias")]
    for guard in guards:
        guard.end_task(task(0))
    basis = exact_basis(model, *task(0))

    def step(i):
        wander(model, muon, i)
        adam.step()

    assert_holds(leaks(model, basis, step, count=STEPS))


def test_sparse_adam():
    model = seeded(lambda: nn.Sequential(nn.Embedding(9, 5, sparse=True), nn.Flatten(), nn.Tanh()))
    optimizer = optim.SparseAdam(list(model.parameters()), lr=1e-2)
    x, y = torch.arange(8).view(4, 2), torch.tensor([1, 4, 7, 9])
    guard = Guard(model, optimizer, OGD())
    guard.end_task((x, y))
    basis = exact_basis_of_sparse(model, x, y)

    def step(i):
        x = torch.randint(9, (6, 2), generator=torch.Generator().manual_seed(i))
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()

    assert_holds(leaks(model, basis, step, count=50))


def test_sparse_gradients_cannot_be_projected():
    model = seeded(lambda: nn.Sequential(nn.Embedding(9, 5, sparse=True), nn.Flatten()))
    optimizer = optim.SparseAdam(list(model.parameters()))
    x = torch.arange(8).view(4, 2)
    guard = Guard(model, optimizer, OGD(), project="gradient")
    guard.end_task((x, torch.tensor([1, 4, 7, 9])))
    model(x).sum().backward()
    with pytest.raises(ConfigError, match=r"gradient of 0\.weight is sparse.*project='update'"):
        optimizer.step()


def exact_basis_of_sparse(model, x, y):
    dense = nn.Sequential(nn.Embedding(9, 5), nn.Flatten(), nn.Tanh())
    dense.load_state_dict(model.state_dict())
    return exact_basis(dense, x, y)


def test_groups_schedule_accumulation_and_clipping():
    model = mlp()
    groups = [
        {"params": model[0].parameters(), "lr": 1e-2},
        {"params": model[2].parameters(), "lr": 3e-2, "weight_decay": 0.1},
    ]
    optimizer = optim.AdamW(groups)
    schedule = optim.lr_scheduler.OneCycleLR(optimizer, [1e-2, 3e-2], total_steps=STEPS + 1)
    guard = Guard(model, optimizer, OGD(samples=1000))
    guard.end_task(task(0))
    basis = exact_basis(model, *task(0))
    x, y = task(1)

    def step(i):
        optimizer.zero_grad()
        for part in torch.arange(30).view(3, 10):
            (cross_entropy(model(x[part]), y[part]) / 3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()

    assert_holds(leaks(model, basis, step, count=STEPS), strict=False)


LEAKY = {
    "momentum after a task": partial(optim.SGD, lr=0.05, momentum=0.9),
    "weight decay": partial(optim.SGD, lr=0.05, weight_decay=0.1),
    "adam": partial(optim.Adam, lr=1e-2),
    "rmsprop": partial(optim.RMSprop, lr=1e-2),
}


@pytest.mark.parametrize("name", LEAKY)
def test_projecting_the_gradient_leaks_where_projecting_the_update_does_not(name):
    found = {}
    for project in ("update", "gradient"):
        model = mlp()
        optimizer = LEAKY[name](model.parameters())
        guard = Guard(model, optimizer, OGD(samples=1000), project=project)
        train(model, optimizer, task(0), steps=20)
        guard.end_task(task(0))
        basis = exact_basis(model, *task(0))
        step = lambda i: wander(model, optimizer, i)  # noqa: E731, B023
        found[project] = worst(leaks(model, basis, step, count=20))
    assert found["gradient"] > 1e-3
    assert found["update"] < BOUND


def test_both_ways_are_the_same_for_plain_sgd():
    by_update, by_gradient = mlp().double(), mlp().double()
    x, y = task(0, dtype=torch.float64)
    for model, project in ((by_update, "update"), (by_gradient, "gradient")):
        optimizer = optim.SGD(model.parameters(), lr=0.05)
        guard = Guard(model, optimizer, OGD(samples=1000), project=project)
        guard.end_task((x, y))
        train(model, optimizer, task(1, dtype=torch.float64), steps=30)
    torch.testing.assert_close(flat(by_update), flat(by_gradient), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("project", ["update", "gradient"])
@pytest.mark.parametrize("make", [partial(optim.SGD, lr=0.05), optim.Adam], ids=["sgd", "adam"])
@pytest.mark.parametrize("by_name", [False, True])
def test_closures(project, make, by_name):
    model, optimizer, guard = guarded(optimizer=make, project=project)
    plain = mlp()
    twin, other, _ = guarded(plain, make, project=project)
    x, y = task(1)
    for i in range(10):
        losses = []

        def closure():
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            losses.append(loss.item())  # noqa: B023
            return loss

        returned = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        assert [returned.item()] == losses
        other.zero_grad()
        cross_entropy(twin(x), y).backward()
        other.step()
        assert torch.equal(flat(model), flat(twin)), i
    assert guard.stats().steps == 10


def test_lbfgs_is_refused_with_a_reason():
    model = mlp()
    with pytest.raises(ConfigError, match="LBFGS cannot be guarded: it takes many steps in one"):
        Guard(model, optim.LBFGS(model.parameters()), OGD())
    guard = Guard(model, optim.SGD(model.parameters()), OGD())
    with pytest.raises(ConfigError, match="LBFGS"):
        guard.attach(optim.LBFGS(model.parameters()))


def test_several_tasks_pca_and_what_it_leaves_free():
    model = mlp()
    optimizer = optim.Adam(model.parameters(), lr=5e-3)
    guard = Guard(model, optimizer, PCAOGD(components=8, samples=1000))
    tops = []
    for number in range(3):
        train(model, optimizer, task(number), steps=20)
        guard.end_task(task(number))
        exact = seeded(mlp).double()
        exact.load_state_dict({n: v.double() for n, v in model.state_dict().items()})
        x, y = task(number, dtype=torch.float64)
        rows = by_loop(exact, x, y)
        tops.append(torch.linalg.svd(rows, full_matrices=False)[2][:8])
    basis = torch.linalg.qr(torch.cat(tops).T)[0].T
    step = lambda i: wander(model, optimizer, i)  # noqa: E731
    assert_holds(leaks(model, basis, step, count=50))
    assert guard.memory_report().directions == 24


@pytest.mark.parametrize("method", [GEMNT(memory=30), GEM(memory=30), AGEM(30, batch_size=60)])
def test_updates_do_not_raise_the_loss_on_memories_to_first_order(method):
    """⟨Δθ, ∇ loss on the memory⟩ ≤ 0 with Adam, though Adam's step is not the gradient's."""
    model, optimizer, _ = guarded(optimizer=partial(optim.Adam, lr=1e-3), method=method)
    x, y = task(0)
    opposed = 0
    for i in range(30):
        exact = seeded(mlp).double()
        exact.load_state_dict({n: v.double() for n, v in model.state_dict().items()})
        loss = cross_entropy(exact(x.double()), y)
        slope = torch.cat([g.flatten() for g in torch.autograd.grad(loss, exact.parameters())])
        before = flat(model)
        train(model, optimizer, task(1), seed=i)
        delta = flat(model) - before
        cosine = float(slope @ delta / slope.norm() / delta.norm())
        assert cosine < 1e-4
        opposed += cosine < -1e-4
        if method.name == "gem-nt":
            assert abs(cosine) < 1e-4
    assert (method.name == "gem-nt") == (opposed == 0)


def test_an_update_that_is_not_touched_is_left_to_the_bit():
    """A-GEM that agrees with a step does not even round it."""
    model, optimizer, guard = guarded(method=AGEM(30))
    plain = mlp()
    other = optim.SGD(plain.parameters(), lr=0.1)
    for number in range(5):
        train(model, optimizer, task(0), seed=number)
        train(plain, other, task(0), seed=number)
        if guard.stats().removed == 0:
            assert torch.equal(flat(model), flat(plain))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}], ids=str)
@pytest.mark.parametrize("inside", [False, True], ids=["step outside", "step inside"])
def test_autocast_and_grad_scaler(dtype, options, inside):
    """A step inside of autocast must not be projected in half precision."""
    model = mlp()
    optimizer = optim.AdamW(model.parameters(), lr=1e-2, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=dtype == torch.float16)
    guard = Guard(model, optimizer, OGD(samples=1000))
    basis = exact_basis(model, *task(0))
    x, y = task(1)
    with torch.autocast("cpu", dtype, enabled=inside):
        guard.end_task(task(0))

    def step(i):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        with torch.autocast("cpu", dtype, enabled=inside):
            scaler.step(optimizer)
        scaler.update()

    assert_holds(leaks(model, basis, step, count=60))


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
@pytest.mark.parametrize("project", ["update", "gradient"])
def test_a_step_that_overflows_is_left_out(options, project):
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    guard = Guard(model, optimizer, OGD(samples=1000), project=project)
    guard.end_task(task(0))
    before = flat(model)
    x, y = task(1)
    for scale in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model(x), y) * scale).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(flat(model), before) == (scale != 1.0)
    assert 0 < guard.stats().removed < 1


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}], ids=str)
def test_scaled_gradients_are_projected_as_unscaled_ones(options):
    x, y = task(1)
    found = []
    for scale in (1.0, 1024.0):
        optimizer_of = partial(optim.SGD, lr=0.1, **options)
        model, optimizer, guard = guarded(optimizer=optimizer_of, project="gradient")
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        scaler.scale(cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        found.append((flat(model), guard.stats().removed))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-7)


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


def parts_of(model, *kinds):
    """An optimizer for each layer."""
    return [make(layer.parameters()) for make, layer in zip(kinds, (model[0], model[2]))]


TWO = (partial(optim.SGD, lr=0.05, momentum=0.9), partial(optim.AdamW, lr=5e-3))


@pytest.mark.parametrize("storage", ["dense", "factored"])
def test_two_optimizers_each_of_whose_steps_is_orthogonal(storage):
    model = mlp()
    pair = parts_of(model, *TWO)
    guard = Guard(model, pair, OGD(samples=5), storage=storage)
    assert guard.names == tuple(n for n, _ in model.named_parameters())
    few = tuple(t[:5] for t in task(0))
    guard.end_task(few)
    basis = exact_basis(model, *few)
    x, y = task(1)

    def step(i):
        if i % 2 == 0:
            for optimizer in pair:
                optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
        pair[i % 2].step()

    assert_holds(leaks(model, basis, step, count=60))
    assert guard.stats().steps == 60
    assert all(0 < share < 1 for share in guard.stats().layers.values())


SPLIT = {"ewc": EWC(strength=50), "joint": Joint(batch_size=1000), "ogd, gradient": OGD(samples=20)}


@pytest.mark.parametrize("method", SPLIT.values(), ids=SPLIT)
def test_two_optimizers_change_each_gradient_once(method):
    """A step of one leaves the gradients of the other: SGD in two is SGD in one if by weight."""
    model = mlp().double()
    pair = parts_of(model, *[partial(optim.SGD, lr=0.1)] * 2)
    guard = Guard(model, pair, method, project="gradient")
    x, y = task(0, dtype=torch.float64)
    guard.end_task((x, y))
    for optimizer in pair:
        train(model, optimizer, task(1, dtype=torch.float64))
    cross_entropy(model(x), y).backward()
    before = [p.grad.clone() for p in model.parameters()]
    pair[0].step()
    now = [p.grad for p in model.parameters()]
    changed = [not torch.equal(a, b) for a, b in zip(before, now, strict=True)]
    assert not any(changed[2:])
    assert all(changed[:2])
    after_first = [p.grad.clone() for p in model.parameters()]
    pair[1].step()
    assert torch.equal(model[0].weight.grad, after_first[0])
    assert not torch.equal(model[2].weight.grad, after_first[2])


def test_a_penalty_with_two_optimizers_is_that_with_one():
    found = []
    for split in (False, True):
        model = mlp()
        sgd = partial(optim.SGD, lr=0.05)
        made = parts_of(model, sgd, sgd) if split else [sgd(model.parameters())]
        guard = Guard(model, made, EWC(strength=20))
        guard.end_task(task(0))
        for number in range(5):
            x, y = task(1 + number)
            model.zero_grad()
            cross_entropy(model(x), y).backward()
            for optimizer in made:
                optimizer.step()
        found.append(flat(model))
    torch.testing.assert_close(*found, rtol=0, atol=0)


class Rates(EWC):
    """Notes the learning rate of every step."""

    recordable = False

    def update(self, g, state, view):
        SEEN.append(view.lr)
        return g, state


SEEN = []


def test_the_learning_rate_is_the_stepping_optimizers():
    model = mlp()
    pair = parts_of(model, partial(optim.SGD, lr=0.3), partial(optim.SGD, lr=0.7))
    guard = Guard(model, pair, Rates())
    guard.end_task(task(0))
    SEEN.clear()
    cross_entropy(model(task(1)[0]), task(1)[1]).backward()
    pair[1].step()
    pair[0].step(lambda: None)
    assert SEEN == [0.7, 0.3]


def test_optimizers_that_share_a_parameter():
    """Alternating updates can be projected; a gradient would be changed twice."""
    model = mlp()
    pair = [optim.SGD(model.parameters(), lr=0.05), optim.Adam(model[2].parameters())]
    for method, options in ((EWC(), {}), (OGD(), {"project": "gradient"})):
        with pytest.raises(ConfigError, match=r"two optimizers train 2\.weight, whose gradient"):
            Guard(model, pair, method, **options)
    guard = Guard(model, pair, OGD(samples=20))
    guard.end_task(tuple(t[:20] for t in task(0)))
    basis = exact_basis(model, *(t[:20] for t in task(0)))
    step = lambda i: wander(model, pair[i % 2], i)  # noqa: E731
    assert_holds(leaks(model, basis, step, count=40))


def test_lists_of_optimizers_that_cannot_be():
    model = mlp()
    one, other = parts_of(model, *TWO)
    guard = Guard(model, (one, other), OGD())
    for wrong, message in (
        ([], "a list of at least one, not an empty list"),
        ([one, one], "different optimizers, and has one twice"),
        ([one, "adam"], r"must be a torch\.optim\.Optimizer, not str"),
        ([one, optim.LBFGS(model[2].parameters())], "LBFGS"),
        ([optim.SGD(mlp().parameters())], "trains none of the protected"),
    ):
        with pytest.raises(ConfigError, match=message):
            guard.attach(wrong)
    assert guard._steps.optimizers == (one, other)  # a refused list changes nothing
    # A head's own optimizer may be among them.
    Guard(model, one, EWC(), exclude="2").attach([one, other])
    needs_batch = type("Batch", (EWC,), {"needs_batch": True})()
    with pytest.raises(ConfigError, match="batch of every step, and several optimizers"):
        Guard(model, [one, other], needs_batch)


@dataclass(frozen=True)
class Spoils(Method):
    """NaN, or one infinite number, from some step on."""

    name = "spoils"
    acts_on: str = "update"
    value: float = float("nan")
    first: int = 2

    def init(self, view):
        return 0

    def update(self, g, state, view):
        spoilt = torch.where(torch.arange(g.shape[1]) == 3, self.value, g)
        return (spoilt if state + 1 >= self.first else g), state + 1

    def consolidate(self, state, view, task):
        return state


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("acts_on", ["gradient", "update"])
def test_a_method_that_makes_a_finite_step_infinite_is_stopped(acts_on, value):
    model = mlp()
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    with Guard(model, optimizer, Spoils(acts_on, value)):
        train(model, optimizer, task(0), steps=1)
        with pytest.raises(TrainingError, match=f"spoils makes a finite {acts_on} NaN .* step 2"):
            train(model, optimizer, task(0), steps=1)
    assert flat(model).isfinite().all()
    with pytest.raises(TrainingError):
        fit(blobs(), Spoils(acts_on, value), training=Training(epochs=1, lr=0.01))


@pytest.mark.parametrize("acts_on", ["gradient", "update"])
def test_an_infinite_gradient_is_said_once_and_one_left_out_is_not(acts_on):
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    x, y = task(0)
    before = flat(model)
    with Guard(model, optimizer, Spoils(acts_on, first=99)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scaler.scale(cross_entropy(model(x), y) * float("inf")).backward()
            scaler.step(optimizer)
            scaler.update()
        assert torch.equal(flat(model), before)
        optimizer.zero_grad()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(3):
                (cross_entropy(model(x), y) * float("inf")).backward()
                optimizer.step()
        (only,) = told
        assert "is NaN or infinite in step" in str(only.message)


def test_a_large_finite_step_is_finite():
    from forgetless.guard.steps import _is_finite

    assert _is_finite(torch.full((1, 4), 3e38))
    assert not _is_finite(torch.tensor([[float("inf"), float("-inf"), 1.0]]))
