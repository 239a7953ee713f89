"""Steps for back ends, written as who computes which tokens where; and tiny programs of any shape to run them on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvpool.model.backend import Backend
from kvpool.model.batch import StepBatch, StepResult
from kvpool.model.config import ModelConfig
from kvpool.model.program import (
    Embed,
    GatedActivation,
    LayerOutput,
    Linear,
    Logits,
    PagedAttention,
    Program,
    Recorder,
    RmsNorm,
    Rope,
    RopeKvWrite,
    SelectRows,
    Weight,
)
from tests.support.sampling_batches import sampling_batch

UNREADABLE = -(1 << 20)  # a block id that no kernel may ever follow


@dataclass(slots=True)
class Piece:
    """Some tokens of one sequence, from position `start`, and the sequence's block table."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]


def step_batch(
    pieces: Sequence[Piece], block_size: int, *, every_row: bool = False, layers: Sequence[int] = (), **sampling: Any
) -> StepBatch:
    """One step of `pieces`; logits of each piece's last row, or of all rows, and of these rows the outputs of `layers`.
    Unused table entries are unreadable."""
    tokens = np.array([token for piece in pieces for token in piece.tokens], dtype=np.int32)
    starts = np.cumsum([0, *(len(piece.tokens) for piece in pieces)], dtype=np.int32)
    positions = [np.arange(piece.start, piece.start + len(piece.tokens)) for piece in pieces]
    slots = [
        np.asarray(piece.blocks)[at // block_size] * block_size + at % block_size
        for piece, at in zip(pieces, positions, strict=True)
    ]
    lengths = np.array([piece.start + len(piece.tokens) for piece in pieces], dtype=np.int32)
    tables = np.full((len(pieces), max(len(piece.blocks) for piece in pieces) + 1), UNREADABLE, dtype=np.int32)
    for row, piece, length in zip(tables, pieces, lengths, strict=True):
        used = -(-int(length) // block_size)
        row[:used] = piece.blocks[:used]
    rows = np.arange(len(tokens), dtype=np.int32) if every_row else starts[1:] - 1
    following = [
        piece.blocks[at // block_size] * block_size + at % block_size if at < len(piece.blocks) * block_size else -1
        for piece, at in zip(pieces, lengths.tolist(), strict=True)
    ]
    return StepBatch(
        tokens=tokens,
        positions=np.concatenate(positions).astype(np.int32),
        slot_mapping=np.concatenate(slots).astype(np.int64),
        query_start=starts,
        seq_lens=lengths,
        block_tables=tables,
        logit_rows=rows.astype(np.int32),
        sampling=sampling_batch(len(rows), **sampling),
        want_logits=True,
        want_hidden=True,
        layers=tuple(layers),
        layer_rows=rows.astype(np.int32) if layers else np.zeros(0, np.int32),
        next_slots=np.array(following, np.int64),
    )


def run_step(backend: Backend, pieces: Sequence[Piece], block_size: int, **options: Any) -> StepResult:
    backend.launch(step_batch(pieces, block_size, **options))
    return backend.collect()


@dataclass(frozen=True, slots=True)
class Shape:
    """A tiny model of any proportions; no number needs to be a multiple of anything."""

    vocab_size: int = 101
    hidden_size: int = 48
    intermediate_size: int = 88
    num_layers: int = 2
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    rotary_dim: int = 0  # 0: all of head_dim
    activation: str = "silu"
    windows: tuple[int, ...] = ()
    bias: bool = False
    head_norms: bool = False
    post_norm: bool = False
    embedding_scale: float = 1.0
    tied: bool = field(default=True)


def tiny_program(shape: Shape = Shape()) -> Program:
    """A decoder with every kind of operation that `shape` asks for."""
    s, eps = shape, 1e-5
    config = ModelConfig(
        "tiny", s.vocab_size, s.hidden_size, s.intermediate_size, s.num_layers, s.num_heads, s.num_kv_heads, s.head_dim,
        4096, eps, layer_windows=s.windows,
    )  # fmt: skip
    record = Recorder(config)
    rotary = s.rotary_dim or s.head_dim & -2
    rope = Rope(tuple(float(100.0 ** (-2 * i / rotary)) for i in range(rotary // 2)))
    q_width, kv_width = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
    x = record.buffer("x", s.hidden_size)
    normed = record.buffer("normed", s.hidden_size)
    qkv = record.buffer("qkv", q_width + 2 * kv_width)
    attended = record.buffer("attended", q_width)
    gate_up = record.buffer("gate_up", 2 * s.intermediate_size)
    activated = record.buffer("activated", s.intermediate_size)
    block_out = record.buffer("block_out", s.hidden_size)
    table = Weight(("embed",), s.vocab_size, s.hidden_size)
    record.add(Embed(table, x, s.embedding_scale))
    for layer in range(s.num_layers):

        def vector(name: str, size: int, layer: int = layer) -> Weight:
            return Weight((f"{layer}.{name}",), size)

        def matrix(name: str, rows: int, cols: int, layer: int = layer) -> Weight:
            return Weight((f"{layer}.{name}",), rows, cols)

        norms = (vector("q_norm", s.head_dim), vector("k_norm", s.head_dim)) if s.head_norms else (None, None)
        record.add(RmsNorm(x, vector("norm1", s.hidden_size), normed, eps))
        bias = vector("qkv_bias", qkv.width) if s.bias else None
        record.add(Linear(normed, matrix("qkv", qkv.width, s.hidden_size), qkv, bias=bias))
        record.add(RopeKvWrite(qkv, layer, rope, *norms, eps))
        record.add(PagedAttention(qkv, layer, attended, s.head_dim**-0.5, config.window(layer)))
        if s.post_norm:
            record.add(Linear(attended, matrix("o", s.hidden_size, q_width), block_out))
            record.add(RmsNorm(block_out, vector("post", s.hidden_size), x, eps, accumulate=True))
        else:
            record.add(Linear(attended, matrix("o", s.hidden_size, q_width), x, accumulate=True))
        record.add(RmsNorm(x, vector("norm2", s.hidden_size), normed, eps))
        record.add(Linear(normed, matrix("gate_up", gate_up.width, s.hidden_size), gate_up))
        record.add(GatedActivation(gate_up, activated, s.activation))
        record.add(Linear(activated, matrix("down", s.hidden_size, s.intermediate_size), x, accumulate=True))
        record.add(LayerOutput(x, layer))
    selected = record.buffer("selected", s.hidden_size, rows="logits")
    final = record.buffer("final", s.hidden_size, rows="logits")
    logits = record.buffer("logits", s.vocab_size, rows="logits")
    record.add(SelectRows(x, selected))
    record.add(RmsNorm(selected, Weight(("norm",), s.hidden_size), final, eps))
    record.add(Logits(final, table if s.tied else Weight(("head",), s.vocab_size, s.hidden_size), logits))
    return record.program()
