"""From PTX to machine code for one card, by NVIDIA's nvJitLink library: no driver needed, whatever its version.

(The driver could translate PTX too, but refuses PTX newer than itself; machine code of the same major version loads.)
"""

from __future__ import annotations

import importlib
from typing import Any

from .compiler import Kernel


def assemble(kernel: Kernel, compute_capability: tuple[int, int]) -> bytes:
    """The cubin of `kernel` for a card of this compute capability. Raises RuntimeError with the linker's words."""
    link: Any = importlib.import_module("cuda.bindings.nvjitlink")
    major, minor = compute_capability
    handle = link.create(1, [f"-arch=sm_{major}{minor}"])
    try:
        ptx = kernel.ptx.encode() + b"\0"
        link.add_data(handle, link.InputType.PTX, ptx, len(ptx), kernel.name)
        link.complete(handle)
        cubin = bytearray(link.get_linked_cubin_size(handle))
        link.get_linked_cubin(handle, cubin)
        return bytes(cubin)
    except link.nvJitLinkError as error:
        words = bytearray(link.get_error_log_size(handle))
        link.get_error_log(handle, words)
        raise RuntimeError(f"kernel {kernel.name} for sm_{major}{minor}: {words.decode(errors='replace')}") from error
    finally:
        link.destroy(handle)
