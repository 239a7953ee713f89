"""Weight formats, and the register files that tiles are shaped for."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import lru_cache

from llvmlite import binding

# Weight formats, as numbers that an operation's row carries.
FLOAT32 = 0
BFLOAT16 = 1
FORMAT_NAMES = {FLOAT32: "float32", BFLOAT16: "bfloat16"}


@dataclass(frozen=True, slots=True)
class Isa:
    """A register file. `tiles[r - 1]`: the widths, in panels of 16 columns, of the tiles with r rows, widest first.

    A tile exists at every width that a taller one has, so that tall and low tiles go through the panels together.
    """

    name: str
    tiles: tuple[tuple[int, ...], ...]

    @property
    def max_rows(self) -> int:
        return len(self.tiles)


# Sums, a step's weights and one activation must stay in registers: 32 of 16 lanes, 16 of 8, 32 of 4, 16 of 4.
AVX512 = Isa("avx512", (*((8, 4, 2, 1),) * 2, *((4, 2, 1),) * 4, *((2, 1),) * 6))
AVX2 = Isa("avx2", ((4, 2, 1), (2, 1), (1,), (1,), (1,)))
NEON = Isa("neon", ((4, 2, 1), (2, 1), (1,), (1,), (1,), (1,)))
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
