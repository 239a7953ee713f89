"""Each CPU kernel against what the machine can do: arithmetic and memory bandwidth measured in the same run.

    python -m bench.kernels [--threads N] [--repeats 15] [--dtypes bfloat16,int8,int4,...] [--rows 1,4,16,32,128]
                            [--shapes smollm2-135m,...] [--model smollm2-135m] [--only linear,attention,model]
                            [--kv float32,bfloat16,float16,int8] [--clock wall|cpu]
                            [--activations auto|float32|int16|int8]

Every figure is the median of `repeats` launches (and the best one), each a step of a program made of many copies of one
operation on weights, or keys and values, of its own, so that nothing comes out of a cache that would not in a model.
The two columns of percentages are shares of the multiply-adds and of the read bandwidth (of codes of 16 or 8 bits where
activations are such, from registers, without unpacking or scales, else of float32); the larger of the two says how
close to the roof a kernel is. The roof is measured for some 10 ms before and after each launch, as a machine shared
with others changes its speed within seconds, and a share is the median of the launches' own. On a busy machine `--clock
cpu --threads 1` says what a thread takes while it has a processor, and formats can be compared with each other, though
not with the roof.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvpool.cpu_kernels.roofline import Roofline
from kvpool.model.backend import BackendLimits
from kvpool.model.batch import SamplingBatch, StepBatch
from kvpool.model.config import ModelConfig
from kvpool.model.cpu.backend import CpuBackend
from kvpool.model.errors import ModelError
from kvpool.model.host import usable_cpus
from kvpool.model.loading import load_model
from kvpool.model.program import Linear, Logits, PagedAttention, Program, Recorder, SelectRows, Weight
from kvpool.model.weights import Float32, RawTensor

BLOCK_SIZE = 16
COLD_BYTES = 256 << 20  # weights of one launch: far more than caches hold
BYTES_EACH = {"float32": 4.0, "bfloat16": 2.0, "int16": 2.0625, "int8": 1.0625, "int4": 0.625}
SHAPES = {  # hidden_size, intermediate_size, columns of the fused q, k and v
    "smollm2-135m": (576, 1536, 960),
    "qwen2.5-0.5b": (896, 4864, 1152),
    "llama-3-8b": (4096, 14336, 6144),
}


class Filled:
    """A checkpoint whose every tensor holds one small number: what is computed does not matter here."""

    def __init__(self, program: Program) -> None:
        self._shapes = {name: (w.rows, w.cols) for w in program.weights() for name in w.names}

    def names(self) -> Iterable[str]:
        return self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def raw(self, name: str) -> RawTensor:
        return RawTensor("F32", self._shapes[name], self.load(name))

    def load(self, name: str) -> Float32:
        return np.full(self._shapes[name], 0.01, dtype=np.float32)


def config(hidden: int, heads: int, kv_heads: int, head_dim: int, layers: int) -> ModelConfig:
    return ModelConfig("bench", 16, hidden, hidden, layers, heads, kv_heads, head_dim, 8192)


def finish(record: Recorder, hidden: int) -> Program:
    """End a program as every program ends: one row of logits, as few as possible."""
    selected = record.buffer("selected", hidden, "logits")
    logits = record.buffer("logits", 16, "logits")
    record.add(SelectRows(record.buffer("x", hidden), selected))
    record.add(Logits(selected, Weight(("head",), 16, hidden), logits))
    return record.program()


def linear_program(columns: int, k: int, copies: int) -> Program:
    record = Recorder(config(k, 1, 1, 16, 1))
    x, out = record.buffer("x", k), record.buffer("out", columns)
    for copy in range(copies):
        record.add(Linear(x, Weight((f"w{copy}",), columns, k), out))
    return finish(record, k)


def attention_program(heads: int, kv_heads: int, head_dim: int, layers: int) -> Program:
    record = Recorder(config(heads * head_dim, heads, kv_heads, head_dim, layers))
    x = record.buffer("x", heads * head_dim)
    qkv = record.buffer("qkv", (heads + 2 * kv_heads) * head_dim)
    for layer in range(layers):
        record.add(PagedAttention(qkv, layer, x, head_dim**-0.5))
    return finish(record, heads * head_dim)


def step(num_sequences: int, queries: int, context: int, shared: int = 0) -> StepBatch:
    """`num_sequences` sequences in scattered blocks, each with its last `queries` tokens in the step; the first
    `shared` tokens of all of them lie in the same blocks."""
    blocks = -(-context // BLOCK_SIZE)
    tables = np.random.default_rng(0).permutation(num_sequences * blocks).reshape(num_sequences, blocks)
    tables[:, : shared // BLOCK_SIZE] = tables[0, : shared // BLOCK_SIZE]
    positions = np.tile(np.arange(context - queries, context), num_sequences)
    rows = np.repeat(np.arange(num_sequences), queries)
    slots = tables[rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    following = np.where(context % BLOCK_SIZE, tables[:, -1] * BLOCK_SIZE + context % BLOCK_SIZE, -1)
    return StepBatch(
        tokens=np.ones(len(rows), np.int32),
        positions=positions.astype(np.int32),
        slot_mapping=slots.astype(np.int64),
        query_start=np.arange(0, len(rows) + 1, queries, dtype=np.int32),
        seq_lens=np.full(num_sequences, context, np.int32),
        block_tables=tables.astype(np.int32),
        logit_rows=np.arange(queries - 1, len(rows), queries, dtype=np.int32),
        sampling=greedy(num_sequences),
        next_slots=following.astype(np.int64),
    )


def arithmetic_rates(roofline: Roofline) -> dict[int, float]:
    """Operations per second by the bits of what is multiplied: 32: float32; 16 and 8: codes."""
    return {bits: roofline.ops(bits) for bits in (32, 16, 8)}


def described(rates: Mapping[int, float]) -> str:
    codes = ", ".join(f"{rates[bits] / 1e9:.0f} in codes of {bits} bits" for bits in (16, 8))
    return f"{rates[32] / 1e9:.0f} GFLOP/s in float32, {codes}"


def product_work(backend: CpuBackend, program: Program, tokens: int, logit_rows: int) -> dict[int, float]:
    """Operations of the matrix products of a step, by the bits of what is multiplied."""
    work: dict[int, float] = {}
    for op in program.ops:
        if isinstance(op, Linear | Logits):
            rows, bits = tokens if isinstance(op, Linear) else logit_rows, backend.activation_bits[op.weight]
            work[bits] = work.get(bits, 0.0) + 2.0 * op.weight.rows * op.weight.cols * rows
    return work


def greedy(rows: int) -> SamplingBatch:
    """The best token of each row, and its logprob."""
    zeros, ones = np.zeros(rows, np.float32), np.ones(rows, np.float32)
    return SamplingBatch(
        temperature=zeros,
        top_k=zeros.astype(np.int32),
        top_p=ones,
        min_p=zeros,
        seeds=zeros.astype(np.uint64),
        counters=zeros.astype(np.int64),
        num_logprobs=np.full(rows, -1, np.int32),
        targets=np.full(rows, -1, np.int32),
        repetition_penalty=ones,
        presence_penalty=zeros,
        frequency_penalty=zeros,
    )


@dataclass(slots=True)
class Bench:
    """Runs steps and prints them beside the roof."""

    threads: int
    repeats: int
    clock: Callable[[], float] = time.perf_counter
    activations: str = "auto"
    roofline: Roofline = field(init=False)

    def __post_init__(self) -> None:
        self.roofline = Roofline(self.threads)

    def show_roof(self) -> None:
        rates, read = arithmetic_rates(self.roofline), self.roofline.read_bytes()
        print(f"roof at best: {described(rates)}, {read / 1e9:.1f} GB/s read")

    def roof(self, work: Mapping[int, float], read: float) -> NDArray[np.float64]:
        """Seconds that this work, and reading so many bytes, would take at this moment."""
        arithmetic = sum(count / self.roofline.ops_now(bits) for bits, count in work.items())
        return np.array([arithmetic, read / self.roofline.read_bytes_now()])

    def backend(self, program: Program, dtype: str, rows: int, sequences: int, kv_dtype: str = "auto") -> CpuBackend:
        limits = BackendLimits(BLOCK_SIZE, max(sequences, 1), max(rows, 1), 8192)
        formats = {"dtype": dtype, "kv_dtype": kv_dtype, "activations": self.activations}
        return CpuBackend(program, Filled(program), limits, **formats, threads=self.threads)

    def report(self, name: str, backend: CpuBackend, batch: StepBatch, work: Mapping[int, float], read: float) -> None:
        """Median and best time of a step, and the shares of the roof that the steps reached; `work`: operations by the
        bits of what they multiply."""
        times, shares = [], []
        before = self.roof(work, read)
        for _ in range(self.repeats + 1):
            start = self.clock()
            backend.launch(batch)
            backend.collect()
            times.append(self.clock() - start)
            after = self.roof(work, read)
            shares.append((before + after) / 2 / times[-1])
            before = after
        median, best, flops = statistics.median(times[1:]), min(times[1:]), sum(work.values())
        of_peak, of_read = np.median(shares[1:], axis=0)
        print(
            f"{name:<44} {median * 1e3:9.2f} ms  best {best * 1e3:9.2f}  {flops / median / 1e9:7.1f} GFLOP/s "
            f"{of_peak:5.0%}  {read / median / 1e9:6.1f} GB/s {of_read:5.0%}",
            flush=True,
        )

    def linear(self, shape: str, dtype: str, rows: Sequence[int]) -> None:
        hidden, ffn, qkv = SHAPES[shape]
        for name, columns, k in (("qkv", qkv, hidden), ("gate_up", 2 * ffn, hidden), ("down", hidden, ffn)):
            copies = max(1, -(-COLD_BYTES // int(columns * k * BYTES_EACH[dtype])))
            program = linear_program(columns, k, copies)
            backend = self.backend(program, dtype, max(rows), 1)
            backend.allocate_pool(-(-max(rows) // BLOCK_SIZE))
            for count in rows:
                label = f"{shape} {name} {columns}x{k} {dtype} {count} rows"
                work = product_work(backend, program, count, 1)
                self.report(label, backend, step(1, count, count), work, float(backend.weights_bytes))
            backend.close()

    def attention(self, kv_dtype: str) -> None:
        """SmolLM2-135M's heads (9 queries, 3 KV, 64 wide), 30 layers; queries x context of each sequence. What
        sequences share counts as read once for each."""
        heads, kv_heads, head_dim, layers = 9, 3, 64, 30
        program = attention_program(heads, kv_heads, head_dim, layers)
        for sequences, queries, context, shared in (
            (32, 1, 192, 0),
            (64, 1, 600, 0),
            (64, 1, 600, 512),
            (1, 1, 8192, 0),
            (1, 512, 512, 0),
            (1, 512, 4096, 0),
        ):
            backend = self.backend(program, "float32", sequences * queries, sequences, kv_dtype)
            batch = step(sequences, queries, context, shared)
            backend.allocate_pool(batch.block_tables.size)
            pairs = sequences * sum(context - queries + i + 1 for i in range(queries))
            read = sequences * context * backend.block_bytes / BLOCK_SIZE
            common = f", {shared} shared," if shared else ""
            label = f"attention {sequences} x {queries} of {context}{common} {kv_dtype} KV"
            self.report(label, backend, batch, {32: 4.0 * pairs * heads * head_dim * layers}, read)
            backend.close()

    def model(self, name: str, dtype: str) -> None:
        """Whole steps of a real model."""
        try:
            model = load_model(name)
        except ModelError as error:
            print(f"no whole steps: {error}")
            return
        start = time.perf_counter()
        limits = BackendLimits(BLOCK_SIZE, 128, 2048, 4096)
        formats = {"dtype": dtype, "activations": self.activations}
        backend = CpuBackend(
            model.program, model.checkpoint, limits, **formats, threads=self.threads, model_hash=model.model_hash
        )
        print(f"{backend.description}: ready in {time.perf_counter() - start:.1f} s")
        attended = 4 * model.config.num_layers * model.config.num_heads * model.config.head_dim
        for sequences, queries, context in (
            (1, 1, 128),
            (1, 1, 4096),
            (8, 1, 192),
            (32, 1, 192),
            (64, 1, 600),
            (1, 512, 512),
        ):
            batch = step(sequences, queries, context)
            backend.allocate_pool(batch.block_tables.size)
            pairs = sequences * sum(context - queries + i + 1 for i in range(queries))
            work = product_work(backend, model.program, sequences * queries, sequences)
            work[32] = work.get(32, 0.0) + attended * pairs
            read = backend.weights_bytes + sequences * context * backend.block_bytes / BLOCK_SIZE
            self.report(f"{name} {dtype} {sequences} x {queries} of {context}", backend, batch, work, read)
        backend.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=usable_cpus())
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--dtypes", default=",".join(BYTES_EACH))
    parser.add_argument("--kv", default="float32,bfloat16,float16,int8")
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: time of the processors, all threads"
    )
    parser.add_argument("--activations", default="auto")
    parser.add_argument("--rows", default="1,4,16,32,128")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--only", default="linear,attention,model")
    options = parser.parse_args()
    bench = Bench(options.threads, options.repeats, activations=options.activations)
    if options.clock == "cpu":
        bench.clock = time.process_time
    print("python -m bench.kernels " + shlex.join(sys.argv[1:]))
    rows = [int(count) for count in options.rows.split(",")]
    for dtype in options.dtypes.split(",") if {"linear", "model"} & set(options.only.split(",")) else []:
        bench.show_roof()
        if "linear" in options.only:
            for shape in options.shapes.split(","):
                bench.linear(shape, dtype, rows)
        if "model" in options.only:
            bench.model(options.model, dtype)
    if "attention" in options.only:
        bench.show_roof()
        for kv_dtype in options.kv.split(","):
            bench.attention(kv_dtype)
    return 0


if __name__ == "__main__":
    sys.exit(main())
