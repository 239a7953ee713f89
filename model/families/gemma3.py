"""Gemma 3 (text): four norms a layer, normalised queries and keys, sliding windows with a rotary theta of their own."""

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
from .rope import local_rope, rope


def program(config: ModelConfig) -> Program:
    """Record the forward pass. Each block's output is normalised before it joins the residual stream."""
    record = Recorder(config)
    eps, full, local = config.rms_norm_eps, rope(config), local_rope(config)
    x = record.buffer("x", config.hidden_size)  # the residual stream
    normed = record.buffer("normed", config.hidden_size)
    qkv = record.buffer("qkv", names.qkv_width(config))
    attended = record.buffer("attended", config.num_heads * config.head_dim)
    gate_up = record.buffer("gate_up", 2 * config.intermediate_size)
    activated = record.buffer("activated", config.intermediate_size)
    block_out = record.buffer("block_out", config.hidden_size)

    record.add(Embed(names.embedding(config), x, config.embedding_scale))
    for layer in range(config.num_layers):
        w, window = names.LayerWeights(config, layer), config.window(layer)
        turn = local if window else full
        record.add(RmsNorm(x, w.norm("input_layernorm"), normed, eps))
        record.add(Linear(normed, w.qkv(), qkv))
        record.add(RopeKvWrite(qkv, layer, turn, w.head_norm("q_norm"), w.head_norm("k_norm"), eps))
        record.add(PagedAttention(qkv, layer, attended, config.softmax_scale, window))
        record.add(Linear(attended, w.o(), block_out))
        record.add(RmsNorm(block_out, w.norm("post_attention_layernorm"), x, eps, accumulate=True))

        record.add(RmsNorm(x, w.norm("pre_feedforward_layernorm"), normed, eps))
        record.add(Linear(normed, w.gate_up(), gate_up))
        record.add(GatedActivation(gate_up, activated, config.activation))
        record.add(Linear(activated, w.down(), block_out))
        record.add(RmsNorm(block_out, w.norm("post_feedforward_layernorm"), x, eps, accumulate=True))
        record.add(LayerOutput(x, layer))

    selected = record.buffer("selected", config.hidden_size, rows="logits")
    final = record.buffer("final", config.hidden_size, rows="logits")
    logits = record.buffer("logits", config.vocab_size, rows="logits")
    record.add(SelectRows(x, selected))
    record.add(RmsNorm(selected, names.final_norm(config), final, eps))
    record.add(Logits(final, names.output(config), logits))
    return record.program()
