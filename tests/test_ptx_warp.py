"""Warp-wide instructions, divergence and barriers of the interpreter."""

import numpy as np
import pytest

from tests.ptx import Device
from tests.ptx.errors import BarrierError, ParticipationError, Timeout, Trap, UnwrittenRead
from tests.ptx.snippet import evaluate, run_snippet

RNG = np.random.default_rng(11)
LANES = np.arange(256, dtype=np.uint32)
X = RNG.integers(0, 2**32, 256, dtype=np.uint32)
WARPS = X.reshape(8, 32)


def shuffled(mode, distance, clamp=31):
    """The manual's pseudo-code, lane by lane."""
    segment, limit = clamp >> 8 & 31, clamp & 31
    out, valid = np.empty_like(WARPS), np.empty(WARPS.shape, bool)
    for lane in range(32):
        last = (lane & segment) | (limit & ~segment)
        j, ok = {
            "up": (lane - distance, lane - distance >= last),
            "down": (lane + distance, lane + distance <= last),
            "bfly": (lane ^ distance, (lane ^ distance) <= last),
            "idx": ((lane & segment) | (distance & ~segment), ((lane & segment) | (distance & ~segment)) <= last),
        }[mode]
        out[:, lane], valid[:, lane] = WARPS[:, j if ok else lane], ok
    return out.ravel(), valid.ravel()


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("distance", [0, 1, 5, 16, 31])
@pytest.mark.parametrize("segment", [0x00, 0x1800])
def test_shuffles_follow_the_manual(mode, distance, segment):
    clamp = segment | (0 if mode == "up" else 31)
    code = f".reg .pred p; shfl.sync.{mode}.b32 o0|p, i0, {distance}, {clamp}, -1; selp.u32 o1, 1, 0, p;"
    got, valid = evaluate(code, [X], ["b32", "b32"])
    expected, within = shuffled(mode, distance, clamp)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(valid != 0, within)


def test_shuffle_distance_may_differ_by_lane():
    target = RNG.permuted(np.tile(np.arange(32, dtype=np.uint32), (8, 1)), axis=1)
    (got,) = evaluate("shfl.sync.idx.b32 o0, i0, i1, 31, 0xFFFFFFFF;", [X, target.ravel()], ["b32"])
    np.testing.assert_array_equal(got, np.take_along_axis(WARPS, target, 1).ravel())


def test_votes_and_active_mask():
    even = (X % 2 == 0).reshape(8, 32)
    bits = np.packbits(even, axis=1, bitorder="little").view(np.uint32)
    code = """.reg .pred p, q; and.b32 o0, i0, 1; setp.eq.u32 p, o0, 0;
        vote.sync.ballot.b32 o0, p, -1;
        vote.sync.any.pred q, p, -1; selp.u32 o1, 1, 0, q;
        vote.sync.all.pred q, p, -1; selp.u32 o2, 1, 0, q;
        vote.sync.uni.pred q, p, -1; selp.u32 o3, 1, 0, q;
        activemask.b32 o4;"""
    ballot, some, every, uniform, active = evaluate(code, [X], ["b32"] * 5)
    np.testing.assert_array_equal(ballot, np.repeat(bits, 32))
    assert some.all()
    assert not every.any()
    assert not uniform.any()
    assert (active == 0xFFFFFFFF).all()
    same = evaluate(code, [np.full(64, 8, np.uint32)], ["b32"] * 5)
    assert all(value.all() for value in same)


def test_match_and_redux():
    small = (X % 5).astype(np.uint32)
    code = """.reg .pred p; match.any.sync.b32 o0, i0, -1; match.all.sync.b32 o1|p, i0, -1; selp.u32 o2, 1, 0, p;
        redux.sync.add.u32 o3, i0, -1; redux.sync.max.s32 o4, i1, -1; redux.sync.xor.b32 o5, i1, -1;"""
    some, every, flag, total, largest, parity = evaluate(code, [small, X], ["b32"] * 6)
    groups = small.reshape(8, 32)
    expected = np.packbits(groups[:, :, None] == groups[:, None, :], axis=2, bitorder="little").view(np.uint32)
    np.testing.assert_array_equal(some, expected.ravel())
    assert not every.any()
    assert not flag.any()
    np.testing.assert_array_equal(total, np.repeat(groups.sum(1), 32))
    np.testing.assert_array_equal(largest.view(np.int32), np.repeat(WARPS.view(np.int32).max(1), 32))
    np.testing.assert_array_equal(parity, np.repeat(np.bitwise_xor.reduce(WARPS, 1), 32))


HALVES = """.reg .pred low; .reg .b32 lane, half; mov.u32 lane, %laneid; setp.lt.u32 low, lane, 16;
    @low bra LOW;
    shfl.sync.bfly.b32 o0, i0, 1, 31, 0xFFFF0000; activemask.b32 o1; bra JOIN;
LOW:
    shfl.sync.bfly.b32 o0, i0, 2, 31, 0x0000FFFF; activemask.b32 o1;
JOIN:
    shfl.sync.idx.b32 o2, o0, 0, 31, -1;"""


def test_branches_run_apart_and_meet_again():
    got, active, first = evaluate(HALVES, [X], ["b32"] * 3)
    lane = LANES % 32
    source = np.where(lane < 16, LANES ^ 2, LANES ^ 1)
    np.testing.assert_array_equal(got, X[source])
    np.testing.assert_array_equal(active, np.where(lane < 16, 0xFFFF, 0xFFFF0000))
    np.testing.assert_array_equal(first, X[source][LANES - lane])


def test_loops_with_a_trip_count_per_thread():
    count = RNG.integers(0, 40, 300).astype(np.uint32)
    code = """.reg .pred done, odd; .reg .b32 n; mov.u32 n, i0; mov.u32 o0, 0; mov.u32 o1, 0;
    TOP: setp.eq.u32 done, n, 0; @done bra OUT;
        and.b32 o2, n, 1; setp.eq.u32 odd, o2, 1; @odd bra ODD;
        add.u32 o0, o0, n; bra NEXT;
    ODD: add.u32 o1, o1, 1;
    NEXT: sub.u32 n, n, 1; bra TOP;
    OUT: activemask.b32 o2;"""
    evens, odds, active = evaluate(code, [count], ["b32"] * 3)
    np.testing.assert_array_equal(evens, [sum(v for v in range(1, c + 1) if v % 2 == 0) for c in count.tolist()])
    np.testing.assert_array_equal(odds, (count + 1) // 2)
    assert (active[:256] == 0xFFFFFFFF).all()  # everybody met behind the loop
    assert (active[256:288] == 0xFFFFFFFF).all()
    assert (active[288:] == 0xFFF).all()


def test_jump_table():
    code = """.reg .b32 r; rem.u32 r, i0, 3;
    TABLE: .branchtargets A, B, C;
    brx.idx r, TABLE;
    A: mov.u32 o0, 10; bra END;
    B: mov.u32 o0, 20; bra END;
    C: mov.u32 o0, 30;
    END: add.u32 o0, o0, 1;"""
    (got,) = evaluate(code, [LANES], ["b32"])
    np.testing.assert_array_equal(got, (LANES % 3 + 1) * 10 + 1)


FUNCTIONS = """
.func (.param .b32 out) twice (.param .b32 x)
{
    .reg .b32 a; .reg .pred p;
    ld.param.b32 a, [x+0];
    setp.gt.u32 p, a, 100;
    @p bra BIG;
    add.u32 a, a, a;
    st.param.b32 [out+0], a;
    ret;
BIG:
    st.param.b32 [out+0], 7;
    ret;
}
.func (.param .align 8 .b8 out[16]) both (.param .align 8 .b8 xy[16])
{
    .reg .b64 a, b;
    ld.param.v2.b64 {a, b}, [xy];
    st.param.b64 [out+0], b;
    st.param.b64 [out+8], a;
    ret;
}
"""
CALL = """{{ .param .b32 p0; .param .b32 r0; st.param.b32 [p0+0], {source};
    call.uni (r0), twice, (p0); ld.param.b32 {target}, [r0+0]; }}"""


def test_device_functions_diverge_inside_and_return_to_their_own_caller():
    code = CALL.format(source="i0", target="o0") + CALL.format(source="o0", target="o1")
    once, again = evaluate(code, [LANES], ["b32"] * 2, FUNCTIONS)
    f = lambda v: np.where(v > 100, 7, 2 * v)  # noqa: E731
    np.testing.assert_array_equal(once, f(LANES))
    np.testing.assert_array_equal(again, f(f(LANES)))


def test_device_functions_take_and_return_structures():
    code = """.param .align 8 .b8 p0[16]; .param .align 8 .b8 r0[16]; st.param.b64 [p0+0], i0; st.param.b64 [p0+8], i1;
        call.uni (r0), both, (p0); ld.param.v2.b64 {o0, o1}, [r0+0];"""
    a, b = LANES.astype(np.uint64), LANES.astype(np.uint64) * 3
    first, second = evaluate(code, [a, b], ["b64"] * 2, FUNCTIONS)
    np.testing.assert_array_equal(first, b)
    np.testing.assert_array_equal(second, a)


def test_undefined_functions_and_traps_stop_only_those_that_reach_them():
    declared = ".extern .func (.param .b32 r) missing (.param .b32 p);\n"
    code = """.reg .pred p; setp.eq.u32 p, i0, 9; @!p bra OVER;
        {call} OVER: mov.u32 o0, i0;"""
    call = "{ .param .b32 a; .param .b32 b; st.param.b32 [a], 1; call.uni (b), missing, (a); }"
    for stop in (call, "trap;"):
        text = code.replace("{call}", stop)
        (got,) = evaluate(text, [LANES[:9]], ["b32"], declared)
        np.testing.assert_array_equal(got, LANES[:9])
        with pytest.raises(Trap, match=r"thread \(9, 0, 0\)"):
            evaluate(text, [LANES], ["b32"], declared)


def test_special_registers():
    code = """mov.u32 o0, %tid.x; mov.u32 o1, %ctaid.x; mov.u32 o2, %laneid; mov.u32 o3, %warpid;
        mov.u32 o4, %lanemask_lt; mov.u32 o5, %lanemask_ge; mov.u32 o6, %nctaid.x; mov.u32 o7, WARP_SZ;"""
    tid, block, lane, warp, below, above, blocks, size = evaluate(code, [LANES], ["b32"] * 8)
    np.testing.assert_array_equal(tid, LANES % 128)
    np.testing.assert_array_equal(block, LANES // 128)
    np.testing.assert_array_equal(lane, LANES % 32)
    np.testing.assert_array_equal(warp, LANES % 128 // 32)
    np.testing.assert_array_equal(below, (1 << LANES % 32) - 1)
    np.testing.assert_array_equal(above, 0xFFFFFFFF ^ ((1 << LANES % 32) - 1))
    assert (blocks == 2).all()
    assert (size == 32).all()


def test_three_dimensional_launch():
    text = """.version 8.5\n.target sm_90\n.address_size 64
    .visible .entry k(.param .u64 out) { .reg .b32 r<9>; .reg .b64 p;
        mov.u32 r0, %tid.x; mov.u32 r1, %tid.y; mov.u32 r2, %tid.z; mov.u32 r3, %ctaid.x; mov.u32 r4, %ctaid.y;
        mov.u32 r5, %ctaid.z; ld.param.u64 p, [out];
        mad.lo.u32 r6, r5, 2, r4; mad.lo.u32 r6, r6, 3, r3; mad.lo.u32 r6, r6, 2, r2; mad.lo.u32 r6, r6, 5, r1;
        mad.lo.u32 r6, r6, 7, r0; mad.wide.u32 p, r6, 4, p; st.global.u32 [p], r6; ret; }"""
    device = Device(capacity_bytes=1 << 20)
    out = device.empty(3 * 2 * 2 * 7 * 5 * 2, np.uint32)
    counters = device.run(text, (3, 2, 2), (7, 5, 2), (out,))
    np.testing.assert_array_equal(device.read(out), np.arange(out.size))
    assert counters.by_opcode()["ret"] == out.size
    assert counters.by_opcode(warps=True)["ret"] == 12 * 3  # 70 threads are three warps


# --- what is refused ----------------------------------------------------------------------------------------------


def test_shuffle_waits_for_lanes_it_names_and_fails_if_they_never_come():
    code = """.reg .pred p; .reg .b32 lane; mov.u32 lane, %laneid; setp.lt.u32 p, lane, 8;
        @p bra FEW; mov.u32 o0, 0; bar.sync 0; bra END;
        FEW: shfl.sync.bfly.b32 o0, i0, 1, 31, -1; bar.sync 0;
        END: mov.u32 o0, o0;"""
    with pytest.raises((ParticipationError, BarrierError), match="waits for block"):
        evaluate(code, [LANES], ["b32"])


def test_shuffle_must_name_its_own_lane():
    with pytest.raises(ParticipationError, match="does not name the lane itself"):
        evaluate("shfl.sync.idx.b32 o0, i0, 0, 31, 0x0000FFFF;", [LANES[:32]], ["b32"])


def test_shuffle_must_not_read_lanes_outside_its_mask():
    code = """.reg .pred p; .reg .b32 lane; mov.u32 lane, %laneid; setp.lt.u32 p, lane, 16; mov.u32 o0, 0;
        @p shfl.sync.down.b32 o0, i0, 8, 31, 0x0000FFFF;"""
    with pytest.raises(ParticipationError, match="reads a lane"):
        evaluate(code, [LANES], ["b32"])


def test_shuffle_must_not_read_exited_lanes():
    code = """.reg .pred p; .reg .b32 lane; mov.u32 lane, %laneid; setp.ge.u32 p, lane, 16; @p ret;
        shfl.sync.{} o0, i0, 1, 31, -1;"""
    with pytest.raises(UnwrittenRead):  # lanes 16 to 31 leave their outputs unwritten, which is fine for the shuffle
        evaluate(code.format("bfly.b32"), [LANES[:32]], ["b32"])
    with pytest.raises(ParticipationError, match="exited"):
        evaluate(code.format("down.b32"), [LANES[:32]], ["b32"])


def test_barrier_that_some_threads_never_reach():
    code = """.reg .pred p; setp.lt.u32 p, i0, 40; @p bra FIRST; bar.sync 0; bra END;
        FIRST: bar.sync 1; END: mov.u32 o0, i0;"""
    with pytest.raises(BarrierError, match=r"bar\.sync 0: waits for block .* which waits at .*bar\.sync 1"):
        evaluate(code, [LANES[:128]], ["b32"])


def test_barrier_passes_when_the_others_have_exited():
    code = ".reg .pred p; setp.ge.u32 p, i0, 40; mov.u32 o0, i0; @p bra END; bar.sync 0; add.u32 o0, o0, 1; END:"
    (got,) = evaluate(code, [LANES[:64]], ["b32"])
    np.testing.assert_array_equal(got, LANES[:64] + (LANES[:64] < 40))


def test_barrier_reductions():
    code = """.reg .pred p, q; setp.lt.u32 p, i0, 100; bar.red.popc.u32 o0, 0, p;
        bar.red.or.pred q, 0, p; selp.u32 o1, 1, 0, q; bar.red.and.pred q, 0, !p; selp.u32 o2, 1, 0, q;"""
    count, some, none = evaluate(code, [LANES], ["b32"] * 3)
    np.testing.assert_array_equal(count, np.repeat([100, 0], 128))
    np.testing.assert_array_equal(some, np.repeat([1, 0], 128))
    np.testing.assert_array_equal(none, np.repeat([0, 1], 128))


def test_register_that_nothing_wrote():
    with pytest.raises(UnwrittenRead, match=r"register .*ghost"):
        evaluate(".reg .b32 ghost; add.u32 o0, i0, ghost;", [LANES], ["b32"])


def test_endless_loop_ends_by_its_budget():
    device = Device(capacity_bytes=1 << 20, max_steps=1000)
    with pytest.raises(Timeout):
        run_snippet("TOP: add.u32 o0, i0, 1; bra TOP;", [LANES], ["b32"], device=device)


def test_blocks_in_lockstep_or_one_by_one_give_the_same():
    results = []
    for lanes in (1, 128, 8192):
        device = Device(capacity_bytes=1 << 20, lanes_at_once=lanes)
        (got, active, first), counters = run_snippet(HALVES, [X], ["b32"] * 3, device=device)
        results.append((got, active, first, counters.by_opcode(), counters.by_opcode(warps=True)))
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(one, two)
