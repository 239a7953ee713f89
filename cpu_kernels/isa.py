"""Weight formats, and the register files that tiles are shaped for."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from llvmlite import binding

# How a tile reads its panels, as numbers that an operation's row carries. BFLOAT16_DOT reads the panels of BFLOAT16 but
# takes activations rounded to bfloat16, two at a time: the AVX-512 BF16 instruction.
FLOAT32 = 0
BFLOAT16 = 1
BFLOAT16_DOT = 2
# Only keys and values are held like this: halves, and bytes whose scales are applied elsewhere.
FLOAT16 = 3
CODES = 4
# Weights in groups of codes (see `groups`).
FIRST_GROUPED = 8
INT8, INT4, INT8_K, INT4_K, INT16, INT8_LONG = GROUPED = range(FIRST_GROUPED, FIRST_GROUPED + 6)
# The same panels, times activations in codes of 16 or 8 bits, as integers (see `integer_steps`).
FIRST_INTEGER = 14
INT8_X16, INT4_X16, INT8_K_X16, INT4_K_X16, INT4_X8, INT4_K_X8, INT16_X16, INT8_LONG_X16 = INTEGER = range(
    FIRST_INTEGER, FIRST_INTEGER + 8
)
# Those panels once their codes are spread to the width of the activations (see `unpacking`); PLUS: with least values.
FIRST_SPREAD = 22
SPREAD16, SPREAD16_PLUS, SPREAD16_K, SPREAD8, SPREAD16_LONG = SPREAD = range(FIRST_SPREAD, FIRST_SPREAD + 5)
FORMAT_NAMES = {
    FLOAT32: "float32",
    BFLOAT16: "bfloat16",
    BFLOAT16_DOT: "bfloat16_dot",
    FLOAT16: "float16",
    CODES: "codes",
    INT8: "int8",
    INT4: "int4",
    INT8_K: "int8_k",
    INT4_K: "int4_k",
    INT16: "int16",
    INT8_LONG: "int8_long",
    INT8_X16: "int8x16",
    INT4_X16: "int4x16",
    INT8_K_X16: "int8_kx16",
    INT4_K_X16: "int4_kx16",
    INT4_X8: "int4x8",
    INT4_K_X8: "int4_kx8",
    INT16_X16: "int16x16",
    INT8_LONG_X16: "int8_longx16",
    SPREAD16: "spread16",
    SPREAD16_PLUS: "spread16_plus",
    SPREAD16_K: "spread16_k",
    SPREAD8: "spread8",
    SPREAD16_LONG: "spread16_long",
}

Tiles = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Isa:
    """A register file. `tiles[format][r - 1]`: the widths, in panels, of the tiles with r rows, widest first.

    A tile exists at every width that a taller one has, so that tall and low tiles go through the panels together.
    `unpacked`: formats whose tiles are low, because they unpack what they read. More rows than those have read panels
    that were unpacked to another format, one after the other, with tiles of one panel. `shares_all`: cuts of rows share
    the asking however few they are, and however long panels are (see `tile`).
    """

    name: str
    tiles: Mapping[int, Tiles] = field(hash=False)
    unpacked: Mapping[int, int] = field(hash=False, default_factory=dict)
    shares_all: bool = True


# Sums, a step's weights and an activation must stay in registers (the compiler's output shows where it spills), and the
# independent sums must hide the latency of an instruction: it takes 8 to 12 of them.
_WIDE, _MIDDLE, _PAIR, _ONE = (8, 4, 2, 1), (4, 2, 1), (2, 1), (1,)
_GROUPED_WIDE: dict[int, Tiles] = dict.fromkeys(GROUPED, (_MIDDLE, _MIDDLE, _PAIR, _PAIR, _PAIR, _PAIR))
_GROUPED_NARROW: dict[int, Tiles] = dict.fromkeys(GROUPED, (_PAIR, _ONE, _ONE, _ONE))
# Integer sums take the registers while a group is read, and those of the groups before wait in memory.
_INTEGER_WIDE: dict[int, Tiles] = dict.fromkeys(INTEGER, (_MIDDLE, _MIDDLE, *(_PAIR,) * 6))
_INTEGER_NARROW: dict[int, Tiles] = dict.fromkeys(INTEGER, (_PAIR, _PAIR, *(_ONE,) * 4))
_UNPACKED = (FLOAT32, FLOAT16, CODES)  # one k in a lane, as float32 after at most a conversion
_TO_FLOATS = dict.fromkeys(GROUPED, FLOAT32)
AVX512 = Isa(
    "avx512",
    {
        **dict.fromkeys(_UNPACKED, (_WIDE, *(_MIDDLE,) * 3, *(_PAIR,) * 4)),
        BFLOAT16: (_WIDE, *(_MIDDLE,) * 3, *(_PAIR,) * 3, *(_ONE,) * 5),
        BFLOAT16_DOT: (_WIDE, _WIDE, *(_MIDDLE,) * 4, *(_PAIR,) * 4),
        **_GROUPED_WIDE,
        **_INTEGER_WIDE,
    },
    _TO_FLOATS,
    shares_all=False,
)
_AVX2_TILES = (_MIDDLE, _PAIR, _ONE, _ONE, _ONE)
_NEON_TILES = (_MIDDLE, _PAIR, _ONE, _ONE, _ONE, _ONE)
_PLAIN_TILES = (_PAIR, _ONE, _ONE)
_UNGROUPED = (*_UNPACKED, BFLOAT16, BFLOAT16_DOT)
AVX2 = Isa(
    "avx2",
    {
        **dict.fromkeys(_UNGROUPED, _AVX2_TILES),
        FLOAT32: (*_AVX2_TILES, _ONE),
        **_GROUPED_NARROW,
        **_INTEGER_NARROW,
        **dict.fromkeys(SPREAD, (_ONE,) * 6),
    },
    {
        **_TO_FLOATS,
        BFLOAT16: FLOAT32,
        INT8_X16: SPREAD16,
        INT4_X16: SPREAD16_PLUS,
        INT8_K_X16: SPREAD16_K,
        INT4_K_X16: SPREAD16_PLUS,
        INT4_X8: SPREAD8,
        INT4_K_X8: SPREAD8,
        INT8_LONG_X16: SPREAD16_LONG,
    },
)
NEON = Isa("neon", {**dict.fromkeys(_UNGROUPED, _NEON_TILES), **_GROUPED_NARROW, **_INTEGER_NARROW}, _TO_FLOATS)
PLAIN = Isa("plain", {**dict.fromkeys(_UNGROUPED, _PLAIN_TILES), **_GROUPED_NARROW, **_INTEGER_NARROW}, _TO_FLOATS)


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


def host_has_half() -> bool:
    """Whether conversions between float32 and float16 are instructions (LLVM calls a library where they are not)."""
    return "f16c" in host_features() or platform.machine() in ("aarch64", "arm64")


def host_pair_bits() -> int:
    """Bits of the vectors whose pairs of integers an instruction multiplies and adds; 0 where there is none."""
    features = host_features()
    if "avx512bw" in features:
        return 512
    return 256 if "avx2" in features else 0


def host_quad_bits() -> int:
    """Bits of the vectors whose quadruples of bytes an instruction multiplies and adds to a sum; 0: there is none."""
    features = host_features()
    if "avx512vnni" in features:
        return 512
    return 256 if "avxvnni" in features else 0


def host_has_dot() -> bool:
    """Whether bfloat16 dot products are an instruction."""
    return {"avx512f", "avx512bf16"} <= host_features()


def host_prefers_dot() -> bool:
    """Whether that instruction is faster than float32 arithmetic. Intel's is not: on Emerald Rapids products of 32 rows
    took 1.4 to 1.6 times as long with it. AMD's takes as long as one multiply-add, by its instruction tables."""
    return host_has_dot() and str(binding.get_host_cpu_name()).startswith("znver")
