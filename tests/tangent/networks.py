"""One small network for every rule and for every way around the rules."""

import torch
from torch import nn
from torch.nn import functional as F

V, D = 11, 6  # tokens, width


class Calls(nn.Module):
    """A network from a function of its modules and its inputs."""

    def __init__(self, run, **modules) -> None:
        super().__init__()
        self.run = run
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *args, **kwargs):
        return self.run(self, *args, **kwargs)


def convolutional(first, after: int) -> nn.Module:
    return nn.Sequential(first, nn.Tanh(), nn.Flatten(), nn.Linear(after, 3))


def sequence_linear():
    return Calls(
        lambda m, x: m.last(torch.tanh(m.along(x)).flatten(1)),
        along=nn.Linear(2, 3),
        last=nn.Linear(15, 4),
    )


def flattened_linear():
    """Samples and positions in one dimension, sample by sample."""
    return Calls(
        lambda m, x: m.last(torch.tanh(m.along(x.flatten(0, 1))).view(len(x), -1)),
        along=nn.Linear(2, 3),
        last=nn.Linear(15, 4),
    )


def positions_first():
    """Samples in the second dimension, and flattened position by position."""
    return Calls(
        lambda m, x: m.last(torch.tanh(m.two(m.one(x.mT.movedim(0, 1)))).mean(0)),
        one=nn.Linear(5, 4),
        two=Calls(
            lambda m, x: m.layer(x.flatten(0, 1)).view(*x.shape[:2], -1), layer=nn.Linear(4, 4)
        ),
        last=nn.Linear(4, 3),
    )


def recurrence():
    def run(m, x):
        h = m.first(x)
        for _ in range(3):
            h = torch.tanh(m.again(h) + m.first(x))
        return m.last(h)

    return Calls(run, first=nn.Linear(4, 5), again=nn.Linear(5, 5), last=nn.Linear(5, 3))


def tied_linear():
    model = Calls(
        lambda m, x: m.two(torch.tanh(m.one(x))), one=nn.Linear(5, 5), two=nn.Linear(5, 5)
    )
    model.two.weight = model.one.weight
    return model


def tied_by_hand():
    return Calls(lambda m, x: torch.tanh(m.layer(x)) @ m.layer.weight, layer=nn.Linear(5, 5))


def hardly_used_again():
    """A weight whose second use hardly shows, and one that only lends its data type."""

    def run(m, x):
        h = torch.tanh(m.layer(x)).to(m.last.weight)
        return m.last(h + 1e-3 * h @ m.layer.weight)

    return Calls(run, layer=nn.Linear(5, 5), last=nn.Linear(5, 3))


def in_place():
    return nn.Sequential(
        nn.Linear(6, 5, bias=False),
        nn.ReLU(inplace=True),
        nn.LayerNorm(5),
        nn.ELU(inplace=True),
        nn.Linear(5, 4),
        nn.SiLU(inplace=True),
    )


def embedding(**options):
    return Calls(
        lambda m, t: m.last(torch.tanh(m.tokens(t)).mean(1)),
        tokens=nn.Embedding(V, D, **options),
        last=nn.Linear(D, 3),
    )


def tied_embedding():
    model = Calls(
        lambda m, t: m.out(torch.tanh(m.tokens(t)).sum(1)),
        tokens=nn.Embedding(V, D, padding_idx=2),
        out=nn.Linear(D, V),
    )
    model.out.weight = model.tokens.weight
    return model


class Attention(nn.Module):
    """Causal self-attention with one linear layer for each part."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x):
        heads = [f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class RootMeanSquare(nn.Module):
    """A norm that torch does not know, as language models bring their own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(D) + 0.5)

    def forward(self, x):
        return self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def own_norms(batch_first: bool):
    """A norm with samples in the first dimension or in the second, used twice; shared positions."""

    def run(m, t):
        x = m.tokens(t) + m.places(torch.arange(t.shape[1]).unsqueeze(0))
        x = x if batch_first else x.transpose(0, 1)
        x = m.norm(torch.tanh(m.along(m.norm(x))))
        return m.last(x.mean(1 if batch_first else 0))

    return Calls(
        run,
        tokens=nn.Embedding(V, D),
        places=nn.Embedding(5, D),
        along=nn.Linear(D, D),
        norm=RootMeanSquare(),
        last=nn.Linear(D, 3),
    )


def transformer():
    """Token and position embeddings, a block, and the token embedding again as output layer."""

    def run(m, t):
        x = m.tokens(t) + m.places(torch.arange(t.shape[1]))
        x = x + m.attention(m.norm1(x))
        x = x + m.mlp(m.norm2(x))
        return m.out(m.norm3(x))[:, -1]

    model = Calls(
        run,
        tokens=nn.Embedding(V, D),
        places=nn.Embedding(5, D),
        attention=Attention(),
        mlp=nn.Sequential(nn.Linear(D, 7), nn.GELU(), nn.Linear(7, D)),
        norm1=nn.LayerNorm(D),
        norm2=nn.LayerNorm(D),
        norm3=nn.LayerNorm(D),
        out=nn.Linear(D, V, bias=False),
    )
    model.out.weight = model.tokens.weight
    return model


def encoder_layer(batch_first: bool):
    def run(m, x):
        x = m.layer(x) if batch_first else m.layer(x.transpose(0, 1)).transpose(0, 1)
        return m.last(x.mean(1))

    layer = nn.TransformerEncoderLayer(D, 2, 7, dropout=0.0, batch_first=batch_first)
    return Calls(run, layer=layer, last=nn.Linear(D, 3))


def multihead(batch_first: bool):
    def run(m, x):
        x = x if batch_first else x.transpose(0, 1)
        x = m.attention(x, x, x, need_weights=False)[0]
        return m.last(x if batch_first else x.transpose(0, 1)).mean(1)

    attention = nn.MultiheadAttention(D, 2, batch_first=batch_first)
    return Calls(run, attention=attention, last=nn.Linear(D, 3))


def residual():
    def run(m, x):
        x = torch.relu(m.norm1(m.conv1(x)))
        x = torch.relu(x + m.norm2(m.conv2(x)))
        return m.last(x.mean((2, 3)))

    return Calls(
        run,
        conv1=nn.Conv2d(2, 4, 3, padding=1, bias=False),
        norm1=nn.BatchNorm2d(4),
        conv2=nn.Conv2d(4, 4, 3, padding=1, bias=False),
        norm2=nn.BatchNorm2d(4),
        last=nn.Linear(4, 3),
    )


def frames():
    """Several images a sample, one after the other in the leading dimension."""
    return Calls(
        lambda m, x: m.last(torch.tanh(m.norm(m.conv(x.flatten(0, 1)))).reshape(len(x), -1)),
        conv=nn.Conv2d(2, 4, 2),
        norm=nn.GroupNorm(2, 4),
        last=nn.Linear(3 * 16, 3),
    )


class Bare(nn.Module):
    """Parameters that belong to no layer, one of them without use, one a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(4, 3))
        self.scale = nn.Parameter(torch.randn(()))
        self.idle = nn.Parameter(torch.randn(2, 2))

    def forward(self, x):
        return self.scale * torch.tanh(x @ self.matrix)


def recurrent(cell):
    return Calls(
        lambda m, x: m.last(m.cell(x)[0][:, -1]),
        cell=cell(3, 4, batch_first=True),
        last=nn.Linear(4, 3),
    )


class Branching(nn.Module):
    """A branch on data, which vmap cannot follow."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x):
        rows = [row @ self.weight if row[0] > 0 else (row @ self.weight).square() for row in x]
        return torch.stack(rows)


class Doubled(nn.Linear):
    """A subclass that does something else."""

    def forward(self, x):
        return super().forward(x) * 2 + self.weight.sum()
