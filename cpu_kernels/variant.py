"""Which kernels are compiled: the processor's register shape, the weight formats of a model and its KV format.

A `Variant` is passed to every kernel that depends on it and has a Numba type of its own, so that each combination is
compiled once, on demand, and what a model does not use is never compiled.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from llvmlite import binding
from numba import types
from numba.extending import NativeValue, models, register_model, typeof_impl, unbox

# Weight formats, as numbers that an operation's row carries.
FLOAT32 = 0
BFLOAT16 = 1
FORMAT_NAMES = {FLOAT32: "float32", BFLOAT16: "bfloat16"}


@dataclass(frozen=True, slots=True)
class Isa:
    """A register file. `tiles[r - 1]` are the widths, in panels of 16 columns, of the tiles with r rows, widest first."""

    name: str
    tiles: tuple[tuple[int, ...], ...]

    @property
    def max_rows(self) -> int:
        return len(self.tiles)


# Accumulators plus one row of weights must stay in registers: 32 of 16 lanes, 16 of 8, 32 of 4, 16 of 4.
AVX512 = Isa("avx512", ((8, 4, 1), (8, 2, 1), (4, 1), (4, 1), (4, 1), (4, 1), *((2, 1),) * 6))
AVX2 = Isa("avx2", ((4, 2, 1), (3, 1), (2, 1), (1,), (1,), (1,)))
NEON = Isa("neon", ((4, 1), (2, 1), (1,), (1,), (1,), (1,)))
PLAIN = Isa("plain", ((2, 1), (1,), (1,)))


@lru_cache(maxsize=1)
def host_features() -> frozenset[str]:
    """What LLVM says this processor has, such as {"avx2", "fma"}."""
    return frozenset(name for name, present in binding.get_host_cpu_features().items() if present)


def host_isa() -> Isa:
    features = host_features()
    if "avx512f" in features:
        return AVX512
    if {"avx2", "fma"} <= features:
        return AVX2
    return NEON if platform.machine() in ("aarch64", "arm64") else PLAIN


def host_fuses() -> bool:
    """Whether multiply-add with one rounding is an instruction (LLVM calls a slow function where it is not)."""
    return "fma" in host_features() or platform.machine() in ("aarch64", "arm64")


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled set of kernels."""

    isa: Isa
    weight_formats: tuple[int, ...]
    kv_format: int

    @property
    def formats(self) -> tuple[int, ...]:
        """Formats that the matrix tile must read: K and V blocks are panels like any weight."""
        return tuple(sorted({*self.weight_formats, self.kv_format}))


class VariantType(types.Type):  # type: ignore[misc]
    """The Numba type of one `Variant`; it carries no data."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        weights = "+".join(FORMAT_NAMES[number] for number in variant.weight_formats)
        super().__init__(name=f"Variant({variant.isa.name}, {weights}, {FORMAT_NAMES[variant.kv_format]})")


register_model(VariantType)(models.OpaqueModel)


@typeof_impl.register(Variant)
def _type_of_variant(variant: Variant, context: Any) -> VariantType:
    return VariantType(variant)


@unbox(VariantType)
def _unbox_variant(numba_type: Any, value: Any, context: Any) -> Any:
    return NativeValue(context.context.get_dummy_value())
