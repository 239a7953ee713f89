"""The families' programs on real weights: a few reference completions, each scored in one pass by the NumPy twin."""

from __future__ import annotations

import pytest

from kvpool.model.backend import BackendLimits
from tests.support.gold import gold_cases, pulled_model
from tests.support.numpy_backend import NumpyBackend
from tests.support.scoring import score_tokens

BLOCK_SIZE = 16
TOKENS_COMPARED = 12
TIE = 2e-4  # candidates this close in logprob may swap places with another order of float32 sums


@pytest.mark.parametrize(("name", "prompts"), [("smollm2-135m", (4, 17)), ("gemma3-270m", (11,))])
def test_reference_completions(name: str, prompts: tuple[int, ...]) -> None:
    model = pulled_model(name)
    cases = {len(case["prompt_ids"]): case for case in gold_cases(name)}
    backend = NumpyBackend(model.program, model.checkpoint, BackendLimits(BLOCK_SIZE, 1, 64, 64))
    backend.allocate_pool(4)
    for length in prompts:
        case = cases[length]
        expected = case["completion_ids"][:TOKENS_COMPARED]
        tokens = [*case["prompt_ids"], *expected[:-1]]
        result = score_tokens(
            backend, tokens, block_table=[3, 1, 0, 2], block_size=BLOCK_SIZE, first_row=length - 1, top=4
        )
        for row, best in enumerate(case["top3_logprobs"][:TOKENS_COMPARED]):
            if best[0][1] - best[1][1] > TIE:
                assert result.tokens[row] == expected[row]
            got = dict(zip(result.top_tokens[row].tolist(), result.top_logprobs[row].tolist(), strict=True))
            for token_id, logprob in best[:2]:
                assert got[token_id] == pytest.approx(logprob, abs=1e-3)
