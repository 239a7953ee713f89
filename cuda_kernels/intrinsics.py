"""PTX instructions that Numba does not offer, each as a function named for what it does.

A stub states its operands; `_assembly` turns it into inline assembly. Instructions without `effects` depend on
their operands only (or read memory that no thread writes during the kernel), so the compiler may move them freely.
Fragments of `mma` and `ldmatrix` are spread over a warp; with g = lane / 4 and c = lane % 4, every packed register
holds two neighbours, the first in its low half.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from .jit import instruction, types

_Lowering = tuple[Any, Callable[..., Any]]

_U32 = types.uint32
_F32 = types.float32
_LETTERS = {
    types.uint16: "h",
    types.uint32: "r",
    types.int32: "r",
    types.uint64: "l",
    types.int64: "l",
    types.float32: "f",
}


def _assembly(text: str, result: Any, *operands: Any, effects: bool = False) -> _Lowering:
    """Signature and lowering of one instruction; $0.. are its results, then its operands.

    A CPointer operand is followed by an element index; the instruction receives the address of that element.
    """
    results = tuple(result) if isinstance(result, types.UniTuple) else () if result == types.void else (result,)
    letters: list[str] = ["=" + _LETTERS[each] for each in results]
    letters += ["l" if isinstance(each, types.CPointer) else _LETTERS[each] for each in operands]
    if effects:
        letters.append("~{memory}")
    parameters: list[Any] = []
    for operand in operands:
        parameters += [operand, types.int64] if isinstance(operand, types.CPointer) else [operand]

    def lower(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        remaining = iter(values)
        inputs = []
        for operand in operands:
            value = next(remaining)
            if isinstance(operand, types.CPointer):
                value = builder.ptrtoint(builder.gep(value, [next(remaining)]), ir.IntType(64))
            inputs.append(value)
        members = [context.get_value_type(each) for each in results]
        returned = ir.VoidType() if not members else members[0] if len(members) == 1 else ir.LiteralStructType(members)
        kind = ir.FunctionType(returned, [value.type for value in inputs])
        value = builder.call(ir.InlineAsm(kind, text, ",".join(letters), side_effect=effects), inputs)
        if not members:
            return context.get_dummy_value()
        if len(members) == 1:
            return value
        return context.make_tuple(builder, result, [builder.extract_value(value, i) for i in range(len(members))])

    return result(*parameters), lower


def _bits(result: Any, operand: Any) -> _Lowering:
    """The same 32 bits under another type: no instruction at all."""

    def lower(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.bitcast(values[0], context.get_value_type(result))

    return result(operand), lower


@instruction
def shared_address(typingctx: Any, array: Any) -> _Lowering:
    """The address within shared memory, as `ldmatrix` and `cp.async` take it, of a shared array's first byte."""

    def lower(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, values[0]).data
        inside = builder.addrspacecast(data, ir.PointerType(data.type.pointee, addrspace=3))
        return builder.ptrtoint(inside, ir.IntType(32))

    return _U32(array), lower


# --- memory -----------------------------------------------------------------------------------------------------------


@instruction
def load_u32x4(typingctx: Any, pointer: Any, index: Any) -> _Lowering:
    """16 bytes from element `index` on, through the read-only path: `ld.global.nc.v4.u32`. 16-byte aligned."""
    return _assembly("ld.global.nc.v4.u32 {$0, $1, $2, $3}, [$4];", types.UniTuple(_U32, 4), pointer)


@instruction
def load_u32x2(typingctx: Any, pointer: Any, index: Any) -> _Lowering:
    """8 bytes from element `index` on, through the read-only path: `ld.global.nc.v2.u32`. 8-byte aligned."""
    return _assembly("ld.global.nc.v2.u32 {$0, $1}, [$2];", types.UniTuple(_U32, 2), pointer)


@instruction
def load_f32x4(typingctx: Any, pointer: Any, index: Any) -> _Lowering:
    """Four float32 from element `index` on: `ld.global.v4.f32`. 16-byte aligned; the kernel may write there too."""
    return _assembly("ld.global.v4.f32 {$0, $1, $2, $3}, [$4];", types.UniTuple(_F32, 4), pointer, effects=True)


@instruction
def load_f32x2(typingctx: Any, pointer: Any, index: Any) -> _Lowering:
    """Two float32 from element `index` on: `ld.global.v2.f32`. 8-byte aligned; the kernel may write there too."""
    return _assembly("ld.global.v2.f32 {$0, $1}, [$2];", types.UniTuple(_F32, 2), pointer, effects=True)


@instruction
def store_u32x4(typingctx: Any, pointer: Any, index: Any, a: Any, b: Any, c: Any, d: Any) -> _Lowering:
    """16 bytes to element `index` and on: `st.global.v4.u32`. 16-byte aligned."""
    return _assembly(
        "st.global.v4.u32 [$0], {$1, $2, $3, $4};", types.void, pointer, _U32, _U32, _U32, _U32, effects=True
    )


@instruction
def store_u32x2(typingctx: Any, pointer: Any, index: Any, a: Any, b: Any) -> _Lowering:
    """8 bytes to element `index` and on: `st.global.v2.u32`. 8-byte aligned."""
    return _assembly("st.global.v2.u32 [$0], {$1, $2};", types.void, pointer, _U32, _U32, effects=True)


@instruction
def store_u32(typingctx: Any, pointer: Any, index: Any, a: Any) -> _Lowering:
    """4 bytes to element `index` and on: `st.global.u32`. 4-byte aligned."""
    return _assembly("st.global.u32 [$0], $1;", types.void, pointer, _U32, effects=True)


@instruction
def store_f32x2(typingctx: Any, pointer: Any, index: Any, a: Any, b: Any) -> _Lowering:
    """Two float32 to element `index` and on: `st.global.v2.f32`. 8-byte aligned."""
    return _assembly("st.global.v2.f32 [$0], {$1, $2};", types.void, pointer, _F32, _F32, effects=True)


@instruction
def store_f32x4(typingctx: Any, pointer: Any, index: Any, a: Any, b: Any, c: Any, d: Any) -> _Lowering:
    """Four float32 to element `index` and on: `st.global.v4.f32`. 16-byte aligned."""
    return _assembly(
        "st.global.v4.f32 [$0], {$1, $2, $3, $4};", types.void, pointer, _F32, _F32, _F32, _F32, effects=True
    )


@instruction
def copy_async_16(typingctx: Any, shared: Any, pointer: Any, index: Any) -> _Lowering:
    """16 bytes from global element `index` to shared address `shared`, in the background: `cp.async.cg`."""
    return _assembly("cp.async.cg.shared.global [$0], [$1], 16;", types.void, _U32, pointer, effects=True)


@instruction
def copy_async_commit(typingctx: Any) -> _Lowering:
    """Close this thread's group of `copy_async_16`: `cp.async.commit_group`."""
    return _assembly("cp.async.commit_group;", types.void, effects=True)


@instruction
def copy_async_wait_all(typingctx: Any) -> _Lowering:
    """Wait for every group of this thread: `cp.async.wait_group 0`. A barrier must follow before others read."""
    return _assembly("cp.async.wait_group 0;", types.void, effects=True)


@instruction
def copy_async_wait_but_one(typingctx: Any) -> _Lowering:
    """Wait for every group of this thread except the latest: `cp.async.wait_group 1`."""
    return _assembly("cp.async.wait_group 1;", types.void, effects=True)


# --- tensor cores -----------------------------------------------------------------------------------------------------

_MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32 "
    "{{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, {{$10, $11, $12, $13}};"
)
_MMA_OPERANDS = (_U32,) * 6 + (_F32,) * 4


@instruction
def mma_bf16(
    typingctx: Any, a0: Any, a1: Any, a2: Any, a3: Any, b0: Any, b1: Any, c0: Any, c1: Any, c2: Any, c3: Any
) -> _Lowering:
    """C + A @ B of bfloat16, A (16, 16), B (16, 8), C (16, 8) float32: `mma.sync.aligned.m16n8k16`.

    a0 = A[g, 2c:2c+2], a1 = A[g+8, 2c:2c+2], a2 = A[g, 2c+8:2c+10], a3 = A[g+8, 2c+8:2c+10];
    b0 = B[2c:2c+2, g], b1 = B[2c+8:2c+10, g]; c0, c1 = C[g, 2c:2c+2]; c2, c3 = C[g+8, 2c:2c+2].
    """
    return _assembly(_MMA.format("bf16"), types.UniTuple(_F32, 4), *_MMA_OPERANDS)


@instruction
def mma_f16(
    typingctx: Any, a0: Any, a1: Any, a2: Any, a3: Any, b0: Any, b1: Any, c0: Any, c1: Any, c2: Any, c3: Any
) -> _Lowering:
    """`mma_bf16` for float16 operands."""
    return _assembly(_MMA.format("f16"), types.UniTuple(_F32, 4), *_MMA_OPERANDS)


@instruction
def transpose_8x8(typingctx: Any, packed: Any) -> _Lowering:
    """Transpose an 8 x 8 matrix of 16-bit numbers, X[g, 2c:2c+2] in each lane: `movmatrix`. All lanes take part."""
    return _assembly("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", _U32, _U32, effects=True)


@instruction
def load_matrix_x4(typingctx: Any, shared: Any) -> _Lowering:
    """Four 8 x 8 matrices of 16-bit numbers from shared memory: `ldmatrix.x4`.

    Lane 8 i + r gives the address of row r of matrix i; register i receives X_i[g, 2c:2c+2].
    """
    return _assembly(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];", types.UniTuple(_U32, 4), _U32, effects=True
    )


@instruction
def load_matrix_x4_transposed(typingctx: Any, shared: Any) -> _Lowering:
    """`load_matrix_x4`, each matrix transposed on the way: register i receives X_i[2c:2c+2, g]."""
    return _assembly(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];",
        types.UniTuple(_U32, 4),
        _U32,
        effects=True,
    )


# --- conversions and arithmetic ---------------------------------------------------------------------------------------


@instruction
def pack_bf16(typingctx: Any, low: Any, high: Any) -> _Lowering:
    """Two float32 rounded to nearest even bfloat16, in one register: `cvt.rn.bf16x2.f32`."""
    return _assembly("cvt.rn.bf16x2.f32 $0, $2, $1;", _U32, _F32, _F32)


@instruction
def pack_f16(typingctx: Any, low: Any, high: Any) -> _Lowering:
    """Two float32 rounded to nearest even float16, in one register: `cvt.rn.f16x2.f32`."""
    return _assembly("cvt.rn.f16x2.f32 $0, $2, $1;", _U32, _F32, _F32)


@instruction
def f16_to_f32(typingctx: Any, bits: Any) -> _Lowering:
    """The float32 value of 16 bits of float16: `cvt.f32.f16`."""
    return _assembly("cvt.f32.f16 $0, $1;", _F32, types.uint16)


@instruction
def f32_bits(typingctx: Any, value: Any) -> _Lowering:
    """The 32 bits of a float32."""
    return _bits(_U32, _F32)


@instruction
def f32_from_bits(typingctx: Any, bits: Any) -> _Lowering:
    """The float32 that has these 32 bits."""
    return _bits(_F32, _U32)


@instruction
def permute_bytes(typingctx: Any, low: Any, high: Any, selector: Any) -> _Lowering:
    """Four bytes picked from low (0 to 3) and high (4 to 7), one per hexadecimal digit of selector: `prmt.b32`."""
    return _assembly("prmt.b32 $0, $1, $2, $3;", _U32, _U32, _U32, _U32)


@instruction
def exp2(typingctx: Any, x: Any) -> _Lowering:
    """2 ** x within 2 units in the last place, 0 for -inf: `ex2.approx.ftz.f32`."""
    return _assembly("ex2.approx.ftz.f32 $0, $1;", _F32, _F32)


@instruction
def log2(typingctx: Any, x: Any) -> _Lowering:
    """Binary logarithm with an absolute error of about 1e-7, -inf for 0: `lg2.approx.ftz.f32`."""
    return _assembly("lg2.approx.ftz.f32 $0, $1;", _F32, _F32)


@instruction
def rsqrt(typingctx: Any, x: Any) -> _Lowering:
    """1 / sqrt(x) within 2 units in the last place: `rsqrt.approx.f32`."""
    return _assembly("rsqrt.approx.f32 $0, $1;", _F32, _F32)


@instruction
def add(typingctx: Any, a: Any, b: Any) -> _Lowering:
    """a + b rounded, never fused with a product: `add.rn.f32`."""
    return _assembly("add.rn.f32 $0, $1, $2;", _F32, _F32, _F32)


@instruction
def multiply(typingctx: Any, a: Any, b: Any) -> _Lowering:
    """a * b rounded, never fused with a sum: `mul.rn.f32`."""
    return _assembly("mul.rn.f32 $0, $1, $2;", _F32, _F32, _F32)


@instruction
def subtract_f16x2(typingctx: Any, a: Any, b: Any) -> _Lowering:
    """a - b of two packed float16: `sub.rn.f16x2`."""
    return _assembly("sub.rn.f16x2 $0, $1, $2;", _U32, _U32, _U32)


@instruction
def round_to_i32(typingctx: Any, x: Any) -> _Lowering:
    """The nearest integer, ties to even: `cvt.rni.s32.f32`."""
    return _assembly("cvt.rni.s32.f32 $0, $1;", types.int32, _F32)


@instruction
def round_to_i64(typingctx: Any, x: Any) -> _Lowering:
    """The nearest integer, ties to even: `cvt.rni.s64.f32`."""
    return _assembly("cvt.rni.s64.f32 $0, $1;", types.int64, _F32)


@instruction
def multiply_high_u32(typingctx: Any, a: Any, b: Any) -> _Lowering:
    """The upper 32 bits of a product: `mul.hi.u32`."""
    return _assembly("mul.hi.u32 $0, $1, $2;", _U32, _U32, _U32)


@instruction
def multiply_high_u64(typingctx: Any, a: Any, b: Any) -> _Lowering:
    """The upper 64 bits of a product: `mul.hi.u64`."""
    return _assembly("mul.hi.u64 $0, $1, $2;", types.uint64, types.uint64, types.uint64)
