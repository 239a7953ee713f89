"""What the metrics are told of each step: how long somebody waited, and how well the memory was used."""

from __future__ import annotations

from collections.abc import Mapping

from ..scheduling.scheduler import Scheduler
from ..scheduling.step_plan import StepPlan
from .metrics import Metrics
from .request import Sample


def note_plan(metrics: Metrics, plan: StepPlan, samples: Mapping[int, Sample], now: float) -> None:
    """A plan was launched: blocks that it swaps, and how long those waited that are in their first step.

    `samples`: by sequence id. One that an earlier daemon accepted has waited through a restart: it does not count.
    """
    metrics.swapped_out_blocks_total += len(plan.swap_out)
    metrics.swapped_in_blocks_total += len(plan.swap_in)
    for chunk in plan.chunks:
        sample = samples.get(chunk.sequence.sequence_id)
        if sample is not None and not sample.launched:
            sample.launched = True
            if not sample.request.taken_up:
                metrics.queue_s.observe(now - sample.request.arrival)


def note_token(metrics: Metrics, sample: Sample, now: float) -> None:
    """A sample has a new token: how long it was waited for."""
    request, last, sample.last_token_at = sample.request, sample.last_token_at, now
    if last is not None:
        metrics.itl_s.observe(now - last)
    elif request.first_token_at is None:
        request.first_token_at = now
        metrics.ttft_s.observe(now - request.arrival)


def note_occupancy(metrics: Metrics, scheduler: Scheduler) -> None:
    """KV slots of the blocks in use, and how many of them hold a token. Only tails are partly filled."""
    size = scheduler.pool.block_size
    allocated = scheduler.pool.num_used * size
    empty = sum(
        len(sequence.block_table) * size - sequence.num_computed_tokens
        for sequence in scheduler.roster.sequences.values()
        if sequence.block_table
    )
    metrics.occupancy(allocated, max(0, allocated - empty))
