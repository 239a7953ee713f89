"""Memory that is made real before anybody knows how much of it is needed."""

from __future__ import annotations

import pytest

from kvpool.model.host_memory import HeadStart, becoming_real
from tests.support.daemon_process import eventually


@pytest.mark.parametrize("wanted", [0, 1, 5000, (3 << 20) + 17, 4 << 20, 5 << 20])
def test_a_head_start_is_taken_over_whatever_is_wanted(wanted: int) -> None:
    """Of four megabytes: less (the rest goes back), all, and more (which is new memory)."""
    ahead = HeadStart(4 << 20)
    assert eventually(lambda: ahead.touched == 4 << 20)
    memory, num_real = ahead.take(wanted, "the pool", "lower pool_bytes")
    assert memory.shape == (wanted,)
    assert num_real == (wanted if wanted <= 4 << 20 else 0)
    with becoming_real(memory[num_real:]):
        pass
    assert not memory.any()
    memory[:] = 7
    assert ahead.touched == 0


def test_a_head_start_of_more_than_there_is_is_none() -> None:
    ahead = HeadStart(1 << 50)
    memory, num_real = ahead.take(100, "the pool", "lower pool_bytes")
    assert (memory.size, num_real) == (100, 0)
    with pytest.raises(MemoryError, match="lower pool_bytes"):
        HeadStart(1 << 50).take(1 << 50, "the pool", "lower pool_bytes")
