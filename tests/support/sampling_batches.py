"""Sampling batches for tests: plain defaults, ragged lists given as one list a row, and a call of the CPU kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvpool.cpu_kernels.sampling import SampledArrays, SamplingArrays, sample_rows, scratch_floats
from kvpool.model.batch import Float32, SamplingBatch

DEFAULTS: dict[str, tuple[float, Any]] = {
    "temperature": (0, np.float32),
    "top_k": (0, np.int32),
    "top_p": (1, np.float32),
    "min_p": (0, np.float32),
    "seeds": (0, np.uint64),
    "counters": (0, np.int64),
    "num_logprobs": (-1, np.int32),
    "targets": (-1, np.int32),
    "repetition_penalty": (1, np.float32),
    "presence_penalty": (0, np.float32),
    "frequency_penalty": (0, np.float32),
}

Pairs = Sequence[Sequence[tuple[int, float]]]


def sampling_batch(
    num_rows: int,
    *,
    penalties: Pairs | None = None,
    bias: Pairs | None = None,
    allowed: Sequence[Sequence[int]] | None = None,
    **values: Any,
) -> SamplingBatch:
    """Greedy rows, except for `values` (a scalar or one a row) and the lists: (token, count), (token, bias), token."""
    fields = {
        name: np.broadcast_to(np.array(values.get(name, default), dtype=dtype), num_rows).copy()
        for name, (default, dtype) in DEFAULTS.items()
    }
    lists: dict[str, Any] = {}
    if penalties is not None:
        lists |= _ragged("penalty", penalties, counts=np.int32)
    if bias is not None:
        lists |= _ragged("bias", bias, values=np.float32)
    if allowed is not None:
        lists |= _ragged("allowed", [[(token, 0) for token in row] for row in allowed])
    return SamplingBatch(**fields, **lists)


def _ragged(name: str, rows: Pairs, **second: Any) -> dict[str, Any]:
    pairs = [pair for row in rows for pair in row]
    arrays = {
        f"{name}_start": np.cumsum([0, *map(len, rows)], dtype=np.int32),
        f"{name}_tokens": np.array([token for token, _ in pairs], dtype=np.int32),
    }
    for field, dtype in second.items():
        arrays[f"{name}_{field}"] = np.array([value for _, value in pairs], dtype=dtype)
    return arrays


def run_kernel(logits: Float32, batch: SamplingBatch, scratch: Float32 | None = None) -> SampledArrays:
    """All rows of logits (R, V) through the CPU kernel; outputs and scratch start as garbage."""
    num_rows, vocab_size = logits.shape
    width = max(0, int(batch.num_logprobs.max(initial=0)))
    sampled = SampledArrays(
        np.full(num_rows, 77, dtype=np.int32),
        np.full(num_rows, 77, dtype=np.float32),
        np.full((num_rows, width), 77, dtype=np.int32),
        np.full((num_rows, width), 77, dtype=np.float32),
        np.ones(num_rows, dtype=np.bool_),
    )
    params = SamplingArrays(*(getattr(batch, name) for name in SamplingArrays._fields))
    if scratch is None:
        scratch = np.full(scratch_floats(vocab_size), np.nan, dtype=np.float32)
    sample_rows(logits, params, sampled, scratch)
    return sampled
