"""Orthogonal gradient descent in a Kronecker eigenbasis: protection whose size does not grow."""

from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from forgetless.methods.base import Method
from forgetless.methods.view import FinishedTask, View
from forgetless.support.errors import DataError
from forgetless.support.options import SHARE, option, whole
from forgetless.tangent import kronecker_moments


@final
@dataclass(frozen=True)
class Eigenbasis:
    """The coordinates of one layer's step, u_iᵀ ΔW v_j, and their energies γ_i α_j.

    Arguments:
        outputs: U, (S, r, r), eigenvectors of G in columns, strongest first; (S, r, 0) for the
            standard basis of an embedding's tokens.
        gamma: eigenvalues of G, (S, r).
        inputs: V, (S, c, c), eigenvectors of A; with a bias c counts it as a last input.
        alpha: eigenvalues of A, (S, c).
        bias: the name of the bias, or "".
        rows: how many leading u_i have a protected coordinate in some seed.
        columns: how many leading v_j.
    """

    outputs: Tensor
    gamma: Tensor
    inputs: Tensor
    alpha: Tensor
    bias: str
    rows: int = 0
    columns: int = 0

    def removed(self, step: Tensor, threshold: Tensor) -> Tensor:
        """U [(Uᵀ ΔW V) ∘ M] Vᵀ, the protected part of a step (S, r, c); M is energy ≥ threshold."""
        gamma, alpha = self.gamma[:, : self.rows], self.alpha[:, : self.columns]
        protected = gamma.unsqueeze(2) * alpha.unsqueeze(1) >= threshold.view(-1, 1, 1)
        v = self.inputs[:, :, : self.columns]
        if not self.outputs.shape[2]:
            return ((step @ v) * protected) @ v.mT
        u = self.outputs[:, :, : self.rows]
        return u @ ((u.mT @ step @ v) * protected) @ v.mT


@final
@dataclass(frozen=True)
class Protected:
    """KronOGD's state; every tensor has a leading dimension of S seeds.

    Arguments:
        layers: weight → its eigenbasis.
        squares: other parameter → the mean of its squared gradient, (S, *shape).
        threshold: the least energy that is protected, (S,).
        tasks: how many tasks the means are over.
    """

    layers: dict[str, Eigenbasis]
    squares: dict[str, Tensor]
    threshold: Tensor
    tasks: int


@final
@dataclass(frozen=True)
class KronOGD(Method[Protected]):
    """Steps have no part in the strongest coordinates of each layer's Kronecker eigenbasis.

    K-FAC's moments of a layer's per-sample gradients, G ⊗ A, have the eigenvectors u_i ⊗ v_j with
    energies γ_i α_j. Over all layers together the coordinates with the largest energies are
    protected, until they hold a share of the total: ΔW ← ΔW − U [(Uᵀ ΔW V) ∘ M] Vᵀ. G and A are
    means over the tasks so far, so what is stored, r² + c² numbers for a weight (r, c), does not
    grow, and holds no samples. This is PCA-OGD in a cheap basis; with G = I it is GPM (Saha, Garg
    and Roy 2021).

    Arguments:
        energy: share of the gradients' energy that is protected.
        samples: samples of each task whose gradients are used.
        outputs: "all" protects every output of a sample, "class" its true class alone.
    """

    name: ClassVar[str] = "kron-ogd"
    label: ClassVar[str] = "KronOGD"
    summary: ClassVar[str] = "steps outside the strongest coordinates of a Kronecker eigenbasis"
    acts_on = "update"
    needs_model: ClassVar[bool] = False
    idle_before_first_task: ClassVar[bool] = True
    recordable: ClassVar[bool] = True
    energy: float = option(0.95, "Share of the energy that is protected.", accepted=SHARE)
    samples: int = option(3000, "Samples of each task whose gradients are used.", accepted=whole(1))
    outputs: Literal["all", "class"] = option(
        "all",
        "Protect every output of a sample, or that of its class alone.",
        choices=("all", "class"),
        setting="kron_outputs",
    )

    def init(self, view: View) -> Protected:
        """Nothing is protected yet."""
        return Protected({}, {}, view.theta.new_zeros(len(view.theta)), 0)

    def update(self, g: Tensor, state: Protected, view: View) -> tuple[Tensor, Protected]:
        """Take the protected coordinates out of the step."""
        if not state.tasks:
            return g, state
        parts = view.layout.split(g)
        for name, basis in state.layers.items():
            step = parts[name].flatten(2)
            if basis.bias:
                step = torch.cat([step, parts[basis.bias].unsqueeze(2)], 2)
            step = step - basis.removed(step, state.threshold)
            if basis.bias:
                parts[basis.bias] = step[..., -1]
                step = step[..., :-1]
            parts[name] = step.reshape(parts[name].shape)
        for name, squares in state.squares.items():
            limit = state.threshold.view(-1, *(1 for _ in squares.shape[1:]))
            parts[name] = parts[name] * (squares < limit)
        return view.layout.join(parts), state

    def consolidate(self, state: Protected, view: View, task: FinishedTask) -> Protected:
        """Add the task's moments to those of earlier tasks, and choose the coordinates again."""
        shapes = view.layout.shapes
        features = view.features(task.draw(self.samples), self.outputs)
        found = [kronecker_moments(phi, shapes) for phi in features]
        old, new = state.tasks / (state.tasks + 1), 1 / (state.tasks + 1)
        layers, squares = {}, {}
        for name in found[0][0]:
            moments = [weights[name] for weights, _ in found]
            g, a = (torch.stack([getattr(m, side) for m in moments]) for side in _SIDES)
            g = g / len(features[0]) * new
            a = a * new
            if name in state.layers:
                before = state.layers[name]
                g = g + old * _moments(before.outputs, before.gamma)
                a = a + old * _moments(before.inputs, before.alpha)
            layers[name] = _eigenbasis(g, a, moments[0].bias, view.theta)
        for name in found[0][1]:
            mean = torch.stack([rest[name] for _, rest in found]) / len(features[0]) * new
            _require_finite(mean)
            if name in state.squares:
                mean = mean + old * state.squares[name]
            squares[name] = mean.to(view.theta)
        energies = [
            (b.gamma.unsqueeze(2) * b.alpha.unsqueeze(1)).flatten(1) for b in layers.values()
        ]
        threshold = _threshold(energies + [s.flatten(1) for s in squares.values()], self.energy)
        layers = {name: _cut(basis, threshold) for name, basis in layers.items()}
        return Protected(layers, squares, threshold, state.tasks + 1)


_SIDES = ("outputs", "inputs")


def _moments(vectors: Tensor, values: Tensor) -> Tensor:
    """Q diag(λ) Qᵀ in float64; the diagonal alone in the standard basis."""
    values = values.double()
    if not vectors.shape[2]:
        return values
    vectors = vectors.double()
    return (vectors * values.unsqueeze(1)) @ vectors.mT


def _eigenbasis(g: Tensor, a: Tensor, bias: str, like: Tensor) -> Eigenbasis:
    """The eigenvectors and eigenvalues of both sides, strongest first."""
    _require_finite(g, a)
    if g.dim() == 2:
        u, gamma = g.new_zeros(*g.shape, 0), g
    else:
        u, gamma = _strongest_first(g)
    v, alpha = _strongest_first(a)
    return Eigenbasis(u.to(like), gamma.to(like), v.to(like), alpha.to(like), bias)


def _require_finite(*moments: Tensor) -> None:
    if not all(bool(moment.isfinite().all()) for moment in moments):
        raise DataError("the gradients of samples to protect are NaN or infinite")


def _strongest_first(matrix: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors.flip(2), values.flip(1).clamp_min(0)


def _threshold(energies: list[Tensor], share: float) -> Tensor:
    """The least energy among the strongest coordinates that hold at most the share, (S,)."""
    ordered = torch.cat(energies, 1).double().sort(1, descending=True).values
    count = (ordered.cumsum(1) <= share * ordered.sum(1, keepdim=True)).sum(1, keepdim=True)
    weakest = ordered.gather(1, (count - 1).clamp_min(0))
    # None if the strongest one holds more alone, or if there is no energy at all.
    nothing = (count == 0) | (weakest == 0)
    return weakest.masked_fill(nothing, torch.inf)[:, 0].to(energies[0].dtype)


def _cut(basis: Eigenbasis, threshold: Tensor) -> Eigenbasis:
    """The same basis, with how much of it has protected coordinates."""
    rows = int((basis.gamma * basis.alpha[:, :1] >= threshold.unsqueeze(1)).sum(1).max())
    columns = int((basis.alpha * basis.gamma.amax(1, True) >= threshold.unsqueeze(1)).sum(1).max())
    if not basis.outputs.shape[2]:
        rows = basis.gamma.shape[1]  # tokens are not sorted
    sides = basis.outputs, basis.gamma, basis.inputs, basis.alpha
    return Eigenbasis(*sides, basis.bias, rows, columns)
