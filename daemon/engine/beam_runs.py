"""The sequences that follow a beam search, in the scheduler as any others.

A beam that goes on in several ways is forked, so beams share the blocks of all they have in common; one that is given
up frees its own. A beam that has its candidates before the others waits paused, so that it never keeps the blocks
which they need to catch up.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ...client.wire.errors import KVPoolError
from ..memory.sequence import Sequence, SequenceState
from ..scheduling.scheduler import Scheduler
from .beam_search import Answer, BeamSearch, Branch
from .request import Request, Sample
from .step_runner import StepRunner

WAITS = "waits for its other beams"


@dataclass(slots=True, eq=False)
class BeamRuns:
    """All searches that run. A request's samples are its beams, in the search's order, until its answers are known.

    `samples`: the engine's own, by sequence id.
    """

    scheduler: Scheduler
    runner: StepRunner
    samples: dict[int, Sample]

    def begin(self, request: Request) -> None:
        """Start with the prompt as the only beam."""
        request.search = BeamSearch.of(request)
        first = self._sample(request, None)
        request.samples = [first]
        self.scheduler.add(first.sequence)
        self.samples[first.sequence.sequence_id] = first

    def advance(self, request: Request) -> list[Sample]:
        """Some beams have new candidates: go on, if all have. The answers, once the search is over."""
        search, beams = request.search, request.samples
        if search is None:
            return []
        if any(beam.candidates is None for beam in beams):
            for beam in beams:
                self._let_wait(beam)
            return []
        branches = search.advance([beam.candidates or () for beam in beams])
        if not branches:
            return self.end(request)
        self._follow(request, branches)
        return []

    def end(self, request: Request, reason: str | None = None, error: KVPoolError | None = None) -> list[Sample]:
        """Free all beams; the request's answers, which are empty if it is cut short for a `reason`."""
        search, beams = request.search, request.samples
        if search is None:
            return []
        request.search = None
        for beam in beams:
            self._drop(beam)
        answers = search.answers if reason is None else [Answer((), 0.0, reason)] * request.params.n
        request.samples = [
            _answered(request, number, answer, beams[0].sequence.num_cached_tokens)
            for number, answer in enumerate(answers[: request.params.n])
        ]
        for sample in request.samples:
            sample.error = error
        return request.samples

    def _follow(self, request: Request, branches: list[Branch]) -> None:
        """Each branch goes on as a fork of its beam; the last one of a beam as the beam itself."""
        beams, following = request.samples, []
        left = Counter(branch.parent for branch in branches)
        for parent, token_id in branches:
            left[parent] -= 1
            beam = self._fork(beams[parent]) if left[parent] else beams[parent]
            self._go_on(beam, token_id)
            following.append(beam)
        for beam in beams:
            if beam not in following:
                self._drop(beam)
        request.samples = following

    def _fork(self, beam: Sample) -> Sample:
        made = self._sample(beam.request, self.scheduler.fork(beam.sequence))
        self.samples[made.sequence.sequence_id] = made
        return made

    def _go_on(self, beam: Sample, token_id: int) -> None:
        beam.candidates = None
        self.scheduler.append(beam.sequence, [token_id])
        if beam.sequence.idle:
            self.scheduler.generate(beam.sequence, beam.sequence.max_tokens, deadline=beam.request.deadline)
        else:
            self.scheduler.resume(beam.sequence)

    def _let_wait(self, beam: Sample) -> None:
        """One that is ahead gives its blocks up to those that are not, if they need them."""
        if beam.candidates is not None and beam.sequence.state is SequenceState.RUNNING:
            self.scheduler.pause(beam.sequence, WAITS)
            self.runner.release(beam)

    def _drop(self, beam: Sample) -> None:
        self.samples.pop(beam.sequence.sequence_id, None)
        self.runner.release(beam)
        self.scheduler.finish(beam.sequence, "stop")

    def _sample(self, request: Request, sequence: Sequence | None) -> Sample:
        sample = Sample.of(request, 0, sequence)
        sample.granted = None  # its answers come when they are known
        sample.num_logprobs = request.search.num_candidates if request.search else 0
        return sample


def _answered(request: Request, number: int, answer: Answer, num_cached_tokens: int) -> Sample:
    """A sample that has ended, and is still to be given out; its sequence is in no pool."""
    sequence = Sequence(uid=request.uid, token_ids=list(request.prompt_ids), max_tokens=request.params.max_tokens)
    sequence.num_cached_tokens = num_cached_tokens
    sequence.state = SequenceState.FINISHED
    sample = Sample.of(request, number, sequence)
    sample.finish_reason = answer.finish_reason
    sample.fresh = list(answer.tokens)
    return sample
