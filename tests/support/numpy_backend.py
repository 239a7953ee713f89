"""The slow, obvious NumPy twin of every back end: plain loops over sequences and heads, float32 throughout."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kvpool.model.backend import BackendLimits
from kvpool.model.batch import Float32, StepBatch, StepResult
from kvpool.model.host_pool import PlainHostPool
from kvpool.model.program import (
    Buffer,
    Embed,
    GatedActivation,
    LayerOutput,
    Linear,
    Logits,
    Op,
    PagedAttention,
    Program,
    RmsNorm,
    RopeKvWrite,
    SelectRows,
    Weight,
)
from kvpool.model.weights import load_weight
from tests.support.numpy_sampling import sample


def rms_norm(x: Float32, weight: Float32, eps: float) -> Float32:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    scale = 1.0 / np.sqrt(np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True) + eps)
    return (x * scale.astype(np.float32) * weight).astype(np.float32)


def activation(x: Float32, kind: str) -> Float32:
    if kind == "silu":
        return (x / (1.0 + np.exp(-x.astype(np.float64)))).astype(np.float32)
    if kind == "gelu_tanh":
        wide = x.astype(np.float64)
        return (0.5 * wide * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (wide + 0.044715 * wide**3)))).astype(np.float32)
    raise ValueError(f"unknown activation {kind!r}")


def rotate(x: Float32, cos: Float32, sin: Float32) -> Float32:
    """Rotary embedding by halves of x (heads, head_dim) at one position; cos, sin (rotary_dim / 2,)."""
    half = len(cos)
    first, second = x[:, :half], x[:, half : 2 * half]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, x[:, 2 * half :]], axis=1)


def as_held(heads: Float32, kv_dtype: str) -> Float32:
    """What a token's K or V (num_kv_heads, head_dim) reads as after a format has held it."""
    if kv_dtype == "int8":
        scale = np.abs(heads).max(axis=-1, keepdims=True) / np.float32(127)
        return (np.rint(heads / np.where(scale > 0, scale, 1)) * scale).astype(np.float32)
    kinds = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
    return heads.astype(kinds[kv_dtype]).astype(np.float32)


class NumpyBackend(PlainHostPool):
    """Fulfils `kvpool.model.backend.Backend`. Steps run inside `launch`; a failure is raised by `collect`.

    `kv_dtype`: float32, or the format whose rounding K and V go through on their way into the pool.
    """

    def __init__(self, program: Program, checkpoint: Any, limits: BackendLimits, kv_dtype: str = "float32") -> None:
        config = program.config
        self.program = program
        self.limits = limits
        self._kv_dtype = kv_dtype
        self.weights: dict[Weight, Float32] = {weight: load_weight(checkpoint, weight) for weight in program.weights()}
        self.pool: Float32 = np.zeros((0, 0), dtype=np.float32)  # (num_blocks, values per block)
        self._shape = (2, config.num_layers, limits.block_size, config.num_kv_heads, config.head_dim)
        self._buffers: dict[str, Float32] = {}
        self._layer_outputs: dict[int, Float32] = {}
        self._result: StepResult | Exception | None = None
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    # -- the contract ---------------------------------------------------------------------------------------------

    @property
    def description(self) -> str:
        return "numpy twin, float32, 1 thread"

    @property
    def kv_layout(self) -> str:
        return "numpy-float32"

    @property
    def weights_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights.values())

    @property
    def workspace_bytes(self) -> int:
        return 0

    @property
    def block_bytes(self) -> int:
        return int(np.prod(self._shape)) * 4

    def available_bytes(self) -> int:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def allocate_pool(self, num_blocks: int) -> None:
        # NaN everywhere: a step that reads a slot nobody wrote shows at once.
        self.pool = np.full((num_blocks, self.block_bytes // 4), np.nan, dtype=np.float32)

    def launch(self, batch: StepBatch) -> None:
        if self._result is not None:
            raise RuntimeError("a step is already in flight")
        try:
            self._result = self._step(batch)
        except Exception as error:
            self._result = error
        os.eventfd_write(self._event, 1)

    def fileno(self) -> int:
        return self._event

    def collect(self) -> StepResult:
        if self._result is None:
            raise RuntimeError("no step is in flight")
        os.eventfd_read(self._event)
        result, self._result = self._result, None
        if isinstance(result, Exception):
            raise RuntimeError(f"the step failed: {result}") from result
        return result

    def copy_blocks(self, source: Sequence[int], destination: Sequence[int]) -> None:
        for origin, target in zip(source, destination, strict=True):
            self.pool[target] = self.pool[origin]

    def read_blocks(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        return self.pool[list(blocks)].view(np.uint8).reshape(len(blocks), self.block_bytes)

    def write_blocks(self, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        rows = np.ascontiguousarray(data, dtype=np.uint8).reshape(len(blocks), self.block_bytes)
        self.pool[list(blocks)] = rows.view(np.float32)

    def keys_values(self, data: NDArray[np.uint8]) -> Float32:
        shaped = np.ascontiguousarray(data).view(np.float32).reshape(len(data), *self._shape)
        return shaped.transpose(0, 2, 1, 3, 4, 5)

    def close(self) -> None:
        if self._event >= 0:
            os.close(self._event)
            self._event = -1
        self.pool = np.zeros((0, 0), dtype=np.float32)

    # -- one step -------------------------------------------------------------------------------------------------

    def _step(self, batch: StepBatch) -> StepResult:
        start = time.perf_counter()
        rows = {"tokens": len(batch.tokens), "logits": len(batch.logit_rows)}
        self._buffers = {b.name: np.zeros((rows[b.rows], b.width), np.float32) for b in self.program.buffers}
        hidden = logits = np.zeros((0, 0), np.float32)
        for op in self.program.ops:
            self._run(op, batch)
            if isinstance(op, Logits):
                hidden, logits = self._buffers[op.x.name], self._buffers[op.out.name]
        sampled = sample(logits, batch.sampling)
        return StepResult(
            *sampled,
            compute_s=time.perf_counter() - start,
            logits=logits.copy() if batch.want_logits else None,
            hidden=hidden if batch.want_hidden else None,
            layer_outputs=np.stack([self._layer_outputs[layer] for layer in batch.layers]) if batch.layers else None,
        )

    def _run(self, op: Op, batch: StepBatch) -> None:
        match op:
            case Embed():
                self._store(op.out, self.weights[op.table][batch.tokens] * np.float32(op.scale))
            case RmsNorm():
                value = rms_norm(self._buffers[op.x.name], self.weights[op.weight].reshape(-1), op.eps)
                self._store(op.out, value, op.accumulate)
            case Linear():
                value = self._buffers[op.x.name] @ self.weights[op.weight].T
                if op.bias is not None:
                    value = value + self.weights[op.bias].reshape(-1)
                self._store(op.out, value, op.accumulate)
            case RopeKvWrite():
                self._rope_kv_write(op, batch)
            case PagedAttention():
                self._store(op.out, self._attention(op, batch))
            case GatedActivation():
                gate_up = self._buffers[op.gate_up.name]
                width = op.out.width
                self._store(op.out, activation(gate_up[:, :width], op.kind) * gate_up[:, width:])
            case LayerOutput():
                self._layer_outputs[op.layer] = self._buffers[op.x.name][batch.layer_rows]
            case SelectRows():
                self._store(op.out, self._buffers[op.x.name][batch.logit_rows])
            case Logits():
                self._store(op.out, self._buffers[op.x.name] @ self.weights[op.weight].T)

    def _store(self, out: Buffer, value: Float32, accumulate: bool = False) -> None:
        self._buffers[out.name] = self._buffers[out.name] + value if accumulate else value.astype(np.float32)

    def _heads(self, qkv: Float32) -> tuple[Float32, Float32, Float32]:
        """The queries, keys and values of one row, each (heads, head_dim)."""
        config = self.program.config
        q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        split = np.split(qkv, [q_width, q_width + kv_width])
        q, k, v = (part.reshape(-1, config.head_dim) for part in split)
        return q, k, v

    def _layer(self, layer: int) -> tuple[Float32, Float32]:
        """K and V of one layer, each (num_blocks, block_size, num_kv_heads, head_dim), as views of the pool."""
        shaped = self.pool.reshape(-1, *self._shape)
        return shaped[:, 0, layer], shaped[:, 1, layer]

    def _rope_kv_write(self, op: RopeKvWrite, batch: StepBatch) -> None:
        cos, sin = op.rope.tables(self.limits.max_model_len)
        keys, values = self._layer(op.layer)
        for row, (position, slot) in enumerate(zip(batch.positions, batch.slot_mapping, strict=True)):
            q, k, v = self._heads(self._buffers[op.qkv.name][row])
            if op.q_norm is not None:
                q[:] = rms_norm(q, self.weights[op.q_norm].reshape(-1), op.eps)
            if op.k_norm is not None:
                k[:] = rms_norm(k, self.weights[op.k_norm].reshape(-1), op.eps)
            q[:] = rotate(q, cos[position], sin[position])
            k[:] = rotate(k, cos[position], sin[position])
            block, offset = divmod(int(slot), self.limits.block_size)
            keys[block, offset], values[block, offset] = as_held(k, self._kv_dtype), as_held(v, self._kv_dtype)

    def _attention(self, op: PagedAttention, batch: StepBatch) -> Float32:
        config = self.program.config
        keys, values = self._layer(op.layer)
        out = np.zeros((len(batch.tokens), op.out.width), np.float32)
        for s, seq_len in enumerate(batch.seq_lens):
            positions = np.arange(seq_len)
            blocks = batch.block_tables[s, positions // self.limits.block_size]
            offsets = positions % self.limits.block_size
            seq_keys, seq_values = keys[blocks, offsets], values[blocks, offsets]  # (seq_len, num_kv_heads, head_dim)
            for row in range(batch.query_start[s], batch.query_start[s + 1]):
                last = int(batch.positions[row])
                first = max(0, last - op.window + 1) if op.window else 0
                q, _, _ = self._heads(self._buffers[op.qkv.name][row])
                for head in range(config.num_heads):
                    kv_head = head // config.queries_per_kv_head
                    scores = seq_keys[first : last + 1, kv_head] @ q[head] * np.float32(op.scale)
                    weights = np.exp(scores - scores.max())
                    mixed = (weights / weights.sum()) @ seq_values[first : last + 1, kv_head]
                    out[row, head * config.head_dim : (head + 1) * config.head_dim] = mixed
        return out
