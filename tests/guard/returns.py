"""Models that return different things, and their gradients number by number."""

from collections import namedtuple
from types import SimpleNamespace

import torch
from torch import nn

from ..tangent import networks as net


def rows_by_autograd(model, scalars) -> torch.Tensor:
    """One row for each number, by autograd."""
    rows = []
    for scalar in scalars.reshape(-1):
        grads = torch.autograd.grad(
            scalar, list(model.parameters()), retain_graph=True, allow_unused=True
        )
        pairs = zip(grads, model.parameters(), strict=True)
        rows.append(
            torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])
        )
    return torch.stack(rows)


def language_model():
    def run(m, t):
        x = m.tokens(t) + m.places(torch.arange(t.shape[1]))
        return m.out(torch.tanh(m.mix(x.cumsum(1))))

    return net.Calls(
        run,
        tokens=nn.Embedding(net.V, net.D),
        places=nn.Embedding(6, net.D),
        mix=nn.Linear(net.D, net.D),
        out=nn.Linear(net.D, net.V),
    )


def mean_likelihoods(logits, tokens):
    """By a loop over sequences and positions."""
    means = []
    for of_one, text in zip(logits, tokens, strict=True):
        each = [
            of_one[t].log_softmax(-1)[text[t + 1]] for t in range(len(text) - 1) if text[t + 1] >= 0
        ]
        means.append(torch.stack(each).mean() if each else of_one.sum() * 0)
    return torch.stack(means)


Outputs = namedtuple("Outputs", ["logits", "extra"])


class Result(dict):
    """As transformers' ModelOutput: a dict whose entries are attributes too."""

    __getattr__ = dict.__getitem__


RETURNS = {
    "a tensor": lambda out: out,
    "a tuple": lambda out: (out, out.sum()),
    "a list": lambda out: [out],
    "a named tuple": lambda out: Outputs(out, None),
    "a dict": lambda out: {"hidden": out * 2, "logits": out},
    "a model output": lambda out: Result(loss=None, logits=out),
    "an object": lambda out: SimpleNamespace(logits=out),
}
