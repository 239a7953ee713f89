"""Rotary frequencies, with the published ways of stretching them beyond the trained context."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ..config import ModelConfig, RopeScaling
from ..program import Rope

Float32 = NDArray[np.float32]


def rope(config: ModelConfig) -> Rope:
    """The rotary embedding of a model's full-attention layers.

    Raises ValueError for a scaling kind that is not none, linear, llama3 or yarn.
    """
    rotary_dim = config.rotary_dim or config.head_dim
    scaling = config.rope_scaling
    plain = inverse_frequencies(config.rope_theta, rotary_dim)
    if scaling.kind == "none":
        return _rope(plain)
    if scaling.kind == "linear":
        return _rope(plain / np.float32(scaling.factor))
    if scaling.kind == "llama3":
        return _rope(plain / llama3_divisors(scaling, config.rope_theta, rotary_dim))
    if scaling.kind == "yarn":
        return _rope(_yarn(plain, scaling, config.rope_theta, rotary_dim), scaling.attention_factor)
    raise ValueError(f"rope scaling {scaling.kind!r} is unknown; set rope_scaling to none, linear, llama3 or yarn")


def local_rope(config: ModelConfig) -> Rope:
    """The rotary embedding of sliding-window layers: never scaled, with a theta of its own where the model has one."""
    theta = config.rope_local_theta or config.rope_theta
    return _rope(inverse_frequencies(theta, config.rotary_dim or config.head_dim))


def inverse_frequencies(theta: float, rotary_dim: int) -> Float32:
    """theta ** (-2 i / rotary_dim) for i < rotary_dim / 2, float32 throughout as Transformers computes it."""
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    frequencies: Float32 = np.float32(1.0) / np.power(np.float32(theta), exponents, dtype=np.float32)
    return frequencies


def _rope(inv_freq: Float32, attention_factor: float = 1.0) -> Rope:
    return Rope(tuple(float(frequency) for frequency in inv_freq), attention_factor)


def llama3_divisors(scaling: RopeScaling, theta: float, rotary_dim: int) -> Float32:
    """(rotary_dim / 2,): Llama 3.1 divides slow frequencies by the factor, keeps fast ones, and blends between."""
    wavelength = 2 * math.pi / inverse_frequencies(theta, rotary_dim)
    turns = scaling.original_max_position_embeddings / wavelength
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    divisors: Float32 = (1.0 / ((1 - kept) / scaling.factor + kept)).astype(np.float32)
    return divisors


def _yarn(inv_freq: Float32, scaling: RopeScaling, theta: float, rotary_dim: int) -> Float32:
    """YaRN (arXiv 2309.00071, section 3.2): a ramp over the dimensions, from kept to divided frequencies."""

    def dimension_of(rotations: float) -> float:
        """The dimension that turns `rotations` times over the original context."""
        context = scaling.original_max_position_embeddings
        return rotary_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension_of(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension_of(scaling.beta_slow)), rotary_dim - 1)
    ramp = (np.arange(rotary_dim // 2, dtype=np.float32) - low) / max(high - low, 0.001)
    divided = np.clip(ramp, 0.0, 1.0)
    stretched: Float32 = (inv_freq / scaling.factor * divided + inv_freq * (1 - divided)).astype(np.float32)
    return stretched
