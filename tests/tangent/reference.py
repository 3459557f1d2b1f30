"""What the tests of tangent features share: a loop of autograd calls, and small networks."""

import torch
from torch import Tensor, nn

CLOSE = {"atol": 1e-10, "rtol": 1e-9}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def integers(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def built(make, seed: int = 0) -> nn.Module:
    """The network in float64 and eval mode, with nothing left at its neutral initial value."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make().double().eval()
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2)
            if hasattr(module, "weight") and "Norm" in type(module).__name__:
                nn.init.normal_(module.weight)
                if module.bias is not None:
                    nn.init.normal_(module.bias)
    return model


def by_loop(model: nn.Module, x, y: Tensor | None = None, params=None) -> Tensor:
    """φ from one autograd call a row, each sample alone in its batch."""
    chosen = [p for p in params or model.parameters() if params or p.requires_grad]
    n = len(x) if isinstance(x, Tensor) else len(next(iter(_tensors(x))))
    rows = []
    for i in range(n):
        outputs = _run(model, x, i).reshape(-1)
        wanted = outputs if y is None else outputs[y[i]].reshape(1)
        for output in wanted:
            grads = torch.autograd.grad(output, chosen, allow_unused=True, retain_graph=True)
            pairs = zip(grads, chosen, strict=True)
            grads = [torch.zeros_like(p) if g is None else g.to_dense() for g, p in pairs]
            rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows)


def _tensors(x):
    return x.values() if isinstance(x, dict) else x


def _run(model: nn.Module, x, i: int) -> Tensor:
    if isinstance(x, Tensor):
        return model(x[i : i + 1])
    if isinstance(x, dict):
        return model(**{key: value[i : i + 1] for key, value in x.items()})
    return model(*(value[i : i + 1] for value in x))


def assert_is(phi, dense: Tensor) -> None:
    """Every operation of the operator against the matrix that it stands for."""
    n, p = dense.shape
    assert phi.shape == (n, p)
    assert phi.T.shape == (p, n)
    v, u = random(p, 3, seed=1), random(n, 3, seed=2)
    scale = float(dense.norm()) or 1.0

    def close(found: Tensor, expected: Tensor, size: float) -> None:
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11 * size)

    close(phi.dense(), dense, scale)
    close(phi.gram(), dense @ dense.T, scale**2)
    close(phi.cross_gram(phi), dense @ dense.T, scale**2)
    close(phi @ v, dense @ v, scale)
    close(phi @ v[:, 0], dense @ v[:, 0], scale)
    close(phi.T @ u, dense.T @ u, scale)
    close(phi.T @ u[:, 0], dense.T @ u[:, 0], scale)
    close(phi.T.T @ v, dense @ v, scale)
    close(phi.combine(u.T), u.T @ dense, scale)
    close(phi.squared_sum(), dense.square().sum(0), scale**2)
    for centred in (False, True):
        matrix = dense - dense.mean(0) if centred else dense
        sigma = torch.linalg.svdvals(matrix)
        values, directions = phi.top(min(3, n, p), centred=centred)
        k = len(values)
        assert k == len(sigma) or (sigma[k : min(3, n, p)] <= 1e-3 * sigma[0] + 1e-6 * scale).all()
        # A Gram matrix knows squares, to its own rounding.
        torch.testing.assert_close(
            values.square(), sigma[:k].square(), rtol=1e-9, atol=1e-14 * scale**2
        )
        close(directions @ directions.T, torch.eye(k).double(), 1.0)
        # Singular values may be close to each other: compare what the directions keep of φ.
        kept = (matrix @ directions.T).square().sum(0)
        torch.testing.assert_close(kept, sigma[:k].square(), rtol=1e-7, atol=1e-12)
