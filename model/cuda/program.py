"""From a Program to launches: a workspace on the card, and for every operation a function that launches it.

Buffers are float32 rows, except those that only products read: these are kept in the products' 16-bit format, which
they would be rounded to anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import DTypeLike

from ...cuda_kernels import (
    activations,
    embedding,
    float32_matmul,
    kv_write,
    norms,
    quantised_matmul,
    sampling,
    skinny_matmul,
)
from ...cuda_kernels.compiler import Kernel
from ..backend import BackendLimits
from ..batch import Float32
from ..config import ModelConfig
from ..host_memory import Layout
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
from .attention import Attention, AttentionBuffers, AttentionPlan
from .device import CudaDevice, KernelMaker
from .staging import Mirror
from .weights import CudaWeights

VENDOR_ROWS = 64  # rows from which on `fast` products are the vendor's library's
TOP_WIDTH = 20  # most candidates that a row reports


@dataclass(slots=True)
class Step:
    """How many rows one run of the launches covers, and how its rows attend."""

    num_rows: int
    num_logit_rows: int
    plans: Mapping[int, AttentionPlan]
    wanted: Mapping[int, Float32] = field(default_factory=dict)  # where the outputs of layers go, all the step's rows


Launch = Callable[[Step], None]


@dataclass(frozen=True, slots=True)
class PoolView:
    """Where each layer's part of the pool (and of its scales) begins; layout.py has the shapes."""

    kv: int
    scales: int
    kv_layer_bytes: int
    scales_layer_bytes: int


def check_shapes(config: ModelConfig) -> None:
    """Raise ValueError if a width of the model is not one that 16-byte accesses can read."""
    for name in ("hidden_size", "intermediate_size", "head_dim"):
        if getattr(config, name) % 8:
            raise ValueError(f"device cuda needs {name} to be a multiple of 8, the model has {getattr(config, name)}")


class Workspace:
    """Every buffer and table on the card besides weights, pool and staging."""

    def __init__(
        self, program: Program, limits: BackendLimits, element: str, attention: Attention, device: CudaDevice
    ) -> None:
        layout = Layout()
        self.max_rows = max(limits.max_num_batched_tokens, limits.max_num_seqs)
        self.logit_rows = limits.max_num_seqs  # logits are computed for so many rows at a time
        self.elements = {buffer.name: _element(program, buffer, element) for buffer in program.buffers}
        offsets = {}
        for buffer in program.buffers:
            rows = self.max_rows if buffer.rows == "tokens" else self.logit_rows
            itemsize = 4 if self.elements[buffer.name] == "float32" else 2
            offsets[buffer.name] = layout.reserve(rows * buffer.width * itemsize)
        scaled = layout.reserve(self.logit_rows * program.config.vocab_size * 4)
        parts = layout.reserve(attention.parts_bytes)
        ropes = list(dict.fromkeys(op.rope for op in program.ops if isinstance(op, RopeKvWrite)))
        tables = [rope.tables(limits.max_model_len) for rope in ropes]
        rope_offsets = [(layout.reserve(cos.nbytes), layout.reserve(sin.nbytes)) for cos, sin in tables]
        self.size = layout.size
        base = device.allocate(layout.size, "the workspace", "lower max_num_batched_tokens or max_num_seqs")
        self.addresses = {name: base + offset for name, offset in offsets.items()}
        self.scaled, self.parts = base + scaled, base + parts
        self.ropes: dict[Rope, tuple[int, int]] = {}
        for rope, (cos_at, sin_at), (cos, sin) in zip(ropes, rope_offsets, tables, strict=True):
            self.ropes[rope] = (base + cos_at, base + sin_at)
            for address, values in zip(self.ropes[rope], (cos, sin), strict=True):
                device.upload(address, values.reshape(-1).view(np.uint8))
        device.synchronize()  # before the tables go


def _element(program: Program, buffer: Buffer, element: str) -> str:
    """The format of a buffer: the products' if products alone read it and what writes it can."""
    for op in program.ops:
        reads = [getattr(op, name, None) for name in ("x", "qkv", "gate_up")]
        if buffer in reads and not isinstance(op, Linear | Logits):
            return "float32"
        if getattr(op, "out", None) == buffer and not isinstance(op, RmsNorm | PagedAttention | GatedActivation):
            return "float32"
        if isinstance(op, RmsNorm) and op.out == buffer and op.accumulate:
            return "float32"
    return element


def sampling_fields(rows: int, list_entries: int) -> dict[str, tuple[int, DTypeLike]]:
    """What the host fills for `rows` logit rows and ragged lists of at most `list_entries` in all, by name."""
    numbers: dict[str, DTypeLike] = dict.fromkeys(
        ("temperature", "top_p", "min_p_floor", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        np.float32,
    )
    numbers |= dict.fromkeys(("top_k", "num_logprobs", "targets", "logit_rows"), np.int32)
    numbers |= {"seeds": np.uint64, "counters": np.int64}
    fields = {name: (rows, dtype) for name, dtype in numbers.items()}
    fields |= dict.fromkeys(("penalty_start", "bias_start", "allowed_start"), (rows + 1, np.int32))
    lists = ("penalty_tokens", "penalty_counts", "bias_tokens", "allowed_tokens")
    return {**fields, **dict.fromkeys(lists, (list_entries, np.int32)), "bias_values": (list_entries, np.float32)}


def result_fields(rows: int) -> dict[str, tuple[int, DTypeLike]]:
    """What the card leaves for `rows` logit rows, by name."""
    return {
        "tokens": (rows, np.int32),
        "logprobs": (rows, np.float32),
        "top_tokens": (rows * TOP_WIDTH, np.int32),
        "top_logprobs": (rows * TOP_WIDTH, np.float32),
        "errors": (rows, np.uint8),
    }


class CudaProgram:
    """`body` and `tail` launch a step: all that concerns its rows, then all that concerns its logit rows."""

    def __init__(
        self,
        program: Program,
        weights: CudaWeights,
        workspace: Workspace,
        attention: Attention,
        device: CudaDevice,
        arrays: Mirror,
        results: Mirror,
        fast: bool,
    ) -> None:
        self._weights, self._workspace, self._attention = weights, workspace, attention
        self._device, self._arrays, self._results, self._fast = device, arrays, results, fast
        self._vocab_size = program.config.vocab_size
        self._pool = PoolView(0, 0, 0, 0)
        self._noted: dict[int, Kernel] = {}
        self.kernels: list[KernelMaker] = [*attention.kernels(), sampling.sample, *self._product_kernels()]
        self.body: list[Launch] = []
        self.tail: list[Launch] = []
        for op in program.ops:
            out = None if isinstance(op, RopeKvWrite | LayerOutput) else op.out
            part = self.tail if out is not None and out.rows == "logits" else self.body
            part.append(self._compile(op))

    def use_pool(self, pool: PoolView) -> None:
        self._pool = pool

    def _product_kernels(self) -> list[KernelMaker]:
        element, packing = self._weights.element, self._weights.packing
        if element == "float32":
            return [float32_matmul.float32_matmul]
        shapes = [skinny_matmul.tile(rows) for rows in (8, 16, 32, 64)]
        if packing:
            return [partial(quantised_matmul.quantised_matmul, packing, element, columns) for _, columns in shapes]
        return [partial(skinny_matmul.skinny_matmul, element, *shape) for shape in shapes]

    def _kernel(self, kernel: Kernel) -> Kernel:
        """Note a kernel that every step launches."""
        if id(kernel) not in self._noted:
            self._noted[id(kernel)] = kernel
            self.kernels.append(lambda: kernel)
        return kernel

    def _at(self, buffer: Buffer) -> int:
        return self._workspace.addresses[buffer.name]

    def _compile(self, op: Op) -> Launch:
        match op:
            case Embed():
                return self._embed(op)
            case LayerOutput():
                return self._layer_output(op)
            case SelectRows():
                kernel = self._kernel(embedding.gather_rows("float32"))
                return self._gather(kernel, self._at(op.x), "logit_rows", op.out, 1.0)
            case RmsNorm():
                return self._norm(op)
            case Linear():
                bias = self._weights.addresses[op.bias] if op.bias else 0
                return self._product(op.x, op.weight, op.out, bias, op.accumulate)
            case RopeKvWrite():
                return self._rope_kv_write(op)
            case PagedAttention():
                return self._paged_attention(op)
            case GatedActivation():
                return self._activation(op)
            case Logits():
                return self._logits(op)

    def _embed(self, op: Embed) -> Launch:
        weights = self._weights
        if not weights.packing:
            kernel = self._kernel(embedding.gather_rows(weights.element))
            return self._gather(kernel, weights.addresses[op.table], "tokens", op.out, op.scale)
        kernel = self._kernel(embedding.gather_packed_rows(weights.packing))
        columns = -(-op.out.width // (8 * embedding.THREADS))
        tables = weights.addresses[op.table], weights.scales[op.table]
        arguments = *tables, self._arrays.address("tokens"), self._at(op.out), op.out.width, op.scale
        return lambda step: self._device.launch(kernel, (columns, step.num_rows), arguments)

    def _gather(self, kernel: Kernel, table: int, ids: str, out: Buffer, scale: float) -> Launch:
        columns = -(-out.width // (4 * embedding.THREADS))

        def launch(step: Step) -> None:
            arguments = table, self._arrays.address(ids), self._at(out), out.width, scale
            self._device.launch(kernel, (columns, _rows(step, out)), arguments)

        return launch

    def _norm(self, op: RmsNorm) -> Launch:
        kernel = self._kernel(norms.rms_norm(self._workspace.elements[op.out.name], op.accumulate))
        arguments = self._at(op.x), self._weights.addresses[op.weight], self._at(op.out), op.out.width, op.eps
        return lambda step: self._device.launch(kernel, (_rows(step, op.out),), arguments)

    def _activation(self, op: GatedActivation) -> Launch:
        kernel = self._kernel(activations.gated_activation(op.kind, self._workspace.elements[op.out.name]))
        columns = -(-op.out.width // (4 * activations.THREADS))
        arguments = self._at(op.gate_up), self._at(op.out), op.out.width
        return lambda step: self._device.launch(kernel, (columns, _rows(step, op.out)), arguments)

    def _rope_kv_write(self, op: RopeKvWrite) -> Launch:
        shape, weights = self._attention.shape, self._weights.addresses
        kernel = self._kernel(kv_write.kv_write(shape, op.rope.rotary_dim, op.q_norm is not None))
        norm_weights = [weights[norm] if norm else 0 for norm in (op.q_norm, op.k_norm)]
        blocks = -(-(shape.num_heads + 2 * shape.num_kv_heads) // kv_write.HEADS_PER_BLOCK)

        def launch(step: Step) -> None:
            kv, scales = self._layer(op.layer)
            steps = self._arrays.address("positions"), self._arrays.address("slot_mapping")
            arguments = self._at(op.qkv), *steps, *self._workspace.ropes[op.rope], *norm_weights, kv, scales, op.eps
            self._device.launch(kernel, (blocks, step.num_rows), arguments)

        return launch

    def _layer(self, layer: int) -> tuple[int, int]:
        pool = self._pool
        return pool.kv + layer * pool.kv_layer_bytes, pool.scales + layer * pool.scales_layer_bytes

    def _layer_output(self, op: LayerOutput) -> Launch:
        def launch(step: Step) -> None:
            if op.layer in step.wanted:
                target = step.wanted[op.layer].reshape(-1).view(np.uint8)
                self._device.download(target, self._at(op.x))

        return launch

    def _paged_attention(self, op: PagedAttention) -> Launch:
        def launch(step: Step) -> None:
            kv, scales = self._layer(op.layer)
            at = AttentionBuffers(self._at(op.qkv), kv, scales, self._at(op.out), self._workspace.parts)
            plan = step.plans[op.window]
            self._attention.launch(self._arrays, plan, step.num_rows, op.window, op.scale, at)

        return launch

    def _product(self, x: Buffer, weight: Weight, out: Buffer, bias: int, accumulate: bool) -> Launch:
        element = self._weights.element
        if self._workspace.elements[x.name] != element:
            raise ValueError(f"buffer {x.name} is read by a product and by something else: not supported on CUDA")
        at, source, target = self._weights.addresses[weight], self._at(x), self._at(out)
        numbers = weight.rows, weight.cols, int(bias != 0), int(accumulate)
        add_bias = self._gather(self._kernel(embedding.gather_rows("float32")), bias, "zeros", out, 1.0)
        packing, scales = self._weights.packing, self._weights.scales.get(weight, 0)
        vendor = self._fast and not packing and not (bias and accumulate)

        def launch(step: Step) -> None:
            rows = _rows(step, out)
            if vendor and rows > VENDOR_ROWS:
                if bias:
                    add_bias(step)
                shape = rows, weight.rows, weight.cols
                self._device.multiply(element, source, at, target, shape, accumulate or bias != 0)
                return
            if element == "float32":
                kernel = float32_matmul.float32_matmul()
                per_block = float32_matmul.OUTPUTS_PER_BLOCK, float32_matmul.ROWS_PER_BLOCK
            else:
                outputs, columns = skinny_matmul.tile(rows)
                kernel = skinny_matmul.skinny_matmul(element, outputs, columns)
                per_block = 16 * outputs, 8 * columns
            matrix = (at, scales) if packing else (at,)
            if packing:
                kernel = quantised_matmul.quantised_matmul(packing, element, columns)
                per_block = 16, 8 * columns
            grid = -(-weight.rows // per_block[0]), -(-rows // per_block[1])
            self._device.launch(kernel, grid, (source, *matrix, bias, target, rows, *numbers))

        return launch

    def _logits(self, op: Logits) -> Launch:
        product = self._product(op.x, op.weight, op.out, 0, False)

        def launch(step: Step) -> None:
            product(step)
            self._sample(step, self._at(op.out))

        return launch

    def _sample(self, step: Step, logits: int) -> None:
        kernel = sampling.sample()
        results = result_fields(1)
        places = {"logits": logits, "scaled": self._workspace.scaled}
        numbers = {"vocab_size": self._vocab_size, "top_width": TOP_WIDTH}
        arguments = []
        for name, _ in kernel.arguments:
            if name in places:
                arguments.append(places[name])
            elif name in numbers:
                arguments.append(numbers[name])
            else:
                arguments.append((self._results if name in results else self._arrays).address(name))
        self._device.launch(kernel, (step.num_logit_rows,), arguments)


def _rows(step: Step, buffer: Buffer) -> int:
    return step.num_rows if buffer.rows == "tokens" else step.num_logit_rows
