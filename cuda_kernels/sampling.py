"""From logits to tokens on the device: logprobs, penalties, temperature, top-k, top-p, min-p and the draw.

The meaning is `SamplingBatch`'s, the arithmetic that of the CPU's `sampling.py`, so both devices choose the same token:

    scaled[v] = (processed[v] - max(processed)) / temperature           float32, rounded after each operation
    weight[v] = rint(exp(scaled[v]) * 2**40)                            int64; v is drawn with weight[v] / total

Grid (R,), one block of 512 threads a row (candidates.py has the passes). A row with NaN or +inf, or with nothing above
-inf left, sets its error flag, and so does a token id outside the vocabulary; its token is -1 and its logprob 0.

    logits                      (R, vocab_size) float32
    temperature, ...            `SamplingBatch`'s fields; every *_start is (R + 1,)
    min_p_floor                 (R,) float32: log(min_p), -inf where off
    scaled                      (R, vocab_size) float32 scratch
    tokens, logprobs            (R,) int32, float32
    top_tokens, top_logprobs    (R, top_width) int32, float32; unused entries are -1 and 0
    errors                      (R,) uint8
"""

from __future__ import annotations

import math
from typing import Any

from .cache import kernel_factory
from .candidates import (
    NO_WEIGHT,
    SHARED_SIZE,
    THREADS,
    WARPS,
    WEIGHT_ONE,
    find,
    from_key,
    key,
    measure,
    peak,
    search,
    total_weight,
    weight,
)
from .compiler import FLOAT32, INT32, INT64, UINT64, Kernel, build, pointer
from .intrinsics import add, multiply
from .jit import cuda, device_function, types
from .philox import philox_u64
from .reductions import block_max

MAX_TOP = 64  # entries of a top list

_i32, _i64, _u64, _f32, _f64 = types.int32, types.int64, types.uint64, types.float32, types.float64
_EVERYTHING = 1 << 32  # beyond the distance of any two numbers


@device_function
def _first_tied(
    values: Any, start: Any, size: Any, top: Any, distance: Any, after: Any, thread: Any, shared: Any
) -> Any:
    """The first token id after `after` at this distance from key `top`."""
    nearest = _i64(size)
    for token in range(thread, size, THREADS):
        if token > after and top - key(values[start + token]) == distance:
            nearest = min(nearest, _i64(token))
    return -block_max(-nearest, shared, WARPS)


@device_function
def _list_best(
    logits: Any,
    start: Any,
    size: Any,
    wanted: Any,
    scale: Any,
    top_tokens: Any,
    top_logprobs: Any,
    out: Any,
    lists: Any,
    thread: Any,
    shared: Any,
) -> None:
    """Write the `wanted` best candidates, best first. `scale` is (maximum, normalizer), both float64; `lists` is
    shared memory for their tokens, their keys and a counter."""
    tokens, keys, filled = lists
    maximum, normalizer = scale
    top = key(_f32(maximum))
    distance, under = search(logits, start, size, top, _i64(_EVERYTHING), wanted, False, thread, shared)
    if thread == 0:
        filled[0] = 0
    cuda.syncthreads()
    for token in range(thread, size, THREADS):
        here = key(logits[start + token])
        if top - here < distance:
            place = cuda.atomic.add(filled, 0, 1)
            tokens[place], keys[place] = _i64(token), here
    cuda.syncthreads()
    after = _i64(-1)
    for place in range(under, wanted):
        after = _first_tied(logits, start, size, top, distance, after, thread, shared)
        if thread == 0:
            tokens[place], keys[place] = after, top - distance
    cuda.syncthreads()
    if thread < wanted:
        token, mine = tokens[thread], keys[thread]
        rank = 0
        for other in range(wanted):
            if keys[other] > mine or (keys[other] == mine and tokens[other] < token):
                rank += 1
        top_tokens[out + rank] = token
        top_logprobs[out + rank] = _f32(_f64(logits[start + token]) - maximum - normalizer)


@device_function
def _process(
    logits: Any,
    processed: Any,
    start: Any,
    size: Any,
    allowed: Any,
    bias: Any,
    penalty: Any,
    thread: Any,
) -> Any:
    """processed = logits with the row's lists applied; False if a token id lies outside the vocabulary.

    `allowed` is (first, last, tokens), `bias` (first, last, tokens, values), `penalty` (first, last, tokens, counts,
    repetition, frequency, presence).
    """
    bad = _i32(0)
    first, last, tokens = allowed
    for token in range(thread, size, THREADS):
        processed[start + token] = logits[start + token] if first == last else _f32(-math.inf)
    cuda.syncthreads()
    for i in range(first + thread, last, THREADS):
        token = tokens[i]
        if token >= 0 and token < size:
            processed[start + token] = logits[start + token]
        else:
            bad = _i32(1)
    cuda.syncthreads()
    first, last, tokens, amounts = bias
    if thread == 0:  # in order: a token may have a bias and a ban
        for i in range(first, last):
            token = tokens[i]
            if token >= 0 and token < size:
                processed[start + token] += amounts[i]
            else:
                bad = _i32(1)
    cuda.syncthreads()
    first, last, tokens, counts, repetition, frequency, presence = penalty
    for i in range(first + thread, last, THREADS):
        token = tokens[i]
        if token >= 0 and token < size:
            logit, count = processed[start + token], counts[i]
            logit = logit / repetition if logit > _f32(0) else multiply(logit, repetition)
            logit = add(logit, -multiply(frequency, _f32(count)))
            processed[start + token] = add(logit, -presence) if count > 0 else logit
        else:
            bad = _i32(1)
    return cuda.syncthreads_or(bad) == 0


@device_function
def _keep(scaled: Any, start: Any, size: Any, top_k: Any, top_p: Any, floor: Any, thread: Any, shared: Any) -> Any:
    """(threshold, ties) of what top-k, top-p and min-p leave: all at distance < threshold, the first `ties` at it."""
    threshold, ties, top = _i64(NO_WEIGHT), _i64(0), _i64(0)
    if top_k > 0 and top_k < measure(scaled, start, size, top, threshold, False, thread, shared):
        threshold, under = search(scaled, start, size, top, threshold, _i64(top_k), False, thread, shared)
        ties = top_k - under
    if top_p < _f32(1):
        total = measure(scaled, start, size, top, threshold, True, thread, shared)
        unit = weight(from_key(-threshold))
        goal = max(_i64(1), _i64(math.ceil(_f64(top_p) * _f64(total + ties * unit))))
        if total >= goal:
            threshold, total = search(scaled, start, size, top, threshold, goal, True, thread, shared)
            unit = weight(from_key(-threshold))
        ties = (goal - total + unit - 1) // unit
    if -key(floor) < threshold:
        threshold, ties = 1 - key(floor), _i64(0)
    return threshold, ties


@kernel_factory
def sample() -> Kernel:
    """The kernel."""

    def sample(
        logits: Any,
        temperature: Any,
        top_k: Any,
        top_p: Any,
        min_p_floor: Any,
        seeds: Any,
        counters: Any,
        num_logprobs: Any,
        targets: Any,
        repetition_penalty: Any,
        presence_penalty: Any,
        frequency_penalty: Any,
        penalty_start: Any,
        penalty_tokens: Any,
        penalty_counts: Any,
        bias_start: Any,
        bias_tokens: Any,
        bias_values: Any,
        allowed_start: Any,
        allowed_tokens: Any,
        scaled: Any,
        tokens: Any,
        logprobs: Any,
        top_tokens: Any,
        top_logprobs: Any,
        errors: Any,
        vocab_size: Any,
        top_width: Any,
    ) -> None:
        shared = cuda.shared.array(SHARED_SIZE, types.int64)
        lists = (
            cuda.shared.array(MAX_TOP, types.int64),
            cuda.shared.array(MAX_TOP, types.int64),
            cuda.shared.array(1, types.int32),
        )
        row, thread = cuda.blockIdx.x, _i64(cuda.threadIdx.x & (THREADS - 1))
        start, size, out = _i64(row) * vocab_size, _i64(vocab_size), _i64(row) * top_width
        for i in range(thread, top_width, THREADS):
            top_tokens[out + i], top_logprobs[out + i] = -1, _f32(0)
        best = peak(logits, start, size, thread, shared)
        token = _i64(-1)
        if best >= 0:
            token = _i64(targets[row])
        if best >= 0 and token < 0:
            token = best
            plain = (
                penalty_start[row] == penalty_start[row + 1]
                and bias_start[row] == bias_start[row + 1]
                and allowed_start[row] == allowed_start[row + 1]
            )
            if not plain:
                allowed = allowed_start[row], allowed_start[row + 1], allowed_tokens
                bias = bias_start[row], bias_start[row + 1], bias_tokens, bias_values
                penalty = (
                    penalty_start[row],
                    penalty_start[row + 1],
                    penalty_tokens,
                    penalty_counts,
                    repetition_penalty[row],
                    frequency_penalty[row],
                    presence_penalty[row],
                )
                fine = _process(logits, scaled, start, size, allowed, bias, penalty, thread)
                token = peak(scaled, start, size, thread, shared) if fine else _i64(-1)
            if token >= 0 and temperature[row] != _f32(0):
                maximum = logits[start + token] if plain else scaled[start + token]
                cuda.syncthreads()
                for i in range(thread, size, THREADS):
                    value = logits[start + i] if plain else scaled[start + i]
                    scaled[start + i] = add(value, -maximum) / temperature[row]
                cuda.syncthreads()
                threshold, ties = _keep(scaled, start, size, top_k[row], top_p[row], min_p_floor[row], thread, shared)
                bits = philox_u64(seeds[row], _u64(counters[row]))
                token = find(scaled, start, size, threshold, ties, bits, thread, shared)
        if token < 0 or token >= size:
            if thread == 0:
                tokens[row], logprobs[row], errors[row] = -1, _f32(0), 1
            return
        maximum = _f64(logits[start + best])
        total = total_weight(logits, start, size, logits[start + best], thread, shared)
        normalizer = math.log(_f64(total) / WEIGHT_ONE)
        if thread == 0:
            tokens[row], errors[row] = token, 0
            logprobs[row] = _f32(_f64(logits[start + token]) - maximum - normalizer)
        wanted = min(_i64(num_logprobs[row]), min(_i64(top_width), size))
        if wanted > 0:
            _list_best(
                logits, start, size, wanted, (maximum, normalizer), top_tokens, top_logprobs, out, lists, thread, shared
            )

    arguments = {
        "logits": pointer(FLOAT32),
        "temperature": pointer(FLOAT32),
        "top_k": pointer(INT32),
        "top_p": pointer(FLOAT32),
        "min_p_floor": pointer(FLOAT32),
        "seeds": pointer(UINT64),
        "counters": pointer(INT64),
        "num_logprobs": pointer(INT32),
        "targets": pointer(INT32),
        "repetition_penalty": pointer(FLOAT32),
        "presence_penalty": pointer(FLOAT32),
        "frequency_penalty": pointer(FLOAT32),
        "penalty_start": pointer(INT32),
        "penalty_tokens": pointer(INT32),
        "penalty_counts": pointer(INT32),
        "bias_start": pointer(INT32),
        "bias_tokens": pointer(INT32),
        "bias_values": pointer(FLOAT32),
        "allowed_start": pointer(INT32),
        "allowed_tokens": pointer(INT32),
        "scaled": pointer(FLOAT32),
        "tokens": pointer(INT32),
        "logprobs": pointer(FLOAT32),
        "top_tokens": pointer(INT32),
        "top_logprobs": pointer(FLOAT32),
        "errors": pointer(types.uint8),
        "vocab_size": INT32,
        "top_width": INT32,
    }
    return build(sample, arguments, name="sample", threads=THREADS, registers=112)
