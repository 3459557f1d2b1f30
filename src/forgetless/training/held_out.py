"""Held-out samples of a task: when its training ends, and at which weights."""

import math
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from forgetless.data import Split
from forgetless.support.errors import ConfigError
from forgetless.support.streams import stream
from forgetless.tangent.evaluation import eval_mode
from forgetless.training.network import Network
from forgetless.training.sampling import batch_of
from forgetless.training.settings import Training

_CHUNK = 4096  # samples that go through the network at once


@final
@dataclass
class HeldOut:
    """The loss on held-out samples after each epoch, and its consequences.

    Arguments:
        best: weights and buffers at the least loss so far, by name.
        least: that loss; None before the first epoch ends.
        waited: epochs since then.
        decays: how often a plateau decayed the learning rate.
        ended: whether the training on the task is to end.
    """

    best: dict[str, Tensor] = field(default_factory=dict)
    least: float | None = None
    waited: int = 0
    decays: int = 0
    ended: bool = False

    def numbers(self) -> dict[str, Any]:
        """All but the weights, as plain values."""
        return {name: value for name, value in vars(self).items() if name != "best"}

    def judge(
        self, network: Network, split: Split, task: int, training: Training, lr: float
    ) -> None:
        """Note the loss on held-out samples at the end of an epoch with that learning rate."""
        loss = mean_loss(network, split, task)
        if math.isfinite(loss) and (self.least is None or loss < self.least):
            self.least, self.waited = loss, 0
            self.best = {n: t.clone() for n, t in _weights(network).items()}
            return
        self.waited += 1
        if training.schedule == "plateau" and self.waited % training.decay_after == 0:
            self.decays += 1
            self.ended |= lr * training.decay < training.least_lr
        self.ended |= 0 < training.early_stopping <= self.waited

    def restore_best(self, network: Network) -> None:
        """Go back to the weights with the least loss."""
        weights = _weights(network)
        for name, value in self.best.items():
            weights[name].copy_(value)


def part_held_out(split: Split, share: float, seed: int, task: int) -> tuple[Split, Split]:
    """A seed's random choice of training samples, and the share of held-out ones."""
    count = max(1, round(share * len(split)))
    if count >= len(split):
        raise ConfigError(
            f"held_out={share:g} leaves no training samples of the {len(split)} of task {task + 1}"
        )
    order = torch.randperm(len(split), generator=stream(seed, "held-out samples", task))
    parts = (order[count:].sort().values, order[:count].sort().values)
    train, held_out = (index.to(split.labels.device) for index in parts)
    return split.subset(train), split.subset(held_out)


def mean_loss(network: Network, split: Split, task: int) -> float:
    """The mean training loss of a single seed on samples of a task, in eval mode."""
    total = torch.zeros((), dtype=torch.float64)
    with eval_mode(network.module), torch.no_grad():
        for index in torch.arange(len(split), device=split.labels.device).split(_CHUNK):
            samples = batch_of(split, index.unsqueeze(0), task)
            logits = network.logits(network.theta, samples.inputs)
            total += network.losses(logits, samples.labels, samples.tasks).double().sum().cpu()
    return float(total) / len(split)


def _weights(network: Network) -> dict[str, Tensor]:
    return {"theta": network.theta} | {f"fixed.{n}": t for n, t in network.fixed.items()}
