"""Health is progress: there is no work, or a step of it finished in time. Status, watchdog and metrics ask this one."""

from __future__ import annotations

from typing import NamedTuple

from ..engine.engine import Engine
from ..memory.sequence import Sequence
from ..scheduling.roster import QUEUED


class Health(NamedTuple):
    """Whether the daemon gets on, and why not."""

    healthy: bool
    reason: str  # one line; empty while healthy


def health_of(engine: Engine, limit_s: float, now: float) -> Health:
    """Unhealthy: sequences are queued or running, and no step has finished for `limit_s`."""
    stuck_s = engine.no_progress_s(now)
    if stuck_s < limit_s:
        return Health(True, "")
    roster = engine.scheduler.roster
    count = len(roster.running) + roster.num_waiting
    step = f"the device has one since {engine.in_flight_s(now):.1f} s" if engine.in_flight else "none has begun"
    return Health(
        False,
        f"no step has finished for {stuck_s:.1f} s (health_limit_s {limit_s:g}), {step}; sequences waiting: {count}",
    )


def why_it_waits(sequence: Sequence, engine: Engine, health: Health, now: float) -> str:
    """What a sequence waits for, for people; empty while it gets on."""
    if sequence.idle:
        return ""
    if not sequence.wait_reason and sequence.in_flight and not health.healthy:
        return f"the device has its step since {engine.in_flight_s(now):.1f} s"
    if sequence.wait_reason == QUEUED and not health.healthy:  # nobody has looked at it yet
        return "behind a step that does not end"
    return sequence.wait_reason
