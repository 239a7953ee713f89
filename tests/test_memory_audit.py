"""The audit says "consistent" of a pool in any state it may be in, and of no pool in which something is wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpool.client import Client
from kvpool.daemon.memory.block_pool import CACHED, EMPTY
from kvpool.daemon.memory.sequence import Sequence, SequenceState
from kvpool.daemon.scheduling.scheduler import Scheduler
from tests.support.daemon_process import DaemonProcess, eventually
from tests.support.fake_device import FakeDevice
from tests.support.scheduling import UID, make, prompt, sequence, submit

KVPOOL = Path(sys.executable).with_name("kvpool")
GREEDY = {"temperature": 0.0, "ignore_eos": True}


# The command, and a daemon


def fsck(daemon: DaemonProcess) -> tuple[int, str]:
    """What `kvpool fsck` says: exit status and output."""
    done = subprocess.run([KVPOOL, "--address", daemon.address, "fsck"], capture_output=True, text=True, timeout=30)
    return done.returncode, done.stdout + done.stderr


def busy_pool(client: Client) -> None:
    """Forks, cached and pinned blocks, sequences swapped out, and one that runs and is paused."""
    chat = client.open([9] * 50, keep=True, sequence_id="chat")
    chat.generate(max_tokens=4, **GREEDY)
    for at in (53, 33, 32, 5):
        fork = chat.fork(at, sequence_id=f"fork{at}")
        fork.append([at])
    client.attach("fork53").generate(max_tokens=3, **GREEDY)
    chat.pin(16)
    client.generate([8] * 40, max_tokens=1)
    for name, token in (("large", 7), ("larger", 6)):
        client.open([token] * 130, keep=True, sequence_id=name).generate(max_tokens=1)
    client.generate([4] * 20, max_tokens=1)


def test_a_live_pool_in_every_state_is_consistent() -> None:
    settings = {"pool_bytes": "176KiB", "host_pool_bytes": "1MiB", "max_model_len": 160}
    with DaemonProcess("slow", **settings) as daemon, daemon.client() as client:
        assert fsck(daemon) == (0, "consistent\n")
        busy_pool(client)
        with client.submit([3] * 30, max_tokens=20, window=3, **GREEDY) as stream:
            next(stream)
            assert fsck(daemon) == (0, "consistent\n")
            stats = client.stats()
            assert stats["preemptions_total"] > 0
            assert min(stats["blocks_cached"], stats["blocks_used"], stats["sequences_held"]) > 0
        for name in ("chat", "fork53", "fork33", "fork32", "fork5", "large", "larger"):
            client.attach(name).close()
        client.unpin(client.pins()[0]["pin_id"])
        assert eventually(lambda: client.stats()["blocks_used"] == 0)
        assert fsck(daemon) == (0, "consistent\n")


def test_a_leak_is_reported_by_the_command_and_found_by_the_idle_daemon() -> None:
    with DaemonProcess("leaky") as daemon, daemon.client() as client:
        client.generate([5] * 40, max_tokens=2)
        status, output = fsck(daemon)
        assert status == 1
        assert "1 references, 0 tables hold it" in output
        assert client.generate([6] * 40, max_tokens=2, ignore_eos=True).finish_reason == "length"  # it serves on
        assert eventually(lambda: "the pool's books do not agree" in daemon.log, 20.0)


# Everything that may be wrong


def idle(scheduler: Scheduler, device: FakeDevice, token_ids: list[int]) -> Sequence:
    """A sequence that is computed and waits for its owner."""
    made = sequence(token_ids, 0, keep=True)
    scheduler.add(made, idle=True)
    scheduler.generate(made, 1)
    while not made.idle:
        device.step()
    return made


@pytest.fixture
def scheduler() -> Scheduler:
    """A decode and a prompt in chunks run; there are a fork, a pin, cached blocks, and a sequence swapped out."""
    scheduler, device = make(28, 4, host_blocks=16, max_num_batched_tokens=16, caching=True)
    scheduler.costs.compute_s_per_token = 1.0
    swapped = idle(scheduler, device, prompt(29, 1))
    scheduler.finish(idle(scheduler, device, prompt(84, 2)), "cancelled")
    assert swapped.host_slots
    parent = idle(scheduler, device, prompt(14, 3))
    scheduler.fork(parent, 10)
    scheduler.pin(parent, 8)
    submit(scheduler, prompt(5, 4), 20)
    device.step()
    submit(scheduler, prompt(40, 5), 20)
    device.step()
    assert scheduler.cache is not None
    for _ in range(3):
        scheduler.cache.forget(free(scheduler, CACHED))
    scheduler.check_invariants()
    return scheduler


def held(scheduler: Scheduler) -> int:
    """A block that exactly one running sequence holds."""
    return scheduler.roster.running[0].block_table[0]


def free(scheduler: Scheduler, kind: int) -> int:
    block = scheduler.pool.oldest(kind)
    assert block is not None
    return block


def swapped_out(scheduler: Scheduler) -> Sequence:
    return next(sequence for sequence in scheduler.roster.sequences.values() if sequence.host_slots)


def add_to(table: Any, key: Any, amount: int) -> None:
    table[key] += amount


WRONGS: dict[str, Callable[[Scheduler], object]] = {
    "a reference too many": lambda s: add_to(s.pool.ref_count, held(s), 1),
    "a reference too few": lambda s: add_to(s.pool.ref_count, held(s), -1),
    "a free block with a reference": lambda s: add_to(s.pool.ref_count, free(s, EMPTY), 1),
    "another owner": lambda s: add_to(s.pool.owners, held(s), 1),
    "an owner of a free block": lambda s: add_to(s.pool.owners, free(s, CACHED), 1),
    "another charge": lambda s: add_to(s.pool._charged, UID, 1),
    "a charge of nobody": lambda s: s.pool._charged.update({7: 1}),
    "a block that is lost": lambda s: s.pool._unlink(free(s, EMPTY)),
    "a block that is free twice": lambda s: s.pool._insert_after(s.pool.num_blocks + EMPTY, free(s, CACHED)),
    "a block that is free and held": lambda s: s.pool._insert_after(s.pool.num_blocks + EMPTY, held(s)),
    "a list that does not close": lambda s: add_to(s.pool._previous, free(s, EMPTY), 1),
    "another count of free blocks": lambda s: setattr(s.pool, "num_free", s.pool.num_free + 1),
    "another count of cached blocks": lambda s: setattr(s.pool, "num_cached", s.pool.num_cached - 1),
    "a cached block in the wrong list": lambda s: add_to(s.pool.kind, free(s, CACHED), 1),
    "a table with another's block": lambda s: s.roster.running[0].block_table.__setitem__(0, held_by(s, 1)),
    "a table with a free block": lambda s: s.roster.running[0].block_table.append(free(s, EMPTY)),
    "a table that is too short": lambda s: s.roster.running[1].block_table.pop(),
    "a table that lost its first block": lambda s: s.roster.running[0].block_table.__setitem__(0, -1),
    "tokens computed that are not there": lambda s: setattr(s.roster.running[0], "num_computed_tokens", 99),
    "a sequence of nobody": lambda s: s.roster.sequences.pop(s.roster.running[0].sequence_id),
    "a sequence in no place": lambda s: s.roster.running.pop(),
    "a sequence in two places": lambda s: s.roster.running.append(s.roster.running[0]),
    "a state that is not so": lambda s: setattr(s.roster.running[0], "state", SequenceState.PAUSED),
    "a promise to nobody": lambda s: setattr(s.residency, "promised", s.residency.promised + 1),
    "a key that is lost": lambda s: s.cache._blocks.popitem(),
    "a cached block without a key": lambda s: s.cache._entries.popitem(),
    "a block under another's key": lambda s: s.cache._blocks.update(dict.fromkeys(s.cache._blocks, free(s, CACHED))),
    "a host slot that is lost": lambda s: s.host._used.pop(),
    "a host slot that is free and used": lambda s: s.host._free.append(swapped_out(s).host_slots[0]),
    "a host slot of two": lambda s: swapped_out(s).host_slots.__setitem__(0, swapped_out(s).host_slots[1]),
    "a sequence on both sides": lambda s: swapped_out(s).block_table.append(held(s)),
    "a pin of nothing": lambda s: s.pins._references.clear(),
    "an owner that left": lambda s: s.roster.counters.active.update({UID: 1}),
}  # fmt: skip


def held_by(scheduler: Scheduler, index: int) -> int:
    return scheduler.roster.running[index].block_table[0]


@pytest.mark.parametrize("wrong", WRONGS)
def test_everything_that_is_wrong_is_found(scheduler: Scheduler, wrong: str) -> None:
    WRONGS[wrong](scheduler)
    with pytest.raises(RuntimeError):
        scheduler.check_invariants()
