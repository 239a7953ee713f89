"""Every kernel becomes machine code on three architectures without spills, within its register budget."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.support.cuda_rooms import (
    activations,
    block_copy,
    compiler,
    embedding,
    float32_matmul,
    kv_write,
    layout,
    norms,
    paged_decode,
    paged_float32,
    paged_prefill,
    quantised_matmul,
    sampling,
    skinny_matmul,
)
from tests.support.machine_code import ARCHITECTURES, MachineCode, assemble

Build = Callable[[], compiler.Kernel]


Shape = layout.AttentionShape


def decode(shape: Shape, columns: int) -> Build:
    out = shape.kv if shape.kv in ("bfloat16", "float16") else "float16"
    return lambda: paged_decode.paged_decode(shape, out, columns)


def prefill(shape: Shape) -> Build:
    return lambda: paged_prefill.paged_prefill(shape, shape.kv)


def skinny(element: str, rows: int) -> Build:
    return lambda: skinny_matmul.skinny_matmul(element, *skinny_matmul.tile(rows))


def quantised(packing: str, element: str, columns: int) -> Build:
    return lambda: quantised_matmul.quantised_matmul(packing, element, columns)


# The same shapes as in the other tests, so that each is compiled once.
KERNELS: dict[str, Build] = {
    "rms_norm float32 accumulate": lambda: norms.rms_norm("float32", True),
    "rms_norm bfloat16": lambda: norms.rms_norm("bfloat16"),
    "gated silu": lambda: activations.gated_activation("silu", "bfloat16"),
    "gated gelu_tanh": lambda: activations.gated_activation("gelu_tanh", "float16"),
    "gather_rows float32": lambda: embedding.gather_rows("float32"),
    "gather_rows float16": lambda: embedding.gather_rows("float16"),
    "gather_packed_rows int4": lambda: embedding.gather_packed_rows("int4"),
    "copy_blocks": block_copy.copy_blocks,
    "kv_write 128": lambda: kv_write.kv_write(Shape(4, 2, 128, 8, "bfloat16"), 128, True),
    "kv_write 80 partial": lambda: kv_write.kv_write(Shape(2, 2, 80, 8, "float16"), 32, False),
    "kv_write float32": lambda: kv_write.kv_write(Shape(3, 1, 64, 8, "float32"), 64, False),
    "kv_write int8": lambda: kv_write.kv_write(Shape(4, 2, 64, 8, "int8"), 64, False),
    "float32_matmul": float32_matmul.float32_matmul,
    "paged_float32": lambda: paged_float32.paged_float32(Shape(3, 1, 64, 16, "float32")),
    "combine": lambda: paged_decode.combine(Shape(4, 2, 64, 16, "bfloat16"), "bfloat16"),
    "sample": sampling.sample,
    "skinny_matmul 8": skinny("bfloat16", 8),
    "skinny_matmul 16": skinny("float16", 16),
    "skinny_matmul 32": skinny("bfloat16", 32),
    "skinny_matmul 64": skinny("bfloat16", 64),
    "quantised_matmul int8": quantised("int8", "bfloat16", 1),
    "quantised_matmul int4": quantised("int4", "bfloat16", 1),
    "quantised_matmul int8 64": quantised("int8", "bfloat16", 8),
    "quantised_matmul int4 64": quantised("int4", "bfloat16", 8),
    "paged_decode 64": decode(Shape(4, 2, 64, 16, "bfloat16"), 1),
    "paged_decode 80": decode(Shape(7, 1, 80, 8, "float16"), 1),
    "paged_decode 128": decode(Shape(32, 8, 128, 16, "bfloat16"), 1),
    "paged_decode 128 wide": decode(Shape(20, 1, 128, 128, "bfloat16"), 2),
    "paged_decode 256": decode(Shape(9, 1, 256, 32, "float16"), 1),
    "8-bit paged_decode int8": decode(Shape(4, 2, 64, 16, "int8"), 1),
    "8-bit paged_decode e4m3": decode(Shape(3, 1, 128, 16, "float8_e4m3"), 1),
    "paged_prefill 64": prefill(Shape(4, 2, 64, 16, "bfloat16")),
    "paged_prefill 80": prefill(Shape(7, 1, 80, 8, "float16")),
    "paged_prefill 96": prefill(Shape(6, 2, 96, 64, "bfloat16")),
    "paged_prefill 128": prefill(Shape(32, 8, 128, 16, "bfloat16")),
    "paged_prefill 256": prefill(Shape(3, 1, 256, 32, "float16")),
}

# Between these and the ones always run lie no decisions: the same code with other constants.
SLOW = {
    "rms_norm bfloat16",
    "gated gelu_tanh",
    "gather_rows float16",
    "kv_write 80 partial",
    "kv_write float32",
    "skinny_matmul 16",
    "skinny_matmul 32",
    "quantised_matmul int8 64",
    "paged_decode 80",
    "paged_decode 128",
    "paged_decode 128 wide",
    "8-bit paged_decode int8",
    "paged_prefill 80",
    "paged_prefill 96",
    "paged_prefill 128",
}


def named(prefix: str = "") -> list[Any]:
    chosen = [name for name in KERNELS if name.startswith(prefix)]
    return [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in chosen]


@cache
def machine_code(name: str, architecture: str) -> MachineCode:
    return assemble(KERNELS[name]().ptx, architecture, max_registers=255)


@pytest.mark.parametrize("name", named())
def test_fits_its_registers_without_spills(name: str) -> None:
    kernel = KERNELS[name]()
    for architecture in ARCHITECTURES:
        code = machine_code(name, architecture)
        assert (code.spilled_bytes, code.stack_bytes) == (0, 0), architecture
        assert code.registers <= kernel.registers, architecture


@pytest.mark.parametrize("name", named("paged_decode"))
def test_decode_reads_16_bytes_at_a_time(name: str) -> None:
    found = machine_code(name, "sm_90").instructions()
    assert found["LDG.E.128.CONSTANT"] >= 8
    assert any(instruction.startswith("HMMA.16816.F32") for instruction in found)


@pytest.mark.parametrize("name", named("paged_prefill"))
def test_prefill_multiplies_on_tensor_cores_and_copies_in_the_background(name: str) -> None:
    found = machine_code(name, "sm_90").instructions()
    assert any(instruction.startswith("HMMA.16816.F32") for instruction in found)
    assert any(instruction.startswith("LDGSTS.E.BYPASS.128") for instruction in found)
    assert any(instruction.startswith("LDSM.16.MT88.4") for instruction in found)


@pytest.mark.parametrize("name", named("skinny_matmul"))
def test_products_read_16_bytes_at_a_time_for_tensor_cores(name: str) -> None:
    found = machine_code(name, "sm_90").instructions()
    assert found["LDG.E.128.CONSTANT"] >= 8
    assert any(instruction.startswith("HMMA.16816.F32") for instruction in found)
