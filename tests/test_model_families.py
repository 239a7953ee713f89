"""Every family's program, held against a plain dense forward pass that shares no code with it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from kvpool.model.backend import BackendLimits
from kvpool.model.config import ModelConfig, RopeScaling
from kvpool.model.families import PROGRAMS, build_program
from kvpool.model.families.rope import local_rope, rope
from kvpool.model.loading import load_model
from kvpool.model.program import Embed, Logits, PagedAttention, RmsNorm, RopeKvWrite
from tests.support.numpy_backend import NumpyBackend
from tests.support.scoring import score_tokens
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
    got = _run_program(directory, tokens)
    expected = _dense(directory, tokens)
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-4 * np.abs(expected).max())
    assert np.std(expected) > 0.5, "the tiny model's logits must be lively, or this test sees nothing"


def _run_program(directory: Path, tokens: np.ndarray) -> np.ndarray:
    model = load_model(directory)
    backend = NumpyBackend(model.program, model.checkpoint, BackendLimits(16, 1, 512, 512))
    backend.allocate_pool(8)
    logits = score_tokens(backend, tokens.tolist(), block_table=[5, 2, 7, 0], block_size=16).logits
    assert logits is not None
    return logits


def _dense(directory: Path, tokens: np.ndarray) -> np.ndarray:
    """(T, vocab_size) float64 from config.json and model.safetensors alone: no cache, no fusing, whole matrices."""
    c = json.loads((directory / "config.json").read_text())
    w = {name: tensor.astype(np.float64) for name, tensor in load_file(directory / "model.safetensors").items()}
    gemma, head_dim = c["model_type"] == "gemma3_text", c["head_dim"]
    count, heads, kv_heads = len(tokens), c["num_attention_heads"], c["num_key_value_heads"]
    scale = (c["query_pre_attn_scalar"] if gemma else head_dim) ** -0.5

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        weight = w[f"{name}.weight"] + (1.0 if gemma else 0.0)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + c["rms_norm_eps"]) * weight

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def rotate(x: np.ndarray, local: bool) -> np.ndarray:  # (T, heads, head_dim)
        theta = c["rope_local_base_freq"] if local else c["rope_theta"]
        settings = c.get("rope_scaling") or c.get("rope_parameters", {}).get("full_attention") or {}
        factor = 1.0 if local else settings.get("factor", 1.0)
        half = head_dim // 2
        angle = np.arange(count)[:, None] / factor * theta ** (-2.0 * np.arange(half) / head_dim)[None, :]
        complex_x = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None, :]
        return np.concatenate([complex_x.real, complex_x.imag], axis=-1)

    def act(x: np.ndarray) -> np.ndarray:
        if gemma:
            return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return x / (1 + np.exp(-x))

    x = w["model.embed_tokens.weight"][tokens] * (math.sqrt(c["hidden_size"]) if gemma else 1.0)
    for layer in range(c["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        sliding = c["model_type"] == "mistral" or (gemma and c["layer_types"][layer] == "sliding_attention")
        h = norm(x, f"{at}.input_layernorm")
        q, k, v = (
            linear(h, f"{at}.self_attn.{letter}_proj").reshape(count, -1, head_dim) for letter in ("q", "k", "v")
        )
        if f"{at}.self_attn.q_norm.weight" in w:
            q, k = norm(q, f"{at}.self_attn.q_norm"), norm(k, f"{at}.self_attn.k_norm")
        q, k = rotate(q, gemma and sliding), rotate(k, gemma and sliding)
        k, v = (np.repeat(part, heads // kv_heads, axis=1) for part in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) * scale
        ahead = np.arange(count)[:, None] - np.arange(count)[None, :]
        seen = (ahead >= 0) & ((ahead < c["sliding_window"]) if sliding else True)
        weights = np.exp(np.where(seen, scores, -np.inf) - np.where(seen, scores, -np.inf).max(-1, keepdims=True))
        attended = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v).reshape(count, -1)
        out = linear(attended, f"{at}.self_attn.o_proj")
        x = x + (norm(out, f"{at}.post_attention_layernorm") if gemma else out)
        h = norm(x, f"{at}.{'pre_feedforward' if gemma else 'post_attention'}_layernorm")
        out = linear(act(linear(h, f"{at}.mlp.gate_proj")) * linear(h, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj")
        x = x + (norm(out, f"{at}.post_feedforward_layernorm") if gemma else out)
    return norm(x, "model.norm") @ w["model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"].T


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
