"""Runs a few lines of PTX on arrays, one element per thread: `evaluate("add.u32 o0, i0, i1;", [a, b], ["b32"])`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .counters import Counters
from .device import Device
from .scalars import UNSIGNED, Array, dtype_of, size_of

BLOCK = 128
HEADER = ".version 8.5\n.target sm_90\n.address_size 64\n"


def register_kind(array: Array) -> str:
    """The type of an input's register: floats stay floats, everything else is bits."""
    return {"f4": "f32", "f8": "f64"}.get(array.dtype.str[1:], f"b{8 * max(array.itemsize, 2)}")


def snippet(code: str, inputs: Sequence[str], outputs: Sequence[str], declare: str = "") -> str:
    """A kernel that loads i0, i1, ... (types `inputs`), runs `code`, and stores o0, o1, ... (types `outputs`).

    Parameters: the number of threads, then the input and output arrays. `code` may use the registers %tid (thread in
    the grid), `declare` is text in front of the kernel.
    """
    names = [(f"i{n}", kind) for n, kind in enumerate(inputs)] + [(f"o{n}", kind) for n, kind in enumerate(outputs)]
    params = ",\n".join([".param .u32 count", *(f".param .u64 p_{name}" for name, _ in names)])
    lines = [f".reg .{kind} {name};" for name, kind in names]
    lines += [".reg .b32 index, width, block;", ".reg .pred beyond;"]
    lines += ["mov.u32 index, %tid.x; mov.u32 width, %ntid.x; mov.u32 block, %ctaid.x;"]
    lines += ["mad.lo.u32 index, width, block, index;", "ld.param.u32 width, [count];"]
    lines += ["setp.ge.u32 beyond, index, width;", "@beyond ret;"]
    for name, kind in names:
        lines += [f".reg .b64 a_{name};", f"ld.param.u64 a_{name}, [p_{name}];"]
        lines += [f"mad.wide.u32 a_{name}, index, {size_of(kind)}, a_{name};"]
    lines += [f"ld.global.{kind} {name}, [a_{name}];" for name, kind in names if name[0] == "i"]
    lines += ["{", code, "}"]
    lines += [f"st.global.{kind} [a_{name}], {name};" for name, kind in names if name[0] == "o"]
    return HEADER + declare + f".visible .entry snippet({params})\n{{\n" + "\n".join(lines) + "\nret;\n}\n"


def evaluate(code: str, inputs: Sequence[Any], outputs: Sequence[str], declare: str = "") -> list[Array]:
    """The outputs, one array per entry of `outputs` (PTX types), as that type's dtype."""
    return run_snippet(code, inputs, outputs, declare)[0]


def run_snippet(
    code: str,
    inputs: Sequence[Any],
    outputs: Sequence[str],
    declare: str = "",
    device: Device | None = None,
    block: int = BLOCK,
) -> tuple[list[Array], Counters]:
    arrays = [np.ascontiguousarray(value) for value in inputs]
    count = len(arrays[0])
    device = device or Device(capacity_bytes=(1 << 16) + (len(arrays) + len(outputs)) * (8 * count + 1024))
    # 8-bit inputs go through 16-bit registers, which is the narrowest kind there is.
    arrays = [array.astype(UNSIGNED[2]) if array.itemsize == 1 else array for array in arrays]
    results = [device.empty(count, dtype_of(kind)) for kind in outputs]
    text = snippet(code, [register_kind(array) for array in arrays], outputs, declare)
    counters = device.run(text, -(-count // block), block, [count, *map(device.array, arrays), *results])
    return [device.read(result) for result in results], counters
