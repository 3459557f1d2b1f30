"""A network linearised at its weights, and its training by SGD."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from forgetless.linalg import Layout, float64, project_out
from forgetless.support.validation import ConfigError, first_line, require
from forgetless.tangent import require_one_precision, tangent_features
from forgetless.tangent.evaluation import call_with, differentiable, without_cudnn
from forgetless.theory.overlap import Protected, projected

# outputs (n, C), labels (n,) → the mean loss
Loss = Callable[[Tensor, Tensor], Tensor]
# a step of SGD and the weights before it, (p,) and (p,) → the step that is taken, (p,)
StepChange = Callable[[Tensor, Tensor], Tensor]


@final
class TangentModel:
    """f(x; θ₀) + J(x) ω: all outputs of a network, linear in the change ω of its weights.

    Products with the Jacobian J (n·C, p) are computed by forward and by reverse differentiation;
    for layers without a forward derivative by reverse differentiation twice, or output by output.

    Arguments:
        module: the network, in eval mode; it is not changed.
        names: the parameters that may move, in the order of ω; by default all that require grad.
        chunk: samples that go through the network at once.
    """

    def __init__(self, module: nn.Module, names: Iterable[str] | None = None, chunk: int = 1024):
        self.module = module
        self.chunk = chunk
        parameters = dict(module.named_parameters())
        wanted = (
            list(names)
            if names is not None
            else [n for n, p in parameters.items() if p.requires_grad]
        )
        self.values: dict[str, Tensor] = {
            n: t.detach().clone() for n, t in (*parameters.items(), *module.named_buffers())
        }
        require_one_precision(parameters[n] for n in wanted)
        self.layout = Layout({n: tuple(parameters[n].shape) for n in wanted})
        none = "one of whose parameters none is trained"
        require(bool(wanted), "model", none, "a network to be trained")
        self.theta = torch.cat([self.values[n].flatten() for n in wanted])
        self._way = 0  # of _WAYS

    @property
    def size(self) -> int:
        """p, the size of ω."""
        return self.theta.numel()

    def moved(self, change: Tensor) -> "TangentModel":
        """The same network linearised at θ₀ + change."""
        module = copied(self.module)
        module.load_state_dict(self.layout.split(self.theta + change), strict=False)
        model = TangentModel(module, list(self.layout.shapes), self.chunk)
        model._way = self._way  # the others would fail again
        return model

    def run(self, theta: Tensor, inputs: Tensor) -> Tensor:
        """The network itself at weights theta, (n, C), for one batch, differentiable in theta."""
        return self._run(self.layout.split(theta), inputs)

    def outputs(self, inputs: Tensor, change: Tensor | None = None) -> Tensor:
        """The network itself at θ₀ + change, (n, C)."""
        theta = self.theta if change is None else self.theta + change
        with torch.no_grad():
            parts = [self.run(theta, x) for x in inputs.split(self.chunk)]
        return torch.cat(parts)

    def push(self, inputs: Tensor, change: Tensor) -> Tensor:
        """J ω: the first-order change of the outputs, (p,) → (n, C)."""
        return torch.cat([self._pushed(x, change) for x in inputs.split(self.chunk)])

    def _pushed(self, inputs: Tensor, change: Tensor) -> Tensor:
        """J ω of one batch, by the first way that all layers allow, which is remembered."""
        while True:
            try:
                return _WAYS[self._way](self, inputs, change)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # NotImplementedError is one
                if self._way == len(_WAYS) - 1:
                    reason = first_line(error)
                    raise ConfigError(f"the model cannot be differentiated: {reason}") from error
            self._way += 1

    def _forward(self, inputs: Tensor, change: Tensor) -> Tensor:
        """Dual numbers θ₀ + ε ω through the network."""
        with torch.no_grad(), forward_ad.dual_level():
            dual = {
                n: forward_ad.make_dual(self.values[n], t.contiguous())
                for n, t in self.layout.split(change).items()
            }
            moved = forward_ad.unpack_dual(self._run(dual, inputs)).tangent
            return torch.zeros_like(self._run({}, inputs)) if moved is None else moved

    def _plainly_forward(self, inputs: Tensor, change: Tensor) -> Tensor:
        with plain_kernels():
            return self._forward(inputs, change)

    def _twice_in_reverse(self, inputs: Tensor, change: Tensor) -> Tensor:
        """J ω = ∂⟨Jᵀ u, ω⟩/∂u at any u, for Jᵀ u is linear in u."""
        with plain_kernels(), torch.enable_grad():
            theta = self.theta.detach().requires_grad_()
            outputs = self.run(theta, inputs)
            generator = torch.Generator().manual_seed(len(inputs))
            u = torch.randn(outputs.shape, generator=generator).to(outputs).requires_grad_()
            pulled = torch.autograd.grad(outputs, theta, u, create_graph=True)[0]
            moved = torch.autograd.grad(pulled, u, change)[0]
        # A function without a second derivative drops out silently: check ⟨Jᵀ u, ω⟩ = ⟨u, J ω⟩.
        missed = float(pulled.detach() @ change - (u.detach() * moved).sum())
        eps = torch.finfo(moved.dtype).eps
        rounding = 30 * eps * float(pulled.detach().norm() * change.norm())
        if not abs(missed) <= eps**0.5 * float(moved.norm()) + rounding:
            raise NotImplementedError("a backward pass of the model cannot be differentiated")
        return moved

    def _by_rows(self, inputs: Tensor, change: Tensor) -> Tensor:
        """The rows of J, by one backward pass an output."""
        phi = tangent_features(self.module, inputs, params=list(self.layout.shapes))
        return (phi @ change).view(len(inputs), -1)

    def pull(self, inputs: Tensor, cotangent: Tensor) -> Tensor:
        """Jᵀ u: (n, C) → (p,), for one batch."""
        theta = self.theta.detach().requires_grad_()
        with torch.enable_grad():
            outputs = self.run(theta, inputs)
        return torch.autograd.grad(outputs, theta, cotangent)[0]

    def _run(self, values: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
        with differentiable(self.module):  # forward derivatives need it as well
            outputs: Tensor = call_with(self.module, {**self.values, **values}, (inputs,))
        return outputs


# Ways to compute J ω, the cheapest first.
_WAYS = (
    TangentModel._forward,
    TangentModel._plainly_forward,
    TangentModel._twice_in_reverse,
    TangentModel._by_rows,
)


@final
@dataclass(frozen=True)
class SGDRun:
    """One task's training by SGD.

    Arguments:
        inputs, labels: the task, (m, *) and (m,).
        loss: mean loss of a batch's outputs.
        batches: indices of the samples of each step.
        lr: learning rate.
        batch_size: of a real step; a larger batch replaces several steps.
        basis: V, directions removed from every step, orthonormal rows (K, p); or the projection
            itself, a function of rows (n, p); or None.
        change: how a method changes a step, or None.
    """

    inputs: Tensor
    labels: Tensor
    loss: Loss
    batches: Sequence[Tensor]
    lr: float
    batch_size: int
    basis: Protected | None = None
    change: StepChange | None = None

    def rate(self, index: Tensor) -> float:
        """The sum of the learning rates of the real steps that a batch replaces."""
        return self.lr * -(-len(index) // self.batch_size)

    def taken(self, step: Tensor, theta: Tensor) -> Tensor:
        """The step that is taken at weights theta, (I − Vᵀ V) step, (p,)."""
        if self.change is not None:
            step = self.change(step, theta)
            came = tuple(step.shape) if isinstance(step, Tensor) else type(step).__name__
            accepted = f"a function that returns steps of shape {tuple(theta.shape)}"
            require(came == tuple(theta.shape), "each of methods", came, accepted)
        if self.basis is None or isinstance(self.basis, Tensor):
            return step if self.basis is None else project_out(step, self.basis)
        return projected(step.unsqueeze(0), self.basis)[0]

    def cotangent(self, outputs: Tensor, index: Tensor) -> Tensor:
        """∂loss/∂outputs on a batch, (b, C)."""
        outputs = outputs.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(self.loss(outputs, self.labels[index]), outputs)[0]


def train_network(model: TangentModel, run: SGDRun) -> Tensor:
    """Train the network itself; returns the change of its weights, θ − θ₀, (p,)."""
    theta = model.theta.clone()
    for index in run.batches:
        theta.requires_grad_()
        with torch.enable_grad():
            outputs = model.run(theta, run.inputs[index])
            loss = run.loss(outputs, run.labels[index])
        gradient = torch.autograd.grad(loss, theta)[0]
        theta = theta.detach()
        theta = theta - run.rate(index) * run.taken(gradient, theta)
    return theta - model.theta


def train_linearised(model: TangentModel, run: SGDRun) -> Tensor:
    """Train the linearised network: ω ← ω − lr · (I − Vᵀ V) J_Bᵀ ∂loss/∂f_B; returns ω, (p,)."""
    start = model.outputs(run.inputs)
    change = torch.zeros_like(model.theta)
    for index in run.batches:
        x = run.inputs[index]
        cotangent = run.cotangent(start[index] + model.push(x, change), index)
        step = run.taken(model.pull(x, cotangent), model.theta + change)
        change = change - run.rate(index) * step
    return change


def train_by_kernel(model: TangentModel, run: SGDRun) -> Tensor:
    """The same in function space, for few samples that are used many times.

    With ω = (I − Vᵀ V) Jᵀ α the outputs are f + K α, K = J (I − Vᵀ V) Jᵀ (m·C, m·C), and a step
    changes only the α of its batch: α_B ← α_B − lr · ∂loss/∂f_B.
    """
    start = model.outputs(run.inputs)
    phi = tangent_features(model.module, run.inputs, params=list(model.layout.shapes))
    kernel = phi.gram()
    if isinstance(run.basis, Tensor):
        along = float64(phi @ run.basis.T)  # J Vᵀ
        kernel = kernel - along @ along.T
    elif run.basis is not None:
        kernel = float64(phi @ projected(phi.dense(), run.basis).T)
    kernel = kernel.to(start)
    alpha = torch.zeros_like(start)
    rows = torch.arange(start.numel(), device=start.device).view_as(start)
    for index in run.batches:
        moved = kernel[rows[index].flatten()] @ alpha.flatten()
        cotangent = run.cotangent(start[index] + moved.view_as(start[index]), index)
        alpha[index] -= run.rate(index) * cotangent
    return run.taken(phi.T @ alpha.flatten(), model.theta)


def curvature(model: TangentModel, inputs: Tensor, iterations: int = 10) -> float:
    """The largest eigenvalue of J Jᵀ / n on a batch, by power iteration."""
    u = torch.ones_like(model.outputs(inputs))
    value = 0.0
    for _ in range(iterations):
        u = model.push(inputs, model.pull(inputs, u / u.norm()))
        value = float(u.norm())
    return value / len(inputs)


def copied(module: nn.Module) -> nn.Module:
    """A copy with its own weights, in eval mode, whose gradients are all dense.

    `torch.nn.utils.weight_norm` and the like store a computed weight with its graph in the module,
    and compute it again in every pass: copy its value only.
    """
    computed: dict[int, Tensor] = {
        id(value): value.detach().clone()
        for part in module.modules()
        for value in vars(part).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    try:
        twin = copy.deepcopy(module, computed)
    except (RuntimeError, TypeError) as error:
        reason = first_line(error)
        raise ConfigError(f"model must be one that copy.deepcopy can copy: {reason}") from error
    for part in twin.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag):
            part.sparse = False  # gradients become one vector
    return twin.eval()


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Compute attention and recurrent layers by plain operations.

    Their fused kernels have no forward derivative, and some no second one.
    """
    mkldnn = torch.backends.mkldnn  # its `flags` warn about other flags
    fast, fused = torch.backends.mha.get_fastpath_enabled(), mkldnn.enabled
    torch.backends.mha.set_fastpath_enabled(False)
    mkldnn.enabled = False  # type: ignore[assignment]
    try:
        with sdpa_kernel(SDPBackend.MATH), without_cudnn():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        mkldnn.enabled = fused
