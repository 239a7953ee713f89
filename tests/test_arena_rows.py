"""Rows of logits on their way down: the program reads them where the daemon wrote them, for as long as it likes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpool.client import forking
from kvpool.client.arena.arena import PAGE_BYTES, ROWS_RETURNED, Arena, Layout
from kvpool.client.arena.rows import ALIGNMENT, RowReader, RowWriter
from kvpool.client.wire.errors import ProtocolError
from tests.support.arena_rig import mapped_arenas

NUM_ROWS = 8
LENT = NUM_ROWS // 2  # at most
LENGTH = 1500  # float32, of more than a page
ROW = np.arange(LENGTH, dtype=np.float32)


class Ends:
    """Both ends of an arena for rows, as they make them."""

    def __init__(self) -> None:
        self.daemon, fd = Arena.create(Layout(128, PAGE_BYTES, PAGE_BYTES, 4 * LENGTH, NUM_ROWS))
        self.client = Arena.open(fd)
        os.close(fd)
        self.writer, self.reader = RowWriter(self.daemon), RowReader(self.client)

    def put(self, number: int) -> int:
        self.reader.settle_ended()
        place = self.writer.put(ROW + number)
        assert place is not None
        return place

    def bring(self, number: int) -> np.ndarray:
        return self.reader.take(self.put(number))

    @property
    def full(self) -> bool:
        self.reader.settle_ended()
        return self.writer.put(ROW) is None

    def hang_up(self) -> None:
        self.reader.close()
        self.client.close()

    def close(self) -> None:
        self.hang_up()
        self.daemon.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


class Rows(RuleBasedStateMachine):
    """A program that keeps and drops rows as it likes sees in each what was written for it, and no row is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.ends = Ends()
        self.told: list[tuple[int, int]] = []  # place and number of rows that are on their way
        self.kept: list[tuple[np.ndarray, int]] = []  # arrays of the program, or views of them
        self.last = 0

    @rule()
    def put(self) -> None:
        self.last += 1
        self.ends.reader.settle_ended()
        place = self.ends.writer.put(ROW + self.last)
        if place is None:
            assert len(self.told) >= NUM_ROWS - LENT
            assert len(self.told) + len({id(array.base) for array, _ in self.kept}) >= NUM_ROWS
        else:
            self.told.append((place, self.last))

    @precondition(lambda self: self.told)
    @rule()
    def take(self) -> None:
        place, number = self.told.pop(0)
        self.kept.append((self.ends.reader.take(place), number))

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        del self.kept[data.draw(st.integers(0, len(self.kept) - 1))]

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def keep_a_view(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.kept) - 1))
        array, number = self.kept[at]
        self.kept[at] = array[:], number

    @invariant()
    def every_row_is_what_was_written(self) -> None:
        for array, number in self.kept:
            np.testing.assert_array_equal(array, ROW + number)

    def teardown(self) -> None:
        self.kept.clear()
        while self.told:
            self.take()
            self.kept.clear()
        assert len({self.ends.put(number) for number in range(NUM_ROWS)}) == NUM_ROWS
        self.ends.close()


TestRows = Rows.TestCase
TestRows.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_rows_of_a_reader_that_keeps_up_lie_in_one_place(ends: Ends) -> None:
    places = set()
    for number in range(20):
        place = ends.put(number)
        places.add(place)
        np.testing.assert_array_equal(ends.reader.take(place), ROW + number)
    assert len(places) == 1


def test_a_row_is_not_copied_and_cannot_be_written(ends: Ends) -> None:
    place = ends.put(1)
    row = ends.reader.take(place)
    ends.daemon.rows[place][:4] = np.float32(-7).tobytes()
    assert row[0] == -7
    with pytest.raises(ValueError, match="read-only"):
        row[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        row.flags.writeable = True


def test_a_place_is_used_again_when_its_row_and_every_view_of_it_are_gone(ends: Ends) -> None:
    row = ends.bring(0)
    view = row[10:20]
    del row
    for derived in (memoryview(view), view.reshape(2, 5), view.view(np.int32), None):
        others = [ends.put(1) for _ in range(NUM_ROWS - 1)]
        assert ends.full
        np.testing.assert_array_equal(view, ROW[10:20])
        for place in others:
            ends.reader.take(place)
        del derived
    del view
    assert len([ends.put(2) for _ in range(NUM_ROWS)]) == NUM_ROWS


def test_a_program_that_keeps_every_row_gets_copies_and_the_daemon_its_places(ends: Ends) -> None:
    rows = [ends.bring(number) for number in range(5 * NUM_ROWS)]
    assert len([ends.put(0) for _ in range(NUM_ROWS - LENT)]) == NUM_ROWS - LENT
    assert ends.full
    for number, row in enumerate(rows):
        np.testing.assert_array_equal(row, ROW + number)
        assert not row.flags.writeable
    assert [row.ctypes.data % ALIGNMENT for row in rows] == [0] * len(rows)


def test_rows_outlive_the_arena_and_its_memory_goes_with_the_last(ends: Ends) -> None:
    before = mapped_arenas()
    kept, view = ends.bring(1), ends.bring(2)[5:]
    ends.hang_up()
    gc.collect()
    np.testing.assert_array_equal(kept, ROW + 1)
    np.testing.assert_array_equal(view, ROW[5:] + 2)
    del ends.client, ends.reader, kept
    assert mapped_arenas() == before
    np.testing.assert_array_equal(view, ROW[5:] + 2)
    del view
    gc.collect()
    assert mapped_arenas() == before - 1
    ends.daemon.close()
    ends.hang_up = lambda: None  # type: ignore[method-assign]


def test_that_a_row_goes_calls_nothing_that_a_signal_could_interrupt(ends: Ends) -> None:
    row, calls = ends.bring(1), []
    sys.setprofile(lambda frame, event, argument: calls.append((event, frame.f_code.co_name)))
    try:
        del row
    finally:
        sys.setprofile(None)
    assert [name for event, name in calls if event == "call"] == []
    assert len(ends.reader._ended) == 1


@pytest.mark.parametrize("place", [NUM_ROWS, 2**32 - 1])
def test_there_is_no_row_outside(ends: Ends, place: int) -> None:
    with pytest.raises(ProtocolError, match=r"arena\.rows: there is no row"):
        ends.reader.take(place)


def test_nothing_can_be_put_where_a_row_is_in_use(ends: Ends) -> None:
    place = ends.put(1)
    row = ends.reader.take(place)
    with pytest.raises(ProtocolError, match=r"arena\.rows: there is no row"):
        ends.reader.take(place)
    np.testing.assert_array_equal(row, ROW + 1)


@pytest.mark.parametrize("said", [2, 2**63, 2**64 - 1])
def test_a_client_cannot_say_what_cannot_be(ends: Ends, said: int) -> None:
    place = ends.put(1)
    ends.client.words[ROWS_RETURNED + place] = said
    with pytest.raises(ProtocolError, match=r"arena\.rows_returned: is \d+, and can only be 0 or 1"):
        ends.put(2)


def test_places_come_back_in_any_order(ends: Ends) -> None:
    rows = [ends.bring(number) for number in range(LENT)]
    told = [ends.put(number) for number in range(NUM_ROWS - LENT)]
    assert ends.full
    del rows[3:5]
    for number in range(2):
        ends.reader.take(ends.put(number))
    for place in told:
        ends.reader.take(place)
    for number, row in enumerate((*rows[:3], *rows[3:])):
        np.testing.assert_array_equal(row, ROW + (number if number < 3 else number + 2))


def test_a_child_keeps_the_rows_that_it_was_forked_with(ends: Ends) -> None:
    """What the parent drops afterwards is not used again, as the child has it too; what it gets afterwards is."""
    rows = [ends.bring(number) for number in range(3)]
    context = multiprocessing.get_context("fork")
    go_on, answer = context.Event(), context.SimpleQueue()

    def child() -> None:
        go_on.wait()
        answer.put([np.array_equal(row, ROW + number) for number, row in enumerate(rows)])
        rows.clear()  # the child gives nothing back

    process = context.Process(target=child)
    process.start()
    rows.clear()
    for number in range(100, 100 + 4 * NUM_ROWS):
        np.testing.assert_array_equal(ends.bring(number), ROW + number)
    assert len([ends.put(number) for number in range(NUM_ROWS - 3)]) == NUM_ROWS - 3
    assert ends.full
    go_on.set()
    assert answer.get() == [True] * 3
    process.join()
    assert process.exitcode == 0
    assert ends.full


def test_what_another_thread_drops_while_a_process_forks_is_not_used_again(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [ends.bring(0)]
    monkeypatch.setattr(forking, "_forking", {threading.get_ident()})  # the hooks before have run, those after not
    rows.clear()
    assert len([ends.put(number) for number in range(NUM_ROWS - 1)]) == NUM_ROWS - 1
    assert ends.full
    forking._after_in_parent()
    assert not forking.forking()
    assert ends.full


def test_a_fork_by_the_system_is_over_when_it_returns() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(forking.forking())
    assert not forking.forking()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_rows_go_with_a_reader_that_is_only_dropped() -> None:
    before = mapped_arenas()
    made = Ends()
    row = made.bring(1)
    made.daemon.close()
    del made
    gc.collect()
    np.testing.assert_array_equal(row, ROW + 1)
    del row
    gc.collect()
    assert mapped_arenas() == before
