"""g − Vᵀ V g in one pass over V: a kernel whose programs exchange their parts of V g.

Each program owns some columns of one seed's rows. One group of its warps brings blocks of rows onto
the chip, two take turns to publish what they contribute to c_k = ⟨v_k, g⟩, and one collects all
contributions and subtracts c_k v_k, the program's part of v_k still being there. Contributions are
added up in one order, so the result is the same in every run.

A program's columns are pieces of one width, and perhaps one of half that width: with whole pieces
alone some processors would have nothing to do.
"""

from dataclasses import dataclass
from functools import cache
from typing import final

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from forgetless.subspace.dense import aligned
from forgetless.support.validation import first_line, warn_caller

_HOPPER = 9  # the compute capability that the kernel was made for
_WARPS = 4  # in each of the kernel's four groups
_PIECE = 16 * 32 * _WARPS  # bytes of one row, 16 in each thread
# Bytes of a block of rows at most, where a row has no more, by the bytes of a number. Small blocks
# hide latency best; of short numbers there are twice as many, and adding them up needs rows enough.
_BLOCKS = {4: 20 << 10, 2: 48 << 10}
_FEWEST_STAGES = 3
_MOST_NUMBERS = 96  # of a row in the registers of a thread: more spill into slow memory
_MOST_PARTS = 128  # beyond that, adding up contributions takes longer than the parts save
_SPARE_BYTES = 2048  # of shared memory, for all that is not rows
_LARGEST_INDEX = 2**31 - 1


def project_out_in_one_pass(g: Tensor, rows: Tensor) -> Tensor | None:
    """g̃ = g − Vᵀ V g for each seed; None where the kernel cannot be used.

    Arguments:
        g: (S, p) in float32, contiguous.
        rows: V, (S, K, p) in float32 or bfloat16, K ≥ 1; rows of zeros are allowed.
    """
    if rows.stride(0) % 16 or rows.stride(1) % 16 or rows.data_ptr() % 16:
        return None
    seeds, count, size = rows.shape
    plan = _plan(rows.device, rows.dtype, seeds, size)
    if plan is None or seeds * max(size, (count + plan.height) * plan.parts) > _LARGEST_INDEX:
        return None
    return plan(g, rows)


@final
@dataclass(frozen=True)
class LaunchPlan:
    """How the work of the one-pass kernel is cut up.

    Attributes:
        groups: seeds that are worked on at a time.
        parts: programs that share a seed.
        pieces: of a row, that each program owns.
        half: columns of one more piece, half as wide; 0 for none.
        width: columns in a piece.
        height: rows in a block.
        stages: blocks that are on the chip at a time.
    """

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
            project_out_kernel[(self.groups * self.parts,)](
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
    properties = torch.cuda.get_device_properties(device)
    if properties.major != _HOPPER:
        return None
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
            best = duration, LaunchPlan(groups, parts, pieces, half, width, height, stages)
    return None if best is None else _tried(best[1], device, dtype, seeds, size)


def _tried(
    plan: LaunchPlan, device: torch.device, dtype: torch.dtype, seeds: int, size: int
) -> LaunchPlan | None:
    """The plan, if it can be compiled and run here."""
    g = torch.zeros(seeds, size, device=device)
    try:
        plan(g, aligned(g.unsqueeze(1).to(dtype), 1))
    except Exception as error:  # of Triton, of the compiler behind it, or of the driver
        reason = first_line(error)
        warn_caller(f"projections take two passes, for the kernel fails: {reason}")
        return None
    return plan


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not below the number."""
    return 1 << (number - 1).bit_length()


@gluon.constexpr_function
def _tile(width, warps):
    """How a block of rows is spread over threads: all along the columns, neighbours to each."""
    return gl.BlockedLayout([1, width // (32 * warps)], [1, 32], [1, warps], [1, 0])


@gluon.jit
def _columns(ring):
    """The columns of a piece, from 0."""
    width: gl.constexpr = ring.shape[2]
    return gl.arange(0, width, gl.SliceLayout(0, _tile(width, gl.num_warps())))


@gluon.jit
def _rows(ring):
    """The rows of a block, from 0, as they go with a piece's columns."""
    height: gl.constexpr = ring.shape[1]
    width: gl.constexpr = ring.shape[2]
    return gl.arange(0, height, gl.SliceLayout(1, _tile(width, gl.num_warps())))


@gluon.jit
def _block(ring, slot):
    """A piece of the block of rows in a slot."""
    width: gl.constexpr = ring.shape[2]
    return ring.index(slot).load(_tile(width, gl.num_warps())).to(gl.float32)


@gluon.jit
def _clear(ring, slot):
    """Zeros in a slot."""
    height: gl.constexpr = ring.shape[1]
    width: gl.constexpr = ring.shape[2]
    ring.index(slot).store(gl.zeros([height, width], ring.dtype, _tile(width, gl.num_warps())))


@gluon.jit
def _of_threads(products):
    """The sums over the neighbours that each thread has, (height, columns) → (height, threads)."""
    threads: gl.constexpr = 32 * gl.num_warps()
    height: gl.constexpr = products.shape[0]
    neighbours: gl.constexpr = products.shape[1] // threads
    sums = gl.sum(products.reshape([height, threads, neighbours]), 2)
    return gl.convert_layout(sums, _tile(threads, gl.num_warps()))


@gluon.jit
def _await(bits, pointers):
    """The published bits, of which some may have been read before they were there."""
    return gl.inline_asm_elementwise(
        """
        {
            .reg .pred missing;
            mov.u32 $0, $1;
        again:
            setp.eq.u32 missing, $0, 0xffffffff;
            @missing ld.relaxed.gpu.global.u32 $0, [$2];
            @missing bra again;
        }
        """,
        "=&r,r,l",
        [bits, pointers.to(gl.int64)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _bring(
    rings, full, free, rows, seeds, count, stride, seed_stride,
    span: gl.constexpr, groups: gl.constexpr, parts: gl.constexpr,
):  # fmt: skip
    """Load block after block into the rings as slots become free; past the last row it again."""
    stages: gl.constexpr = rings[0].shape[0]
    height: gl.constexpr = rings[0].shape[1]
    width: gl.constexpr = rings[0].shape[2]
    first = gl.program_id(0) % parts * span
    turn = 0
    for seed in range(gl.program_id(0) // parts, seeds, groups):
        source = rows + seed.to(gl.int64) * seed_stride
        for start in range(0, count, height):
            slot = turn % stages
            mbarrier.wait(free.index(slot), (turn // stages & 1) ^ 1)
            for piece in gl.static_range(len(rings)):
                row = gl.minimum(start + _rows(rings[piece]), count - 1)
                columns = first + piece * width + _columns(rings[piece])
                async_copy.async_copy_global_to_shared(
                    rings[piece].index(slot),
                    source + row.to(gl.int64)[:, None] * stride + columns[None, :],
                    (columns < stride)[None, :],
                )
            async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
            turn += 1


@gluon.jit
def _publish(
    rings, full, g, contributions, seeds, count, size, span: gl.constexpr,
    groups: gl.constexpr, parts: gl.constexpr, number: gl.constexpr,
):  # fmt: skip
    """For every second block of rows, from `number` on, what the program's columns give of V g."""
    pieces: gl.constexpr = len(rings)
    stages: gl.constexpr = rings[0].shape[0]
    height: gl.constexpr = rings[0].shape[1]
    width: gl.constexpr = rings[0].shape[2]
    whole: gl.constexpr = pieces - (rings[pieces - 1].shape[2] < width)
    threads: gl.constexpr = _tile(32 * gl.num_warps(), gl.num_warps())
    part = gl.program_id(0) % parts
    own = gl.arange(0, height, gl.SliceLayout(1, threads)) * parts + part
    blocks = (count + height - 1) // height
    turn = 0
    for seed in range(gl.program_id(0) // parts, seeds, groups):
        vector = ()
        for piece in gl.static_range(pieces):
            columns = part * span + piece * width + _columns(rings[piece])
            vector = vector + (gl.load(g + seed * size + columns, mask=columns < size, other=0.0),)
        for block in range(number, blocks, 2):
            now = turn + block
            slot = now % stages
            mbarrier.wait(full.index(slot), now // stages & 1)
            products = _block(rings[0], slot) * vector[0][None, :]
            for piece in gl.static_range(1, whole):
                products += _block(rings[piece], slot) * vector[piece][None, :]
            sums = _of_threads(products)
            for piece in gl.static_range(whole, pieces):
                sums += _of_threads(_block(rings[piece], slot) * vector[piece][None, :])
            bits = gl.sum(sums, 1).to(gl.int32, bitcast=True)
            bits = gl.where(bits == -1, 0x7FFFFFFF, bits)
            place = (seed * blocks + block) * (height * parts)
            gl.store(contributions + place + own, bits)
        turn += blocks


@gluon.jit
def _subtract(
    rings, full, free, g, out, contributions, seeds, count, size, span: gl.constexpr,
    groups: gl.constexpr, parts: gl.constexpr, parts_rounded: gl.constexpr,
):  # fmt: skip
    """Out = g − Σ_k c_k v_k in the program's columns, block by block as the c_k become known."""
    stages: gl.constexpr = rings[0].shape[0]
    height: gl.constexpr = rings[0].shape[1]
    width: gl.constexpr = rings[0].shape[2]
    table: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [gl.num_warps(), 1], [1, 0])
    part = gl.program_id(0) % parts
    # Entry [k, j] is what program j contributes to row k.
    row = gl.arange(0, height, gl.SliceLayout(1, table))
    other = gl.arange(0, parts_rounded, gl.SliceLayout(0, table))
    entries = contributions + row[:, None] * parts + gl.minimum(other, parts - 1)[None, :]
    blocks = (count + height - 1) // height
    turn = 0
    for seed in range(gl.program_id(0) // parts, seeds, groups):
        left = ()
        for piece in gl.static_range(len(rings)):
            columns = part * span + piece * width + _columns(rings[piece])
            left = left + (gl.load(g + seed * size + columns, mask=columns < size, other=0.0),)
        early = gl.load(entries + seed * blocks * (height * parts), volatile=True)
        for block in range(blocks):
            slot = turn % stages
            place = (seed * blocks + block) * (height * parts)
            values = _await(early, entries + place).to(gl.float32, bitcast=True)
            # The next block's are asked for now and looked at when this one is done.
            following = (seed * blocks + gl.minimum(block + 1, blocks - 1)) * (height * parts)
            early = gl.load(entries + following, volatile=True)
            c = gl.sum(gl.where((other < parts)[None, :], values, 0.0), 1)
            c = gl.where(block * height + row < count, c, 0.0)
            mbarrier.wait(full.index(slot), turn // stages & 1)
            less = ()
            for piece in gl.static_range(len(rings)):
                less = less + (left[piece] - _along(c, rings[piece], slot),)
            left = less
            mbarrier.arrive(free.index(slot), count=1)
            turn += 1
        for piece in gl.static_range(len(rings)):
            columns = part * span + piece * width + _columns(rings[piece])
            gl.store(out + seed * size + columns, left[piece], mask=columns < size)


@gluon.jit
def _along(c, ring, slot):
    """Σ_k c_k v_k over a block's rows, in the columns of a piece."""
    width: gl.constexpr = ring.shape[2]
    c = gl.convert_layout(c, gl.SliceLayout(1, _tile(width, gl.num_warps())))[:, None]
    return gl.sum(c * _block(ring, slot), 0)


@gluon.jit(do_not_specialize=["seeds", "count", "size"])
def project_out_kernel(
    g, rows, out, contributions, seeds, count, size, stride, seed_stride,
    groups: gl.constexpr, parts: gl.constexpr, parts_rounded: gl.constexpr, height: gl.constexpr,
    pieces: gl.constexpr, half: gl.constexpr, width: gl.constexpr, stages: gl.constexpr,
    loaders: gl.constexpr, subtracters: gl.constexpr,
):  # fmt: skip
    """out[s] = g[s] − Σ_k ⟨v_k, g[s]⟩ v_k for every seed s.

    Programs s·parts … (s+1)·parts − 1 share a seed; each has some pieces of its columns.
    """
    kind: gl.constexpr = rows.dtype.element_ty
    warps: gl.constexpr = gl.num_warps()
    span: gl.constexpr = pieces * width + half
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    # One ring of slots for each piece: the compiler sees that filling one leaves the others alone.
    rings = ()
    for _ in gl.static_range(pieces):
        rings = rings + (gl.allocate_shared_memory(kind, [stages, height, width], shared),)
    if half > 0:
        rings = rings + (gl.allocate_shared_memory(kind, [stages, height, half], shared),)
    # Columns past the end are never loaded: they stay zero.
    if (gl.program_id(0) % parts + 1) * span > stride:
        for slot in range(stages):
            for piece in gl.static_range(len(rings)):
                _clear(rings[piece], slot)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(stages):
        mbarrier.init(full.index(slot), count=32 * loaders)
        mbarrier.init(free.index(slot), count=1)
    gl.thread_barrier()
    even: gl.constexpr = 0
    odd: gl.constexpr = 1
    gl.warp_specialize(
        [
            (
                _publish,
                (rings, full, g, contributions, seeds, count, size, span, groups, parts, even),
            ),
            (
                _subtract,
                (
                    rings, full, free, g, out, contributions, seeds, count, size, span, groups,
                    parts, parts_rounded,
                ),
            ),
            (
                _bring,
                (
                    rings, full, free, rows, seeds, count, stride, seed_stride, span, groups, parts,
                ),
            ),
            (
                _publish,
                (rings, full, g, contributions, seeds, count, size, span, groups, parts, odd),
            ),
        ],
        [subtracters, loaders, warps],
        [144, 64, 128],
    )  # fmt: skip
