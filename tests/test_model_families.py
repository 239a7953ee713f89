"""Every family's program, held against a plain dense forward pass that shares no code with it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvpool.model.backend import BackendLimits
from kvpool.model.config import ModelConfig, RopeScaling
from kvpool.model.families import PROGRAMS, build_program
from kvpool.model.families.rope import local_rope, rope
from kvpool.model.loading import load_model
from kvpool.model.program import Embed, Logits, PagedAttention, RmsNorm, RopeKvWrite
from tests.support.dense import dense_forward
from tests.support.numpy_backend import NumpyBackend
from tests.support.steps import Piece, run_step
from tests.support.tiny_model import write_tiny_model

CASES = {
    "llama": ("llama", {}),
    "llama, tied, all biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama, one head a group": ("llama", {"num_key_value_heads": 4}),
    "llama, linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gemma3": ("gemma3_text", {}),
    "gemma3, scaled": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            }
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_program_computes_what_a_dense_forward_pass_computes(case: str, tmp_path: Path) -> None:
    model_type, overrides = CASES[case]
    directory = write_tiny_model(tmp_path, model_type, **overrides)
    tokens = np.random.default_rng(3).integers(0, 384, 50)
    layers, got = _run_program(directory, tokens)
    expected_layers, expected = dense_forward(directory, tokens.tolist())
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-4 * np.abs(expected).max())
    np.testing.assert_allclose(layers, expected_layers, rtol=0, atol=2e-4 * np.abs(expected_layers).max())
    assert np.std(expected) > 0.5, "the tiny model's logits must be lively, or this test sees nothing"


def _run_program(directory: Path, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The outputs of all layers, and the logits."""
    model = load_model(directory)
    backend = NumpyBackend(model.program, model.checkpoint, BackendLimits(16, 1, 512, 512))
    backend.allocate_pool(8)
    piece = Piece(tokens.tolist(), 0, [5, 2, 7, 0])
    result = run_step(backend, [piece], 16, every_row=True, layers=range(model.config.num_layers))
    assert result.layer_outputs is not None
    assert result.logits is not None
    return result.layer_outputs, result.logits


def _config(**changes: Any) -> ModelConfig:
    plain: dict[str, Any] = {
        "family": "llama",
        "vocab_size": 384,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
    }
    return ModelConfig(**plain | changes)


def test_tied_embeddings_are_one_weight() -> None:
    program = build_program(_config(tie_word_embeddings=True))
    table = next(op.table for op in program.ops if isinstance(op, Embed))
    output = next(op.weight for op in program.ops if isinstance(op, Logits))
    assert table == output
    assert list(program.weights()).count(table) == 1


def test_only_selected_rows_enter_the_final_norm() -> None:
    program = build_program(_config())
    norms = [op for op in program.ops if isinstance(op, RmsNorm)]
    assert [norm.x.rows for norm in norms] == ["tokens"] * 4 + ["logits"]


def test_sliding_layers_have_their_window_and_their_theta() -> None:
    config = _config(family="gemma3", layer_windows=(512, 0), rope_theta=1e6, rope_local_theta=1e4, qk_norm=True)
    program = build_program(config)
    assert [op.window for op in program.ops if isinstance(op, PagedAttention)] == [512, 0]
    turns = [op.rope for op in program.ops if isinstance(op, RopeKvWrite)]
    assert turns == [local_rope(config), rope(config)]
    assert turns[0] != turns[1]


def test_unknown_family_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'gpt9'.*llama"):
        build_program(_config(family="gpt9"))
    assert "llama" in PROGRAMS


def test_unknown_rope_scaling_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'spiral'"):
        rope(_config(rope_scaling=RopeScaling("spiral")))


def test_llama3_scaling_keeps_fast_frequencies_and_divides_slow_ones() -> None:
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    config = _config(head_dim=128, rope_theta=500000.0, rope_scaling=scaling)
    for index, got in enumerate(rope(config).inv_freq):
        plain = 500000.0 ** (-2 * index / 128)
        wavelength = 2 * math.pi / plain
        if wavelength < 8192 / 4.0:
            expected = plain
        elif wavelength > 8192 / 1.0:
            expected = plain / 8
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            expected = (1 - smooth) * plain / 8 + smooth * plain
        assert got == pytest.approx(expected, rel=1e-5)


def test_yarn_ramps_between_kept_and_divided_frequencies() -> None:
    scaling = RopeScaling("yarn", 4.0, original_max_position_embeddings=4096, attention_factor=1.25)
    config = _config(head_dim=64, rope_theta=10000.0, rope_scaling=scaling)
    turn = rope(config)
    assert turn.attention_factor == 1.25
    plain = [10000.0 ** (-2 * index / 64) for index in range(32)]
    turns = [4096 * frequency / (2 * math.pi) for frequency in plain]  # rotations over the original context
    fast = max(index for index in range(32) if turns[index] >= 32)
    slow = min(index for index in range(32) if turns[index] <= 1)
    for index, got in enumerate(turn.inv_freq):
        if index <= fast:
            assert got == pytest.approx(plain[index], rel=1e-5)
        elif index >= slow:
            assert got == pytest.approx(plain[index] / 4, rel=1e-5)
        else:
            assert plain[index] / 4 < got < plain[index]
