"""The sections of `bench/gpu_check.py` that measure: each yields rows as it goes, so that what was found is never lost.

A figure is None (and its row says "dry") where kernels are interpreted: only that they run is checked then.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import numpy as np

from bench.gpu_bed import BLOCK_SIZE, CACHE_BYTES, Bed, TiledCheckpoint, elapsed, torch_attention_seconds
from bench.kernels import step
from kvpool.cuda_kernels import block_copy, norms
from kvpool.cuda_kernels.layout import AttentionShape
from kvpool.model.backend import BackendLimits
from kvpool.model.batch import StepBatch
from kvpool.model.config import ModelConfig
from kvpool.model.cuda.attention import Attention, AttentionBuffers
from kvpool.model.cuda.backend import CudaBackend
from kvpool.model.cuda.flight import following
from kvpool.model.cuda.staging import Mirror
from kvpool.model.families import build_program
from kvpool.model.program import Linear, Logits, Program


@dataclass(slots=True)
class Row:
    """One line of the result: a figure with its unit, and its share of what the card can do."""

    section: str
    case: str
    value: float | None = None
    unit: str = ""
    share: float | None = None  # of `of`
    of: str = ""
    note: str = ""

    def fields(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Ask:
    """What a section is asked: `ceilings` are bytes and multiply-adds a second measured by the section of that name."""

    dry: bool
    model: str
    ceilings: Mapping[str, float]

    def share(self, rate: float, ceiling: str) -> float | None:
        """A rate as a share of a measured ceiling."""
        known = self.ceilings.get(ceiling)
        return None if known is None or math.isnan(rate) else rate / known


def figure(value: float) -> float | None:
    """A measured number, None for what nobody measured."""
    return None if math.isnan(value) else value


def environment(ask: Ask) -> Iterator[Row]:
    """The card, the driver, the versions."""
    yield Row("environment", "python", note=platform.python_version())
    for name in ("kvpool", "numpy", "numba", "numba-cuda", "cupy-cuda13x", "torch"):
        try:
            yield Row("environment", name, note=metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Row("environment", name, note="not installed")
    yield Row("environment", "processors", float(len(os.sched_getaffinity(0))), note=platform.processor())
    query = "--query-gpu=name,driver_version,memory.total,clocks.max.mem,power.limit"
    if shutil.which("nvidia-smi"):
        found = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, timeout=10
        )
        yield Row("environment", "driver", note=found.stdout.strip() or found.stderr.strip())
    bed = Bed(ask.dry)
    yield Row("environment", "card", bed.card.free_bytes() / 2**30, "GiB free", note=bed.card.name)


def ceilings(ask: Ask) -> Iterator[Row]:
    """What the card copies and multiplies in a second; everything else is a share of these."""
    bed = Bed(ask.dry)
    words = (1 << 12) if ask.dry else (1 << 26)  # of 16 bytes
    source, target = bed.numbers(16 * words), bed.numbers(16 * words)
    rate = math.nan
    if not ask.dry:
        import cupy

        stream = cupy.cuda.Stream(non_blocking=True)

        def copy() -> None:
            for _ in range(10):
                cupy.cuda.runtime.memcpyAsync(target, source, 16 * words, 3, stream.ptr)  # device to device
            stream.synchronize()

        copy()
        rate = 10 * 32 * words / min(elapsed(copy) for _ in range(5))
    yield Row("ceilings", "copy", figure(rate / 1e9), "GB/s", note="device to device, read and written bytes")
    ids = bed.array(np.zeros(1, np.int32))
    grid = -(-words // block_copy.WORDS_PER_BLOCK), 1, 1
    arguments = source, target, ids, ids, 0, 0, 0, 0, words
    taken = bed.seconds(lambda: bed.card.launch(block_copy.copy_blocks(), grid, arguments))
    yield Row(
        "ceilings",
        "our copy kernel",
        figure(32 * words / taken / 1e9),
        "GB/s",
        figure(32 * words / taken / rate),
        "copy",
    )
    size = 64 if ask.dry else 8192
    bed.clear()
    x, weight, out = bed.numbers(2 * size * size), bed.numbers(2 * size * size), bed.empty(4 * size * size)
    taken = bed.seconds(lambda: bed.card.multiply("bfloat16", x, weight, out, (size, size, size), False), times=3)
    yield Row("ceilings", "product", figure(2e-12 * size**3 / taken), "TFLOP/s", note=f"bfloat16, {size} cubed")


def attention(
    ask: Ask, bed: Bed, shape: AttentionShape, sequences: int, queries: int, context: int, fast: bool
) -> tuple[float, int]:
    """Seconds of one layer's attention as the back end launches it, and the bytes of K and V that it covers."""
    bed.clear()
    limits = BackendLimits(shape.block_size, sequences, max(sequences * queries, 16), context)
    planner = Attention(bed.card, shape, shape.kv, limits, [0], fast)
    for make in planner.kernels():
        bed.card.prepare(make)
    batch = step(sequences, queries, context)
    fields = {
        **planner.fields(),
        "positions": (len(batch.positions), np.int32),
        "block_tables": (sequences * planner.max_blocks, np.int32),
    }
    arrays = Mirror(bed.card, fields, "staging of a step")
    arrays.put("positions", batch.positions)
    arrays.put("block_tables", batch.block_tables)
    rows = sequences * queries
    plan = planner.plan(batch, rows, arrays)[0]
    arrays.upload()
    kv_bytes = batch.block_tables.size * 2 * shape.num_kv_heads * shape.plane * 2
    layers = 1 if ask.dry else min(8, max(1, CACHE_BYTES // kv_bytes))  # so that nothing comes from the cache
    pools = [bed.numbers(kv_bytes) for _ in range(layers)]
    qkv = bed.array(np.random.default_rng(1).normal(0, 1, (rows, shape.qkv_width)).astype(np.float32))
    out, parts = bed.empty(rows * shape.num_heads * shape.head_dim * 2), bed.empty(planner.parts_bytes)

    def work() -> None:
        for pool in pools:
            at = AttentionBuffers(qkv, pool, 0, out, parts)
            planner.launch(arrays, plan, rows, 0, shape.head_dim**-0.5, at)

    return bed.seconds(work) / layers, kv_bytes


LLAMA_8B, QWEN = AttentionShape(32, 8, 128, BLOCK_SIZE, "bfloat16"), AttentionShape(14, 2, 64, BLOCK_SIZE, "bfloat16")
TINY = AttentionShape(4, 2, 64, BLOCK_SIZE, "bfloat16")


def decode(ask: Ask) -> Iterator[Row]:
    """One layer of decode attention: K and V read, as a share of the copy rate."""
    bed = Bed(ask.dry)
    full = [
        (LLAMA_8B, 64, 4096), (LLAMA_8B, 1, 4096), (LLAMA_8B, 8, 4096), (LLAMA_8B, 256, 1024), (LLAMA_8B, 1, 65536),
        (QWEN, 64, 4096), (QWEN, 256, 512), (AttentionShape(16, 8, 256, BLOCK_SIZE, "bfloat16"), 32, 4096),
    ]  # fmt: skip
    for shape, sequences, context in [(TINY, 3, 300)] if ask.dry else full:
        taken, kv_bytes = attention(ask, bed, shape, sequences, 1, context, False)
        case = f"{sequences} x {context}, {shape.num_heads}/{shape.num_kv_heads} heads of {shape.head_dim}"
        other = None
        if not ask.dry:
            heads = shape.num_heads, shape.num_kv_heads, shape.head_dim
            other = torch_attention_seconds(sequences, 1, context, *heads)
        note = "" if other is None else f"PyTorch on contiguous KV {other * 1e6:.0f} us, {other / taken:.2f}x ours"
        rate = kv_bytes / taken
        yield Row("decode", case, figure(taken * 1e6), "us", ask.share(rate, "copy"), "copy", note)


def prefill(ask: Ask) -> Iterator[Row]:
    """One layer of a prompt's attention on tensor cores, as a share of the rate of large products."""
    bed = Bed(ask.dry)
    full = [(LLAMA_8B, 1, 2048, 2048), (LLAMA_8B, 1, 8192, 8192), (LLAMA_8B, 4, 2048, 2048), (LLAMA_8B, 1, 1024, 16384),
            (QWEN, 4, 2048, 2048)]  # fmt: skip
    for shape, sequences, queries, context in [(TINY, 2, 20, 40)] if ask.dry else full:
        taken, _ = attention(ask, bed, shape, sequences, queries, context, True)
        pairs = sequences * sum(range(context - queries + 1, context + 1))
        rate = 4.0 * pairs * shape.num_heads * shape.head_dim / taken
        case = f"{sequences} x {queries} of {context}, {shape.num_heads}/{shape.num_kv_heads} heads of {shape.head_dim}"
        other = None
        if not ask.dry and queries == context:
            heads = shape.num_heads, shape.num_kv_heads, shape.head_dim
            other = torch_attention_seconds(sequences, queries, context, *heads)
        note = "" if other is None else f"PyTorch on contiguous KV {other * 1e6:.0f} us, {other / taken:.2f}x ours"
        yield Row("prefill", case, figure(rate / 1e12), "TFLOP/s", ask.share(rate / 1e12, "product"), "product", note)


def launches(ask: Ask) -> Iterator[Row]:
    """What a launch costs, one by one and captured: a chain of small kernels, each waiting for the one before."""
    bed = Bed(ask.dry)
    count = 4 if ask.dry else 400
    x, weight = bed.array(np.ones((1, 64), np.float32)), bed.array(np.ones(64, np.float32))
    kernel = norms.rms_norm()

    def chain() -> None:
        for _ in range(count):
            bed.card.launch(kernel, (1,), (x, weight, x, 64, 1e-5))

    chain()
    bed.card.synchronize()
    single = min(elapsed(lambda: (chain(), bed.card.synchronize())) for _ in range(1 if ask.dry else 5)) / count
    replay = bed.card.capture(chain)
    if replay is None:
        yield Row("launches", "capture", note="the driver refuses to capture")
        return
    replay()
    bed.card.synchronize()
    captured = min(elapsed(lambda: (replay(), bed.card.synchronize())) for _ in range(1 if ask.dry else 5)) / count
    for case, taken in (("one by one", single), ("in a graph", captured)):
        yield Row("launches", case, None if ask.dry else taken * 1e6, "us a launch")


MODELS = {  # vocab, hidden, intermediate, layers, heads, kv heads, head dim
    "Llama-3-8B": (128256, 4096, 14336, 32, 32, 8, 128),
    "Qwen2.5-0.5B": (151936, 896, 4864, 24, 14, 2, 64),
    "tiny": (101, 32, 40, 1, 4, 2, 16),
}


def model(ask: Ask, name: str, sequences: int, num_blocks: int) -> tuple[Program, BackendLimits, CudaBackend]:
    """A model of random weights on the card, for steps of so many sequences at most."""
    vocab, hidden, wide, layers, heads, kv_heads, head_dim = MODELS[name]
    tied = name == "Qwen2.5-0.5B"
    config = ModelConfig("llama", vocab, hidden, wide, layers, heads, kv_heads, head_dim, 4096,
                         attention_bias=tied, tie_word_embeddings=tied)  # fmt: skip
    program = build_program(config)
    limits = BackendLimits(BLOCK_SIZE, sequences, max(sequences, 16), 64 if ask.dry else 1024)
    card = Bed(True).card if ask.dry else None
    backend = CudaBackend(program, TiledCheckpoint(program), limits, dtype="bfloat16", device=card)
    backend.allocate_pool(num_blocks)
    if ask.dry:  # the interpreter refuses to read a context that nobody wrote; a card finds zeros
        backend.write_blocks(range(num_blocks), np.zeros((num_blocks, backend.block_bytes), np.uint8))
    return program, limits, backend


def steps(ask: Ask) -> Iterator[Row]:
    """Whole decode steps of random weights beside the time that reading the weights alone takes."""
    context = 17 if ask.dry else 497  # the first of its block: the back end launches the next 15 steps ahead
    for name, batches in [("tiny", (2,))] if ask.dry else [("Qwen2.5-0.5B", BATCHES), ("Llama-3-8B", BATCHES)]:
        program, limits, backend = model(ask, name, max(batches), max(batches) * -(-context // BLOCK_SIZE))
        floor_bytes = 2 * sum(op.weight.rows * op.weight.cols for op in program.ops if isinstance(op, Linear | Logits))
        for count in batches:
            taken = decode_seconds(backend, step(count, 1, context), limits, ask.dry)
            share = ask.share(floor_bytes / taken, "copy")
            note = "" if math.isnan(taken) else f"{count / taken:.0f} tokens/s"
            yield Row("steps", f"{name}, batch {count}", figure(taken * 1e3), "ms", share, "weights' floor", note)
        backend.close()


def swap(ask: Ask) -> Iterator[Row]:
    """Blocks to page-locked memory and back, and decode steps beside which they travel."""
    name, sequences, context, moved = ("tiny", 2, 17, 3) if ask.dry else ("Qwen2.5-0.5B", 64, 497, 64)
    used = sequences * -(-context // BLOCK_SIZE)
    _, limits, backend = model(ask, name, sequences, used + moved)
    blocks, slots = range(used, used + moved), range(moved)
    backend.allocate_host(moved)
    for way, move in (("out", lambda: backend.swap_out(blocks, slots)), ("in", lambda: backend.swap_in(slots, blocks))):
        for _ in range(1 if ask.dry else 10):
            move()
        backend.read_blocks([0])  # waits for what came in
        backend.read_host([0])  # and for what went out
        count, taken = backend.take_swap_times()
        rate = math.nan if ask.dry else count * backend.block_bytes / taken / 1e9
        yield Row("swap", f"{moved} blocks {way}", figure(rate), "GB/s")
    first = step(sequences, 1, context)
    alone = decode_seconds(backend, first, limits, ask.dry)
    beside = decode_seconds(backend, first, limits, ask.dry, lambda: backend.swap_out(blocks, slots))
    for case, taken in ((f"{name}, batch {sequences}", alone), (f"the same, {moved} blocks out beside each", beside)):
        yield Row("swap", case, figure(taken * 1e3), "ms a step")
    backend.close()


def decode_seconds(
    backend: CudaBackend, first: StepBatch, limits: BackendLimits, dry: bool, between: Callable[[], None] = lambda: None
) -> float:
    """Seconds of a step, from one to the next, as the daemon would ask for them: the best of three stretches."""

    def stretch() -> None:
        batch = first
        while True:
            between()
            backend.launch(batch)
            tokens = backend.collect().tokens
            after = following(batch, limits.block_size)
            if after is None or dry:
                return
            after.tokens[:] = tokens
            batch = after

    stretch()
    return math.nan if dry else min(elapsed(stretch) for _ in range(3)) / limits.block_size


BATCHES = (1, 8, 32, 64, 128, 256)

MEASURED: dict[str, Callable[[Ask], Iterator[Row]]] = {
    "environment": environment,
    "ceilings": ceilings,
    "decode": decode,
    "prefill": prefill,
    "launches": launches,
    "steps": steps,
    "swap": swap,
}
