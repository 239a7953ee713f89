"""What sampling means, written as plainly as possible: the oracle that every sampling kernel is held against.

The order of operations is `SamplingBatch`'s. Everything up to the scaled logits is float32, rounded after every
operation, so that a kernel can agree bit for bit; sums are of integers, so that they have no order:

    scaled[v] = (processed[v] - max(processed)) / temperature           float32, at most 0
    weight[v] = rint(exp(scaled[v]) * 2**40)                            integer; v is drawn with weight[v] / total

Candidates are ranked by scaled logit, equal ones by token id. top-k keeps the first k; top-p then keeps the fewest
whose weights reach top_p * (their total); min-p then keeps scaled >= log(min_p). The draw is the inverse of the
cumulative weights over the kept candidates in order of token id, at (u * total) >> 64 with a 64-bit u from Philox.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kvpool.model.batch import Float32, Int32, SamplingBatch

WEIGHT_ONE = 2.0**40


def philox4x32_10(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32 with 10 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & 0xFFFFFFFF,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & 0xFFFFFFFF,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def draw_u64(seed: int, counter: int) -> int:
    """The 64 random bits of output token number `counter` of the sequence with this seed."""
    words = philox4x32_10((counter & 0xFFFFFFFF, counter >> 32, 0, 0), (seed & 0xFFFFFFFF, seed >> 32))
    return words[1] << 32 | words[0]


def sample(logits: Float32, batch: SamplingBatch) -> tuple[Int32, Float32, Int32, Float32, NDArray[np.bool_]]:
    """logits (R, V) -> tokens (R,), logprobs (R,), top_tokens (R, K), top_logprobs (R, K), numeric_errors (R,).

    A row in error has token -1 and logprob 0; unused entries of the top lists are -1 and 0.
    """
    num_rows = len(logits)
    width = max(0, int(batch.num_logprobs.max(initial=0)))
    tokens = np.full(num_rows, -1, dtype=np.int32)
    logprobs = np.zeros(num_rows, dtype=np.float32)
    top_tokens = np.full((num_rows, width), -1, dtype=np.int32)
    top_logprobs = np.zeros((num_rows, width), dtype=np.float32)
    errors = np.zeros(num_rows, dtype=np.bool_)
    for r in range(num_rows):
        token = int(batch.targets[r])
        if usable(logits[r]) and token < 0:
            token = _choose(logits[r], batch, r)
        if not usable(logits[r]) or token < 0:
            errors[r] = True
            continue
        with np.errstate(over="ignore"):
            row_logprobs = log_softmax(logits[r]).astype(np.float32)
        tokens[r], logprobs[r] = token, row_logprobs[token]
        best = descending(logits[r])[: max(0, int(batch.num_logprobs[r]))]
        top_tokens[r, : best.size] = best
        top_logprobs[r, : best.size] = row_logprobs[best]
    return tokens, logprobs, top_tokens, top_logprobs, errors


def usable(row: Float32) -> bool:
    """No NaN, no +inf, and something above -inf."""
    return bool(np.isfinite(row.max()) and not np.isnan(row).any())


def log_softmax(row: Float32) -> NDArray[np.float64]:
    shifted: NDArray[np.float64] = row.astype(np.float64) - float(row.max())
    return shifted - math.log(np.exp(shifted).sum())


def descending(values: Float32) -> NDArray[np.intp]:
    """Indices from best to worst, equal values by index."""
    ranked: NDArray[np.intp] = np.argsort(-values, kind="stable")
    return ranked


def process(row: Float32, batch: SamplingBatch, r: int) -> Float32:
    """Allowed tokens, bias and penalties applied to a copy of raw logits (V,)."""
    allowed = _ragged(batch.allowed_start, r)
    processed = row.copy()
    if allowed.stop > allowed.start:
        processed = np.full_like(row, -np.inf)
        ids = batch.allowed_tokens[allowed]
        processed[ids] = row[ids]
    bias = _ragged(batch.bias_start, r)
    for token, value in zip(batch.bias_tokens[bias], batch.bias_values[bias], strict=True):
        processed[token] += value
    penalty = _ragged(batch.penalty_start, r)
    repetition, presence = batch.repetition_penalty[r], batch.presence_penalty[r]
    for token, count in zip(batch.penalty_tokens[penalty], batch.penalty_counts[penalty], strict=True):
        logit = processed[token]
        logit = logit / repetition if logit > 0 else logit * repetition
        logit = logit - batch.frequency_penalty[r] * np.float32(count)
        processed[token] = logit - presence if count > 0 else logit
    return processed


def kept_weights(scaled: Float32, top_k: int, top_p: float, min_p: float) -> NDArray[np.int64]:
    """(V,) weight of each candidate that survives top-k, top-p and min-p, 0 for the others."""
    weights: NDArray[np.int64] = np.rint(np.exp(scaled.astype(np.float64)) * WEIGHT_ONE).astype(np.int64)
    ranked = descending(scaled)
    if 0 < top_k < scaled.size:
        weights[ranked[top_k:]] = 0
    if top_p < 1.0:
        cumulative = weights[ranked].cumsum()
        goal = max(1, math.ceil(top_p * float(cumulative[-1])))
        weights[ranked[np.searchsorted(cumulative, goal) + 1 :]] = 0
    if min_p > 0.0:
        weights[scaled < np.float32(math.log(min_p))] = 0
    return weights


def _choose(row: Float32, batch: SamplingBatch, r: int) -> int:
    """The sampled token of a usable row; -1 where processing leaves no finite maximum."""
    with np.errstate(all="ignore"):
        processed = process(row, batch, r)
        if not usable(processed):
            return -1
        if batch.temperature[r] == 0:
            return int(processed.argmax())
        scaled = (processed - processed.max()) / batch.temperature[r]
        weights = kept_weights(scaled, int(batch.top_k[r]), float(batch.top_p[r]), float(batch.min_p[r]))
    cumulative = weights.cumsum()
    point = draw_u64(int(batch.seeds[r]), int(batch.counters[r])) * int(cumulative[-1]) >> 64
    return int(np.searchsorted(cumulative, point, side="right"))


def _ragged(start: Int32, r: int) -> slice:
    """Row r's part of a CSR list; a `start` of one entry means that no row has any."""
    return slice(int(start[r]), int(start[r + 1])) if start.size > 1 else slice(0, 0)
