"""One training of three tasks, as one process does it and as several do."""

import copy
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from forgetless import (
    AGEM,
    EWC,
    GEM,
    GPM,
    OGD,
    PCAOGD,
    SGP,
    AdamNSCL,
    Guard,
    KFACLaplace,
    KronEWC,
    KronOGD,
)
from tests.methods.test_own_methods import own

CLASSES, LENGTH, WORDS, WIDTH, BATCH = 3, 5, 11, 8, 8


class Transformer(nn.Module):
    """Tokens to classes, with every kind of layer that has a rule of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.block = nn.TransformerEncoderLayer(
            WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True, activation="gelu"
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.tokens(x)).mean(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 9), nn.Tanh(), nn.Linear(9, 3))


MODELS = {"mlp": mlp, "transformer": Transformer}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-2),
    # Of a gradient that is zero but for rounding (of the keys' bias in attention), Adam makes a
    # step of rounding / eps.
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-6),
}


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    optimizer: str
    method: object
    wrap: str  # ddp or fsdp
    dtype: torch.dtype = torch.float64
    options: dict = field(default_factory=dict)

    def made(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return MODELS[self.model]().to(self.dtype)


SI = own.SI(strength=0.5, damping=0.01)
PCA = PCAOGD(components=4, samples=20)
KRON = KronOGD(energy=0.8, samples=20)
CASES = [
    Case("ddp-ogd", "mlp", "sgd", OGD(samples=9), "ddp"),
    Case("ddp-pca", "transformer", "adamw", PCA, "ddp"),
    Case("ddp-pca-32", "mlp", "adamw", PCA, "ddp", torch.float32),
    Case("ddp-factored", "mlp", "adamw", OGD(samples=9), "ddp", options={"storage": "factored"}),
    Case("ddp-budget", "mlp", "sgd", OGD(samples=9), "ddp", options={"budget": "1MB"}),
    Case("ddp-ewc", "mlp", "sgd", EWC(strength=5.0), "ddp"),
    Case("ddp-a-gem", "mlp", "sgd", AGEM(memory=9, batch_size=5), "ddp"),
    Case("ddp-gem", "mlp", "adamw", GEM(memory=9), "ddp"),
    Case("ddp-si", "mlp", "sgd", SI, "ddp"),
    Case("ddp-owm", "mlp", "adamw", own.OWM(samples=20), "ddp"),
    Case("ddp-kron", "transformer", "adamw", KRON, "ddp"),
    Case("ddp-kron-sgd", "mlp", "sgd", KRON, "ddp"),
    Case("ddp-gpm", "transformer", "adamw", GPM(threshold=0.8, samples=20), "ddp"),
    Case("ddp-sgp", "mlp", "sgd", SGP(threshold=0.8, samples=20), "ddp"),
    Case("ddp-laplace", "mlp", "sgd", KFACLaplace(samples=20), "ddp"),
    Case("ddp-kron-ewc", "transformer", "adamw", KronEWC(samples=20, tolerance=1e-3), "ddp"),
    Case("fsdp-kron-ewc", "transformer", "adamw", KronEWC(samples=20, tolerance=1e-3), "fsdp"),
    Case("fsdp-kron-ewc-sgd", "mlp", "sgd", KronEWC(samples=20, tolerance=1e-3), "fsdp"),
    Case("fsdp-gpm", "transformer", "adamw", GPM(threshold=0.8, samples=20), "fsdp"),
    Case("fsdp-nscl", "mlp", "sgd", AdamNSCL(ratio=100.0, samples=20), "fsdp"),
    Case("fsdp-kron", "transformer", "adamw", KRON, "fsdp"),
    Case("fsdp-kron-32", "mlp", "sgd", KRON, "fsdp", torch.float32),
    Case("fsdp-ogd", "mlp", "sgd", OGD(samples=9), "fsdp"),
    Case("fsdp-ogd-adamw", "mlp", "adamw", OGD(samples=9), "fsdp"),
    Case("fsdp-pca", "transformer", "adamw", PCA, "fsdp"),
    Case("fsdp-pca-sgd", "transformer", "sgd", PCA, "fsdp"),
    Case("fsdp-pca-32", "mlp", "adamw", PCA, "fsdp", torch.float32),
    Case("fsdp-share", "mlp", "sgd", PCAOGD(variance=0.9, samples=20, centred=True), "fsdp"),
    Case("fsdp-fewer", "mlp", "sgd", PCA, "fsdp", options={"max_rank": 6}),
    Case("fsdp-coarse", "mlp", "adamw", PCA, "fsdp", options={"storage": "bfloat16"}),
    Case("fsdp-ewc", "mlp", "sgd", EWC(strength=5.0), "fsdp"),
    Case("fsdp-ewc-scale", "transformer", "sgd", EWC(), "fsdp"),
    Case("fsdp-si", "mlp", "adamw", SI, "fsdp"),
    Case("fsdp-some", "mlp", "sgd", OGD(samples=9), "fsdp", options={"exclude": ["4"]}),
]


def task(case: Case, number: int, n: int = 29) -> TensorDataset:
    """A number of samples that no number of processes divides."""
    generator = torch.Generator().manual_seed(number)
    y = torch.randint(CLASSES, (n,), generator=generator)
    if case.model == "transformer":
        x = torch.randint(WORDS, (n, LENGTH), generator=generator)
    else:
        x = torch.randn(n, 6, generator=generator).to(case.dtype)
    return TensorDataset(x, y)


def shared(case: Case) -> nn.Module:
    """The model of a case, on the processes of the default group."""
    model = case.made()
    if case.wrap == "ddp":
        return DistributedDataParallel(model)
    for layer in model.children():
        if any(True for _ in layer.parameters()):
            fully_shard(layer)
    return fully_shard(model)


def started(case: Case, alone: bool):
    """Model, optimizer and guard."""
    model = case.made() if alone else shared(case)
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    return model, optimizer, Guard(model, optimizer, case.method, **case.options)


def steps(case: Case, model, optimizer, number: int, count: int, *, alone: bool) -> None:
    """Batches of one size, of which every process takes its part."""
    x, y = task(case, number).tensors
    generator = torch.Generator().manual_seed(50 + number)
    rank, size = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    for _ in range(count):
        mine = torch.randperm(len(x), generator=generator)[:BATCH].chunk(size)[rank]
        optimizer.zero_grad()
        cross_entropy(model(x[mine]), y[mine]).backward()
        optimizer.step()


def loader(case: Case, number: int, *, alone: bool) -> DataLoader:
    data = task(case, number)
    if alone:
        return DataLoader(data, batch_size=4, shuffle=True)
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data))


def trained(case: Case, *, alone: bool, tasks=(0, 1, 2), count: int = 4):
    """Each task learned and remembered."""
    model, optimizer, guard = started(case, alone)
    for number in tasks:
        steps(case, model, optimizer, number, count, alone=alone)
        with torch.no_grad():
            model(task(case, number).tensors[0])  # leaves weights gathered where they are sharded
        guard.end_task(loader(case, number, alone=alone))
    steps(case, model, optimizer, 9, count, alone=alone)
    return model, optimizer, guard


def weights(model: nn.Module) -> Tensor:
    """All parameters, gathered, as one vector."""
    found = []
    for parameter in model.parameters():
        whole = getattr(parameter, "full_tensor", None)
        found.append((parameter if whole is None else whole()).detach().flatten().double())
    return torch.cat(found).clone()


def plain(case: Case) -> Tensor:
    """The weights that training without a guard leads to."""
    model = case.made()
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    for number in (0, 1, 2, 9):
        steps(case, model, optimizer, number, 4, alone=True)
    return weights(copy.deepcopy(model))
