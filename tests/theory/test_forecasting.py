"""Forecasts, against networks for which they must be exact and against real training."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

from forgetless import PCAOGD, SGD, ConfigError, DataError, TensorScenario, Training, fit
from forgetless.theory import TangentModel, linearised_forecast
from forgetless.theory.forecasting import margins
from forgetless.theory.linearised import (
    SGDRun,
    curvature,
    train_by_kernel,
    train_linearised,
    train_network,
)
from tests.conftest import blobs

BATCHES = [torch.arange(24).view(3, 8)[i % 3] for i in range(12)]


def network(seed: int = 0, *, linear: bool = False) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if linear:
            return nn.Linear(6, 3).double()
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def tasks():
    """Source (test) and target (training) samples in float64."""
    scenario = blobs(tasks=2)
    source, target = scenario.task(0, [0]).test, scenario.task(1, [0]).train
    return (source.inputs.double(), source.labels), (target.inputs.double(), target.labels)


def jacobian(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    parts = jacrev(lambda values: functional_call(model, values, (inputs,)))(parameters)
    return torch.cat([parts[n].flatten(2) for n in parameters], dim=2)  # (n, C, p)


@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_products_with_the_jacobian(chunk):
    model, (inputs, _) = network(), tasks()[0]
    tangent = TangentModel(model, chunk=chunk)
    dense = jacobian(model, inputs)
    change = torch.randn(tangent.size, dtype=torch.float64)
    torch.testing.assert_close(tangent.push(inputs, change), dense @ change)
    cotangent = torch.randn(len(inputs), 3, dtype=torch.float64)
    expected = torch.einsum("ncp,nc->p", dense, cotangent)
    torch.testing.assert_close(tangent.pull(inputs, cotangent), expected)
    flat = dense.flatten(0, 1)
    largest = torch.linalg.svdvals(flat)[0].square() / len(inputs)
    assert curvature(tangent, inputs, iterations=200) == pytest.approx(float(largest), rel=1e-3)


def test_outputs_that_do_not_depend_on_the_weights_do_not_move():
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return x[:, :3].clone()

    tangent = TangentModel(Constant())
    assert tangent.push(torch.randn(4, 6), torch.ones(2)).tolist() == [[0.0] * 3] * 4


@pytest.mark.parametrize("protected", [False, True, "function"])
def test_function_space_and_parameter_space_agree(protected):
    _, (inputs, labels) = tasks()
    tangent = TangentModel(network())
    loss = nn.functional.cross_entropy
    basis = None
    if protected:
        basis = torch.linalg.qr(torch.randn(tangent.size, 5, dtype=torch.float64))[0].T
    avoided = (lambda rows: rows - rows @ basis.T @ basis) if protected == "function" else basis
    changes = [
        train(tangent, SGDRun(inputs, labels, loss, BATCHES, 0.1, max(map(len, BATCHES)), avoided))
        for train in (train_linearised, train_by_kernel)
    ]
    torch.testing.assert_close(changes[0], changes[1], atol=1e-10, rtol=1e-8)
    if basis is not None:
        assert (basis @ changes[0]).abs().max() < 1e-12


def test_a_linear_networks_linearisation_is_the_network():
    (inputs, labels), (x, y) = tasks()
    tangent = TangentModel(network(linear=True))
    loss = nn.functional.cross_entropy
    course = SGDRun(x, y, loss, BATCHES, 0.1, max(map(len, BATCHES)))
    linear, real = train_linearised(tangent, course), train_network(tangent, course)
    torch.testing.assert_close(linear, real)
    result = linearised_forecast(network(linear=True), (inputs, labels), (x, y), lr=0.1, epochs=3)
    assert result.trust == pytest.approx(1, abs=1e-9)


def test_a_linear_network_is_forecast_exactly():
    """Against `fit`, which trains for real: one batch a step, so that both see the same."""
    (inputs, labels), (x, y) = tasks()
    model = network(linear=True)
    result = linearised_forecast(model, (inputs, labels), (x, y), lr=0.1, epochs=4, batch_size=100)
    training = Training(lr=0.1, epochs=4, batch_size=100, dtype="float64")
    trace = fit(TensorScenario([((x, y), (inputs, labels))]), SGD(), model, training=training)
    assert result.after.source_accuracy == pytest.approx(trace.accuracy[0, 0, 0])
    weights = trace.weights(0, 0)
    outputs = inputs @ weights["weight"].T + weights["bias"]
    torch.testing.assert_close(result.after.outputs, outputs)
    assert result.steps == 4


def test_protecting_every_direction_of_the_source_holds_it_still():
    (inputs, labels), target = tasks()
    few = inputs[:4], labels[:4]
    options = {"lr": 0.1, "epochs": 3, "warm_up": False}  # exact only where all is linear
    result = linearised_forecast(network(), few, target, components=(1, 4), **options)
    true = few[1].unsqueeze(1)
    moved = [(o.outputs - result.now.outputs).gather(1, true).abs().max() for o in result.protected]
    assert moved[1] < 1e-10 < moved[0]
    assert [o.components for o in result.protected] == [1, 4]


def test_a_warm_up_comes_closer_to_real_training():
    (inputs, labels), (x, y) = tasks()
    model = network()
    options = {"lr": 0.3, "epochs": 60, "batch_size": 100}
    training = Training(lr=0.3, epochs=60, batch_size=100, dtype="float64")
    trace = fit(TensorScenario([((x, y), (inputs, labels))]), SGD(), model, training=training)
    trained = network()
    trained.load_state_dict(trace.weights(0, 0))
    real = trained(inputs).detach()
    missed = [
        (
            linearised_forecast(model, (inputs, labels), (x, y), warm_up=w, **options).after.outputs
            - real
        ).norm()
        for w in (True, False)
    ]
    assert missed[0] < 0.5 * missed[1]


def test_linearised_elsewhere():
    model, (inputs, _) = network(), tasks()[0]
    tangent = TangentModel(model)
    change = torch.randn(tangent.size, dtype=torch.float64)
    moved = tangent.moved(change)
    torch.testing.assert_close(moved.outputs(inputs), tangent.outputs(inputs, change))
    torch.testing.assert_close(moved.theta, tangent.theta + change)
    assert torch.equal(tangent.theta, TangentModel(model).theta)


def test_a_basis_is_avoided():
    source, target = tasks()
    model = network()
    size = TangentModel(model).size
    everything = torch.eye(size, dtype=torch.float64)
    result = linearised_forecast(model, source, target, lr=0.1, basis=everything, components=(2,))
    torch.testing.assert_close(result.after.outputs, result.now.outputs)
    torch.testing.assert_close(result.protected[0].outputs, result.now.outputs)


def test_methods_of_ones_own_are_forecast_by_what_they_do_to_a_step():
    """A projection by a function gives what its rows give; another change what it does to SGD."""
    source, target = tasks()
    model = network()
    size = TangentModel(model).size
    rows = torch.linalg.qr(torch.randn(size, 5, dtype=torch.float64))[0].T
    methods = {
        "projection": lambda g, theta: g - rows.T @ (rows @ g),
        "half": lambda g, theta: 0.5 * g,
        "none": lambda g, theta: g,
    }
    options = {"epochs": 8, "batch_size": 12}
    for warm_up in (True, False):
        found = linearised_forecast(
            model, source, target, lr=0.1, methods=methods, warm_up=warm_up, **options
        )
        by_rows = linearised_forecast(
            model, source, target, lr=0.1, basis=rows, warm_up=warm_up, **options
        )
        by_function = linearised_forecast(
            model, source, target, lr=0.1, basis=lambda g: g - g @ rows.T @ rows, warm_up=warm_up,
            **options,
        )  # fmt: skip
        torch.testing.assert_close(by_function.after.outputs, by_rows.after.outputs)
        assert by_function.trust == pytest.approx(by_rows.trust)
        halved = linearised_forecast(model, source, target, lr=0.05, warm_up=warm_up, **options)
        assert list(found.summary()["methods"]) == list(methods)
        for name, expected in (
            ("projection", by_rows.after), ("half", halved.after), ("none", found.after),
        ):  # fmt: skip
            torch.testing.assert_close(
                found.methods[name].outputs, expected.outputs, rtol=1e-8, atol=1e-10
            )
        assert (found.methods["projection"].outputs - found.after.outputs).abs().max() > 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_basis_of_any_precision_and_with_rows_of_zeros(dtype):
    source, target = tasks()
    model = network()
    size = TangentModel(model).size
    rows = torch.linalg.qr(torch.randn(size, 5, dtype=torch.float64))[0].T.to(dtype)
    expected = linearised_forecast(model, source, target, lr=0.1, basis=rows.double())
    padded = torch.cat([rows[:2], torch.zeros(2, size, dtype=dtype), rows[2:]]).requires_grad_()
    result = linearised_forecast(model, source, target, lr=0.1, basis=padded)
    torch.testing.assert_close(result.after.outputs, expected.after.outputs)
    assert not result.after.outputs.requires_grad
    none = linearised_forecast(model, source, target, lr=0.1, basis=rows[:0])
    plain = linearised_forecast(model, source, target, lr=0.1)
    torch.testing.assert_close(none.after.outputs, plain.after.outputs)


def test_no_more_directions_are_reported_than_there_were():
    (inputs, labels), target = tasks()
    few = inputs[:4], labels[:4]
    told = []
    result = linearised_forecast(
        network(), few, target, lr=0.1, components=(2, 100), on_stage=told.append
    )
    assert [o.components for o in result.protected] == [2, 4]
    assert "the same with 4 directions protected" in told


def test_the_network_is_left_as_it_was():
    model = network().train()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    linearised_forecast(model, *tasks(), lr=0.1, components=(3,))
    assert model.training
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


def test_trust_falls_where_the_network_bends():
    """The larger the steps, the less the first of them are linear."""
    trust = [
        linearised_forecast(network(), *tasks(), lr=lr, epochs=4).trust for lr in (1e-4, 0.1, 3.0)
    ]
    assert trust[0] > 0.99
    assert trust[0] > trust[1] > trust[2]


def test_overlap_is_that_of_the_dense_features():
    (inputs, labels), (x, y) = tasks()
    model = network()
    result = linearised_forecast(model, (inputs, labels), (x, y), lr=0.1, overlap_samples=4000)
    spaces = []
    for samples, classes in ((inputs, labels), (x, y)):
        rows = jacobian(model, samples)[torch.arange(len(samples)), classes]
        _, sigma, v = torch.linalg.svd(rows, full_matrices=False)
        spaces.append(v[sigma > 3e-4 * sigma[0]])
    expected = torch.linalg.svdvals(spaces[0] @ spaces[1].T)
    torch.testing.assert_close(result.overlap, expected, atol=1e-6, rtol=0)
    assert (result.angles.diff() >= 0).all()


def test_who_is_in_danger():
    (inputs, labels), target = tasks()
    result = linearised_forecast(network(), (inputs, labels), target, lr=0.5, epochs=10)
    now, then = (o.argmax(1) == labels for o in (result.now.outputs, result.after.outputs))
    lost = set(torch.nonzero(now & ~then).flatten().tolist())
    assert lost
    assert set(result.endangered(100).tolist()) == lost
    worst = int(result.endangered(1))
    margin = margins(result.after.outputs, labels, range(3))
    assert margin[worst] == min(margin[list(lost)])
    shares = result.by_class()
    assert set(shares) == {0, 1, 2}
    assert shares[0][0] == pytest.approx(100 * now[labels == 0].double().mean().item())
    assert result.accuracy_change == pytest.approx(
        100 * (then.sum() - now.sum()).item() / len(labels)
    )


def test_quick_says_the_same_with_fewer_steps():
    (inputs, labels), (x, y) = tasks()
    source = inputs.repeat(100, 1), labels.repeat(100)
    target = x.repeat(20, 1), y.repeat(20)
    options = {"lr": 0.002, "epochs": 2, "batch_size": 4}
    full = linearised_forecast(network(), source, target, **options)
    quick = linearised_forecast(network(), source, target, quick=True, **options)
    assert len(quick.labels) == len(quick.index) == 2000
    assert torch.equal(quick.labels, source[1][quick.index])
    chosen = full.after.outputs[quick.index]
    moved = (chosen - full.now.outputs[quick.index]).norm()
    assert (quick.after.outputs - chosen).norm() < 0.05 * moved
    assert quick.seconds < full.seconds
    assert set(quick.endangered(50).tolist()) <= set(quick.index.tolist())


def test_heads_are_told_apart():
    """Source and target use different outputs of one layer."""
    (inputs, labels), (x, y) = tasks()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(6, 6).double()
    heads = {"source_classes": range(3), "target_classes": range(3, 6)}
    result = linearised_forecast(model, (inputs, labels), (x, y + 3), lr=0.1, epochs=3, **heads)
    # A linear layer's heads share nothing: the source's outputs cannot move.
    torch.testing.assert_close(result.after.outputs[:, :3], result.now.outputs[:, :3])
    assert result.after.target_accuracy > result.now.target_accuracy


def test_heads_that_pca_ogd_leaves_alone_are_no_part_of_its_directions():
    """One step on all samples is linear: the forecast is what `fit` does, to the last digit."""
    scenario = blobs(tasks=2, n=40)
    pairs = [
        tuple((s.inputs.double(), s.labels) for s in (task.train, task.test))
        for task in (scenario.task(t, [0]) for t in (0, 1))
    ]
    heads = TensorScenario(pairs, setting="task")

    def model():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double()

    size = len(heads.task(0, [0]).train)
    once = Training(lr=0.5, epochs=1, batch_size=size, dtype="float64")
    trace = fit(heads, PCAOGD(components=5, samples=size), model, training=once)
    before, after = model(), model()
    before.load_state_dict(trace.weights(0, 0))
    after.load_state_dict(trace.weights(0, 1))
    (x, y), (x2, y2) = ((s.inputs, s.labels) for s in (heads.task(t, [0]).train for t in (0, 1)))
    arguments = {"lr": 0.5, "epochs": 1, "batch_size": size, "samples": size, "components": 5}
    classes = {"source_classes": heads.classes(0), "target_classes": heads.classes(1)}
    with torch.no_grad():
        moved = (after(x) - before(x))[:, :3]
    errors = []
    for exclude in (["2."], ()):
        result = linearised_forecast(
            before, (x, y), (x2, y2), exclude=exclude, **arguments, **classes
        )
        change = result.protected[0].outputs - result.now.outputs
        errors.append(float((change[:, :3] - moved).norm() / moved.norm()))
    assert errors[0] < 1e-10 < 1e-2 < errors[1]


def test_one_number_of_components_and_inputs_of_another_precision():
    source, target = tasks()
    model = network()
    expected = linearised_forecast(model, source, target, lr=0.1, components=[3])
    single = [(inputs.float(), labels) for inputs, labels in (source, target)]
    found = linearised_forecast(model, *single, lr=0.1, components=3)
    assert [o.components for o in found.protected] == [3]
    torch.testing.assert_close(found.change, expected.change, atol=1e-5, rtol=1e-5)


def test_regression_with_a_loss_of_ones_own():
    (inputs, _), (x, _) = tasks()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    source, target = (inputs, inputs[:, :1]), (x, x[:, 1:2])
    loss = nn.functional.mse_loss
    result = linearised_forecast(model, source, target, lr=0.05, epochs=20, loss=loss)
    assert result.now.source_accuracy is result.accuracy_change is None
    assert result.after.target_loss < result.now.target_loss
    assert result.summary()["endangered"] == []
    for ask in (result.endangered, result.by_class):
        with pytest.raises(ConfigError, match="numbers, not classes"):
            ask()
    # With all directions of its outputs protected, the source cannot move.
    held = linearised_forecast(
        model, source, target, lr=0.05, loss=loss, components=len(inputs), warm_up=False
    ).protected[0]
    torch.testing.assert_close(held.outputs, result.now.outputs, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0}, "lr must be a positive number"),
        ({"epochs": 0}, "epochs must be a whole number of at least 1"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1"),
        ({"samples": 0}, "samples must be a whole number of at least 1"),
        ({"overlap_samples": 0}, "overlap_samples must be a whole number of at least 1"),
        ({"components": [0]}, "components must be"),
        ({"components": 2.5}, "components must be a whole number of at least 1, or several"),
        ({"components": "5"}, "components must be"),
        ({"epochs": 1.5}, "epochs must be a whole number"),
        ({"lr": "a"}, "lr must be a positive number"),
        (
            {"source": (torch.zeros(2, 4), torch.tensor([0, 1]))},
            r"does not take the inputs of the source, of shape \(4,\)",
        ),
        ({"basis": torch.zeros(2, 3)}, r"basis must be orthonormal rows \(K, 83\), not \(2, 3\)"),
        ({"basis": 2 * torch.eye(83)}, "basis must be orthonormal rows.*off by 3'"),
        ({"basis": torch.eye(83)[[0, 1, 0]]}, "basis must be orthonormal rows.*off by 1'"),
        ({"basis": torch.eye(83) + 0.01}, "basis must be orthonormal rows.*off by"),
        ({"basis": torch.full((1, 83), torch.nan)}, "basis must be orthonormal rows.*off by nan"),
        ({"basis": [[0.0] * 83]}, "basis must be a tensor of orthonormal rows.*not 'list'"),
        ({"basis": torch.eye(83).long()}, "basis must be a tensor of.*not torch.int64"),
        ({"basis": lambda rows: 2 * rows}, "basis must be an orthogonal projection"),
        ({"basis": lambda rows: rows, "components": 2}, "components must be none where basis"),
        ({"source_classes": range(9)}, "source_classes must be within the model's 3 outputs"),
        ({"source": (torch.zeros(0, 6), torch.zeros(0).long())}, "the source has no samples"),
        ({"source": torch.zeros(3, 6)}, "source must be a pair"),
        ({"target": (torch.zeros(4, 6), torch.zeros(3).long())}, "4 inputs and 3 labels"),
        ({"target": (torch.zeros(2, 6), torch.tensor([0, 5]))}, "labels 0 to 5, outside"),
        ({"target": (torch.zeros(2, 6), torch.zeros(2))}, "not classes: say which loss"),
        ({"target": (torch.full((2, 6), torch.nan), torch.tensor([0, 1]))}, "NaN or infinite"),
        ({"model": nn.Flatten()}, "model must be a network to be trained"),
        ({"model": nn.Linear(6, 3).requires_grad_(False)}, "of whose parameters none is trained"),
        ({"components": 2, "exclude": ["3."]}, "exclude must be the beginning of a trained"),
        ({"components": 2, "exclude": [3]}, "exclude must be the beginning of a trained"),
        ({"components": 2, "exclude": ["0.", "2."]}, "exclude must be not all of the"),
        (
            {"loss": nn.CrossEntropyLoss(reduction="none")},
            r"loss must be a function to one number, the mean loss, not 'one that returns \(2,\)'",
        ),
        (
            {"methods": {"mine": lambda g, theta: g[:3]}},
            r"each of methods must be a function that returns steps of shape \(83,\), not '?\(3,\)",
        ),
        ({"loss": lambda outputs, labels: 1.0}, "loss must be a function to one number.*float"),
    ],
)
def test_bad_input_is_one_clear_error(change, message):
    source, target = tasks()
    arguments = {"model": network(), "source": source, "target": target, "lr": 0.1} | change
    with pytest.raises((ConfigError, DataError), match=message):
        linearised_forecast(**arguments)


class Reluctant(nn.Linear):
    """A layer whose error has no message."""

    def forward(self, inputs):
        raise ValueError


def test_an_error_without_a_message_is_named_by_its_kind():
    source, target = tasks()
    with pytest.raises(ConfigError, match=r"the source, of shape .*: ValueError"):
        linearised_forecast(Reluctant(6, 3), source, target, lr=0.1)


@pytest.mark.parametrize(("m", "size"), [(300, 32), (40, 32), (30, 32), (100, 100)])
def test_a_quick_forecast_takes_as_many_steps_together(m, size):
    """Also where an epoch is not a multiple of the steps that it takes at once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 4)).double()
    known, new = ((torch.randn(n, 20).double(), torch.randint(4, (n,))) for n in (200, m))
    found = [
        linearised_forecast(model, known, new, lr=0.001, epochs=5, batch_size=size, quick=quick)
        for quick in (False, True)
    ]
    whole, quick = (float(f.change.norm()) for f in found)
    assert quick == pytest.approx(whole, rel=0.1)


@pytest.mark.parametrize("lr", [1e5, 1e10, 1e30])
def test_a_forecast_that_blows_up_is_not_to_be_trusted(lr):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 4))
    known, new = ((torch.randn(n, 20), torch.randint(4, (n,))) for n in (200, 1000))
    found = linearised_forecast(model, known, new, lr=lr)
    assert found.trust == 0
    assert not found.trusted
