"""Orthogonal gradient descent in a Kronecker eigenbasis: protection whose size does not grow."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, final

from forgetless.methods.base import FinishedTask, MomentOutputs, View
from forgetless.methods.cost import Cost, TaskProbe, cost_of_eigenbasis
from forgetless.methods.ogd import Orthogonal
from forgetless.subspace import Directions, KroneckerSubspace
from forgetless.support.validation import FRACTION, SHARE, option, whole


@final
@dataclass(frozen=True)
class KronOGD(Orthogonal):
    """Steps have no part in the strongest coordinates of each layer's Kronecker eigenbasis.

    K-FAC's moments of a layer's per-sample gradients, G ⊗ A, have the eigenvectors u_i ⊗ v_j with
    energies γ_i α_j. Over all layers together the coordinates with the largest energies are
    protected, until they hold a share of the total: ΔW ← ΔW − U [(Uᵀ ΔW V) ∘ M] Vᵀ. G and A are
    means over the tasks so far, so what is stored, about r² + c² numbers for a weight (r, c) at
    most, is bounded for any number of tasks, and holds no samples. This is PCA-OGD in a cheap
    basis; with G = I it is GPM (Saha, Garg and Roy 2021).

    G is taken at the weights at the end of a task. As these move, other gradients come to matter,
    so G is shrunk towards the identity: G ← (1 − ρ) G + ρ tr(G) / r · I. Inputs that a layer does
    not have in a task remain free for all of its outputs.

    Without a share ε of the energy to protect, the method chooses the threshold by itself: the
    unprotected coordinates together may change a stored task's outputs by at most a share `drift`
    of their mean square, if the next task moves the weights as the last one did.

    Arguments:
        energy: share of the gradients' energy that is protected; None chooses by `drift`.
        drift: share of the outputs' mean square that they may change by in the next task.
        samples: samples of each task whose gradients are used.
        shrinkage: ρ; 0 is K-FAC's product, 1 protects inputs for all outputs of a layer alike.
        outputs: the gradients of "all" outputs of a sample; of its "class" alone; or of the
            log-likelihood of a label that the model draws, as the "fisher" matrix has it.
    """

    name: ClassVar[str] = "kron-ogd"
    label: ClassVar[str] = "KronOGD"
    summary: ClassVar[str] = "steps outside the strongest coordinates of a Kronecker eigenbasis"
    family: ClassVar[str] = "projection"
    replaces: ClassVar[Mapping[str, str]] = {"energy": "drift"}
    energy: float | None = option(
        None,
        "Share of the energy that is protected, in place of --drift.",
        accepted=SHARE,
        search=(0.9, 0.95, 0.98),
    )
    drift: float = option(
        1e-3,
        "Protect enough that a task's outputs should change by no more than this share of their "
        "mean square in the next task.",
        accepted=SHARE,
    )
    samples: int = option(3000, "Samples of each task whose gradients are used.", accepted=whole(1))
    shrinkage: float = option(
        0.2,
        "How far each layer's moments of gradients are shrunk to the identity: 0 to 1.",
        accepted=FRACTION,
    )
    outputs: MomentOutputs = option(
        "all",
        "The gradients to protect: of all outputs, the true class's, or the Fisher matrix.",
        choices=("all", "class", "fisher"),
        setting="kron_outputs",
    )

    protected_by = "energy"

    def advice(self, *, more: bool) -> str:
        """The energy; also where the method chose it by itself, for its choice has bounds."""
        if self.energy is not None:
            return super().advice(more=more)
        return f"set energy to {'0.99 or 0.999' if more else '0.95 or 0.9'}, which it now chooses"

    def cost(self, probe: TaskProbe) -> Cost:
        """The eigenbasis, and where the present task began if the threshold needs that."""
        return cost_of_eigenbasis(probe, self.samples, vectors=int(self.energy is None))

    def init(self, view: View) -> Directions:
        """Nothing is protected yet."""
        empty = KroneckerSubspace.empty(view.layout, view.theta, view.storage)
        return empty if self.energy is not None else replace(empty, start=view.theta.clone())

    def consolidate(
        self, state: KroneckerSubspace, view: View, task: FinishedTask
    ) -> KroneckerSubspace:
        """Add the task's moments to those of earlier tasks, and choose the coordinates again."""
        moments = view.moments(task.draw(self.samples), self.outputs).shrunk(self.shrinkage)
        energy = self.energy
        if energy is not None:
            return state.add(moments, lambda new: new.protecting(energy))
        theta = view.theta.clone()
        moved = None if state.start is None else theta - state.start
        limit = self.drift * moments.squared_scalars.to(theta) / moments.samples
        new = state.add(moments, lambda new: new.holding(moved, limit))
        return replace(new, start=theta)
