"""What paging is worth: kvpool's scheduler with blocks on demand, against the same scheduler reserving memory.

    python -m bench.paging [--trace lengths.csv] [--requests 1000] [--pool-gib 8] [--png paging.png]

A discrete simulation: the real pool and scheduler make every decision, and a cost model in place of the device says how
long each step takes. The model is an 8B transformer with grouped queries (32 layers, 8 KV heads of 128, bfloat16) on a
large GPU; a step costs the longer of reading its bytes (weights, and the context of every sequence in it) and doing its
arithmetic, plus a constant. Each policy has the same pool, the same requests and the same step.

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
from dataclasses import dataclass, field
from pathlib import Path

from kvpool.daemon.block_pool import BlockPool
from kvpool.daemon.limits import SchedulerLimits
from kvpool.daemon.reservation import Reservation
from kvpool.daemon.scheduler import Scheduler
from kvpool.daemon.sequence import Sequence
from kvpool.daemon.step_plan import StepPlan

POLICIES: tuple[Reservation, ...] = ("max", "pow2", "oracle", "on-demand")
COLUMNS = {  # of a trace: (prompt, output)
    ("ContextTokens", "GeneratedTokens"),
    ("num_prefill_tokens", "num_decode_tokens"),
}
LOAD = 0.8

Request = tuple[int, int]  # prompt tokens, output tokens


@dataclass(frozen=True)
class Device:
    """A large GPU and an 8B model, as far as a step's time depends on them."""

    weight_bytes: float = 16.1e9
    kv_bytes_per_token: float = 2 * 32 * 8 * 128 * 2
    flop_per_token: float = 16.1e9
    bytes_per_s: float = 4.8e12 * 0.85
    flop_per_s: float = 990e12 * 0.6
    fixed_s: float = 1e-3

    def step_s(self, plan: StepPlan) -> float:
        context = sum(chunk.start + chunk.num_tokens for chunk in plan.chunks)
        read_s = (self.weight_bytes + context * self.kv_bytes_per_token) / self.bytes_per_s
        return self.fixed_s + max(read_s, plan.num_tokens * self.flop_per_token / self.flop_per_s)


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


def simulate(policy: Reservation, requests: list[Request], arrivals: list[float], options: argparse.Namespace) -> Run:
    device = Device()
    num_blocks = int(options.pool_gib * 2**30 / device.kv_bytes_per_token) // options.block_size
    limits = SchedulerLimits(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=options.max_model_len,
        max_queued=len(requests),
    )
    scheduler = Scheduler(BlockPool(num_blocks, options.block_size), limits=limits, reservation=policy)
    waiting = [
        Sequence(uid=0, token_ids=[0] * prompt, max_tokens=output, arrival=at)
        for (prompt, output), at in zip(requests, arrivals, strict=True)
    ]
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
        sampled = {chunk.sequence.sequence_id: 0 for chunk in plan.chunks if chunk.samples}
        step_s = device.step_s(plan)
        now += step_s
        if scheduler.roster.queue:
            queued_s += step_s
            held_s += (sum(sequence.num_computed_tokens for sequence in running) + plan.num_tokens) * step_s
            allocated_s += scheduler.pool.num_used * options.block_size * step_s
            running_s += len(running) * step_s
            generated += len(sampled)
        run.max_running = max(run.max_running, len(running))
        run.timeline.append((now, len(running)))
        run.latencies_s += [now - ended.arrival for ended in scheduler.update(plan, sampled)]
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
    parser.add_argument("--requests", type=int, default=1000, help="how many rows of each trace, drawn at random")
    parser.add_argument("--pool-gib", type=float, default=8.0)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-model-len", type=int, default=0, help="0: 2048 for synthetic lengths, 8192 for a trace")
    parser.add_argument("--max-num-seqs", type=int, default=512)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--png", type=Path, help="write a plot; with several traces the trace's name is appended")
    return parser.parse_args(arguments)


def compare(name: str, requests: list[Request], options: argparse.Namespace) -> None:
    dice = random.Random(options.seed)
    fitting = [request for request in requests if sum(request) <= options.max_model_len]
    chosen = dice.sample(fitting, min(options.requests, len(fitting)))
    prompts, outputs = (statistics.fmean(lengths) for lengths in zip(*chosen, strict=True))
    title = (
        f"{name}: {len(chosen)} requests, {prompts:.0f} prompt and {outputs:.0f} output tokens on average, "
        f"max_model_len {options.max_model_len}, pool {options.pool_gib:g} GiB"
    )
    print(f"\n{title}")
    if len(fitting) < len(requests):
        print(f"left out, since longer than max_model_len: {len(requests) - len(fitting)} of {len(requests)}")
    began = time.perf_counter()
    saturated = [simulate(policy, chosen, [0.0] * len(chosen), options) for policy in POLICIES]
    rate, at, arrivals = LOAD * saturated[-1].tokens_per_s / outputs, 0.0, []
    for _ in chosen:
        at += dice.expovariate(rate)
        arrivals.append(at)
    paced = [simulate(policy, chosen, arrivals, options) for policy in POLICIES]
    print(table(saturated, paced))
    print(f"latency at {rate:.1f} requests/s; simulated in {time.perf_counter() - began:.0f} s")
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
    options.max_model_len = options.max_model_len or (8192 if options.trace else 2048)
    if not options.trace:
        compare("synthetic lengths", synthetic(4 * options.requests, random.Random(options.seed)), options)
    for path in options.trace:
        compare(path.stem, read_trace(path), options)


if __name__ == "__main__":
    main()
