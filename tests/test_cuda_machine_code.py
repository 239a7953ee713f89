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


def shape(head_dim: int, kv: str = "bfloat16", heads: int = 8, kv_heads: int = 2) -> layout.AttentionShape:
    return layout.AttentionShape(heads, kv_heads, head_dim, 16, kv)


KERNELS: dict[str, Build] = {
    "rms_norm float32 accumulate": lambda: norms.rms_norm("float32", True),
    "rms_norm bfloat16": lambda: norms.rms_norm("bfloat16"),
    "gated silu": lambda: activations.gated_activation("silu", "bfloat16"),
    "gated gelu_tanh": lambda: activations.gated_activation("gelu_tanh", "float16"),
    "gather_rows float32": lambda: embedding.gather_rows("float32"),
    "gather_rows float16": lambda: embedding.gather_rows("float16"),
    "copy_blocks": block_copy.copy_blocks,
    "kv_write 128": lambda: kv_write.kv_write(shape(128), 128, True),
    "kv_write 80 partial": lambda: kv_write.kv_write(shape(80, "float16"), 32, False),
    "kv_write float32": lambda: kv_write.kv_write(shape(64, "float32"), 64, False),
    "float32_matmul": float32_matmul.float32_matmul,
    "paged_float32": lambda: paged_float32.paged_float32(shape(64, "float32")),
    "combine": lambda: paged_decode.combine(shape(128), "bfloat16"),
    "sample": sampling.sample,
    "skinny_matmul 8": lambda: skinny_matmul.skinny_matmul("bfloat16", *skinny_matmul.tile(8)),
    "skinny_matmul 16": lambda: skinny_matmul.skinny_matmul("float16", *skinny_matmul.tile(16)),
    "skinny_matmul 32": lambda: skinny_matmul.skinny_matmul("bfloat16", *skinny_matmul.tile(32)),
    "skinny_matmul 64": lambda: skinny_matmul.skinny_matmul("bfloat16", *skinny_matmul.tile(64)),
    "quantised_matmul int8": lambda: quantised_matmul.quantised_matmul("int8", "bfloat16", 1),
    "quantised_matmul int4": lambda: quantised_matmul.quantised_matmul("int4", "bfloat16", 1),
    "quantised_matmul int8 64": lambda: quantised_matmul.quantised_matmul("int8", "bfloat16", 8),
    "quantised_matmul int4 64": lambda: quantised_matmul.quantised_matmul("int4", "float16", 8),
    "gather_packed_rows": lambda: embedding.gather_packed_rows("int4"),
    "paged_decode 64": lambda: paged_decode.paged_decode(shape(64), "bfloat16", 1),
    "paged_decode 80": lambda: paged_decode.paged_decode(shape(80, "float16"), "float16", 1),
    "paged_decode 128": lambda: paged_decode.paged_decode(shape(128), "bfloat16", 1),
    "paged_decode 128 wide": lambda: paged_decode.paged_decode(shape(128), "bfloat16", 2),
    "paged_decode 256": lambda: paged_decode.paged_decode(shape(256), "bfloat16", 1),
    "8-bit paged_decode 128 int8": lambda: paged_decode.paged_decode(shape(128, "int8"), "bfloat16", 1),
    "8-bit paged_decode 64 e4m3": lambda: paged_decode.paged_decode(shape(64, "float8_e4m3"), "bfloat16", 1),
    "8-bit kv_write": lambda: kv_write.kv_write(shape(128, "int8"), 128, False),
    "paged_prefill 64": lambda: paged_prefill.paged_prefill(shape(64), "bfloat16"),
    "paged_prefill 96": lambda: paged_prefill.paged_prefill(shape(96, "float16"), "float16"),
    "paged_prefill 128": lambda: paged_prefill.paged_prefill(shape(128), "bfloat16"),
    "paged_prefill 256": lambda: paged_prefill.paged_prefill(shape(256), "bfloat16"),
}


# Between these and the ones always run lie no decisions: same code, other constants.
SLOW = {
    "skinny_matmul 16",
    "skinny_matmul 32",
    "quantised_matmul int8 64",
    "paged_decode 64",
    "paged_decode 128 wide",
    "8-bit paged_decode 64 e4m3",
    "paged_prefill 64",
    "paged_prefill 96",
    "paged_prefill 256",
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
