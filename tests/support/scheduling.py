"""Short ways to make a scheduler over a small pool, and sequences for it."""

from __future__ import annotations

from typing import Any

from kvpool.daemon.memory.block_pool import BlockPool
from kvpool.daemon.memory.prefix_cache import PrefixCache
from kvpool.daemon.memory.sequence import Sequence
from kvpool.daemon.scheduling.limits import OwnerLimits, SchedulerLimits
from kvpool.daemon.scheduling.scheduler import Scheduler
from tests.support.fake_device import FakeDevice, undisturbed

UID = 1000


def make(
    num_blocks: int = 64,
    block_size: int = 4,
    *,
    caching: bool = False,
    owners: dict[int, OwnerLimits] | None = None,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 200,
    max_queued: int = 1000,
    ageing_s: float = 1000.0,
    ttl_s: float = 0.0,
    **options: Any,
) -> tuple[Scheduler, FakeDevice]:
    """A scheduler and its fake device."""
    pool = BlockPool(num_blocks, block_size)
    limits = SchedulerLimits(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        max_queued=max_queued,
        ageing_s=ageing_s,
        owners=owners or {},
    )
    cache = PrefixCache(pool, secret=b"boot", ttl_s=ttl_s) if caching else None
    scheduler = Scheduler(pool, limits=limits, prefix_cache=cache, **options)
    return scheduler, FakeDevice(scheduler)


def prompt(length: int, salt: int = 0) -> list[int]:
    """A prompt that shares no beginning with one of another salt."""
    return [salt % 64, *((salt * 31 + at * 7 + at * at) % 64 for at in range(1, length))][:length]


def sequence(token_ids: list[int], max_tokens: int = 4, *, uid: int = UID, **fields: Any) -> Sequence:
    return Sequence(uid=uid, token_ids=list(token_ids), max_tokens=max_tokens, **fields)


def submit(scheduler: Scheduler, token_ids: list[int], max_tokens: int = 4, **fields: Any) -> Sequence:
    """Check and add, as a daemon does."""
    made = sequence(token_ids, max_tokens, **fields)
    scheduler.check_admission(made.uid, made.num_tokens, max_tokens)
    scheduler.add(made)
    return made


def is_right(made: Sequence, num_prompt_tokens: int) -> bool:
    """Whether a finished sequence is what an undisturbed run gives."""
    return made.token_ids == undisturbed(
        made.token_ids[:num_prompt_tokens], made.max_tokens, made.stop_token_ids, made.min_tokens
    )
