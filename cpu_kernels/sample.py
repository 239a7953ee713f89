"""The last operation of a step: one unit turns one row of logits into a token, on arrays that lie at addresses."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.np.arrayobj import make_array, populate_array

from . import table as t
from .jit import instruction
from .memory import INT64, POINTER
from .rowwise import copy_floats
from .sampling import SampledArrays, SamplingArrays, sample_row
from .table import word

NUM_SAMPLING = len(SamplingArrays._fields)


def view(context: Any, builder: Any, array_type: Any, address: Any, shape: list[Any]) -> Any:
    """A C-contiguous array (an LLVM value) of memory that somebody else owns."""
    array = make_array(array_type)(context, builder)
    size = context.get_abi_sizeof(context.get_data_type(array_type.dtype))
    strides = [INT64(size)]
    for length in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], length))
    data = builder.inttoptr(address, array.data.type)
    populate_array(array, data, shape, strides, INT64(size), None)
    return array._getvalue()


@instruction
def array_at(typing_context: Any, address: Any, shape: Any, dtype: Any) -> Any:
    """An array of `shape`, a tuple of int64, at an address."""
    result = types.Array(dtype.dtype, shape.count, "C")

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lengths = [builder.extract_value(arguments[1], i) for i in range(shape.count)]
        return view(context, builder, result, arguments[0], lengths)

    return result(types.int64, shape, dtype), generate


@instruction
def step_array(typing_context: Any, state: Any, index: Any, dtype: Any) -> Any:
    """Array `index` of the step's sampling arrays, as a vector."""
    result = types.Array(dtype.dtype, 1, "C")

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        entry = builder.add(arguments[0], builder.add(INT64(8 * t.SAMPLING), builder.mul(arguments[1], INT64(16))))
        address, length = (
            builder.load(builder.inttoptr(builder.add(entry, INT64(offset)), POINTER), align=8, typ=INT64)
            for offset in (0, 8)
        )
        return view(context, builder, result, address, [length])

    return result(types.int64, types.int64, dtype), generate


def sample(row: int, state: int, unit: int, thread: int) -> None:
    """Sample logit row ROW_BEGIN + unit; copy its logits where the step asks for them."""
    r = word(row, t.ROW_BEGIN) + unit
    vocab_size, num_rows, top_width = word(state, t.VOCAB_SIZE), word(state, t.NUM_LOGIT_ROWS), word(state, t.TOP_WIDTH)
    at = word(row, t.X) + unit * word(row, t.X_STRIDE)
    if word(state, t.LOGITS_OUT):
        copy_floats(at, word(state, t.LOGITS_OUT) + r * vocab_size * 4, vocab_size)
    params = SamplingArrays(
        step_array(state, 0, np.float32),
        step_array(state, 1, np.int32),
        step_array(state, 2, np.float32),
        step_array(state, 3, np.float32),
        step_array(state, 4, np.uint64),
        step_array(state, 5, np.int64),
        step_array(state, 6, np.int32),
        step_array(state, 7, np.int32),
        step_array(state, 8, np.float32),
        step_array(state, 9, np.float32),
        step_array(state, 10, np.float32),
        step_array(state, 11, np.int32),
        step_array(state, 12, np.int32),
        step_array(state, 13, np.int32),
        step_array(state, 14, np.int32),
        step_array(state, 15, np.int32),
        step_array(state, 16, np.float32),
        step_array(state, 17, np.int32),
        step_array(state, 18, np.int32),
    )
    sampled = SampledArrays(
        step_array(state, NUM_SAMPLING, np.int32),
        step_array(state, NUM_SAMPLING + 1, np.float32),
        array_at(word(state, t.SAMPLING + 2 * NUM_SAMPLING + 4), (num_rows, top_width), np.int32),
        array_at(word(state, t.SAMPLING + 2 * NUM_SAMPLING + 6), (num_rows, top_width), np.float32),
        step_array(state, NUM_SAMPLING + 4, np.bool_),
    )
    floats = word(state, t.SAMPLING_FLOATS)
    scratch = array_at(word(state, t.SAMPLING_SCRATCH) + thread * floats * 4, (floats,), np.float32)
    sample_row(array_at(at, (vocab_size,), np.float32), r, params, sampled, scratch)
