"""From one row of logits to one token: logprobs, penalties, temperature, top-k, top-p, min-p and the draw.

    sample_row(logits, r, params, sampled, scratch)

`logits` (V,) float32 is row r; it is not changed. Entry r of every array in `sampled` is written and no other, so rows
may be divided over threads. `scratch` is float32, one array a thread, `scratch_floats(V)` long; nothing in it survives.

What is computed, so that another implementation can agree token for token:

    scaled[v] = (processed[v] - max(processed)) / temperature           float32, rounded after each operation
    weight[v] = rint(exp(scaled[v]) * 2**40)                            int64; v is drawn with weight[v] / total

Candidates rank by scaled logit, equal ones by token id. top-k keeps the first k; top-p then the fewest whose weights
reach ceil(top_p * total of what top-k kept); min-p then those with scaled >= log(min_p). The draw inverts the
cumulative weights of the kept candidates in order of token id at (u * total) >> 64, u from Philox.

A row with NaN or +inf, or with nothing above -inf left, sets its error flag, and so does a token id outside the
vocabulary; its token is -1 and its logprob 0. Unused entries of the top lists are -1 and 0.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .candidates import BLOCK, Float32, columns, find, keep, log_total, num_blocks, peak, scale, spare_floats
from .jit import entry_point, kernel
from .philox import draw_u64, scale_u64

Int32 = NDArray[np.int32]

_ZERO = np.float32(0.0)
_MINUS_INFINITY = np.float32(-np.inf)
_NEVER = np.int64(0x7FFFFFFFFFFFFFFF)


class SamplingArrays(NamedTuple):
    """`SamplingBatch` for kernels: the same fields, C-contiguous. A `*_start` of length 1: no row has such a list."""

    temperature: Float32
    top_k: Int32
    top_p: Float32
    min_p: Float32
    seeds: NDArray[np.uint64]
    counters: NDArray[np.int64]
    num_logprobs: Int32
    targets: Int32
    repetition_penalty: Float32
    presence_penalty: Float32
    frequency_penalty: Float32
    penalty_start: Int32
    penalty_tokens: Int32
    penalty_counts: Int32
    bias_start: Int32
    bias_tokens: Int32
    bias_values: Float32
    allowed_start: Int32
    allowed_tokens: Int32


class SampledArrays(NamedTuple):
    """Where `sample_row` writes: the first five fields of `StepResult`."""

    tokens: Int32  # (R,)
    logprobs: Float32  # (R,)
    top_tokens: Int32  # (R, K)
    top_logprobs: Float32  # (R, K)
    numeric_errors: NDArray[np.bool_]  # (R,)


def scratch_floats(vocab_size: int) -> int:
    """float32 entries of scratch that `sample_row` needs: a multiple of 16, so that threads share no cache line."""
    blocks = -(-vocab_size // BLOCK)
    return -(-(2 * vocab_size + blocks + spare_floats(vocab_size)) // 16) * 16


@kernel
def _span(start: Int32, r: int) -> tuple[int, int]:
    """Row r's part of a ragged list."""
    return (start[r], start[r + 1]) if len(start) > 1 else (0, 0)


@kernel
def _process(logits: Float32, r: int, params: SamplingArrays, processed: Float32) -> bool:
    """processed = logits with row r's allowed tokens, bias and penalties; False if an id is outside the vocabulary."""
    vocab_size = len(logits)
    first, last = _span(params.allowed_start, r)
    for i in range(vocab_size):
        processed[i] = logits[i] if first == last else _MINUS_INFINITY
    for i in range(first, last):
        token = params.allowed_tokens[i]
        if not 0 <= token < vocab_size:
            return False
        processed[token] = logits[token]
    first, last = _span(params.bias_start, r)
    for i in range(first, last):
        token = params.bias_tokens[i]
        if not 0 <= token < vocab_size:
            return False
        processed[token] += params.bias_values[i]
    first, last = _span(params.penalty_start, r)
    for i in range(first, last):
        token = params.penalty_tokens[i]
        if not 0 <= token < vocab_size:
            return False
        logit, count = processed[token], params.penalty_counts[i]
        repetition = params.repetition_penalty[r]
        logit = logit / repetition if logit > _ZERO else logit * repetition
        logit -= params.frequency_penalty[r] * np.float32(count)
        processed[token] = logit - params.presence_penalty[r] if count > 0 else logit
    return True


@kernel
def _is_plain(r: int, params: SamplingArrays) -> bool:
    """Nothing changes row r's logits before the temperature."""
    for start in (params.allowed_start, params.bias_start, params.penalty_start):
        first, last = _span(start, r)
        if first != last:
            return False
    return True


@kernel
def _choose(
    logits: Float32,
    best: int,
    r: int,
    params: SamplingArrays,
    scaled: Float32,
    weights: Float32,
    block_max: Float32,
    spare: Float32,
) -> int:
    """The sampled token of row r, whose first maximum is at `best`; -1 where nothing may be chosen."""
    source = logits
    if not _is_plain(r, params):
        if not _process(logits, r, params, scaled):
            return -1
        source = scaled
        best, _ = peak(source, block_max)
    temperature = params.temperature[r]
    if best < 0 or temperature == _ZERO:
        return best
    scale(source, source[best], temperature, scaled, weights, block_max)
    threshold, ties = keep(scaled, weights, block_max, params.top_k[r], params.top_p[r], params.min_p[r], spare)
    _, total = find(scaled, weights, block_max, threshold, ties, _NEVER)
    point = scale_u64(draw_u64(params.seeds[r], params.counters[r]), total)
    token: int = find(scaled, weights, block_max, threshold, ties, point)[0]
    return token


@kernel
def _best(logits: Float32, block_max: Float32, tokens: Int32, values: Float32) -> int:
    """Fill `tokens` and `values` with the largest logits, largest first and equal ones by token id; return how many."""
    size = 0
    if len(tokens) == 0:
        return size
    for b in range(len(block_max)):
        if size == len(tokens) and not block_max[b] > values[size - 1]:
            continue
        for i in columns(b, len(logits)):
            if size == len(tokens):
                if not logits[i] > values[size - 1]:
                    continue
                size -= 1
            place = size
            while place > 0 and values[place - 1] < logits[i]:
                tokens[place], values[place] = tokens[place - 1], values[place - 1]
                place -= 1
            tokens[place], values[place] = i, logits[i]
            size += 1
    return size


@kernel
def sample_row(logits: Float32, r: int, params: SamplingArrays, sampled: SampledArrays, scratch: Float32) -> None:
    """Sample (or score the target of) row r; see the top of this file."""
    vocab_size = len(logits)
    sampled.tokens[r], sampled.logprobs[r] = -1, _ZERO
    for i in range(sampled.top_tokens.shape[1]):
        sampled.top_tokens[r, i], sampled.top_logprobs[r, i] = -1, _ZERO
    sampled.numeric_errors[r] = True

    scaled, weights = scratch[:vocab_size], scratch[vocab_size : 2 * vocab_size]
    blocks_end = 2 * vocab_size + num_blocks(vocab_size)
    block_max, spare = scratch[2 * vocab_size : blocks_end], scratch[blocks_end:]
    best, usable = peak(logits, block_max)
    if not usable:
        return
    maximum, normalizer = np.float64(logits[best]), log_total(logits, logits[best], weights)
    num_best = max(0, min(params.num_logprobs[r], sampled.top_tokens.shape[1]))
    best_tokens, best_values = sampled.top_tokens[r, :num_best], sampled.top_logprobs[r, :num_best]
    num_best = _best(logits, block_max, best_tokens, best_values)

    token = params.targets[r]
    if token < 0:
        token = _choose(logits, best, r, params, scaled, weights, block_max, spare)
    if not 0 <= token < vocab_size:
        for i in range(num_best):
            best_tokens[i], best_values[i] = -1, _ZERO
        return
    for i in range(num_best):
        best_values[i] = np.float32(np.float64(best_values[i]) - maximum - normalizer)
    sampled.tokens[r] = token
    sampled.logprobs[r] = np.float32(np.float64(logits[token]) - maximum - normalizer)
    sampled.numeric_errors[r] = False


@entry_point
def sample_rows(logits: Float32, params: SamplingArrays, sampled: SampledArrays, scratch: Float32) -> None:
    """`sample_row` for all rows of logits (R, V), on the caller's thread."""
    for r in range(len(logits)):
        sample_row(logits[r], r, params, sampled, scratch)
