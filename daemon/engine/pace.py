"""How far ahead of its reader a sample may get: credit, and readers to whom nothing can be delivered.

A sample that may not go on is paused alone: it keeps its place and its tokens, and nobody else waits for its reader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..scheduling.scheduler import Scheduler
from .request import Request, Sample
from .step_runner import StepRunner

NO_CREDIT = "its reader granted no more tokens"


class Pace:
    """Pauses and resumes samples. `samples`: the engine's own, by sequence id; `notice(sample, kind, reason)` tells."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        samples: Mapping[int, Sample],
        notice: Callable[[Sample, str, str], None],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._samples = samples
        self._notice = notice

    def grant(self, request: Request, amount: int, index: int | None = None) -> None:
        """Allow `amount` more tokens of one sample, or of each."""
        for sample in request.samples if index is None else request.samples[index : index + 1]:
            if sample.granted is not None:
                sample.granted += amount
                self._resume_if_allowed(sample)

    def set_granted(self, sample: Sample, granted: int | None) -> None:
        """A new reader: `granted` tokens of the sample may be given out in all; None: as many as there are."""
        if not sample.request.withheld:
            sample.granted = granted
            self._resume_if_allowed(sample)

    def hold(self, request: Request, reason: str) -> None:
        """Stop working on a request whose messages cannot be delivered. A beam search has none before it is over."""
        if request.search is None:
            request.held = reason
            for sample in request.samples:
                self._pause(sample, reason)

    def unhold(self, request: Request) -> None:
        request.held = ""
        for sample in request.samples:
            self._resume_if_allowed(sample)

    def check_credit(self, sample: Sample) -> None:
        """Pause it if it has used up what was granted."""
        if sample.granted is not None and sample.num_sent + len(sample.fresh) >= sample.granted:
            self._pause(sample, NO_CREDIT)

    def _is_live(self, sample: Sample) -> bool:
        return self._samples.get(sample.sequence.sequence_id) is sample

    def _pause(self, sample: Sample, reason: str) -> None:
        if self._is_live(sample) and not sample.paused:
            sample.paused, sample.last_token_at = True, None
            self._scheduler.pause(sample.sequence, reason)
            self._runner.release(sample)
            self._notice(sample, "paused", reason)

    def _resume_if_allowed(self, sample: Sample) -> None:
        has_credit = sample.granted is None or sample.num_sent + len(sample.fresh) < sample.granted
        if sample.paused and has_credit and not sample.request.held and self._is_live(sample):
            sample.paused = False
            self._scheduler.resume(sample.sequence)
            self._notice(sample, "resumed", "")
