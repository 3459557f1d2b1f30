"""Drift and forgetting of a network, between two states of it: no linearisation here."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from forgetless.linalg import float64
from forgetless.support.validation import require, whole
from forgetless.tangent import evaluation
from forgetless.tangent.evaluation import call_with, eval_mode
from forgetless.theory.overlap import check_finite


def true_class(outputs: Tensor, y: Tensor | None = None) -> Tensor:
    """f(X): each sample's output for its own class, (n,).

    Arguments:
        outputs: (n, C), or (n,) for a model with one output.
        y: labels, (n,) integers from 0 to C − 1; None for outputs (n,) or (n, 1).
    """
    fits = outputs.dim() in (1, 2) and outputs.numel() > 0
    require(fits, "outputs", tuple(outputs.shape), "of shape (n, C) or (n,), n at least 1")
    check_finite("outputs", outputs)
    if y is None:
        single = outputs.dim() == 1 or outputs.shape[1] == 1
        require(single, "y", None, f"the labels of outputs of shape {tuple(outputs.shape)}")
        return outputs.flatten()
    require(outputs.dim() == 2, "outputs", tuple(outputs.shape), "of shape (n, C) with labels")
    n, classes = outputs.shape
    whole = not y.is_floating_point() and y.dtype != torch.bool
    require(whole and y.shape == (n,), "y", f"{y.dtype} {tuple(y.shape)}", f"integers ({n},)")
    low, high = int(y.min()), int(y.max())
    require(low >= 0 and high < classes, "y", (low, high), f"labels from 0 to {classes - 1}")
    return evaluation.true_class(outputs, y)


def drift(before: Tensor, after: Tensor, y: Tensor | None = None) -> Tensor:
    """δ^{s→t}(X) = f_t(X) − f_s(X) on the true-class outputs (definition "drift"), (n,).

    Arguments:
        before, after: outputs after task s and after task t on the same samples, (n, C) or (n,).
        y: labels, (n,), for outputs (n, C).

    Example:
        >>> before, after = torch.zeros(2, 3), torch.tensor([[1.0, 2, 3], [4, 5, 6]])
        >>> drift(before, after, torch.tensor([0, 2]))
        tensor([1., 6.], dtype=torch.float64)
    """
    shape = tuple(after.shape)
    require(before.shape == after.shape, "after", shape, f"of shape {tuple(before.shape)}")
    return float64(true_class(after, y)) - float64(true_class(before, y))


def squared_drift(before: Tensor, after: Tensor, y: Tensor | None = None) -> float:
    """Δ^{s→t}(X) = ‖δ^{s→t}(X)‖² = Σ_x (f_t(x) − f_s(x))² (definition "catastrophic forgetting").

    A sum over samples, not a mean, in which improvements count as well.

    Arguments:
        before, after, y: as for `drift`.
    """
    return float(drift(before, after, y).detach().square().sum())


def model_drift(
    model: nn.Module,
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    x: Tensor,
    y: Tensor | None = None,
    *,
    chunk: int = 1024,
) -> Tensor:
    """δ^{s→t}(X) of a network between two of its states, (n,).

    Evaluated in eval mode; the network's own parameters, buffers and modes do not change.

    Arguments:
        model: the network of the states.
        before, after: its `state_dict` after task s and after task t.
        x: samples, (n, *).
        y: labels, (n,), for a model with more than one output.
        chunk: samples that go through the network at once.
    """
    require(len(x) > 0, "x", "no samples", "one sample or more")
    whole(1).check("chunk", chunk)
    expected = {(key, value.shape) for key, value in model.state_dict().items()}
    for name, state in (("before", before), ("after", after)):
        differing = expected ^ {(key, value.shape) for key, value in state.items()}
        odd = sorted({key for key, _ in differing})
        require(not odd, name, f"one that differs in {odd[:3]}", "a state_dict of the model")
    with eval_mode(model):
        outputs = [_outputs(model, state, x, chunk) for state in (before, after)]
    return drift(outputs[0], outputs[1], y)


def _outputs(model: nn.Module, state: Mapping[str, Tensor], x: Tensor, chunk: int) -> Tensor:
    with torch.no_grad():
        return torch.cat([call_with(model, state, (some,)) for some in x.split(chunk)])
