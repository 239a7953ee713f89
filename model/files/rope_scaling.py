"""RoPE scaling as the two file formats write it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import RopeScaling

# Llama 3.1, 3.2 and 3.3 all use these; GGUF keeps only the resulting divisors (tensor rope_freqs.weight).
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_ORIGINAL = 1.0, 4.0, 8192


def scaling_from_hugging_face(values: Mapping[str, Any] | None, max_position_embeddings: int) -> RopeScaling:
    """From `rope_scaling` (Transformers 4) or `rope_parameters` (5). Raises ValueError for kinds that are not known."""
    values = values or {}
    kind = str(values.get("rope_type") or values.get("type") or "default")
    if kind == "default":
        return RopeScaling()
    if kind not in ("linear", "llama3", "yarn"):
        raise ValueError(f"rope scaling {kind!r} is not supported; known: linear, llama3, yarn")
    factor = float(values["factor"])
    attention_factor = 1.0
    if kind == "yarn":
        attention_factor = float(values.get("attention_factor") or _yarn_default(values, factor))
    return RopeScaling(
        kind=kind,
        factor=factor,
        low_freq_factor=float(values.get("low_freq_factor") or LLAMA3_LOW),
        high_freq_factor=float(values.get("high_freq_factor") or LLAMA3_HIGH),
        original_max_position_embeddings=int(values.get("original_max_position_embeddings") or max_position_embeddings),
        attention_factor=attention_factor,
        beta_fast=float(values.get("beta_fast") or 32.0),
        beta_slow=float(values.get("beta_slow") or 1.0),
    )


def scaling_from_gguf(values: Mapping[str, Any], divisors: NDArray[np.float32] | None) -> RopeScaling:
    """From the `rope.scaling.*` metadata (prefix removed) or, for Llama 3, the tensor of frequency divisors.

    Raises ValueError for kinds that are not known.
    """
    if divisors is not None:
        return RopeScaling("llama3", float(divisors.max()), LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_ORIGINAL)
    kind = str(values.get("type", "none"))
    factor = float(values.get("factor", 1.0))
    if kind == "none" or factor == 1.0:
        return RopeScaling()
    if kind == "linear":
        return RopeScaling("linear", factor)
    if kind != "yarn":
        raise ValueError(f"rope scaling {kind!r} is not supported; known: linear, yarn")
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position_embeddings=int(values["original_context_length"]),
        attention_factor=float(values.get("attn_factor", 1.0)) * yarn_attention_factor(factor),
        beta_fast=float(values.get("yarn_beta_fast", 32.0)),
        beta_slow=float(values.get("yarn_beta_slow", 1.0)),
    )


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """YaRN's temperature on cos and sin (arXiv 2309.00071, equation 22): 0.1 ln(s) + 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_default(values: Mapping[str, Any], factor: float) -> float:
    mscale, over = values.get("mscale"), values.get("mscale_all_dim")
    if mscale and over:
        return yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, over)
    return yarn_attention_factor(factor)
