"""A step's tokens into the rings of their readers, all in one call: Python's objects for a reader would cost more than
its tokens. What a ring and its records are, says the client's `arena.ring`; here they are words and addresses.

A ring is a row of a table. Of the words that its client writes nothing is believed beyond what lets it be read.
"""

from __future__ import annotations

from collections.abc import Callable

from .jit import inlined
from .memory import (
    atomic_load,
    atomic_store,
    fence,
    load_i64,
    load_u16,
    load_u32,
    store_i64,
    store_u16,
    store_u32,
    write_byte,
)

# fmt: off
(
    HEAD_AT, TAIL_AT, AWAKE_AT,  # addresses of the shared words: the writer's cursor, the reader's, whether it is awake
    RECORDS_AT, LAST_PLACE,      # address of the records; one less than there are places for, a power of two
    HEAD, TAIL,                  # records written so far, and read so far as far as is known
    BELL,                        # the descriptor that wakes the reader; -1: the ring is closed
    TO_BE_WOKEN,                 # 1: it is among the sleepers
) = range(9)
# fmt: on
RING_WORDS = 16
RING_BYTES = 8 * RING_WORDS

# fmt: off
(
    NUM_READERS,
    HANDLES,    # uint32: of each token
    ORDER,      # int64: tokens in the order of their readers,
    BEGINS,     # int64 (NUM_READERS + 1): of which a reader's are those from here on
    RECORDS,    # reader after reader
    ENDS,       # int64: how many records there are up to each reader's last
    ROWS,       # int64: of the table, each reader's
    LEFT,       # int64: how many readers have records that are not written, then how many each has
) = range(8)
# fmt: on
BATCH_WORDS = 8
"""A batch: the addresses of what a step has for its readers."""

RECORD_BYTES = 32
TAIL_BYTES = 14  # of a record: what follows its numbers


def pack_records(batch: int, numbers: int, tails: int, first_tails: int, num_tokens: int) -> None:
    """Fill RECORDS and ENDS.

    numbers      columns of `num_tokens` each: uint32 index, int32 token_id, float32 logprob, uint16 sample
    tails        one for each record, token after token
    first_tails  int64 (num_tokens + 1): which is the first of each token; 0: each has one
    """
    handles, order, begins = load_i64(batch + 8 * HANDLES), load_i64(batch + 8 * ORDER), load_i64(batch + 8 * BEGINS)
    records, ends = load_i64(batch + 8 * RECORDS), load_i64(batch + 8 * ENDS)
    token_ids, logprobs, samples = numbers + 4 * num_tokens, numbers + 8 * num_tokens, numbers + 12 * num_tokens
    count = 0
    for reader in range(load_i64(batch + 8 * NUM_READERS)):
        for place in range(load_i64(begins + 8 * reader), load_i64(begins + 8 * (reader + 1))):
            token = load_i64(order + 8 * place)
            first, last = token, token + 1
            if first_tails:
                first, last = load_i64(first_tails + 8 * token), load_i64(first_tails + 8 * (token + 1))
            for part in range(first, last):
                record, tail = records + RECORD_BYTES * count, tails + TAIL_BYTES * part
                store_u32(record, load_u32(handles + 4 * token))
                store_u32(record + 4, load_u32(numbers + 4 * token))
                store_u32(record + 8, load_u32(token_ids + 4 * token))
                store_u32(record + 12, load_u32(logprobs + 4 * token))
                store_u16(record + 16, load_u16(samples + 2 * token))
                store_u16(record + 18, load_u16(tail))
                store_u32(record + 20, load_u32(tail + 2))
                store_i64(record + 24, load_i64(tail + 6))
                count += 1
        store_i64(ends + 8 * reader, count)


def write_rings(table: int, batch: int, sleepers: int) -> None:
    """Write each reader's records, as far as there is room, and let it see them.

    LEFT      before: not 0 for readers whose are to be left. They are, too, where a ring is closed or its reader's
              cursor cannot be
    sleepers  int64: how many rings have a reader that is to be woken, then their rows of the table; grows
    """
    records, ends = load_i64(batch + 8 * RECORDS), load_i64(batch + 8 * ENDS)
    rows, left = load_i64(batch + 8 * ROWS), load_i64(batch + 8 * LEFT)
    begin, num_late, num_sleepers = 0, 0, load_i64(sleepers)
    for reader in range(load_i64(batch + 8 * NUM_READERS)):
        end, row = load_i64(ends + 8 * reader), load_i64(rows + 8 * reader)
        ring = table + RING_BYTES * row
        remaining, result = end - begin, left + 8 * (reader + 1)
        if load_i64(result) == 0 and load_i64(ring + 8 * BELL) >= 0:
            count = _write(ring, records + RECORD_BYTES * begin, remaining)
            remaining -= count
            if count and _has_to_be_woken(ring):
                num_sleepers += 1
                store_i64(sleepers + 8 * num_sleepers, row)
        store_i64(result, remaining)
        num_late += remaining != 0
        begin = end
    store_i64(left, num_late)
    store_i64(sleepers, num_sleepers)


@inlined
def _write(ring: int, records: int, num_records: int) -> int:
    """How many of the records there was room for; none if the reader's cursor cannot be."""
    head, last_place = load_i64(ring + 8 * HEAD), load_i64(ring + 8 * LAST_PLACE)
    tail = atomic_load(load_i64(ring + 8 * TAIL_AT))
    if tail < load_i64(ring + 8 * TAIL) or tail > head:
        return 0
    store_i64(ring + 8 * TAIL, tail)
    room = last_place + 1 - (head - tail)
    count = room if room < num_records else num_records  # `min` would be a function that can fail
    for i in range(count):
        target = load_i64(ring + 8 * RECORDS_AT) + RECORD_BYTES * ((head + i) & last_place)
        for word in range(0, RECORD_BYTES, 8):
            store_i64(target + word, load_i64(records + RECORD_BYTES * i + word))
    if count:
        store_i64(ring + 8 * HEAD, head + count)
        atomic_store(load_i64(ring + 8 * HEAD_AT), head + count)
    return count


@inlined
def _has_to_be_woken(ring: int) -> bool:
    """The reader may not have seen what was just written, and is not among the sleepers yet."""
    fence()
    if atomic_load(load_i64(ring + 8 * AWAKE_AT)) != 0 or load_i64(ring + 8 * TO_BE_WOKEN) != 0:
        return False
    store_i64(ring + 8 * TO_BE_WOKEN, 1)
    return True


def ring_bells(table: int, sleepers: int) -> None:
    """Wake the sleepers; there are none afterwards. A bell that is full needs no more, and that a reader is gone is
    noticed elsewhere."""
    for number in range(load_i64(sleepers)):
        ring = table + RING_BYTES * load_i64(sleepers + 8 * (number + 1))
        if load_i64(ring + 8 * BELL) >= 0:
            write_byte(load_i64(ring + 8 * BELL), ring + 8 * TO_BE_WOKEN)
        store_i64(ring + 8 * TO_BE_WOKEN, 0)
    store_i64(sleepers, 0)


RINGS: list[Callable[..., None]] = [pack_records, write_rings, ring_bells]
