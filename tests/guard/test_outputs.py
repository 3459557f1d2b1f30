"""Which numbers of a model's outputs are protected, and which loss is followed."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn, optim

from forgetless import EWC, GEMNT, OGD, PCAOGD, ConfigError, Guard

from ..tangent import networks as net
from ..tangent.reference import built, integers, random
from .problems import basis_of, flat, mlp, task, train
from .returns import RETURNS, language_model, mean_likelihoods, rows_by_autograd


def protected(guard) -> torch.Tensor:
    return guard.state_dict()["memory.directions"].double()


def assert_spans(found: torch.Tensor, rows: torch.Tensor) -> None:
    basis = basis_of(rows)
    assert len(found) == len(basis)
    torch.testing.assert_close(found @ basis.T @ basis, found, rtol=0, atol=1e-6)


def remembered(model, batch, **options):
    guard = Guard(model, optim.SGD(model.parameters()), OGD(), **options)
    guard.end_task(batch)
    return protected(guard)


def test_the_true_class_by_name_and_by_default():
    model = mlp().double()
    x, y = task(0, n=8, dtype=torch.float64)
    rows = rows_by_autograd(model, model(x)[torch.arange(8), y])
    for options in ({}, {"output": "class"}):
        for labels in (y, y.int(), y.to(torch.uint8)):
            assert_spans(remembered(copy.deepcopy(model), (x, labels), **options), rows)


@pytest.mark.parametrize("target", ["real", "none"])
@pytest.mark.parametrize("options", [{}, {"output": "regression"}], ids=["default", "by name"])
def test_regression_protects_every_number(target, options):
    model = mlp().double()
    x = random(4, 12)
    batch = (x, random(4, 4)) if target == "real" else x
    assert_spans(remembered(model, batch, **options), rows_by_autograd(model, model(x)))


def test_regression_of_one_number_without_a_dimension_of_its_own():
    model = built(lambda: net.Calls(lambda m, x: m.layer(x)[:, 0], layer=nn.Linear(5, 1)))
    x = random(3, 5)
    assert_spans(remembered(model, (x, random(3))), rows_by_autograd(model, model(x)))


def test_labels_beside_their_logits_some_left_out():
    model = built(language_model)
    tokens, labels = integers(net.V, 5, 6), integers(net.V, 5, 6, seed=1)
    labels[0, :4] = -100
    kept = labels.clamp_min(0).unsqueeze(-1)
    each = model(tokens).log_softmax(-1).gather(-1, kept).squeeze(-1)
    means = [of_one[one >= 0].mean() for of_one, one in zip(each, labels, strict=True)]
    found = remembered(model, (tokens, labels), output="tokens")
    assert_spans(found, rows_by_autograd(model, torch.stack(means)))


def test_an_encoder_decoder_has_no_next_tokens():
    model = built(language_model)
    model.config = SimpleNamespace(is_encoder_decoder=True)
    with pytest.raises(ConfigError, match="output must be 'tokens' for an encoder-decoder"):
        Guard(model, optim.SGD(model.parameters()), OGD(), output="likelihood")


def test_likelihood_of_sequences_some_tokens_left_out():
    model = built(language_model)
    tokens = integers(net.V, 5, 6)
    labels = tokens.clone()
    labels[0, :4] = -100
    labels[1, 3:] = -100
    labels[2] = -100
    batch = {"t": tokens, "labels": labels}
    found = remembered(model, batch, output="likelihood")
    rows = rows_by_autograd(model, mean_likelihoods(model(tokens), labels))
    assert not rows[2].any()
    assert_spans(found, rows[[0, 1, 3, 4]])


def test_sequences_of_different_lengths_in_different_batches():
    model = built(language_model)
    batches = [(t, t) for t in (integers(net.V, 3, length, seed=length) for length in (6, 4, 6))]
    rows = torch.cat([rows_by_autograd(model, mean_likelihoods(model(t), t)) for t, _ in batches])
    assert_spans(remembered(model, batches, output="likelihood"), rows)


def test_functions_of_outputs_and_target():
    model = mlp().double()
    x, y = task(0, n=6, dtype=torch.float64)
    margin = lambda out, y: out.gather(1, y[:, None])[:, 0] - out.mean(1)  # noqa: E731
    assert_spans(
        remembered(model, (x, y), output=margin), rows_by_autograd(model, margin(model(x), y))
    )
    model = mlp().double()
    pair = lambda out, y: out[:, :2] ** 2  # noqa: E731
    assert_spans(remembered(model, (x, y), output=pair), rows_by_autograd(model, pair(model(x), y)))
    model = mlp().double()
    alone = lambda out: out.exp().sum(1)  # noqa: E731
    assert_spans(remembered(model, x, output=alone), rows_by_autograd(model, alone(model(x))))


def test_several_numbers_a_sample_with_pca_and_factors():
    model = mlp().double()
    x = random(5, 12)
    _, values, vectors = torch.linalg.svd(rows_by_autograd(model, model(x)), full_matrices=False)
    optimizer = optim.Adam(model.parameters(), lr=1e-2)
    guard = Guard(model, optimizer, PCAOGD(6), storage="factored")
    guard.end_task(x)
    before = flat(model)
    train(model, optimizer, task(1, dtype=torch.float64))
    delta = flat(model) - before
    assert float((vectors[:6] @ delta).norm() / delta.norm()) < 1e-10
    share = float(values[:6].square().sum() / values.square().sum())
    assert guard.memory_report().share == pytest.approx(share)


@pytest.mark.parametrize("returned", RETURNS)
@pytest.mark.parametrize("method", [OGD(6), EWC(), GEMNT(6)], ids=lambda m: m.name)
def test_models_that_return_more_than_a_tensor(returned, method):
    """The same memory as of the model that returns the logits alone."""
    found = []
    for wrap in (RETURNS["a tensor"], RETURNS[returned]):
        inner = mlp().double()
        model = net.Calls(lambda m, x, wrap=wrap: wrap(m.inner(x)), inner=inner)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        guard = Guard(model, optimizer, method)
        guard.end_task(task(0, dtype=torch.float64))
        train(inner, optimizer, task(1, dtype=torch.float64), steps=3)
        found.append(flat(model))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)
    assert not torch.allclose(found[0], flat(mlp()))


WRONG = {
    "no target": ("class", None, r"target of output='class' must be labels \(n,\).*, not none"),
    "real labels": ("class", torch.zeros(6), "must be labels .* of an integer type"),
    "labels of rank 2": (
        "class",
        torch.zeros(6, 2).long(),
        r"not \(6, 2\) of torch.int64, for outputs \(n, 4\)",
    ),
    "a late label too large": (
        None,
        torch.tensor([0, 1, 2, 3, 0, 9]),
        r"labels must be in \[0, 4\), as the outputs, not '0 to 9'",
    ),
    "a negative label": (None, torch.tensor([0, 1, 2, 3, 0, -1]), r"labels must be in \[0, 4\)"),
    "tokens for no sequence": ("likelihood", torch.zeros(6, 3).long(), "must be tokens"),
    "labels of rank 2, nothing said": (
        None,
        torch.zeros(6, 2).long(),
        "say with output= what to protect, 'likelihood' if",
    ),
    "a sum": (
        lambda out, y: out.sum(),
        torch.zeros(6).long(),
        r"what the function output= returns must be real numbers \(n,\) or \(n, K\) for n samples, "
        r"not 'a tensor \(\)",
    ),
    "of other length": (lambda out, y: out[:1, 0], torch.zeros(6).long(), "for n samples, not"),
    "whole numbers": (lambda out, y: out.argmax(1), torch.zeros(6).long(), "real numbers"),
    "no tensor": (lambda out, y: 3.0, torch.zeros(6).long(), "not 'a float'"),
    "fails": (
        lambda out, y: out[:, 7],
        torch.zeros(6).long(),
        "function output= fails on the model's outputs and the target: index 7 is out",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_targets_and_functions_that_do_not_fit(case):
    output, target, message = WRONG[case]
    model = mlp()
    guard = Guard(model, optim.SGD(model.parameters()), OGD(), output=output)
    batch = torch.randn(6, 12) if target is None else (torch.randn(6, 12), target)
    with pytest.raises(ConfigError, match=message) as caught:
        guard.end_task(batch)
    assert "\n" not in str(caught.value)
    assert guard.tasks == 0


def test_a_model_whose_outputs_cannot_be_read():
    model = net.Calls(lambda m, x: {"mean": m.layer(x), "scale": 1}, layer=nn.Linear(12, 4))
    guard = Guard(model, optim.SGD(model.parameters()), OGD())
    message = "the model returns a dict of mean, scale: say with output= which numbers of it"
    with pytest.raises(ConfigError, match=message):
        guard.end_task(task(0))
    told = Guard(
        model, optim.SGD(model.parameters()), OGD(5), output=lambda out, y: out["mean"][:, 0]
    )
    told.end_task(task(0))
    assert told.memory_report().directions == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"output": "logits"},
            "output must be 'class', 'regression', 'likelihood', 'tokens' or a function, not",
        ),
        ({"output": 3}, "output must be 'class'"),
        ({"loss": "mse"}, "loss must be a function or None, not 'mse'"),
        ({"unpack": ("x", "y")}, "unpack must be a function or None"),
    ],
)
def test_options_that_cannot_be_are_refused_before_any_training(options, message):
    model = mlp()
    with pytest.raises(ConfigError, match=message):
        Guard(model, optim.SGD(model.parameters()), OGD(), **options)
