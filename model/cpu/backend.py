"""The CPU back end: a Program run by a team of threads over a paged pool, with no Python between operations."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...cpu_kernels import table as t
from ...cpu_kernels.activations import form_of
from ...cpu_kernels.compiler import Kernels, load_kernels
from ...cpu_kernels.groups import INTEGER_PRODUCTS
from ...cpu_kernels.isa import (
    BFLOAT16,
    BFLOAT16_DOT,
    FORMAT_NAMES,
    INTEGER,
    host_has_half,
    host_isa,
    host_pair_bits,
    host_prefers_dot,
)
from ...cpu_kernels.kv_formats import KV_FORMATS
from ...cpu_kernels.packing import round_up
from ...cpu_kernels.sampling import SampledArrays, SamplingArrays
from ...cpu_kernels.selfcheck import dot_agrees
from ...cpu_kernels.team import Team
from ..backend import BackendLimits, Progress
from ..batch import Float32, StepBatch, StepResult
from ..cache import cache_directory
from ..host import available_memory, usable_cpus
from ..host_memory import Bytes, HeadStart, becoming_real
from ..host_pool import PlainHostPool
from ..keys_values import panels_as_numbers
from ..program import Logits, Program, Weight
from ..weights import Checkpoint
from .program import OperationTable, PoolLayout, Workspace
from .weight_cache import WeightCache
from .weights import WEIGHT_DTYPES, pack_weights

KV_LAYOUT_VERSION = 4
"""Goes up with every change of a block's layout or of a kernel's arithmetic: stored blocks are computed anew then."""

_STEP_ARRAYS = (  # in the order of their words in the state
    ("tokens", np.int32),
    ("positions", np.int32),
    ("slot_mapping", np.int64),
    ("query_start", np.int32),
    ("seq_lens", np.int32),
    ("block_tables", np.int32),
    ("logit_rows", np.int32),
    ("layer_rows", np.int32),
)


def _address(array: NDArray[Any]) -> int:
    """Like `array.ctypes.data`, which takes a microsecond more."""
    address: int = array.__array_interface__["data"][0]
    return address


def _quiet(what: str, share: float) -> None:
    """Reports to nobody."""


def _kv_format(dtype: str, kv_dtype: str) -> str:
    """The name of the format of keys and values; auto: float32 beside float32 weights, else bfloat16."""
    name = kv_dtype if kv_dtype != "auto" else "float32" if dtype == "float32" else "bfloat16"
    supported = [name for name in KV_FORMATS if name != "float16" or host_has_half()]
    if name not in supported:
        reason = "needs a processor with F16C" if name in KV_FORMATS else "is not supported on the CPU"
        raise ValueError(f"kv_dtype {name!r} {reason}; set kv_dtype to auto, {', '.join(supported)}")
    return name


def _form_of_activations(activations: str) -> str:
    """auto: int16, whose rounding is far below that of bfloat16 keys, where the processor adds pairs of products."""
    if activations != "auto":
        if activations not in INTEGER_PRODUCTS:
            known = ", ".join(("auto", *INTEGER_PRODUCTS))
            raise ValueError(f"activations {activations!r} are not known; set activations to {known}")
        return activations
    return "int16" if host_pair_bits() else "float32"


def _names(formats: Iterable[int]) -> str:
    return "+".join(FORMAT_NAMES[number] for number in sorted(set(formats)))


class CpuBackend(PlainHostPool):
    """Fulfils `backend.Backend`. `dtype`: auto | float32 | bfloat16 | int16 | int8 | int4 (see `weights.format_of`);
    `kv_dtype`: auto | float32 | bfloat16 | float16 | int8 (scales per head and token); `activations`: auto | float32 |
    int16 | int8, for products with quantised weights (see `cpu_kernels.activations`).

    `threads` 0: as many as affinity and cgroup allow. `cache`: where compiled kernels are kept (default: with kvpool's
    other files). `model_hash`: what the checkpoint holds, if its packed weights shall be kept there, too. `head_start`:
    memory for the pool.
    Raises MemoryError naming what to lower, ValueError for an unknown dtype.
    """

    def __init__(
        self,
        program: Program,
        checkpoint: Checkpoint,
        limits: BackendLimits,
        *,
        dtype: str = "auto",
        kv_dtype: str = "auto",
        activations: str = "auto",
        threads: int = 0,
        progress: Progress = _quiet,
        cache: Path | None = None,
        model_hash: str = "",
        head_start: HeadStart | None = None,
    ) -> None:
        if dtype not in WEIGHT_DTYPES:
            raise ValueError(f"dtype {dtype!r} is not supported on the CPU; set dtype to {', '.join(WEIGHT_DTYPES)}")
        self._activations = _form_of_activations(activations)
        self._kv_dtype = _kv_format(dtype, kv_dtype)
        kv = KV_FORMATS[self._kv_dtype]
        self._limits, self._config = limits, program.config
        self._num_threads = threads or usable_cpus()
        kept = WeightCache(cache_directory() / "weights") if model_hash else None
        self._weights = pack_weights(
            program, checkpoint, dtype, progress, kept, model_hash, prefers_codes=self._prefers_codes()
        )
        self._layout = PoolLayout.of(program.config, limits.block_size, kv)
        self._program, self._progress = program, progress
        self._head_start = head_start
        self._kernel_cache = cache or cache_directory() / "kernels"
        self._read_as = self._wanted_read_as()
        self._workspace = Workspace(program, limits, self._num_threads, self._read_as)
        self._hidden = next(op.x for op in program.ops if isinstance(op, Logits))
        self._pool: Bytes = np.zeros(0, dtype=np.uint8)
        self._batch: StepBatch | None = None
        self._kept: tuple[object, ...] = ()

    def _prefers_codes(self) -> bool:
        """Whether products of codes of 16 bits are faster than those of bfloat16; they are nearer to float32, too."""
        return self._activations != "float32" and host_pair_bits() > 0 and not host_prefers_dot()

    def _wanted_read_as(self) -> Mapping[Weight, int]:
        """How products shall read each matrix: as it is held, but bfloat16 by dot products where the processor has
        them, and codes times codes where activations are such."""
        other = INTEGER_PRODUCTS[self._activations] | ({BFLOAT16: BFLOAT16_DOT} if host_prefers_dot() else {})
        return {weight: other.get(name, name) for weight, name in self._weights.formats.items()}

    def _load_kernels(self) -> Kernels:
        """For the formats at hand; without dot products if those do not compute what they should."""
        held, read = set(self._weights.formats.values()), set(self._read_as.values())
        unpacked = {host_isa().unpacked[number] for number in held | read if number in host_isa().unpacked}
        formats = sorted({self._layout.kv.tile_format} | held | read | unpacked)
        kernels = load_kernels(formats, self._kernel_cache, self._progress, usable_cpus())
        if BFLOAT16_DOT in read and not dot_agrees(kernels.tiles):
            self._progress("bfloat16 dot products failed their check; using float32 arithmetic", 1.0)
            self._read_as = {k: BFLOAT16 if name == BFLOAT16_DOT else name for k, name in self._read_as.items()}
        return kernels

    def _new_state(self, kernels: Kernels) -> NDArray[np.int64]:
        config, workspace, layout = self._config, self._workspace, self._layout
        state = np.zeros(t.STATE_WORDS, dtype=np.int64)
        self._kernels = kernels  # keeps what the state points to
        words = {
            t.FUNCTIONS: kernels.functions.ctypes.data,
            t.TILES: kernels.tiles.ctypes.data,
            t.LINEAR_SCRATCH: workspace.linear_scratch,
            t.LINEAR_BYTES: workspace.linear_bytes,
            t.TOTALS_OFFSET: workspace.totals_offset,
            t.UNPACKED_OFFSET: workspace.unpacked_offset,
            t.OPS: self._operations.ctypes.data,
            t.NUM_OPS: len(self._operations),  # at most: see `_write_step`
            t.SCRATCH: workspace.scratch,
            t.SCRATCH_BYTES: workspace.scratch_bytes,
            t.BLOCK_SIZE: self._limits.block_size,
            t.BLOCK_BYTES: layout.layer_bytes,
            t.VALUES_OFFSET: layout.values_offset,
            t.KEY_BYTES: layout.key_bytes,
            t.VALUE_BYTES: layout.value_bytes,
            t.KV_FORMAT: layout.kv.tile_format,
            t.KV_PAIR: layout.kv.pair,
            t.KV_LANE_BYTES: layout.kv.lane_bytes,
            t.KV_SCALES_BYTES: layout.kv.scales_bytes(self._limits.block_size),
            t.NUM_HEADS: config.num_heads,
            t.NUM_KV_HEADS: config.num_kv_heads,
            t.HEAD_DIM: config.head_dim,
            t.HEAD_WIDTH: round_up(config.head_dim, 16),
            t.UNITS: workspace.units,
            t.PARTIALS: workspace.partials,
            t.PARTIAL_BYTES: workspace.partial_bytes,
            t.ARRIVALS: workspace.arrivals,
            t.SHARED_UNITS: workspace.shared_units,
            t.PREFIXES: workspace.prefixes,
            t.PREFIX_BYTES: workspace.prefix_bytes,
            t.VOCAB_SIZE: config.vocab_size,
            t.SAMPLING_SCRATCH: workspace.sampling_scratch,
            t.SAMPLING_FLOATS: workspace.sampling_floats,
        }
        for index, value in words.items():
            state[index] = value
        return state

    # -- figures ------------------------------------------------------------------------------------------------------

    @property
    def description(self) -> str:
        weights, kv = _names(self._weights.formats.values()), self._kv_dtype
        dot = " with dot products" if BFLOAT16_DOT in self._read_as.values() else ""
        codes = f", {self._activations} activations" if set(self._read_as.values()) & set(INTEGER) else ""
        return f"cpu, {host_isa().name} kernels{dot}, {weights} weights{codes}, {kv} KV, {self._num_threads} threads"

    @property
    def activation_bits(self) -> dict[Weight, int]:
        """What each matrix is multiplied by: 32: floats; 16 or 8: codes of so many bits."""
        return {weight: form_of(name).bits if name in INTEGER else 32 for weight, name in self._read_as.items()}

    @property
    def kv_layout(self) -> str:
        return f"cpu-{KV_LAYOUT_VERSION}-{host_isa().name}-{_names(self._read_as.values())}-{self._kv_dtype}"

    @property
    def weights_bytes(self) -> int:
        return self._weights.memory.nbytes

    @property
    def workspace_bytes(self) -> int:
        return self._workspace.memory.nbytes

    @property
    def block_bytes(self) -> int:
        return self._layout.block_bytes

    def available_bytes(self) -> int:
        return available_memory() + (self._head_start.touched if self._head_start else 0)

    # -- the pool -----------------------------------------------------------------------------------------------------

    def allocate_pool(self, num_blocks: int) -> None:
        """Kernels are loaded while the memory becomes real: both take long, and only one of them the interpreter."""
        size = num_blocks * self.block_bytes
        head_start, self._head_start = self._head_start or HeadStart(0), None  # `close` frees the pool
        self._pool, num_real = head_start.take(size, "the pool", "lower pool_bytes")
        with becoming_real(self._pool[num_real:]):
            kernels = self._load_kernels()
        table = OperationTable(self._weights, self._workspace, self._read_as, self._num_threads)
        self._operations, self._num_plain = table.build(self._program)
        self._state = self._new_state(kernels)
        self._state[t.POOL] = self._pool.ctypes.data
        self._state[t.LAYER_BYTES] = num_blocks * self._layout.layer_bytes
        self._team = Team(kernels.run_thread, self._state, self._num_threads)

    def _layers(self) -> Bytes:
        """(num_layers, num_blocks, layer_bytes) uint8."""
        return self._pool.reshape(self._layout.num_layers, -1, self._layout.layer_bytes)

    def copy_blocks(self, source: Sequence[int], destination: Sequence[int]) -> None:
        layers = self._layers()
        for origin, target in zip(source, destination, strict=True):
            layers[:, target] = layers[:, origin]

    def read_blocks(self, blocks: Sequence[int]) -> Bytes:
        parts = self._layers()[:, np.asarray(blocks, dtype=np.intp)]
        return parts.transpose(1, 0, 2).reshape(len(blocks), self.block_bytes)

    def write_blocks(self, blocks: Sequence[int], data: Bytes) -> None:
        parts = data.reshape(len(blocks), self._layout.num_layers, self._layout.layer_bytes)
        self._layers()[:, np.asarray(blocks, dtype=np.intp)] = parts.transpose(1, 0, 2)

    def keys_values(self, data: Bytes) -> Float32:
        return panels_as_numbers(data, self._layout, self._config, self._limits.block_size)

    # -- steps --------------------------------------------------------------------------------------------------------

    def launch(self, batch: StepBatch) -> None:
        if self._batch is not None:
            raise RuntimeError("a step is already in flight")
        num_rows = len(batch.logit_rows)
        if max(len(batch.tokens), num_rows) > self._workspace.max_rows:
            raise ValueError(f"a step of {len(batch.tokens)} tokens exceeds max_num_batched_tokens")
        if len(batch.seq_lens) > self._limits.max_num_seqs:
            raise ValueError(f"a step of {len(batch.seq_lens)} sequences exceeds max_num_seqs")
        width = max(0, int(batch.sampling.num_logprobs.max(initial=0)))
        sampled = SampledArrays(
            np.empty(num_rows, dtype=np.int32),
            np.empty(num_rows, dtype=np.float32),
            np.empty((num_rows, width), dtype=np.int32),
            np.empty((num_rows, width), dtype=np.float32),
            np.empty(num_rows, dtype=np.bool_),
        )
        logits = np.empty((num_rows, self._config.vocab_size), dtype=np.float32) if batch.want_logits else None
        shape = len(batch.layers), len(batch.layer_rows), self._config.hidden_size
        outputs = np.empty(shape, dtype=np.float32) if batch.layers else None
        self._team.prepare()
        self._write_step(batch, sampled, logits, outputs)
        self._batch, self._sampled, self._logits, self._outputs = batch, sampled, logits, outputs
        self._launched_s = time.perf_counter()
        self._team.launch()

    def _write_step(
        self, batch: StepBatch, sampled: SampledArrays, logits: Float32 | None, outputs: Float32 | None
    ) -> None:
        """Write the words of one step, in the order of `cpu_kernels.table`, and keep alive what they point to."""
        inputs = [np.ascontiguousarray(getattr(batch, name), dtype) for name, dtype in _STEP_ARRAYS]
        sampling = [np.ascontiguousarray(getattr(batch.sampling, name)) for name in SamplingArrays._fields]
        words = [len(batch.tokens), len(batch.seq_lens), len(batch.logit_rows), len(batch.layer_rows)]
        words += [_address(array) for array in inputs]
        words += [batch.block_tables.shape[1], sampled.top_tokens.shape[1], 0 if logits is None else _address(logits)]
        layers_out = np.zeros(self._config.num_layers, dtype=np.int64)
        for layer, output in zip(batch.layers, () if outputs is None else outputs, strict=True):
            layers_out[layer] = _address(output)
        words.append(_address(layers_out))
        for array in (*sampling, *sampled):
            words += (_address(array), array.size)
        first, end = (self._num_plain, len(self._operations)) if batch.layers else (0, self._num_plain)
        self._state[t.OPS], self._state[t.NUM_OPS] = _address(self._operations[first:]), end - first
        self._state[t.NUM_TOKENS : t.NUM_TOKENS + len(words)] = words
        self._kept = (inputs, sampling, layers_out)

    def fileno(self) -> int:
        return self._team.fileno()

    def collect(self) -> StepResult:
        if self._batch is None:
            raise RuntimeError("no step is in flight")
        batch, self._batch = self._batch, None
        self._team.wait()
        hidden = None
        if batch.want_hidden:
            hidden = self._workspace.rows(self._hidden, len(batch.logit_rows)).copy()
        compute_s = time.perf_counter() - self._launched_s
        return StepResult(
            *self._sampled, compute_s=compute_s, logits=self._logits, hidden=hidden, layer_outputs=self._outputs
        )

    def close(self) -> None:
        if hasattr(self, "_team"):
            self._team.close()  # first: no thread may look at what goes away now
        self._pool = np.zeros(0, dtype=np.uint8)
        self._weights.memory = self._workspace.memory = self._pool

    def __del__(self) -> None:
        """Threads must not outlive the memory that they write, also where nobody called `close` in the middle of a
        step. (An interpreter that ends takes its threads with it, and must not be made to wait for them.)"""
        if hasattr(self, "_pool") and not sys.is_finalizing():
            self.close()
