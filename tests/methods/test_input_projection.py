"""GPM, SGP and Adam-NSCL against their papers' algorithms in NumPy, and the laws they obey."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, unfold

from forgetless import (
    EWC,
    GPM,
    OGD,
    SGP,
    AdamNSCL,
    ConfigError,
    DataError,
    Guard,
    KFACLaplace,
    KronOGD,
    TensorScenario,
    Training,
    fit,
)
from tests.conftest import blobs

MODELS = {
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 7, bias=False), nn.Tanh(),
                              nn.Linear(7, 3)),
        (6,),
    ),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 2), nn.ReLU(), nn.Conv2d(4, 3, 2, padding=1),
                              nn.Flatten(), nn.Linear(48, 3)),
        (2, 4, 4),
    ),
}  # fmt: skip
every_model = pytest.mark.parametrize("name", MODELS)
METHODS = {
    "gpm": GPM(threshold=0.8),
    "gpm, growing": GPM(threshold=0.7, growth=0.1),
    "sgp": SGP(threshold=0.8, scale=3.0),
    "adam-nscl": AdamNSCL(ratio=30.0),
}
# For models of three layers.
BY_LAYER = {"gpm, by layer": GPM(layer_thresholds="0.5,0.9,0.8", growth=0.04)}
PROJECTIONS = {name: method for name, method in METHODS.items() if name != "sgp"}


def data_of(name, task=0, dtype=torch.float64):
    """Inputs whose directions differ in strength, in each task in another way."""
    generator = torch.Generator().manual_seed(task)
    shape = MODELS[name][1]
    scales = torch.rand(shape, generator=generator) ** 3 * 3
    x = torch.randn(24, *shape, generator=generator) * scales + 0.3
    return x.to(dtype), torch.arange(24) % 3


def started(name, method, dtype=torch.float64, optimizer=torch.optim.SGD, lr=0.1):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MODELS[name][0]().to(dtype)
    chosen = optimizer(model.parameters(), lr=lr)
    return model, chosen, Guard(model, chosen, method)


def guarded(name, method, tasks=3, **options):
    model, optimizer, guard = started(name, method, **options)
    dtype = next(model.parameters()).dtype
    for task in range(tasks):
        guard.end_task(data_of(name, task, dtype))
        train(model, optimizer, *data_of(name, task + 1, dtype))
    return model, optimizer, guard


def train(model, optimizer, x, y, steps=3):
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()


def projected(guard, g):
    return guard.method.update(g, guard._steps.state, guard._steps.view(None))[0]


def some_step(guard, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, guard._model.parameters.size, dtype=torch.float64, generator=generator)


def inputs_of(model, x):
    """Weight → R, (d, N) with a row of ones where there is a bias; by hooks and `unfold`."""
    found, hooks = {}, []
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):

            def note(layer, args, output, name=name):
                rows = args[0]
                if isinstance(layer, nn.Conv2d):
                    rows = unfold(rows, layer.kernel_size, padding=layer.padding).mT.flatten(0, 1)
                columns = rows.detach().numpy().T
                if layer.bias is not None:
                    columns = np.vstack([columns, np.ones((1, columns.shape[1]))])
                found[name] = columns

            hooks.append(layer.register_forward_hook(note))
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    return found


class Papers:
    """M and λ of every layer, as the papers have them."""

    def __init__(self, method):
        self.method, self.tasks = method, 0
        self.bases, self.scales, self.covariances = {}, {}, {}
        self.importances, self.rounding = {}, 1e-10

    def end_task(self, model, x):
        for self.layer, (name, r) in enumerate(inputs_of(model, x).items()):
            if isinstance(self.method, AdamNSCL):
                self._null_space(name, r)
            else:
                self._span(name, r)
        self.tasks += 1

    def _span(self, name, r):
        epsilon = self.method.threshold + self.method.growth * self.tasks
        if self.method.layer_thresholds:
            epsilon = (0.5, 0.9, 0.8)[self.layer] + self.method.growth * self.tasks
        m = self.bases.get(name, np.zeros((len(r), 0)))
        inside = m @ m.T @ r
        u, sigma, _ = np.linalg.svd(r - inside, full_matrices=False)
        k, reached = 0, (inside**2).sum()
        while reached < epsilon * (r**2).sum():
            reached, k = reached + sigma[k] ** 2, k + 1
        self.bases[name] = np.hstack([m, u[:, :k]])
        self.scales[name] = np.ones(self.bases[name].shape[1])
        if isinstance(self.method, SGP):
            # By the singular vectors of the inputs inside, as the released code does.
            uc, sc, _ = np.linalg.svd(inside, full_matrices=False)
            on_old = np.sqrt(((m.T @ uc) ** 2) @ sc**2)
            sizes = np.concatenate([on_old, sigma[:k]])
            a = self.method.scale
            importance = (a + 1) * sizes / (a * sizes + sizes.max())
            importance[: len(on_old)] += self.importances.get(name, np.zeros(0))
            self.scales[name] = self.importances[name] = np.minimum(importance, 1)

    def _null_space(self, name, r):
        before = self.covariances.get(name, 0)
        self.covariances[name] = before + r @ r.T / r.shape[1]
        values, vectors = np.linalg.eigh(self.covariances[name])
        there = values > len(values) * np.finfo(float).eps * values[-1]
        protected = there & (values > self.method.ratio * values[there][0])
        self.bases[name] = vectors[:, protected]
        self.scales[name] = np.ones(protected.sum())
        # Two ways to the same eigenvectors differ by rounding over the gap between their values.
        gap = np.inf
        if protected.any() and not protected.all():
            gap = values[protected][0] - values[~protected][-1]
        self.rounding = max(self.rounding, 100 * np.finfo(float).eps * values[-1] / gap)

    def project(self, model, g):
        parts, start = [], 0
        layers = dict(model.named_modules())
        for name, m in self.bases.items():
            weight, bias = layers[name].weight, layers[name].bias
            columns = [g[start : start + weight.numel()].reshape(len(weight), -1)]
            start += weight.numel()
            if bias is not None:
                columns.append(g[start : start + len(bias)].reshape(-1, 1))
                start += len(bias)
            step = np.hstack(columns)
            step = step - step @ m @ np.diag(self.scales[name]) @ m.T
            parts += [step if bias is None else step[:, :-1]]
            parts += [] if bias is None else [step[:, -1]]
        return np.concatenate([part.ravel() for part in parts])


@every_model
@pytest.mark.parametrize("which", METHODS | BY_LAYER)
def test_it_is_the_papers_algorithm_over_several_tasks(name, which):
    method = (METHODS | BY_LAYER)[which]
    model, optimizer, guard = started(name, method)
    papers = Papers(method)
    for task in range(3):
        guard.end_task(data_of(name, task))
        papers.end_task(model, data_of(name, task)[0])
        g = some_step(guard, task)
        expected = papers.project(model, g[0].numpy())
        np.testing.assert_allclose(projected(guard, g)[0].numpy(), expected, atol=papers.rounding)
        assert guard._steps.state.rank == sum(m.shape[1] for m in papers.bases.values())
        train(model, optimizer, *data_of(name, task + 1))


@every_model
@pytest.mark.parametrize("which", PROJECTIONS)
def test_it_is_an_orthogonal_projection(name, which):
    _, _, guard = guarded(name, PROJECTIONS[which])
    g, h = some_step(guard, 1), some_step(guard, 2)
    once = projected(guard, g)
    torch.testing.assert_close(projected(guard, once), once, atol=1e-12, rtol=0)
    torch.testing.assert_close((once * h).sum(), (g * projected(guard, h)).sum())
    assert 0 < once.norm() < 0.99 * g.norm()


@every_model
def test_sgp_is_symmetric_shortens_steps_and_becomes_gpm(name):
    _, _, guard = guarded(name, SGP(threshold=0.8, scale=1.0))
    g, h = some_step(guard, 1), some_step(guard, 2)
    torch.testing.assert_close((projected(guard, g) * h).sum(), (g * projected(guard, h)).sum())
    lengths = [
        float((g * projected(guarded(name, method, tasks=1)[2], g)).sum())
        for method in (*(SGP(threshold=0.8, scale=a) for a in (0, 1, 10, 1e12)), GPM(threshold=0.8))
    ]
    assert lengths[:4] == sorted(lengths[:4], reverse=True)
    assert float(g.square().sum()) > lengths[0] > lengths[3] > 0
    assert lengths[3] == pytest.approx(lengths[4], rel=1e-9)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("which", PROJECTIONS)
@every_model
def test_nothing_protected_leaks_through_adam(name, which, optimizer):
    options = {"dtype": torch.float32, "optimizer": optimizer, "lr": 1e-2}
    model, chosen, guard = guarded(name, PROJECTIONS[which], tasks=2, **options)
    before = guard._model.parameters.read()
    train(model, chosen, *data_of(name, 5, torch.float32), steps=5)
    moved = guard._model.parameters.read() - before
    assert moved.norm() > 1e-2
    assert (moved - projected(guard, moved)).norm() < 1e-5 * moved.norm()


@pytest.mark.parametrize("which", ["gpm", "adam-nscl"])
def test_outputs_on_protected_inputs_do_not_move_with_their_biases(which):
    """Inputs of rank two in six dimensions: with the ones, three directions, all protected."""
    method = {"gpm": GPM(threshold=0.999999), "adam-nscl": AdamNSCL(ratio=1.0)}[which]
    model = nn.Sequential(nn.Linear(6, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    guard = Guard(model, optimizer, method)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 2, dtype=torch.float64, generator=generator) @ torch.eye(2, 6).double()
    if which == "adam-nscl":  # the smallest eigenvalue itself is free
        x = torch.cat([x, 1e-4 * torch.eye(6, dtype=torch.float64)[2:3]])
    guard.end_task((x, torch.arange(len(x)) % 3))
    other = torch.randn(30, 6, dtype=torch.float64, generator=generator) + 1
    before, outside = model(x).detach(), model(other).detach()
    train(model, optimizer, other, torch.arange(30) % 3, steps=10)
    atol = 1e-3 if which == "adam-nscl" else 1e-9
    torch.testing.assert_close(model(x).detach(), before, atol=atol, rtol=0)
    assert (model(other) - outside).abs().max() > 0.1


def with_others():
    return nn.Sequential(
        nn.Embedding(7, 5), nn.LayerNorm(5), nn.Flatten(), nn.Linear(20, 6), nn.Linear(6, 3)
    ).double()


@pytest.mark.parametrize("others", ["freeze", "train"])
def test_parameters_without_layer_inputs(others):
    model = with_others()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, GPM(threshold=0.5, others=others))
    tokens, y = torch.arange(40).view(10, 4) % 7, torch.arange(10) % 3
    start = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, tokens, y, steps=1)
    assert all(not torch.equal(a, b) for a, b in zip(start, model.parameters(), strict=True))
    guard.end_task((tokens, y))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model, optimizer, tokens, (y + 1) % 3, steps=1)
    # A step that is undone leaves the rounding of the weights.
    moved = {n for n, p in model.named_parameters() if not torch.allclose(p, before[n], atol=1e-14)}
    without = {"0.weight", "1.weight", "1.bias"}
    assert moved == set(before) - (without if others == "freeze" else set())


def test_a_tied_weight_stops_and_an_unused_layer_stays_free():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.mix = nn.Embedding(7, 5), nn.Linear(5, 5)
            self.head, self.later = nn.Linear(5, 7), nn.Linear(5, 7)
            self.head.weight = self.tokens.weight

        def forward(self, x, later=False):
            h = torch.relu(self.mix(self.tokens(x))).mean(1)
            return self.later(h) if later else self.head(h)

    model = Tied().double()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), GPM(threshold=0.5))
    guard.end_task((torch.arange(40).view(10, 4) % 7, torch.arange(10) % 7))
    g = some_step(guard)
    parts, left = (guard._model.parameters.layout.split(v) for v in (g, projected(guard, g)))
    assert left["tokens.weight"].norm() == 0
    assert 0 < left["mix.weight"].norm() < parts["mix.weight"].norm()
    for name in ("later.weight", "later.bias"):
        assert torch.equal(left[name], parts[name])


def with_batch_norm(affine=True):
    norm = nn.BatchNorm1d(9, affine=affine, track_running_stats=False)
    return nn.Sequential(nn.Linear(6, 9), norm, nn.ReLU(), nn.Linear(9, 3))


@pytest.mark.parametrize("which", METHODS)
def test_batch_norm_without_running_statistics_in_a_guard_and_in_fit(which):
    tasks = blobs(tasks=2)
    trace = fit(tasks, METHODS[which], with_batch_norm, seeds=2, training=Training(lr=0.1))
    assert trace.status == "complete"
    first, second = trace.weights(0, 0), trace.weights(0, 1)
    assert torch.equal(first["1.weight"], second["1.weight"])
    assert not torch.equal(first["0.weight"], second["0.weight"])
    model = with_batch_norm()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), METHODS[which])
    guard.end_task(data_of("perceptron", dtype=torch.float32))
    assert guard.memory_report().directions > 0


@pytest.mark.parametrize("method", [OGD(5), EWC(), KronOGD(), KFACLaplace()], ids=lambda m: m.name)
@pytest.mark.parametrize("affine", [True, False])
def test_methods_that_need_gradients_of_single_samples_refuse_it(method, affine):
    model = with_batch_norm(affine)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), method)
    with pytest.raises(ConfigError, match="outputs depend on the other samples of a batch"):
        guard.end_task(data_of("perceptron", dtype=torch.float32))
    with pytest.raises(ConfigError, match="outputs depend on the other samples of a batch"):
        fit(blobs(), method, lambda: with_batch_norm(affine), training=Training(lr=0.1))


@pytest.mark.parametrize("which", METHODS)
def test_one_sample(which):
    model, _, guard = started("perceptron", METHODS[which])
    x, y = data_of("perceptron")
    guard.end_task((x[:1], y[:1]))
    g = some_step(guard)
    assert projected(guard, g).isfinite().all()
    assert guard.memory_report().directions == (3 if which != "adam-nscl" else 0)
    model = with_batch_norm().double()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), METHODS[which])
    with pytest.raises(ConfigError, match=r"on one stored sample|more than 1 value per channel"):
        guard.end_task((x[:1], y[:1]))
    single = TensorScenario([((x[:2].float(), y[:2]), (x.float(), y))] * 2)
    method = type(METHODS[which])(samples=1)
    with pytest.raises(ConfigError, match="more than 1 value per channel"):
        fit(single, method, with_batch_norm, training=Training(lr=0.1, epochs=1))


@pytest.mark.parametrize("which", METHODS)
def test_a_model_without_layers_that_have_inputs_is_refused(which):
    model = nn.Sequential(nn.Flatten(), nn.LayerNorm(6))
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), METHODS[which])
    with pytest.raises(ConfigError, match="used no protected weight of one"):
        guard.end_task(data_of("perceptron", dtype=torch.float32))
    assert guard.tasks == 0


@pytest.mark.parametrize("which", METHODS)
def test_inputs_that_are_not_finite_are_refused(which):
    _, _, guard = started("perceptron", METHODS[which])
    x, y = data_of("perceptron")
    x[0, 0] = torch.nan
    with pytest.raises(DataError, match="NaN or infinite"):
        guard.end_task((x, y))
    assert guard.tasks == 0


@every_model
@pytest.mark.parametrize("which", METHODS)
def test_a_saved_guard_continues_bit_for_bit(name, which):
    model, optimizer, guard = guarded(name, METHODS[which], tasks=2)
    state = {n: t.clone() for n, t in guard.state_dict().items()}
    weights = {n: t.clone() for n, t in model.state_dict().items()}
    found = []
    for again in (False, True):
        if again:
            model.load_state_dict(weights)
            guard.remove()
            guard = Guard(model, optimizer, METHODS[which])
            guard.load_state_dict(state)
        guard.end_task(data_of(name, 2))
        train(model, optimizer, *data_of(name, 3))
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_thresholds_for_each_layer_need_one_for_each():
    _, _, guard = started("perceptron", GPM(layer_thresholds="0.9,0.9"))
    with pytest.raises(ConfigError, match="one share for each of the 3 layers: "):
        guard.end_task(data_of("perceptron"))
    for wrong in ("0.9,", "0.9,1", "all", 0.9):
        with pytest.raises(ConfigError, match="layer_thresholds must be shares in"):
            GPM(layer_thresholds=wrong)
    equal = [
        projected(guarded("perceptron", method)[2], some_step(guard))
        for method in (GPM(threshold=0.8), GPM(threshold=0.1, layer_thresholds="0.8,.8,0.80"))
    ]
    assert torch.equal(*equal)


def test_a_share_that_grows_above_one_takes_every_direction():
    _, _, guard = guarded("perceptron", GPM(threshold=0.9, growth=0.2), tasks=2)
    share = guard._steps.state.record.shares[0]
    assert 0.9 <= share[0] < 1
    assert share[1] == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("which", METHODS)
def test_it_keeps_outputs_that_plain_training_moves(which):
    moved = {}
    for method in (None, METHODS[which]):
        model, optimizer, guard = started("perceptron", method or GPM())
        x, y = data_of("perceptron")
        train(model, optimizer, x, y, steps=20)
        guard.end_task((x, y))
        if method is None:
            guard.remove()
        before = model(x).detach()
        train(model, optimizer, data_of("perceptron", 1)[0] + 1, (y + 1) % 3, steps=20)
        moved[method] = float((model(x).detach() - before).norm())
    assert moved[METHODS[which]] < 0.5 * moved[None]
