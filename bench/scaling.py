"""Tokens per second of decode steps over batch, context and threads, beside what a roofline predicts.

    python -m bench.scaling [--model smollm2-135m] [--dtype auto] [--kv-dtype auto] [--activations auto]
                            [--batches 1,4,16,64,128] [--contexts 64,512,2048,8192] [--threads 1,2] [--repeats 5]
                            [--pool-gib 2] [--png FILE]

Whole steps of the real model on the CPU, each sequence with one new token, its blocks scattered over the pool. The
prediction is the longer of two times: all weights and all keys and values read once at the bandwidth, and all
multiply-adds at the rate, that this process measured just before with as many threads. What a step takes beyond it is
norms, softmax, conversions, barriers, and reads that are not ahead of their use. Pairs whose keys and values need more
than the pool are left out. The median of the repetitions counts.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.kernels import BLOCK_SIZE, arithmetic_rates, described, product_work, step
from kvpool.cpu_kernels.roofline import Roofline
from kvpool.model.backend import BackendLimits
from kvpool.model.cpu.backend import CpuBackend
from kvpool.model.host import usable_cpus
from kvpool.model.loading import LoadedModel, load_model


@dataclass(frozen=True)
class Point:
    """One measurement, in tokens per second."""

    threads: int
    batch: int
    context: int
    measured: float
    predicted: float


@dataclass(frozen=True)
class Roof:
    """What a process measured: operations per second by the bits of what is multiplied, and bytes read per second."""

    rates: Mapping[int, float]
    read_bytes: float


def predict(model: LoadedModel, backend: CpuBackend, roof: Roof, batch: int, context: int) -> float:
    """Tokens per second if a step took as long as its reads or its arithmetic, whichever is longer."""
    config = model.config
    work = product_work(backend, model.program, batch, batch)
    attended = batch * 4.0 * config.num_layers * config.num_heads * config.head_dim * context
    arithmetic_s = sum(count / roof.rates[bits] for bits, count in work.items()) + attended / roof.rates[32]
    read = backend.weights_bytes + batch * -(-context // BLOCK_SIZE) * backend.block_bytes
    return batch / max(arithmetic_s, read / roof.read_bytes)


def measure(backend: CpuBackend, batch: int, context: int, repeats: int) -> float:
    """Tokens per second: the median step, after one that warms up."""
    work, times = step(batch, 1, context), []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        backend.launch(work)
        backend.collect()
        times.append(time.perf_counter() - start)
    return batch / statistics.median(times[1:])


def sweep(model: LoadedModel, options: argparse.Namespace, threads: int) -> Iterator[Point]:
    """All pairs with one number of threads."""
    roofline = Roofline(threads)
    roof = Roof(arithmetic_rates(roofline), roofline.read_bytes())
    del roofline
    print(f"{threads} threads: {described(roof.rates)}, {roof.read_bytes / 1e9:.1f} GB/s read")
    limits = BackendLimits(BLOCK_SIZE, max(options.batches), max(options.batches), max(options.contexts))
    formats = {"dtype": options.dtype, "kv_dtype": options.kv_dtype, "activations": options.activations}
    backend = CpuBackend(model.program, model.checkpoint, limits, threads=threads, **formats)
    num_blocks = int(options.pool_gib * 2**30) // backend.block_bytes
    backend.allocate_pool(num_blocks)
    print(backend.description)
    for batch in options.batches:
        for context in options.contexts:
            if batch * -(-context // BLOCK_SIZE) > num_blocks:
                continue
            measured = measure(backend, batch, context, options.repeats)
            yield Point(threads, batch, context, measured, predict(model, backend, roof, batch, context))
    backend.close()


def plot(points: list[Point], path: Path) -> bool:
    """Tokens per second over the batch, a line for each context, a panel for each number of threads."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot, ticker
    except ImportError:
        return False
    threads, batches = sorted({point.threads for point in points}), sorted({point.batch for point in points})
    figure, panels = pyplot.subplots(1, len(threads), figsize=(5.5 * len(threads), 4.5), sharey=True, squeeze=False)
    for panel, count in zip(panels[0], threads, strict=True):
        for number, context in enumerate(sorted({point.context for point in points})):
            line = [point for point in points if (point.threads, point.context) == (count, context)]
            places, colour = [point.batch for point in line], f"C{number}"
            panel.plot(places, [p.measured for p in line], "o-", color=colour, label=f"{context:,} tokens of context")
            panel.plot(places, [p.predicted for p in line], "--", color=colour, alpha=0.6)
        panel.plot([], [], "--", color="grey", label="roofline")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set(xlabel="batch (sequences in a step)", title=f"{count} thread{'s' if count > 1 else ''}")
        panel.set_xticks(batches, labels=[str(batch) for batch in batches])
        for which in (panel.yaxis.set_major_formatter, panel.yaxis.set_minor_formatter):
            which(ticker.LogFormatter(minor_thresholds=(2, 0.5)))
        panel.grid(alpha=0.3, which="both")
    panels[0][0].set_ylabel("tokens per second")
    panels[0][-1].legend(fontsize="small", loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return True


def main() -> int:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--activations", default="auto")
    parser.add_argument("--batches", type=numbers, default=[1, 4, 16, 64, 128])
    parser.add_argument("--contexts", type=numbers, default=[64, 512, 2048, 8192])
    parser.add_argument("--threads", type=numbers, default=sorted({1, usable_cpus()}))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--pool-gib", type=float, default=2.0)
    parser.add_argument("--png", type=Path)
    options = parser.parse_args()
    print("python -m bench.scaling " + shlex.join(sys.argv[1:]))
    model, points = load_model(options.model), []
    for threads in options.threads:
        for point in sweep(model, options, threads):
            if not points or points[-1].threads != threads:
                print(f"{'threads':>8} {'batch':>6} {'context':>8} {'tokens/s':>10} {'roofline':>10} {'reached':>8}")
            points.append(point)
            share = point.measured / point.predicted
            print(
                f"{threads:>8} {point.batch:>6} {point.context:>8} {point.measured:>10.1f} {point.predicted:>10.1f} "
                f"{share:>8.0%}",
                flush=True,
            )
    if options.png and not plot(points, options.png):
        print("no plot: it needs matplotlib (pip install matplotlib)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
