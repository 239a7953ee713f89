"""The CUDA back end: a Program as kernel launches on one card, over a paged pool in its memory.

A step is staged into page-locked arrays, copied, launched and signalled without waiting. Decode steps are padded to one
of a few sizes and captured as graphs: one launch instead of hundreds. They are also launched ahead of the host: while
step N runs, the step that comes next if all its sequences just go on is queued behind it, with N's tokens taken on the
card. If the host then asks for exactly that step, it is already under way; if not, it is forgotten, and all it did was
to write where the next step writes anyway. With `products` exact (the default) a row's bits
do not depend on the batch, on chunking or on the prefix cache. With `fast`, products of more than 64 rows are the
vendor's and prompts have an attention kernel of their own: a prompt's bits then depend on how it was cut into chunks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...cuda_kernels import block_copy, cache, weight_formats
from ...cuda_kernels.kv_formats import KV_FORMATS
from ...cuda_kernels.layout import AttentionShape
from ..backend import BackendLimits, Progress
from ..batch import Float32, Int32, SamplingBatch, StepBatch, StepResult
from ..keys_values import planes_as_numbers
from ..program import Logits, PagedAttention, Program
from ..weights import Checkpoint
from .attention import Attention, AttentionPlan
from .device import REACHED, Bytes, CudaDevice, CupyDevice, Mark, Work
from .flight import Flight, following, is_same_step
from .pool import CudaPool
from .program import TOP_WIDTH, CudaProgram, Step, Workspace, check_shapes, result_fields, sampling_fields
from .staging import Mirror
from .swap import CudaHostPool
from .weights import DTYPES, upload_weights

KV_LAYOUT_VERSION = 1
"""Goes up with every change of a block's layout or of a kernel's arithmetic: stored blocks are computed anew then."""

LIST_ENTRIES = 1 << 19  # of bias, penalties and allowed tokens in one sampling launch, at least one row's
_LISTS = ("penalty", "bias", "allowed")


def _quiet(what: str, share: float) -> None:
    """Reports to nobody."""


class CudaBackend:
    """Fulfils `backend.Backend`.

    `dtype`: auto | bfloat16 | float16 | float32 | int8 | int4 (groups of 32, products in bfloat16); `kv_dtype`: auto |
    bfloat16 | float16 | float32 | int8 | float8_e4m3; `products`: exact | fast; `graphs`: capture decode steps;
    `ahead`: launch them before they are asked for; `kernel_folder`: where compiled kernels are kept; `device`: the
    card, the first by default. Raises MemoryError naming what to lower, ValueError for what CUDA cannot do.
    """

    def __init__(
        self,
        program: Program,
        checkpoint: Checkpoint,
        limits: BackendLimits,
        *,
        dtype: str = "auto",
        kv_dtype: str = "auto",
        products: str = "exact",
        graphs: bool = True,
        ahead: bool = True,
        progress: Progress = _quiet,
        kernel_folder: Path | None = None,
        device: CudaDevice | None = None,
    ) -> None:
        config = program.config
        check_shapes(config)
        element, packing, kv = _formats(dtype, kv_dtype)
        if kernel_folder is not None and (reason := cache.use_folder(kernel_folder)):
            progress(f"compiling kernels at every start: {reason}", 0.0)
        self._limits, self._config, self._products = limits, config, products
        self._graphs_wanted, self._ahead_wanted = graphs, ahead
        shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, limits.block_size, kv)
        self._device: CudaDevice = CupyDevice() if device is None else device
        windows = [op.window for op in program.ops if isinstance(op, PagedAttention)]
        fast = products == "fast"
        attention = Attention(self._device, shape, element, limits, windows, fast)
        self._attention = attention
        self._weights = upload_weights(program, checkpoint, element, packing, self._device, progress)
        self._workspace = Workspace(program, limits, element, attention, self._device)
        rows, logit_rows = self._workspace.max_rows, self._workspace.logit_rows
        entries = max(LIST_ENTRIES, config.vocab_size, limits.max_model_len)
        fields = {
            **dict.fromkeys(("tokens", "positions", "zeros"), (rows, np.int32)),
            "slot_mapping": (rows, np.int64),
            **sampling_fields(logit_rows, entries),
            **attention.fields(),
            "block_tables": (limits.max_num_seqs * attention.max_blocks, np.int32),
        }
        self._arrays = Mirror(self._device, fields, "staging of steps")
        self._results = Mirror(self._device, result_fields(logit_rows), "results of steps")
        self._program = CudaProgram(
            program, self._weights, self._workspace, attention, self._device, self._arrays, self._results, fast
        )
        self._last = next(op for op in program.ops if isinstance(op, Logits))
        self._pool = CudaPool(self._device, shape, config.num_layers)
        self._host_pool = CudaHostPool(self._device, self._pool)
        if fast:  # the vendor's library takes its own memory at its first product: now, and not in a step
            zeros = self._workspace.scaled
            self._device.multiply(element, zeros, zeros, zeros, (8, 8, 8), False)
            self._device.synchronize()
        for i, make in enumerate(makers := [*self._program.kernels, block_copy.copy_blocks]):
            progress("compiling kernels", i / len(makers))
            self._device.prepare(make)
        progress("compiling kernels", 1.0)
        self._graphs: dict[tuple[int, tuple[AttentionPlan, ...]], Work | None] = {}
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._flight: Flight | None = None
        self._ahead: Flight | None = None  # nobody has asked for it yet
        self._sampled: Int32 = np.zeros(0, np.int32)  # tokens of the step collected last
        self._marks: list[Mark] = [REACHED, REACHED]  # when each copy of the staging memory is free again

    # -- figures ------------------------------------------------------------------------------------------------------

    @property
    def description(self) -> str:
        kv = self._attention.shape.kv
        weights = self._weights.packing or self._weights.element
        return f"cuda, {self._device.name}, {weights} weights, {kv} KV, {self._products} products"

    @property
    def kv_layout(self) -> str:
        kv = self._attention.shape.kv
        return f"cuda-{KV_LAYOUT_VERSION}-{self._device.name}-{self._weights.element}-{kv}-{self._products}"

    @property
    def works_ahead(self) -> bool:
        return True

    @property
    def weights_bytes(self) -> int:
        return self._weights.size

    @property
    def workspace_bytes(self) -> int:
        return self._workspace.size + self._arrays.size + self._results.size + self._pool.transfer_bytes

    @property
    def block_bytes(self) -> int:
        return self._pool.block_bytes

    def available_bytes(self) -> int:
        return self._device.free_bytes()

    # -- the pool -----------------------------------------------------------------------------------------------------

    def allocate_pool(self, num_blocks: int) -> None:
        self._program.use_pool(self._pool.allocate(num_blocks))
        self._graphs.clear()
        self._ahead = None

    def copy_blocks(self, source: Sequence[int], destination: Sequence[int]) -> None:
        self._host_pool.settle()
        self._pool.copy(source, destination)

    def read_blocks(self, blocks: Sequence[int]) -> Bytes:
        self._host_pool.settle()
        return self._pool.read(blocks)

    def write_blocks(self, blocks: Sequence[int], data: Bytes) -> None:
        self._host_pool.settle()
        self._pool.write(blocks, data)

    def allocate_host(self, num_slots: int) -> None:
        self._host_pool.allocate(num_slots)

    def swap_out(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        self._host_pool.send_out(blocks, slots)

    def swap_in(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        self._host_pool.bring_in(slots, blocks)

    def read_host(self, slots: Sequence[int]) -> Bytes:
        return self._host_pool.read(slots)

    def take_swap_times(self) -> tuple[int, float]:
        return self._host_pool.take_times()

    def keys_values(self, data: Bytes) -> Float32:
        return planes_as_numbers(data, self._attention.shape, self._config.num_layers)

    # -- steps --------------------------------------------------------------------------------------------------------

    def launch(self, batch: StepBatch) -> None:
        if self._flight is not None:
            raise RuntimeError("a step is already in flight")
        self._check(batch)
        ahead, self._ahead = self._ahead, None
        size = self._limits.block_size
        if ahead is not None and is_same_step(ahead.batch, batch, size) and np.array_equal(batch.tokens, self._sampled):
            flight, forgotten = ahead, False
        else:
            self._host_pool.before_step(batch.block_tables)
            flight, forgotten = self._start(batch, self._cuts(batch.sampling)), ahead is not None
        self._flight = flight
        self._device.notify(flight.reached, self._event)
        if forgotten:
            return  # the card may still be at it, and with it at the other copy of the staging memory
        if self._host_pool.arriving:
            return  # whoever comes in takes part in the next step
        if self._ahead_wanted and self._bucket(batch, cuts := self._cuts(batch.sampling)):
            after = following(batch, size)
            if after is not None:
                self._ahead = self._start(after, cuts, tokens_on_card=True)

    def _start(self, batch: StepBatch, cuts: list[tuple[int, int]], tokens_on_card: bool = False) -> Flight:
        """Queue a step behind everything that was asked for before."""
        self._turn()
        arriving = {name: self._results.host(name, self._results.capacity(name)) for name in result_fields(1)}
        flight = Flight(batch, self._last, DTYPES[self._weights.element], arriving)
        bucket = self._bucket(batch, cuts)
        step = self._stage(batch, bucket)
        if bucket:
            self._stage_sampling(batch, 0, len(batch.tokens), bucket)
            self._arrays.upload()
            if tokens_on_card:
                self._device.copy(self._arrays.address("tokens"), self._results.address("tokens"), 4 * bucket)
            self._run_graph(step)
            self._results.download()
            flight.pending = (0, len(batch.tokens))
        else:
            step.wanted = flight.layers
            self._arrays.upload()
            for run in self._program.body:
                run(step)
            for cut in cuts:
                self._launch_tail(batch, step, cut, flight)
        self._marks[0] = flight.reached = self._device.mark()
        return flight

    def _turn(self) -> None:
        """Go to the staging memory that was used longest ago, once the card is done with it."""
        self._arrays.turn()
        self._results.turn()
        self._marks.reverse()
        self._marks[0]()

    def _launch_tail(self, batch: StepBatch, step: Step, cut: tuple[int, int], flight: Flight) -> None:
        """Logits and samples of one stretch of logit rows, once the stretch before it has been taken off the card."""
        if flight.pending != (0, 0):
            flight.reached = self._device.mark()
            flight.take()
        start, stop = flight.pending = cut
        step.num_logit_rows = stop - start
        self._stage_sampling(batch, start, stop, stop - start)
        self._arrays.upload()
        for run in self._program.tail:
            run(step)
        self._results.download()
        for wanted, buffer in ((flight.logits, self._last.out), (flight.hidden, self._last.x)):
            if wanted is not None:
                target = wanted[start:stop].reshape(-1).view(np.uint8)
                self._device.download(target, self._workspace.addresses[buffer.name])

    def fileno(self) -> int:
        return self._event

    def collect(self) -> StepResult:
        if self._flight is None:
            raise RuntimeError("no step is in flight")
        flight, self._flight = self._flight, None
        try:
            flight.take()
        except RuntimeError:
            self._ahead = None
            raise
        finally:
            os.eventfd_read(self._event)
        self._sampled = flight.tokens
        if self._ahead is not None:
            self._ahead.started_s = time.perf_counter()  # it waited for this one
        return flight.finish()

    def close(self) -> None:
        if self._event >= 0:
            self._device.close()
            os.close(self._event)
            self._event = -1

    def _check(self, batch: StepBatch) -> None:
        if len(batch.tokens) > self._workspace.max_rows:
            raise ValueError(f"a step of {len(batch.tokens)} tokens exceeds max_num_batched_tokens")
        if len(batch.seq_lens) > self._limits.max_num_seqs:
            raise ValueError(f"a step of {len(batch.seq_lens)} sequences exceeds max_num_seqs")
        if batch.sampling.num_logprobs.max(initial=0) > TOP_WIDTH:
            raise ValueError(f"at most {TOP_WIDTH} logprobs a token are reported on CUDA")

    def _cuts(self, sampling: SamplingBatch) -> list[tuple[int, int]]:
        """Logit rows in stretches that fit the buffer of logits and the room for ragged lists."""
        rows, room = len(sampling.temperature), self._arrays.capacity("bias_tokens")
        starts = [_row_starts(sampling, name, rows) for name in _LISTS]
        cuts, start = [], 0
        while start < rows:
            stop = min(start + self._workspace.logit_rows, rows)
            while stop > start + 1 and any(int(each[stop] - each[start]) > room for each in starts):
                stop -= 1
            cuts.append((start, stop))
            start = stop
        return cuts

    def _bucket(self, batch: StepBatch, cuts: list[tuple[int, int]]) -> int:
        """The number of rows to pad a plain decode step to; 0: run it as it is."""
        rows = len(batch.tokens)
        plain = len(batch.seq_lens) == rows == len(batch.logit_rows) and len(cuts) == 1
        if not (self._graphs_wanted and plain and batch.only_tokens):
            return 0
        if not np.array_equal(batch.logit_rows, np.arange(rows)):
            return 0
        bucket = 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8
        return min(bucket, self._limits.max_num_seqs)

    def _stage(self, batch: StepBatch, bucket: int) -> Step:
        arrays, rows = self._arrays, max(bucket, len(batch.tokens))
        arrays.put("tokens", batch.tokens, length=rows)
        arrays.put("positions", batch.positions, length=rows)
        arrays.put("slot_mapping", batch.slot_mapping, fill=-1, length=rows)
        num_seqs, used = batch.block_tables.shape
        used = min(used, self._attention.max_blocks)
        tables = np.zeros((num_seqs, self._attention.max_blocks), np.int32)
        tables[:, :used] = batch.block_tables[:, :used]
        arrays.put("block_tables", tables)
        return Step(rows, bucket, self._attention.plan(batch, rows, arrays))

    def _stage_sampling(self, batch: StepBatch, start: int, stop: int, rows: int) -> None:
        """Sampling of logit rows start .. stop - 1, padded to `rows` with rows that report token 0."""
        arrays, sampling = self._arrays, batch.sampling
        arrays.put("logit_rows", batch.logit_rows[start:stop], length=rows)
        with np.errstate(divide="ignore"):
            floor = np.log(sampling.min_p[start:stop].astype(np.float64)).astype(np.float32)
        arrays.put("min_p_floor", floor, fill=-np.inf, length=rows)
        for name, fill in _FILLS.items():
            arrays.put(name, getattr(sampling, name)[start:stop], fill=fill, length=rows)
        total = len(sampling.temperature)
        for name in _LISTS:
            starts = _row_starts(sampling, name, total)[start : stop + 1]
            arrays.put(f"{name}_start", starts - starts[0], fill=int(starts[-1] - starts[0]), length=rows + 1)
            for field in (f"{name}_tokens", f"{name}_counts", f"{name}_values"):
                if hasattr(sampling, field):
                    arrays.put(field, getattr(sampling, field)[starts[0] : starts[-1]])

    def _run_graph(self, step: Step) -> None:
        """Replay the captured launches of this size; capture them first, or launch one by one where that fails."""
        key = step.num_rows, tuple(step.plans.values())
        if key not in self._graphs:
            self._graphs[key] = self._device.capture(lambda: self._launch_all(step))
        graph = self._graphs[key]
        if graph is None:
            self._launch_all(step)
        else:
            graph()

    def _launch_all(self, step: Step) -> None:
        for launch in (*self._program.body, *self._program.tail):
            launch(step)


_FILLS = {
    "temperature": 0,
    "top_k": 0,
    "top_p": 1,
    "seeds": 0,
    "counters": 0,
    "num_logprobs": -1,
    "targets": 0,
    "repetition_penalty": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
}


def _row_starts(sampling: SamplingBatch, name: str, rows: int) -> NDArray[np.int32]:
    """(rows + 1,) where each row's part of a ragged list begins; a `*_start` of one entry: no row has any."""
    starts: NDArray[np.int32] = getattr(sampling, f"{name}_start")
    return starts if len(starts) > 1 else np.zeros(rows + 1, np.int32)


def _formats(dtype: str, kv_dtype: str) -> tuple[str, str, str]:
    """The format of products, how weights are packed for them ("": as they are), and the format of the pool."""
    packing = dtype if dtype in weight_formats.NAMES else ""
    element = "bfloat16" if dtype == "auto" or packing else dtype
    if element not in DTYPES:
        names = ", ".join((*DTYPES, *weight_formats.NAMES))
        raise ValueError(f"dtype {dtype!r} is not supported on CUDA; set dtype to auto, {names}")
    kv = element if kv_dtype == "auto" else kv_dtype
    if kv not in KV_FORMATS:
        raise ValueError(
            f"kv_dtype {kv_dtype!r} is not supported on CUDA; set kv_dtype to auto, {', '.join(KV_FORMATS)}"
        )
    if kv == "float32" and element != "float32":
        raise ValueError(f"kv_dtype float32 needs dtype float32 on CUDA, got {dtype}")
    return element, packing, kv
