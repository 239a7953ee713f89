"""Requests of which earlier daemons may have died: they must not take one daemon after the other with them.

Until a request that was taken up has a new token, the journal is told of every step with it, before the step begins. So
the next daemon knows which requests were at work, and where, when the last one died. These suspects run one at a time,
that the innocent get on and are cleared; one at whose work MAX_DEATHS daemons in a row died at the same position, after
the one that had accepted it, is answered with an error instead.
"""

from __future__ import annotations

from collections import deque

from ...client.wire.errors import InternalError
from ..persistence.journal import Journal
from ..scheduling.step_plan import StepPlan
from .pace import Pace
from .request import Request, Sample

MAX_DEATHS = 2
ONE_AT_A_TIME = "an earlier daemon died while it worked on this, and on others, which are tried before"


def verdict(deaths: int) -> InternalError | None:
    """Why a request cannot be tried again; None: it can."""
    if deaths < MAX_DEATHS:
        return None
    return InternalError(f"{deaths} daemons in a row died while they worked on this request")


class Suspects:
    """Nothing to do for requests that no earlier daemon had."""

    def __init__(self, journal: Journal | None, pace: Pace) -> None:
        self._journal = journal
        self._pace = pace
        self._untried: set[Request] = set()  # no new token yet
        self._suspects: deque[Request] = deque()  # the first one may run

    def take_up(self, request: Request, deaths: int) -> None:
        self._untried.add(request)
        if deaths:
            self._suspects.append(request)
            if len(self._suspects) > 1:
                self._pace.hold(request, ONE_AT_A_TIME)

    def launching(self, plan: StepPlan, now: float) -> None:
        """The step begins when this returns."""
        if self._journal is None or not self._untried:
            return
        for chunk in plan.chunks:
            sample = chunk.sequence.client_data
            request = sample.request if isinstance(sample, Sample) else None
            if request in self._untried and request is not None and request.journal_key is not None:
                self._journal.attempt(request.journal_key, chunk.start)
        self._journal.commit(now)

    def clear(self, request: Request) -> None:
        """It has given a token, or has ended."""
        self._untried.discard(request)
        if request not in self._suspects:
            return
        self._suspects.remove(request)
        if self._suspects and self._suspects[0].held == ONE_AT_A_TIME:
            self._pace.unhold(self._suspects[0])
