"""Who has had how much: virtual token counters, and token buckets for owners with a rate limit.

The counters are those of "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024): each owner's counter
grows by the tokens computed for it, divided by its weight, and whoever has the lowest counter is served next. An owner
that comes back from being idle is lifted to the lowest counter of the active ones: time away earns no credit.
"""

from __future__ import annotations

from collections.abc import Callable


class VirtualCounters:
    """One counter per uid. Active owners are those with a queued or running sequence."""

    def __init__(self) -> None:
        self._value: dict[int, float] = {}
        self._active: dict[int, int] = {}  # uid -> sequences queued or running
        self._floor = 0.0  # the counter of the last owner that left when nobody was active any more

    def enter(self, uid: int) -> None:
        """One more sequence of `uid` is queued or running."""
        if uid not in self._active:
            floor = min((self._value[other] for other in self._active), default=self._floor)
            self._value[uid] = max(self._value.get(uid, 0.0), floor)
        self._active[uid] = self._active.get(uid, 0) + 1

    def leave(self, uid: int) -> None:
        """One fewer."""
        self._active[uid] -= 1
        if not self._active[uid]:
            del self._active[uid]
            if not self._active:
                self._floor = max(self._floor, self._value[uid])

    def charge(self, uid: int, tokens: int, weight: float) -> None:
        self._value[uid] = self._value.get(uid, 0.0) + tokens / weight

    def value(self, uid: int) -> float:
        return self._value.get(uid, 0.0)

    @property
    def active(self) -> dict[int, int]:
        """Sequences queued or running, by uid."""
        return self._active


def share_rows(wanted: list[tuple[int, int]], rows: int, weight: Callable[[int], float]) -> list[int]:
    """Rows of a step for each prompt of `wanted`, (uid, tokens it lacks), most deserving first.

    Every prompt gets one row. The others are divided among the owners by weight, so that nobody's short prompt waits
    for another one's long prompt; what an owner does not need goes to whoever comes first.
    """
    given = [1] * min(rows, len(wanted)) + [0] * (len(wanted) - rows)
    left = rows - sum(given)
    total = sum(weight(uid) for uid in {uid for uid, _ in wanted})
    parts = {uid: int(left * weight(uid) / total) for uid, _ in wanted}
    for parted in (True, False):
        for index, (uid, count) in enumerate(wanted):
            more = min(left, max(0, count - given[index]), parts[uid] if parted else left)
            given[index] += more
            parts[uid] -= more
            left -= more
    return given


class RateLimiter:
    """A token bucket per uid that has a rate: it fills at `tokens_per_s` and holds one second's worth."""

    def __init__(self) -> None:
        self._level: dict[int, tuple[float, float]] = {}  # uid -> (tokens, at this time)

    def allowance(self, uid: int, tokens_per_s: float, now: float) -> int:
        """Tokens that `uid` may have computed right now."""
        capacity = max(1.0, tokens_per_s)
        tokens, at = self._level.get(uid, (capacity, now))
        tokens = min(capacity, tokens + (now - at) * tokens_per_s)
        self._level[uid] = (tokens, now)
        return int(tokens + 1e-9)  # at the very moment that `ready_at` names, a token is allowed

    def spend(self, uid: int, tokens: int) -> None:
        """Take what `allowance` allowed."""
        if uid in self._level:
            level, at = self._level[uid]
            self._level[uid] = (level - tokens, at)

    def ready_at(self, uid: int, tokens_per_s: float, now: float) -> float:
        """When the next token is allowed."""
        tokens, at = self._level.get(uid, (1.0, now))
        return at + max(0.0, 1.0 - tokens) / tokens_per_s
