"""Which numbers of a model's outputs are protected, and which loss methods follow."""

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn, optim
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

import forgetless
from forgetless import AGEM, EWC, GEM, GEMNT, OGD, PCAOGD, ConfigError, DataError, Guard, Joint
from forgetless.guard.batches.outputs import Loss, chosen_output

from ...tangent import networks as net
from ...tangent.reference import built, integers, random
from ..problems import basis_of, flat, mlp, seeded, task, train
from ..returns import RETURNS, language_model, mean_likelihoods, rows_by_autograd


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
        r"labels must be in \[0, 4\), as the model has 4 outputs, not '0 to 9'",
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


def end_task_fails(model, batch, method, message, **options) -> None:
    guard = Guard(model, optim.SGD(model.parameters()), method, **options)
    with pytest.raises(ConfigError, match=message) as caught:
        guard.end_task(batch)
    assert "\n" not in str(caught.value)
    assert guard.tasks == 0


LABELS = torch.arange(30) % 4
ONE_HOT = torch.eye(4)[LABELS]
# The labels, the classes, what the message says, and options or labels that do what it says.
MISTAKEN = {
    "a column": (
        LABELS[:, None],
        4,
        r"shape \(n, 1\), and classes are \(n,\): unpack=lambda batch: .*squeeze\(1\)",
        {"unpack": lambda batch: (batch[0], batch[1].squeeze(1))},
    ),
    "one-hot numbers": (
        ONE_HOT,
        4,
        r"target \(n, 4\) is one-hot, .* unpack=lambda .*batch\[1\].argmax\(1\)\)",
        {"unpack": lambda batch: (batch[0], batch[1].argmax(1))},
    ),
    "one-hot integers": (
        ONE_HOT.long(),
        4,
        "is one-hot",
        {"unpack": lambda batch: (batch[0], batch[1].argmax(1))},
    ),
    "one logit": (
        LABELS % 2,
        1,
        "labels of torch.int64 need a logit for each class, .* output='regression', .* loss=",
        {
            "output": "regression",
            "loss": lambda out, y: binary_cross_entropy_with_logits(out, y.view_as(out).float()),
        },
    ),
    "one logit, a column": (
        LABELS[:, None] % 2 == 1,
        1,
        "labels of torch.bool need a logit for each class",
        {
            "output": "regression",
            "loss": lambda out, y: binary_cross_entropy_with_logits(out, y.view_as(out).float()),
        },
    ),
}


def test_classes_for_a_model_of_one_number_without_a_dimension_of_its_own():
    model = seeded(lambda: nn.Sequential(nn.Linear(12, 1), nn.Flatten(0)))
    message = "labels of torch.int64 need a logit for each class, .* output='regression'"
    for method in (OGD(20), AGEM(20)):
        end_task_fails(model, (torch.randn(30, 12), LABELS % 2), method, message)


@pytest.mark.parametrize("case", MISTAKEN)
@pytest.mark.parametrize("method", [OGD(20), AGEM(20), EWC()], ids=lambda m: m.name)
def test_labels_of_another_kind_are_explained(case, method):
    labels, classes, message, mended = MISTAKEN[case]
    model, batch = seeded(lambda: nn.Linear(12, classes)), (torch.randn(30, 12), labels)
    end_task_fails(model, batch, method, message)
    guard = Guard(model, optim.SGD(model.parameters()), method, **mended)
    guard.end_task(batch)
    assert guard.tasks == 1


def test_one_hot_numbers_may_be_meant():
    model = mlp().double()
    x, target = random(4, 12), ONE_HOT[:4].double()
    found = remembered(model, (x, target), output="regression")
    assert_spans(found, rows_by_autograd(model, model(x)))


@pytest.mark.parametrize("shape", [(30,), (30, 1), (30, 2)])
def test_the_loss_of_binary_classifiers_is_asked_for(shape):
    several = shape[1] if shape[1:] else 1
    model = seeded(lambda: nn.Linear(12, several))
    bits = LABELS.unsqueeze(1) >> torch.arange(several) & 1
    batch = torch.randn(30, 12), bits.float().view(shape)
    end_task_fails(model, batch, AGEM(20), "loss may be binary cross-entropy or the squared error")
    told = Guard(
        model,
        optim.SGD(model.parameters()),
        AGEM(20),
        loss=lambda out, y: binary_cross_entropy_with_logits(out, y.view_as(out)),
    )
    told.end_task(batch)
    # The logits are protected either way, and the drift has no loss that may be another.
    assert len(remembered(model, batch)) == 13 * several
    guard = Guard(model, optim.SGD(model.parameters()), OGD())
    guard.end_task(batch)
    assert guard.drift().tasks[0].loss is None


RETURNED_LOSSES = {
    "a number": lambda z: z.mean(),
    "a tuple": lambda z: (z.mean(),),
    "a loss before the logits": lambda z: (z.mean(), z),
    "a dict": lambda z: {"loss": z.mean()},
    "an object": lambda z: SimpleNamespace(logits=z.mean()),
}


@pytest.mark.parametrize("returned", RETURNED_LOSSES)
def test_a_model_that_returns_its_loss(returned):
    wrap = RETURNED_LOSSES[returned]
    model = net.Calls(lambda m, x: wrap(m.layer(x)), layer=nn.Linear(12, 4))
    message = "returns one number for a whole batch, such as its loss.* output=, .* unpack="
    for method, batch in ((OGD(20), task(0)), (OGD(20), task(0)[0]), (AGEM(20), task(0))):
        end_task_fails(model, batch, method, message)


@pytest.mark.parametrize("method", [OGD(20), AGEM(20), EWC()], ids=lambda m: m.name)
def test_labels_out_of_range(method):
    message = r"labels must be in \[0, 4\), as the model has 4 outputs, not '1 to 4'"
    end_task_fails(mlp(), (torch.randn(30, 12), LABELS + 1), method, message)


def transformer(name: str, generates: bool = False, encoder_decoder: bool = False) -> nn.Module:
    """A model with a class and a configuration like one of transformers."""
    config = SimpleNamespace(is_encoder_decoder=encoder_decoder)
    kind = type(name, (nn.Linear,), {"config": config, "can_generate": lambda self: generates})
    return kind(2, 3)


@pytest.mark.parametrize(
    ("model", "output"),
    [
        (transformer("LlamaForCausalLM", generates=True), "likelihood"),
        (transformer("T5ForConditionalGeneration", True, encoder_decoder=True), "tokens"),
        (transformer("BertForMaskedLM"), "tokens"),
        (transformer("BertForTokenClassification"), "tokens"),
        (transformer("BertForSequenceClassification"), None),
        (nn.Linear(2, 3), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_the_output_of_models_of_transformers(model, output):
    assert chosen_output(None, model) == output
    assert chosen_output("class", model) == "class"
    adapted = nn.Identity()  # as peft wraps it
    adapted.get_base_model = lambda: model
    assert chosen_output(None, adapted) == output


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
    guard = Guard(model, optim.SGD(model.parameters()), EWC(strength=1.0), loss=loss)
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
    with pytest.raises(DataError, match="to protect: all are -100, or none follows"):
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
    with pytest.raises(ConfigError, match="is for `fit` alone"):
        train(model, optimizer, task(1))


@pytest.mark.parametrize("method", [EWC(), AGEM(), Joint()], ids=lambda m: m.name)
@pytest.mark.parametrize("place", [0, 8])
def test_a_label_too_large_is_named_wherever_it_is(method, place):
    model, labels = nn.Linear(5, 3), torch.randint(0, 3, (9,))
    labels[place] = 3
    guard = forgetless.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), method)
    with pytest.raises(ConfigError, match=r"labels must be in \[0, 3\)"):
        guard.end_task((torch.randn(9, 5), labels))


def test_the_loss_of_a_constant_answer():
    """The least that the same outputs for all samples can have, found by descent."""
    labels = torch.tensor([0, 0, 1, 2, 0])
    tokens = torch.tensor([[3, 0, 1, -100], [3, 1, 1, 2]])
    numbers = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    cases = [(None, labels, (5, 3)), ("likelihood", tokens, (2, 4, 4)), (None, numbers, (6, 2))]
    for output, target, shape in cases:
        constant = torch.zeros(shape[-1], requires_grad=True)
        optimizer = torch.optim.LBFGS([constant], max_iter=100)
        loss = Loss(None, output)

        def closure(constant=constant, optimizer=optimizer, target=target, shape=shape, loss=loss):
            optimizer.zero_grad()
            outputs = constant.expand(shape)
            if target.dim() == 2 and not target.is_floating_point():  # all labels alike
                counted = target[:, 1:] != -100
                outputs, some = outputs[:, 1:][counted], target[:, 1:][counted]
                value = torch.nn.functional.cross_entropy(outputs, some)
            else:
                value = loss.mean(outputs, target)
            value.backward()
            return value

        for _ in range(3):
            optimizer.step(closure)
        halves = [target[:2], target[2:]]
        assert loss.of_constant(halves) == pytest.approx(closure().item(), rel=1e-4)
    assert Loss(lambda z, y: z.sum(), None).of_constant([labels]) is None
    assert Loss(None, None).of_constant([None]) is None
