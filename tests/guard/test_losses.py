"""Which loss is followed on remembered samples."""

import pytest
import torch
from torch import optim
from torch.nn.functional import cross_entropy, mse_loss

from forgetless import AGEM, EWC, GEMNT, ConfigError, Guard

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


LOSSES = {
    "labels": (lambda: mlp().double(), lambda: task(0, 6, torch.float64), cross_entropy),
    "numbers": (lambda: mlp().double(), lambda: (random(6, 12), random(6, 4)), mse_loss),
    "tokens": (
        lambda: built(language_model),
        lambda: (integers(net.V, 4, 6), integers(net.V, 4, 6, seed=1)),
        lambda out, y: -mean_likelihoods(out, y).mean(),
    ),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_the_usual_loss(kind):
    """GEM-NT's steps are orthogonal to the gradient of the loss that one would have used."""
    make, batch, loss = LOSSES[kind]
    model, (x, y) = make(), batch()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, GEMNT())
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


def test_released_heads_need_fit():
    model = seeded(mlp)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    guard = Guard(model, optimizer, AGEM(heads="released"))
    guard.end_task(task(0))
    with pytest.raises(ConfigError, match="heads='released' is for `fit` alone"):
        train(model, optimizer, task(1))
