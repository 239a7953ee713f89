"""Whether a preempted sequence is swapped or computed again is decided by what the device was measured to need."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpool.model.backend import Backend, BackendLimits
from kvpool.model.batch import StepBatch, StepResult
from kvpool.model.loading import LoadedModel
from tests.support.engine_harness import Harness, prompts
from tests.support.numpy_backend import NumpyBackend

LENGTH = 60
PROMPT_S, DECODE_S = 1e-6, 5.0


class Timed(NumpyBackend):
    """Says that each row of a prompt took `per_token_s`, and each step of single tokens an age."""

    per_token_s = PROMPT_S

    def collect(self) -> StepResult:
        rows, result = self.rows, super().collect()
        return replace(result, compute_s=rows * self.per_token_s if rows > 1 else DECODE_S)

    def launch(self, batch: StepBatch) -> None:
        self.rows = len(batch.tokens)
        super().launch(batch)


class Slow(Timed):
    per_token_s = 1.0


def made(kind: type[Timed]) -> Harness:
    def make(model: LoadedModel, limits: BackendLimits) -> Backend:
        return kind(model.program, model.checkpoint, limits)

    return Harness(num_blocks=8, host_blocks=8, max_num_seqs=2, make_backend=make)


@pytest.mark.parametrize(("kind", "swaps"), [(Timed, False), (Slow, True)])
def test_the_cheaper_way_is_taken(kind: type[Timed], swaps: bool) -> None:
    harness = made(kind)
    costs = harness.scheduler.costs
    assert 0 < costs.swap_s_per_block < 1
    assert costs.compute_s_per_token == 0
    expected = harness.generate(prompts(1, LENGTH, seed=1)[0], max_tokens=4).token_ids
    assert costs.compute_s_per_token == pytest.approx(kind.per_token_s)  # and not what single tokens took
    low = harness.submit(prompts(1, LENGTH, seed=1)[0], max_tokens=4)
    harness.turn()
    costs.swap_s_per_block = 1e-3
    urgent = harness.submit(prompts(1, 100, seed=2)[0], max_tokens=4, priority=5)
    while not harness.scheduler.preemptions_total:
        harness.turn()
    assert bool(low.samples[0].sequence.host_slots) == swaps
    harness.run()
    assert harness.answer(low).token_ids == expected
    assert harness.answer(urgent).reason == "length"
    assert (costs.swap_s_per_block != 1e-3) == swaps  # measured again where it was used
    harness.assert_clean()
    harness.close()
