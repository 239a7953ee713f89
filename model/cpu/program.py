"""From a Program to what the CPU kernels read: a workspace, and a table of operation rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...cpu_kernels import packing
from ...cpu_kernels import table as t
from ...cpu_kernels.attention import partial_bytes, prefix_bytes, scratch_bytes
from ...cpu_kernels.isa import BFLOAT16, FLOAT32
from ...cpu_kernels.kv_formats import KvFormat
from ...cpu_kernels.linear import BLOCK_ROWS, STRETCH, UNPACKED_STRETCH
from ...cpu_kernels.packing import round_up
from ...cpu_kernels.plan import SPLIT, UNIT_BYTES
from ...cpu_kernels.sampling import scratch_floats
from ...cpu_kernels.steps import x_unit
from ..backend import BackendLimits
from ..config import ModelConfig
from ..host_memory import Bytes, Layout, map_bytes
from ..program import (
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
    Rope,
    RopeKvWrite,
    SelectRows,
    Weight,
)
from .weights import PackedWeights

KINDS = {"silu": t.SILU, "gelu_tanh": t.GELU_TANH}
EVERY_ROW = 1 << 40
MAX_UNIT_PANELS = 32
MIN_UNITS = 4  # for each thread: one that is interrupted for a moment has little that the others wait for
UNIT_WEIGHT_BYTES = 256 * 1024  # weights that one unit reads: they stay in a core's L2 while the rows pass

Words = dict[int, int]


def float_bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """Bytes of K and V in one block: for each layer K of all KV heads, then V (see `cpu_kernels.kv_formats`)."""

    kv: KvFormat
    key_bytes: int  # one head
    value_bytes: int
    num_kv_heads: int
    num_layers: int

    @classmethod
    def of(cls, config: ModelConfig, block_size: int, kv: KvFormat) -> PoolLayout:
        key_bytes = kv.key_bytes(config.head_dim, block_size)
        value_bytes = kv.value_bytes(round_up(config.head_dim, 16), block_size)
        return cls(kv, key_bytes, value_bytes, config.num_kv_heads, config.num_layers)

    @property
    def values_offset(self) -> int:
        """Where V starts in a block's part of a layer."""
        return self.num_kv_heads * self.key_bytes

    @property
    def layer_bytes(self) -> int:
        """One layer of one block."""
        return self.num_kv_heads * (self.key_bytes + self.value_bytes)

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.layer_bytes


def row_stride(width: int) -> int:
    """Bytes between rows: an odd number of cache lines, so that a column's values do not compete for the same sets."""
    return ((width + 15) // 16 | 1) * 64


def rounded_bytes(columns: int, read_as: int) -> int:
    """Bytes of a row in the form that products of a format read: see `cpu_kernels.rounding`."""
    unit_columns, unit_bytes = x_unit(read_as)
    return -(-columns // unit_columns) * unit_bytes


def rounded_inputs(program: Program, read_as: Mapping[Weight, int]) -> dict[str, int]:
    """Buffers that products read in another form than float32, and whose writers all can make it: the first such
    product's format for each. (A product that reads another form rounds for itself.)"""
    config = program.config
    whole_heads = (
        config.queries_per_kv_head * config.head_dim % 32 == 0
    )  # an attention unit rounds 32 columns at a time
    read: dict[str, int] = {}
    for op in program.ops:
        if isinstance(op, Linear | Logits) and x_unit(read_as[op.weight])[0] > 1:
            read.setdefault(op.x.name, read_as[op.weight])
    for op in program.ops:
        out = getattr(op, "out", None)
        rounds = isinstance(op, RmsNorm | GatedActivation) or (isinstance(op, PagedAttention) and whole_heads)
        if out is not None and not rounds:
            read.pop(out.name, None)
    return read


class Workspace:
    """Every byte that a step writes besides the pool: buffers, rotary tables, plan, partial results, scratch.

    Buffers of logit rows have as many rows as a step has tokens, but the logits themselves only `logit_chunk`: the
    vocabulary product and sampling go through the rows in chunks. Beside each buffer of `rounded_inputs` there is a
    copy in the form that products read.
    """

    def __init__(
        self, program: Program, limits: BackendLimits, num_threads: int, read_as: Mapping[Weight, int]
    ) -> None:
        config, layout, rounded = program.config, Layout(), rounded_inputs(program, read_as)
        self.max_rows = max(limits.max_num_batched_tokens, limits.max_num_seqs)
        self.logit_chunk = min(self.max_rows, limits.max_num_seqs)
        logits = {op.out.name for op in program.ops if isinstance(op, Logits)}
        self.strides = {buffer.name: row_stride(buffer.width) for buffer in program.buffers}
        offsets = {}
        for buffer in program.buffers:
            rows = self.logit_chunk if buffer.name in logits else self.max_rows
            offsets[buffer.name] = layout.reserve(rows * self.strides[buffer.name])
        copies = {
            buffer.name: layout.reserve(self.max_rows * rounded_bytes(buffer.width, rounded[buffer.name]))
            for buffer in program.buffers
            if buffer.name in rounded
        }
        ropes = list(dict.fromkeys(op.rope for op in program.ops if isinstance(op, RopeKvWrite)))
        table_bytes = [limits.max_model_len * rope.rotary_dim // 2 * 4 for rope in ropes]
        rope_offsets = [(layout.reserve(size), layout.reserve(size)) for size in table_bytes]

        group, head_width = config.queries_per_kv_head, round_up(config.head_dim, 16)
        divided_tiles = 4 * num_threads
        max_splits = -(-limits.max_model_len // SPLIT)
        self.partial_bytes = partial_bytes(group, head_width)
        self.prefix_bytes = prefix_bytes(group, head_width)
        self.scratch_bytes = round_up(scratch_bytes(group, head_width), 64)
        self.sampling_floats = scratch_floats(config.vocab_size)
        longest = max(op.weight.cols for op in program.ops if isinstance(op, Linear | Logits))
        self.totals_offset = BLOCK_ROWS * max(rounded_bytes(longest, number) for number in read_as.values())
        self.unpacked_offset = self.totals_offset + BLOCK_ROWS * MAX_UNIT_PANELS * 64
        self.linear_bytes = self.unpacked_offset + max(UNPACKED_STRETCH, longest) * 64 + 64
        max_units = self.max_rows * config.num_kv_heads + divided_tiles * max_splits
        parts = [
            layout.reserve(size)
            for size in (
                max_units * UNIT_BYTES,
                divided_tiles * max_splits * self.partial_bytes,
                divided_tiles * 8,
                limits.max_num_seqs * config.num_kv_heads * UNIT_BYTES,
                limits.max_num_seqs * config.num_kv_heads * self.prefix_bytes,
                num_threads * self.scratch_bytes,
                num_threads * self.sampling_floats * 4,
                num_threads * self.linear_bytes,
            )
        ]
        self.memory: Bytes = map_bytes(layout.size, "the workspace", "lower max_num_batched_tokens or max_num_seqs")
        start = self.memory.ctypes.data
        self.addresses = {name: start + offset for name, offset in offsets.items()}
        self.rounded = {name: (start + offset, rounded[name]) for name, offset in copies.items()}
        self.units, self.partials, self.arrivals, *shared = (start + part for part in parts)
        self.shared_units, self.prefixes, *scratch = shared
        self.scratch, self.sampling_scratch, self.linear_scratch = scratch
        self.ropes: dict[Rope, tuple[int, int]] = {}
        for rope, size, (cos, sin) in zip(ropes, table_bytes, rope_offsets, strict=True):
            for offset, values in zip((cos, sin), rope.tables(limits.max_model_len), strict=True):
                self.memory[offset : offset + size].view(np.float32)[:] = values.reshape(-1)
            self.ropes[rope] = (start + cos, start + sin)

    def rows(self, buffer: Buffer, count: int) -> NDArray[np.float32]:
        """The first `count` rows of a buffer, (count, width) float32, as a view."""
        offset, stride = self.addresses[buffer.name] - self.memory.ctypes.data, self.strides[buffer.name]
        rows = self.memory[offset : offset + count * stride].view(np.float32).reshape(count, stride // 4)
        return rows[:, : buffer.width]


class OperationTable:
    """Writes a Program as rows of `cpu_kernels.table` words. Products read each matrix as `read_as` says."""

    def __init__(
        self,
        weights: PackedWeights,
        workspace: Workspace,
        read_as: Mapping[Weight, int],
        num_threads: int,
    ) -> None:
        self._weights, self._workspace = weights, workspace
        self._read_as, self._num_threads = read_as, num_threads
        self._rows: list[Words] = [{t.OPCODE: t.PLAN}]

    def build(self, program: Program) -> tuple[NDArray[np.int64], int]:
        """(operations, ROW_WORDS) int64, and how many of them are those of a step that wants no output of a layer; then
        come those of one that does. Whoever is late and looks into the other's rows finds rows."""
        for op in program.ops:
            self._add(op)
        plain = [words for words in self._rows if words[t.OPCODE] != t.LAYER_OUTPUT]
        rows = np.zeros((len(plain) + len(self._rows), t.ROW_WORDS), dtype=np.int64)
        rows[:, t.ROW_LIMIT] = EVERY_ROW
        for row, words in zip(rows, [*plain, *self._rows], strict=True):
            for index, value in words.items():
                row[index] = value
        return rows, len(plain)

    def _add(self, op: Op) -> None:
        match op:
            case Embed():
                words = self._matrix(op.table, self._weights.formats[op.table]) | self._output(op.out)
                self._rows.append({t.OPCODE: t.EMBED, t.SCALAR: float_bits(op.scale)} | words)
            case RmsNorm():
                words = self._input(op.x) | self._output(op.out) | {t.SCALAR: float_bits(op.eps)}
                words |= {t.WEIGHT: self._weights.addresses[op.weight], t.ACCUMULATE: int(op.accumulate)}
                self._rows.append({t.OPCODE: t.RMS_NORM} | words)
            case Linear():
                self._rows.append(self._linear(op))
            case RopeKvWrite():
                self._rows.append(self._rope_kv_write(op))
            case PagedAttention():
                words = self._input(op.qkv) | self._output(op.out) | {t.LAYER: op.layer}
                words |= {t.SCALAR: float_bits(op.scale), t.WINDOW: op.window}
                self._rows += [{t.OPCODE: opcode} | words for opcode in (t.SHARED_ATTENTION, t.ATTENTION)]
            case GatedActivation():
                words = self._input(op.gate_up) | self._output(op.out) | {t.KIND: KINDS[op.kind]}
                self._rows.append({t.OPCODE: t.ACTIVATION} | words)
            case LayerOutput():
                words = {t.OPCODE: t.LAYER_OUTPUT, t.ROWS_KIND: t.LAYER_ROWS, t.LAYER: op.layer, t.WIDTH: op.x.width}
                self._rows.append(words | self._input(op.x))
            case SelectRows():
                self._rows.append({t.OPCODE: t.SELECT_ROWS} | self._input(op.x) | self._output(op.out))
            case Logits():
                self._logits(op)

    def _input(self, buffer: Buffer) -> Words:
        return {t.X: self._workspace.addresses[buffer.name], t.X_STRIDE: self._workspace.strides[buffer.name]}

    def _output(self, buffer: Buffer) -> Words:
        address, stride = self._workspace.addresses[buffer.name], self._workspace.strides[buffer.name]
        kind = t.TOKEN_ROWS if buffer.rows == "tokens" else t.LOGIT_ROWS
        words = {t.OUT: address, t.OUT_STRIDE: stride, t.WIDTH: buffer.width, t.ROWS_KIND: kind}
        copy, form = self._workspace.rounded.get(buffer.name, (0, FLOAT32))
        return words | {t.ROUNDED_OUT: copy, t.ROUNDED_AS: form}

    def _matrix(self, weight: Weight, read_as: int) -> Words:
        weight_format = self._weights.formats[weight]
        panels = -(-weight.rows // 16)
        return {
            t.WEIGHT: self._weights.addresses[weight],
            t.WEIGHT_FORMAT: read_as,
            t.PANELS: panels,
            t.PANEL_BYTES: packing.panel_bytes(weight_format, weight.cols),
            t.STEP_BYTES: packing.step_bytes(weight_format),
            t.K: round_up(weight.cols, 2) if weight_format == BFLOAT16 else weight.cols,
            t.UNIT_PANELS: self._unit_panels(panels, packing.panel_bytes(weight_format, weight.cols), weight.cols),
        }

    def _unit_panels(self, panels: int, panel_bytes: int, cols: int) -> int:
        """Panels of a unit: as many as L2 holds, but enough units that the threads finish together."""
        stretch_bytes = panel_bytes * min(cols, STRETCH) // cols
        in_cache = min(MAX_UNIT_PANELS, max(1, UNIT_WEIGHT_BYTES // stretch_bytes))
        units = max(1, round(panels / in_cache / self._num_threads)) * self._num_threads
        return max(1, min(MAX_UNIT_PANELS, math.ceil(panels / max(units, MIN_UNITS * self._num_threads))))

    def _product(self, op: Linear | Logits) -> Words:
        read_as = self._read_as[op.weight]
        words = self._matrix(op.weight, read_as) | self._input(op.x) | self._output(op.out)
        copy, form = self._workspace.rounded.get(op.x.name, (0, FLOAT32))
        if copy and x_unit(read_as) == x_unit(form):
            words |= {t.X: copy, t.X_STRIDE: rounded_bytes(op.x.width, form), t.X_ROUNDED: 1}
        return {t.OPCODE: t.LINEAR} | words

    def _linear(self, op: Linear) -> Words:
        bias = self._weights.addresses[op.bias] if op.bias is not None else 0
        return self._product(op) | {t.BIAS: bias, t.ACCUMULATE: int(op.accumulate)}

    def _rope_kv_write(self, op: RopeKvWrite) -> Words:
        cos, sin = self._workspace.ropes[op.rope]
        words = {t.OPCODE: t.ROPE_KV_WRITE, t.SCALAR: float_bits(op.eps)} | self._input(op.qkv) | {t.LAYER: op.layer}
        words |= {t.COS: cos, t.SIN: sin, t.HALF: op.rope.rotary_dim // 2}
        norms = {t.Q_NORM: op.q_norm, t.K_NORM: op.k_norm}
        return words | {index: self._weights.addresses[norm] for index, norm in norms.items() if norm is not None}

    def _logits(self, op: Logits) -> None:
        """The vocabulary product and sampling, chunk after chunk of logit rows."""
        chunk = self._workspace.logit_chunk
        for first in range(0, self._workspace.max_rows, chunk):
            part = {t.ROW_BEGIN: first, t.ROW_LIMIT: chunk}
            self._rows.append(self._product(op) | part)
            self._rows.append({t.OPCODE: t.SAMPLE, t.ROWS_KIND: t.LOGIT_ROWS} | self._input(op.out) | part)
