"""A forward pass over whole matrices, of config.json and model.safetensors alone: no cache, none of our code."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

Float64 = NDArray[np.float64]


def dense_forward(directory: Path, tokens: Sequence[int]) -> tuple[Float64, Float64]:
    """Each layer's output, (num_layers, T, hidden_size), and the logits, (T, vocab_size), float64."""
    c = json.loads((directory / "config.json").read_text())
    w = {name: tensor.astype(np.float64) for name, tensor in load_file(directory / "model.safetensors").items()}
    gemma, head_dim = c["model_type"] == "gemma3_text", c["head_dim"]
    count, heads, kv_heads = len(tokens), c["num_attention_heads"], c["num_key_value_heads"]
    scale = (c["query_pre_attn_scalar"] if gemma else head_dim) ** -0.5

    def norm(x: Float64, name: str) -> Float64:
        weight = w[f"{name}.weight"] + (1.0 if gemma else 0.0)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + c["rms_norm_eps"]) * weight

    def linear(x: Float64, name: str) -> Float64:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def rotate(x: Float64, local: bool) -> Float64:  # (T, heads, head_dim)
        theta = c["rope_local_base_freq"] if local else c["rope_theta"]
        settings = c.get("rope_scaling") or c.get("rope_parameters", {}).get("full_attention") or {}
        factor = 1.0 if local else settings.get("factor", 1.0)
        half = head_dim // 2
        angle = np.arange(count)[:, None] / factor * theta ** (-2.0 * np.arange(half) / head_dim)[None, :]
        complex_x = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None, :]
        return np.concatenate([complex_x.real, complex_x.imag], axis=-1)

    def act(x: Float64) -> Float64:
        if gemma:
            return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return x / (1 + np.exp(-x))

    outputs = []
    x = w["model.embed_tokens.weight"][list(tokens)] * (math.sqrt(c["hidden_size"]) if gemma else 1.0)
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
        outputs.append(x)
    head = "model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"
    return np.stack(outputs), norm(x, "model.norm") @ w[head].T
