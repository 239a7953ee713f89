"""The prefix cache by itself: keys, compares, tenants, small budgets, eviction order, TTL, pins."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.client.wire.errors import QuotaExceeded
from kvpool.daemon.memory.block_pool import CACHED, EMPTY, REUSED, BlockPool
from kvpool.daemon.memory.prefix_cache import PrefixCache
from kvpool.daemon.memory.sequence import Sequence
from kvpool.daemon.scheduling.limits import OwnerLimits
from tests.support.scheduling import UID, make, prompt, sequence, submit


def filled(cache: PrefixCache, tokens: list[int], uid: int = UID) -> Sequence:
    """A sequence whose full blocks are computed and in the cache."""
    pool = cache.pool
    made = sequence(tokens, uid=uid)
    blocks = pool.allocate(uid, len(tokens) // pool.block_size)
    assert blocks is not None
    made.block_table = blocks
    made.num_computed_tokens = len(blocks) * pool.block_size
    cache.insert(made, 0, len(blocks))
    return made


def let_go(cache: PrefixCache, made: Sequence) -> None:
    cache.pool.release_all(made.block_table, made.uid)


def test_keys_depend_on_secret_identity_tenant_and_everything_before() -> None:
    def keys(secret: bytes = b"s", identity: list[tuple[str, str]] | None = None, uid: int = UID) -> list[bytes]:
        cache = PrefixCache(BlockPool(4, 4), secret=secret, identity=identity or [("model", "m")])
        made = sequence(prompt(8), uid=uid)
        cache.lookup(made)
        return made.block_hashes

    base = keys()
    assert len(base) == 2
    others = [keys(secret=b"t"), keys(identity=[("model", "n")]), keys(uid=UID + 1), keys(identity=[("mode", "lm")])]
    others.append(keys(identity=[("model", "m"), ("", "")]))
    assert len({*base, *(key for other in others for key in other)}) == 2 * 6


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=3), st.text(max_size=3)), max_size=3, unique=True))
def test_no_two_identities_read_the_same(parts: list[tuple[str, str]]) -> None:
    """Length prefixes: moving a letter from one part to the next is another identity."""
    joined = [("".join(name + value for name, value in parts), "")]
    if joined == parts or not parts:
        return
    pool = BlockPool(1, 1)
    roots = {PrefixCache(pool, secret=b"s", identity=identity)._root(None) for identity in (parts, joined)}
    assert len(roots) == 2


def test_a_colliding_hash_is_no_hit() -> None:
    """Were two blocks ever to have one key, the token compare would tell them apart."""
    cache = PrefixCache(BlockPool(8, 4), secret=b"s")
    filled(cache, prompt(4))
    victim = sequence([9, 9, 9, 9, 9])
    cache.lookup(victim)
    victim.block_hashes = [next(iter(cache._blocks))]
    assert cache.lookup(victim).num_tokens == 0
    honest = sequence([*prompt(4), 1])
    assert cache.lookup(honest).num_tokens == 4


def test_the_second_copy_of_a_block_is_not_cached() -> None:
    cache = PrefixCache(BlockPool(8, 4), secret=b"s")
    first, second = filled(cache, prompt(8)), filled(cache, prompt(8))
    assert len(cache) == 2
    assert [cache.pool.kind[block] for block in (*first.block_table, *second.block_table)] == [CACHED] * 2 + [EMPTY] * 2
    let_go(cache, first)
    let_go(cache, second)
    cache.check_invariants()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_prompt_that_is_wholly_cached_takes_the_blocks_of_all_tokens_but_one(size: int) -> None:
    cache = PrefixCache(BlockPool(16, size), secret=b"s")
    known = filled(cache, prompt(8))
    hit = cache.lookup(sequence(prompt(8)))
    assert hit.num_tokens == 7
    assert hit.blocks == known.block_table[: -(-7 // size)]


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_the_smallest_pools_are_obeyed(num_blocks: int) -> None:
    """A cache of one block is one block: neither none nor without bound."""
    scheduler, device = make(num_blocks, 4, caching=True)
    for salt in range(6):
        submit(scheduler, prompt(4 * num_blocks, salt), 1)
        device.drain()
        assert scheduler.cache is not None
        assert len(scheduler.cache) == scheduler.pool.num_cached == num_blocks
    hit = submit(scheduler, prompt(4 * num_blocks, 5), 1)
    device.drain()
    assert hit.num_cached_tokens == 4 * num_blocks - 1


def test_tails_are_evicted_before_what_they_hang_on() -> None:
    cache = PrefixCache(BlockPool(6, 4), secret=b"s")
    made = filled(cache, prompt(24))
    let_go(cache, made)
    for left in range(5, -1, -1):
        taken = cache.pool.allocate(UID)
        assert taken == [made.block_table[left]]
        assert cache.lookup(sequence([*prompt(24), 1])).num_full_blocks == left
        cache.check_invariants()


def test_four_hits_make_a_block_reused() -> None:
    cache = PrefixCache(BlockPool(6, 4), secret=b"s")
    made = filled(cache, prompt(8))
    for turn in range(4):
        assert [cache.pool.kind[block] for block in made.block_table] == [CACHED] * 2, turn
        asking = sequence([*prompt(8), 1])
        cache.count_hit(cache.lookup(asking), asking)
    assert [cache.pool.kind[block] for block in made.block_table] == [REUSED] * 2
    assert (cache.stats.lookup_tokens, cache.stats.hit_tokens) == (36, 32)


def test_one_off_prompts_do_not_push_out_a_shared_beginning() -> None:
    scheduler, device = make(40, 4, caching=True)
    for turn in range(6):
        submit(scheduler, [*prompt(24), turn], 1)
        device.drain()
    for salt in range(1, 10):  # more than two turnovers of the pool
        submit(scheduler, prompt(40, salt), 1)
        device.drain()
    shared = submit(scheduler, [*prompt(24), 50], 1)
    device.drain()
    assert shared.num_cached_tokens == 24
    for salt in range(10, 60):
        submit(scheduler, prompt(40, salt), 1)
        device.drain()
    late = submit(scheduler, [*prompt(24), 51], 1)
    device.drain()
    assert late.num_cached_tokens == 0


def test_blocks_unused_for_their_time_to_live_are_forgotten() -> None:
    scheduler, device = make(40, 4, caching=True, ttl_s=10.0)
    assert scheduler.cache is not None
    submit(scheduler, prompt(16), 1)
    device.drain(now=0.0)
    device.step(6.0)
    submit(scheduler, prompt(8), 1)  # uses half of it again
    device.drain(now=6.0)
    device.step(11.0)
    assert len(scheduler.cache) == 2
    device.step(17.0)
    assert len(scheduler.cache) == scheduler.pool.num_cached == 0
    scheduler.check_invariants()


def test_clear_forgets_what_is_in_use_too() -> None:
    scheduler, device = make(40, 4, caching=True)
    assert scheduler.cache is not None
    running = submit(scheduler, prompt(16), 12)
    device.step()
    scheduler.cache.clear()
    scheduler.check_invariants()
    device.drain()
    assert running.finished
    assert scheduler.pool.num_cached == len(scheduler.cache)


# Pins


def test_a_pin_keeps_blocks_within_a_quota_until_it_ends() -> None:
    scheduler, device = make(40, 4, caching=True, owners={UID: OwnerLimits(max_pinned_blocks=5)})
    made = submit(scheduler, prompt(20), 1, keep=True)
    device.drain()
    with pytest.raises(QuotaExceeded, match="max_pinned_blocks"):
        scheduler.pin(made, 20), scheduler.pin(made, 4)
    scheduler.finish(made, "cancelled")
    scheduler.check_invariants()
    assert scheduler.pool.charges() == {UID: 5}
    for salt in range(1, 30):
        submit(scheduler, prompt(32, salt), 1)
        device.drain()
    again = submit(scheduler, [*prompt(20), 1], 1)
    device.drain()
    assert again.num_cached_tokens == 20
    assert scheduler.unpin(1)
    assert not scheduler.unpin(1)
    assert scheduler.pool.num_used == 0


def test_a_pin_expires_and_never_takes_what_an_accepted_request_needs() -> None:
    scheduler, device = make(10, 4, caching=True, owners={UID: OwnerLimits(max_pinned_blocks=8)})
    made = submit(scheduler, prompt(8), 1, keep=True)
    device.drain()
    large = submit(scheduler, prompt(36, 1), 2)
    with pytest.raises(QuotaExceeded, match="must stay"):
        scheduler.pin(made, 8)
    device.drain()
    scheduler.generate(made, 1)
    device.drain()
    assert large.finished
    scheduler.pin(made, 8, expires_at=5.0)
    scheduler.finish(made, "cancelled")
    with pytest.raises(Exception, match="not pinned"):
        submit(scheduler, prompt(36, 2), 2)
    device.step(5.0)
    assert scheduler.pool.num_used == 0
    submit(scheduler, prompt(36, 2), 2)
    device.drain(now=6.0)


@pytest.mark.parametrize(("max_model_len", "most"), [(80, 20), (200, 20), (120, 10), (160, 0)])
def test_all_owners_together_leave_room_for_the_longest_sequence(max_model_len: int, most: int) -> None:
    """Of 40 blocks; where not even they are enough for it, half of them."""
    owners = {uid: OwnerLimits(max_pinned_blocks=40) for uid in range(10)}
    scheduler, device = make(40, 4, caching=True, owners=owners, max_model_len=max_model_len)
    pinned = 0
    for uid in owners:
        made = submit(scheduler, prompt(20, uid), 0, uid=uid, keep=True)
        device.drain()
        try:
            scheduler.pin(made, 20)
            pinned += 5
        except QuotaExceeded:
            pass
        scheduler.finish(made, "cancelled")
        scheduler.check_invariants()
    assert pinned == scheduler.pins.num_blocks == most
    if max_model_len <= 160:
        submit(scheduler, prompt(max_model_len - 1, 99), 1)


@pytest.mark.parametrize("published", [False, True])
def test_what_came_from_a_snapshot_is_found_once_it_is_pinned_or_published(published: bool) -> None:
    scheduler, device = make(40, 4, caching=True)
    made = sequence(prompt(20), 0, keep=True)
    assert scheduler.add_restored(made, 20) is not None
    for position, token in enumerate(made.token_ids):
        device.memory[device.slot(made, position)] = (token, position)
    if published:
        assert scheduler.publish(made, 16) == 4
    scheduler.pin(made, 16)
    scheduler.finish(made, "cancelled")
    again = submit(scheduler, [*prompt(20), 1], 1, uid=UID + published)
    device.drain()
    assert again.num_cached_tokens == 16
    assert scheduler.pins.references() == dict.fromkeys(scheduler.pins.references(), 1)
    scheduler.check_invariants()


def test_what_is_swapped_out_has_nothing_to_pin_or_publish() -> None:
    """It came from a snapshot, so that no lookup has known it either."""
    scheduler, device = make(10, 4, caching=True, host_blocks=10)
    made = sequence(prompt(20), 0, keep=True)
    assert scheduler.add_restored(made, 20) is not None
    for position, token in enumerate(made.token_ids):
        device.memory[device.slot(made, position)] = (token, position)
    submit(scheduler, prompt(38, 99), 1)
    device.drain()
    assert made.host_slots
    assert made.num_computed_tokens == 20
    assert scheduler.publish(made, 20) == 0
    pin_id = scheduler.pin(made, 20)
    assert scheduler.pins.num_blocks == 0
    assert scheduler.unpin(pin_id)
    scheduler.check_invariants()


def test_a_pin_holds_the_copy_that_lookups_find() -> None:
    """Two sequences computed the same at the same time; the cache knows one of them."""
    scheduler, device = make(40, 4, caching=True)
    first = submit(scheduler, prompt(16), 1, keep=True)
    device.drain()
    second = sequence(prompt(16), 0, keep=True)
    assert scheduler.add_restored(second, 16) is not None
    scheduler.pin(second, 16)
    assert set(scheduler.pins.references()) == set(first.block_table[:4])
