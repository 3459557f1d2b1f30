"""The laws of KronOGD's projection, and what it protects."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from forgetless import ConfigError, DataError, Guard, KronOGD


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


def test_what_it_stores_does_not_grow():
    one, five = (
        guarded("perceptron", KronOGD(), tasks=tasks)[2].memory_report().bytes for tasks in (1, 5)
    )
    assert one == five


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


def test_gradients_that_are_not_finite_are_rejected():
    _, _, guard = guarded("perceptron", KronOGD(), tasks=0)
    x, y = data_of("perceptron")
    x[0, 0] = torch.nan
    with pytest.raises(DataError, match="NaN or infinite"):
        guard.end_task((x, y))
    assert guard.tasks == 0


def test_one_sample_and_a_layer_without_energy_are_handled():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        model[0].bias.fill_(-100)  # nothing passes: the first layer has no gradient at all
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=1), KronOGD())
    with pytest.warns(UserWarning, match=r"0\.weight \(and of 2 more\) is zero on all samples"):
        guard.end_task((torch.randn(1, 3, dtype=torch.float64), torch.tensor([1])))
    g = steps_like(guard, 0)
    kept = projection_of(guard)(g)
    assert kept.isfinite().all()
    torch.testing.assert_close(kept[:, :16], g[:, :16])
