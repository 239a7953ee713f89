"""Tensor-core instructions and asynchronous copies: fragments against NumPy's matmul, layouts as the PTX manual draws
them (written out here by the manual's formulas per element, not shared with the interpreter)."""

import numpy as np
import pytest

from tests.ptx import Device
from tests.ptx.errors import DataRace, Misaligned, OutOfBounds, ParticipationError, PendingCopy, UnknownInstruction
from tests.ptx.floats import decode, encode
from tests.ptx.snippet import BLOCK, evaluate, run_snippet

RNG = np.random.default_rng(3)
WARPS = 3
LANES = np.arange(32 * WARPS, dtype=np.uint32)


def half_fragments(matrix, rows_of, columns_of, count):
    """(WARPS, R, C) uint16 -> `count` uint32 registers per lane: pairs (i, i + 1) of the manual's element lists."""
    registers = []
    for r in range(count):
        word = np.zeros((WARPS, 32), np.uint32)
        for lane in range(32):
            for j in (0, 1):
                i = 2 * r + j
                word[:, lane] |= matrix[:, rows_of(lane, i), columns_of(lane, i)].astype(np.uint32) << (16 * j)
        registers.append(word.ravel())
    return registers


def accumulator(matrix):
    return [
        np.array([matrix[w, t // 4 + 8 * (i // 2), t % 4 * 2 + i % 2] for w in range(WARPS) for t in range(32)])
        for i in range(4)
    ]


def a_row(lane, i):  # m16n8k16: groupID for i < 2 and 4 <= i < 6, else + 8
    return lane // 4 + (0 if i < 2 or 4 <= i < 6 else 8)


def a_column(lane, i):
    return lane % 4 * 2 + (i & 1) + (8 if i >= 4 else 0)


def b_row(lane, i):
    return lane % 4 * 2 + (i & 1) + (8 if i >= 2 else 0)


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_m16n8k16_of_halves(kind):
    a, b = (encode(RNG.standard_normal(shape).astype(np.float32), kind) for shape in ((WARPS, 16, 16), (WARPS, 16, 8)))
    c = RNG.standard_normal((WARPS, 16, 8)).astype(np.float32)
    inputs = (
        half_fragments(a, a_row, a_column, 4) + half_fragments(b, b_row, lambda lane, i: lane // 4, 2) + accumulator(c)
    )
    code = f"""mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32
        {{o0, o1, o2, o3}}, {{i0, i1, i2, i3}}, {{i4, i5}}, {{i6, i7, i8, i9}};"""
    got = evaluate(code, inputs, ["f32"] * 4)
    expected = np.matmul(decode(a, kind).astype(np.float64), decode(b, kind).astype(np.float64)) + c
    for value, wanted in zip(got, accumulator(expected.astype(np.float32)), strict=True):
        np.testing.assert_array_equal(value, wanted)


def test_m16n8k8_and_half_accumulators():
    a, b, c = (
        encode(RNG.standard_normal(s).astype(np.float32), "f16")
        for s in ((WARPS, 16, 8), (WARPS, 8, 8), (WARPS, 16, 8))
    )
    rows = lambda lane, i: lane // 4 + (8 if i >= 2 else 0)  # noqa: E731
    inputs = half_fragments(a, rows, lambda lane, i: lane % 4 * 2 + (i & 1), 2)
    inputs += half_fragments(b, lambda lane, i: lane % 4 * 2 + i, lambda lane, i: lane // 4, 1)
    inputs += half_fragments(c, rows, lambda lane, i: lane % 4 * 2 + (i & 1), 2)
    got = evaluate(
        "mma.sync.aligned.m16n8k8.row.col.f16.f16.f16.f16 {o0, o1}, {i0, i1}, {i2}, {i3, i4};", inputs, ["b32"] * 2
    )
    wide = [decode(x, "f16").astype(np.float64) for x in (a, b, c)]
    expected = encode(np.matmul(wide[0], wide[1]) + wide[2], "f16")
    for value, wanted in zip(
        got, half_fragments(expected, rows, lambda lane, i: lane % 4 * 2 + (i & 1), 2), strict=True
    ):
        np.testing.assert_array_equal(value, wanted)


def byte_fragments(matrix, is_a, depth):
    """m16n8kK of bytes: A's row is groupID for i < 4 and 8 <= i < 12, else + 8; columns step by 16 after 8 elements."""
    count = depth // 8 if is_a else depth // 16
    registers = []
    for r in range(count):
        word = np.zeros((WARPS, 32), np.uint32)
        for lane in range(32):
            for j in range(4):
                i = 4 * r + j
                if is_a:
                    place = (
                        lane // 4 + (0 if i < 4 or 8 <= i < 12 else 8),
                        lane % 4 * 4 + (i & 3) + (16 if i >= 8 else 0),
                    )
                else:
                    place = lane % 4 * 4 + (i & 3) + (16 if i >= 4 else 0), lane // 4
                word[:, lane] |= matrix[:, place[0], place[1]].astype(np.uint32) << (8 * j)
        registers.append(word.ravel())
    return registers


@pytest.mark.parametrize(("a_type", "b_type", "depth"), [("s8", "s8", 32), ("u8", "s8", 32), ("s8", "s8", 16)])
def test_integer_products(a_type, b_type, depth):
    a, b = RNG.integers(0, 256, (WARPS, 16, depth), np.uint8), RNG.integers(0, 256, (WARPS, depth, 8), np.uint8)
    c = RNG.integers(-(2**31), 2**31, (WARPS, 16, 8)).astype(np.int32)
    inputs = [
        *byte_fragments(a, True, depth),
        *byte_fragments(b, False, depth),
        *(v.view(np.uint32) for v in accumulator(c)),
    ]
    names = [f"i{n}" for n in range(len(inputs))]
    na = depth // 8
    code = f"""mma.sync.aligned.m16n8k{depth}.row.col.s32.{a_type}.{b_type}.s32 {{o0, o1, o2, o3}},
        {{{", ".join(names[:na])}}}, {{{", ".join(names[na:-4])}}}, {{{", ".join(names[-4:])}}};"""
    got = evaluate(code, inputs, ["s32"] * 4)
    types = {"s8": np.int8, "u8": np.uint8}
    exact = np.matmul(a.view(types[a_type]).astype(np.int64), b.view(types[b_type]).astype(np.int64)) + c
    for value, wanted in zip(got, accumulator(exact.astype(np.int32)), strict=True):
        np.testing.assert_array_equal(value, wanted)
    clamped = evaluate(code.replace(".s32.", ".satfinite.s32.", 1), inputs, ["s32"] * 4)
    for value, wanted in zip(clamped, accumulator(np.clip(exact, -(2**31), 2**31 - 1)), strict=True):
        np.testing.assert_array_equal(value, wanted)


def test_tf32_and_fp8_products():
    a, b = RNG.standard_normal((WARPS, 16, 8)).astype(np.float32), RNG.standard_normal((WARPS, 8, 8)).astype(np.float32)
    a, b = ((x.view(np.uint32) & 0xFFFFE000).view(np.float32) for x in (a, b))
    order = [(w, lane) for w in range(WARPS) for lane in range(32)]
    inputs = [
        np.array([a[w, t // 4 + 8 * (i % 2), t % 4 + 4 * (i // 2)] for w, t in order]).view(np.uint32) for i in range(4)
    ]
    inputs += [np.array([b[w, t % 4 + 4 * i, t // 4] for w, t in order]).view(np.uint32) for i in range(2)]
    inputs += [np.zeros(32 * WARPS, np.float32)]
    code = """mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32
        {o0, o1, o2, o3}, {i0, i1, i2, i3}, {i4, i5}, {i6, i6, i6, i6};"""
    got = evaluate(code, inputs, ["f32"] * 4)
    expected = np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(np.float32)
    for value, wanted in zip(got, accumulator(expected), strict=True):
        np.testing.assert_array_equal(value, wanted)
    p, q = (
        encode(RNG.standard_normal(s).astype(np.float32), "e4m3", finite=True)
        for s in ((WARPS, 16, 32), (WARPS, 32, 8))
    )
    inputs = [*byte_fragments(p, True, 32), *byte_fragments(q, False, 32), np.ones(32 * WARPS, np.float32)]
    code = """mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32
        {o0, o1, o2, o3}, {i0, i1, i2, i3}, {i4, i5}, {i6, i6, i6, i6};"""
    got = evaluate(code, inputs, ["f32"] * 4)
    expected = np.matmul(*(decode(x, "e4m3").astype(np.float64) for x in (p, q))) + 1
    for value, wanted in zip(got, accumulator(expected.astype(np.float32)), strict=True):
        np.testing.assert_array_equal(value, wanted)


def test_mma_needs_whole_warps_and_known_shapes():
    zero = np.zeros(32, np.float32)
    code = """.reg .b32 z; .reg .pred p; mov.u32 z, %laneid; setp.lt.u32 p, z, 30; mov.u32 z, 0; mov.f32 o0, i0;
        @p mma.sync.aligned.{}.row.col.f32.bf16.bf16.f32
            {{o0, _, _, _}}, {{z, z, z, z}}, {{z, z}}, {{i0, i0, i0, i0}};"""
    with pytest.raises(ParticipationError, match="mma"):
        evaluate(code.format("m16n8k16"), [zero], ["f32"])
    with pytest.raises(UnknownInstruction, match="mma"):
        evaluate(code.format("m16n16k16"), [zero], ["f32"])


TILE = """.shared .align 16 .b8 tile[2048]; .reg .b32 base, row, lane, at; mov.u32 base, tile; mov.u32 lane, %laneid;
    mad.lo.u32 row, lane, {stride}, base; st.shared.v4.b32 [row], {{i0, i1, i2, i3}}; bar.sync 0;"""


def tile_inputs():
    """One warp: lane r holds row r, eight halves in four registers."""
    halves = RNG.integers(0, 65536, (32, 8), dtype=np.uint16)
    return halves, [np.ascontiguousarray(halves.view(np.uint32)[:, n]) for n in range(4)]


@pytest.mark.parametrize(("count", "transposed"), [(1, False), (2, False), (4, False), (1, True), (2, True), (4, True)])
def test_ldmatrix_hands_out_rows_and_columns(count, transposed):
    halves, inputs = tile_inputs()
    names = ", ".join(f"o{n}" for n in range(count))
    code = (
        TILE.format(stride=16)
        + f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' if transposed else ''}.shared.b16 {{{names}}}, [row];"
    )
    got = evaluate(code, inputs, ["b32"] * count)
    for m, value in enumerate(got):
        matrix = halves[8 * m : 8 * m + 8]
        matrix = matrix.T if transposed else matrix
        for lane in range(32):
            pair = matrix[lane // 4, lane % 4 * 2 : lane % 4 * 2 + 2].astype(np.uint32)
            assert value[lane] == pair[0] | pair[1] << 16


def test_stmatrix_and_movmatrix_undo_ldmatrix():
    _, inputs = tile_inputs()
    code = (
        TILE.format(stride=16)
        + """.reg .b32 r<4>;
        ldmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 {r0, r1, r2, r3}, [row]; bar.sync 0;
        movmatrix.sync.aligned.m8n8.trans.b16 r1, r1; movmatrix.sync.aligned.m8n8.trans.b16 r1, r1;
        stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [row], {r0, r1, r2, r3}; bar.sync 0;
        ld.shared.v4.b32 {o0, o1, o2, o3}, [row];"""
    )
    for value, wanted in zip(evaluate(code, inputs, ["b32"] * 4), inputs, strict=True):
        np.testing.assert_array_equal(value, wanted)


def test_ldmatrix_refuses_crooked_rows_and_counts_conflicts():
    _, inputs = tile_inputs()
    load = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{o0, o1, o2, o3}}, [{}];"
    with pytest.raises(Misaligned, match="ldmatrix"):
        evaluate(TILE.format(stride=16) + "add.u32 at, row, 8;" + load.format("at"), inputs, ["b32"] * 4)
    with pytest.raises(OutOfBounds, match="ldmatrix"):
        evaluate(TILE.format(stride=16) + "add.u32 at, row, 2048;" + load.format("at"), inputs, ["b32"] * 4)
    # Rows 16 bytes apart fill all banks; 64 apart, every other row meets a bank again: 4 ways; padded by 16: none.
    for stride, ways in ((16, 1), (64, 4), (48, 1)):
        _, counters = run_snippet(TILE.format(stride=stride) + load.format("row"), inputs, ["b32"] * 4, block=32)
        (line,) = [line for line in counters.lines if line.opcode.startswith("ldmatrix")]
        assert (line.max_ways, line.wavefronts, line.ideal_wavefronts) == (ways, 4 * ways, 4)


# --- cp.async -----------------------------------------------------------------------------------------------------

COPY = """.shared .align 16 .b8 box[4096]; .reg .b32 there, at; .reg .b64 from; mov.u32 there, box; mov.u32 at, %tid.x;
    mad.lo.u32 there, at, 4, there; cvta.to.global.u64 from, i0; cp.async.ca.shared.global [there], [from], 4{}; """
WAIT = "cp.async.commit_group; cp.async.wait_group 0; "
SEE = "ld.shared.u32 o0, [there];"


def copied(code, block=BLOCK, **options):
    device = Device(capacity_bytes=1 << 16, **options)
    source = device.array(RNG.integers(0, 2**32, 64, dtype=np.uint32))
    addresses = np.array([device.pointer(source) + 4 * n for n in range(64)], np.uint64)
    (got,), counters = run_snippet(code, [addresses], ["b32"], device=device, block=block)
    return got, source, counters


def test_copies_arrive_at_the_wait():
    for wait in (WAIT, "cp.async.wait_all;", "cp.async.commit_group; cp.async.commit_group; cp.async.wait_group 1;"):
        got, source, counters = copied(COPY.format("") + wait + SEE)
        np.testing.assert_array_equal(got, source)
    line = next(line for line in counters.lines if line.opcode.startswith("cp"))
    assert (line.bytes, line.sectors) == (2 * 64 * 4, 8)  # as a load and as a store


@pytest.mark.parametrize(
    "code",
    [
        SEE,
        "cp.async.commit_group;" + SEE,
        "cp.async.wait_group 0;" + SEE,
        "cp.async.commit_group; cp.async.wait_group 1;" + SEE,
        "st.shared.u32 [there], 5; mov.u32 o0, 0;",
    ],
)
def test_touching_a_copy_in_flight_is_refused(code):
    with pytest.raises(PendingCopy, match=r"thread \(0, 0, 0\): .*not waited for"):
        copied(COPY.format("") + code)


def test_others_need_a_barrier_after_the_wait():
    neighbour = "xor.b32 there, there, 4;" + SEE
    copied(COPY.format("") + WAIT + "bar.sync 0;" + neighbour)
    with pytest.raises(DataRace, match=r"cp\.async"):
        copied(COPY.format("") + WAIT + neighbour)
    with pytest.raises(PendingCopy):
        copied(COPY.format("") + "cp.async.commit_group; bar.sync 0;" + neighbour)


def test_copying_over_what_others_still_read_is_a_race():
    before = COPY.format("") + WAIT + "bar.sync 0; xor.b32 there, there, 4; ld.shared.u32 o0, [there];"
    again = "cp.async.ca.shared.global [there], [from], 4; cp.async.wait_all;"
    copied(before + "bar.sync 0;" + again)
    with pytest.raises(DataRace):
        copied(before + "xor.b32 there, there, 4;" + again)


def test_groups_complete_in_order():
    code = (
        COPY.format("")
        + """cp.async.commit_group; .reg .b32 later; add.u32 later, there, 2048;
        cp.async.ca.shared.global [later], [from], 4; cp.async.commit_group; cp.async.wait_group 1; """
    )
    got, source, _ = copied(code + SEE)
    np.testing.assert_array_equal(got, source)
    with pytest.raises(PendingCopy):
        copied(code + "ld.shared.u32 o0, [later];")


def test_short_sources_are_padded_with_zeros_and_not_read():
    got, source, _ = copied(".reg .b32 size; " + COPY.format(", 0") + WAIT + SEE)
    assert not got.any()
    text = COPY.replace("cp.async", ".reg .b32 size; and.b32 size, at, 3; cp.async").format(", size")
    got, source, _ = copied(text + WAIT + SEE)
    keep = np.array([0, 0xFF, 0xFFFF, 0xFFFFFF], np.uint32)[np.arange(64) % 4]
    np.testing.assert_array_equal(got, source & keep)
    beyond = COPY.replace("cp.async", "add.u64 from, from, 131072; cp.async")
    copied(beyond.format(", 0") + WAIT + SEE)
    with pytest.raises(OutOfBounds, match=r"cp\.async"):
        copied(beyond.format("") + WAIT + SEE)


def test_sixteen_byte_copies_bypass_the_first_cache():
    with pytest.raises(UnknownInstruction):
        copied(COPY.format("").replace(".ca.", ".cg.") + WAIT + SEE)
    device = Device(capacity_bytes=1 << 16)
    source = device.array(RNG.integers(0, 2**32, (32, 4), dtype=np.uint32))
    addresses = np.array([device.pointer(source) + 16 * n for n in range(32)], np.uint64)
    code = (
        """.shared .align 16 .b8 box[512]; .reg .b32 there; mov.u32 there, %tid.x; shl.b32 there, there, 4;
        cp.async.cg.shared.global.L2::128B [there], [i0], 16;"""
        + WAIT
        + "ld.shared.v4.b32 {o0, o1, o2, o3}, [there];"
    )
    got, _ = run_snippet(code, [addresses], ["b32"] * 4, device=device, block=32)
    np.testing.assert_array_equal(np.stack(got, axis=1), source)
