"""How much memory a device has, and how much of it is free."""

import os
from pathlib import Path

import torch


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
