"""The claims of the table of counts in docs/benchmarks.md."""

import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed (pip install numba-cuda[cu13])")

from bench.cuda_counts import LLAMA, decode, prefill
from tests.support.cuda_rooms import layout


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kv", ["bfloat16", "int8", "float8_e4m3"])
def test_decode_of_64_sequences_is_bound_by_the_bytes_that_it_must_read(kv: str) -> None:
    shape = layout.AttentionShape(LLAMA.num_heads, LLAMA.num_kv_heads, LLAMA.head_dim, LLAMA.block_size, kv)
    counted = decode(shape, 64, 4096)
    assert counted.ratio <= 1.05
    assert counted.sector_ratio <= 1
    assert counted.counters.max_bank_ways <= 2
    assert counted.copy_share >= 0.85


def test_prefill_reads_each_key_and_value_once_and_little_shared_memory() -> None:
    counted = prefill(layout.AttentionShape(4, 2, 64, 16, "bfloat16"), 128, 128)
    assert counted.ratio <= 1.05
    assert counted.shared_bytes_per_multiply < 0.1
    wasteful = [line for line in counted.counters.select("global") if line.sectors > line.ideal_sectors]
    assert {line.direction for line in wasteful} <= {"store"}  # pieces of 16 bytes, which the cache joins
