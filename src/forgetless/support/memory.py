"""How much memory a device has, and how much of it is free."""

import os
from pathlib import Path

import torch

from forgetless.support.validation import MemoryShortageError, format_bytes


def free_memory(device: torch.device) -> float:
    """Free bytes of a GPU, or of main memory without swapping; infinite if unknown."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        for line in Path("/proc/meminfo").read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    except (OSError, ValueError):
        pass  # a system without it
    return _pages("SC_AVPHYS_PAGES")


def shortage_of(what: str, needed: float, device: torch.device) -> str:
    """A sentence if so many bytes are not free, otherwise "".

    Arguments:
        what: takes them.
        needed: bytes.
        device: where.
    """
    free = free_memory(device)
    if device.type == "cuda":  # torch gives memory that it holds and does not use
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if needed <= free:
        return ""
    return (
        f"{what} takes {format_bytes(needed)} of memory, and {format_bytes(free)} are free: leave "
        "out large layers with exclude=, or store less"
    )


def require_memory(what: str, needed: float, device: torch.device) -> None:
    """Reject what does not fit the memory that is free; arguments as of `shortage_of`."""
    sentence = shortage_of(what, needed, device)
    if sentence:
        raise MemoryShortageError(sentence)


def total_memory(device: torch.device) -> float:
    """All bytes of a GPU, or of main memory; infinite if unknown."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[1])
    return _pages("SC_PHYS_PAGES")


def _pages(name: str) -> float:
    """The bytes of a number of pages that the system knows by name; infinite if it does not."""
    if name not in getattr(os, "sysconf_names", {}):
        return float("inf")
    return float(os.sysconf(name)) * os.sysconf("SC_PAGE_SIZE")
