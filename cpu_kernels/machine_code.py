"""From an LLVM module of ours to functions in memory, with the object code kept in a file."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from llvmlite import binding

_loaded: list[Any] = []  # compilers own the code: they live as long as the process

_DIGEST_SIZE = 32

FUSED_PAIRS = "+fast-dpwssd"
"""Without it LLVM takes VPDPWSSD apart again on some processors, for chains that are shorter alone: we have many."""


def host_machine() -> Any:
    """A target machine for this processor."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return machine(binding.get_host_cpu_name(), f"{binding.get_host_cpu_features().flatten()},{FUSED_PAIRS}")


def machine(cpu: str, features: str = "") -> Any:
    target = binding.Target.from_default_triple()
    return target.create_target_machine(cpu=cpu, features=features, opt=2, reloc="pic", codemodel="small")


def optimise(module: Any, target_machine: Any) -> Any:
    """The module, of either kind that llvmlite has, parsed and optimised. Our IR says what to vectorise and unroll:
    LLVM need not look for more."""
    module.triple = target_machine.triple
    parsed = binding.parse_assembly(str(module))
    tuning = binding.create_pipeline_tuning_options(speed_level=1)
    tuning.loop_vectorization = tuning.slp_vectorization = tuning.loop_unrolling = False
    passes = binding.create_pass_builder(target_machine, tuning)
    passes.getModulePassManager().run(parsed, passes)
    return parsed


def linked(functions: Iterable[Any]) -> Any:
    """One module of Numba's C functions, which use nothing of Python's, under their own names."""
    whole = binding.parse_assembly("")
    for function in functions:
        module = binding.parse_assembly(function.inspect_llvm())
        module.get_function(function.native_name).name = function.__name__
        whole.link_in(module)
    return whole


def load_functions(build: Callable[[], Any], names: Sequence[str], file: Path | None) -> dict[str, int]:
    """The addresses of `names`, from the object code in `file` if it is whole, else by building (and keeping) it."""
    code = _read(file) if file is not None else None
    if code is None:
        target_machine = host_machine()
        code = target_machine.emit_object(optimise(build(), target_machine))
        if file is not None:
            _write(file, code)
    compiler = binding.create_lljit_compiler(host_machine())
    library = binding.JITLibraryBuilder().add_object_img(code)
    for name in names:
        library.export_symbol(name)
    tracker = library.link(compiler, f"kvpool_{len(_loaded)}")
    _loaded.append((compiler, tracker))
    return {name: tracker[name] for name in names}


def _read(file: Path) -> bytes | None:
    """The object code in `file`; None if there is none, or not all of it."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    digest, code = content[:_DIGEST_SIZE], content[_DIGEST_SIZE:]
    return code if hashlib.blake2b(code, digest_size=_DIGEST_SIZE).digest() == digest else None


def _write(file: Path, code: bytes) -> None:
    """Keep `code` in `file`: all of it or nothing, whatever other processes do at the same time."""
    handle, name = tempfile.mkstemp(dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(hashlib.blake2b(code, digest_size=_DIGEST_SIZE).digest() + code)
        os.replace(name, file)
    except OSError:
        os.unlink(name)
        raise
