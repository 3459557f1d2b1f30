"""The top directions of several features, at once where that is faster."""

from collections.abc import Sequence

from torch import Tensor

from forgetless.tangent.features import TangentFeatures
from forgetless.tangent.memory import memory_of
from forgetless.tangent.spectrum import principal_weights_of_each

_MATRICES = 6  # as large as a Gram matrix, while its eigenvectors are looked for
_EXACT = 8  # bytes of a number


def top_weights_of_each(
    features: Sequence[TangentFeatures], components: int | float, *, centred: bool
) -> list[tuple[Tensor, Tensor, float]]:
    """`TangentFeatures.top_weights` of each; on a GPU that has room for it, of all at once."""
    if not _have_room(features):
        return [phi.top_weights(components, centred=centred) for phi in features]
    grams, dtype = [phi.precise_enough_gram() for phi in features], features[0].like.dtype
    return principal_weights_of_each(grams, components, centred=centred, dtype=dtype)


def _have_room(features: Sequence[TangentFeatures]) -> bool:
    like = features[0].like
    needed = _MATRICES * _EXACT * sum(len(phi) ** 2 for phi in features)
    return like.is_cuda and needed <= (memory_of(like.device) or 0)
