"""The drift check: what it measures, that nothing notices it, and when it warns."""

import random
import re
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import forgetless.guard.drift as module_under_test
from forgetless import (
    AGEM,
    EWC,
    GEM,
    OGD,
    PCAOGD,
    SGD,
    ConfigError,
    Guard,
    Joint,
    KronEWC,
    KronOGD,
)
from forgetless.guard import TaskDrift
from tests.methods.test_all_methods import TABLE
from tests.methods.test_own_methods import METHODS as OWN

from .problems import flat, mlp, seeded, task, train

METHODS = {n: m for n, m in (TABLE | OWN).items() if n != "a-gem, released"}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


def normalised() -> nn.Module:
    """With what a careless evaluation would change: batch statistics and dropout."""
    layers = lambda: nn.Sequential(  # noqa: E731
        nn.Linear(12, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Dropout(0.2), nn.Linear(20, 4)
    )
    return seeded(layers)


def kept(guard, number: int = 1, part: int = 0) -> dict[str, torch.Tensor]:
    prefix = f"kept.{number}.{part}:"
    state = guard.state_dict()
    return {n.removeprefix(prefix): t for n, t in state.items() if n.startswith(prefix)}


def exact(model, *inputs, **named) -> np.ndarray:
    """The model's outputs in eval mode, in float64."""
    modes = [m.training for m in model.modules()]
    model.eval()
    with torch.no_grad():
        found = model(*inputs, **named)
    for module, mode in zip(model.modules(), modes, strict=True):
        module.training = mode
    return found.double().numpy()


def share(before: np.ndarray, after: np.ndarray) -> float:
    return float(((after - before) ** 2).sum() / ((before - before.mean(0)) ** 2).sum())


@pytest.mark.parametrize("method", [OGD(5), EWC(), SGD()], ids=["ogd", "ewc", "sgd"])
def test_the_drift_of_a_classifier(method):
    model = normalised()
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    guard = Guard(model, optimizer, method, drift_samples=9)
    train(model, optimizer, task(0), steps=5)
    guard.end_task(task(0))
    x, y = kept(guard)["arg0"], kept(guard)["target"]
    x0, y0 = task(0)
    assert {(*a.tolist(), b.item()) for a, b in zip(x, y)} <= {
        (*a.tolist(), b.item()) for a, b in zip(x0, y0)
    }
    assert len(torch.unique(x, dim=0)) == 9
    before = exact(model, x)
    (row,) = guard.drift().tasks
    assert (row.task, row.samples, row.drift, row.changed) == (1, 9, 0.0, 0.0)
    train(model, optimizer, task(1), steps=20)
    after = exact(model, x)
    row, drift = guard.drift().tasks[0], guard.drift()
    assert drift.steps == 20
    assert row.changed == (before.argmax(1) != after.argmax(1)).mean()
    centred = [z - z.mean(1, keepdims=True) for z in (before, after)]
    assert row.drift == pytest.approx(share(*centred), rel=1e-5)
    for found, z in ((row.loss_then, before), (row.loss, after)):
        likelihood = np.exp(z) / np.exp(z).sum(1, keepdims=True)
        expected = -np.log(likelihood[range(9), y.numpy()]).mean()
        assert found == pytest.approx(expected, rel=1e-5)


def test_adding_a_number_to_all_logits_is_no_drift():
    model = mlp()
    guard = Guard(model, optim.SGD(model.parameters(), lr=0.1), OGD(5))
    guard.end_task(task(0))
    with torch.no_grad():
        model[2].bias += 3.0
    assert guard.drift().tasks[0].drift < 1e-10


def test_regression_and_outputs_of_ones_own():
    x, y = task(0)
    for output, target, scalars in (
        (None, x[:, :4] * 2, lambda z, t: z),
        ("regression", None, lambda z, t: z),
        (lambda z, t: z[:, :2].square(), y, lambda z, t: z[:, :2] ** 2),
        (lambda z, t: z[:, 0], x[:, :4], lambda z, t: z[:, :1]),
    ):
        model = mlp()
        optimizer = optim.SGD(model.parameters(), lr=0.05)
        guard = Guard(model, optimizer, PCAOGD(5), output=output)
        guard.end_task((x, target) if target is not None else x)
        samples = kept(guard)["arg0"]
        before = exact(model, samples)
        train(model, optimizer, task(1), steps=5)
        (row,) = guard.drift().tasks
        expected = share(*(scalars(z, None) for z in (before, exact(model, samples))))
        assert row.drift == pytest.approx(expected, rel=1e-4)
        assert (row.changed is None) == (target is not y)
        assert (row.loss is None) == (target is None)


class Language(nn.Module):
    """Tokens (n, T) to logits (n, T, V) as keyword arguments of a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, tokens, mask=None):
        return {"logits": self.head(self.tokens(tokens).cumsum(1))}


@pytest.mark.parametrize(("output", "shift"), [("likelihood", 1), ("tokens", 0)])
def test_sequences_in_dict_batches_label_by_label(output, shift):
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(11, (6, length), generator=generator) for length in (5, 7)]
    labels = [t.masked_fill(torch.rand(t.shape, generator=generator) < 0.3, -100) for t in tokens]
    batches = [{"tokens": t, "labels": y} for t, y in zip(tokens, labels, strict=True)]
    model = seeded(Language)
    optimizer = optim.SGD(model.parameters(), lr=0.3)
    guard = Guard(model, optimizer, KronOGD(energy=0.5), output=output)
    guard.end_task(batches)
    guard.remove()
    parts = [kept(guard, 1, i) for i in range(2)]
    assert sum(len(p["target"]) for p in parts) == 12  # all there are

    def measured():
        """Of every label that counts: its log-likelihood, the predicted one, its sequence."""
        rows = []
        for number, part in enumerate(parts):
            with torch.no_grad():
                logits = model(part["kwarg.tokens"])["logits"].double()
            for i, labels in enumerate(part["target"].tolist()):
                for place, label in enumerate(labels):
                    at = place - shift
                    if label != -100 and at >= 0:
                        chances = torch.softmax(logits[i, at], 0)
                        likelihood, best = float(chances[label].log()), int(chances.argmax())
                        rows.append((likelihood, best, 6 * number + i))
        return np.array(rows).T

    before = measured()
    for _ in range(5):
        optimizer.zero_grad()
        logits = model(tokens[0])["logits"]
        cross_entropy(logits.flatten(0, 1), tokens[0].roll(1, 1).flatten()).backward()
        optimizer.step()
    after = measured()
    (row,) = guard.drift().tasks
    assert row.drift == pytest.approx(share(before[0], after[0]), rel=1e-4)
    assert row.changed == pytest.approx((before[1] != after[1]).mean())
    assert row.changed > 0
    assert row.samples == 12
    for loss, (likelihood, _, sequence) in ((row.loss_then, before), (row.loss, after)):
        means = [likelihood[sequence == number].mean() for number in set(sequence)]
        assert loss == pytest.approx(-sum(means) / 12, rel=1e-4)


def test_of_many_outputs_a_thousand_are_kept():
    model = seeded(lambda: nn.Linear(12, 3000))
    guard = Guard(model, optim.SGD(model.parameters(), lr=0.1), EWC())
    x, _ = task(0)
    guard.end_task((x, torch.zeros(len(x), 3000)))
    assert kept(guard)["extra.values"].shape == (16, 1024)
    with torch.no_grad():
        model.weight *= 2
        model.bias *= 2
    z = exact(model, kept(guard)["arg0"])
    assert guard.drift().tasks[0].drift == pytest.approx(share(z, z / 2) * 4, rel=0.2)


class Augmented(TensorDataset):
    """Every sample with noise of three global generators."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.01 * (torch.rand(()) + random.random() + np.random.rand()), y  # noqa: NPY002


def learned(method, drift_samples, loader, monkeypatch=None):
    """Two tasks and a half: all that could have noticed the check."""
    torch.manual_seed(1), random.seed(1), np.random.seed(1)  # noqa: NPY002
    model = normalised()
    model[3].eval()
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    guard = Guard(model, optimizer, method, drift_samples=drift_samples)
    for number in range(3):
        batches = loader(number)
        for x, y in batches:
            guard.observe((x, y))
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        if number < 2:
            guard.end_task(batches)
    if drift_samples:
        assert guard.stats().drift is not None
        guard.drift()
    noise = [torch.rand(3), torch.tensor(random.random()), torch.tensor(np.random.rand())]  # noqa: NPY002
    modes = torch.tensor([m.training for m in model.modules()])
    state = {n: t for n, t in guard.state_dict().items() if not n.startswith(("kept.", "header"))}
    return [flat(model), *model.buffers(), *noise, modes, *state.values()]


LOADERS = {
    "indexed": lambda n: DataLoader(Augmented(*task(n)), 6, shuffle=True),
    "walked": lambda n: [(x, y) for x, y in zip(*(t.split(6) for t in task(n)), strict=True)],
}


@pytest.mark.parametrize("loader", LOADERS)
@every_method
def test_nothing_notices_the_check(method, loader, monkeypatch):
    monkeypatch.setattr(module_under_test, "_FIRST", 1)
    alone = learned(method, 0, LOADERS[loader])
    checked = learned(method, 16, LOADERS[loader])
    for one, other in zip(alone, checked, strict=True):
        assert torch.equal(one, other)


def test_a_loader_is_read_once_for_the_method_and_the_check():
    class Counted:
        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter(LOADERS["walked"](0))

    for method in (OGD(5), SGD()):
        model = mlp()
        batches = Counted()
        guard = Guard(model, optim.SGD(model.parameters()), method)
        guard.end_task(batches)
        assert batches.passes == 1
        assert guard.drift().tasks[0].samples == 16


def test_the_samples_are_not_those_that_the_method_protects():
    model = mlp()
    guard = Guard(model, optim.SGD(model.parameters()), AGEM(memory=10), drift_samples=10)
    guard.end_task(DataLoader(TensorDataset(*task(0)), 5))
    assert not torch.equal(guard.state_dict()["memory.0:arg0"], kept(guard)["arg0"])


@pytest.mark.parametrize("name", ["ogd", "kron-ogd", "ewc", "gem", "sgd"])
def test_it_is_saved_and_resumed(name):
    def begun():
        model = normalised()
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, Guard(model, optimizer, METHODS[name])

    model, optimizer, guard = begun()
    for number in (0, 1):
        train(model, optimizer, task(number), steps=3)
        guard.end_task(task(number))
    train(model, optimizer, task(2), steps=3)
    other, _, resumed = begun()
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(load(save(guard.state_dict())))
    assert resumed.stats().drift is None
    assert resumed.drift().tasks == guard.drift().tasks
    assert len(guard.drift().tasks) == 2
    again = resumed.state_dict()
    assert all(torch.equal(t, again[n]) for n, t in guard.state_dict().items())
    assert {t.task: t.samples for t in resumed.drift().tasks} == {1: 16, 2: 16}


def test_states_without_samples_still_load():
    model = mlp()
    old = Guard(model, optim.SGD(model.parameters(), lr=0.1), OGD(5), drift_samples=0)
    old.end_task(task(0))
    state = old.state_dict()
    assert not any(n.startswith("kept.") for n in state)
    assert old.memory_report().drift_check == 0
    old.remove()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, OGD(5))
    guard.load_state_dict(state)
    with pytest.raises(ConfigError, match=r"cannot be measured: no samples are kept.*samples=0"):
        guard.drift()
    train(model, optimizer, task(1), steps=3)
    guard.end_task(task(1))
    assert [t.task for t in guard.drift().tasks] == [2]
    guard.refresh(task(0), task(1))
    assert sorted(t.task for t in guard.drift().tasks) == [1, 2]


@pytest.mark.parametrize("change", ["missing", "cut", "more"])
def test_a_damaged_state_is_rejected(change):
    model = mlp()
    guard = Guard(model, optim.SGD(model.parameters()), OGD(5))
    guard.end_task(task(0))
    state = guard.state_dict()
    key = "kept.1.0:extra.logits"
    if change == "missing":
        del state[key]
    else:
        state[key if change == "cut" else "kept.1.0:arg7"] = state[key][:-1].clone()
    with pytest.raises(ConfigError, match=r"the state is damaged: 1\.0:"):
        guard.load_state_dict(state)


def test_held_out_samples_take_the_place_of_training_samples():
    """The drift is of these, as autograd in the test computes it; the method sees none of them."""
    x, y = task(3)
    (plain, fast), (model, optimizer) = (
        (m := mlp(), torch.optim.SGD(m.parameters(), 0.1)) for _ in "ab"
    )
    usual, guard = Guard(plain, fast, OGD(20)), Guard(model, optimizer, OGD(20), drift_samples=30)
    usual.end_task(task(0))
    guard.end_task(task(0), held_out=[(x, y)])
    before = model(x).detach()
    stored = guard.state_dict()
    for name, tensor in usual.state_dict().items():
        if name.startswith("state"):
            assert torch.equal(stored[name], tensor)
    train(model, optimizer, task(1), steps=20)
    moved = (model(x).detach() - before).double()
    moved, spread = moved - moved.mean(1, keepdim=True), before.double()
    spread = spread - spread.mean(1, keepdim=True)
    expected = moved.square().sum() / (spread - spread.mean(0)).square().sum()
    (found,) = guard.drift().tasks
    assert found.drift == pytest.approx(float(expected), rel=1e-4)
    assert found.loss == pytest.approx(cross_entropy(model(x), y).item(), rel=1e-4)
    again = Guard(
        model, optimizer := torch.optim.SGD(model.parameters(), 0.1), OGD(20), drift_samples=0
    )
    with pytest.raises(ConfigError, match="held_out= is for the drift check"):
        again.protect(task(0), held_out=task(3))
    assert again.tasks == 0


def test_refreshed_directions_still_drift_from_the_end_of_the_task():
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, OGD(5))
    guard.end_task(task(0))
    train(model, optimizer, task(1), steps=10)
    before = guard.drift().tasks
    assert before[0].drift > 0
    guard.refresh(task(0))
    assert guard.drift().tasks == before


def test_models_of_many_kinds():
    """In bfloat16, compiled, made float64 later, with a head that grows."""
    half = mlp().bfloat16()
    guard = Guard(half, optim.SGD(half.parameters(), lr=0.1), EWC())
    guard.end_task(task(0, dtype=torch.bfloat16))
    assert kept(guard)["extra.logits"].dtype == torch.float32
    assert guard.drift().tasks[0].drift == 0

    model = mlp()
    guard = Guard(model, optim.SGD(model.parameters(), lr=0.1), OGD(5), exclude=["2"])
    guard.end_task(task(0))
    head = nn.Linear(40, 6)
    with torch.no_grad():
        head.weight[:4], head.bias[:4] = model[2].weight, model[2].bias
    model[2] = head
    assert guard.drift().tasks[0].drift < 1e-10
    model.double()
    assert guard.drift().tasks[0].drift < 1e-10


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself
def test_a_compiled_model(monkeypatch):
    monkeypatch.setattr(module_under_test, "_FIRST", 2)
    found = []
    for compiled in (False, True):
        model = normalised()
        runs = torch.compile(model, backend="eager") if compiled else model
        torch.manual_seed(0)  # of dropout
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        guard = Guard(runs, optimizer, OGD(5))
        guard.end_task(task(0))
        train(runs, optimizer, task(1), steps=3)
        found.append(guard.stats().drift)
        assert found[-1].steps == 2
    assert found[0].tasks[0].drift == pytest.approx(found[1].tasks[0].drift, rel=1e-4)


def test_it_is_measured_more_and_more_seldom():
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=1e-3)
    guard = Guard(model, optimizer, OGD(5))
    train(model, optimizer, task(0), steps=120)
    assert guard.stats().drift is None
    guard.end_task(task(0))
    seen = []
    for number in range(1, 450):
        train(model, optimizer, task(1))
        if not seen or guard.stats().drift is not seen[-1][1]:
            seen.append((number, guard.stats().drift))
    assert [(n, d.steps) for n, d in seen[1:]] == [(100, 100), (200, 200), (400, 400)]
    guard.end_task(task(1))
    assert guard.stats().drift.steps == 449
    train(model, optimizer, task(2), steps=199)
    assert guard.stats().drift.steps == 449
    train(model, optimizer, task(2))
    assert guard.stats().drift.steps == 200


def test_reports_and_numbers_for_loggers():
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, OGD(5))
    assert guard.metrics() == {}
    guard.end_task(task(0))
    train(model, optimizer, task(1), steps=3)
    assert guard.stats().drift is None
    drift = guard.drift()
    (row,) = drift.tasks
    assert guard.stats().drift == drift
    assert guard.metrics() == {
        "removed": guard.stats().removed,
        "blocked": guard.stats().blocked,
        "drift/task 1": row.drift,
        "changed/task 1": row.changed,
        "loss/task 1": row.loss,
    }
    line = (
        rf"task 1: drift {row.drift:.3g}, \d+% of predictions changed, loss .* → .* \(16 samples\)"
    )
    assert re.fullmatch(rf"after 3 steps\n{line}", str(drift))
    assert str(guard.stats()).endswith(f"drift {drift}")
    report = guard.memory_report()
    inputs, logits, labels = 16 * 12 * 4, 16 * 4 * 4, 16 * 8
    assert report.drift_check == inputs + logits + 2 * labels + 16 * 4  # classes, and losses
    assert "drift check: 1.34 kB more" in str(report)
    assert report.bytes == sum(t.bytes for t in report.tasks)


def digits(turns: int):
    data = load_digits()
    images = torch.from_numpy(data.images).float().rot90(turns, (1, 2)) / 16
    x, y = images.unsqueeze(1), torch.from_numpy(data.target)
    return (x[:1200], y[:1200]), (x[1200:], y[1200:])


def convolutional() -> nn.Module:
    return seeded(
        lambda: nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)),
        )
    )


def forgotten_points(method) -> float:
    """Points of accuracy lost on upright digits by learning those that lie on their side."""
    model = convolutional()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    guard = Guard(model, optimizer, method)
    accuracy = []
    for turns in (0, 1):
        (x, y), _ = digits(turns)
        order = torch.Generator().manual_seed(turns)
        for _ in range(6):
            for index in torch.randperm(len(x), generator=order).split(32):
                optimizer.zero_grad()
                cross_entropy(model(x[index]), y[index]).backward()
                optimizer.step()
        _, (x, y) = digits(0)
        accuracy.append(100 * (exact(model, x).argmax(1) == y.numpy()).mean())
        guard.end_task(digits(turns)[0])
    return accuracy[0] - accuracy[1]


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (
            PCAOGD(1, samples=50),
            r"with only 0\.\d% of the steps removed; keep the statistics of batch norm by "
            "freeze_batch_norm=True, or set components above 1, or lower the learning rate",
        ),
        (
            EWC(10),
            r"\d% of its predictions changed, its loss went from .* or set strength above 10",
        ),
    ],
    ids=["pca-ogd", "ewc"],
)
def test_forgetting_under_a_guard_is_said_once(method, words):
    with pytest.warns(UserWarning, match=rf"task 1 is being forgotten.*{words}") as caught:
        lost = forgotten_points(method)
    assert lost > 25
    assert len(caught) == 1


@pytest.mark.parametrize("method", [KronOGD(samples=300), Joint()], ids=["kron-ogd", "joint"])
def test_nothing_is_said_where_accuracy_is_kept(method):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lost = forgotten_points(method)
    assert lost < 5


def test_a_guard_that_does_about_nothing_says_so_where_no_drift_is_measured():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, OGD(1), drift_samples=0)
    guard.end_task((torch.full((1, 12), 1e-3), torch.tensor([0])))  # its bias is all that matters
    model.requires_grad_(False)[0].weight.requires_grad_(True)
    train(model, optimizer, task(1), steps=5)
    assert guard.stats().removed < 0.01
    with pytest.warns(
        UserWarning, match=r"only 0\.\d% of the steps .* set samples above 1 to"
    ) as w:
        guard.end_task(task(1))
    assert len(w) == 1
    train(model, optimizer, task(2), steps=5)
    guard.end_task(task(2))


def test_a_penalty_that_adds_about_nothing_says_so_where_no_drift_is_measured():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = Guard(model, optimizer, EWC(1e-3), drift_samples=0)
    guard.end_task(task(0))
    train(model, optimizer, task(1), steps=120)
    words = r"added to the gradients is only 0\.\d% as long .* set strength above 0\.001 to"
    with pytest.warns(UserWarning, match=words) as w:
        guard.end_task(task(1))
    assert len(w) == 1


def learned_under(method, **options):
    """A perceptron on digits, and then on digits that lie on their side."""
    model = seeded(lambda: nn.Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    guard = Guard(model, optimizer, method, **options)
    for turns in (0, 1):
        x, y = digits(turns)[0]
        x, order = x.flatten(1), torch.Generator().manual_seed(turns)
        for index in torch.cat([torch.randperm(1200, generator=order) for _ in range(5)]).split(32):
            optimizer.zero_grad()
            cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
        guard.end_task((x, y))
    return float((model(x).argmax(1) == y).double().mean()), guard


def test_a_task_that_is_learned_poorly_is_told_of():
    words = (
        r"task 2 is learned poorly under the guard: its loss has come \d+% of the way .* where "
        r"earlier tasks had come 9\d%, and \d\d% of what the steps would learn was removed; "
        "set energy below 0.99999"
    )
    with pytest.warns(UserWarning, match=words) as caught:
        accuracy, guard = learned_under(KronOGD(energy=0.99999, samples=600))
    assert accuracy < 0.7
    assert guard.stats().blocked < 0.95  # at which another warning says so
    assert len(caught) == 1
    assert [w.filename for w in caught] == [__file__]


def test_a_penalty_that_lets_nothing_be_learned_is_told_of():
    words = r"task 2 is learned poorly .* the penalty's gradient was \d\.?\d? times as long as the"
    with pytest.warns(UserWarning, match=words) as caught:
        accuracy, guard = learned_under(KronEWC(1e5, samples=600))
    assert accuracy < 0.7
    assert guard.stats().pull > 1
    assert len(caught) == 1


@pytest.mark.parametrize("method", [KronOGD(samples=600), EWC(100)], ids=["kron-ogd", "ewc"])
def test_a_task_that_is_learned_is_not(method):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "task 1 is being forgotten")
        accuracy, _ = learned_under(method)
    assert accuracy > 0.75


def test_outputs_that_move_for_the_better_are_no_forgetting():
    moved = {"drift": 0.5, "changed": 0.3, "loss_then": 1.1}
    assert not TaskDrift(1, 16, **moved, loss=1.0).is_forgotten
    assert TaskDrift(1, 16, **moved, loss=1.2).is_forgotten
    no_loss = {"loss_then": None, "loss": None}
    assert TaskDrift(1, 16, 0.5, None, **no_loss).is_forgotten
    assert TaskDrift(1, 16, 0.5, 0.3, **no_loss).is_forgotten
    assert not TaskDrift(1, 16, 0.5, 0.1, **no_loss).is_forgotten


def test_training_that_diverged_is_named():
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, EWC(strength=7))
    guard.end_task(task(0))
    with torch.no_grad():
        model[0].weight.fill_(torch.nan)
    assert np.isnan(guard.drift().tasks[0].drift)
    with pytest.warns(UserWarning, match="diverged: lower .* or take a smaller strength than 7"):
        guard._drift.report(guard.drift(), None)


def test_without_a_method_that_protects_it_measures_and_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = mlp()
        optimizer = optim.SGD(model.parameters(), lr=0.5)
        guard = Guard(model, optimizer, SGD())
        x, y = task(0)
        train(model, optimizer, (x, y), steps=20)
        guard.end_task((x, y))
        train(model, optimizer, (x, (y + 1) % 4), steps=120)
        guard.end_task(task(1))
    assert guard.stats().drift.tasks[0].is_forgotten


def test_outputs_that_are_no_numbers_cannot_be_checked():
    class Odd(nn.Linear):
        def forward(self, x):
            return "nothing"

    model = Odd(12, 4)
    guard = Guard(model, optim.SGD(model.parameters()), SGD())
    with pytest.warns(UserWarning, match=r"drift of task 1 cannot be checked.*drift_samples=0"):
        guard.end_task(task(0))
    assert guard.tasks == 1


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (4, "outputs on .* are of another kind"),
        (2, r"outputs on .* are \(16, 2\) and were \(16, 4"),
    ],
)
def test_a_model_that_no_longer_has_the_outputs_goes_on_training(labels, words, monkeypatch):
    monkeypatch.setattr(module_under_test, "_FIRST", 1)
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, OGD(5), exclude=["2"])
    (x, y), (x2, y2) = task(0), task(1)
    guard.end_task((x, y % labels))
    model[2] = nn.Linear(40, 2)
    with pytest.warns(UserWarning, match=f"cannot be checked any more: the {words}") as caught:
        train(model, optimizer, (x2, y2 % 2), steps=5)
    assert len(caught) == 1
    with pytest.raises(ConfigError, match=words):
        guard.drift()


@pytest.mark.parametrize("count", [-1, 1, 2.5, True, "many", None])
def test_how_many_samples(count):
    model = mlp()
    with pytest.raises(ConfigError, match="drift_samples must be 0, or a whole number of at lea"):
        Guard(model, optim.SGD(model.parameters()), OGD(), drift_samples=count)


def test_a_guard_without_tasks_has_no_drift():
    model = mlp()
    guard = Guard(model, optim.SGD(model.parameters()), OGD(), drift_samples=0)
    assert guard.drift().tasks == ()
    assert guard.stats().drift is None


@pytest.mark.parametrize(
    ("method", "more", "less"),
    [
        (PCAOGD(50), "set components above 50", "set components below 50"),
        (PCAOGD(variance=0.9), "set variance above 0.9", "set variance below 0.9"),
        (KronOGD(energy=0.8), "set energy above 0.8", "set energy below 0.8"),
        (
            KronOGD(),
            "set energy to 0.99 or 0.999, which it now chooses",
            "set energy to 0.95 or 0.9, which it now chooses",
        ),
        (OGD(7), "set samples above 7", "set samples below 7"),
        (GEM(9), "set memory above 9", "set memory below 9"),
        (EWC(3.0), "set strength above 3.0", "set strength below 3.0"),
        (SGD(), "", ""),
    ],
)
def test_the_knob_of_every_method(method, more, less):
    assert (method.advice(more=True), method.advice(more=False)) == (more, less)


@every_method
def test_the_knob_is_a_hyperparameter(method):
    assert not method.protected_by or hasattr(method, method.protected_by)
