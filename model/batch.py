"""One step's input and output as plain arrays: what the daemon hands to a back end, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]


def _empty_int32() -> Int32:
    return np.zeros(0, dtype=np.int32)


def _empty_int64() -> Int64:
    return np.zeros(0, dtype=np.int64)


def _start_int32() -> Int32:
    return np.zeros(1, dtype=np.int32)


@dataclass(slots=True)
class SamplingBatch:
    """How each of the R logit rows becomes a token. Ragged lists are CSR: `x_start` (R + 1,) indexes `x_*`.

    Order of operations on a row (the order of vLLM's and Transformers' processors): logprobs are taken of the raw
    logits; then allowed-token mask, bias and bans (`bias_values` of -inf), penalties, temperature, top-k, top-p, min-p,
    draw.
    Randomness is Philox4x32-10 with key `seeds[r]` and counter (`counters[r]`, 0, 0, 0): it depends on nothing else.
    """

    temperature: Float32  # (R,) 0: greedy
    top_k: Int32  # (R,) 0: off
    top_p: Float32  # (R,) 1: off
    min_p: Float32  # (R,) 0: off
    seeds: NDArray[np.uint64]  # (R,)
    counters: Int64  # (R,) index of the token in its sequence's output
    num_logprobs: Int32  # (R,) how many best candidates to report; -1: only the chosen token's logprob
    targets: Int32  # (R,) >= 0: do not sample, report this token and its logprob (prompt logprobs); -1: sample
    repetition_penalty: Float32  # (R,) 1: off; over prompt and output tokens
    presence_penalty: Float32  # (R,) 0: off; over output tokens
    frequency_penalty: Float32  # (R,) 0: off; over output tokens
    penalty_start: Int32 = field(default_factory=_start_int32)  # (R + 1,)
    penalty_tokens: Int32 = field(default_factory=_empty_int32)  # distinct token ids seen in prompt or output
    penalty_counts: Int32 = field(default_factory=_empty_int32)  # times each was generated; 0: only in the prompt
    bias_start: Int32 = field(default_factory=_start_int32)  # (R + 1,)
    bias_tokens: Int32 = field(default_factory=_empty_int32)
    bias_values: Float32 = field(default_factory=lambda: np.zeros(0, dtype=np.float32))  # -inf: banned
    allowed_start: Int32 = field(default_factory=_start_int32)  # (R + 1,)
    allowed_tokens: Int32 = field(default_factory=_empty_int32)  # an empty list allows every token


@dataclass(slots=True)
class StepBatch:
    """A ragged batch: S sequences contribute T tokens; decodes and prefill chunks mix freely.

    Sequence s owns rows query_start[s] .. query_start[s + 1] - 1, which are its tokens at positions seq_lens[s] - n ..
    seq_lens[s] - 1 (n rows). Its token at position p lives in slot
    block_tables[s, p // block_size] * block_size + p % block_size.
    """

    tokens: Int32  # (T,)
    positions: Int32  # (T,)
    slot_mapping: Int64  # (T,) where this token's K and V go
    query_start: Int32  # (S + 1,)
    seq_lens: Int32  # (S,) tokens in the pool once this step has run
    block_tables: Int32  # (S, max_blocks) entries past the sequence's length are undefined and never read
    logit_rows: Int32  # (R,) which of the T rows need logits
    sampling: SamplingBatch  # R rows
    want_logits: bool = False  # also return the (R, vocab_size) raw logits
    want_hidden: bool = False  # also return the (R, hidden_size) rows after the final norm, of which logits are made
    layers: tuple[int, ...] = ()  # also return the output of these layers, in ascending order ...
    layer_rows: Int32 = field(default_factory=_empty_int32)  # (N,) ... for these of the T rows
    next_slots: Int64 = field(default_factory=_empty_int64)  # (S,) or none: where the tokens sampled now will go; -1:
    # nowhere, since it is the sequence's last one, or its place is not known yet

    @property
    def only_tokens(self) -> bool:
        """Nothing is wanted but what is sampled."""
        return not (self.want_logits or self.want_hidden or self.layers)


@dataclass(slots=True)
class StepResult:
    """What one step produced, for its R logit rows, in order."""

    tokens: Int32  # (R,) sampled (or target) token ids
    logprobs: Float32  # (R,) natural log of the raw distribution at that token
    top_tokens: Int32  # (R, K) best candidates, best first; K = max(num_logprobs) of the step, unused entries -1
    top_logprobs: Float32  # (R, K)
    numeric_errors: NDArray[np.bool_]  # (R,) the row held NaN or +inf: fail this sequence alone
    compute_s: float  # seconds the device worked
    logits: Float32 | None = None
    hidden: Float32 | None = None
    layer_outputs: Float32 | None = None  # (len(layers), N, hidden_size)

    def best(self, row: int, count: int) -> tuple[tuple[int, float], ...]:
        """The row's best candidates, (token_id, logprob), best first."""
        tokens, logprobs = self.top_tokens[row, :count], self.top_logprobs[row, :count]
        return tuple(zip(tokens.tolist(), logprobs.tolist(), strict=True))
