"""What the daemon counts: plain numbers, added up where things happen, read by `stats` and by whoever scrapes;
nothing kept per request."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

RECENT = 256

WAITS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
HOST_S = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)


def percentile(values: Iterable[float], share: float) -> float:
    """The value below which `share` of the values lie (nearest rank); 0.0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


class Distribution:
    """Durations in seconds: all of them counted in buckets, and the last few hundred as they were."""

    def __init__(self, bounds: Sequence[float] = WAITS_S) -> None:
        """`bounds`: upper ends of the buckets, inclusive; one without an end follows."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum_s = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT)

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum_s += seconds
        self._recent.append(seconds)

    def percentile(self, share: float) -> float:
        """Of the last few hundred."""
        return percentile(self._recent, share)

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """(bound, how many were at most that); the last bound is infinite."""
        return zip((*self.bounds, float("inf")), accumulate(self.counts), strict=True)


@dataclass(slots=True)
class Metrics:
    """Totals since the start, and distributions of what people wait for."""

    started_at: float  # monotonic seconds
    requests_total: int = 0
    requests_taken_up_total: int = 0  # from an earlier daemon's journal
    tokens_generated_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    steps_total: int = 0
    step_tokens_total: int = 0
    swapped_out_blocks_total: int = 0
    swapped_in_blocks_total: int = 0
    messages_total: int = 0
    garbage_total: int = 0  # messages that could not be read
    sessions_total: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # samples by finish_reason
    refused: Counter[str] = field(default_factory=Counter)  # requests and calls by error code
    step_s: Distribution = field(default_factory=Distribution)  # launch to collect
    host_s: Distribution = field(default_factory=lambda: Distribution(HOST_S))  # a step's end to the next launch
    queue_s: Distribution = field(default_factory=Distribution)  # a sample's arrival to its first step
    ttft_s: Distribution = field(default_factory=Distribution)  # a request's arrival to its first token
    itl_s: Distribution = field(default_factory=Distribution)  # between two tokens of a sample that was not paused
    slots_allocated_total: int = 0  # summed over steps: KV slots of the blocks in use
    slots_filled_total: int = 0  # summed over steps: those that hold a token

    def step(self, tokens: int, step_s: float) -> None:
        self.steps_total += 1
        self.step_tokens_total += tokens
        self.step_s.observe(step_s)

    def occupancy(self, slots_allocated: int, slots_filled: int) -> None:
        self.slots_allocated_total += slots_allocated
        self.slots_filled_total += slots_filled

    @property
    def kv_waste_ratio(self) -> float:
        """Share of the allocated slots that held no token, over all steps so far."""
        if not self.slots_allocated_total:
            return 0.0
        return 1.0 - self.slots_filled_total / self.slots_allocated_total

    def snapshot(self, now: float) -> dict[str, object]:
        """Everything above as plain values for the wire."""
        return {
            "uptime_s": now - self.started_at,
            "requests_total": self.requests_total,
            "requests_taken_up_total": self.requests_taken_up_total,
            "tokens_generated_total": self.tokens_generated_total,
            "prompt_tokens_total": self.prompt_tokens_total,
            "cached_tokens_total": self.cached_tokens_total,
            "steps_total": self.steps_total,
            "step_tokens_total": self.step_tokens_total,
            "messages_total": self.messages_total,
            "garbage_total": self.garbage_total,
            "sessions_total": self.sessions_total,
            "finished_total": dict(self.finished),
            "refused_total": dict(self.refused),
            "step_ms": 1e3 * self.step_s.percentile(0.5),
            "step_p99_ms": 1e3 * self.step_s.percentile(0.99),
            "host_ms": 1e3 * self.host_s.percentile(0.5),
            "queue_ms": 1e3 * self.queue_s.percentile(0.5),
            "ttft_ms": 1e3 * self.ttft_s.percentile(0.5),
            "itl_ms": 1e3 * self.itl_s.percentile(0.5),
            "swapped_out_blocks_total": self.swapped_out_blocks_total,
            "swapped_in_blocks_total": self.swapped_in_blocks_total,
            "kv_waste_ratio": self.kv_waste_ratio,
        }
