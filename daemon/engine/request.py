"""A request and its samples as the engine keeps them: what was asked, what was given out, what is held back."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...client.sampling_params import SamplingParams
from ...client.wire.errors import KVPoolError
from ...client.wire.protocol import Finished, TokenBatch, Usage
from ...model.text.detokenizer import StopStrings, StreamDetokenizer
from ..memory.sequence import Sequence, SequenceState
from ..persistence.journal_records import KnownSample
from .hidden_states import HiddenStates
from .prompt_rows import Collector, Rows, collector_of
from .text import Text

if TYPE_CHECKING:
    from .beam_search import BeamSearch

RESTORED_BATCH = 1024
"""Tokens in one message of those that an earlier daemon gave out; below the wire's MAX_TOKENS_PER_EVENT."""

SEED_STRIDE = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio, odd: no two of 2^64 multiples of it are equal modulo 2^64."""


def draw_seed() -> int:
    """A seed for a request that names none; kept with it, so that its tokens can be computed again."""
    return secrets.randbits(64)


def sample_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of a request: (seed + index * SEED_STRIDE) mod 2^64. Sample 0 has the request's own,
    so a request for n samples begins with the answer that a request for one would have had."""
    return (seed + index * SEED_STRIDE) % 2**64


TopLogprobs = tuple[tuple[int, float], ...]
"""Best first: (token_id, logprob)."""

Token = tuple[int, float, TopLogprobs, NDArray[np.float32] | None]
"""One generated token on its way out: token_id, logprob, the best candidates, and logits (vocab_size,) where they are
wanted. A plain tuple, as there is one for every token: a named one would take five times as long to make."""

Fresh = tuple[int, tuple[int, ...], tuple[str, ...], tuple[float, ...], tuple[TopLogprobs, ...]]
"""Tokens of one sample as they are given out, as in TokenBatch: index of the first, token_ids, texts, logprobs,
top_logprobs."""


@dataclass(slots=True, eq=False)
class Request:
    """One accepted Submit. `session` is whoever gets its messages (None: nobody now), opaque to the engine."""

    request_id: str
    uid: int
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]  # the model's own end tokens included, unless they are to be ignored
    text: Text | None  # None: nobody wants text
    arrival: float = 0.0  # monotonic seconds
    deadline: float | None = None  # monotonic seconds
    priority: int = 0
    want_text: bool = True
    want_logits: bool = False
    hidden_layers: tuple[int, ...] = ()  # layers, counted from 0, whose outputs are told with every token
    chunk_tokens: int | None = None  # most tokens of each of its sequences in one step
    pooling: str | None = None  # mean | last: nothing is generated, the prompt is embedded
    keep: bool = False  # its sequence stays when it is done
    kept_as: str = ""  # the name of the kept sequence that goes on with this
    linger_s: float = 0.0
    credit: int | None = None  # tokens of each sample that may be given out before more is granted; None: all
    handle: int | None = None  # its tokens go through the ring of its session's arena; None: in messages
    session: object = None
    held: str = ""  # why its messages cannot be delivered at the moment
    samples: list[Sample] = field(default_factory=list)
    first_token_at: float | None = None
    journal_key: int | None = None  # None: no journal has it
    search: BeamSearch | None = None  # while one runs: the samples are its beams
    chosen: bool = field(init=False)  # the best of its samples are known
    taken_up: bool = False  # from an earlier daemon: its owner will ask for what was given out before

    def __post_init__(self) -> None:
        self.chosen = self.params.num_samples <= self.params.n

    @property
    def withheld(self) -> bool:
        """It is not known yet which its answers are: they come all at once."""
        return self.search is not None or not self.chosen

    @property
    def fits_ring(self) -> bool:
        """Nothing comes with its tokens that has no place in the ring: candidates, hidden states."""
        return not (self.params.logprobs or self.hidden_layers)

    @property
    def done(self) -> bool:
        """Every sample has had its last message."""
        return all(sample.finished for sample in self.samples)


@dataclass(slots=True, eq=False)
class Sample:
    """One of a request's n sequences, and its text so far."""

    request: Request
    index: int
    seed: int
    sequence: Sequence
    detokenizer: StreamDetokenizer | None
    stops: StopStrings | None
    granted: int | None  # tokens that may be given out in all; None: all
    num_logprobs: int = 0  # best candidates to report with each token
    has_penalties: bool = False  # the tokens so far change the odds of the next
    slot: int = -1  # its row in the step builder while it is running
    paused: bool = False
    launched: bool = False  # has been in a step
    last_token_at: float | None = None  # monotonic seconds; None: nobody waits for the next one since then
    fresh: list[Token] = field(default_factory=list)  # computed, not yet given out
    num_sent: int = 0
    finish_reason: str | None = None  # once its answer has ended; its sequence may go on with another one
    stopped: bool = False  # by a stop string
    error: KVPoolError | None = None
    finished: Finished | None = None  # its last message, once made
    history: list[TokenBatch] = field(default_factory=list)  # what was given out, where the request may be resumed
    collector: Collector | None = None  # of what is to be told about the prompt's tokens
    hidden: HiddenStates | None = None  # what is to be told of layers
    told: list[Rows] = field(default_factory=list)  # what it told, where the request may be resumed
    candidates: tuple[tuple[int, float], ...] | None = None  # of a beam: its next tokens, while it waits for the others
    sum_logprobs: float = 0.0  # of the tokens given out, while it is not known whether it is among the answers
    token_counts: dict[int, int] = field(default_factory=dict)  # for penalties: times generated; 0: only in the prompt

    @classmethod
    def of(cls, request: Request, index: int, sequence: Sequence | None = None) -> Sample:
        """Sample `index` of a request, with a new sequence, or with one that has its prompt already."""
        params = request.params
        if sequence is None:
            sequence = Sequence(
                uid=request.uid,
                token_ids=list(request.prompt_ids),
                max_tokens=params.max_tokens,
                deadline=request.deadline,
                keep=request.keep,
            )
        sequence.arrival, sequence.priority = request.arrival, request.priority
        sequence.chunk_tokens = request.chunk_tokens
        sequence.min_tokens, sequence.stop_token_ids = params.min_tokens, request.stop_token_ids
        sample = cls(
            request,
            index,
            sample_seed(request.seed, index),
            sequence,
            request.text.detokenizer(show_special=not params.skip_special_tokens) if request.text else None,
            StopStrings(params.stop, include=params.include_stop_str_in_output) if params.stop else None,
            None if request.withheld else request.credit,
            params.logprobs or 0,
            params.repetition_penalty != 1.0 or bool(params.presence_penalty or params.frequency_penalty),
        )
        sequence.client_data = sample
        if index == 0:
            sample.collector = collector_of(request.prompt_ids, params.prompt_logprobs, request.pooling)
            rows_of_all = params.prompt_logprobs is not None or request.pooling == "mean" or request.hidden_layers
            sequence.whole_prompt = bool(rows_of_all)
        if request.hidden_layers:
            prompted = len(request.prompt_ids)
            sample.hidden = HiddenStates(request.hidden_layers, prompted, index, params.max_tokens)
        if params.repetition_penalty != 1.0:
            sample.token_counts = dict.fromkeys(request.prompt_ids, 0)
        return sample

    @property
    def usage(self) -> Usage:
        return Usage(self.sequence.num_prompt_tokens, self.num_sent, self.sequence.num_cached_tokens)

    @property
    def allowed(self) -> Items[int]:
        """Token ids that may be generated; empty: all."""
        return self.request.params.allowed_token_ids or ()

    @property
    def is_plain(self) -> bool:
        """Nothing but its own row of numbers decides how its tokens are drawn: no lists."""
        params = self.request.params
        return not (self.has_penalties or params.logit_bias or params.allowed_token_ids or params.min_tokens)

    def biases(self) -> dict[int, float]:
        """What is added to which token's logit now. Stop tokens are banned until there are min_tokens."""
        params = self.request.params
        biases = dict(params.logit_bias or {})
        if self.sequence.num_output_tokens < params.min_tokens:
            biases.update(dict.fromkeys(self.request.stop_token_ids, -math.inf))
        return biases

    def count(self, token_id: int) -> None:
        """A token was generated: the penalties of the next ones depend on it."""
        self.token_counts[token_id] = self.token_counts.get(token_id, 0) + 1

    def take_fresh(self) -> Fresh | None:
        """The fresh tokens with their text, as they are given out; None: there are none.

        If a stop string is complete, `stopped` is set, and tokens after it are dropped.
        """
        tokens, self.fresh = self.fresh, []
        texts: list[str] = []
        for token_id, *_ in tokens:
            text, self.stopped = self._text_of(token_id)
            texts.append(text)
            if self.stopped:
                break
        del tokens[len(texts) :]
        if not tokens:
            return None
        request, first = self.request, self.num_sent
        num_logprobs, withheld = request.params.logprobs, request.withheld
        token_ids, logprobs, tops, _ = zip(*tokens, strict=True)
        self.num_sent += len(tokens)
        if withheld:
            self.sum_logprobs += sum(logprobs)
        fresh = (
            first,
            token_ids,
            tuple(texts) if request.want_text else (),
            logprobs if withheld or num_logprobs is not None else (),
            tops if num_logprobs else (),
        )
        if request.linger_s > 0 or request.taken_up or withheld:
            self.history.append(TokenBatch(request.request_id, self.index, *fresh))
        return fresh

    def restore(self, known: KnownSample, epoch: int) -> None:
        """Stand where a sample of the same request stood in an earlier daemon: its tokens are given out already."""
        pairs = zip_longest(known.token_ids, known.logprobs, known.top_logprobs)
        tokens: list[Token] = [(token_id, logprob or 0.0, top or (), None) for token_id, logprob, top in pairs]
        self.sequence.token_ids += known.token_ids
        for token_id in known.token_ids if self.has_penalties else ():
            self.count(token_id)
        for start in range(0, len(tokens) - 1, RESTORED_BATCH):
            self.fresh = tokens[start : min(start + RESTORED_BATCH, len(tokens) - 1)]
            self.take_fresh()
        if known.finished is not None:
            self.finished = replace(known.finished, epoch=epoch)
            self.finish_reason = known.finished.finish_reason  # the last token's text may depend on it
            self.sequence.state = SequenceState.FINISHED
        self.fresh = tokens[-1:]
        self.take_fresh()
        if self.hidden is not None:
            self.hidden.skip_tokens(self.num_sent)
        if self.granted is not None:
            self.granted += self.num_sent

    def _text_of(self, token_id: int) -> tuple[str, bool]:
        """What the token adds to the text that may be given out, and whether it completes a stop string."""
        if self.detokenizer is None:
            return "", False
        ends = token_id in self.request.stop_token_ids and self.finish_reason == "stop"
        text = "" if ends and not self.request.params.include_stop_str_in_output else self.detokenizer.push(token_id)
        return (text, False) if self.stops is None else self.stops.push(text)

    def tail(self) -> str:
        """Text that was held back, once it is certain that no stop string follows."""
        if self.detokenizer is None or self.stopped:
            return ""
        text = self.detokenizer.flush()
        if self.stops is None:
            return text
        text, stopped = self.stops.push(text)
        return text if stopped else text + self.stops.flush()
