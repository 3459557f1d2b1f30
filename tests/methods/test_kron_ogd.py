"""The laws of KronOGD's projection, and what it protects."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from forgetless import ConfigError, DataError, Guard, KronOGD
from forgetless.tangent import moments


class Sequence(nn.Module):
    """Tokens, a norm, attention's linear layers and a tied output layer."""

    def __init__(self):
        super().__init__()
        self.tokens, self.norm = nn.Embedding(7, 6), nn.LayerNorm(6)
        self.mix, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.relu(self.mix(self.norm(self.tokens(x)))).mean(1))


MODELS = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)), (5,)),
    "no biases": (
        lambda: nn.Sequential(nn.Linear(5, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False)),
        (5,),
    ),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
        ),
        (2, 4, 4),
    ),
    "tokens": (Sequence, None),
}
every_model = pytest.mark.parametrize("name", MODELS)


def data_of(name, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shape = MODELS[name][1]
    if shape is None:
        x = torch.randint(0, 7, (24, 5), generator=generator)
    else:
        x = torch.randn(24, *shape, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.arange(24) % 3


def guarded(name, method, optimizer=torch.optim.SGD, dtype=torch.float64, tasks=1, lr=0.1):
    torch.manual_seed(0)
    model = MODELS[name][0]().to(dtype)
    chosen = optimizer(model.parameters(), lr=lr)
    guard = Guard(model, chosen, method)
    for task in range(tasks):
        guard.end_task(data_of(name, task, dtype))
    return model, chosen, guard


def projection_of(guard):
    view = guard._steps.view(None)
    return lambda g: guard.method.update(g, guard._steps.state, view)[0]


def steps_like(guard, seed):
    size = sum(t.numel() for t in guard._model.parameters.tensors)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, size, dtype=torch.float64, generator=generator)


@every_model
@pytest.mark.parametrize("energy", [0.5, 0.9, 0.999])
def test_it_is_an_orthogonal_projection(name, energy):
    _, _, guard = guarded(name, KronOGD(energy=energy), tasks=2)
    project = projection_of(guard)
    g, h = steps_like(guard, 1), steps_like(guard, 2)
    torch.testing.assert_close(project(project(g)), project(g), atol=1e-12, rtol=0)
    torch.testing.assert_close((project(g) * h).sum(), (g * project(h)).sum())
    assert 0 < project(g).norm() < g.norm()


@every_model
def test_no_energy_is_no_protection_and_more_protects_more(name):
    _, _, guard = guarded(name, KronOGD(energy=1e-9))
    g = steps_like(guard, 1)
    assert torch.equal(projection_of(guard)(g), g)
    lengths = []
    for energy in (0.5, 0.8, 0.95, 0.999):
        _, _, guard = guarded(name, KronOGD(energy=energy))
        lengths.append(float(projection_of(guard)(g).norm()))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] < 0.9 * lengths[0]


def test_it_is_the_dense_eigendecomposition_where_the_kronecker_form_is_exact():
    """A linear model's gradients of all outputs have exactly the covariance I ⊗ A."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    guard = Guard(
        model, torch.optim.SGD(model.parameters(), lr=1), KronOGD(energy=0.9, outputs="class")
    )
    x = torch.randn(30, 4, dtype=torch.float64) * torch.tensor([3.0, 2.0, 1.0, 0.5])
    guard.end_task((x, torch.arange(30) % 3))
    inputs = torch.cat([x, torch.ones(30, 1, dtype=torch.float64)], 1)
    rows = torch.stack([torch.kron(e, a) for a in inputs for e in torch.eye(3).double()])
    values, vectors = torch.linalg.eigh(rows.T @ rows)
    order = values.argsort(descending=True)
    values, vectors = values[order], vectors[:, order]
    # Energies come in threes, which are protected together.
    within = values.cumsum(0)[2::3] <= 0.9 * values.sum()
    kept = vectors[:, : 3 * int(within.sum())]
    assert kept.shape[1] in (6, 9)
    g = steps_like(guard, 3)
    joined = torch.cat([g[:, :12].view(3, 4), g[:, 12:].view(3, 1)], 1).flatten()
    expected = joined - kept @ (kept.T @ joined)
    found = projection_of(guard)(g)
    found = torch.cat([found[:, :12].view(3, 4), found[:, 12:].view(3, 1)], 1).flatten()
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("shrinkage", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("energy", [0.9, 0.99])
def test_two_layers_and_two_tasks_against_numpy(energy, shrinkage):
    """G and A from the chain rule by hand, all energies sorted, the strongest taken out."""
    method = KronOGD(energy=energy, shrinkage=shrinkage, outputs="class")
    model, _, guard = guarded("perceptron", method, tasks=2)
    first, second = ((m.weight.detach().numpy(), m.bias.detach().numpy()) for m in model[::2])
    sides = [[0, 0], [0, 0]]
    for task in range(2):
        x, y = (part.numpy() for part in data_of("perceptron", task))
        z = x @ first[0].T + first[1]
        ones = np.ones((len(x), 1))
        deltas = second[0][y] * (z > 0), np.eye(3)[y]
        inputs = np.hstack([x, ones]), np.hstack([np.maximum(z, 0), ones])
        for side, delta, a in zip(sides, deltas, inputs, strict=True):
            g = delta.T @ delta / len(x) / 2
            mean = np.trace(g) / len(g) * np.eye(len(g))
            side[0] = side[0] + (1 - shrinkage) * g + shrinkage * mean
            side[1] = side[1] + a.T @ a / len(x) / 2
    found = [[np.linalg.eigh(moment) for moment in side] for side in sides]
    energies = [np.outer(g[0], a[0]) for g, a in found]
    values = np.sort(np.concatenate([e.ravel() for e in energies]))[::-1]
    assert float(guard._steps.state.basis.total()) == pytest.approx(values.sum())
    # Of energies that are equal, all are taken out or none.
    least = min(
        v for v in values if values[values >= v * (1 - 1e-9)].sum() <= energy * values.sum()
    )
    masks = [e >= least * (1 - 1e-9) for e in energies]
    # Of all outputs alike, or not all of some rows and columns, in at least one of the layers.
    partial = any(np.outer(m.any(1), m.any(0)).sum() > m.sum() for m in masks)
    assert partial == (shrinkage < 1)
    g = steps_like(guard, 3)
    expected, start = [], 0
    for (left, right), mask in zip(found, masks, strict=True):
        rows, columns = mask.shape
        end = start + rows * columns
        weight = g[0, start : end - rows].view(rows, columns - 1)
        step = torch.cat([weight, g[0, end - rows : end, None]], 1).numpy()
        u, v = left[1], right[1]
        kept = torch.from_numpy(step - u @ ((u.T @ step @ v) * mask) @ v.T)
        expected += [kept[:, :-1].flatten(), kept[:, -1]]
        start = end
    torch.testing.assert_close(projection_of(guard)(g)[0], torch.cat(expected), atol=1e-9, rtol=0)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
@every_model
def test_nothing_protected_leaks_through_adam(name, optimizer):
    model, chosen, guard = guarded(name, KronOGD(energy=0.9), optimizer, torch.float32, lr=1e-2)
    project, before = projection_of(guard), guard._model.parameters.read()
    x, y = data_of(name, 5, torch.float32)
    for _ in range(5):
        chosen.zero_grad()
        cross_entropy(model(x), y).backward()
        chosen.step()
    moved = guard._model.parameters.read() - before
    leaked = moved - project(moved)
    assert moved.norm() > 1e-2
    assert leaked.norm() < 1e-5 * moved.norm()


def test_without_an_energy_it_protects_what_holds_the_outputs():
    """Fewer coordinates, and the last task's movement would change the outputs by too much."""
    for drift in (1e-3, 1e-2, 0.1):
        model, chosen, guard = guarded("perceptron", KronOGD(drift=drift), tasks=0)
        before = guard._model.parameters.read()
        x, y = data_of("perceptron")
        for _ in range(30):
            chosen.zero_grad()
            cross_entropy(model(3 * x), y).backward()
            chosen.step()
        guard.end_task((x, y))
        state = guard._steps.state
        moved = guard._model.parameters.read() - before
        left = state.project_out(moved)

        def change(vector, state=state):
            """Σ E D, from the gradients' moments themselves."""
            total = 0.0
            for name, part in state.layout.split(vector).items():
                if name in state.basis.outputs:
                    g, a = (axis.moment()[0] for axis in state.basis.sides(name))
                    bias = state.layout.split(vector)[state.basis.biases[name]][0].unsqueeze(1)
                    step = torch.cat([part[0], bias], 1)
                    total += float((step * (g @ step @ a)).sum())
            return total

        outputs = model(x).detach().square().sum(1).mean()
        assert change(moved) > 3 * drift * outputs
        within = 0.951 < state.kept_share() < 0.998
        assert change(left) <= 1.5 * drift * outputs  # random signs estimate the outputs' square
        if within:
            assert change(left) > 0.1 * drift * outputs


def test_weights_that_have_not_moved_say_nothing_of_how_much_to_protect():
    for energy in (None, 0.97):
        _, _, guard = guarded("perceptron", KronOGD(energy=energy))
        assert 0.9 < guard._steps.state.kept_share() <= 0.97


@pytest.mark.parametrize("method", [KronOGD(), KronOGD(energy=0.9)], ids=["drift", "energy"])
def test_what_it_stores_does_not_grow(method):
    _, _, guard = guarded("perceptron", method, tasks=15)
    few, counted = guard._steps.state.nbytes, guard.memory_report().bytes
    for task in range(15, 150):
        guard.end_task(data_of("perceptron", task))
    state = guard._steps.state
    assert (state.nbytes, guard.memory_report().bytes) == (few, counted)
    # The record of a task, how much it added, is two numbers; nothing else that is saved grows.
    sizes = [t.nbytes for name, t in state.tensors(0).items() if name not in ("ranks", "shares")]
    assert abs(sum(sizes) - few) < 1000


def test_it_keeps_outputs_that_plain_training_moves():
    moved = {}
    for energy in (1e-9, 0.99):
        model, chosen, _ = guarded("perceptron", KronOGD(energy=energy))
        x, _ = data_of("perceptron")
        before = model(x).detach()
        other, labels = data_of("perceptron", 1)
        for _ in range(20):
            chosen.zero_grad()
            cross_entropy(model(other + 3), labels).backward()
            chosen.step()
        moved[energy] = (model(x) - before).norm().item()
    assert moved[0.99] < 0.2 * moved[1e-9]


@pytest.mark.parametrize("energy", [0.0, 1.0, -1, float("nan"), "much"])
def test_an_impossible_energy_is_rejected(energy):
    with pytest.raises(ConfigError, match="KronOGD's energy must be"):
        KronOGD(energy=energy)


@pytest.mark.parametrize("drift", [0.0, 1.0, -1, float("nan"), "much"])
def test_an_impossible_drift_is_rejected(drift):
    with pytest.raises(ConfigError, match="KronOGD's drift must be"):
        KronOGD(drift=drift)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples": 0}, "KronOGD's samples must be"),
        ({"shrinkage": 1.5}, "KronOGD's shrinkage must be"),
        ({"shrinkage": -0.1}, "KronOGD's shrinkage must be"),
        ({"outputs": "some"}, "KronOGD's outputs must"),
    ],
)
def test_other_impossible_settings_are_rejected(settings, message):
    with pytest.raises(ConfigError, match=message):
        KronOGD(**settings)


every_choice = pytest.mark.parametrize(
    "method",
    [KronOGD(), *(KronOGD(energy=0.9, outputs=outputs) for outputs in ("all", "class", "fisher"))],
    ids=["drift", "all", "class", "fisher"],
)


@every_choice
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e200])
def test_gradients_that_are_not_finite_are_rejected(method, bad):
    """Also those whose squares are not."""
    _, _, guard = guarded("perceptron", method, tasks=0)
    x, y = data_of("perceptron")
    x[0, 0] = bad
    with pytest.raises(DataError, match="NaN or infinite"):
        guard.end_task((x, y))
    assert guard.tasks == 0


def test_outputs_that_are_not_finite_are_rejected():
    """A linear model's gradients do not show that a weight is NaN."""
    model = nn.Linear(5, 3).double()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=1), KronOGD())
    with torch.no_grad():
        model.weight[0, 0] = torch.nan
    with pytest.raises(DataError, match="outputs of samples to protect"):
        guard.end_task(data_of("perceptron"))


@every_choice
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_any_gradient_nothing_is_protected(method, dtype):
    """No energy at all: steps are as they were, not all taken away."""

    class Silent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.scale = nn.Linear(5, 3), nn.Parameter(torch.zeros(()))

        def forward(self, x):
            return 0 * self.scale * self.layers(x)

    model = Silent().to(dtype)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=1), method)
    guard.end_task(data_of("perceptron", dtype=dtype))
    g = steps_like(guard, 0).to(dtype)
    assert torch.equal(projection_of(guard)(g), g)
    assert guard._steps.state.rank == 0


@every_model
def test_one_sample_many_times_is_one_sample(name):
    """Singular moments, of rank one in the first layer."""
    torch.manual_seed(0)
    x, y = data_of(name)
    found = []
    for count in (1, 24):
        torch.manual_seed(0)
        model = MODELS[name][0]().double()
        guard = Guard(
            model, torch.optim.SGD(model.parameters(), lr=1), KronOGD(energy=0.99, outputs="class")
        )
        guard.end_task((x[:1].expand(count, *x.shape[1:]).contiguous(), y[:1].expand(count)))
        found.append(projection_of(guard)(steps_like(guard, 1)))
        project = projection_of(guard)
        torch.testing.assert_close(project(found[-1]), found[-1], atol=1e-12, rtol=0)
    torch.testing.assert_close(found[0], found[1], atol=1e-9, rtol=0)


def test_a_layer_that_is_not_used_is_free_and_may_be_used_later():
    class Choosing(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other, self.both = nn.Linear(5, 3), nn.Linear(5, 3), False

        def forward(self, x):
            return self.one(x) + (self.other(x) if self.both else 0)

    model = Choosing().double()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=1), KronOGD(energy=0.9))
    guard.end_task(data_of("perceptron"))
    g = steps_like(guard, 0)
    assert torch.equal(projection_of(guard)(g)[:, 18:], g[:, 18:])
    for model.both in (True, False):
        guard.end_task(data_of("perceptron", 1))
        kept = projection_of(guard)(g)
        assert (kept[:, 18:] - g[:, 18:]).norm() > 0.1 * g[:, 18:].norm()
        torch.testing.assert_close(projection_of(guard)(kept), kept, atol=1e-12, rtol=0)


@every_choice
def test_a_parameter_that_is_a_single_number_is_protected(method):
    """Such as a learned temperature."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.scale = nn.Linear(5, 3), nn.Parameter(torch.tensor(0.1))

        def forward(self, x):
            return self.scale * self.layer(x)

    torch.manual_seed(0)
    model = Scaled().double()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=1), method)
    for task in range(2):
        guard.end_task(data_of("perceptron", task))
    assert guard._steps.state.basis.squares["scale"].shape == (1,)
    project, g = projection_of(guard), steps_like(guard, 0)
    torch.testing.assert_close(project(project(g)), project(g), atol=1e-12, rtol=0)
    assert "scale" in guard._steps.state._free
    assert 0 < project(g).norm() < g.norm()


def test_a_model_with_nothing_to_protect_is_rejected():
    model = nn.Linear(5, 3)
    for parameters, exclude in (([], ["weight", "bias"]), ([torch.zeros(1)], [])):
        moving = [nn.Parameter(p) for p in parameters] or list(model.parameters())
        with pytest.raises(ConfigError, match="there is nothing to protect"):
            Guard(model, torch.optim.SGD(moving, lr=1), KronOGD(), exclude=exclude)


def test_more_outputs_than_moments_can_have_are_protected_one_by_one(monkeypatch):
    """Then each output of the layer has the inputs' eigenvectors."""
    monkeypatch.setattr(moments, "_LARGEST", 7)
    _, _, guard = guarded("perceptron", KronOGD(energy=0.9))
    assert guard._steps.state.basis.outputs["0.weight"].is_standard
    assert not guard._steps.state.basis.outputs["2.weight"].is_standard
    project, g, h = projection_of(guard), steps_like(guard, 1), steps_like(guard, 2)
    torch.testing.assert_close(project(project(g)), project(g), atol=1e-12, rtol=0)
    torch.testing.assert_close((project(g) * h).sum(), (g * project(h)).sum())


def test_more_inputs_than_fit_in_memory_are_rejected(monkeypatch):
    monkeypatch.setattr(moments, "free_memory", lambda device: 500)
    _, _, guard = guarded("perceptron", KronOGD(), tasks=0)
    with pytest.raises(ConfigError, match=r"2\.weight has 8 inputs, whose moments .* exclude="):
        guard.end_task(data_of("perceptron"))
    assert guard.tasks == 0


def test_one_sample_and_a_layer_without_energy_are_handled():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        model[0].bias.fill_(-100)  # nothing passes: the first layer has no gradient at all
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=1), KronOGD())
    x = torch.randn(1, 3, dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"2\.weight is zero on all samples"):
        guard.end_task((x, torch.tensor([1])))
    g = steps_like(guard, 0)
    kept = projection_of(guard)(g)
    assert kept.isfinite().all()
    torch.testing.assert_close(kept[:, 16:24], g[:, 16:24])
    # The layer before, which has inputs, leaves what it makes of them as it is.
    weight, bias = kept[0, :12].view(4, 3), kept[0, 12:16]
    torch.testing.assert_close(weight @ x[0] + bias, torch.zeros_like(bias), atol=1e-6, rtol=0)
