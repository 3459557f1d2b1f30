"""Where the directions that must not be moved along are kept."""

from forgetless.subspace.dense import DenseSubspace

__all__ = ["DenseSubspace"]
