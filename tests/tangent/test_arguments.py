"""What cannot be done is refused in one sentence that says what came and what is accepted."""

import numpy as np
import pytest
import torch
from torch import nn

from forgetless.support.validation import ConfigError, DataError
from forgetless.tangent import features, tangent_features
from forgetless.training.models import MLP, LeNet

from . import networks as net
from .reference import built, integers, random

X, Y = random(5, 6), integers(4, 5)


def model():
    return built(lambda: MLP(6, 5, 4))


def of(module, **kwargs):
    return tangent_features(module, **{"x": X, "y": Y, **kwargs})


def with_nan():
    m = model()
    m.head.bias.data[1] = torch.nan
    return m


def frozen():
    return model().requires_grad_(False)


def batch_norm(**options):
    return nn.Sequential(nn.BatchNorm1d(6, **options), nn.Linear(6, 4)).double()


def plain(run):
    return net.Calls(lambda m, x: run(m.layer(x)), layer=nn.Linear(6, 4).double())


REFUSED = {
    "not a module": (lambda: of(lambda x: x), "torch.nn.Module, not function"),
    "no parameters": (lambda: of(nn.ReLU()), "has none"),
    "nothing requires a gradient": (lambda: of(frozen()), "has none"),
    "unknown name": (lambda: of(model(), params=["hed.weight"]), "not 'hed.weight'"),
    "part of a name": (lambda: of(model(), params="bod"), "not 'bod'"),
    "a stranger's parameter": (
        lambda: of(model(), params=[nn.Parameter(torch.zeros(2))]), "(2,) not of this model",
    ),
    "another model": (lambda: of(model(), params=nn.Linear(2, 3)), "not of this model"),
    "numbers as parameters": (lambda: of(model(), params=[3]), "names or parameters, not int"),
    "an empty choice": (lambda: of(model(), params=[]), "is empty"),
    "an empty module": (lambda: of(model(), params=nn.ReLU()), "is empty"),
    "no samples": (lambda: of(model(), x=X[:0], y=Y[:0]), "at least one sample"),
    "no inputs": (lambda: of(model(), x=()), "at least one tensor"),
    "an array": (lambda: of(model(), x=np.zeros((5, 6))), "not ndarray"),
    "an array in a tuple": (lambda: of(model(), x=(np.zeros((5, 6)),)), "ndarray"),
    "a number": (lambda: of(model(), x=torch.tensor(1.0)), "leading dimension of samples"),
    "uneven inputs": (lambda: of(model(), x=(X, X[:3])), "equally many samples"),
    "inputs that do not fit": (lambda: of(model(), x=X[:, :3]), "does not take these inputs"),
    "inputs of another dtype": (lambda: of(model(), x=X.float()), "does not take these inputs"),
    "too many arguments": (lambda: of(model(), x=(X, X)), "does not take these inputs"),
    "labels out of range": (lambda: of(model(), y=Y + 2), "in [0, 4)"),
    "negative labels": (lambda: of(model(), y=Y - 1), "in [0, 4)"),
    "too few labels": (lambda: of(model(), y=Y[:3]), "shape (5,)"),
    "one-hot labels": (lambda: of(model(), y=torch.eye(5).long()), "shape (5,)"),
    "labels of floats": (lambda: of(model(), y=Y.double()), "integer dtype"),
    "labels of bools": (lambda: of(model(), y=Y > 1), "integer dtype"),
    "a list of labels": (lambda: of(model(), y=[0] * 5), "not list"),
    "labels for one output": (lambda: of(plain(lambda z: z[:, 0])), "outputs (n,)"),
    "chunks of nothing": (lambda: of(model(), chunk=0), "chunk must be None or an integer"),
    "batch norm in training": (lambda: of(batch_norm()), "call model.eval()"),
    "batch norm without statistics": (
        lambda: of(batch_norm(track_running_stats=False).eval()), "depend on the batch",
    ),
    "lenet in training": (
        lambda: of(LeNet((1, 8, 8), 7, 4).double(), x=random(5, 1, 8, 8)), "call model.eval()",
    ),
    "dropout in training": (
        lambda: of(nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 4)).double()), "random",
    ),
    "dropout by function": (
        lambda: of(plain(lambda z: nn.functional.dropout(z, 0.5))), "outputs are random",
    ),
    "a mean over the batch": (lambda: of(plain(lambda z: z - z.mean(0))), "depend on the batch"),
    "attention among samples": (lambda: of(plain(lambda z: z @ z.T @ z)), "depend on the batch"),
    "no sample dimension": (lambda: of(plain(lambda z: z.sum(0)[:3])), "of shape (n, C) or (n,)"),
    "outputs of positions": (lambda: of(plain(lambda z: z[:, None])), "of shape (n, C) or (n,)"),
    "several outputs": (lambda: of(plain(lambda z: (z, z))), "one tensor, not tuple"),
    "whole numbers as outputs": (lambda: of(plain(lambda z: z.long())), "real numbers"),
    "complex parameters": (
        lambda: of(nn.Linear(6, 4, dtype=torch.complex128), x=X.cdouble()), "of real numbers",
    ),
}  # fmt: skip

NOT_FINITE = {
    "weights": (lambda: of(with_nan()), "head.bias must be finite"),
    "inputs": (lambda: of(model(), x=X / 0), "x must be finite"),
    "outputs": (lambda: of(plain(lambda z: z / 0)), "outputs are NaN or infinite"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, sentence = REFUSED[name]
    with pytest.raises(ConfigError) as error:
        call()
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", NOT_FINITE)
def test_not_finite(name):
    call, sentence = NOT_FINITE[name]
    with pytest.raises(DataError, match=sentence):
        call()


PRODUCTS = {
    "v too short": (lambda phi: phi @ torch.zeros(3), "v in phi @ v"),
    "v of three dimensions": (lambda phi: phi @ torch.zeros(phi.shape[1], 1, 1), "v in phi @ v"),
    "v a list": (lambda phi: phi @ [1.0], "needs a tensor, not list"),
    "u too long": (lambda phi: phi.T @ torch.zeros(6), "u in phi.T @ u"),
    "weights turned round": (lambda phi: phi.combine(torch.zeros(5, 2)), "phi.combine"),
    "no components": (lambda phi: phi.top(0), "at least 1"),
    "a share of one": (lambda phi: phi.top(1.0), "a share in (0, 1)"),
    "a check": (lambda phi: phi.top(True), "components"),
    "other parameters": (
        lambda phi: phi.cross_gram(of(model(), params="head")), "features of the same parameters",
    ),
    "other sizes": (
        lambda phi: phi.cross_gram(of(built(lambda: MLP(6, 3, 4)))), "of the same parameters",
    ),
    "a matrix": (lambda phi: phi.cross_gram(torch.zeros(3, 3)), "TangentFeatures, not Tensor"),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_that_do_not_fit(name):
    call, sentence = PRODUCTS[name]
    with pytest.raises(ConfigError) as error:
        call(of(model()))
    assert sentence in str(error.value)


def test_what_cannot_fit_into_memory_is_not_tried(monkeypatch):
    phi = of(model())
    monkeypatch.setattr(features, "total_memory", lambda device: 8 * 5 * 5 - 1)
    with pytest.raises(ConfigError, match="200 bytes"):
        phi.gram()
    with pytest.raises(ConfigError, match="use phi @ v"):
        phi.dense()
    monkeypatch.setattr(features, "total_memory", lambda device: 8 * 5 * 5)
    phi.gram()


def test_modes_and_hooks_survive_a_refusal():
    m = plain(lambda z: z - z.mean(0)).train()
    with pytest.raises(ConfigError):
        of(m)
    assert m.training
    assert not m.layer._forward_hooks
