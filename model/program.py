"""A model as data: a flat list of operations on named row buffers, which every back end can run.

A family writes its forward pass top to bottom against `Recorder`; nothing is computed, each call appends one
operation. All activations are float32 rows: a buffer has `width` columns and one row per token of the step (`rows ==
"tokens"`, T rows) or one per requested logit row (`rows == "logits"`, R rows).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .config import ModelConfig

Rows = Literal["tokens", "logits"]


@dataclass(frozen=True, slots=True)
class Buffer:
    """(T or R, width) float32."""

    name: str
    width: int
    rows: Rows = "tokens"


@dataclass(frozen=True, slots=True)
class Weight:
    """One matrix (rows, cols), stacked along rows from the checkpoint tensors `names`; a vector has cols == 1.

    `offset` is added to every element when it is loaded (norm weights stored as w with 1 + w meant).
    """

    names: tuple[str, ...]
    rows: int
    cols: int = 1
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding by halves: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), pairs (i, i + rotary_dim / 2)."""

    inv_freq: tuple[float, ...]  # (rotary_dim / 2,)
    attention_factor: float = 1.0

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.inv_freq)

    def tables(self, max_model_len: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """cos and sin, each (max_model_len, rotary_dim / 2) float32; angles in float32, as Transformers."""
        positions = np.arange(max_model_len, dtype=np.float32)
        angles = positions[:, None] * np.asarray(self.inv_freq, dtype=np.float32)[None, :]
        factor = np.float32(self.attention_factor)
        return np.cos(angles) * factor, np.sin(angles) * factor


@dataclass(frozen=True, slots=True)
class Embed:
    """out[t] = table[tokens[t]] * scale."""

    table: Weight  # (vocab_size, hidden_size)
    out: Buffer
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """out[t] (+)= x[t] / sqrt(mean(x[t]^2) + eps) * weight; `accumulate` adds to out."""

    x: Buffer
    weight: Weight
    out: Buffer
    eps: float
    accumulate: bool = False


@dataclass(frozen=True, slots=True)
class Linear:
    """out[t] (+)= x[t] @ weight.T (+ bias); `accumulate` adds to out (the residual)."""

    x: Buffer
    weight: Weight  # (out.width, x.width)
    out: Buffer
    bias: Weight | None = None
    accumulate: bool = False


@dataclass(frozen=True, slots=True)
class RopeKvWrite:
    """Rotate the queries of `qkv` in place; rotate its keys and store keys and values in the pool's slots of `layer`.

    `qkv` rows are [num_heads * head_dim | num_kv_heads * head_dim | num_kv_heads * head_dim]. Where given, `q_norm` and
    `k_norm` (head_dim,) are applied as an RMS norm over each head before the rotation.
    """

    qkv: Buffer
    layer: int
    rope: Rope
    q_norm: Weight | None = None
    k_norm: Weight | None = None
    eps: float = 0.0


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """Causal attention of the rows' queries over their sequences' blocks, the row's own token included.

    `window` > 0: a query at position p sees positions p - window + 1 .. p.
    """

    qkv: Buffer
    layer: int
    out: Buffer  # (T, num_heads * head_dim)
    scale: float
    window: int = 0


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """out[t] = act(gate_up[t, :n]) * gate_up[t, n:], n = out.width; act is silu or gelu_tanh."""

    gate_up: Buffer
    out: Buffer
    kind: str


@dataclass(frozen=True, slots=True)
class LayerOutput:
    """`x` holds the output of `layer` now, the residual stream behind it: a step that asks for it takes a copy."""

    x: Buffer
    layer: int


@dataclass(frozen=True, slots=True)
class SelectRows:
    """out[r] = x[logit_rows[r]]."""

    x: Buffer
    out: Buffer


@dataclass(frozen=True, slots=True)
class Logits:
    """out[r] = x[r] @ weight.T, the vocabulary product."""

    x: Buffer
    weight: Weight  # (vocab_size, hidden_size)
    out: Buffer


Op = Embed | RmsNorm | Linear | RopeKvWrite | PagedAttention | GatedActivation | LayerOutput | SelectRows | Logits


@dataclass(frozen=True, slots=True)
class Program:
    """The recorded forward pass of one model."""

    config: ModelConfig
    ops: tuple[Op, ...]
    buffers: tuple[Buffer, ...]

    def weights(self) -> Iterator[Weight]:
        """Every distinct weight, in the order in which the program first uses it."""
        seen: set[Weight] = set()
        for op in self.ops:
            for name in ("table", "weight", "bias", "q_norm", "k_norm"):
                weight = getattr(op, name, None)
                if weight is not None and weight not in seen:
                    seen.add(weight)
                    yield weight


@dataclass(slots=True)
class Recorder:
    """Collects operations and buffers while a family's forward pass runs."""

    config: ModelConfig
    ops: list[Op] = field(default_factory=list)
    buffers: dict[str, Buffer] = field(default_factory=dict)

    def buffer(self, name: str, width: int, rows: Rows = "tokens") -> Buffer:
        made = Buffer(name, width, rows)
        if self.buffers.setdefault(name, made) != made:
            raise ValueError(f"buffer {name!r} already exists with another shape")
        return made

    def add(self, op: Op) -> None:
        self.ops.append(op)

    def program(self) -> Program:
        return Program(self.config, tuple(self.ops), tuple(self.buffers.values()))
