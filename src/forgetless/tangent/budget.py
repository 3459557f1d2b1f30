"""How much memory there is, so that what cannot fit is refused and not tried."""

import os

import torch
from torch import Tensor

from forgetless.support.errors import ConfigError


def require_bytes(what: str, needed: int, like: Tensor) -> None:
    """Raise if so many bytes can never fit where the tensor `like` lives."""
    there = available_bytes(like.device)
    if there is not None and needed > there:
        raise ConfigError(
            f"{what} would take {needed:,} bytes and {like.device} has {there:,}: "
            "take fewer samples, or use phi @ v and phi.T @ u, which do not build it"
        )


def available_bytes(device: torch.device) -> int | None:
    """Bytes that the device has free (CUDA) or has at all (CPU); None if that is not known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
