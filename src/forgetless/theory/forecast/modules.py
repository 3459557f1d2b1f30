"""What some layers need so that a network can be copied and differentiated in every way."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from forgetless.support.errors import ConfigError
from forgetless.tangent.evaluation import without_cudnn


def copied(module: nn.Module) -> nn.Module:
    """A copy with weights of its own, in eval mode, whose gradients are all dense.

    `torch.nn.utils.weight_norm` and others like it leave in the module a weight that they computed,
    with its graph, and compute it anew in every pass: its value is enough.
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
        reason = str(error).splitlines()[0]
        raise ConfigError(f"model must be one that copy.deepcopy can copy: {reason}") from error
    for part in twin.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag):
            part.sparse = False  # all gradients together are one vector
    return twin.eval()


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Attention and recurrent layers by plain operations.

    Their fused kernels have no forward derivative, and some no second one.
    """
    mkldnn = torch.backends.mkldnn  # whose `flags` warn of other flags
    fast, fused = torch.backends.mha.get_fastpath_enabled(), mkldnn.enabled
    torch.backends.mha.set_fastpath_enabled(False)
    mkldnn.enabled = False  # type: ignore[assignment]
    try:
        with sdpa_kernel(SDPBackend.MATH), without_cudnn():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        mkldnn.enabled = fused
