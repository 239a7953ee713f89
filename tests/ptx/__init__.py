"""A PTX interpreter in NumPy: runs, without a GPU, exactly the PTX that Numba-CUDA compiled, strictly and with counts.

    from tests.ptx import Device, compile_kernel

    kernel = compile_kernel(saxpy, "void(float32[::1], float32[::1], float32, int32)", cc=(9, 0))
    device = Device()
    x = device.array(np.arange(1000, dtype=np.float32))   # a NumPy array that lives in device memory
    y = device.empty(1000, np.float32)                    # poisoned: a kernel that reads it before writing fails
    counters = device.run(kernel, grid=8, block=128, args=(x, y, 2.0, 1000), shared_bytes=0)
    np.testing.assert_array_equal(device.read(y), ...)    # read() also fails on elements that nothing wrote
    assert counters.max_bank_ways <= 2 and counters.global_load_sectors == ...
    print(counters.summary()); print(counters.table())

`Device.run` also takes PTX text (one argument per parameter; an array gives its address) and a Numba kernel with
`signature=`. Arrays given to Numba kernels may be views (slices, reshapes) of device arrays; bf16 and fp8 data are
uint16 and uint8 arrays. All launches on one Device share its memory. Host code may use the arrays like any others, but
declares what it wrote with `device.wrote(array)` (or writes by `device.write(array, values)`); `Device(poison=False)`
waives that. `device.discard(array)` poisons again, `device.free(array)` makes later accesses an error.

Everything doubtful is an exception of `tests.ptx.errors` that names the instruction, its PTX line (and source line
with `lineinfo=True`), block and thread: UnknownInstruction, OutOfBounds, Misaligned, UnwrittenRead, PendingCopy
(cp.async not waited for), DataRace, BarrierError, ParticipationError, Trap, Timeout, LaunchError.

What it does not model: the approximate functions (ex2, rcp, ...) and the sums of mma are rounded better than on the
chip, so error bounds need room for a few units in the last place; NaN payloads; the order in which blocks and
colliding atomics run (here: in order); races on global memory; time. Not implemented, hence refused: barriers of part
of a block, mbarrier and bulk copies, clusters, textures, recursion, vector atomics.

Speed on one core of a small server: 20 to 130 million thread instructions a second with thousands of threads in
lockstep, a few million where every block diverges; about 2 ms to start a launch.

How it works, in the order to read: parser (text to tree), flatten (calls, scopes, parameters), flow (basic blocks and
scheduling order), decode (instructions to closures; the instructions_* modules and mma hold their meaning, floats the
arithmetic that NumPy lacks), machine (threads of many blocks in lockstep, divergence, meetings), memory, access and
races (what is checked), counters (what is counted), compile and device (the interface).
"""

from . import (  # these register the instructions
    instructions_async,
    instructions_bits,
    instructions_convert,
    instructions_float,
    instructions_memory,
    instructions_moves,
    instructions_warp,
    mma,
)
from .compile import Kernel, compile_kernel
from .counters import Counters
from .device import Device

INSTRUCTIONS = (
    instructions_async,
    instructions_bits,
    instructions_convert,
    instructions_float,
    instructions_memory,
    instructions_moves,
    instructions_warp,
    mma,
)

__all__ = ["Counters", "Device", "Kernel", "compile_kernel"]
