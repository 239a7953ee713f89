"""Run tokens of one sequence through a back end in a single step."""

from __future__ import annotations

import numpy as np

from kvpool.model.backend import Backend
from kvpool.model.batch import StepBatch, StepResult
from tests.support.sampling_batches import sampling_batch


def score_tokens(
    backend: Backend, tokens: list[int], *, block_table: list[int], block_size: int, first_row: int = 0, top: int = 0
) -> StepResult:
    """Logits, greedy tokens and the `top` best candidates of rows `first_row` to the last."""
    count = len(tokens)
    positions = np.arange(count, dtype=np.int32)
    table = np.array(block_table, dtype=np.int32)
    backend.launch(
        StepBatch(
            tokens=np.array(tokens, np.int32),
            positions=positions,
            slot_mapping=table[positions // block_size].astype(np.int64) * block_size + positions % block_size,
            query_start=np.array([0, count], np.int32),
            seq_lens=np.array([count], np.int32),
            block_tables=table[None, :],
            logit_rows=positions[first_row:],
            sampling=sampling_batch(count - first_row, num_logprobs=top),
            want_logits=True,
        )
    )
    return backend.collect()
