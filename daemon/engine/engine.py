"""The engine: scheduler, device and text, one step at a time; without sockets, threads or a clock of its own.

One `turn` has its stages in this order, and the order is the design:

    collect   the step that the device finished; its tokens enter their sequences and end those that are complete
    schedule  what the device does next, from everything that is known by now
    launch    hand it over; from here on the device works
    flush     text, stop strings and messages of the step collected above, while the device computes the next one

So nothing slow stands between collecting a step and launching the next, except what the next depends on. The price: a
stop string is found one step late, and the token computed meanwhile is dropped. Nobody sees it.

Long because a sample's whole way, from submission over every turn to its end, is told in one place.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from ...client.wire.errors import InternalError, KVPoolError, NumericError, Unsupported
from ...client.wire.protocol import ErrorInfo, Finished, Notice, TokenBatch
from ...model.batch import Float32, StepResult
from ..memory.sequence import Sequence
from ..persistence.journal import Journal
from ..persistence.journal_records import KnownRequest
from ..scheduling.scheduler import Scheduler
from ..scheduling.step_plan import StepPlan
from .beam_runs import BeamRuns
from .best_of import choose
from .metrics import Metrics
from .observations import note_occupancy, note_plan, note_token
from .pace import Pace
from .prompt_rows import Rows
from .request import Fresh, Request, Sample
from .ring_tokens import RingTokens
from .step_builder import Report
from .step_runner import StepRunner
from .submission import submit_of
from .suspects import Suspects, verdict
from .trace import Trace

log = logging.getLogger(__name__)

MAX_FAILURES = 3


class DeviceLost(Exception):
    """Several steps in a row failed: the daemon cannot go on."""


class Output(NamedTuple):
    """A message for whoever has the request."""

    request: Request
    message: TokenBatch | Finished | Notice | Rows


class Engine:
    """Requests in, outputs out. Call `turn` after every change, at `wake_at`, and when the device is done.

    Each sample of a submitted request ends in exactly one Finished, whatever happens to it.
    """

    def __init__(
        self, scheduler: Scheduler, runner: StepRunner, metrics: Metrics, *, epoch: int, journal: Journal | None = None
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.metrics = metrics
        self.epoch = epoch
        self.journal = journal
        self.trace = Trace()
        self.on_kept: Callable[[Request], None] = lambda request: None  # a kept sequence has its answer
        self._samples: dict[int, Sample] = {}  # by sequence id: those whose sequences have not ended
        self._to_flush: dict[Sample, None] = {}  # have fresh tokens, or have ended
        self._outputs: list[Output] = []
        self._ring_tokens = RingTokens()
        self._between: list[Callable[[], None]] = []
        self.pace = Pace(scheduler, runner, self._samples, self._notice)
        self._suspects = Suspects(journal, self.pace)
        self._beams = BeamRuns(scheduler, runner, self._samples)
        self._searching: dict[Request, None] = {}  # beam searches that the last step gave candidates
        self._plan: StepPlan | None = None  # in flight
        self._launched_at = 0.0
        self._changed = False  # something happened since the scheduler last had nothing to do
        self._wake_at: float | None = None
        self._failures = 0  # steps in a row
        self._work_since: float | None = None  # there is work, and no step has finished since then

    @property
    def in_flight(self) -> bool:
        """The device works on a step; poll the runner's descriptor."""
        return self._plan is not None

    def in_flight_s(self, now: float) -> float:
        """How long the device has been working on its step."""
        return 0.0 if self._plan is None else now - self._launched_at

    def no_progress_s(self, now: float) -> float:
        """How long there has been work without a step that finished."""
        return 0.0 if self._work_since is None else now - self._work_since

    @property
    def idle(self) -> bool:
        """No request is alive and nothing waits to be given out."""
        waiting = self._to_flush or self._outputs or self._ring_tokens
        return self._plan is None and not self._samples and not waiting

    @property
    def wake_at(self) -> float | None:
        """When `turn` is due although nothing happens (monotonic seconds): a deadline, a rate limit, or the journal; at
        once (0.0) where something changed after the last turn."""
        if self._outputs or (self._changed and self._plan is None):
            return 0.0
        if self._plan is not None:
            return None
        times = [self._wake_at, self.journal.wake_at if self.journal else None]
        return min((time for time in times if time is not None), default=None)

    @property
    def survives(self) -> bool:
        """The next daemon will go on with what is not finished."""
        return self.journal is not None and self.journal.works

    def works_on(self) -> set[int]:
        """Ids of the sequences that a request waits for."""
        return set(self._samples)

    def take_outputs(self) -> list[Output]:
        """What was made since the last call, in order, but for tokens that go through rings."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def take_ring_tokens(self) -> RingTokens:
        """Tokens since the last call for requests with a handle. The ends among the outputs come after them."""
        tokens, self._ring_tokens = self._ring_tokens, RingTokens()
        return tokens

    # What callers ask

    def submit(self, request: Request, sequence: Sequence | None = None) -> None:
        """Take a request; with an idle `sequence`, whose tokens are its prompt, that one answers it.

        Raises KVPoolError, and keeps nothing of it, if it cannot be taken.
        """
        params, new = request.params, sequence is None
        if sequence is not None and params.prompt_logprobs is not None:
            raise Unsupported("its tokens are not computed again; submit them as a prompt", field="prompt_logprobs")
        self.scheduler.check_admission(
            request.uid, len(request.prompt_ids), params.max_tokens, params.num_sequences, new=new
        )
        if self.journal is not None:
            request.journal_key = self.journal.accept(
                request.uid,
                submit_of(request),
                request.params.num_samples,
                request.seed,
                request.arrival,
                time.time(),
                request.kept_as,
            )
        self.metrics.requests_total += 1
        self.metrics.prompt_tokens_total += len(request.prompt_ids)
        self._changed = True
        if params.beam_width:
            self._beams.begin(request)
            return
        samples = [Sample.of(request, index, sequence) for index in range(request.params.num_samples)]
        sequences = [sample.sequence for sample in samples]
        if sequence is not None:
            self.scheduler.generate(sequence, params.max_tokens, deadline=request.deadline)
        elif len(sequences) == 1:
            self.scheduler.add(sequences[0])
        else:
            self.scheduler.add_group(sequences)
        request.samples = samples
        for sample in samples:
            self._samples[sample.sequence.sequence_id] = sample
            self.pace.check_credit(sample)

    def take_up(self, request: Request, known: KnownRequest) -> None:
        """Go on with a request where an earlier daemon left it: what it was given is known, and nothing computed.

        It may no longer be possible (max_model_len is lower now): then it ends with that error.
        """
        params, total = request.params, len(request.prompt_ids)
        request.journal_key, request.taken_up = known.accept.key, True
        error: KVPoolError | None = verdict(known.deaths)
        try:
            self.scheduler.check_possible(request.uid, total, params.max_tokens)
        except KVPoolError as refusal:
            error = refusal
        if params.beam_width and not known.done:  # then none of its answers was given out: it begins anew
            self._beams.begin(request)
            if error is not None:
                self.cancel(request, "error", error)
        else:
            self._restore_samples(request, known, error)
        if not request.done and error is None:
            self._suspects.take_up(request, known.deaths)
        self.metrics.requests_taken_up_total += 1
        self._changed = True

    def _restore_samples(self, request: Request, known: KnownRequest, error: KVPoolError | None) -> None:
        request.samples = [Sample.of(request, index) for index in range(request.params.num_samples)]
        for sample, past in zip(request.samples, known.samples, strict=True):
            sample.restore(past, self.epoch)
            if sample.finished is None:
                self.scheduler.add(sample.sequence)
                self._samples[sample.sequence.sequence_id] = sample
                if error is not None:
                    self._end(sample, "error", error)
                elif sample.stopped:  # all that is missing is the word that it is over
                    self._end(sample, "stop")
            if sample.num_sent:
                request.first_token_at = request.arrival
        if request.withheld and request.done:
            choose(request)

    def cancel(self, request: Request, reason: str = "cancelled", error: KVPoolError | None = None) -> None:
        """End every sample of a request, in whatever state it is. Those that have ended stay as they are."""
        for sample in request.samples:
            self._end(sample, reason, error)

    def between_steps(self, action: Callable[[], None]) -> None:
        """Do something while the device does nothing: at once, or when its step is done."""
        if self._plan is None:
            action()
        else:
            self._between.append(action)

    def write_down(self, now: float) -> None:
        """What has happened is in the journal when this returns: before anybody is told of it."""
        if self.journal is not None:
            self.journal.commit(now)

    # One turn

    def turn(self, now: float, *, step_done: bool) -> None:
        """Run all stages once. `step_done`: the runner's descriptor is readable. Raises DeviceLost."""
        begin = time.perf_counter()
        if step_done and self._plan is not None:
            self._collect(now)
            self.trace.stage("collect")
        while self._between and self._plan is None:
            self._between.pop(0)()
        if self._plan is None and (self._changed or (self._wake_at is not None and now >= self._wake_at)):
            self._schedule(now)
            if self.in_flight:
                self.metrics.host_s.observe(time.perf_counter() - begin)
        self._flush()
        self.write_down(now)
        self.trace.stage("flush")
        if not self.in_flight and not self.scheduler.expects_progress:
            self._work_since = None
        elif self._work_since is None:
            self._work_since = now

    def _collect(self, now: float) -> None:
        plan, self._plan = self._plan, None
        self._changed = True
        if plan is None:
            return
        try:
            result, reports = self.runner.collect()
        except RuntimeError as error:
            self._fail(plan, error)
            return
        self._failures, self._work_since = 0, None
        self.metrics.step(plan.num_tokens, self.runner.last_step_s)
        self.trace.collected(plan, self.scheduler)
        for report in reports:
            self._tell(report)
        sampled = self._take_tokens(plan, result, now)
        self._retire_all(self.scheduler.update(plan, sampled))
        for request in self._searching:
            self._to_flush.update(dict.fromkeys(self._beams.advance(request)))
        self._searching = {}
        for sequence_id in sampled:
            if sequence_id in self._samples:
                self.pace.check_credit(self._samples[sequence_id])

    def _take_tokens(self, plan: StepPlan, result: StepResult, now: float) -> dict[int, int | None]:
        """The sampled token by sequence id, each also noted in its sample; a row that holds NaN ends its sample."""
        token_ids, logprobs = result.tokens.tolist(), result.logprobs.tolist()
        errors = result.numeric_errors
        sampled: dict[int, int | None] = {}
        for row, chunk in enumerate(plan.sampling_chunks):
            sample = self._samples.get(chunk.sequence.sequence_id)
            if sample is None:
                continue  # ended while the device worked on it
            if errors[row]:
                self._end(sample, "error", NumericError("the model's output for this sequence is not a number"))
                continue
            top = result.best(row, sample.num_logprobs) if sample.num_logprobs else ()
            if sample.request.search is not None:
                sample.candidates, sampled[chunk.sequence.sequence_id] = top, None
                self._searching[sample.request] = None
                continue
            logits = result.logits[row] if result.logits is not None and sample.request.want_logits else None
            if sample.request.taken_up:
                self._suspects.clear(sample.request)
            sample.fresh.append((token_ids[row], logprobs[row], top, logits))
            if sample.has_penalties:
                sample.count(token_ids[row])
            sampled[chunk.sequence.sequence_id] = token_ids[row]
            self._to_flush[sample] = None
            note_token(self.metrics, sample, now)
        return sampled

    def _tell(self, report: Report) -> None:
        """Rows that a step found out for a sample's reader."""
        sample = report.sample
        if not self._is_live(sample):
            return
        if report.numeric_error:
            self._end(sample, "error", NumericError("the model's output for this prompt is not a number"))
            return
        if sample.request.linger_s > 0 or sample.request.taken_up:
            sample.told += [rows for rows in report.rows if not rows.transient]
        self._outputs += [Output(sample.request, rows) for rows in report.rows]

    def _schedule(self, now: float) -> None:
        """Plan and launch a step, if there is anything to do."""
        self._changed = False
        while self._plan is None:
            plan = self.scheduler.schedule(now)
            self._wake_at = plan.wake_at
            self.trace.stage("schedule")
            self._retire_all(plan.expired)
            for sequence in plan.preempted:
                self._note_preemption(sequence)
            if plan.empty:
                return
            try:
                if plan.chunks:
                    self._suspects.launching(plan, now)
                    self.runner.start(plan)
                    self._plan, self._launched_at = plan, now
                    self.trace.launched()
                else:
                    self.runner.move(plan)
                    self.scheduler.update(plan, {})
                note_plan(self.metrics, plan, self._samples, now)
                self.trace.stage("launch")
            except RuntimeError as error:
                self._fail(plan, error)

    def _fail(self, plan: StepPlan, error: RuntimeError) -> None:
        """The device failed: the sequences of the step end, the others go on. Raises DeviceLost if it does so again."""
        self._failures += 1
        log.error("step failed (%d in a row): %s", self._failures, error, exc_info=error)
        for chunk in plan.chunks:
            sample = self._samples.get(chunk.sequence.sequence_id)
            if sample is not None:
                self._end(sample, "error", InternalError("the device failed while it worked on this sequence"))
        for chunk in plan.chunks:
            chunk.num_tokens = 0  # nothing of it was computed
        self.scheduler.update(plan, {})
        for chunk in plan.chunks:
            if not chunk.sequence.finished:  # one that stays: what was taken for the chunk goes back
                self.scheduler.truncate(chunk.sequence, chunk.sequence.num_tokens)
        self.scheduler.distrust(plan)
        if self._failures >= MAX_FAILURES:
            raise DeviceLost(f"{self._failures} steps in a row failed; the last: {error}") from error

    # Ends and pauses

    def _is_live(self, sample: Sample) -> bool:
        """Its sequence works on this sample, and not on a later one."""
        return self._samples.get(sample.sequence.sequence_id) is sample

    def _end(self, sample: Sample, reason: str, error: KVPoolError | None = None) -> None:
        if self._is_live(sample) and self.scheduler.end_answer(sample.sequence, reason):
            sample.error = error
            self._retire(sample)

    def _retire_all(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            sample = self._samples.get(sequence.sequence_id)
            if sample is not None:  # the first beam of a search that ends takes the others with it
                self._retire(sample)

    def _retire(self, sample: Sample) -> None:
        """The sample's answer has ended; what is left is to say so."""
        del self._samples[sample.sequence.sequence_id]
        sample.finish_reason = sample.sequence.finish_reason
        self._suspects.clear(sample.request)
        self.runner.release(sample)
        if sample.request.search is None:
            self._to_flush[sample] = None
        else:
            self._to_flush.update(dict.fromkeys(self._beams.end(sample.request, sample.finish_reason, sample.error)))
        self._changed = True

    def _note_preemption(self, sequence: Sequence) -> None:
        sample = self._samples.get(sequence.sequence_id)
        if sample is not None:
            self.runner.release(sample)
            self._notice(sample, "preempted", "its blocks were needed by others; it goes on by itself")

    def _notice(self, sample: Sample, kind: str, reason: str) -> None:
        request = sample.request
        self._outputs.append(Output(request, Notice(self.epoch, request.request_id, kind, reason, sample.index)))
        self._changed = True

    # Giving out

    def _flush(self) -> None:
        if not self._to_flush:
            return
        self._to_flush = {sample: None for sample in list(self._to_flush) if not self._give_out(sample)}
        note_occupancy(self.metrics, self.scheduler)

    def _give_out(self, sample: Sample) -> bool:
        """The sample's fresh tokens with their text, and the end if it has come. False: the end is said a step later.

        A sequence that stays is free for its owner's next wish once the end is said: the device must be done with it.
        """
        request = sample.request
        logits = [row for *_, row in sample.fresh if row is not None] if request.want_logits else []
        fresh = sample.take_fresh()
        if fresh is not None:
            index, token_ids, _, logprobs, tops = fresh
            self.metrics.tokens_generated_total += len(token_ids)
            if not request.withheld:
                self._say_tokens(request, sample.index, fresh, logits[: len(token_ids)])
            if self.journal is not None and request.journal_key is not None:
                self.journal.tokens(request.journal_key, sample.index, index, token_ids, logprobs, tops)
        if sample.stopped and self._is_live(sample):
            self._end(sample, "stop")
        if sample.finish_reason is None:
            return True
        if sample.sequence.in_flight and not sample.sequence.finished:
            return False
        finished = self._finished(sample)
        if not request.withheld:
            self._outputs.append(Output(request, finished))
        elif request.done:
            self._say_chosen(request)
        return True

    def _say_tokens(self, request: Request, sample: int, fresh: Fresh, logits: list[Float32]) -> None:
        """Through its reader's ring, or in a message."""
        if request.handle is not None:
            self._ring_tokens.add(request, sample, fresh, logits)
            return
        if logits:
            rows = Rows("logits", fresh[0], np.stack(logits), sample, transient=True)
            self._outputs.append(Output(request, rows))
        self._outputs.append(Output(request, TokenBatch(request.request_id, sample, *fresh)))

    def _say_chosen(self, request: Request) -> None:
        """It is known at last which of its samples are its answers."""
        for message in choose(request):
            if isinstance(message, TokenBatch):
                batch = message
                fresh = (batch.index, batch.token_ids, batch.texts, batch.logprobs, batch.top_logprobs)
                self._say_tokens(request, batch.sample, fresh, [])
            else:
                self._outputs.append(Output(request, message))

    def _finished(self, sample: Sample) -> Finished:
        reason = "stop" if sample.stopped else sample.finish_reason or "error"
        error = sample.error
        info = None if error is None else ErrorInfo(error.code, error.message, error.field, error.retry_after_ms)
        self.metrics.finished[reason] += 1
        self.metrics.cached_tokens_total += sample.usage.cached_tokens
        sample.finished = Finished(
            self.epoch, sample.request.request_id, sample.index, reason, sample.usage, sample.tail(), info
        )
        if self.journal is not None and sample.request.journal_key is not None:
            self.journal.end(sample.request.journal_key, sample.finished)
        if sample.request.kept_as:
            self.on_kept(sample.request)
        return sample.finished
