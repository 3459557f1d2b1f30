"""Which loss is followed on remembered samples."""

from functools import partial

import pytest
import torch
from torch import nn, optim
from torch.nn.functional import cross_entropy, mse_loss

from forgetless import AGEM, EWC, GEM, GEMNT, OGD, PCAOGD, ConfigError, DataError, Guard, Joint

from ..tangent import networks as net
from ..tangent.reference import built, integers, random
from .problems import flat, mlp, seeded, task, train
from .returns import RETURNS, language_model, mean_likelihoods, rows_by_autograd


@pytest.mark.parametrize("returned", [r for r in RETURNS if r != "an object"])
def test_a_loss_of_ones_own_sample_by_sample(returned):
    """EWC's Fisher with loss= against a loop of autograd calls."""

    def loss(out, y):
        logits = (
            out
            if isinstance(out, torch.Tensor)
            else (out["logits"] if isinstance(out, dict) else out[0])
        )
        return cross_entropy(logits, y, label_smoothing=0.2)

    inner = mlp().double()
    model = net.Calls(lambda m, x: RETURNS[returned](m.inner(x)), inner=inner)
    guard = Guard(model, optim.SGD(model.parameters()), EWC(), loss=loss)
    x, y = task(0, n=7, dtype=torch.float64)
    guard.end_task((x, y))
    losses = [
        cross_entropy(inner(x[i : i + 1]), y[i : i + 1], label_smoothing=0.2) for i in range(7)
    ]
    rows = rows_by_autograd(inner, torch.stack(losses))
    fisher = guard.state_dict()["memory.fisher"]
    torch.testing.assert_close(fisher, rows.square().mean(0), rtol=1e-9, atol=1e-14)


def sequences():
    return integers(net.V, 4, 6), integers(net.V, 4, 6, seed=1)


# The model, a batch, what `output` says of it, and the loss that one would have used.
LOSSES = {
    "labels": (lambda: mlp().double(), lambda: task(0, 6, torch.float64), None, cross_entropy),
    "numbers": (lambda: mlp().double(), lambda: (random(6, 12), random(6, 4)), None, mse_loss),
    "next tokens": (
        lambda: built(language_model),
        sequences,
        "likelihood",
        lambda out, y: -mean_likelihoods(out, y).mean(),
    ),
    "labels of tokens": (
        lambda: built(language_model),
        sequences,
        "tokens",
        lambda out, y: cross_entropy(out.flatten(0, 1), y.flatten()),
    ),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_the_usual_loss(kind):
    """GEM-NT's steps are orthogonal to the gradient of the loss that one would have used."""
    make, batch, output, loss = LOSSES[kind]
    model, (x, y) = make(), batch()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, GEMNT(), output=output)
    guard.end_task((x, y))
    slope = rows_by_autograd(model, loss(model(x), y))[0]
    before = flat(model)
    model(x).square().sum().backward()
    free = torch.cat([p.grad.flatten() for p in model.parameters()])
    optimizer.step()
    expected = -0.1 * (free - slope * (slope @ free) / (slope @ slope))
    torch.testing.assert_close(flat(model) - before, expected, rtol=1e-7, atol=1e-12)


WRONG_LOSSES = {
    "no target": (torch.randn(6, 12), {}, "follows a loss: batches need a target, or give loss="),
    "labels too large": ((torch.randn(6, 12), torch.arange(6)), {}, r"labels must be in \[0, 4\)"),
    "other numbers": (
        (torch.randn(6, 12), torch.zeros(6)),
        {},
        r"no usual loss for outputs \(2, 4\) and target \(2,\) of torch.float32: give loss=",
    ),
    "not one number": (
        task(0),
        {"loss": lambda out, y: out[:, 0]},
        r"what loss= returns must be one number, not \(2,\)",
    ),
    "no tensor": (
        task(0),
        {"loss": lambda out, y: 1.0},
        "what loss= returns must be one number, not 'float'",
    ),
}


@pytest.mark.parametrize("case", WRONG_LOSSES)
@pytest.mark.parametrize("method", [AGEM(), EWC()], ids=["a-gem", "ewc"])
def test_losses_that_cannot_be_followed_are_refused_when_the_task_ends(case, method):
    batch, options, message = WRONG_LOSSES[case]
    model = mlp()
    guard = Guard(model, optim.SGD(model.parameters()), method, **options)
    if method.name == "ewc":
        message = message.replace(r"\(2,\)", r"\(\d?,?\)").replace(r"\(2, 4\)", r"\(\d+, 4\)")
    with pytest.raises(
        ConfigError, match=message if case != "not one number" else "loss|one number"
    ):
        guard.end_task(batch)
    assert guard.tasks == 0


@pytest.mark.parametrize("method", [AGEM(), EWC()], ids=["a-gem", "ewc"])
@pytest.mark.parametrize("output", [None, lambda out, y: out[:, 0, 0]])
def test_sequences_have_several_losses(output, method):
    """Of the next token, or of the label in its place: nobody can tell from their shapes."""
    model = built(language_model)
    guard = Guard(model, optim.SGD(model.parameters()), method, output=output)
    with pytest.raises(ConfigError, match=r"may be one of several: give loss=, or output='likel"):
        guard.end_task(sequences())
    assert guard.tasks == 0


@pytest.mark.parametrize("method", [OGD(), AGEM(), EWC()], ids=["ogd", "a-gem", "ewc"])
@pytest.mark.parametrize(
    ("output", "labels"),
    [
        ("likelihood", torch.full((4, 6), -100)),
        ("likelihood", torch.full((4, 6), -100).index_fill(1, torch.tensor([0]), 2)),
        ("tokens", torch.full((4, 6), -100)),
    ],
)
def test_sequences_without_labels_protect_nothing(output, labels, method):
    model = built(language_model)
    guard = Guard(model, optim.SGD(model.parameters()), method, output=output)
    with pytest.raises(DataError, match="to remember: all are -100, or none follows"):
        guard.end_task((sequences()[0], labels))
    guard.end_task((sequences()[0], labels.index_fill(1, torch.tensor([3]), 1)))
    assert guard.tasks == 1


def test_the_first_samples_need_no_labels():
    """Nor does a part of the samples, such as those that show how large features are."""
    model = built(language_model)
    x, y = sequences()
    y[:2] = -100
    x, y = x.repeat(3, 1), torch.cat([torch.full_like(y, -100), y, y])
    optimizer = optim.SGD(model.parameters())
    guard = Guard(model, optimizer, OGD(), output="tokens", budget="1MB")
    guard.end_task((x, y))
    assert guard.memory_report().directions == 2


@pytest.mark.parametrize("method", [AGEM(), EWC()], ids=["a-gem", "ewc"])
def test_a_loss_of_ones_own_may_be_of_anything(method):
    model = built(language_model)
    loss = lambda out, y: (out.mean((1, 2)) - y).square().mean()  # noqa: E731
    optimizer = optim.SGD(model.parameters())
    guard = Guard(model, optimizer, method, output="likelihood", loss=loss)
    guard.end_task((sequences()[0], random(4)))
    assert guard.tasks == 1


@pytest.mark.parametrize("method", [OGD(), AGEM(), EWC()], ids=["ogd", "a-gem", "ewc"])
def test_targets_that_are_no_sequences(method):
    model = built(language_model)
    guard = Guard(model, optim.SGD(model.parameters()), method, output="likelihood")
    for batch in ((sequences()[0], integers(net.V, 4)), sequences()[0]):
        with pytest.raises(ConfigError, match="target"):
            guard.end_task(batch)


METHODS = [PCAOGD(5), OGD(), AGEM(), GEM(), GEMNT(), EWC(), Joint()]


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_a_sample_that_is_not_finite_is_refused(method, broken):
    """It would take the protection of its task, or all weights, with it."""
    model = mlp()
    guard = Guard(model, optim.SGD(model.parameters()), method)
    x, y = task(0, n=90)
    x[70, 3] = broken
    with pytest.raises(DataError, match="NaN or infinite"):
        guard.end_task((x, y))
    assert guard.tasks == 0


@pytest.mark.parametrize("method", [AGEM(), GEM(), GEMNT()], ids=lambda m: m.name)
def test_embeddings_with_sparse_gradients(method):
    """Their updates are projected as those of dense ones are."""
    x, y = integers(7, 8, 3), integers(4, 8, seed=1)
    steps = []

    def network(sparse: bool) -> nn.Module:
        return nn.Sequential(
            nn.Embedding(7, 5, sparse=sparse), nn.Flatten(), nn.Linear(15, 4)
        )  # fmt: skip

    for sparse in (False, True):
        model = seeded(partial(network, sparse))
        optimizer = optim.SGD(model.parameters(), lr=0.5)
        guard = Guard(model, optimizer, method)
        guard.end_task((x, y))
        cross_entropy(model(x), (y + 1) % 4).backward()
        optimizer.step()
        assert model[0].sparse is sparse
        assert guard.stats().removed > 0.05
        steps.append(flat(model))
    torch.testing.assert_close(*steps, rtol=0, atol=1e-6)


def test_released_heads_need_fit():
    model = seeded(mlp)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, AGEM(heads="released"))
    guard.end_task(task(0))
    with pytest.raises(ConfigError, match="heads='released' is for `fit` alone"):
        train(model, optimizer, task(1))
