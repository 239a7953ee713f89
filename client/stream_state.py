"""One request as the client sees it: tokens arriving, tokens read, credit owed. No sockets, no threads, no clock.

The daemon may send `window` tokens of a sample ahead of the reader. Every half window that was read is granted again,
so a reader that stops is paused alone and a reader that keeps up never waits for credit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from .prompt_rows import Array, RequestRows
from .results import TAIL_TOKEN_ID, Output, Result, TokenEvent
from .wire.errors import ConnectionLost, KVPoolError, ProtocolError, from_code
from .wire.messages import Attach, Credit, Finished, Generate, Notice, Submit, TokenBatch, Usage


class _SampleState:
    """What has arrived of one sequence, and how much of it was read since credit was last granted."""

    __slots__ = (
        "error",
        "finish_reason",
        "hidden",
        "logprobs",
        "may_finish_again",
        "texts",
        "token_ids",
        "top_logprobs",
        "ungranted",
        "unread",
        "usage",
    )

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.texts: list[str] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[dict[int, float]] = []
        self.hidden: list[Array] = []
        self.unread = 0
        self.ungranted = 0
        self.finish_reason: str | None = None
        self.may_finish_again = False  # attached again: the daemon does not know that its end has arrived
        self.usage = Usage()
        self.error: KVPoolError | None = None

    def output(self, sample: int) -> Output:
        return Output(
            sample=sample,
            token_ids=self.token_ids,
            text="".join(self.texts),
            logprobs=self.logprobs or None,
            top_logprobs=self.top_logprobs or None,
            finish_reason=self.finish_reason or "error",
            usage=self.usage,
            error=self.error,
            hidden=np.stack(self.hidden) if self.hidden and len(self.hidden) == len(self.token_ids) else None,
        )


class StreamState:
    """Everything known of one request. `on_change` is called whenever something arrived that a reader may wait for."""

    def __init__(self, request_id: str, num_samples: int, window: int | None, linger_s: float = 0.0) -> None:
        self.request_id = request_id
        self.window = window
        self.linger_s = linger_s
        self.detached_until: float | None = None  # set while the connection is lost and the request waits for another
        self.resuming = False  # attached again, and not accepted yet
        self.unaccepted: Submit | Generate | None = None  # what started it, until the daemon has taken it
        self.error: KVPoolError | None = None
        self.paused: str | None = None  # the daemon's reason, while it has paused this request
        self.abandoned = False  # nobody will read it; only its end is awaited
        self.on_change: Callable[[], None] = _nothing
        self.owes_credit = False  # enough was read since the last grant
        self.rows = RequestRows()
        self.wants: frozenset[str] = frozenset()  # kinds of rows that come before each token
        self._last: TokenEvent | None = None  # that was taken
        self._samples = [_SampleState() for _ in range(num_samples)]
        self._events: deque[TokenEvent] = deque()

    @property
    def num_samples(self) -> int:
        return len(self._samples)

    @property
    def num_received(self) -> int:
        """Tokens of all samples that have arrived, and samples that have ended."""
        return sum(len(sample.token_ids) + (sample.finish_reason is not None) for sample in self._samples)

    @property
    def done(self) -> bool:
        """No message about this request will come any more."""
        return self.error is not None or all(sample.finish_reason is not None for sample in self._samples)

    # ---- what arrives

    def accept(self, num_samples: int) -> None:
        """The daemon says how many samples there are: news for who follows a request that somebody else started."""
        self._samples += [_SampleState() for _ in range(num_samples - len(self._samples))]
        self.resuming, self.unaccepted = False, None

    def push(self, batch: TokenBatch) -> None:
        """Take new tokens in. Tokens that are here already (sent again after Attach) are skipped. Raises ProtocolError
        for a gap, for lists of different lengths and for a sample that was not asked for."""
        sample = self._sample(batch.sample)
        known = len(sample.token_ids) - batch.index
        count = len(batch.token_ids)
        if known < 0:
            raise ProtocolError(f"token {len(sample.token_ids)} of {self.request_id} is missing", field="index")
        for name in ("texts", "logprobs", "top_logprobs"):
            if len(getattr(batch, name)) not in (0, count):
                raise ProtocolError(f"must be empty or have {count} items", field=name)
        for i in range(known, count):
            text = batch.texts[i] if batch.texts else ""
            logprob = batch.logprobs[i] if batch.logprobs else None
            top = dict(batch.top_logprobs[i]) if batch.top_logprobs else None
            index = batch.index + i
            logits, hidden = (self.rows.take(kind, batch.sample, index) for kind in ("logits", "hidden"))
            event = TokenEvent(batch.token_ids[i], text, logprob, index, batch.sample, top, logits, hidden)
            self._append(sample, event)
        self.on_change()

    def push_event(self, event: TokenEvent) -> None:
        """Take one token of the arena's ring in. Raises ProtocolError for a gap and for a sample not asked for."""
        sample = self._sample(event.sample)
        if event.index != len(sample.token_ids):
            raise ProtocolError(f"token {len(sample.token_ids)} of {self.request_id} is missing", field="index")
        self._append(sample, event)
        self.on_change()

    def _append(self, sample: _SampleState, event: TokenEvent) -> None:
        sample.token_ids.append(event.token_id)
        sample.texts.append(event.text)
        if event.logprob is not None:
            sample.logprobs.append(event.logprob)
        if event.top_logprobs is not None:
            sample.top_logprobs.append(event.top_logprobs)
        if event.hidden is not None:
            sample.hidden.append(event.hidden)
        if not self.abandoned:
            sample.unread += 1
            self._events.append(event)

    def finish(self, message: Finished) -> None:
        """Take the last message about a sample in. Raises ProtocolError for a second one."""
        sample = self._sample(message.sample)
        if sample.may_finish_again:
            sample.may_finish_again = False
            return
        if sample.finish_reason is not None:
            raise ProtocolError(f"sample {message.sample} of {self.request_id} finished twice", field="sample")
        sample.finish_reason = message.finish_reason
        sample.usage = message.usage
        if message.error is not None:
            error = message.error
            sample.error = from_code(error.code, error.message, field=error.field, retry_after_ms=error.retry_after_ms)
        if message.text:
            sample.texts.append(message.text)
            if not self.abandoned:
                index = len(sample.token_ids)
                self._events.append(TokenEvent(TAIL_TOKEN_ID, message.text, None, index, message.sample))
        self.on_change()

    def fail(self, error: KVPoolError) -> None:
        """End the request as a whole; a request that is over stays as it is."""
        if not self.done:
            self.error = error
        self.detached_until = None
        self.on_change()

    def notice(self, message: Notice) -> None:
        self.paused = message.reason or message.kind if message.kind == "paused" else None

    def _sample(self, number: int) -> _SampleState:
        if number >= len(self._samples):
            raise ProtocolError(f"{self.request_id} has {len(self._samples)} samples", field="sample")
        return self._samples[number]

    # ---- what the reader does

    def take(self) -> TokenEvent | None:
        """The next token in order of arrival, or None when nothing waits to be read."""
        if not self._events:
            return None
        event = self._events.popleft()
        if event.token_id != TAIL_TOKEN_ID:
            sample = self._samples[event.sample]
            sample.unread -= 1
            sample.ungranted += 1
            if self.window is not None and sample.ungranted * 2 >= self.window:
                self.owes_credit = True
            self._last = event
        return event

    def last_row(self, kind: str) -> Array | None:
        """`logits` or `hidden` of the token that was taken last; None before the first, or where none were asked for.
        Raises ConnectionLost where they were: the daemon does not keep rows for a connection that might be lost."""
        if self._last is None:
            return None
        row: Array | None = getattr(self._last, kind)
        if row is None and kind in self.wants:
            raise ConnectionLost(
                f"the {kind} rows of token {self._last.index} went down with a connection; the token itself is here"
            )
        return row

    def take_all(self) -> None:
        """Read everything that waits, for a reader who only wants the result."""
        self._events.clear()
        for sample in self._samples:
            sample.ungranted += sample.unread
            sample.unread = 0

    def credit_due(self) -> list[Credit]:
        """Grants to send now; each is returned once."""
        self.owes_credit = False
        if self.window is None:
            return []
        grants = []
        for number, sample in enumerate(self._samples):
            if sample.ungranted * 2 >= self.window and sample.finish_reason is None:
                grants.append(Credit(self.request_id, sample.ungranted, number))
                sample.ungranted = 0
        return grants

    def attach(self) -> Attach:
        """What to say on a new connection to go on from here. All credit is granted anew, to each sample as much as the
        one with most unread may have; the others are granted the rest at the next read."""
        credit = None
        if self.window is not None:
            credit = max(0, self.window - max(sample.unread for sample in self._samples))
        for sample in self._samples:
            sample.ungranted = (
                0 if credit is None or self.window is None else max(0, self.window - sample.unread - credit)
            )
            sample.may_finish_again = sample.finish_reason is not None
        self.owes_credit = True
        return Attach(self.request_id, have=tuple(len(sample.token_ids) for sample in self._samples), credit=credit)

    def abandon(self) -> None:
        """Nobody reads this any more: drop what waits, keep nothing that comes."""
        self.abandoned = True
        self._events.clear()

    def raise_if_failed(self) -> None:
        """Raise the request's error when it was refused, was lost, or no sample succeeded."""
        if self.error is not None:
            raise self.error
        errors = [sample.error for sample in self._samples if sample.error is not None]
        if len(errors) == len(self._samples):
            raise errors[0]

    def result(self) -> Result:
        """The finished request. Raises as `raise_if_failed` does."""
        self.raise_if_failed()
        return Result(
            self.request_id,
            tuple(sample.output(number) for number, sample in enumerate(self._samples)),
            self.rows.prompt_logprobs(),
            self.rows.prompt_top_logprobs(),
            self.rows.embedding,
            self.rows.prompt_hidden(self._samples[0].usage.prompt_tokens),
        )


def _nothing() -> None:
    pass
