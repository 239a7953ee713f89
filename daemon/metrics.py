"""What the daemon counts: plain numbers, added up where things happen, read by `stats`; nothing kept per request."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

RECENT_STEPS = 256


def percentile(values: Iterable[float], share: float) -> float:
    """The value below which `share` of the values lie (nearest rank); 0.0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


@dataclass(slots=True)
class Metrics:
    """Totals since the start, and the last few hundred of what is better seen as a distribution."""

    started_at: float  # monotonic seconds
    requests_total: int = 0
    requests_taken_up_total: int = 0  # from an earlier daemon's journal
    tokens_generated_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    steps_total: int = 0
    step_tokens_total: int = 0
    messages_total: int = 0
    garbage_total: int = 0  # messages that could not be read
    sessions_total: int = 0
    finished: Counter[str] = field(default_factory=Counter)  # samples by finish_reason
    refused: Counter[str] = field(default_factory=Counter)  # requests and calls by error code
    step_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))  # launch to collect
    host_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))  # a step's end to the next launch
    ttft_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))  # arrival to the first token
    slots_allocated_total: int = 0  # summed over steps: KV slots of the blocks in use
    slots_filled_total: int = 0  # summed over steps: those that hold a token

    def step(self, tokens: int, step_s: float) -> None:
        self.steps_total += 1
        self.step_tokens_total += tokens
        self.step_s.append(step_s)

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
            "step_ms": 1e3 * percentile(self.step_s, 0.5),
            "step_p99_ms": 1e3 * percentile(self.step_s, 0.99),
            "host_ms": 1e3 * percentile(self.host_s, 0.5),
            "ttft_ms": 1e3 * percentile(self.ttft_s, 0.5),
            "kv_waste_ratio": self.kv_waste_ratio,
        }
