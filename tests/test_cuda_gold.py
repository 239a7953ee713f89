"""Real models through the whole CUDA back end in float32, kernels by their NumPy twins: the reference's tokens."""

import numpy as np
import pytest

from kvpool.model.backend import BackendLimits
from tests.support.cuda_card import TwinCard
from tests.support.cuda_rooms import layout
from tests.support.gold import gold_cases, pulled_model
from tests.support.steps import Piece, step_batch

cuda_backend = pytest.importorskip("kvpool.model.cuda.backend")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["smollm2-135m", "gemma3-270m"])
def test_float32_reproduces_transformers(name: str) -> None:
    model = pulled_model(name)
    cases = sorted(gold_cases(name), key=lambda case: len(case["prompt_ids"]))[:3]
    config = model.config
    shape = layout.AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, 16, "float32")
    card = TwinCard(shape, "float32", capacity_bytes=3 << 30)
    limits = BackendLimits(block_size=16, max_num_seqs=4, max_num_batched_tokens=128, max_model_len=128)
    backend = cuda_backend.CudaBackend(model.program, model.checkpoint, limits, dtype="float32", device=card)
    backend.allocate_pool(24)
    tables = np.random.default_rng(0).permutation(24).reshape(3, 8).tolist()
    pieces = [Piece(case["prompt_ids"], 0, table) for case, table in zip(cases, tables, strict=True)]
    produced: list[list[int]] = [[], [], []]
    for _ in range(12):
        batch = step_batch(pieces, 16)
        batch.want_logits = batch.want_hidden = False
        backend.launch(batch)
        tokens = backend.collect().tokens.tolist()
        for token, so_far in zip(tokens, produced, strict=True):
            so_far.append(token)
        pieces = [
            Piece([token], piece.start + len(piece.tokens), piece.blocks)
            for token, piece in zip(tokens, pieces, strict=True)
        ]
    assert produced == [case["completion_ids"][:12] for case in cases]
