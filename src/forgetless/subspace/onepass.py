"""g − Vᵀ V g in one pass over V: a kernel whose programs exchange what each knows of V g.

Each program owns some columns of one seed's rows. One group of its warps brings blocks of rows onto
the chip, one publishes what they contribute to c_k = ⟨v_k, g⟩, and one collects everyone's
contributions and subtracts c_k v_k, the program's part of v_k still being there. Contributions are
added up in one order, so the result is the same in every run.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.constexpr_function
def _tile(width, warps):
    """How a block of rows is spread over threads: all along the columns, neighbours to each."""
    return gl.BlockedLayout([1, width // (32 * warps)], [1, 32], [1, warps], [1, 0])


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
    groups: gl.constexpr, parts: gl.constexpr,
):  # fmt: skip
    """Load block after block into the rings as slots become free; past the last row it again."""
    pieces: gl.constexpr = len(rings)
    stages: gl.constexpr = rings[0].shape[0]
    height: gl.constexpr = rings[0].shape[1]
    width: gl.constexpr = rings[0].shape[2]
    tile: gl.constexpr = _tile(width, gl.num_warps())
    first = gl.program_id(0) % parts * (pieces * width)
    turn = 0
    for seed in range(gl.program_id(0) // parts, seeds, groups):
        source = rows + seed.to(gl.int64) * seed_stride
        for start in range(0, count, height):
            slot = turn % stages
            mbarrier.wait(free.index(slot), (turn // stages & 1) ^ 1)
            row = gl.minimum(start + gl.arange(0, height, gl.SliceLayout(1, tile)), count - 1)
            pointers = source + row.to(gl.int64)[:, None] * stride
            for piece in gl.static_range(pieces):
                columns = first + piece * width + gl.arange(0, width, gl.SliceLayout(0, tile))
                async_copy.async_copy_global_to_shared(
                    rings[piece].index(slot),
                    pointers + columns[None, :],
                    (columns < stride)[None, :],
                )
            async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
            turn += 1


@gluon.jit
def _publish(
    rings, full, g, contributions, seeds, count, size, groups: gl.constexpr, parts: gl.constexpr
):
    """For every block of rows the part of V g that comes from the program's columns."""
    pieces: gl.constexpr = len(rings)
    stages: gl.constexpr = rings[0].shape[0]
    height: gl.constexpr = rings[0].shape[1]
    width: gl.constexpr = rings[0].shape[2]
    tile: gl.constexpr = _tile(width, gl.num_warps())
    part = gl.program_id(0) % parts
    own = gl.arange(0, height, gl.SliceLayout(1, tile)) * parts + part
    blocks = (count + height - 1) // height
    turn = 0
    for seed in range(gl.program_id(0) // parts, seeds, groups):
        vector = ()
        for piece in gl.static_range(pieces):
            columns = (part * pieces + piece) * width
            columns += gl.arange(0, width, gl.SliceLayout(0, tile))
            vector = vector + (gl.load(g + seed * size + columns, mask=columns < size, other=0.0),)
        for block in range(blocks):
            slot = turn % stages
            mbarrier.wait(full.index(slot), turn // stages & 1)
            products = gl.zeros([height, width], gl.float32, tile)
            for piece in gl.static_range(pieces):
                rows = rings[piece].index(slot).load(tile).to(gl.float32)
                products += rows * vector[piece][None, :]
            bits = gl.sum(products, 1).to(gl.int32, bitcast=True)
            bits = gl.where(bits == -1, 0x7FFFFFFF, bits)
            place = (seed * blocks + block) * (height * parts)
            gl.store(contributions + place + own, bits)
            turn += 1


@gluon.jit
def _subtract(
    rings, full, free, g, out, contributions, seeds, count, size,
    groups: gl.constexpr, parts: gl.constexpr, parts_rounded: gl.constexpr,
):  # fmt: skip
    """Out = g − Σ_k c_k v_k in the program's columns, block by block as the c_k become known."""
    pieces: gl.constexpr = len(rings)
    stages: gl.constexpr = rings[0].shape[0]
    height: gl.constexpr = rings[0].shape[1]
    width: gl.constexpr = rings[0].shape[2]
    warps: gl.constexpr = gl.num_warps()
    tile: gl.constexpr = _tile(width, warps)
    table: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [warps, 1], [1, 0])
    part = gl.program_id(0) % parts
    # Entry [k, j] is what program j contributes to row k.
    row = gl.arange(0, height, gl.SliceLayout(1, table))
    other = gl.arange(0, parts_rounded, gl.SliceLayout(0, table))
    entries = contributions + row[:, None] * parts + gl.minimum(other, parts - 1)[None, :]
    blocks = (count + height - 1) // height
    turn = 0
    for seed in range(gl.program_id(0) // parts, seeds, groups):
        left = ()
        for piece in gl.static_range(pieces):
            columns = (part * pieces + piece) * width
            columns += gl.arange(0, width, gl.SliceLayout(0, tile))
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
            c = gl.convert_layout(c, gl.SliceLayout(1, tile))[:, None]
            mbarrier.wait(full.index(slot), turn // stages & 1)
            less = ()
            for piece in gl.static_range(pieces):
                rows = rings[piece].index(slot).load(tile).to(gl.float32)
                less = less + (left[piece] - gl.sum(c * rows, 0),)
            left = less
            mbarrier.arrive(free.index(slot), count=1)
            turn += 1
        for piece in gl.static_range(pieces):
            columns = (part * pieces + piece) * width
            columns += gl.arange(0, width, gl.SliceLayout(0, tile))
            gl.store(out + seed * size + columns, left[piece], mask=columns < size)


@gluon.jit(do_not_specialize=["seeds", "count", "size"])
def project_out_kernel(
    g, rows, out, contributions, seeds, count, size, stride, seed_stride,
    groups: gl.constexpr, parts: gl.constexpr, parts_rounded: gl.constexpr, height: gl.constexpr,
    pieces: gl.constexpr, width: gl.constexpr, stages: gl.constexpr, loaders: gl.constexpr,
    subtracters: gl.constexpr,
):  # fmt: skip
    """out[s] = g[s] − Σ_k ⟨v_k, g[s]⟩ v_k for every seed s.

    Programs s·parts … (s+1)·parts − 1 share a seed; each has some pieces of its columns.
    """
    kind: gl.constexpr = rows.dtype.element_ty
    warps: gl.constexpr = gl.num_warps()
    tile: gl.constexpr = _tile(width, warps)
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    # One ring of slots for each piece: the compiler sees that filling one leaves the others alone.
    rings = ()
    for _ in gl.static_range(pieces):
        rings = rings + (gl.allocate_shared_memory(kind, [stages, height, width], shared),)
    # Columns past the end are never loaded: they stay zero.
    for slot in range(stages):
        for piece in gl.static_range(pieces):
            rings[piece].index(slot).store(gl.zeros([height, width], kind, tile))
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [stages, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(stages):
        mbarrier.init(full.index(slot), count=32 * loaders)
        mbarrier.init(free.index(slot), count=1)
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (_publish, (rings, full, g, contributions, seeds, count, size, groups, parts)),
            (
                _subtract,
                (
                    rings, full, free, g, out, contributions, seeds, count, size,
                    groups, parts, parts_rounded,
                ),
            ),
            (_bring, (rings, full, free, rows, seeds, count, stride, seed_stride, groups, parts)),
        ],
        [subtracters, loaders],
        [168, 64],
    )  # fmt: skip
