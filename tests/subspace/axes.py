"""Directions of a user's own."""

from dataclasses import dataclass, replace

import torch

from forgetless.subspace import Directions, Record


@dataclass(frozen=True)
class Axes(Directions):
    """Single weights, (S, K), that no step may change: the first ones first."""

    indices: torch.Tensor
    record: Record

    @property
    def rank(self):
        return self.indices.shape[1]

    def project_out(self, g):
        return g.scatter(1, self.indices, 0.0)

    def restricted(self, columns):
        return self

    def limited(self, limit):
        return replace(self, indices=self.indices[:, :limit])

    def tensors(self, seed):
        return {"indices": self.indices[seed]} | self.record.tensors(seed)

    @classmethod
    def restore(cls, of_seeds, theta, storage):
        indices = torch.stack([tensors["indices"].to(theta.device) for tensors in of_seeds])
        return cls(indices, Record.restore(of_seeds))
