"""What every CUDA kernel must compute, slowly and plainly in NumPy float64; and the formats it computes with."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from kvpool.cpu_kernels.groups import Codes

Float = NDArray[np.floating[Any]]
Int = NDArray[np.integer[Any]]

FORMATS: dict[str, Any] = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "int8": np.int8,
    "float8_e4m3": ml_dtypes.float8_e4m3fn,
}
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-3, "float16": 2e-3, "int8": 2e-3, "float8_e4m3": 2e-3}
LARGEST_CODE = {"int8": 127, "float8_e4m3": 448}


def stored(values: Float, element: str) -> NDArray[Any]:
    """Numbers as kernels store them: float32, or the 16 or 8 bits of the nearest number of the format."""
    rounded = np.asarray(values, np.float32)
    rounded = (np.rint(rounded) if element == "int8" else rounded).astype(FORMATS[element])
    return rounded if element == "float32" else rounded.view(f"u{rounded.itemsize}")


def values(array: NDArray[Any], element: str) -> NDArray[np.float64]:
    """The inverse of `stored`."""
    return np.asarray(array).view(FORMATS[element]).astype(np.float64)


def head_scales(heads: Float, element: str) -> Float:
    """The scale of each head of an 8-bit format: heads (..., head_dim) -> (...)."""
    largest = np.abs(heads).max(axis=-1)
    return np.where(largest > 0, largest / LARGEST_CODE[element], 1).astype(np.float32)


def assert_close(got: Float, expected: Float, element: str) -> None:
    """The error is within the format's tolerance, in the mean square and (a few roundings more) at the worst number."""
    assert got.shape == expected.shape
    assert np.isfinite(got).all()
    difference = got - expected
    norm = np.sqrt(np.sum(difference**2) / max(np.sum(np.square(expected)), 1e-30))
    worst = np.max(np.abs(difference), initial=0) / max(np.max(np.abs(expected), initial=0), 1e-30)
    assert norm < TOLERANCE[element], f"relative error {norm:.2e} in the mean square, {worst:.2e} at worst"
    assert worst < 3 * TOLERANCE[element], f"relative error {worst:.2e} at worst"


def code_values(matrix: Codes) -> NDArray[np.float64]:
    """(N, K): the numbers that codes stand for."""
    groups = matrix.codes.reshape(*matrix.scale.shape, matrix.size).astype(np.float64)
    scale = matrix.scale.astype(np.float64)[..., None]
    least = -128 * scale if matrix.least is None else matrix.least.astype(np.float64)[..., None]
    return (scale * groups + least).reshape(matrix.codes.shape)


def rms_norm(x: Float, weight: Float, eps: float) -> Float:
    x = x.astype(np.float64)
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def gated_activation(kind: str, gate_up: Float) -> Float:
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=1)
    if kind == "silu":
        return gate / (1 + np.exp(-gate)) * up
    return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up


def rotate(x: Float, cos: Float, sin: Float) -> Float:
    """Rotary embedding by halves: x (heads, head_dim) at one position, cos and sin (rotary_dim / 2,)."""
    half = len(cos)
    out = x.astype(np.float64)
    first, second = x[:, :half].astype(np.float64), x[:, half : 2 * half].astype(np.float64)
    out[:, :half] = first * cos - second * sin
    out[:, half : 2 * half] = second * cos + first * sin
    return out


def attention(query: Float, keys: Float, value: Float, scale: float) -> Float:
    """One query (heads, head_dim) over keys and values (tokens, kv_heads, head_dim) that it sees: (heads, head_dim)."""
    group = query.shape[0] // keys.shape[1]
    out = np.zeros(query.shape)
    for head in range(query.shape[0]):
        scores = keys[:, head // group].astype(np.float64) @ query[head].astype(np.float64) * scale
        weights = np.exp(scores - scores.max())
        out[head] = weights / weights.sum() @ value[:, head // group].astype(np.float64)
    return out
