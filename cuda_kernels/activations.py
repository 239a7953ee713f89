"""Gated activation: out[t, i] = act(gate_up[t, i]) * gate_up[t, width + i], act one of

    silu(x)       x / (1 + exp(-x))
    gelu_tanh(x)  x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)),  u = sqrt(2 / pi) (x + 0.044715 x^3)

Grid (ceil(width / 1024), num_rows), 256 threads, four neighbours a thread.

    gate_up  (num_rows, 2 * width) float32, width a multiple of 4
    out      (num_rows, width) float32, or the model's 16-bit format where only products read it
"""

from __future__ import annotations

import math
from typing import Any

from .cache import kernel_factory
from .compiler import FLOAT32, INT32, Kernel, build, pointer
from .elements import ELEMENTS
from .intrinsics import exp2, load_f32x4
from .jit import cuda, device_function, types

THREADS = 256
_LOG2_E = math.log2(math.e)
_GELU_LINEAR = 2 * math.sqrt(2 / math.pi)
_GELU_CUBIC = 0.044715

_f32 = types.float32


@device_function
def _silu(x: Any) -> Any:
    return x / (_f32(1) + exp2(_f32(-_LOG2_E) * x))


@device_function
def _gelu_tanh(x: Any) -> Any:
    twice_u = _f32(_GELU_LINEAR) * (x + _f32(_GELU_CUBIC) * x * x * x)
    return x / (_f32(1) + exp2(_f32(-_LOG2_E) * twice_u))


ACTIVATIONS = {"silu": _silu, "gelu_tanh": _gelu_tanh}


@kernel_factory
def gated_activation(kind: str, out: str = "float32") -> Kernel:
    """Kernel for activation `kind` that writes format `out`."""
    act = ACTIVATIONS[kind]
    store_out = ELEMENTS[out].store4

    def gated_activation(gate_up: Any, out: Any, width: Any) -> None:
        row = types.int64(cuda.blockIdx.y)
        column = 4 * (cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        if column < width:
            a, b, c, d = load_f32x4(gate_up, 2 * row * width + column)
            ua, ub, uc, ud = load_f32x4(gate_up, 2 * row * width + width + column)
            store_out(out, row * width + column, act(a) * ua, act(b) * ub, act(c) * uc, act(d) * ud)

    arguments = {"gate_up": pointer(FLOAT32), "out": pointer(ELEMENTS[out].stored), "width": INT32}
    return build(gated_activation, arguments, name=f"gated_{kind}", threads=THREADS, registers=40)
