"""Machine code of kernels: `ptxas` and `nvdisasm` from NVIDIA's wheels (or the PATH), no GPU needed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


@dataclass(frozen=True)
class MachineCode:
    """What `ptxas -v` says of one kernel on one architecture, and its instructions."""

    registers: int
    spilled_bytes: int
    stack_bytes: int
    cubin: bytes

    def instructions(self) -> Counter[str]:
        """How often each instruction, modifiers included, stands in the code (`LDG.E.128.CONSTANT`, `HMMA...`)."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "kernel.cubin")
            path.write_bytes(self.cubin)
            text = _run(tool("nvdisasm"), "-c", str(path)).stdout
        return Counter(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]*)", text, re.MULTILINE))


def assemble(ptx: str, architecture: str, max_registers: int) -> MachineCode:
    """Machine code of PTX with one entry. Fails the test if `ptxas` refuses it."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        limit = f"-maxrregcount={max_registers}"
        report = _run(tool("ptxas"), "-v", limit, f"-arch={architecture}", str(source), "-o", str(target)).stderr
        numbers = [
            int(re.search(pattern, report)[1])  # type: ignore[index]
            for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes stack frame")
        ]
        return MachineCode(numbers[0], numbers[1], numbers[2], target.read_bytes())


def tool(name: str) -> str:
    """The path of one of NVIDIA's tools; skips the test where it is not installed."""
    wheels = Path(sysconfig.get_paths()["purelib"], "nvidia")
    for path in sorted(wheels.glob(f"*/bin/{name}")):
        return str(path)
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: {sys.executable} -m pip install nvidia-cuda-nvcc nvidia-cuda-nvdisasm")
    return found


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    return done
