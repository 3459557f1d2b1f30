"""Rows on a GPU: how they lie in memory, and the plan by which one kernel passes over them once."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, final

import torch
from torch import Tensor

_ALIGNMENT = 128  # bytes: a line of a GPU's cache. Rows across its borders cost a third more time
_WARPS = 4  # in each of the kernel's four groups
_PIECE = 16 * 32 * _WARPS  # bytes of one row, 16 in each thread
# Bytes of a block of rows at most, where a row has no more, by the bytes of a number. Small blocks
# hide latency best; of short numbers there are twice as many, and adding them up needs rows enough.
_BLOCKS = {4: 20 << 10, 2: 48 << 10}
_FEWEST_STAGES = 3
_MOST_NUMBERS = 96  # of a row in the registers of a thread: more spill into slow memory
_MOST_PARTS = 128  # what more programs contribute takes longer to add up than they save
_SPARE_BYTES = 2048  # of shared memory, for all that is not rows
_LARGEST_INDEX = 2**31 - 1


def aligned(like: Tensor, count: int) -> Tensor:
    """Zero rows (S, count, p) of the type of `like`, (S, ·, p), each at a multiple of 128 bytes."""
    step = _ALIGNMENT // like.element_size()
    seeds, size = like.shape[0], like.shape[-1]
    return like.new_zeros(seeds, count, -(-size // step) * step)[..., :size]


def laid_out(rows: Tensor) -> Tensor:
    """The same rows (S, K, p), on a GPU laid out as its kernels like them."""
    lined_up = rows.stride(1) * rows.element_size() % _ALIGNMENT == 0
    if lined_up or rows.shape[1] == 0 or not _has_kernel(rows):
        return rows
    return aligned(rows, rows.shape[1]).copy_(rows)


def project_out_in_one_pass(g: Tensor, rows: Tensor) -> Tensor | None:
    """g̃ = g − Vᵀ V g for each seed by the one-pass kernel; None where it cannot be used.

    Arguments:
        g: (S, p).
        rows: V, (S, K, p), orthonormal rows, K ≥ 1; rows of zeros are allowed.
    """
    lined_up = rows.stride(0) % 16 == rows.stride(1) % 16 == 0 and rows.data_ptr() % 16 == 0
    if not lined_up or not _fit_a_kernel(g, rows):
        return None
    seeds, count, size = rows.shape
    plan = _plan_of(rows)
    if plan is None or seeds * max(size, (count + plan.height) * plan.parts) > _LARGEST_INDEX:
        return None
    return plan(g.contiguous(), rows)


def project_out_in_two_passes(g: Tensor, rows: Tensor) -> Tensor | None:
    """The same by kernels that pass over the rows twice; None where they cannot be used."""
    kernels = _two_pass_kernels() if _fit_a_kernel(g, rows) else None
    return None if kernels is None else kernels(g.contiguous(), rows)


def _fit_a_kernel(g: Tensor, rows: Tensor) -> bool:
    return (
        g.dtype == torch.float32
        and g.device == rows.device
        and _has_kernel(rows)
        and rows.stride(2) == 1
        and not (torch.is_grad_enabled() and g.requires_grad)
    )


def _has_kernel(rows: Tensor) -> bool:
    return rows.is_cuda and rows.dtype in (torch.float32, torch.bfloat16)


def _plan_of(rows: Tensor) -> "LaunchPlan | None":
    return _plan(rows.device, rows.dtype, rows.shape[0], rows.shape[2])


@final
@dataclass(frozen=True)
class LaunchPlan:
    """How the work of the one-pass kernel is cut up.

    Attributes:
        kernel: the compiled function.
        groups: seeds that are worked on at a time.
        parts: programs that share a seed.
        pieces: of a row, that each program owns.
        half: columns of one more piece, half as wide; 0 for none.
        width: columns in a piece.
        height: rows in a block.
        stages: blocks that are on the chip at a time.
    """

    kernel: Any
    groups: int
    parts: int
    pieces: int
    half: int
    width: int
    height: int
    stages: int

    def __call__(self, g: Tensor, rows: Tensor) -> Tensor:
        """One pass over the rows."""
        seeds, count, size = rows.shape
        blocks = -(-count // self.height)
        out = torch.empty_like(g)
        # A NaN that no arithmetic gives stands for what is not there yet.
        unpublished = torch.full(
            (seeds, blocks * self.height, self.parts), -1, dtype=torch.int32, device=g.device
        )
        # A cooperative grid is started whole or not at all: no program waits for one that is not
        # there.
        with torch.cuda.device_of(g):
            self.kernel[(self.groups * self.parts,)](
                g, rows, out, unpublished, seeds, count, size, rows.stride(1), rows.stride(0),
                groups=self.groups, parts=self.parts, parts_rounded=_power_of_two(self.parts),
                height=self.height, pieces=self.pieces, half=self.half, width=self.width,
                stages=self.stages, loaders=_WARPS, subtracters=_WARPS, num_warps=_WARPS,
                launch_cooperative_grid=True,
            )  # fmt: skip
        return out


@cache
def _plan(device: torch.device, dtype: torch.dtype, seeds: int, size: int) -> LaunchPlan | None:
    """The plan that keeps most processors busy; None if a block of rows does not fit on the chip.

    Each program takes one processor. It streams `pieces` of every row, so the whole takes as long
    as pieces times the rounds of seeds.
    """
    kernel = _kernel(device)
    if kernel is None:
        return None
    properties = torch.cuda.get_device_properties(device)
    processors = properties.multi_processor_count
    shared = getattr(
        properties, "shared_memory_per_block_optin", properties.shared_memory_per_block
    )
    room = shared - _SPARE_BYTES
    width = _PIECE // dtype.itemsize
    most = min(room // (_FEWEST_STAGES * _PIECE), _MOST_NUMBERS * 32 * _WARPS // width)
    best: tuple[int, LaunchPlan] | None = None
    for halves in range(2, 2 * most + 1):
        pieces, half = halves // 2, halves % 2 * width // 2
        parts = -(-size // (pieces * width + half))
        if parts > min(processors, _MOST_PARTS):
            continue
        groups = min(processors // parts, seeds)
        duration = halves * -(-seeds // groups)
        # Of two that take as long, the one with fewer and larger parts: less to add up.
        if best is None or (duration, parts) < (best[0], best[1].parts):
            bytes_of_a_row = (pieces * width + half) * dtype.itemsize
            height = _power_of_two(_BLOCKS[dtype.itemsize] // bytes_of_a_row + 1) // 2 or 1
            stages = room // (bytes_of_a_row * height)
            best = duration, LaunchPlan(kernel, groups, parts, pieces, half, width, height, stages)
    return None if best is None else _tried(best[1], device, dtype, seeds, size)


def _tried(
    plan: LaunchPlan, device: torch.device, dtype: torch.dtype, seeds: int, size: int
) -> LaunchPlan | None:
    """The plan, if it can be compiled and run here."""
    g = torch.zeros(seeds, size, device=device)
    try:
        plan(g, aligned(g.unsqueeze(1).to(dtype), 1))
    except Exception as error:  # of Triton, of the compiler behind it, or of the driver
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        warnings.warn(f"projections take two passes, for the kernel fails: {reason}", stacklevel=2)
        return None
    return plan


@cache
def _kernel(device: torch.device) -> Any:
    """The one-pass kernel, if there is a Triton that can compile it for the device."""
    if torch.cuda.get_device_capability(device)[0] != 9:  # Hopper, for which it was made
        return None
    try:
        from forgetless.subspace.kernels.onepass import project_out_kernel
    except ImportError:
        return None
    return project_out_kernel


@cache
def _two_pass_kernels() -> Callable[[Tensor, Tensor], Tensor] | None:
    """The two-pass kernels, if there is a Triton that can compile them."""
    try:
        from forgetless.subspace.kernels.twopass import project_out_in_two
    except ImportError:
        return None
    return project_out_in_two


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not below the number."""
    return 1 << (number - 1).bit_length()
