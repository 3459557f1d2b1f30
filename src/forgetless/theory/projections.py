"""The directions that methods protect, as the projection T_{k−1} of the linearised learner.

T_{k−1} = I − Bᵀ B, with B the orthonormal rows that a method returns before task k starts. The
paper writes I − G Gᵀ with the gradients themselves as the columns of G, which is a projection only
if they are orthonormal; here they are orthonormalised.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final

import numpy as np
import torch
from torch import Tensor
from torch.linalg import vector_norm

from forgetless.support.errors import ConfigError, require
from forgetless.support.options import whole
from forgetless.theory.svd import Factors, extend_basis, factors

# The number of samples of each task, index tensors task by task, or None for all samples.
Memory = int | Sequence[Tensor] | None


@final
@dataclass(frozen=True)
class EarlierTask:
    """An earlier task, at the weights with which the next one starts.

    Attributes:
        factors: the SVD of its features φ_j.
        features: φ_j, (n_j, p).
        targets: y_j, (n_j,).
        outputs: f_{k−1}(X_j), (n_j,).
    """

    factors: Factors
    features: Tensor
    targets: Tensor
    outputs: Tensor


class Projection(Protocol):
    """A method as the theory sees it: the directions it does not move along."""

    def extend(self, basis: Tensor, seen: Sequence[EarlierTask], rtol: float) -> Tensor:
        """B_{k−1}, (K, p), from B_{k−2} and the tasks before task k, of which the last is new."""


@final
@dataclass(frozen=True)
class NoProjection:
    """T = I: plain SGD (theorem "CF for SGD")."""

    def extend(self, basis: Tensor, seen: Sequence[EarlierTask], rtol: float) -> Tensor:
        return basis


@final
@dataclass(frozen=True, eq=False)
class SampleProjection:
    """OGD: orthogonal to the features φ_j(x) of stored samples of each earlier task.

    Arguments:
        memory: number of samples of each task, drawn without replacement; or one tensor of indices
            for each task; None for all. More than a task has is an error.
        seed: of the draw.
    """

    memory: Memory = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_memory(self.memory, self.seed)

    def extend(self, basis: Tensor, seen: Sequence[EarlierTask], rtol: float) -> Tensor:
        new = seen[-1].features
        kept = remembered(self.memory, self.seed, len(seen) - 1, len(new)).to(new.device)
        return extend_basis(basis, new[kept], rtol)


@final
@dataclass(frozen=True)
class ComponentProjection:
    """PCA-OGD: orthogonal to the top d right singular vectors of each earlier φ_j (P_{τ,:d}).

    Arguments:
        components: d, at least 1 and at most the samples of a task, or the rank if that is
            smaller; None for all.
        centred: use the principal directions of φ_j − mean instead, as the released code does. The
            corollary (forgetting for PCA-OGD) still holds, its bound by σ_{d+1} does not.
    """

    components: int | None = None
    centred: bool = False

    def __post_init__(self) -> None:
        d = self.components
        valid = d is None or whole(1).fits(d)
        require(valid, "components", d, f"{whole(1).words}, or None for all")

    def extend(self, basis: Tensor, seen: Sequence[EarlierTask], rtol: float) -> Tensor:
        n, task = len(seen[-1].features), len(seen) - 1
        accepted = f"at most the {n} samples of task {task} (counted from 0)"
        require((self.components or 1) <= n, "components", self.components, accepted)
        decomposed = seen[-1].factors
        if self.centred:
            features = seen[-1].features
            centred = features - features.mean(0)
            decomposed = factors(centred, rtol=rtol, scale=decomposed.sigma(0))
        return extend_basis(basis, decomposed.v[: self.components], rtol)


@final
@dataclass(frozen=True, eq=False)
class GradientProjection:
    """GEM-NT: orthogonal to the earlier tasks' mean loss gradients (corollary "CF for GEM-NT").

    g_j = 1/m Σ φ_j(x)ᵀ (f_{k−1}(x) − y) over the m stored samples x of task j, for the squared loss
    ½ (f − y)² without weight decay, at the weights with which task k starts: the corollary needs a
    T_{k−1} that is constant during the task. A gradient that is rounding, such as of a task just
    learned to zero loss, constrains nothing.

    Arguments:
        memory, seed: the samples, as for `SampleProjection`.
    """

    memory: Memory = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_memory(self.memory, self.seed)

    def extend(self, basis: Tensor, seen: Sequence[EarlierTask], rtol: float) -> Tensor:
        gradients = []
        for task, past in enumerate(seen):
            kept = remembered(self.memory, self.seed, task, len(past.features))
            kept = kept.to(past.features.device)
            phi, residual = past.features[kept], (past.outputs - past.targets)[kept]
            gradient = residual @ phi / len(kept)
            # Its length if no terms cancelled.
            terms = past.outputs[kept].abs() + past.targets[kept].abs()
            uncancelled = terms @ vector_norm(phi, dim=1) / len(kept)
            if vector_norm(gradient) > rtol * uncancelled:
                gradients.append(gradient)
        if not gradients:
            return basis[:0]
        return extend_basis(basis[:0], torch.stack(gradients), rtol)


def remembered(memory: Memory, seed: int, task: int, n: int) -> Tensor:
    """The indices of a task's stored samples, (m,).

    Arguments:
        memory: as for `SampleProjection`.
        seed: of the draw, which depends on seed, task, m and n alone.
        task: from 0.
        n: the task's number of samples.
    """
    if memory is None:
        return torch.arange(n)
    if isinstance(memory, int):
        accepted = f"at most the {n} samples of task {task} (counted from 0)"
        require(memory <= n, "memory", memory, accepted)
        return torch.from_numpy(np.random.default_rng([seed, task]).permutation(n)[:memory])
    require(task < len(memory), "memory", f"{len(memory)} index tensors", "one for each task")
    kept = torch.as_tensor(memory[task])
    whole = kept.dim() == 1 and kept.numel() > 0 and not kept.is_floating_point()
    whole = whole and kept.dtype != torch.bool and bool(((kept >= 0) & (kept < n)).all())
    require(whole, f"memory[{task}]", kept.tolist(), f"one or more indices from 0 to {n - 1}")
    return kept.long()


def check_memory(memory: Memory, seed: int) -> None:
    """Require a memory of at least one sample and a valid seed."""
    whole(0).check("seed", seed)
    if isinstance(memory, bool | str | Tensor) or not isinstance(memory, int | Sequence | None):
        raise ConfigError(f"memory must be a whole number, index tensors or None, not {memory!r}")
    if isinstance(memory, int):
        require(memory >= 1, "memory", memory, f"{whole(1).words}, or None for all samples")
