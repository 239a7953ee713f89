"""Memory of the interpreter: spaces, vectors, atomics, and every way in which it refuses an access."""

import numpy as np
import pytest

from tests.ptx import Device
from tests.ptx.errors import DataRace, LaunchError, Misaligned, OutOfBounds, PtxSyntaxError, UnwrittenRead
from tests.ptx.snippet import evaluate, run_snippet

T = np.arange(128, dtype=np.uint32)
HEAD = ".version 8.5\n.target sm_90\n.address_size 64\n"
SHARED = ".reg .b32 at; mov.u32 at, %tid.x; shl.b32 at, at, 2; "


def launch(body, args, params=".param .u64 p0", block=32, grid=1, shared_bytes=0, declare="", device=None, **options):
    text = f"{HEAD}{declare}.visible .entry k({params}) {{\n{body}\nret; }}"
    device = device or Device(capacity_bytes=1 << 20, **options)
    return device.run(text, grid, block, args, shared_bytes)


def fresh(**options):
    return Device(capacity_bytes=1 << 20, **options)


LOAD = """.reg .b64 p, q; .reg .b32 t; .reg .b32 v; ld.param.u64 p, [p0]; mov.u32 t, %tid.x;
    mad.wide.u32 q, t, 4, p; {}"""


def test_vectors_narrow_types_and_displacements():
    device = fresh()
    source = device.array(np.arange(32 * 16, dtype=np.uint8).reshape(32, 16))
    out = device.empty((32, 8), np.int32)
    body = """.reg .b64 p, q, w; .reg .b32 t, r<4>, s; .reg .b16 h; ld.param.u64 p, [p0]; ld.param.u64 q, [p1];
        mov.u32 t, %tid.x; mad.wide.u32 p, t, 16, p; mad.wide.u32 q, t, 32, q;
        ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {r0, r1, r2, r3}, [p]; st.global.v4.b32 [q], {r3, r2, r1, r0};
        ld.global.s8 s, [p+-1]; st.global.b32 [q+16], s;
        ld.volatile.global.u16 h, [p+2]; cvt.u32.u16 s, h; st.global.b32 [q+20], s;
        ld.relaxed.gpu.global.v2.u32 {s, _}, [p+8]; st.global.u32 [q+24], s;
        ld.global.b64 w, [p+8]; shr.u64 w, w, 32; cvt.u32.u64 s, w; st.wb.global.b32 [q+28], s;"""
    guard = device.array(np.zeros(1, np.uint8))  # keeps [p-1] of thread 0 from being tested here
    assert guard is not None
    values = np.arange(32 * 16, dtype=np.uint8).reshape(32, 16)
    shifted = device.array(np.concatenate([np.array([200] * 16, np.uint8), values.ravel()]))
    counters = launch(body, (device.pointer(shifted) + 16, out), ".param .u64 p0, .param .u64 p1", device=device)
    got = device.read(out)
    np.testing.assert_array_equal(got[:, :4].view(np.uint32), values.view(np.uint32)[:, ::-1])
    before = np.concatenate([[200], values.ravel()[15:-1:16]]).astype(np.uint8).view(np.int8)
    np.testing.assert_array_equal(got[:, 4], before)
    np.testing.assert_array_equal(got[:, 5], values[:, 2:4].copy().view(np.uint16)[:, 0])
    np.testing.assert_array_equal(got[:, 6].view(np.uint32), values.view(np.uint32)[:, 2])
    np.testing.assert_array_equal(got[:, 7].view(np.uint32), values.view(np.uint32)[:, 3])
    assert counters.global_load_bytes == 32 * (16 + 1 + 2 + 8 + 8)
    assert source.shape == (32, 16)


def test_shared_local_constant_and_generic_addresses():
    declare = ".const .align 4 .u32 table[4] = {10, 20, 30, 40};\n.global .align 4 .u32 counter = 5;\n"
    code = """.shared .align 8 .b8 box[512]; .local .align 8 .b8 own[16]; .reg .b64 s, l, g, c; .reg .b32 t, v, w;
        .reg .pred p; mov.u32 t, %tid.x;
        mov.u64 c, table; and.b32 w, t, 3; mad.wide.u32 c, w, 4, c; ld.const.u32 v, [c];
        mov.u64 l, own; cvta.local.u64 l, l; mad.wide.u32 l, w, 4, l; st.u32 [l], v; ld.u32 w, [l]; mov.u32 o0, w;
        mov.u64 s, box; mad.wide.u32 s, t, 4, s; st.shared.u32 [s], o0; bar.sync 0;
        cvta.shared.u64 s, s; ld.u32 o1, [s];
        isspacep.shared p, s; selp.u32 o2, 1, 0, p; isspacep.global p, s; selp.u32 o3, 1, 0, p;
        mov.u64 g, counter; cvta.global.u64 g, g; setp.lt.u32 p, t, 64; selp.b64 g, s, g, p; ld.u32 o4, [g];
        ld.global.u32 o5, [counter];"""
    first, generic, is_shared, is_global, mixed, five = evaluate(code, [T], ["b32"] * 6, declare)
    expected = 10 + 10 * (T % 4)
    np.testing.assert_array_equal(first, expected)
    np.testing.assert_array_equal(generic, expected)
    assert is_shared.all()
    assert not is_global.any()
    np.testing.assert_array_equal(mixed, np.where(T < 64, expected, 5))
    assert (five == 5).all()


def test_static_and_dynamic_shared_memory_lie_apart():
    declare = ".shared .align 4 .b8 fixed[128];\n.extern .shared .align 16 .b8 sized[];\n"
    body = """.reg .b32 t, a, b, v; .reg .b64 p; ld.param.u64 p, [p0]; mov.u32 t, %tid.x; shl.b32 t, t, 2;
        mov.u32 a, fixed; add.u32 a, a, t; mov.u32 b, sized; add.u32 b, b, t;
        st.shared.u32 [a], 1; st.shared.u32 [b], 2; ld.shared.u32 v, [a]; cvt.u64.u32 p, t; """
    launch(body, (0,), shared_bytes=128, declare=declare)
    with pytest.raises(OutOfBounds, match="shared byte"):
        launch(body, (0,), shared_bytes=64, declare=declare)
    with pytest.raises(LaunchError, match="shared memory"):
        launch(body, (0,), shared_bytes=227 * 1024, declare=declare)


def test_launches_share_memory_and_module_variables():
    declare = ".global .align 4 .u32 counter = 0;\n"
    body = """.reg .b32 v; .reg .b64 p; ld.param.u64 p, [p0]; ld.global.u32 v, [counter]; add.u32 v, v, 1;
        st.global.u32 [counter], v; st.global.u32 [p], v;"""
    device = fresh()
    out = device.empty(1, np.uint32)
    for expected in (1, 2, 3):
        launch(body, (out,), device=device, declare=declare, block=1)
        assert device.read(out)[0] == expected


# --- atomics ------------------------------------------------------------------------------------------------------


def test_atomics_take_turns_in_lane_order():
    declare = ""
    for operation, kind, start, step in [
        ("add", "u32", 5, lambda old, v: (old + v) % 2**32),
        ("min", "s32", 50, min),
        ("max", "u32", 50, max),
        ("and", "b32", 0xFFFF, lambda old, v: old & v),
        ("or", "b32", 1, lambda old, v: old | v),
        ("xor", "b32", 1, lambda old, v: old ^ v),
        ("exch", "b32", 3, lambda old, v: v),
        ("inc", "u32", 0, lambda old, v: 0 if old >= v else old + 1),
        ("dec", "u32", 0, lambda old, v: v if old == 0 or old > v else old - 1),
    ]:
        device = fresh()
        cells = device.array(np.full(3, start, np.uint32))
        found = device.empty(64, np.uint32)
        body = f""".reg .b64 c, f; .reg .b32 t, s, v, r; ld.param.u64 c, [p0]; ld.param.u64 f, [p1]; mov.u32 t, %tid.x;
            rem.u32 s, t, 3; mad.wide.u32 c, s, 4, c; mad.wide.u32 f, t, 4, f; mad.lo.u32 v, t, 7, 2;
            atom.global.{operation}.{kind} r, [c], v; st.global.u32 [f], r;"""
        launch(body, (cells, found), ".param .u64 p0, .param .u64 p1", block=64, device=device, declare=declare)
        state, olds = [start] * 3, []
        for t in range(64):
            olds.append(state[t % 3])
            state[t % 3] = step(state[t % 3], 7 * t + 2)
        assert device.read(cells).tolist() == state, operation
        assert device.read(found).tolist() == olds, operation


def test_compare_and_swap_and_float_addition():
    device = fresh()
    cell, sums = device.zeros(1, np.uint32), device.array(np.array([1.0, 0.0], np.float32))
    body = """.reg .b64 c, f; .reg .b32 t, old, next; .reg .pred p; .reg .f32 x; ld.param.u64 c, [p0];
        ld.param.u64 f, [p1]; mov.u32 t, %tid.x; cvt.rn.f32.u32 x, t; mul.f32 x, x, 0f3DCCCCCD;
        red.relaxed.gpu.global.add.f32 [f], x; atom.global.add.f32 x, [f+4], 0f3F800000;
        mov.u32 old, 0;
    AGAIN: add.u32 next, old, 3; atom.global.cas.b32 next, [c], old, next; setp.eq.u32 p, next, old; mov.u32 old, next;
        @!p bra AGAIN;"""
    launch(body, (cell, sums), ".param .u64 p0, .param .u64 p1", block=64, device=device)
    assert device.read(cell)[0] == 3 * 64
    total = np.float32(1)
    for t in range(64):
        total += np.float32(t) * np.float32(0.1)
    np.testing.assert_array_equal(device.read(sums), [total, 64])


def test_guarded_atomics_and_loads_touch_only_their_lanes():
    code = """.shared .align 4 .b32 cell; .reg .pred p, z; setp.lt.u32 p, i0, 10; setp.eq.u32 z, i0, 0;
        @z st.shared.u32 [cell], 100; bar.sync 0; mov.u32 o0, 7; @p atom.shared.add.u32 o0, [cell], 1; bar.sync 0;
        mov.u32 o1, 9; @!p ld.shared.u32 o1, [cell];"""
    found, left = evaluate(code, [T], ["b32"] * 2)
    np.testing.assert_array_equal(found, np.where(T < 10, 100 + T, 7))
    np.testing.assert_array_equal(left, np.where(T < 10, 9, 110))


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("access", "error", "message"),
    [
        ("ld.global.u32 v, [q+4];", OutOfBounds, r"thread \(31, 0, 0\): PTX line 8: ld\.global\.u32 .*outside"),
        ("ld.global.u32 v, [q+-4];", OutOfBounds, r"thread \(0, 0, 0\)"),
        ("st.global.u32 [q+1024], t;", OutOfBounds, "outside"),
        ("ld.global.u32 v, [p+1000000000];", OutOfBounds, "outside"),
        ("ld.global.u32 v, [16];", OutOfBounds, "global address 0x10: outside"),
        ("ld.u32 v, [16];", OutOfBounds, "not a generic address"),
        ("ld.global.u32 v, [q+2];", Misaligned, "not a multiple of 4"),
        ("ld.global.v2.u32 {v, _}, [q];", Misaligned, r"thread \(1, 0, 0\).*not a multiple of 8"),
        ("ld.shared.u32 v, [0];", OutOfBounds, "shared"),
        ("st.local.u32 [0], t;", OutOfBounds, "local"),
        ("atom.global.add.u32 v, [q+4], 1;", OutOfBounds, r"atom\.global"),
    ],
)
def test_addresses_that_are_refused(access, error, message):
    device = fresh()
    with pytest.raises(error, match=message):
        launch("\n" + LOAD.format("\n" + access), (device.array(T[:32]),), device=device)


def test_reading_what_nothing_wrote():
    device = fresh()
    blank = device.empty(32, np.uint32)
    with pytest.raises(UnwrittenRead, match=r"byte 0 of uint32\[32\] \(128 bytes\)"):
        launch(LOAD.format("ld.global.u32 v, [q];"), (blank,), device=device)
    with pytest.raises(UnwrittenRead, match="element"):
        device.read(blank)
    half = LOAD.format(".reg .pred s; setp.lt.u32 s, t, 16; @s st.global.u32 [q], t; ")
    launch(half, (blank,), device=device)
    np.testing.assert_array_equal(device.written(blank), T[:32] < 16)
    with pytest.raises(UnwrittenRead, match=r"thread \(16, 0, 0\)"):
        launch(LOAD.format("ld.global.u32 v, [q];"), (blank,), device=device)
    device.wrote(blank[16:])
    launch(LOAD.format("ld.global.u32 v, [q];"), (blank,), device=device)
    device.discard(blank)
    with pytest.raises(UnwrittenRead):
        launch(LOAD.format("ld.global.u32 v, [q];"), (blank,), device=device)


def test_partly_written_words_are_refused_too():
    code = ".local .align 4 .b8 own[8]; st.local.u8 [own], i0; st.local.u8 [own+1], i0; {} "
    evaluate(code.format("ld.local.u16 o0, [own];"), [T], ["b16"])
    with pytest.raises(UnwrittenRead, match="local"):
        evaluate(code.format("ld.local.u32 o0, [own];"), [T], ["b32"])


def test_shared_memory_is_forgotten_between_blocks():
    code = """.shared .align 4 .b32 cell; .reg .pred p; .reg .b32 b; mov.u32 b, %ctaid.x; setp.eq.u32 p, b, 0;
        .reg .pred z; setp.eq.u32 z, i0, 0; @z st.shared.u32 [cell], 1; bar.sync 0; ld.shared.u32 o0, [cell];"""
    for lanes in (128, 8192):
        with pytest.raises(UnwrittenRead, match=r"block \(1, 0, 0\)"):
            run_snippet(code, [np.arange(256, dtype=np.uint32)], ["b32"], device=fresh(lanes_at_once=lanes))


def test_memory_freed_is_out_of_bounds():
    device = fresh()
    array = device.array(T[:32])
    launch(LOAD.format("ld.global.u32 v, [q];"), (array,), device=device)
    device.free(array)
    with pytest.raises(OutOfBounds):
        launch(LOAD.format("ld.global.u32 v, [q];"), (array,), device=device)


RACY = SHARED + ".shared .align 4 .b8 box[512]; .reg .b32 there; mov.u32 there, box; "
STORE = "add.u32 at, at, there; st.shared.u32 [at], i0;"
FIRST = ".reg .pred z; setp.eq.u32 z, i0, 0; @z "


@pytest.mark.parametrize(
    ("before", "after", "barrier"),
    [
        (STORE, "xor.b32 at, at, 4; ld.shared.u32 o0, [at];", "bar.sync 0;"),
        (STORE, "xor.b32 at, at, 4; ld.shared.u32 o0, [at];", "bar.warp.sync -1;"),
        (STORE, "xor.b32 at, at, 128; ld.shared.u32 o0, [at];", "bar.sync 0;"),
        (STORE + "bar.sync 0; ld.shared.u32 o0, [at];", "xor.b32 at, at, 128; st.shared.u32 [at], 2;", "bar.sync 0;"),
        (FIRST + "st.shared.u32 [there], 0;", "atom.shared.add.u32 o0, [there], 1;", "bar.sync 0;"),
    ],
)
def test_races_are_found_and_the_right_barrier_ends_them(before, after, barrier):
    evaluate(RACY + before + barrier + after, [T], ["b32"])
    with pytest.raises(DataRace, match=r"shared byte \d+: .* at PTX line .*; and .* at PTX line .*no barrier"):
        evaluate(RACY + before + after, [T], ["b32"])
    run_snippet(RACY + before + after, [T], ["b32"], device=fresh(check_races=False))


def test_a_warp_barrier_does_not_order_other_warps():
    code = (
        "add.u32 at, at, there; st.shared.u32 [at], i0; bar.warp.sync -1; xor.b32 at, at, 128; ld.shared.u32 o0, [at];"
    )
    with pytest.raises(DataRace):
        evaluate(RACY + code, [T], ["b32"])


def test_two_writers_of_one_byte_race_but_neighbours_in_a_word_do_not():
    with pytest.raises(DataRace, match=r"writes it .* writes it"):
        evaluate(RACY + "st.shared.u32 [there], i0; mov.u32 o0, 0;", [T], ["b32"])
    bytes_ = ".reg .b32 a; shr.u32 a, at, 2; add.u32 a, a, there; st.shared.u8 [a], i0; mov.u32 o0, 0;"
    evaluate(RACY + bytes_, [T], ["b32"])


def test_atomics_do_not_race_with_each_other():
    code = """st.shared.u32 [there], 0; bar.sync 0; atom.shared.add.u32 o0, [there], 1;
        atom.shared.max.u32 o0, [there], 1;"""
    evaluate(RACY + FIRST + code, [T], ["b32"])


def test_arguments_are_checked():
    device = fresh()
    body = LOAD.format("ld.global.u32 v, [q];")
    with pytest.raises(LaunchError, match="parameters"):
        launch(body, (), device=device)
    with pytest.raises(LaunchError, match="Device"):
        launch(body, (T,), device=device)
    with pytest.raises(LaunchError, match="block"):
        launch(body, (device.array(T),), block=2048, device=device)
    with pytest.raises(MemoryError, match="capacity_bytes"):
        device.empty(1 << 21, np.uint8)
    with pytest.raises(PtxSyntaxError, match="line"):
        launch("add.u32 nowhere, 1, 1;", (device.array(T),), device=device)
