"""The last operation of a step: one unit turns one row of logits into a token, on arrays that lie at addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import carray, types

from . import table as t
from .jit import instruction, kernel
from .memory import POINTER
from .sampling import SampledArrays, SamplingArrays, sample_row
from .table import word

NUM_SAMPLING = len(SamplingArrays._fields)


@instruction
def _pointer(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], POINTER)

    return types.voidptr(types.int64), generate


def _array_reader(dtype: Any) -> Callable[[int, int], Any]:
    """A kernel that views array `index` of the step's sampling arrays."""

    @kernel
    def read(state: int, index: int) -> Any:
        at = t.SAMPLING + 2 * index
        return carray(_pointer(word(state, at)), (word(state, at + 1),), dtype)

    return read


_int32 = _array_reader(np.int32)
_int64 = _array_reader(np.int64)
_uint64 = _array_reader(np.uint64)
_float32 = _array_reader(np.float32)
_bool = _array_reader(np.bool_)


@kernel
def sample(row: int, state: int, unit: int, thread: int) -> None:
    """Sample logit row ROW_BEGIN + unit; copy its logits where the step asks for them."""
    vocab_size, top_width, s = word(state, t.VOCAB_SIZE), word(state, t.TOP_WIDTH), state
    at, r = word(row, t.X) + unit * word(row, t.X_STRIDE), word(row, t.ROW_BEGIN) + unit
    logits = carray(_pointer(at), (vocab_size,), np.float32)
    if word(state, t.LOGITS_OUT):
        copy = carray(_pointer(word(state, t.LOGITS_OUT) + r * vocab_size * 4), (vocab_size,), np.float32)
        copy[:] = logits
    sampling = SamplingArrays(
        _float32(s, 0), _int32(s, 1), _float32(s, 2), _float32(s, 3), _uint64(s, 4), _int64(s, 5), _int32(s, 6),
        _int32(s, 7), _float32(s, 8), _float32(s, 9), _float32(s, 10), _int32(s, 11), _int32(s, 12), _int32(s, 13),
        _int32(s, 14), _int32(s, 15), _float32(s, 16), _int32(s, 17), _int32(s, 18),
    )  # fmt: skip
    first = NUM_SAMPLING
    tops = word(state, t.NUM_LOGIT_ROWS), top_width
    top_tokens = carray(_pointer(word(state, t.SAMPLING + 2 * first + 4)), tops, np.int32)
    top_logprobs = carray(_pointer(word(state, t.SAMPLING + 2 * first + 6)), tops, np.float32)
    sampled = SampledArrays(_int32(s, first), _float32(s, first + 1), top_tokens, top_logprobs, _bool(s, first + 4))
    floats = word(state, t.SAMPLING_FLOATS)
    scratch = carray(_pointer(word(state, t.SAMPLING_SCRATCH) + thread * floats * 4), (floats,), np.float32)
    sample_row(logits, r, sampling, sampled, scratch)
