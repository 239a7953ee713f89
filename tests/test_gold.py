"""Reference completions of real models, generated token by token on the CPU in float32, all cases in one batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvpool.model.backend import BackendLimits
from kvpool.model.batch import StepResult
from kvpool.model.cpu.backend import CpuBackend
from tests.support.gold import gold_cases, pulled_model
from tests.support.steps import Piece, run_step

BLOCK_SIZE = 16
CHUNK = 192  # prompt tokens of one case in a step: the long prompts go in pieces, beside decodes
TIE = 2e-4  # candidates this close in logprob may swap places with another order of float32 sums
LOGPROB_TOLERANCE = 1e-3


@dataclass(slots=True)
class Completion:
    """One case under way: what it has, what it should say next."""

    case: dict[str, Any]
    blocks: list[int]
    num_computed: int = 0
    produced: list[int] = field(default_factory=list)
    ties: int = 0

    @property
    def tokens(self) -> list[int]:
        return [*self.case["prompt_ids"], *self.produced]

    @property
    def finished(self) -> bool:
        return len(self.produced) == len(self.case["completion_ids"])

    def piece(self) -> Piece:
        return Piece(self.tokens[self.num_computed : self.num_computed + CHUNK], self.num_computed, self.blocks)

    def take(self, piece: Piece, row: int, result: StepResult) -> None:
        """Compare the row's candidates with the reference, and go on with the reference's token.

        Where the best two are as close as rounding either may win; going on from the reference's choice is the
        re-prompt that its README asks for.
        """
        self.num_computed += len(piece.tokens)
        if self.num_computed < len(self.tokens):
            return
        index = len(self.produced)
        best, second = self.case["top3_logprobs"][index][:2]
        expected = self.case["completion_ids"][index]
        if int(result.tokens[row]) != expected:
            assert best[1] - second[1] <= TIE, f"token {index} of prompt {self.case['prompt_ids'][:8]}"
            assert int(result.tokens[row]) == second[0]
            self.ties += 1
        got = dict(zip(result.top_tokens[row].tolist(), result.top_logprobs[row].tolist(), strict=True))
        for token, logprob in self.case["top3_logprobs"][index]:
            assert got.get(token) == pytest.approx(logprob, abs=LOGPROB_TOLERANCE)
        self.produced.append(expected)


def completions(name: str) -> tuple[list[Completion], int]:
    """All cases with blocks scattered over the pool, and the pool's size."""
    cases = gold_cases(name)
    sizes = [-(-(len(case["prompt_ids"]) + len(case["completion_ids"])) // BLOCK_SIZE) for case in cases]
    scattered = np.random.default_rng(1).permutation(sum(sizes))
    tables = np.split(scattered, np.cumsum(sizes)[:-1])
    made = [Completion(case, table.tolist()) for case, table in zip(cases, tables, strict=True)]
    return made, len(scattered)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["smollm2-135m", pytest.param("gemma3-270m", marks=pytest.mark.slow)])
def test_float32_reproduces_transformers(name: str) -> None:
    model = pulled_model(name)
    running, num_blocks = completions(name)
    limits = BackendLimits(BLOCK_SIZE, len(running), len(running) * CHUNK, 1024)
    backend = CpuBackend(model.program, model.checkpoint, limits, dtype="float32")
    backend.allocate_pool(num_blocks)
    ties = 0
    while running:
        pieces = [completion.piece() for completion in running]
        result = run_step(backend, pieces, BLOCK_SIZE, num_logprobs=4)
        for row, (completion, piece) in enumerate(zip(running, pieces, strict=True)):
            completion.take(piece, row, result)
        ties += sum(completion.ties for completion in running if completion.finished)
        running = [completion for completion in running if not completion.finished]
    backend.close()
    assert ties <= 2
