"""Memory by address, atomics, and the few system calls that a kernel makes. Addresses are int64 bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .isa import host_has_half
from .jit import instruction

POINTER = ir.PointerType()
INT64 = ir.IntType(64)


def _load(name: str, result: Any, stored: ir.Type, extend: str | None = None) -> Callable[..., Any]:
    """A load of `stored` at an address, as the Numba type `result`; unaligned addresses are fine."""

    def load(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = builder.load(builder.inttoptr(arguments[0], POINTER), align=1, typ=stored)
            return getattr(builder, extend)(value, context.get_value_type(result)) if extend else value

        return result(types.int64), generate

    load.__name__ = name
    return instruction(load)


load_f32 = _load("load_f32", types.float32, ir.FloatType())
load_i64 = _load("load_i64", types.int64, INT64)
load_i32 = _load("load_i32", types.int64, ir.IntType(32), "sext")
load_u32 = _load("load_u32", types.uint32, ir.IntType(32))
load_u16 = _load("load_u16", types.uint32, ir.IntType(16), "zext")
load_u8 = _load("load_u8", types.uint32, ir.IntType(8), "zext")


def _store(name: str, given: Any, stored: ir.Type, truncate: bool = False) -> Callable[..., Any]:
    """A store of the Numba type `given` as `stored`."""

    def store(typing_context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = builder.trunc(arguments[1], stored) if truncate else arguments[1]
            builder.store(value, builder.inttoptr(arguments[0], POINTER), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, given), generate

    store.__name__ = name
    return instruction(store)


store_f32 = _store("store_f32", types.float32, ir.FloatType())
store_i64 = _store("store_i64", types.int64, INT64)
store_u32 = _store("store_u32", types.uint32, ir.IntType(32))
store_u16 = _store("store_u16", types.uint32, ir.IntType(16), truncate=True)
store_u8 = _store("store_u8", types.uint32, ir.IntType(8), truncate=True)


@instruction
def float_of_bits(typing_context: Any, bits: Any) -> Any:
    """The float32 whose bits are the low 32 of an integer."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.trunc(arguments[0], ir.IntType(32)), ir.FloatType())

    return types.float32(types.int64), generate


@instruction
def bits_of_float(typing_context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@instruction
def bits_of_half(typing_context: Any, value: Any) -> Any:
    """The 16 bits of a float32 rounded to the nearest float16; nothing where the processor has no such instruction."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not host_has_half():
            return ir.IntType(32)(0)
        half = builder.fptrunc(arguments[0], ir.HalfType())
        return builder.zext(builder.bitcast(half, ir.IntType(16)), ir.IntType(32))

    return types.uint32(types.float32), generate


@instruction
def call_address(typing_context: Any, address: Any, arguments: Any) -> Any:
    """Call the C function of int64 arguments at an address; `arguments` is a tuple of int64."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [INT64] * arguments.count)
        function = builder.inttoptr(values[0], kind.as_pointer())
        builder.call(function, [builder.extract_value(values[1], i) for i in range(arguments.count)])
        return context.get_dummy_value()

    return types.void(types.int64, arguments), generate


# -- between threads --------------------------------------------------------------------------------------------------


@instruction
def atomic_load(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], INT64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


@instruction
def atomic_store(typing_context: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], builder.inttoptr(arguments[0], INT64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@instruction
def atomic_add(typing_context: Any, address: Any, value: Any) -> Any:
    """Add to an int64 and return what it was before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(arguments[0], INT64.as_pointer()), arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@instruction
def compare_exchange(typing_context: Any, address: Any, expected: Any, value: Any) -> Any:
    """Replace an int64 if it is `expected`; say whether it was."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], INT64.as_pointer())
        return builder.extract_value(builder.cmpxchg(pointer, *arguments[1:], "acq_rel", "acquire"), 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


@instruction
def fence(typing_context: Any) -> Any:
    """Every store before it is visible before any load after it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


# -- the processor and the operating system ---------------------------------------------------------------------------


def _external(builder: Any, name: str, result: ir.Type, *arguments: ir.Type) -> Any:
    """Declare a function that LLVM or the C library provides."""
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


def prefetch(builder: Any, pointer: Any, to_write: bool = False) -> None:
    """Ask for the cache line at a pointer (an LLVM value), into the second level, or for the right to write it, into
    the first; any address is fine."""
    number = ir.IntType(32)
    function = _external(builder, "llvm.prefetch.p0", ir.VoidType(), POINTER, number, number, number)
    write, locality = (1, 3) if to_write else (0, 2)
    builder.call(function, [pointer, number(write), number(locality), number(1)])


@instruction
def ask(typing_context: Any, address: Any) -> Any:
    """Ask for the cache line at an address, into the second level."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        prefetch(builder, builder.inttoptr(arguments[0], POINTER))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@instruction
def pause(typing_context: Any) -> Any:
    """Tell the processor that this is a spin loop."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if builder.module.triple.startswith("x86_64"):
            builder.call(_external(builder, "llvm.x86.sse2.pause", ir.VoidType()), [])
        return context.get_dummy_value()

    return types.void(), generate


@instruction
def yield_processor(typing_context: Any) -> Any:
    """Let another thread have this processor (`sched_yield`)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.call(_external(builder, "sched_yield", ir.IntType(32)), [])
        return context.get_dummy_value()

    return types.void(), generate


@instruction
def wait_event(typing_context: Any, descriptor: Any, buffer: Any) -> Any:
    """Block in `read` until an eventfd is signalled (or a signal arrives); `buffer` is 8 bytes. Returns bytes read."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        read = _external(builder, "read", INT64, ir.IntType(32), POINTER, INT64)
        descriptor = builder.trunc(arguments[0], ir.IntType(32))
        return builder.call(read, [descriptor, builder.inttoptr(arguments[1], POINTER), INT64(8)])

    return types.int64(types.int64, types.int64), generate


def _write_file(name: str, num_bytes: int, meaning: str) -> Callable[..., Any]:
    """`write` to a descriptor what lies at an address; returns the bytes written, negative where it failed."""

    def write_file(typing_context: Any, descriptor: Any, buffer: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            write = _external(builder, "write", INT64, ir.IntType(32), POINTER, INT64)
            descriptor = builder.trunc(arguments[0], ir.IntType(32))
            return builder.call(write, [descriptor, builder.inttoptr(arguments[1], POINTER), INT64(num_bytes)])

        return types.int64(types.int64, types.int64), generate

    write_file.__name__, write_file.__doc__ = name, meaning
    return instruction(write_file)


signal_event = _write_file("signal_event", 8, "Add the int64 at an address to an eventfd.")
write_byte = _write_file("write_byte", 1, "Write the byte at an address, to a pipe for instance.")


@instruction
def flush_denormals(typing_context: Any) -> Any:
    """Set this thread's rounding mode and flush-to-zero bits, so that every thread computes the same bits.

    0x9FC0: round to nearest, all exceptions masked, results (FTZ) and operands (DAZ) that are denormal become zero.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if builder.module.triple.startswith("x86_64"):
            slot = cgutils.alloca_once_value(builder, ir.IntType(32)(0x9FC0))
            load = _external(builder, "llvm.x86.sse.ldmxcsr", ir.VoidType(), POINTER)
            builder.call(load, [builder.bitcast(slot, POINTER)])
        return context.get_dummy_value()

    return types.void(), generate
