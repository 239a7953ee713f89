"""BlockPool against a plain model: dictionaries, lists, and the rules of its docstring written out slowly."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool.daemon.memory.block_pool import CACHED, EMPTY, NULL_BLOCK, REUSED, REUSED_AGES_SLOWER, BlockPool

UIDS = st.integers(min_value=1000, max_value=1002)


class PoolMachine(RuleBasedStateMachine):
    """Every block's holders in the order in which they came, and the free blocks in the order in which they left."""

    @initialize(num_blocks=st.integers(min_value=1, max_value=12))
    def make(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, 16)
        self.pool.on_evict(self.note_eviction)
        self.holders: dict[int, list[int]] = {}  # block -> uid of each reference
        self.free: dict[int, list[tuple[int, int]]] = {  # kind -> (block, tick), oldest first
            EMPTY: [(block, 0) for block in range(num_blocks)],
            CACHED: [],
            REUSED: [],
        }
        self.kind = [EMPTY] * num_blocks
        self.tick = 0
        self.evicted: list[int] = []

    def note_eviction(self, block: int) -> None:
        self.evicted.append(block)

    def take(self) -> int:
        """The block that must go next."""
        if self.free[EMPTY]:
            return self.free[EMPTY].pop(0)[0]
        cached, reused = self.free[CACHED], self.free[REUSED]
        from_reused = not cached or (
            bool(reused) and self.tick - reused[0][1] > REUSED_AGES_SLOWER * (self.tick - cached[0][1])
        )
        block = (reused if from_reused else cached).pop(0)[0]
        self.kind[block] = EMPTY
        self.evicted_by_model.append(block)
        return block

    @property
    def num_free(self) -> int:
        return sum(map(len, self.free.values()))

    @rule(uid=UIDS, count=st.integers(min_value=0, max_value=5))
    def allocate(self, uid: int, count: int) -> None:
        self.evicted, self.evicted_by_model = [], list[int]()
        blocks = self.pool.allocate(uid, count)
        if count > self.num_free:
            assert blocks is None
            return
        assert blocks == [self.take() for _ in range(count)]
        assert self.evicted == self.evicted_by_model
        for block in blocks or []:
            self.holders[block] = [uid]

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), uid=UIDS)
    def share(self, data: st.DataObject, uid: int) -> None:
        block = data.draw(st.sampled_from(sorted(self.holders)))
        self.pool.share(block, uid)
        self.holders[block].append(uid)

    @precondition(lambda self: self.free[CACHED] or self.free[REUSED])
    @rule(data=st.data(), uid=UIDS)
    def revive(self, data: st.DataObject, uid: int) -> None:
        kind = data.draw(st.sampled_from([kind for kind in (CACHED, REUSED) if self.free[kind]]))
        entry = data.draw(st.sampled_from(self.free[kind]))
        self.pool.share(entry[0], uid)
        self.free[kind].remove(entry)
        self.holders[entry[0]] = [uid]

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.holders)))
        uid = data.draw(st.sampled_from(self.holders[block]))
        self.pool.release(block, uid)
        self.drop(block, uid)

    def drop(self, block: int, uid: int) -> None:
        held = self.holders[block]
        del held[len(held) - 1 - held[::-1].index(uid)]  # its youngest: references of one uid are alike
        if not held:
            del self.holders[block]
            self.free[self.kind[block]].append((block, self.tick))
            self.tick += 1

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release_all(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted({uid for held in self.holders.values() for uid in held})))
        table = data.draw(st.permutations([block for block, held in self.holders.items() if uid in held]))
        self.pool.release_all([NULL_BLOCK, *table], uid)
        for block in reversed(table):
            self.drop(block, uid)

    @rule(data=st.data(), kind=st.sampled_from([EMPTY, CACHED, REUSED]))
    def set_kind(self, data: st.DataObject, kind: int) -> None:
        block = data.draw(st.integers(min_value=0, max_value=self.pool.num_blocks - 1))
        if block not in self.holders and kind != EMPTY:
            return  # only blocks in use enter the cache
        old = self.kind[block]
        self.pool.set_kind(block, kind)
        self.kind[block] = kind
        if block not in self.holders and old != kind:
            entry = next(entry for entry in self.free[old] if entry[0] == block)
            self.free[old].remove(entry)
            self.free[kind].insert(0, entry)

    @rule(data=st.data())
    def refuses_what_was_not_taken(self, data: st.DataObject) -> None:
        block = data.draw(st.integers(min_value=0, max_value=self.pool.num_blocks - 1))
        with pytest.raises(RuntimeError, match="release"):
            self.pool.release(block, 4242)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_invariants()
        assert self.pool.num_free == self.num_free
        assert self.pool.num_cached == len(self.free[CACHED]) + len(self.free[REUSED])
        charges: dict[int, int] = {}
        for block, held in self.holders.items():
            assert self.pool.ref_count[block] == len(held)
            assert self.pool.owner(block) == held[0]
            assert self.pool.references(block, held[0]) == held.count(held[0])
            charges[held[0]] = charges.get(held[0], 0) + 1
        assert self.pool.charges() == charges


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def test_a_charge_passes_to_the_next_holder() -> None:
    pool = BlockPool(4, 16)
    blocks = pool.allocate(1, 2)
    assert blocks is not None
    for block in blocks:
        pool.share(block, 2)
        pool.share(block, 1)
    assert pool.charges() == {1: 2}
    pool.release_all(blocks, 1)
    assert pool.charges() == {1: 2}
    pool.release_all(blocks, 1)
    assert pool.charges() == {2: 2}
    pool.release_all(blocks, 2)
    assert pool.charges() == {}
    assert pool.num_free == 4


def test_corruption_is_found() -> None:
    for spoil in ("ref_count", "num_free", "_next", "_charged", "kind"):
        pool = BlockPool(8, 16)
        blocks = pool.allocate(1, 3)
        assert blocks is not None
        pool.check_invariants()
        if spoil == "num_free":
            pool.num_free += 1
        elif spoil == "_charged":
            pool._charged[1] += 1
        elif spoil == "_next":
            pool._next[5] = 7
        elif spoil == "kind":
            pool.kind[6] = CACHED
        else:
            pool.ref_count[6] = 1
        with pytest.raises(RuntimeError):
            pool.check_invariants()


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0)])
def test_an_empty_pool_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="pool_bytes"):
        BlockPool(num_blocks, block_size)


def scan_survivors(hot_uses: int, turnovers: float) -> bool:
    """Whether a block used `hot_uses` times outlives one-off blocks worth so many turnovers of the pool."""
    pool = BlockPool(100, 16)
    alive = True

    def forget(block: int) -> None:
        nonlocal alive
        alive = alive and block != hot

    pool.on_evict(forget)
    hot = (pool.allocate(1) or [])[0]
    pool.set_kind(hot, REUSED if hot_uses >= 4 else CACHED)
    pool.release(hot, 1)
    for _ in range(int(100 * turnovers)):
        block = (pool.allocate(1) or [])[0]
        pool.set_kind(block, CACHED)
        pool.release(block, 1)
    return alive


def test_a_scan_does_not_push_out_reused_blocks_at_once_but_they_do_not_stay_for_ever() -> None:
    assert not scan_survivors(hot_uses=1, turnovers=1.5)
    assert scan_survivors(hot_uses=4, turnovers=3.5)
    assert not scan_survivors(hot_uses=4, turnovers=5.0)
