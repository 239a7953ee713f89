"""Llama, and every model that differs from it only by numbers in its configuration (Mistral, SmolLM, Qwen)."""

from __future__ import annotations

from ..config import ModelConfig
from ..program import (
    Embed,
    GatedActivation,
    LayerOutput,
    Linear,
    Logits,
    PagedAttention,
    Program,
    Recorder,
    RmsNorm,
    RopeKvWrite,
    SelectRows,
)
from . import names
from .rope import rope


def program(config: ModelConfig) -> Program:
    """Record the forward pass."""
    record = Recorder(config)
    eps, turn = config.rms_norm_eps, rope(config)
    x = record.buffer("x", config.hidden_size)  # the residual stream
    normed = record.buffer("normed", config.hidden_size)
    qkv = record.buffer("qkv", names.qkv_width(config))
    attended = record.buffer("attended", config.num_heads * config.head_dim)
    gate_up = record.buffer("gate_up", 2 * config.intermediate_size)
    activated = record.buffer("activated", config.intermediate_size)

    record.add(Embed(names.embedding(config), x, config.embedding_scale))
    for layer in range(config.num_layers):
        w = names.LayerWeights(config, layer)
        record.add(RmsNorm(x, w.norm("input_layernorm"), normed, eps))
        record.add(Linear(normed, w.qkv(), qkv, bias=w.qkv_bias()))
        record.add(RopeKvWrite(qkv, layer, turn, w.head_norm("q_norm"), w.head_norm("k_norm"), eps))
        record.add(PagedAttention(qkv, layer, attended, config.softmax_scale, config.window(layer)))
        record.add(Linear(attended, w.o(), x, bias=w.o_bias(), accumulate=True))

        record.add(RmsNorm(x, w.norm("post_attention_layernorm"), normed, eps))
        record.add(Linear(normed, w.gate_up(), gate_up, bias=w.gate_up_bias()))
        record.add(GatedActivation(gate_up, activated, config.activation))
        record.add(Linear(activated, w.down(), x, bias=w.down_bias(), accumulate=True))
        record.add(LayerOutput(x, layer))

    selected = record.buffer("selected", config.hidden_size, rows="logits")
    final = record.buffer("final", config.hidden_size, rows="logits")
    logits = record.buffer("logits", config.vocab_size, rows="logits")
    record.add(SelectRows(x, selected))
    record.add(RmsNorm(selected, names.final_norm(config), final, eps))
    record.add(Logits(final, names.output(config), logits))
    return record.program()
