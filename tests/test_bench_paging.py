"""What paging is worth, as bench.paging counts it: the claims hold in a small run of the simulation."""

from __future__ import annotations

import random

import pytest

from bench.paging import POLICIES, Machine, Run, replay, synthetic
from bench.paging_devices import LargeGpu
from kvpool.daemon.scheduling.limits import SchedulerLimits

NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN = 512, 16, 2048  # four of the longest sequences


@pytest.fixture(scope="module")
def runs() -> dict[str, Run]:
    lengths = [request for request in synthetic(80, random.Random(1)) if sum(request) <= MAX_MODEL_LEN]
    machine = Machine(LargeGpu(), NUM_BLOCKS, BLOCK_SIZE, SchedulerLimits(64, 512, MAX_MODEL_LEN))
    return {policy: replay(policy, lengths, [0.0] * len(lengths), machine) for policy in POLICIES}


def test_useful_memory(runs: dict[str, Run]) -> None:
    assert runs["on-demand"].useful_share >= 0.96
    assert runs["max"].useful_share <= 0.4
    shares = [run.useful_share for run in runs.values()]
    assert shares == sorted(shares)


def test_more_sequences_at_once_and_more_tokens(runs: dict[str, Run]) -> None:
    assert runs["max"].max_running == 4
    for policy in ("pow2", "oracle"):
        assert runs["on-demand"].mean_running > runs[policy].mean_running
    assert runs["on-demand"].mean_running >= 2 * runs["max"].mean_running
    assert runs["on-demand"].tokens_per_s >= 2 * runs["max"].tokens_per_s


def test_everybody_comes_to_an_end(runs: dict[str, Run]) -> None:
    assert len({len(run.latencies_s) for run in runs.values()}) == 1
