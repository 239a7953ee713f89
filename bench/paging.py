"""What paging is worth: kvpool's scheduler with blocks on demand, against the same scheduler reserving memory.

    python -m bench.paging [--trace lengths.csv] [--requests 1000] [--pool-gib 8] [--png paging.png]
    python -m bench.paging --model smollm2-135m [--trace lengths.csv] [--scale 16] [--requests 40]

The real pool and scheduler make every decision. What carries out the steps is a cost model of a large GPU (a discrete
simulation, in seconds) or, with `--model`, that model on one core of this machine, with lengths divided by `--scale`
and a pool that holds `--pool-sequences` sequences of max_model_len; seconds are CPU time then, so other work does not
count. Each policy has the same pool and the same requests.

First all requests come at once, and until the queue is empty memory, concurrency and throughput are measured. Then they
come at 80 % of the rate that `on-demand` sustained: that shows latency, from arrival to the last token.

The reserving policies are kinder than the systems they stand for: reservations need not be contiguous here, so none of
their memory is lost between reservations, and a queued request never waits for a hole of the right size.
"""

from __future__ import annotations

import argparse
import csv
import random
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvpool.daemon.memory.block_pool import BlockPool
from kvpool.daemon.memory.reservation import Reservation
from kvpool.daemon.scheduling.limits import SchedulerLimits
from kvpool.daemon.scheduling.scheduler import Scheduler
from kvpool.model.backend import BackendLimits
from kvpool.model.loading import load_model

from .paging_devices import Device, LargeGpu, RealCpu
from .rig import cpu_backend

POLICIES: tuple[Reservation, ...] = ("max", "pow2", "oracle", "on-demand")
COLUMNS = {  # of a trace: (prompt, output)
    ("ContextTokens", "GeneratedTokens"),
    ("num_prefill_tokens", "num_decode_tokens"),
}
LOAD = 0.8

Request = tuple[int, int]  # prompt tokens, output tokens


@dataclass
class Run:
    """What one policy did. Means are over the time in which requests were queued; latencies are of all requests."""

    policy: Reservation
    useful_share: float = 0.0  # of the slots of allocated blocks: those that hold a token
    mean_running: float = 0.0
    max_running: int = 0
    tokens_per_s: float = 0.0  # generated
    latencies_s: list[float] = field(default_factory=list)
    preemptions: int = 0
    timeline: list[tuple[float, int]] = field(default_factory=list)  # (seconds, sequences running)

    def latency_s(self, percent: int) -> float:
        return statistics.quantiles(self.latencies_s, n=100)[percent - 1]


def read_trace(path: Path) -> list[Request]:
    """(prompt, output) tokens of each row of a CSV file with known column names."""
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        for prompt, output in COLUMNS:
            if prompt in (rows.fieldnames or []):
                return [(int(row[prompt]), int(row[output])) for row in rows]
    raise SystemExit(f"{path}: expected the columns {' or '.join(', '.join(names) for names in COLUMNS)}")


def synthetic(count: int, dice: random.Random) -> list[Request]:
    """Log-normal lengths with the means of the ShareGPT data in arXiv 2309.06180: 161 prompt and 338 output tokens."""
    return [(1 + int(dice.lognormvariate(4.4, 1.15)), 1 + int(dice.lognormvariate(5.45, 0.85))) for _ in range(count)]


@dataclass(frozen=True)
class Machine:
    """What all policies have alike."""

    device: Device
    num_blocks: int
    block_size: int
    limits: SchedulerLimits


def replay(policy: Reservation, requests: list[Request], arrivals: list[float], machine: Machine) -> Run:
    """Run all requests to their end. Time passes with the steps alone: where nothing is to be done, it jumps."""
    limits = replace(machine.limits, max_queued=len(requests))
    pool, device = BlockPool(machine.num_blocks, machine.block_size), machine.device
    scheduler = Scheduler(pool, limits=limits, reservation=policy)
    waiting = [device.sequence(*request, at) for request, at in zip(requests, arrivals, strict=True)]
    waiting.reverse()
    now, queued_s, held_s, allocated_s, running_s, generated = 0.0, 0.0, 0.0, 0.0, 0.0, 0
    run = Run(policy)
    while waiting or scheduler.has_work:
        if not scheduler.has_work:
            now = max(now, waiting[-1].arrival)
        while waiting and waiting[-1].arrival <= now:
            scheduler.add(waiting.pop())
        plan = scheduler.schedule(now)
        running = scheduler.roster.running
        step_s, sampled = device.step(plan)
        now += step_s
        if scheduler.roster.queue:
            queued_s += step_s
            held_s += (sum(sequence.num_computed_tokens for sequence in running) + plan.num_tokens) * step_s
            allocated_s += pool.num_used * pool.block_size * step_s
            running_s += len(running) * step_s
            generated += len(sampled)
        run.max_running = max(run.max_running, len(running))
        run.timeline.append((now, len(running)))
        for ended in scheduler.update(plan, sampled):
            device.over(ended)
            run.latencies_s.append(now - ended.arrival)
    if queued_s:
        run.useful_share, run.mean_running = held_s / allocated_s, running_s / queued_s
        run.tokens_per_s = generated / queued_s
    run.preemptions = scheduler.preemptions_total
    return run


def table(saturated: list[Run], paced: list[Run]) -> str:
    """One line per policy; ratios are against `max`."""
    base = saturated[0]
    lines = [
        f"{'':10}{'useful':>8}{'running':>16}{'':>8}{'tokens/s':>10}{'':>8}{'latency s':>17}{'pre-':>9}",
        f"{'policy':10}{'memory':>8}{'mean':>8}{'max':>8}{'ratio':>8}{'':>10}{'ratio':>8}{'p50':>8}{'p99':>9}{'empted':>9}",
    ]
    for run, slow in zip(saturated, paced, strict=True):
        lines.append(
            f"{run.policy:10}{run.useful_share:8.1%}{run.mean_running:8.1f}{run.max_running:8d}"
            f"{run.mean_running / base.mean_running:7.2f}x{run.tokens_per_s:10,.0f}"
            f"{run.tokens_per_s / base.tokens_per_s:7.2f}x{slow.latency_s(50):8.1f}{slow.latency_s(99):9.1f}"
            f"{run.preemptions:9d}"
        )
    return "\n".join(lines)


def plot(saturated: list[Run], paced: list[Run], title: str, path: Path) -> None:
    """Memory that holds tokens, sequences at once over time, and latency, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (memory, running, latency) = pyplot.subplots(1, 3, figsize=(14, 4.2), constrained_layout=True)
    colors = ["#b0b7c3", "#8d99ae", "#5c677d", "#d1495b"]
    names = [run.policy for run in saturated]
    bars = memory.bar(names, [100 * run.useful_share for run in saturated], color=colors)
    memory.bar_label(bars, fmt="%.1f %%")
    memory.set(title="allocated KV memory that holds tokens", ylim=(0, 112), ylabel="%")
    for run, color in zip(saturated, colors, strict=True):
        running.plot(
            *zip(*run.timeline[:: max(1, len(run.timeline) // 500)], strict=True), color=color, label=run.policy
        )
    running.set(title="sequences in the pool", xlabel="seconds", ylim=(0, None))
    running.legend(frameon=False)
    for run, color in zip(paced, colors, strict=True):
        ordered = sorted(run.latencies_s)
        latency.plot(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], color=color, label=run.policy)
    latency.set(title=f"latency at {LOAD:.0%} of on-demand's rate", xlabel="seconds", ylabel="share of requests")
    for axis in (memory, running, latency):
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.paging", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--trace", type=Path, action="append", default=[], help="CSV of lengths; may be repeated")
    parser.add_argument("--requests", type=int, help="rows of each trace, drawn at random (1000; 40 with --model)")
    parser.add_argument("--model", help="run this pulled model, directory or .gguf file, instead of simulating")
    parser.add_argument("--scale", type=int, default=16, help="with --model: all lengths are divided by this")
    parser.add_argument("--pool-sequences", type=int, default=4, help="with --model: the pool's size")
    parser.add_argument("--pool-gib", type=float, default=8.0, help="the pool's size in the simulation")
    parser.add_argument("--block-size", type=int, help="tokens (16; 2 with --model, as lengths are shorter there)")
    parser.add_argument("--max-model-len", type=int, default=0, help="0: 2048 for synthetic lengths, 8192 for a trace")
    parser.add_argument("--max-num-seqs", type=int, help="default 512; 64 with --model")
    parser.add_argument("--max-num-batched-tokens", type=int, help="default 2048; 256 with --model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--png", type=Path, help="write a plot; with several traces the trace's name is appended")
    options = parser.parse_args(arguments)
    options.scale = options.scale if options.model else 1
    options.block_size = options.block_size or (2 if options.model else 16)
    options.requests = options.requests or (40 if options.model else 1000)
    options.max_model_len = (options.max_model_len or (8192 if options.trace else 2048)) // options.scale
    options.max_num_seqs = options.max_num_seqs or (64 if options.model else 512)
    options.max_num_batched_tokens = options.max_num_batched_tokens or (256 if options.model else 2048)
    return options


@contextmanager
def machine_of(options: argparse.Namespace) -> Iterator[Machine]:
    """What the steps run on, and how much memory it has."""
    limits = SchedulerLimits(options.max_num_seqs, options.max_num_batched_tokens, options.max_model_len)
    if not options.model:
        gpu = LargeGpu()
        num_blocks = int(options.pool_gib * 2**30 / gpu.kv_bytes_per_token) // options.block_size
        yield Machine(gpu, num_blocks, options.block_size, limits)
        return
    model = load_model(options.model)
    step = BackendLimits(
        options.block_size, options.max_num_seqs, options.max_num_batched_tokens, options.max_model_len
    )
    num_blocks = options.pool_sequences * options.max_model_len // options.block_size
    with cpu_backend(model, step, num_blocks, threads=1) as backend:
        yield Machine(RealCpu(backend, step, model.config.vocab_size), num_blocks, options.block_size, limits)


def compare(name: str, requests: list[Request], machine: Machine, options: argparse.Namespace) -> None:
    dice = random.Random(options.seed)
    scaled = [(-(-prompt // options.scale), -(-output // options.scale)) for prompt, output in requests]
    fitting = [request for request in scaled if sum(request) <= options.max_model_len]
    chosen = dice.sample(fitting, min(options.requests, len(fitting)))
    prompts, outputs = (statistics.fmean(lengths) for lengths in zip(*chosen, strict=True))
    title = (
        f"{name}: {len(chosen)} requests, {prompts:.0f} prompt and {outputs:.0f} output tokens on average, "
        f"max_model_len {options.max_model_len}, pool of {machine.num_blocks * machine.block_size:,} tokens"
    )
    print(f"\n{title}")
    if len(fitting) < len(requests):
        print(f"left out, since longer than max_model_len: {len(requests) - len(fitting)} of {len(requests)}")
    began = time.perf_counter()
    saturated = [replay(policy, chosen, [0.0] * len(chosen), machine) for policy in POLICIES]
    if not saturated[-1].tokens_per_s:
        raise SystemExit("memory was never short on demand: set more --requests, or a smaller pool")
    rate, at, arrivals = LOAD * saturated[-1].tokens_per_s / outputs, 0.0, []
    for _ in chosen:
        at += dice.expovariate(rate)
        arrivals.append(at)
    paced = [replay(policy, chosen, arrivals, machine) for policy in POLICIES]
    print(table(saturated, paced))
    how = f"{options.model} ran" if options.model else "simulated in"
    print(f"latency at {rate:.1f} requests/s; {how} {time.perf_counter() - began:.0f} s", flush=True)
    if options.png:
        path = options.png if len(options.trace) < 2 else options.png.with_stem(f"{options.png.stem}-{name}")
        try:
            plot(saturated, paced, title, path)
            print(f"plot: {path}")
        except ImportError:
            print("no plot: it needs matplotlib (pip install matplotlib)")


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    print("python -m bench.paging", shlex.join(sys.argv[1:] if arguments is None else arguments))
    with machine_of(options) as machine:
        if not options.trace:
            compare("synthetic lengths", synthetic(4 * options.requests, random.Random(options.seed)), machine, options)
        for path in options.trace:
            compare(path.stem, read_trace(path), machine, options)


if __name__ == "__main__":
    main()
