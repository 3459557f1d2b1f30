"""Per-sample gradients of any module, one row a sample: by vmap, and by a loop where that fails."""

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.func import grad, vmap

from forgetless.tangent.functional import called
from forgetless.tangent.problem import Problem

# What vmap raises when an operation or a branch on data does not allow it.
VMAP_ERRORS = (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError, KeyError)


def rows_by_vmap(problem: Problem, names: tuple[str, ...], count: int) -> list[dict[str, Tensor]]:
    """For each of the K scalars, the named parameters' gradients (n, size)."""

    def of_one(
        leaves: dict[str, Tensor],
        args: tuple[Tensor, ...],
        kwargs: Mapping[str, Tensor],
        belongings: tuple[Tensor, ...],
        column: int,
    ) -> Tensor:
        outputs = called(
            problem.module,
            {**problem.values, **leaves},
            tuple(a.unsqueeze(0) for a in args),
            {key: a.unsqueeze(0) for key, a in kwargs.items()},
        )
        scalars = problem.scalar(outputs, *(b.unsqueeze(0) for b in belongings))
        return scalars.reshape(-1)[column]

    leaves = {name: problem.values[name] for name in names}
    samples = problem.args, dict(problem.kwargs), problem.belongings
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of slow batching rules
        for column in range(count):
            per_sample = vmap(grad(of_one), in_dims=(None, 0, 0, 0, None))
            gradients = per_sample(leaves, *samples, column)
            found.append({name: rows.reshape(problem.n, -1) for name, rows in gradients.items()})
    return found


def rows_by_loop(problem: Problem, names: tuple[str, ...], count: int) -> list[dict[str, Tensor]]:
    """The same from one forward pass a sample and one backward pass a row."""
    found: list[dict[str, list[Tensor]]] = [{name: [] for name in names} for _ in range(count)]
    for i in range(problem.n):
        leaves = problem.leaves(names)
        scalars = problem.select(slice(i, i + 1)).scalars(leaves)
        for column, scalar in enumerate(scalars.reshape(-1)):
            gradients = gradients_of(scalar, leaves)
            for name, leaf in leaves.items():
                gradient = gradients[name]
                row = torch.zeros_like(leaf) if gradient is None else gradient
                found[column][name].append(row.flatten())
    return [{name: torch.stack(rows) for name, rows in of.items()} for of in found]


def gradients_of(scalar: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """The gradient with respect to each leaf, None where the scalar does not depend on it."""
    if not scalar.requires_grad:
        return dict.fromkeys(leaves)
    gradients = torch.autograd.grad(
        scalar, list(leaves.values()), allow_unused=True, retain_graph=True
    )
    dense = [g.to_dense() if g is not None and g.is_sparse else g for g in gradients]
    return dict(zip(leaves, dense, strict=True))
