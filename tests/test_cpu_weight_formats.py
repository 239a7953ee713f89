"""How each `dtype` holds a matrix, whatever its width and the processor."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from kvpool.cpu_kernels import isa
from kvpool.cpu_kernels.isa import BFLOAT16, FLOAT32, INT4, INT8, INT8_LONG, INT16
from kvpool.model.backend import BackendLimits
from kvpool.model.cpu import backend as cpu_backend
from kvpool.model.cpu.backend import CpuBackend
from kvpool.model.cpu.weights import format_of
from kvpool.model.program import Weight
from kvpool.model.weights import Float32, RawTensor
from tests.support.random_checkpoint import RandomCheckpoint
from tests.support.steps import Shape, tiny_program


@dataclass
class OneTensor:
    """A checkpoint whose only tensor is of a kind."""

    kind: str = "BF16"

    def names(self) -> list[str]:
        return ["w"]

    def shape(self, name: str) -> tuple[int, ...]:
        return (16, 64)

    def raw(self, name: str) -> RawTensor:
        return RawTensor(self.kind, (16, 64), np.zeros((16, 64), np.uint8))

    def load(self, name: str) -> Float32:
        return np.zeros((16, 64), np.float32)


@pytest.mark.parametrize(
    ("dtype", "cols", "held"),
    [
        ("float32", 70, FLOAT32),
        ("bfloat16", 64, BFLOAT16),
        ("auto", 64, BFLOAT16),
        ("int16", 64, INT16),
        ("int16", 96, BFLOAT16),
        ("int8", 128, INT8_LONG),
        ("int8", 96, INT8),  # groups of 32, where those of 64 would not be whole
        ("int8", 70, BFLOAT16),
        ("int4", 96, INT4),
        ("int4", 70, BFLOAT16),
    ],
)
def test_the_first_format_of_whole_groups(dtype: str, cols: int, held: int) -> None:
    assert format_of(OneTensor(), Weight(("w",), 16, cols), dtype) == held


def test_auto_holds_16_bits_as_the_back_end_prefers() -> None:
    wide, narrow = Weight(("w",), 16, 64), Weight(("w",), 16, 96)
    assert format_of(OneTensor(), wide, "auto", prefers_codes=True) == INT16
    assert format_of(OneTensor(), narrow, "auto", prefers_codes=True) == BFLOAT16
    assert format_of(OneTensor(), wide, "bfloat16", prefers_codes=True) == BFLOAT16
    assert format_of(OneTensor("Q8_0"), wide, "auto", prefers_codes=True) == INT8  # a file's own codes stay


@pytest.mark.parametrize(
    ("pair_bits", "has_dot", "activations", "codes"),
    [(256, False, "auto", True), (256, True, "auto", False), (256, False, "float32", False), (0, False, "auto", False)],
)
def test_codes_are_preferred_where_integers_are_faster(
    pair_bits: int, has_dot: bool, activations: str, codes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_backend, "host_pair_bits", lambda: pair_bits)
    monkeypatch.setattr(cpu_backend, "host_prefers_dot", lambda: has_dot)
    program = tiny_program(Shape(num_layers=1, hidden_size=64))
    backend = CpuBackend(
        program, RandomCheckpoint(program), BackendLimits(16, 4, 32, 64), activations=activations, threads=1
    )
    assert (INT16 in backend._weights.formats.values()) == codes
    backend.close()


@pytest.mark.parametrize(
    ("cpu", "features", "prefers"),
    [
        ("znver4", {"avx512f", "avx512bf16"}, True),
        ("sapphirerapids", {"avx512f", "avx512bf16"}, False),
        ("znver3", {"avx2", "fma"}, False),
    ],
)
def test_dot_products_are_used_where_they_are_fast(
    cpu: str, features: set[str], prefers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isa, "host_features", lambda: features)
    monkeypatch.setattr(isa.binding, "get_host_cpu_name", lambda: cpu)
    assert isa.host_prefers_dot() == prefers
