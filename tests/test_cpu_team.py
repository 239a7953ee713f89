"""Threads of the CPU back end: how they share work, fail and sleep. No kernels of a model are needed."""

from __future__ import annotations

import ctypes
import os
import select
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvpool.cpu_kernels import table as t
from kvpool.cpu_kernels.compiler import cache_key, changed_sources, load_kernels, sources
from kvpool.cpu_kernels.executor import await_units, claim, run_step
from kvpool.cpu_kernels.isa import FLOAT32
from kvpool.cpu_kernels.jit import entry_point
from kvpool.cpu_kernels.memory import atomic_add
from kvpool.cpu_kernels.team import Team
from kvpool.model.backend import BackendLimits
from kvpool.model.batch import StepBatch
from kvpool.model.cache import cache_directory
from kvpool.model.cpu.backend import CpuBackend
from tests.support import steps
from tests.support.random_checkpoint import RandomCheckpoint

STEP = 5 << t.GENERATION_SHIFT


@entry_point
def claim_all(counter: int, done: int, base: int, units: int, taken: int, pauses: int) -> int:
    """Claim until nothing is left, counting in `taken[unit]` who was claimed; returns how many this caller got."""
    count = 0
    unit = claim(counter, base, units)
    while unit >= 0:
        atomic_add(taken + 8 * unit, 1)
        for _ in range(pauses):
            atomic_add(done, 0)
        atomic_add(done, 1)
        count += 1
        unit = claim(counter, base, units)
    return count


@entry_point
def await_goal(counter: int, goal: int, state: int) -> bool:
    return await_units(counter, goal, state)


@entry_point
def take_part(state: int, generation: int, thread: int) -> bool:
    return run_step(state, generation, thread)


def new_state() -> NDArray[np.int64]:
    return np.zeros(t.STATE_WORDS, dtype=np.int64)


def test_every_unit_is_claimed_once() -> None:
    counters = np.array([STEP, STEP], dtype=np.int64)
    taken = np.zeros(20000, dtype=np.int64)
    address = counters.ctypes.data
    shares: list[int] = []

    def work() -> None:
        shares.append(claim_all(address, address + 8, STEP, len(taken), taken.ctypes.data, 3))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (taken == 1).all()
    assert sum(shares) == len(taken) == counters[1] - STEP


def test_a_latecomer_claims_nothing_of_a_later_step() -> None:
    """A thread that slept through the end of step 5 finds the counters of step 6."""
    later = 6 << t.GENERATION_SHIFT
    counters = np.array([later, later], dtype=np.int64)
    taken = np.zeros(4, dtype=np.int64)
    assert claim_all(counters.ctypes.data, counters.ctypes.data + 8, STEP, 4, taken.ctypes.data, 0) == 0
    assert counters.tolist() == [later, later]
    assert not taken.any()
    assert await_goal(counters.ctypes.data + 8, STEP + 4, new_state().ctypes.data)


def test_waiting_ends_when_a_thread_failed() -> None:
    state, counter = new_state(), np.array([STEP], dtype=np.int64)
    state[t.FAILED] = 1
    assert not await_goal(counter.ctypes.data, STEP + 1, state.ctypes.data)


def test_a_thread_still_leaving_a_step_does_nothing_for_the_next_one_while_it_is_written() -> None:
    """It reads the numbers of rows of a larger step, and must not take the units that its own step did not have."""
    program = steps.tiny_program(steps.Shape(num_layers=1))
    limits = BackendLimits(block_size=4, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64)
    backend = CpuBackend(program, RandomCheckpoint(program), limits, dtype="float32", threads=1)
    backend.allocate_pool(32)
    steps.run_step(backend, [steps.Piece([1], 0, [0])], 4)
    write_step, progress = backend._write_step, backend._team._progress

    def write_and_be_late(batch: StepBatch, *arrays: Any) -> None:
        write_step(batch, *arrays)
        before = progress.copy()
        state = backend._state
        assert take_part(state.ctypes.data, int(state[t.GENERATION]), 0)
        late.append(np.array_equal(progress, before))

    late: list[bool] = []
    backend._write_step = write_and_be_late  # type: ignore[method-assign]
    steps.run_step(backend, [steps.Piece(list(range(60)), 0, list(range(1, 17)))], 4)
    backend.close()
    assert late == [True]


def idle(state: int, thread: int, wake: int, mailbox: int) -> None:
    """Serves steps that have nothing in them."""
    seen = 0
    words = (ctypes.c_int64 * t.STATE_WORDS).from_address(state)
    while not words[t.STOP]:
        if words[t.GENERATION] == seen:
            os.eventfd_read(wake)
            continue
        seen = words[t.GENERATION]
        if thread == 0:
            os.eventfd_write(words[t.DONE_EVENT], 1)


def test_a_step_is_announced_on_the_descriptor() -> None:
    team = Team(idle, new_state(), 2)
    assert select.select([team], [], [], 0)[0] == []
    for _ in range(3):
        team.launch()
        assert select.select([team], [], [], 10)[0] == [team]
        team.wait()
        assert select.select([team], [], [], 0)[0] == []
    team.close()
    team.close()


def test_a_failing_thread_is_reported_and_nobody_hangs() -> None:
    def fail(state: int, thread: int, wake: int, mailbox: int) -> None:
        if thread == 1:
            os.eventfd_read(wake)
            raise ZeroDivisionError("no unit of this kind")
        idle(state, thread + 1, wake, mailbox)  # never announces the end of a step

    team = Team(fail, new_state(), 2)
    team.launch()
    with pytest.raises(RuntimeError, match="no unit of this kind"):
        team.wait()
    with pytest.raises(RuntimeError, match="no unit of this kind"):
        team.launch()
    team.close()


def test_real_threads_sleep_between_steps() -> None:
    """Two hundred empty steps, then a second in which no processor time is used."""
    kernels = load_kernels([FLOAT32], cache_directory() / "kernels", lambda what, share: None)
    state = new_state()
    state[t.FUNCTIONS] = kernels.functions.ctypes.data
    operations = np.zeros((2, t.ROW_WORDS), dtype=np.int64)
    operations[:, t.OPCODE] = t.SELECT_ROWS  # of a step without rows: nothing to do
    state[t.OPS], state[t.NUM_OPS] = operations.ctypes.data, len(operations)
    team = Team(kernels.run_thread, state, 3)
    for _ in range(200):
        team.launch()
        team.wait()
    before = time.process_time()
    select.select([team], [], [], 1.0)
    assert time.process_time() - before < 0.05
    assert state[t.FINISHED] == state[t.GENERATION] == 200
    team.close()


def test_a_cache_that_cannot_be_written_is_said_and_harmless(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said: list[str] = []
    kernels = load_kernels([FLOAT32], tmp_path / "file" / "kernels", lambda what, share: said.append(what))
    assert kernels.functions.all()
    assert said[0].startswith("kernels will not be cached: ")
    assert str(tmp_path / "file") in said[0]


def test_the_cache_key_covers_what_a_function_can_reach() -> None:
    assert {"attention", "product", "tile", "isa", "vectors", "memory", "table"} <= sources("attention")
    assert {"sampling", "attention", "linear", "rope", "rowwise"} <= sources("executor")
    assert "sampling" not in sources("attention")
    assert cache_key("attention") != cache_key("linear")


def test_sources_edited_under_a_running_process_are_noticed() -> None:
    """As this process sees it nothing changed; to one that loaded everything long ago, everything did."""
    assert changed_sources() == []
    assert {"tile.py", "attention.py"} <= set(changed_sources(since_ns=0))
